"""Train Medusa-1 heads on a frozen target.

    accelerate launch train/medusa.py recipes/smollm2-135m/medusa.yaml [train.max_steps=200 …]

The objective (arXiv 2401.10774 §2.2.1; METHODS §1.3): head i sees the target's state at index t and is compared with what
comes 2 + i places on: the target's own distribution there, or the answer's token. Head i weighs head_decay ** (i + 1).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from heads import shift
from heads.medusa import MedusaHead
from heads.target import TargetParts
from recipes.methods import MedusaObjective as MedusaBlock
from train.losses import Teacher, head_loss
from train.objective import Output
from train.packing import Batch


class MedusaObjective(nn.Module):
    """Sum over heads i of head_decay ** (i + 1) times the loss of head i."""

    teacher_rows: Tensor

    def __init__(self, head: MedusaHead, target: TargetParts, objective: MedusaBlock):
        super().__init__()
        self.head, self.objective, self.teacher_parts = head, objective, target
        self.register_buffer("teacher_rows", target.lm_head, persistent=False)

    def forward(self, batch: Batch) -> Output:
        return heads_loss(self.head, batch.last_hidden, batch, self.teacher_rows, self.teacher_parts, self.objective)


def heads_loss(head: MedusaHead, states: Tensor, batch: Batch, teacher_rows: Tensor, target: TargetParts, objective: MedusaBlock) -> Output:
    """Losses and hits of all heads.

    Args:
        states: [N, H] post-norm states that the heads eat; those of the batch itself, or an adapted target's (Medusa-2).
        teacher_rows: [V, H] the target's LM head, on the device of the batch.
    """
    K, N = head.block.num_heads, len(batch.input_ids)
    states = states.to(head.blocks[0].layers[0].weight.dtype)  # type: ignore[union-attr, index]
    hits = torch.zeros(K, N, dtype=torch.bool, device=states.device)
    depth_loss = torch.zeros(K, device=states.device)
    rows = [shift.label_weight(batch.loss_mask, batch.document, i).nonzero()[:, 0] for i in range(K)]
    loss_sum = states.new_zeros(())
    # Heads with one LM head go through it together, so that the teacher's logits at a place are computed once for all of them.
    for group in [list(range(K))] if head.block.shared_lm_head else [[i] for i in range(K)]:
        row = torch.cat([rows[i] for i in group])
        positions, teacher_row = torch.unique(torch.cat([rows[i] + shift.teacher_index(i) for i in group]), return_inverse=True)
        result = head_loss(
            torch.cat([head.states(states[rows[i]], i) for i in group]),
            head.lm_head_of(group[0]),
            Teacher(batch.last_hidden[positions], teacher_rows, target),
            teacher_row,
            torch.cat([torch.full((len(rows[i]),), objective.head_decay ** (i + 1), device=row.device) for i in group]),
            torch.cat([shift.draft_labels(batch.input_ids, i)[rows[i]] for i in group]),
            objective.loss,
        )
        loss_sum = loss_sum + result.loss_sum
        sizes = [len(rows[i]) for i in group]
        for i, loss, correct in zip(group, result.loss.split(sizes), result.correct.split(sizes), strict=True):
            depth_loss[i] = loss.sum()
            hits[i, rows[i]] = correct
    counts = torch.tensor([len(row) for row in rows], device=states.device)
    return Output(loss_sum, depth_loss, hits.sum(1), counts, hits)


if __name__ == "__main__":
    from train.loop import main

    main("medusa", MedusaObjective)
