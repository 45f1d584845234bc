"""Reading an export folder: config.json, model.safetensors and headstart.json.

vLLM does not notice a missing tensor (VLLM_FORMATS §0), so names and shapes are checked here against what the head says
its config needs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from pathlib import Path
from pickle import UnpicklingError

import torch
from safetensors import safe_open
from torch import Tensor

from heads import head_class
from heads.embedded import resolve_target
from heads.protocol import Head
from heads.target import TargetParts
from heads.vocab import DraftVocab
from recipes.errors import ExportError, TargetError
from recipes.schema import Recipe, parse_recipe

META_FILE = "headstart.json"
PICKLES = ("pytorch_model.bin", "medusa_lm_head.pt")  # how published drafts come where not as safetensors


def read_meta(folder: Path) -> dict:
    """headstart.json of an export. Raises ExportError where there is none."""
    file = folder / META_FILE
    if not file.is_file():
        raise ExportError(
            f"{folder} holds no {META_FILE}: it is not an export of Headstart. Make one with `python -m train.export RUN_DIR`."
        )
    return json.loads(file.read_text())


def read_config(folder: Path) -> dict:
    """config.json of an export or a published draft."""
    file = folder / "config.json"
    if not file.is_file():
        raise ExportError(f"{folder} holds no config.json; give the folder of an exported or published draft")
    return json.loads(file.read_text())


def read_tensors(folder: Path, only: Collection[str] | None = None) -> dict[str, Tensor]:
    """Tensors of a folder's safetensors files, all or `only` these; without such files, of a published pickle (weights_only).

    Raises:
        ExportError: no weight file, a tensor that lies in two files, or a pickle that holds more than tensors.
    """
    tensors: dict[str, Tensor] = {}
    origin: dict[str, str] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as f:
            for name in f.keys():  # noqa: SIM118 (not a dictionary)
                if only is None or name in only:
                    if name in origin:
                        raise ExportError(f"{folder}: {name} is in {origin[name]} and in {file.name}; remove the file that is not meant")
                    tensors[name], origin[name] = f.get_tensor(name), file.name
    pickles = [folder / name for name in PICKLES if (folder / name).is_file()]
    if not tensors and pickles:
        try:
            tensors = torch.load(pickles[0], map_location="cpu", weights_only=True)
        except UnpicklingError as error:
            raise ExportError(f"{pickles[0]} is not a plain file of tensors and is not loaded: {str(error).splitlines()[0]}") from None
    if not tensors:
        raise ExportError(f"{folder} holds neither *.safetensors nor {' nor '.join(PICKLES)}")
    return tensors


def check_served(shapes: dict[str, tuple[int, ...]], tensors: dict[str, Tensor], where: str | Path) -> None:
    """Every tensor the server reads is there with its shape, finite and not empty, and nothing else is.

    Raises:
        ExportError: names what is missing, extra, of another shape, or not finite.
    """
    faults = [f"missing {name} {shape}" for name, shape in shapes.items() if name not in tensors]
    faults += [f"unexpected {name} {tuple(tensor.shape)}" for name, tensor in tensors.items() if name not in shapes]
    for name in shapes.keys() & tensors.keys():
        tensor = tensors[name]
        if tuple(tensor.shape) != shapes[name]:
            faults.append(f"{name} is {tuple(tensor.shape)}, the config needs {shapes[name]}")
        elif tensor.numel() == 0 or not bool(torch.isfinite(tensor.float()).all()):
            faults.append(f"{name} is empty or not finite")
    if faults:
        raise ExportError(f"{where}: tensors do not fit config.json:\n  " + "\n  ".join(sorted(faults)))


def rename_tensors(tensors: dict[str, Tensor], new_name: Callable[[str], str]) -> dict[str, Tensor]:
    """Tensors under new names. Raises ExportError where two of them would get the same one: which is meant cannot be told."""
    renamed: dict[str, Tensor] = {}
    origin: dict[str, str] = {}
    for name, tensor in tensors.items():
        new = new_name(name)
        if new in renamed:
            raise ExportError(f"the draft holds {new} twice, as {origin[new]} and as {name}; remove one of them")
        renamed[new], origin[new] = tensor, name
    return renamed


@torch.no_grad()
def copy_tensors(own: dict[str, Tensor], tensors: dict[str, Tensor], ignored: Collection[str] = ()) -> None:
    """Copy every tensor into the one of the same name in `own` (a state dict).

    Raises:
        ExportError: names every tensor that is missing, of another shape, or neither wanted nor `ignored`.
    """
    faults = [f"missing {name} {tuple(mine.shape)}" for name, mine in own.items() if name not in tensors]
    faults += [f"unknown {name} {tuple(tensor.shape)}" for name, tensor in tensors.items() if name not in own and name not in ignored]
    for name in own.keys() & tensors.keys():
        if tensors[name].shape != own[name].shape:
            faults.append(f"{name} is {tuple(tensors[name].shape)}, this head needs {tuple(own[name].shape)}")
    if faults:
        raise ExportError("the draft does not fit this head; check head.* against its config.json:\n  " + "\n  ".join(sorted(faults)))
    for name, mine in own.items():
        mine.copy_(tensors[name])


def same_values(theirs: Tensor, ours: Tensor) -> bool:
    """Whether a published tensor is the target's own, up to the rounding of half precision."""
    return theirs.shape == ours.shape and torch.allclose(theirs.float(), ours.float(), rtol=1e-2, atol=1e-3)


