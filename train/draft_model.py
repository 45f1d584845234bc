"""Train an independent draft model on the target's own answers.

    accelerate launch train/draft_model.py recipes/smollm2-135m/draft_model.yaml [train.max_steps=200 …]

Distillation of next-token predictions (METHODS §7, arXiv 2310.08461): where the target's distribution is wanted, it is
computed again from the stored last hidden state, chunk by chunk, so nothing of the size of the vocabulary is stored; with
`head.draft_vocab_size` over the most frequent tokens only, which hold nearly all of it (validation is over all). One
causal pass over packed rows trains all depths: depth i at index t is depth 0 at index t + i (heads/draft_model.py).
"""

from __future__ import annotations

import torch
from torch import nn

from heads import shift
from heads.draft_model import DraftModelHead
from heads.packed import Packed
from heads.target import TargetParts
from recipes.objective_blocks import DraftModelObjective as DraftModelBlock
from train.depths import Compared, Depths
from train.objective import Output
from train.packing import Batch


class DraftModelObjective(nn.Module):
    """Sum of the losses of every supervised prediction."""

    def __init__(self, head: DraftModelHead, target: TargetParts, objective: DraftModelBlock):
        super().__init__()
        self.head, self.objective = head, objective
        self.compared = Compared(head.trained_vocab, target)

    def forward(self, batch: Batch) -> Output:
        head = self.head
        anchor = shift.draft_weight(batch.loss_mask, batch.document, 0)
        supervised = [anchor & shift.draft_weight(batch.loss_mask, batch.document, i) for i in range(self.objective.check_depth)]
        row = anchor.nonzero()[:, 0]
        states = head.states(head.embed(batch.input_ids), batch.positions, packed=Packed(batch.document))
        pairs = Depths(batch, [row], self.compared.draft_ids())
        states = states[row + shift.teacher_index(0)]  # a model that reads tokens only predicts a token where the target does
        weights, draft_head = torch.ones(len(row), device=row.device), self.compared.draft_head(head.head_weight)
        (part,) = pairs.compare([states], [weights], draft_head, self.objective.loss)

        loss, hit = torch.zeros(len(batch.document), device=row.device), torch.zeros_like(batch.loss_mask)
        loss[row], hit[row] = part.loss, part.correct
        hits = torch.stack([shift.shift_left(hit, i, fill=False) & allowed for i, allowed in enumerate(supervised)])
        losses = torch.stack([(shift.shift_left(loss, i) * allowed).sum() for i, allowed in enumerate(supervised)])
        counts = torch.stack([(shift.has_label(batch.document, i) & allowed).sum() for i, allowed in enumerate(supervised)])
        return Output(part.loss_sum, losses, hits.sum(1), counts, hits)


if __name__ == "__main__":
    from train.loop import main

    main("draft_model", DraftModelObjective)
