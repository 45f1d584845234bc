"""Train a P-EAGLE head: all slots of all anchors in one pass.

    accelerate launch train/peagle.py recipes/smollm2-135m/peagle.yaml [train.max_steps=200 …]

Anchors are the indices t whose next token x[t+1] is supervised; slot i of anchor t is compared with the target's
distribution at t + 1 + i. Conditional drop (COD, METHODS §6, §7.1): slot i is trained at a share max(keep_ratio ** i,
keep_min) of the anchors, drawn among those of slot i - 1, so that every slot finds the slots before it that serving has.
Held-out rows are validated at every anchor. A slot never reaches into the next document.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from heads import shift
from heads.layers import document_starts
from heads.peagle import PeagleHead
from heads.target import TargetParts
from recipes.objective_blocks import PeagleObjective as PeagleBlock
from train.depths import Depths, DraftHead, draft_ids_of
from train.objective import Output
from train.packing import Batch


class PeagleObjective(nn.Module):
    """Sum over slots i of step_decay ** i times the loss of slot i."""

    to_draft: Tensor  # int64 [V]
    teacher_rows: Tensor  # [D, H], the target's LM head at the draft vocabulary
    all_rows: Tensor | None  # [V, H], the whole of it; None where the loss does not read it

    def __init__(self, head: PeagleHead, target: TargetParts, objective: PeagleBlock):
        super().__init__()
        self.head, self.objective, self.teacher_parts = head, objective, target
        self.slots = head.block.unroll_steps
        self.register_buffer("teacher_rows", target.lm_head[head.vocab.ids], persistent=False)
        self.register_buffer("all_rows", target.lm_head if objective.loss == "lk" else None, persistent=False)
        self.register_buffer("to_draft", draft_ids_of(head.vocab), persistent=False)

    def forward(self, batch: Batch) -> Output:
        head, mask_token = self.head, self.head.block.mask_token_id
        supervised = [shift.draft_weight(batch.loss_mask, batch.document, i) for i in range(self.slots)]
        rows = self._anchors(supervised)
        tokens = [shift.draft_inputs(batch.input_ids, 0)] + [torch.full_like(batch.input_ids, mask_token)] * (self.slots - 1)
        states = head.rollout(head.fuse(batch.hidden), tokens, batch.positions, document_starts(batch.document), rows)
        states = [head.norm(state) for state in states]
        pairs = Depths(batch, rows, self.to_draft)
        weights = [state.new_full((len(state),), self.objective.step_decay**i) for i, state in enumerate(states)]
        draft_head = DraftHead(head.lm_head.weight, self.teacher_rows, self.teacher_parts, self.all_rows)
        return pairs.output(pairs.compare(states, weights, draft_head, self.objective.loss, self.objective.lk_eta))

    def _anchors(self, supervised: list[Tensor]) -> list[Tensor]:
        return nested_anchors(supervised, self.objective if self.training else None)


def nested_anchors(supervised: list[Tensor], drops: PeagleBlock | None) -> list[Tensor]:
    """[R_i] ascending anchors of each slot, each a subset of the one before.

    Args:
        supervised: [N] bool a slot: whether a slot of that depth may be trained there. drops: which shares are kept (COD); None: all.
    """
    anchors = supervised[0].nonzero()[:, 0]
    rows, first = [anchors], len(anchors)
    for i, allowed in enumerate(supervised[1:], start=1):
        anchors = anchors[allowed[anchors]]
        if drops is not None:
            anchors = drop(anchors, int(first * kept_share(i, drops.keep_ratio, drops.keep_min)))
        rows.append(anchors)
    return rows


def kept_share(slot: int, ratio: float, minimum: float) -> float:
    """Share of the anchors at which a slot is trained.

    >>> round(sum(kept_share(i, 0.7, 0.2) for i in range(8)), 3)
    3.373
    """
    return max(ratio**slot, minimum)


def drop(anchors: Tensor, count: int) -> Tensor:
    """`count` of the anchors at random, still ascending; all of them where there are no more."""
    if count >= len(anchors):
        return anchors
    return anchors[torch.randperm(len(anchors), device=anchors.device)[:count].sort().values]


if __name__ == "__main__":
    from train.loop import main

    main("peagle", PeagleObjective)
