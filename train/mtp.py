"""Train an MTP head from scratch: one module used again and again, or a chain of modules.

    accelerate launch train/mtp.py recipes/smollm2-135m/fastmtp.yaml [train.max_steps=200 …]

Depth i eats the answer's own token x[t+1+i] and the state that depth i - 1 handed on, and is compared with the token
x[t+2+i] (`loss: ce`, as published) or with the target's distribution for it (`loss: kl`). Weights are step_decay ** i over
their sum: FastMTP's .51, .31, .18 for 0.6 (arXiv 2509.18362 §3.2), DeepSeek-V3's mean over depths for 1 (arXiv 2412.19437
eq. 25; its λ is the learning rate here, since nothing else is trained).
"""

from __future__ import annotations

from torch import nn

from heads import LAST_HIDDEN, shift
from heads.layers import document_starts
from heads.mtp import MtpHead
from heads.mtp_native import MtpNativeHead
from heads.target import TargetParts
from recipes.objective_blocks import MtpObjective as MtpBlock
from train.depths import Compared, Depths
from train.objective import Output
from train.packing import Batch


class MtpObjective(nn.Module):
    """Weighted mean over depths; also the objective of a target's own MTP layer (train/mtp_native.py)."""

    def __init__(self, head: MtpHead | MtpNativeHead, target: TargetParts, objective: MtpBlock):
        super().__init__()
        self.head, self.objective = head, objective
        self.weights = depth_weights(objective.step_decay, head.block.unroll_steps)
        self.compared = Compared(head.trained_vocab, target)

    def forward(self, batch: Batch) -> Output:
        head, depths = self.head, range(len(self.weights))
        supervised = [shift.draft_weight(batch.loss_mask, batch.document, i) for i in depths]
        computed = [mask.nonzero()[:, 0] for mask in shift.rollout_rows(supervised)]
        tokens = [shift.draft_inputs(batch.input_ids, i) for i in depths]
        feature = head.fuse({LAST_HIDDEN: batch.last_hidden})
        states = head.rollout(feature, tokens, batch.positions, document_starts(batch.document), computed)

        asked = [mask[rows] for mask, rows in zip(supervised, computed, strict=True)]
        pairs = Depths(batch, [rows[ask] for rows, ask in zip(computed, asked, strict=True)], self.compared.draft_ids())
        states = [head.normed(state[ask]) for state, ask in zip(states, asked, strict=True)]
        weights = [state.new_full((len(state),), weight) for state, weight in zip(states, self.weights, strict=True)]
        lm_head = self.compared.draft_head(head.lm_head)
        return pairs.output(pairs.compare(states, weights, lm_head, self.objective.loss, self.objective.lk_eta))


def depth_weights(decay: float, depths: int) -> list[float]:
    """decay ** i over the sum of all.

    >>> [round(w, 2) for w in depth_weights(0.6, 3)]
    [0.51, 0.31, 0.18]
    """
    raw = [decay**i for i in range(depths)]
    return [weight / sum(raw) for weight in raw]


if __name__ == "__main__":
    from train.loop import main

    main("mtp", MtpObjective)
