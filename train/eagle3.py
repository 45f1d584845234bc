"""Train an EAGLE-3 head.

    accelerate launch train/eagle3.py recipes/smollm2-135m/eagle3.yaml [train.max_steps=200 …]

The objective is the paper's training-time test (arXiv 2503.01840 §3; METHODS §5.3): the head drafts `unroll_steps`
tokens at every index of a row at once, eating the answer's own tokens and its own states, and each depth is compared
with the target's distribution at the position it drafts. With `objective.depth_warmup` the first depth learns alone until that
share of the run is behind: later depths can only be accepted behind a good first one, and a step without them is cheap.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from heads import shift
from heads.eagle3 import Eagle3Head
from heads.layers import document_starts
from heads.target import TargetParts
from recipes.objective_blocks import Eagle3Objective as Settings
from train.depths import Depths, DraftHead, draft_ids_of
from train.objective import Output
from train.packing import Batch


class Eagle3Objective(nn.Module):
    """Sum over depths i of step_decay**i times the loss of depth i."""

    teacher_rows: Tensor  # [D, H], the target's LM head at the draft vocabulary
    all_rows: Tensor | None  # [V, H], the whole of it; None where the loss does not read it
    to_draft: Tensor  # int64 [V]

    def __init__(self, head: Eagle3Head, target: TargetParts, objective: Settings):
        super().__init__()
        self.progress = 0.0  # share of the run that is behind; the loop sets it
        self.head, self.objective, self.teacher_parts = head, objective, target
        self.register_buffer("teacher_rows", target.lm_head[head.vocab.ids], persistent=False)
        self.register_buffer("all_rows", target.lm_head if objective.loss == "lk" else None, persistent=False)
        self.register_buffer("to_draft", draft_ids_of(head.vocab), persistent=False)

    def forward(self, batch: Batch) -> Output:
        head, cfg, depths = self.head, self.objective, range(self.head.block.unroll_steps)
        supervised = [shift.draft_weight(batch.loss_mask, batch.document, i) for i in depths]
        if self.training and self.progress < cfg.depth_warmup:
            supervised = [mask if i == 0 else torch.zeros_like(mask) for i, mask in enumerate(supervised)]
        # A state is computed where its own depth or a later one is compared, and nowhere else.
        computed = [mask.nonzero()[:, 0] for mask in shift.rollout_rows(supervised)]
        tokens = [shift.draft_inputs(batch.input_ids, i) for i in depths]
        states = head.rollout(head.fuse(batch.hidden), tokens, batch.positions, document_starts(batch.document), computed)

        asked = [mask[rows] for mask, rows in zip(supervised, computed, strict=True)]
        pairs = Depths(batch, [rows[ask] for rows, ask in zip(computed, asked, strict=True)], self.to_draft)
        normed = [head.norm(state[ask]) for state, ask in zip(states, asked, strict=True)]
        weights = [state.new_full((len(state),), cfg.step_decay**i) for i, state in enumerate(normed)]
        lm_head = DraftHead(head.lm_head.weight, self.teacher_rows, self.teacher_parts, self.all_rows)
        return pairs.output(pairs.compare(normed, weights, lm_head, cfg.loss, cfg.lk_eta))


if __name__ == "__main__":
    from train.loop import main

    main("eagle3", Eagle3Objective)
