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
from recipes.objective_blocks import MedusaObjective as MedusaBlock
from train.depths import Compared, Depths
from train.objective import Output
from train.packing import Batch


class MedusaObjective(nn.Module):
    """Sum over heads i of head_decay ** (i + 1) times the loss of head i."""

    def __init__(self, head: MedusaHead, target: TargetParts, objective: MedusaBlock):
        super().__init__()
        self.head, self.objective = head, objective
        self.compared = Compared(head.vocab, target)

    def forward(self, batch: Batch) -> Output:
        return heads_loss(self.head, batch.last_hidden, batch, self.compared, self.objective)


def heads_loss(head: MedusaHead, states: Tensor, batch: Batch, compared: Compared, objective: MedusaBlock) -> Output:
    """Losses and hits of all heads.

    Args:
        states: [N, H] post-norm states that the heads eat: those of the batch itself, or an adapted target's (Medusa-2).
    """
    heads = range(head.block.num_heads)
    states = states.to(head.dtype)
    rows = [shift.label_weight(batch.loss_mask, batch.document, i).nonzero()[:, 0] for i in heads]
    weights = [torch.full((len(row),), objective.head_decay ** (i + 1), device=row.device) for i, row in enumerate(rows)]
    if head.block.shared_lm_head:
        through = compared.reduced_head(head.lm_head_of(0))
    else:
        through = [compared.reduced_head(head.lm_head_of(i)) for i in heads]
    pairs = Depths(batch, rows, compared.places)
    return pairs.output(pairs.compare([head.states(states[row], i) for i, row in enumerate(rows)], weights, through, objective.loss))


if __name__ == "__main__":
    from train.loop import main

    main("medusa", MedusaObjective)
