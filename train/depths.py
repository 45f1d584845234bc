"""Drafts of every depth against the target: labels, teacher rows and counts for a list of (row, depth) pairs.

What objectives share that draft several depths at an index. Each says which rows of a depth it supervises and with which
weights; the rest follows from the layout of `train/objective.py`: row t, depth i drafts x[t + 2 + i], and the target's
distribution at t + 1 + i is its teacher.

Shapes: K depths, R_i supervised rows of depth i, S = all pairs together, N packed tokens, H hidden size, D draft vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

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
    all_rows: Tensor | None  # [V, H] the whole of it, where the loss needs it ("lk")


class Compared(nn.Module):
    """The tokens over which draft and target are compared: in training the most frequent ones (`head.draft_vocab_size`), else all."""

    ids: Tensor | None  # int64 [D] the frequent ones; None where all are compared
    all_rows: Tensor  # [V, H] the target's LM head
    rows: Tensor | None  # [D, H] its rows of the frequent ones; None where all are compared: no second copy on a device
    all_places: Tensor  # int64 [V]
    places: Tensor  # int64 [V]: where in `ids` each token is, or -1

    def __init__(self, vocab: DraftVocab, target: TargetParts):
        super().__init__()
        self.target = target
        self.register_buffer("ids", None if vocab.full else vocab.ids, persistent=False)
        self.register_buffer("all_rows", target.lm_head, persistent=False)
        self.register_buffer("rows", None if vocab.full else target.lm_head[vocab.ids], persistent=False)
        self.register_buffer("all_places", torch.arange(vocab.size), persistent=False)
        self.register_buffer("places", draft_ids_of(vocab), persistent=False)

    def draft_ids(self) -> Tensor:
        """int64 [V]: the place of each target token in the comparison, -1 where it is left out."""
        return self.places if self.training else self.all_places

    def draft_head(self, weight: Tensor) -> DraftHead:
        """What `Depths.compare` takes, from the draft's LM head [V, H]."""
        if self.training and self.ids is not None:
            return self.reduced_head(weight[self.ids])
        return DraftHead(weight, self.all_rows, self.target, self.all_rows)

    def reduced_head(self, weight: Tensor) -> DraftHead:
        """The same from an LM head [D, H] that has rows for the compared tokens only, to be taken with `places`."""
        return DraftHead(weight, self.all_rows if self.rows is None else self.rows, self.target, self.all_rows)


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
        self,
        states: list[Tensor],
        weights: list[Tensor],
        head: DraftHead | list[DraftHead],
        loss: str | Compare,
        lk_eta: float = 3.0,
    ) -> list[HeadLoss]:
        """Losses of all depths, split by depth again. Depths with one LM head go through it together: every teacher row is computed once.

        Args:
            states: [R_i, H] normed states of the rows of each depth. weights: [R_i]. head: of all depths, or one a depth.
            loss, lk_eta: as in `head_loss`.

        Returns:
            One HeadLoss a depth over its rows, 0 and wrong where nothing is trained; each holds the whole `loss_sum`.
        """
        depths = range(len(self.rows))
        groups = [(list(depths), head)] if isinstance(head, DraftHead) else [([i], one) for i, one in zip(depths, head, strict=True)]
        parts: list[tuple[Tensor, Tensor]] = []
        loss_sum: Tensor | float = 0.0
        for members, one in groups:
            kept = {i: self.trained[i].nonzero()[:, 0] for i in members}
            teacher_index = torch.cat([self.rows[i][keep] + shift.teacher_index(i) for i, keep in kept.items()])
            positions, teacher_row = torch.unique(teacher_index, return_inverse=True)
            state, weight, label = (torch.cat([side[i][keep] for i, keep in kept.items()]) for side in (states, weights, self.labels))
            teacher = Teacher(self.batch.last_hidden[positions], one.teacher_rows, one.target, one.all_rows)
            result = head_loss(state, one.weight, teacher, teacher_row, weight.float(), label, loss, lk_eta)
            loss_sum = loss_sum + result.loss_sum
            sizes = [len(keep) for keep in kept.values()]
            for (i, keep), values, right in zip(kept.items(), result.loss.split(sizes), result.correct.split(sizes), strict=True):
                losses, correct = values.new_zeros(len(self.rows[i])), right.new_zeros(len(self.rows[i]))
                losses[keep], correct[keep] = values, right
                parts.append((losses, correct))
        assert isinstance(loss_sum, Tensor)
        return [HeadLoss(loss_sum, losses, correct) for losses, correct in parts]

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
