"""Train a PARD draft model: all slots of all anchors in one pass.

    accelerate launch train/pard.py recipes/smollm2-135m/pard.yaml [train.max_steps=200 …]

Anchors are the indices t whose next token x[t+1] is supervised; slot i of anchor t is compared with the answer's token
x[t+2+i] (`loss: ce`, as published) or with the target's distribution for it. The end of an answer is a label like any
other. The real tokens run once; slot i stands at a share of the anchors only (conditional drop, METHODS §7.1), nested, and
sees the tokens up to its own and its own chain: no mask of the expanded length exists (heads/packed.py).

PARD-2 (METHODS §7.2) adds the target's states to the input of most rows, weighs slot i of anchor t by the product over s < i
of p_target(x[t+2+s]), and adds a little cross-entropy. Validation is without the target's states, as a server drafts.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from heads import LAST_HIDDEN, shift
from heads.pard import PardHead
from heads.target import TargetParts
from recipes.errors import RecipeError
from recipes.objective_blocks import PardObjective as PardBlock
from train.depths import Compared, Depths
from train.losses import Teacher, plus_ce
from train.objective import Output
from train.packing import Batch
from train.peagle import nested_anchors


class PardObjective(nn.Module):
    """Sum over slots i of step_decay ** i (times how likely the target is to get there) times the loss of slot i."""

    def __init__(self, head: PardHead, target: TargetParts, objective: PardBlock):
        super().__init__()
        if objective.feature_drop and head.target_layers is None:
            raise RecipeError(
                f"objective.feature_drop={objective.feature_drop} with head.aux_layers=None: this draft reads no target states to drop; "
                "set head.aux_layers (PARD-2) or drop objective.feature_drop."
            )
        if head.target_layers is not None and not objective.feature_drop:
            raise RecipeError(
                f"objective.feature_drop=0 with head.aux_layers={head.block.aux_layers}: the draft would never learn to do without the "
                "target's states, which vLLM does not give it; set objective.feature_drop (published: 0.1 or 0.2) or drop head.aux_layers."
            )
        self.head, self.objective, self.teacher_parts = head, objective, target
        self.slots = head.block.unroll_steps
        self.loss = plus_ce(objective.loss, objective.ce_weight) if objective.ce_weight else objective.loss
        self.compared = Compared(head.trained_vocab, target)

    def forward(self, batch: Batch) -> Output:
        head, cfg = self.head, self.objective
        head.write_mask_row()
        supervised = [shift.draft_weight(batch.loss_mask, batch.document, i) for i in range(self.slots)]
        rows = nested_anchors(supervised, cfg if self.training else None)
        tokens = [row + shift.teacher_index(0) for row in rows]  # x[t+1], behind which the slots stand
        states = head.slot_states(batch.input_ids, batch.positions, batch.document, tokens, self._added(batch))

        weights = [state.new_full((len(state),), cfg.step_decay**i) for i, state in enumerate(states)]
        if cfg.confidence_weights and self.training:
            reach = self._reach(batch, rows)
            weights = [weight * likely for weight, likely in zip(weights, reach, strict=True)]
        pairs = Depths(batch, rows, self.compared.draft_ids())
        return pairs.output(pairs.compare(states, weights, self.compared.draft_head(head.head_weight), self.loss, cfg.lk_eta))

    def _added(self, batch: Batch) -> Tensor | None:
        """PARD-2: [N, H] what the target's states add to each token, 0 for rows that learn to draft without; None: nothing."""
        if self.head.target_layers is None or not self.training:
            return None
        states = self.head.target_states(batch.hidden | {LAST_HIDDEN: batch.last_hidden})
        kept = torch.rand(int(batch.document[-1]) + 1, device=states.device) >= self.objective.feature_drop
        has = kept[batch.document] & (batch.positions > 0)  # the state of the token before; the first token has none
        return shift.shift_right(states, 1) * has[:, None]

    @torch.no_grad()
    def _reach(self, batch: Batch, rows: list[Tensor]) -> list[Tensor]:
        """[R_i] a slot: how likely the target takes the chain's tokens before it, x[t+2] … x[t+1+i], each given those before it."""
        first = rows[0]
        positions = torch.unique(torch.cat([row + shift.teacher_index(i) for i, row in enumerate(rows)]))
        positions = positions[shift.same_document(batch.document, 1)[positions]]
        log_p = torch.zeros(len(batch.document), device=first.device)  # of x[s+1] at index s, where it is needed
        whole = self.compared.all_rows
        teacher = Teacher(batch.last_hidden[positions], whole, self.teacher_parts, whole)
        log_p[positions] = label_log_probs(teacher, shift.next_tokens(batch.input_ids)[positions])
        reach, total = [], torch.zeros_like(log_p)
        for i, row in enumerate(rows):
            reach.append(total[row].exp())
            total = total + shift.shift_left(log_p, shift.teacher_index(i))
        return reach


def label_log_probs(teacher: Teacher, labels: Tensor) -> Tensor:
    """Log-probabilities [U] of the labels [U] under the teacher's distribution over its whole vocabulary, some rows at a time."""
    parts = []
    for chunk in torch.arange(len(labels), device=labels.device).split(512):
        hidden = teacher.last_hidden[chunk].to(teacher.rows.dtype)
        picked = teacher.target.scale_logits((hidden * teacher.rows[labels[chunk]]).sum(-1))
        parts.append(picked.float() - teacher.log_normaliser(chunk)[:, 0])
    return torch.cat(parts)


if __name__ == "__main__":
    from train.loop import main

    main("pard", PardObjective)
