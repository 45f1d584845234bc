"""The feature store (DESIGN §4): token rows, shards of target states, token counts and a probe, under one manifest.

    features/<name>/
      rows.safetensors           every row's tokens and mask; enough for train.features: online
      shard-00000.safetensors …  consecutive rows with the target's states at every token
      token_counts.safetensors   `counts` int64 [V]: supervised tokens of the training rows
      probe.safetensors          the target's own predictions on the first row, for the load-time self-test
      manifest.json              written last

A shard holds `input_ids` int32 [N], `loss_mask` uint8 [N], `row_offsets` int64 [R+1], `hidden.<i>` [N, H] for each kept layer,
`last_hidden` [N, H], and `row_crc32` int64 [R, 1 + layers] (`last_hidden` first, then the layers ascending), so that every
row that training reads is known to be what extraction wrote. Rows follow each other without padding.

`last_hidden` is never rounded, whatever `features.codec` says of the layers: teacher logits come from it. In bf16, SmolLM2's
float32 states would change the target's own next token at 0.16 % of the positions (6,800 tokens, 2026-11-29); a target that
computes in bf16 gives bf16 states, and these are kept as they are.

Shapes: N tokens, R rows, H hidden size, V target vocabulary, n tokens of one row.
"""

from __future__ import annotations

import bisect
import zlib
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from data_prep.manifest import (
    COUNTS,
    MANIFEST,
    PROBE,
    ROWS,
    FileEntry,
    Manifest,
    check_fingerprints,
    check_layers_stored,
    file_fault,
    find_manifest,
    mend_command,
    missing_layers,
    write_atomically,
)
from recipes.errors import FeatureError
from recipes.schema import Recipe

CODECS = {"f32": torch.float32, "bf16": torch.bfloat16}
OPEN_SHARDS = 64  # memory maps kept per process


@dataclass(frozen=True)
class RowFeatures:
    """One row: tokens, mask, and the target's states at every token (stored dtypes)."""

    input_ids: Tensor  # [n] int64
    loss_mask: Tensor  # [n] bool
    hidden: dict[int, Tensor]  # layer → [n, H]
    last_hidden: Tensor  # [n, H], after the final norm


@dataclass(frozen=True)
class Rows:
    """Every row's tokens and mask, one after the other, and two flags a row."""

    input_ids: Tensor  # [N] int32
    loss_mask: Tensor  # [N] uint8
    row_offsets: Tensor  # [R+1] int64
    validation: Tensor  # [R] uint8: held out
    greedy: Tensor  # [R] uint8: the answer is known to be the target's greedy decoding

    @classmethod
    def load(cls, path: Path) -> Rows:
        """Map a rows file into memory."""
        with safe_open(path, "pt") as f:
            return cls(**{name: f.get_tensor(name) for name in cls.__dataclass_fields__})

    def save(self, path: Path) -> FileEntry:
        return write_tensors(path, {name: getattr(self, name) for name in self.__dataclass_fields__})

    def __len__(self) -> int:
        return len(self.validation)

    @property
    def lengths(self) -> Tensor:
        """[R] int64, tokens."""
        return self.row_offsets.diff()

    @property
    def supervised(self) -> Tensor:
        """[R] int64, supervised tokens."""
        return torch.from_numpy(np.add.reduceat(self.loss_mask.numpy(), self.row_offsets[:-1].numpy(), dtype=np.int64))

    def span(self, row: int) -> slice:
        """Where a row's tokens lie."""
        return slice(int(self.row_offsets[row]), int(self.row_offsets[row + 1]))

    def token_counts(self, vocab_size: int) -> Tensor:
        """[V] int64: how often each token is supervised in training rows."""
        training = torch.repeat_interleave(self.validation == 0, self.lengths)
        return torch.bincount(self.input_ids[training & (self.loss_mask == 1)], minlength=vocab_size)


