"""Checkpoints: private, exact, only for resume. What others see is the export.

`runs/<name>/step_000123/` is written by accelerate (weights and moments in float32, RNG of every rank, sampler
position) under a temporary name and renamed when whole, so a half-written one is never taken for a checkpoint.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import yaml
from accelerate import Accelerator
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from recipes.errors import HeadstartError, RecipeError
from recipes.schema import Recipe
from train.folders import swap_in

VOCAB_FILE = "draft_vocab.safetensors"  # in the run's folder: `ids` int64 [D], what row r of the draft LM head stands for

# What a resumed run may change: how long it runs and what it reports, never what it computes.
FREE = {
    "train": {
        "max_steps",
        "max_minutes",
        "epochs",
        "log_every",
        "eval_every",
        "save_every",
        "keep",
        "threads",
        "trackers",
        "dir",
        "micro_batch_tokens",
    },
    "features": {"dir", "batch_tokens"},
}


def whole(run_dir: Path) -> list[Path]:
    """All whole checkpoints, by step (names stop sorting at a million)."""
    found = [p for p in run_dir.glob("step_*") if p.is_dir() and p.name.removeprefix("step_").isdigit()]
    return sorted(found, key=lambda p: int(p.name.removeprefix("step_")))


def latest(run_dir: Path) -> Path | None:
    """The newest whole checkpoint, or None."""
    return found[-1] if (found := whole(run_dir)) else None


def save(accelerator: Accelerator, run_dir: Path, step: int, keep: int) -> Path:
    """Save everything a resume needs; all ranks call it. Keeps the newest `keep`.

    Raises:
        HeadstartError: it cannot be written (a full disk); the checkpoints before it are untouched.
    """
    final = run_dir / f"step_{step:06d}"
    partial = run_dir / f"{final.name}.tmp"
    if accelerator.is_main_process:
        shutil.rmtree(partial, ignore_errors=True)
    accelerator.wait_for_everyone()
    try:
        accelerator.save_state(str(partial))
    except (OSError, RuntimeError, SafetensorError) as e:  # torch and safetensors have their own types for a full disk
        free, reason = shutil.disk_usage(run_dir).free, (str(e) or type(e).__name__).splitlines()[0]
        raise HeadstartError(
            f"could not write the checkpoint {partial} ({free / 1e9:.3g} GB free): {reason}. Whole checkpoints are kept "
            f"({', '.join(p.name for p in whole(run_dir)) or 'there is none yet'}). Free some space and run the same command again, "
            f"or move {run_dir} to a larger disk and set train.dir."
        ) from e
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        swap_in(partial, final)
        for old in whole(run_dir)[:-keep]:
            shutil.rmtree(old)
    accelerator.wait_for_everyone()
    return final


def check_same_recipe(run_dir: Path, recipe: Recipe) -> None:
    """A run folder belongs to one recipe. Raises RecipeError naming the first key that differs, both values, and the remedy."""
    saved_file = run_dir / "recipe.yaml"
    if not saved_file.is_file() or latest(run_dir) is None:  # nothing trained is there yet that another value would spoil
        return
    saved, now = yaml.safe_load(saved_file.read_text()), yaml.safe_load(recipe.dump())
    for block in ("method", "target", "data", "features", "head", "objective", "train"):
        if (difference := _difference(saved.get(block), now.get(block), FREE.get(block, set()))) is not None:
            key, old, new = difference
            raise RecipeError(
                f"{run_dir} was trained with {block}{key}={old!r}, the recipe now says {new!r}. "
                f"Give this run a folder of its own (train.dir=runs/NAME), or delete {run_dir} to start over."
            )


def save_vocab(run_dir: Path, ids: Tensor) -> None:
    """Keep the target ids [D] of the draft vocabulary with the run: the store's counts, which chose them, may change."""
    save_file({"ids": ids.contiguous()}, run_dir / VOCAB_FILE)


def saved_vocab(run_dir: Path) -> Tensor | None:
    """The target ids [D] that this run's draft vocabulary was made of; None for a run that kept none."""
    return load_file(file)["ids"] if (file := run_dir / VOCAB_FILE).is_file() else None


def check_same_vocab(run_dir: Path, ids: Tensor) -> None:
    """Raises RecipeError where the rows now choose another draft vocabulary than the one whose checkpoints are in `run_dir`."""
    saved = saved_vocab(run_dir)
    if saved is None or latest(run_dir) is None:  # nothing trained is there yet that other ids would spoil
        return
    if other := len(set(ids.tolist()) - set(saved.tolist())):
        raise RecipeError(
            f"{run_dir} was trained with a draft vocabulary of {len(saved)} tokens, of which the rows, as they are now, replace {other}: "
            "rows of its LM head would mean other tokens. Bring back the features it was trained on (features.dir), or give this run a "
            f"folder of its own (train.dir=runs/NAME). `python -m train.export {run_dir}` still exports what was trained."
        )


def _difference(old: Any, new: Any, free: set[str]) -> tuple[str, Any, Any] | None:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted({*old, *new} - free):
            if (inner := _difference(old.get(key), new.get(key), set())) is not None:
                return f".{key}{inner[0]}", inner[1], inner[2]
        return None
    return None if old == new else ("", old, new)
