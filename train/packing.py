"""Rows → steps → micro-batches: packed, without padding, the same rows in a step whatever the number of ranks.

A step takes rows of a seeded shuffle until `tokens_per_step` is reached. Only then are its rows dealt into
micro-batches (longest first, always to the emptiest), so (one big batch), (accumulation) and (several ranks) see the
same rows, and every rank runs the same number of micro-batches, empty ones included (B36).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from data_prep.store import RowFeatures
from recipes.errors import DataError


@dataclass(frozen=True)
class Batch:
    """Packed rows. N tokens; `hidden` {layer: [N, H]} and `last_hidden` [N, H] are empty for methods that read none."""

    input_ids: Tensor  # int64 [N]
    loss_mask: Tensor  # bool [N]
    document: Tensor  # int64 [N], ascending row number inside the batch
    positions: Tensor  # int64 [N], index inside the row
    hidden: dict[int, Tensor]
    last_hidden: Tensor

    @property
    def supervised(self) -> int:
        """Count of supervised tokens: what losses are divided by, summed over micro-batches and ranks."""
        return int(self.loss_mask.sum())

    def to(self, device: torch.device) -> Batch:
        """The batch on another device."""
        move = {
            name: getattr(self, name).to(device, non_blocking=True)
            for name in ("input_ids", "loss_mask", "document", "positions", "last_hidden")
        }
        return replace(self, hidden={layer: h.to(device, non_blocking=True) for layer, h in self.hidden.items()}, **move)


def collate(rows: list[RowFeatures], layers: list[int], hidden_size: int) -> Batch:
    """Concatenate rows; no rows give one unsupervised token.

    The one-token batch lets a rank with nothing to do still run forward and backward, with weight 0.
    """
    if not rows:
        none = torch.zeros(1, hidden_size)
        rows = [RowFeatures(torch.zeros(1, dtype=torch.long), torch.zeros(1, dtype=torch.bool), dict.fromkeys(layers, none), none)]
    lengths = [len(row.input_ids) for row in rows]
    return Batch(
        input_ids=torch.cat([row.input_ids for row in rows]),
        loss_mask=torch.cat([row.loss_mask for row in rows]),
        document=torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(lengths)),
        positions=torch.cat([torch.arange(n) for n in lengths]),
        hidden={layer: torch.cat([row.hidden[layer] for row in rows]) for layer in layers},
        last_hidden=torch.cat([row.last_hidden for row in rows]),
    )


@dataclass
class StepSampler:
    """Endless steps over the training rows; `position` (epoch, next row) is all a resume needs.

    A step may span two epochs. Rows longer than `tokens_per_step` make a step of their own.
    """

    lengths: Tensor  # int64 [R], tokens of each training row
    rows: Tensor  # int64 [R], their numbers in the store
    tokens_per_step: int
    seed: int
    epoch: int = 0
    next_row: int = 0

    def __post_init__(self):
        if len(self.rows) == 0:
            raise DataError("no training rows: every row is held out or was dropped; lower data.holdout or add data")
        self._order = self._shuffle()

    def _shuffle(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        return torch.randperm(len(self.rows), generator=generator)

    def next_step(self) -> list[int]:
        """Store numbers of the rows of the next step; moves the position on."""
        taken, tokens = [], 0
        while tokens < self.tokens_per_step:
            if self.next_row == len(self.rows):
                self.epoch, self.next_row = self.epoch + 1, 0
                self._order = self._shuffle()
            index = self._order[self.next_row]
            length = int(self.lengths[index])
            if taken and tokens + length > self.tokens_per_step:
                break
            taken.append(int(self.rows[index]))
            tokens += length
            self.next_row += 1
        return taken

    def steps_per_epoch(self) -> int:
        """About how many steps see every row once."""
        return max(1, math.ceil(int(self.lengths.sum()) / self.tokens_per_step))

    def state_dict(self) -> dict:
        """Position, for a checkpoint."""
        return {"epoch": self.epoch, "next_row": self.next_row}

    def load_state_dict(self, state: dict) -> None:
        """Go to a saved position."""
        self.epoch, self.next_row = state["epoch"], state["next_row"]
        self._order = self._shuffle()


def deal(rows: list[int], lengths: Callable[[int], int], capacity: int, ranks: int) -> list[list[list[int]]]:
    """Deal a step's rows into micro-batches: result[rank][micro] lists rows; all ranks get the same count.

    >>> deal([0, 1, 2], {0: 5, 1: 3, 2: 2}.__getitem__, capacity=5, ranks=2)
    [[[0]], [[1, 2]]]
    """
    total, longest = sum(map(lengths, rows)), max(map(lengths, rows))
    micro = max(1, math.ceil(total / (max(capacity, longest) * ranks)))
    while True:
        bins: list[list[int]] = [[] for _ in range(micro * ranks)]
        heap = [(0, i) for i in range(len(bins))]
        for row in sorted(rows, key=lambda r: (-lengths(r), r)):
            filled, i = heapq.heappop(heap)
            bins[i].append(row)
            heapq.heappush(heap, (filled + lengths(row), i))
        if max(filled for filled, _ in heap) <= max(capacity, longest):
            return [[bins[m * ranks + r] for m in range(micro)] for r in range(ranks)]
        micro += 1


def fixed_batches(rows: list[int], lengths: Callable[[int], int], capacity: int) -> Iterator[list[int]]:
    """Rows in order, cut into batches of at most `capacity` tokens (validation)."""
    taken: list[int] = []
    tokens = 0
    for row in rows:
        if taken and tokens + lengths(row) > capacity:
            yield taken
            taken, tokens = [], 0
        taken.append(row)
        tokens += lengths(row)
    if taken:
        yield taken