class FeatureStore:
    """A whole store, opened for reading. Safe to share with forked or spawned data-loader workers."""

    def __init__(self, folder: Path, manifest: Manifest):
        self.folder, self.manifest = folder, manifest
        self.rows = Rows.load(folder / ROWS)
        self.lengths = self.rows.lengths  # [R] int64
        self.supervised = self.rows.supervised  # [R] int64
        self.validation = self.rows.validation.bool()  # [R]
        self.greedy = self.rows.greedy.bool()  # [R]
        self._first_rows = [shard.first_row for shard in manifest.shards]
        self._shards: OrderedDict[int, _Shard] = OrderedDict()

    @classmethod
    def open(cls, folder: str | Path, recipe: Recipe) -> FeatureStore:
        """Open a finished store that fits the recipe.

        Raises:
            FeatureError: no store, a half-written one, built for other settings (B12), a layer the head reads is not in it,
                or a file is missing or has another size. The message names the remedy.
        """
        folder = Path(folder)
        manifest, whole = find_manifest(folder)
        if manifest is None:
            raise FeatureError(f"no feature store in {folder}. Build it: `{mend_command()}`")
        if not whole:
            done = sum(shard.written is not None for shard in manifest.shards)
            raise FeatureError(f"{folder} is half-written ({done} of {len(manifest.shards)} shards). Finish it: `{mend_command()}`")
        check_fingerprints(manifest, recipe, folder)
        if recipe.train.features == "stored":
            check_layers_stored(manifest, recipe, folder)
        for name, entry in manifest.files.items():
            if fault := file_fault(folder / name, entry, checksum=True):  # a few bytes a token; shards are checked row by row
                raise _corrupt(folder / name, fault)
        for shard in manifest.shards:
            assert shard.written is not None, "a manifest lists finished shards only"
            if fault := file_fault(folder / shard.file, shard.written, checksum=False):
                raise _corrupt(folder / shard.file, fault)
        return cls(folder, manifest)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def token_counts(self) -> Tensor:
        """[V] int64: supervised tokens of the training rows."""
        with safe_open(self.folder / COUNTS, "pt") as f:
            return f.get_tensor("counts")

    @property
    def probe(self) -> dict[str, Tensor]:
        """The target's own predictions on row 0: `argmax` int64 [n], `max_logit` and `logsumexp` float32 [n]."""
        with safe_open(self.folder / PROBE, "pt") as f:
            return {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118  (not a dict)

    def tokens(self, row: int) -> tuple[Tensor, Tensor]:
        """`input_ids` [n] int64 and `loss_mask` [n] bool of a row."""
        span = self.rows.span(row)
        return self.rows.input_ids[span].long(), self.rows.loss_mask[span].bool()

    def read(self, row: int, layers: list[int]) -> RowFeatures:
        """A row with its stored states; only the bytes of this row and these layers are read.

        Raises:
            FeatureError: a layer is not stored, or the row's bytes are not those that were written (names the shard).
        """
        if self.manifest.features == "none":
            raise FeatureError(f"{self.folder} holds tokens only. Add the states: `{mend_command('train.features=stored')}`")
        if missing := sorted(set(layers) - set(self.manifest.layers)):
            raise FeatureError(missing_layers(self.manifest, missing, self.folder, f"layers {layers} are read"))
        input_ids, loss_mask = self.tokens(row)
        index = bisect.bisect_right(self._first_rows, row) - 1
        if (shard := self._shards.get(index)) is None:
            shard = self._shards[index] = _Shard(self.folder / self.manifest.shards[index].file, self.manifest)
            if len(self._shards) > OPEN_SHARDS:
                self._shards.popitem(last=False)
        self._shards.move_to_end(index)
        last_hidden, *hidden = shard.read(row - self._first_rows[index], input_ids, layers)
        return RowFeatures(input_ids, loss_mask, dict(zip(layers, hidden, strict=True)), last_hidden)

    def read_rows(self, rows: list[int], layers: list[int]) -> list[RowFeatures]:
        """`read` for several rows."""
        return [self.read(row, layers) for row in rows]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_shards": OrderedDict()}  # memory maps are opened anew in the other process


class _Shard:
    """One memory-mapped shard."""

    def __init__(self, path: Path, manifest: Manifest):
        self.path = path
        try:
            self.file = safe_open(path, "pt")
            self.offsets = self.file.get_tensor("row_offsets").tolist()
            self.crc32 = self.file.get_tensor("row_crc32").tolist()
            self.input_ids = self.file.get_slice("input_ids")
            names = (None, *manifest.layers)  # the columns of row_crc32
            self.states = {name: (column, self.file.get_slice(tensor_name(name))) for column, name in enumerate(names)}
        except (SafetensorError, OSError) as e:
            raise _corrupt(path, f"cannot be read ({e})") from None

    def read(self, row: int, input_ids: Tensor, layers: list[int]) -> list[Tensor]:
        """`last_hidden` and the layers of a row [n, H], each compared with the checksum that was written beside it (B16)."""
        begin, end = self.offsets[row : row + 2]
        if not torch.equal(self.input_ids[begin:end], input_ids.int()):
            raise _corrupt(self.path, f"holds other tokens than rows.safetensors in its row {row}")
        states = []
        for name in (None, *layers):
            column, tensor = self.states[name]
            states.append(state := tensor[begin:end])
            if crc32(state) != self.crc32[row][column]:
                raise _corrupt(self.path, f"has a wrong checksum in its row {row}, {tensor_name(name)}")
        return states


def tensor_name(layer: int | None) -> str:
    """Name in a shard of a layer's states; None: last_hidden."""
    return "last_hidden" if layer is None else f"hidden.{layer}"


def crc32(tensor: Tensor) -> int:
    """CRC-32 of a contiguous CPU tensor's bytes."""
    return zlib.crc32(tensor.view(torch.uint8).numpy().data)


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> FileEntry:
    """Write a safetensors file under a temporary name, fsync and rename it (FeatureError where the disk is full)."""
    return write_atomically(path, lambda tmp: save_file(tensors, tmp))


def _corrupt(path: Path, fault: str) -> FeatureError:
    return FeatureError(
        f"{path} {fault}: it is not the file that was finished (see {path.parent / MANIFEST}). "
        f"Remove it and run `{mend_command()}`: only this file is made again."
    )
