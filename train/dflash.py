"""Train a DFlash head: blocks of mask tokens behind random supervised tokens.

    accelerate launch train/dflash.py recipes/smollm2-135m/dflash.yaml [train.max_steps=200 …]

At every visit of a row at most `anchors` of its supervised tokens are drawn; behind index t, where x[t+1] is the anchor,
slot j >= 1 is compared with the token x[t+1+j] (`loss: ce`, as published) or with the target's distribution for it
(`loss: kl`). Blocks of a document stand for all its supervised tokens: their losses count as many times as tokens were
not drawn. Slots past a document's end have no loss. Held-out rows are validated behind every supervised token, for `AL~` of k
drafts in blocks of k + 1 slots: slots see one another, so the first k of a longer block are not what a server drafts.

Slot weights (METHODS §9.2): exp(-(j - 1) / gamma); or D-PACE, by how likely the draft is right up to each later slot:
w_j = sum over m >= j of the product over i <= m of (1 - alpha) q_i + alpha, q_i the draft's probability of the label.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from heads import shift
from heads.dflash import DflashHead
from heads.layers import document_starts
from heads.target import TargetParts
from recipes.objective_blocks import DflashObjective as DflashBlock
from train.depths import Depths, DraftHead, draft_ids_of
from train.losses import HeadLoss
from train.objective import Output
from train.packing import Batch


class DflashObjective(nn.Module):
    """Weighted sum over the slots of all blocks."""

    to_draft: Tensor  # int64 [V]

    def __init__(self, head: DflashHead, target: TargetParts, objective: DflashBlock):
        super().__init__()
        self.head, self.objective, self.teacher_parts = head, objective, target
        self.register_buffer("to_draft", draft_ids_of(head.vocab), persistent=False)

    def forward(self, batch: Batch) -> Output:
        cfg, slots = self.objective, self.head.block.block_size
        anchors, scale = self._anchors(batch)
        asked, pairs, by_depth = self._denoise(batch, anchors, slots)
        if cfg.weights == "dpace":
            with torch.no_grad():
                likely = self._compare(pairs, [state.detach() for state in by_depth], [state[:, 0] for state in by_depth], "ce")
            confidence = [torch.where(label >= 0, (-part.loss).exp(), 0) for label, part in zip(pairs.labels, likely, strict=True)]
            weight = dpace_weights(_per_block(asked, confidence), asked, cfg.alpha)
        else:
            weight = torch.exp(-torch.arange(slots - 1, device=scale.device) / cfg.gamma).expand(len(anchors), -1)
        weight = weight * scale[:, None]
        return pairs.output(self._compare(pairs, by_depth, [weight[asked[:, i], i] for i in range(slots - 1)], cfg.loss))

    def served_hits(self, batch: Batch, k: int) -> Tensor:
        """bool [k, N]: `Output.hits` of drafts made k at a time, in blocks of k + 1 slots: the input that a server denoises."""
        _, pairs, by_depth = self._denoise(batch, self._anchors(batch)[0], k + 1)
        return pairs.output(self._compare(pairs, by_depth, [state[:, 0] for state in by_depth], "ce")).hits

    def _denoise(self, batch: Batch, anchors: Tensor, slots: int) -> tuple[Tensor, Depths, list[Tensor]]:
        """Blocks of B slots behind `anchors` [R] → which slots are supervised [R, B - 1], their pairs, and their states by depth."""
        head, depths = self.head, range(slots - 1)
        tokens = shift.draft_inputs(batch.input_ids, 0)
        states = head.denoise(head.fuse(batch.hidden), tokens, batch.positions, document_starts(batch.document), anchors, slots)
        asked = torch.stack([shift.draft_weight(batch.loss_mask, batch.document, i)[anchors] for i in depths], 1)
        pairs = Depths(batch, [anchors[asked[:, i]] for i in depths], self.to_draft)  # depth i is slot i + 1
        return asked, pairs, [states[asked[:, i], i] for i in depths]

    def _compare(self, pairs: Depths, states: list[Tensor], weights: list[Tensor], loss: str) -> list[HeadLoss]:
        lm_head = self.head.lm_head
        return pairs.compare(states, weights, DraftHead(lm_head, lm_head, self.teacher_parts, None), loss)

    def _anchors(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """[R] ascending indices behind which blocks stand, and [R] for how many supervised tokens each one stands."""
        candidates = shift.draft_weight(batch.loss_mask, batch.document, 0).nonzero()[:, 0]
        document = batch.document[candidates]
        if not self.training:
            return candidates, torch.ones(len(candidates), device=candidates.device)
        # A random rank inside each document; those below `anchors` are drawn.
        shuffled = torch.randperm(len(candidates), device=candidates.device)
        order = shuffled[document[shuffled].argsort(stable=True)]
        place = torch.arange(len(candidates), device=candidates.device)
        rank = torch.empty_like(place)
        rank[order] = place - document_starts(document[order])
        drawn = rank < self.objective.anchors
        total, taken = (torch.bincount(side, minlength=int(batch.document[-1]) + 1) for side in (document, document[drawn]))
        return candidates[drawn], (total / taken.clamp(min=1))[document[drawn]]


def dpace_weights(confidence: Tensor, asked: Tensor, alpha: float) -> Tensor:
    """D-PACE: [R, B - 1] weights from the draft's probabilities of the labels.

    >>> dpace_weights(torch.tensor([[1.0, 0.0, 1.0]]), torch.tensor([[True, True, True]]), 0.5).tolist()
    [[2.0, 1.0, 0.5]]
    """
    reached = ((1 - alpha) * confidence + alpha).cumprod(1) * asked
    return reached.flip(1).cumsum(1).flip(1)


def _per_block(asked: Tensor, values: list[Tensor]) -> Tensor:
    """Values of the supervised pairs of each depth → [R, B - 1], 0 elsewhere."""
    table = torch.zeros(asked.shape, device=asked.device)
    for i, value in enumerate(values):
        table[asked[:, i], i] = value.float()
    return table


if __name__ == "__main__":
    from train.loop import main

    main("dflash", DflashObjective)
