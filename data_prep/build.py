"""The stages of `python -m data_prep`: answers → rows → token counts → states and probe → manifest. Each resumes or is skipped."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from data_prep.extract import extract_shards, extraction_dtype, load_extraction_model, plan_shards, probe_row
from data_prep.manifest import (
    COUNTS,
    MANIFEST,
    PROBE,
    ROWS,
    STATES,
    UNFINISHED,
    Manifest,
    ShardEntry,
    fingerprints,
    mend_command,
    package_versions,
    write_atomically,
)
from data_prep.regenerate import regenerate_recipe
from data_prep.render import chat_tokenizer
from data_prep.rows import make_rows
from data_prep.status import wanted_layers
from data_prep.stop import Stop
from data_prep.store import CODECS, Rows, write_tensors
from heads.precision import in_bf16
from heads.target import text_config
from recipes.errors import DataError, FeatureError
from recipes.schema import Recipe


def build(recipe: Recipe, manifest: Manifest | None, folder: Path, stop: Stop) -> Manifest:
    """Bring the store in `folder`, of which `manifest` tells what is there, to what the recipe asks for.

    Raises:
        FeatureError: the disk is full, or the rows are lost and cannot be made again.
        DataError: no usable row.
        Stopped: the user interrupted; everything finished is on disk.
    """
    manifest = make_tokens(recipe, manifest, folder)
    make_states(recipe, manifest, folder, stop)
    write_atomically(folder / "recipe.yaml", lambda tmp: tmp.write_text(recipe.dump(), encoding="utf-8"))
    manifest.save(folder / MANIFEST)
    (folder / UNFINISHED).unlink(missing_ok=True)
    return manifest


def make_tokens(recipe: Recipe, manifest: Manifest | None, folder: Path) -> Manifest:
    """Answers, rows and token counts; returns the record of the store, which lies in `unfinished.json` from here on."""
    if manifest is not None and {ROWS, COUNTS} <= manifest.files.keys():
        return manifest
    sources = [str(regenerate_recipe(recipe))] if recipe.data.regenerate is not None else recipe.data.prompts
    tokenizer = chat_tokenizer(recipe.target, recipe.data.chat_template, recipe.data.template_kwargs)
    config = text_config(recipe.target)
    wanted_layers(recipe, config.num_hidden_layers)  # a wrong list fails before the work, not after it
    rows, summary = make_rows(sources, recipe.data, tokenizer)
    print(summary.text())
    if (top := int(rows.input_ids.max())) >= config.vocab_size:
        raise DataError(
            f"{recipe.target.path}: the tokenizer gives id {top}, but config.json says vocab_size={config.vocab_size}: they do not belong "
            "together. Give target.path a folder whose tokenizer is the model's own."
        )
    if manifest is None:
        manifest = Manifest(
            command=mend_command(),
            fingerprints=fingerprints(recipe),
            versions=package_versions(),
            num_target_layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            **summary._asdict(),
        )
    entry = rows.save(folder / ROWS)
    if manifest.rows_crc32 not in (None, entry.crc32):
        raise FeatureError(
            f"{folder / ROWS} was lost, and the data now renders to other rows (checksum {entry.crc32:08x}) than the shards belong to "
            f"({manifest.rows_crc32:08x}). Rebuild the store: `{mend_command('--rebuild')}`"
        )
    manifest.rows_crc32 = entry.crc32
    manifest.files[ROWS] = entry
    manifest.files[COUNTS] = write_tensors(folder / COUNTS, {"counts": rows.token_counts(config.vocab_size)})
    manifest.save(folder / UNFINISHED)
    return manifest


def make_states(recipe: Recipe, manifest: Manifest, folder: Path, stop: Stop) -> None:
    """The probe, and the target's states in shards unless training is to run the target itself."""
    rows = Rows.load(folder / ROWS)
    stored = recipe.train.features == "stored"
    dtype = str(extraction_dtype(recipe.target)).removeprefix("torch.")
    bf16_products = in_bf16(recipe.features.precision) and not torch.cuda.is_available()
    products = "bfloat16" if bf16_products else dtype
    if stored and manifest.features == "none":
        manifest.features = "stored"
        manifest.layers = wanted_layers(recipe, manifest.num_target_layers)
        manifest.dtypes = {"hidden": recipe.features.codec, "last_hidden": dtype, "products": products}
        manifest.fingerprints |= {key: fingerprints(recipe)[key] for key in STATES}
        manifest.shards = planned(rows, recipe.features.shard_tokens)
        manifest.save(folder / UNFINISHED)
    todo = [shard for shard in manifest.shards if shard.written is None]
    if todo:
        check_space(manifest, todo, folder)
        for what, here in (("last_hidden", dtype), ("products", products)):
            if manifest.dtypes[what] != here:
                raise FeatureError(
                    f"{folder}: its finished shards hold {what} in {manifest.dtypes[what]}, this machine computes in {here} "
                    f"(target.dtype on a GPU; on a CPU float32, its products as features.precision says). Go on where it was begun, "
                    f"or rebuild it: `{mend_command('--rebuild')}`"
                )
    if not todo and PROBE in manifest.files:
        return
    model = load_extraction_model(recipe.target, bf16_products)
    if PROBE not in manifest.files:
        manifest.files[PROBE] = write_tensors(folder / PROBE, probe_row(model, rows.input_ids[rows.span(0)].long()))
        manifest.save(folder / UNFINISHED)
    if todo:
        extract_shards(
            model, rows, todo, manifest.layers, CODECS[manifest.dtypes["hidden"]], recipe.features.batch_tokens, folder,
            on_written=lambda: manifest.save(folder / UNFINISHED), stop=stop,
        )  # fmt: skip


def planned(rows: Rows, shard_tokens: int) -> list[ShardEntry]:
    """Which rows go into which shard; recorded at once, so that a resumed store has the same shards whatever the recipe says by then."""
    offsets = rows.row_offsets.tolist()
    plan = plan_shards(rows.lengths.tolist(), shard_tokens)
    return [
        ShardEntry(file=f"shard-{i:05d}.safetensors", first_row=first, num_rows=n, num_tokens=offsets[first + n] - offsets[first])
        for i, (first, n) in enumerate(plan)
    ]


def check_space(manifest: Manifest, todo: list[ShardEntry], folder: Path) -> None:
    """Print what the shards that are still to be written will take, and stop where the disk cannot hold it."""
    bytes_of = {"f32": 4, "float32": 4, "bf16": 2, "bfloat16": 2, "float16": 2}
    tokens, size, layers = sum(shard.num_tokens for shard in todo), manifest.hidden_size, len(manifest.layers)
    per_token = size * (layers * bytes_of[manifest.dtypes["hidden"]] + bytes_of[manifest.dtypes["last_hidden"]]) + 5  # id and mask
    free = shutil.disk_usage(folder).free
    finished = f" ({len(manifest.shards) - len(todo)} are finished)" if len(todo) < len(manifest.shards) else ""
    print(
        f"to write       {tokens:,} tokens × {size} × ({layers} layers in {manifest.dtypes['hidden']} + last_hidden in "
        f"{manifest.dtypes['last_hidden']}) = {tokens * per_token / 1e9:.3g} GB in {len(todo)} shards{finished}; {free / 1e9:.3g} GB free"
    )
    if tokens * per_token > free:
        raise FeatureError(
            f"{folder}: {tokens * per_token / 1e9:.3g} GB are needed and {free / 1e9:.3g} GB are free. Set features.dir on a larger disk, "
            f"features.codec: bf16, fewer data.max_rows, or train.features: online (nothing is stored)."
        )
