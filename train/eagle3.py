"""Train an EAGLE-3 head.

    accelerate launch train/eagle3.py recipes/smollm2-135m/eagle3.yaml [train.max_steps=200 …]

The objective is the paper's training-time test (arXiv 2503.01840 §3; METHODS §5.3): the head drafts `unroll_steps`
tokens at every index of a row at once, eating the answer's own tokens and its own states, and each depth is compared
with the target's distribution at the position it drafts.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from heads import shift
from heads.eagle3 import Eagle3Head
from heads.layers import document_starts
from heads.target import TargetParts
from recipes.methods import DistributionObjective
from train.losses import Teacher, head_loss
from train.objective import Output
from train.packing import Batch


class Eagle3Objective(nn.Module):
    """Sum over depths i of step_decay**i times the loss of depth i."""

    teacher_rows: Tensor  # [D, H], the target's LM head at the draft vocabulary
    to_draft: Tensor  # int64 [V]

    def __init__(self, head: Eagle3Head, target: TargetParts, objective: DistributionObjective):
        super().__init__()
        self.head, self.objective = head, objective
        self.depths = head.block.unroll_steps
        self.teacher_parts = target
        self.register_buffer("teacher_rows", target.lm_head[head.vocab.ids], persistent=False)
        self.register_buffer("to_draft", head.vocab.to_draft(torch.arange(head.vocab.size)), persistent=False)

    def forward(self, batch: Batch) -> Output:
        head, depths = self.head, range(self.depths)
        weights = [shift.draft_weight(batch.loss_mask, batch.document, i) for i in depths]
        rows = [mask.nonzero()[:, 0] for mask in shift.rollout_rows(weights)]
        tokens = [shift.draft_inputs(batch.input_ids, i) for i in depths]
        feature = head.fuse(batch.hidden)
        states = head.rollout(feature, tokens, batch.positions, document_starts(batch.document), rows)

        # One flat list of (row, depth) pairs that the loss reads.
        kept_states, teacher_positions, labels, row_weights, places = [], [], [], [], []
        hits = torch.zeros(self.depths, len(batch.input_ids), dtype=torch.bool, device=feature.device)
        counts = torch.zeros(self.depths, dtype=torch.long, device=feature.device)
        for i in depths:
            labelled = shift.has_label(batch.document, i)
            label = torch.where(labelled, self.to_draft[shift.draft_labels(batch.input_ids, i)], -1)
            counts[i] = (weights[i] & labelled).sum()
            # A target token outside the draft vocabulary cannot be drafted: no loss, and a miss in every count.
            trained = weights[i] & (~labelled | (label >= 0))
            keep = trained[rows[i]]
            row = rows[i][keep]
            kept_states.append(states[i][keep])
            teacher_positions.append(row + shift.teacher_index(i))
            labels.append(label[row])
            row_weights.append(torch.full((len(row),), self.objective.step_decay**i, device=feature.device))
            places.append((i, row))

        positions, teacher_row = torch.unique(torch.cat(teacher_positions), return_inverse=True)
        teacher = Teacher(batch.last_hidden[positions], self.teacher_rows, self.teacher_parts)
        result = head_loss(
            head.norm(torch.cat(kept_states)), head.lm_head.weight, teacher, teacher_row, torch.cat(row_weights), torch.cat(labels),
            self.objective.loss, self.objective.lk_eta,
        )  # fmt: skip
        depth_loss = torch.zeros(self.depths, device=feature.device)
        start = 0
        for i, row in places:
            part = slice(start, start + len(row))
            depth_loss[i] = result.loss[part].sum()
            hits[i, row] = result.correct[part]
            start += len(row)
        return Output(result.loss_sum, depth_loss, hits.sum(1), counts, hits)


if __name__ == "__main__":
    from train.loop import main

    main("eagle3", Eagle3Objective)
