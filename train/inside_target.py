"""Exports that are the whole target with the head inside: everything else stays as it is, byte for byte.

Weight files that hold none of the head's tensors are linked (copied across file systems); one that does is written anew
with its other tensors as they were; tensors that the target lacks go into the single weight file, or into a new shard.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from heads.target import TensorFiles
from recipes.errors import ExportError

INDEX = "model.safetensors.index.json"
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack")
NEW_SHARD = "model-headstart.safetensors"


def write_inside_target(target: Path, folder: Path, tensors: dict[str, Tensor], config: dict) -> bool:
    """Write the target into the empty `folder`, with `tensors` replaced or added and this config.json.

    A replaced tensor keeps the type it has in the target's files. Weights in other formats than safetensors are left out:
    they would hold the old tensors.

    Returns:
        Whether config.json is another one than the target's.

    Raises:
        ExportError: what was written differs from the target in anything else.
    """
    where = TensorFiles(target).where
    files = sorted(set(where.values()))
    added = {name: tensor for name, tensor in tensors.items() if name not in where}
    for source in sorted(target.iterdir()):
        if source.is_file() and source.suffix not in WEIGHTS and source.name not in (INDEX, "headstart.json", "README.md"):
            shutil.copy2(source, folder / source.name)
    for name in files:
        replaced = {key: tensor for key, tensor in tensors.items() if where.get(key) == name}
        new = added if len(files) == 1 else {}
        if replaced or new:
            old, metadata = _read(target / name)
            save_file(old | {key: _as(tensor, old[key]) for key, tensor in replaced.items()} | new, folder / name, metadata=metadata)
        else:
            _link(target / name, folder / name)
    if len(files) > 1 and added:
        save_file(added, folder / NEW_SHARD, metadata={"format": "pt"})
    if (target / INDEX).is_file():
        index = json.loads((target / INDEX).read_text())
        index["weight_map"] = where | dict.fromkeys(added, NEW_SHARD if len(files) > 1 else files[0])
        if "total_size" in index.get("metadata", {}):
            index["metadata"]["total_size"] += sum(tensor.nbytes for tensor in added.values())
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    check_nothing_else_changed(target, folder, set(tensors))
    config = json.loads(json.dumps(config, default=str))
    if config == json.loads((target / "config.json").read_text()):
        return False
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return True


def check_nothing_else_changed(target: Path, folder: Path, ours: set[str]) -> None:
    """Raises ExportError where `folder` lacks a tensor of `target`, or has one besides `ours` that is new or of other bytes."""
    before, after = _names(target), _names(folder)
    faults = [f"missing {name}" for name in sorted((before.keys() | ours) - after.keys())]
    faults += [f"unexpected {name}" for name in sorted(after.keys() - before.keys() - ours)]
    for name in sorted(set(before.values()) & set(after.values())):
        if (folder / name).samefile(target / name):
            continue
        keys = [key for key, file in before.items() if file == name == after.get(key) and key not in ours]
        with safe_open(target / name, "pt") as old, safe_open(folder / name, "pt") as new:
            faults += [f"changed {key}" for key in keys if not _same_bytes(old.get_tensor(key), new.get_tensor(key))]
    if faults:
        raise ExportError(f"{folder} is not {target} with the head inside:\n  " + "\n  ".join(faults[:20]))


@torch.no_grad()
def prove_same_logits(folder: Path, source: Any, dtype: torch.dtype) -> float:
    """Run the written target on the store's first row and compare with the target's own predictions there.

    Returns:
        The largest difference of the log-sum-exp of logits over the row's positions.

    Raises:
        ExportError: another next token at any position (one in fifty in half precision), or logits that differ by more than rounding.
    """
    level = logging.get_verbosity()
    logging.set_verbosity_error()  # the head's tensors are none that transformers knows
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    finally:
        logging.set_verbosity(level)
    logits = model(source.read(0, []).input_ids[None]).logits[0].float()
    agreement = (logits.argmax(-1) == source.probe["argmax"]).float().mean().item()
    apart = (logits.logsumexp(-1) - source.probe["logsumexp"]).abs().max().item()
    exact = dtype == torch.float32
    if agreement < (1.0 if exact else 0.98) or apart > (1e-2 if exact else 0.5):
        raise ExportError(
            f"{folder}: the rewritten target predicts the target's own next token at {agreement:.1%} of the probe row's positions, and "
            f"its logits are up to {apart:.3g} apart: config.json does not describe the target's layers. It is left there to look at."
        )
    return apart


def _read(file: Path) -> tuple[dict[str, Tensor], dict[str, str] | None]:
    """All tensors of a file, and its metadata."""
    with safe_open(file, "pt") as f:
        return {name: f.get_tensor(name) for name in f.keys()}, f.metadata()  # noqa: SIM118 (not a dictionary)


def _as(tensor: Tensor, old: Tensor) -> Tensor:
    if tensor.shape != old.shape:
        raise ExportError(f"a tensor of {tuple(tensor.shape)} cannot replace one of {tuple(old.shape)} in the target's files")
    return tensor.to(old.dtype).contiguous()


def _link(source: Path, destination: Path) -> None:
    try:
        os.link(source.resolve(), destination)
    except OSError:
        shutil.copy2(source, destination)


def _same_bytes(a: Tensor, b: Tensor) -> bool:
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))
    )


def _names(folder: Path) -> dict[str, str]:
    """Tensor → file, from the files themselves and not from an index that might be wrong."""
    names: dict[str, str] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as f:
            names |= dict.fromkeys(f.keys(), file.name)
    return names
