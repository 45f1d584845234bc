"""From a trained head to the folder that vLLM loads, and the proof that both are the same.

    python -m train.export runs/smollm2-135m-eagle3 [--step 500] [--output DIR]
    python -m train.export --from PUBLISHED_DRAFT --recipe RECIPE [key=value …] [--output DIR]

The first form exports a checkpoint of a run; training does it by itself at its end. The second turns a published draft (EAGLE-1,
EAGLE-3, Medusa, P-EAGLE, DFlash, PARD; a folder with config.json) into an export of ours, to be measured or to start from
(head.init_from); the recipe says for which target and with which head.

The export is a pure function of the checkpoint. It is written under a temporary name, read back through the served
names, compared with the training module on stored features, and only then given its name.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file, save_file

from heads import LAST_HIDDEN
from heads.exported import META_FILE, check_served, load_exported_head, read_tensors
from heads.protocol import Head, WholeModel
from heads.target import DTYPES, TargetParts, TensorFiles, read_target
from recipes.errors import ExportError, HeadstartError
from recipes.schema import Recipe, load_recipe, parse_recipe
from train import checkpoint
from train.folders import partial_of, swap_in
from train.inside_target import prove_same_logits, write_inside_target
from train.published import check_same_computation, published_config
from train.start import make_head, open_source


def export_head(recipe: Recipe, head: Head, target: TargetParts, source: Any, figures: dict, folder: Path) -> Path:
    """Write the served form of `head` and check it against `head` itself on stored features.

    Raises:
        ExportError: a tensor is missing, extra, misshapen or not finite, or the re-read export drafts other tokens.
    """
    head = head.eval()
    dtype = DTYPES[recipe.target.dtype]
    inside = recipe.head.inside_target
    replaced = TensorFiles(target.path).where if inside else {}  # they keep their types: experts' biases are float32 in any target
    tensors = {
        name: (t.to(dtype) if t.is_floating_point() and name not in replaced else t).detach().cpu().contiguous().clone()
        for name, t in head.served_tensors().items()
    }
    config = head.served_config() | ({} if inside else {"dtype": recipe.target.dtype})
    check_served(head.served_shapes(config), tensors, folder)
    partial = partial_of(folder)
    if inside:
        if write_inside_target(target.path, partial, tensors, config):
            prove_same_logits(partial, source, dtype)
    else:
        save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
        (partial / "config.json").write_text(json.dumps(config, indent=2, default=str) + "\n")
    meta = {
        "format": 1,
        "method": recipe.method,
        "recipe": recipe.model_dump(mode="json"),
        "target": {
            "path": recipe.target.path,
            "fingerprint": target.fingerprint,
            "hidden_size": target.hidden_size,
            "num_layers": target.num_layers,
        },
        "layers": recipe.head.feature_layers(target.num_layers),
        "trained_max_length": recipe.data.max_length,
        "speculative_config": head.speculative_config(),
        "llm_kwargs": getattr(head, "llm_kwargs", dict)(),
        "training": figures,
        "versions": {name: _version(name) for name in ("headstart", "torch", "transformers")},
        "date": date.today().isoformat(),
    }
    if isinstance(head, WholeModel):
        meta["architecture"] = head.architecture()
        head.save_extra(partial)
    (partial / META_FILE).write_text(json.dumps(meta, indent=2) + "\n")
    (partial / "README.md").write_text(_model_card(recipe, meta, config))
    written = load_exported_head(partial, target)[0]
    with rounded_as(head, written, dtype):
        agreement = compare(head, written, source, meta["layers"])
    floor = 1.0 if dtype == torch.float32 else 0.9  # a near tie in a dozen drafts, where an LM head is written with more rows than it has
    if agreement < floor:
        raise ExportError(
            f"{partial}: the export read back agrees with the trained head on {agreement:.1%} of drafts "
            f"(needed {floor:.0%}); it is left there to look at"
        )
    return swap_in(partial, folder)


@contextmanager
def rounded_as(head: Head, written: Head, dtype: torch.dtype) -> Iterator[None]:
    """Inside, parameters of `head` that were written rounded to `dtype` have the rounded values: rounding is no fault of the export."""
    own, device = list(head.parameters()), next(head.parameters()).device
    saved = [p.data for p in own]
    for p, q in zip(own, written.parameters(), strict=True):
        if p.shape == q.shape and torch.equal(p.data.to(dtype).float().cpu(), q.data.float()):
            p.data = q.data.to(device, p.dtype)
    try:
        yield
    finally:
        for p, data in zip(own, saved, strict=True):
            p.data = data


@torch.no_grad()
def compare(head: Head, other: Head, source: Any, layers: list[int], rows: int = 2, depth: int = 3) -> float:
    """Share of equal drafts of two heads on stored rows, drafting `depth` tokens at a few positions of each."""
    equal = total = 0
    device = next(head.parameters()).device
    first = 0 if getattr(head, "eats_first_token", False) else 1
    depth = min(depth, head.block.max_depth or depth)  # type: ignore[union-attr]
    picked = source.supervised.nonzero()[:rows, 0].tolist()
    for number in picked:
        row = source.read(number, layers)
        ids, n = row.input_ids, len(row.input_ids)
        for end in {n // 2, n - 1} - {0}:
            # Entries 0..end-1 are committed, each paired with the token after it; a draft that is a whole model eats token 0 too.
            drafts = []
            for module, where in ((head, device), (other, torch.device("cpu"))):
                hidden = {layer: h[:end].to(where, torch.float32) for layer, h in (row.hidden | {LAST_HIDDEN: row.last_hidden}).items()}
                drafts.append(
                    module.propose(
                        hidden,
                        ids[first : end + 1].to(where),
                        torch.arange(end, device=where),
                        module.new_cache(),
                        depth,
                        lambda logits: logits.argmax(-1),
                    ).cpu()
                )
            equal += int((drafts[0] == drafts[1]).sum())
            total += depth
    return equal / max(total, 1)


def load_export_into(head: Head, folder: Path) -> None:
    """Start a head from an export of ours or a published draft (`head.init_from`).

    Rows of the draft LM head are matched by target token; tokens the other draft lacks keep the target's rows.

    Raises:
        ExportError: tensors are missing or of another shape, or config.json says that they compute something else.
    """
    if not isinstance(head, WholeModel) and (folder / "config.json").is_file():  # a whole model takes its architecture from there
        check_same_computation(head, published_config(folder), folder)
    head.load_served(read_tensors(folder))
    if isinstance(head, WholeModel):
        head.load_extra(folder)


def export_run(run_dir: Path, step: int | None, output: Path | None) -> Path:
    """Export a checkpoint of a run. Raises ExportError where there is none."""
    file = run_dir / "recipe.yaml"
    if not file.is_file():
        raise ExportError(f"{run_dir} holds no recipe.yaml; give a run folder such as runs/smollm2-135m-eagle3")
    recipe = parse_recipe(yaml.safe_load(file.read_text()), source=str(file))
    folder = run_dir / f"step_{step:06d}" if step is not None else checkpoint.latest(run_dir)
    if folder is None or not folder.is_dir():
        raise ExportError(
            f"no checkpoint {folder or ''} in {run_dir}; there are: {', '.join(p.name for p in sorted(run_dir.glob('step_*'))) or 'none'}"
        )
    target = read_target(recipe.target)
    source = open_source(recipe)
    head: Any = make_head(recipe, target, source, checkpoint.saved_vocab(run_dir))
    if not (folder / "model.safetensors").is_file():
        raise ExportError(
            f"{folder} holds no model.safetensors: it is not whole, or DeepSpeed wrote it in pieces of its own. Training exports at its "
            "end: run its command again, which goes on from there, or exports a run that is finished."
        )
    saved = load_file(folder / "model.safetensors")
    missing, unexpected = head.load_state_dict(
        {k.removeprefix("head."): v for k, v in saved.items() if k.startswith("head.")}, strict=False
    )
    if missing or unexpected:
        raise ExportError(f"{folder}: checkpoint does not fit the head; missing {missing}, unexpected {unexpected}")
    figures, output = {"checkpoint": folder.name}, output or recipe.export_dir
    if recipe.method == "medusa2":
        from train.medusa2 import Medusa2Objective

        objective = Medusa2Objective(head, target, recipe.objective)  # type: ignore[arg-type]
        objective.load_state_dict(saved)
        objective.export(recipe, source, figures, output)
        return output
    return export_head(recipe, head, target, source, figures, output)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _model_card(recipe: Recipe, meta: dict, config: dict) -> str:
    """README.md of the export: what it is, how to load it, what training measured."""
    inside = recipe.head.inside_target
    served = json.dumps(meta["speculative_config"] | ({} if inside else {"model": "THIS_FOLDER"}) | {"num_speculative_tokens": 3})
    overrides = meta["llm_kwargs"].get("hf_overrides")
    lines = [
        f"# {recipe.name}",
        "",
        f"A {recipe.method} draft head for `{recipe.target.path}`, trained with Headstart on {meta['date']}.",
        "",
    ]
    if reason := recipe.head.not_served:  # vLLM would load it and run something else
        lines += [f"Not for vLLM: {reason}", ""]
    else:
        command = f"vllm serve {'THIS_FOLDER' if inside else 'TARGET'} --speculative-config '{served}'"
        lines += ["```", command + (f" --hf-overrides '{json.dumps(overrides)}'" if overrides else ""), "```", ""]
    if al := (meta["training"].get("validation") or {}).get("al"):
        lines.append(
            "Estimated on held-out rows (AL~, bonus token included; only vLLM's own count is AL): "
            + ", ".join(f"k={k} {v:.3f}" for k, v in al.items())
        )
        lines.append("")
    lines += [f"Trained on rows of at most {recipe.data.max_length} tokens. The resolved recipe is in {META_FILE}.", ""]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    """The command line: export a run, or convert a published draft."""
    parser = argparse.ArgumentParser(
        prog="python -m train.export", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("run_dir", nargs="?", type=Path, help="the run folder, runs/NAME; its own recipe.yaml is read")
    parser.add_argument("--step", type=int, help="which checkpoint of the run, for instance 500 for step_000500 (default: the newest)")
    parser.add_argument("--from", dest="published", type=Path, metavar="FOLDER", help="a published draft to convert, instead of a run")
    parser.add_argument(
        "--recipe",
        nargs="+",
        metavar=("RECIPE", "key=value"),
        help="with --from: the recipe of the published draft's target and head, and values to override, for instance head.num_heads=3",
    )
    parser.add_argument("--output", type=Path, metavar="DIR", help="the folder to write (default: the recipe's export.dir)")
    args = parser.parse_args(argv)
    try:
        if args.published:
            if not args.recipe:
                raise ExportError("--from needs --recipe RECIPE: which target and head shape the published draft is for")
            from train.convert import convert

            folder = convert(args.published, load_recipe(args.recipe[0], args.recipe[1:]), args.output)
        elif args.run_dir:
            folder = export_run(args.run_dir, args.step, args.output)
        else:
            raise ExportError("give a run folder, or --from FOLDER --recipe RECIPE")
    except HeadstartError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    print(f"exported to {folder}")


if __name__ == "__main__":
    main()
