"""Drafts of every depth against the target: labels, teacher rows and counts for a list of (row, depth) pairs.

What objectives share that draft several depths at an index. Each says which rows of a depth it supervises and with which
weights; the rest follows from the layout of `train/objective.py`: row t, depth i drafts x[t + 2 + i], and the target's
distribution at t + 1 + i is its teacher.

Shapes: K depths, R_i supervised rows of depth i, S = all pairs together, N packed tokens, H hidden size, D draft vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from heads import shift
from heads.target import TargetParts
from heads.vocab import DraftVocab
from train.losses import Compare, HeadLoss, Teacher, head_loss
from train.objective import Output
from train.packing import Batch


class DraftHead(NamedTuple):
    """What turns normed states into draft logits and what they are compared with; no parameters of its own."""

    weight: Tensor  # [D, H] the draft's LM head
    teacher_rows: Tensor  # [D, H] the target's LM head at the draft vocabulary
    target: TargetParts


class Depths:
    """The supervised (row, depth) pairs of one batch."""

    def __init__(self, batch: Batch, rows: list[Tensor], to_draft: Tensor):
        """
        Args:
            rows: int64 [R_i], supervised indices of each depth. to_draft: int64 [V] draft id of each target id, or -1.
        """
        self.batch, self.rows = batch, rows
        self.labelled = [shift.has_label(batch.document, i)[row] for i, row in enumerate(rows)]
        self.labels = [
            torch.where(labelled, to_draft[shift.draft_labels(batch.input_ids, i)[row]], -1)
            for i, (row, labelled) in enumerate(zip(rows, self.labelled, strict=True))
        ]
        # A target token outside the draft vocabulary cannot be drafted: no loss, and a miss in every count.
        self.trained = [~labelled | (label >= 0) for labelled, label in zip(self.labelled, self.labels, strict=True)]

    def compare(
        self, states: list[Tensor], weights: list[Tensor], head: DraftHead, loss: str | Compare, lk_eta: float = 3.0
    ) -> list[HeadLoss]:
        """Losses of all depths at once, split by depth again: every teacher row is computed once.

        Args:
            states: [R_i, H] normed states of the rows of each depth. weights: [R_i]. loss, lk_eta: as in `head_loss`.

        Returns:
            One HeadLoss a depth over its rows, 0 and wrong where nothing is trained; the first holds the whole `loss_sum`.
        """
        kept = [keep.nonzero()[:, 0] for keep in self.trained]
        teacher_index = torch.cat([row[keep] + shift.teacher_index(i) for i, (row, keep) in enumerate(zip(self.rows, kept, strict=True))])
        positions, teacher_row = torch.unique(teacher_index, return_inverse=True)
        pick = lambda sides: torch.cat([side[keep] for side, keep in zip(sides, kept, strict=True)])  # noqa: E731
        teacher = Teacher(self.batch.last_hidden[positions], head.teacher_rows, head.target)
        result = head_loss(pick(states), head.weight, teacher, teacher_row, pick(weights).float(), pick(self.labels), loss, lk_eta)
        parts, sizes = [], [len(keep) for keep in kept]
        for row, keep, values, right in zip(self.rows, kept, result.loss.split(sizes), result.correct.split(sizes), strict=True):
            losses, correct = values.new_zeros(len(row)), right.new_zeros(len(row))
            losses[keep], correct[keep] = values, right
            parts.append(HeadLoss(result.loss_sum, losses, correct))
        return parts

    def output(self, losses: list[HeadLoss]) -> Output:
        """What an objective returns."""
        device = self.batch.input_ids.device
        hits = torch.zeros(len(self.rows), len(self.batch.input_ids), dtype=torch.bool, device=device)
        for i, (row, part) in enumerate(zip(self.rows, losses, strict=True)):
            hits[i, row] = part.correct
        counts = torch.stack([labelled.sum() for labelled in self.labelled])
        return Output(losses[0].loss_sum, torch.stack([part.loss.sum() for part in losses]), hits.sum(1), counts, hits)


def draft_ids_of(vocab: DraftVocab) -> Tensor:
    """int64 [V]: the draft id of each target id, -1 where the draft vocabulary lacks it."""
    return vocab.to_draft(torch.arange(vocab.size))
