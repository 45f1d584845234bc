"""What lies in `features.dir` already, and whether it serves the recipe. Nothing here needs torch, so a rerun answers at once."""

from __future__ import annotations

from pathlib import Path

from data_prep.manifest import (
    ANSWERS,
    COUNTS,
    MANIFEST,
    PROBE,
    ROWS,
    UNFINISHED,
    Manifest,
    check_fingerprints,
    check_layers_stored,
    file_fault,
    find_manifest,
    mend_command,
    missing_layers,
)
from data_prep.progress import Progress
from recipes.errors import FeatureError, RecipeError
from recipes.head_blocks import check_layers
from recipes.schema import Recipe


def find_work(recipe: Recipe, folder: Path) -> tuple[Manifest | None, bool]:
    """The record of the store in `folder`, None where there is none, and whether anything is left to do.

    What is missing or damaged is struck from the record. From here until it is finished again, the store counts as half-written.

    Raises:
        FeatureError: the store was built for other settings.
    """
    manifest, whole = find_manifest(folder)
    if manifest is None:
        clear(folder)  # strays of a store whose manifest is gone
        return None, True
    check_fingerprints(manifest, recipe, folder)
    check_contents(manifest, whole, recipe, folder)
    faults = find_faults(folder, manifest, whole)
    for fault in faults:
        print(f"{fault}: it is made again")
    if whole and not faults and (manifest.features == "stored" or recipe.train.features == "online"):
        return manifest, False
    if whole:
        manifest.save(folder / UNFINISHED)
        (folder / MANIFEST).unlink()
    return manifest, True


def describe(manifest: Manifest, folder: Path) -> str:
    """A store in one line."""
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    states = f"layers {manifest.layers} and last_hidden" if manifest.features == "stored" else "tokens only"
    return f"{manifest.counts['rows']:,} rows, {manifest.counts['tokens']:,} tokens, {states}, {size / 1e9:.3g} GB"


def clear(folder: Path) -> None:
    """Remove a store's files, its manifest first; answers that the target wrote stay."""
    for pattern in (MANIFEST, UNFINISHED, ROWS, COUNTS, PROBE, "shard-*.safetensors", "*.safetensors.tmp", "*.json.tmp"):
        for file in folder.glob(pattern):
            if file.name != f"{ANSWERS}.settings.json.tmp":
                file.unlink()


def check_contents(manifest: Manifest, whole: bool, recipe: Recipe, folder: Path) -> None:
    """Stop where a store of the right data lacks a layer, or was left half-way to something else than the recipe asks for."""
    if manifest.features == "none":
        return  # states can be added to any store of tokens
    if recipe.train.features == "online":
        if not whole:
            raise FeatureError(
                f"{folder} is half-written: states were being stored, and train.features is now online. Finish them with "
                f"`{mend_command('train.features=stored')}`, or drop them with `{mend_command('--rebuild')}`."
            )
        return
    check_layers_stored(manifest, recipe, folder)
    if missing := sorted(set(wanted_layers(recipe, manifest.num_target_layers)) - set(manifest.layers)):
        raise FeatureError(missing_layers(manifest, missing, folder, f"features.layers is {recipe.features.layers}"))


def find_faults(folder: Path, manifest: Manifest, whole: bool) -> list[str]:
    """Strike from the record every listed file that is not there as it was finished, and say why.

    Shards of a whole store are looked at by size (each row is checked when it is read); those of a half-written one by checksum.
    """
    faults = []
    with Progress("verify", len(manifest.files) + len(manifest.shards), unit="files") as progress:
        for name, entry in list(manifest.files.items()):
            if fault := file_fault(folder / name, entry, checksum=True):
                faults.append(f"{folder / name} {fault}")
                del manifest.files[name]
            progress.add(items=1)
        for shard in manifest.shards:
            if shard.written is not None and (fault := file_fault(folder / shard.file, shard.written, checksum=not whole)):
                faults.append(f"{folder / shard.file} {fault}")
                shard.written = None
            progress.add(items=1)
    return faults


def wanted_layers(recipe: Recipe, num_layers: int) -> list[int]:
    """Layers to store: what the head reads, or what `features.layers` lists, which must cover it."""
    needed = recipe.head.feature_layers(num_layers)
    if recipe.features.layers == "auto":
        return needed
    listed = check_layers("features.layers", list(recipe.features.layers), num_layers)
    if missing := sorted(set(needed) - set(listed)):
        raise RecipeError(
            f"features.layers: {listed} lacks {missing}: the {recipe.method} head reads {needed}. Add them, or set it to auto."
        )
    return listed