def check_borrowed(name: str, theirs: Tensor | None, own: Tensor) -> None:
    """Raises ExportError where a draft's file holds, as `theirs`, another tensor than the target's `own` that the head borrows."""
    if theirs is not None and not same_values(theirs, own):
        raise ExportError(
            f"{name} of the draft {tuple(theirs.shape)} is not the target's rows {tuple(own.shape)}: it was trained for another target, "
            "or with one of its own. This head borrows the target's; train one for this target."
        )


def served_vocab(tensors: dict[str, Tensor], vocab_size: int) -> DraftVocab:
    """The draft vocabulary that `d2t` offsets describe; without them, the whole one (B15)."""
    if "d2t" not in tensors:
        return DraftVocab(torch.arange(vocab_size), vocab_size)
    offsets = tensors["d2t"].long()
    return DraftVocab(offsets + torch.arange(len(offsets)), vocab_size)


def load_exported_head(folder: Path, target: TargetParts) -> tuple[Head, Recipe]:
    """Rebuild a head from its export, through the served names and nothing else.

    Returns:
        The head in evaluation mode, and the recipe it was trained with.

    Raises:
        ExportError: the export belongs to another target, or its tensors do not fit its config.
    """
    meta, config = read_meta(folder), read_config(folder)
    check_target(meta, target, folder)
    recipe = parse_recipe(meta["recipe"], source=str(folder / META_FILE))
    inside = recipe.head.inside_target  # then the folder holds the target as well
    tensors = {} if inside else read_tensors(folder)
    own = {"architecture": meta["architecture"]} if "architecture" in meta else {}  # of a draft that is a whole model
    head = head_class(recipe.method)(recipe.head, target, served_vocab(tensors, target.vocab_size), **own)
    shapes = head.served_shapes(config)
    if inside:
        tensors = read_tensors(folder, only=shapes)
    check_served(shapes, tensors, folder)
    head.load_served(tensors)
    if hasattr(head, "load_extra"):
        head.load_extra(folder)
    return head.eval(), recipe


def resolve_draft(path: str) -> Path:
    """The local folder of `head.init_from`: a folder, or a Hugging Face id. Raises TargetError where it is neither."""
    if Path(path).is_dir():
        return Path(path)
    try:
        return resolve_target(path)
    except TargetError as error:
        raise TargetError(str(error).replace("target.path", "head.init_from")) from None


def with_own_target(recipe: Recipe) -> Recipe:
    """The recipe with the target that its export was made for: Medusa-2 exports an adapted one beside the heads."""
    if recipe.method != "medusa2" or not (recipe.export_dir / META_FILE).is_file():
        return recipe
    path = read_meta(recipe.export_dir)["target"]["path"]
    return recipe.model_copy(update={"target": recipe.target.model_copy(update={"path": path, "revision": None})})


def check_target(meta: dict, target: TargetParts, folder: Path) -> None:
    """Raises ExportError where the export was made for another target than this one."""
    made_for = meta["target"]
    if made_for["hidden_size"] != target.hidden_size:
        raise ExportError(
            f"{folder} was made for a target of width {made_for['hidden_size']} ({made_for['path']}), "
            f"this one ({target.path}) has {target.hidden_size}"
        )
    if made_for["fingerprint"] != target.fingerprint:
        raise ExportError(
            f"{folder} was made for {made_for['path']} with fingerprint {made_for['fingerprint']}, "
            f"but {target.path} has {target.fingerprint}: train a head for this target, or point target.path at the other one"
        )
