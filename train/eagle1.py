"""Train an EAGLE-1 head, by EAGLE-1's objective or by HASS.

    accelerate launch train/eagle1.py recipes/smollm2-135m/eagle1.yaml [train.max_steps=200 …]
    accelerate launch train/eagle1.py recipes/smollm2-135m/hass.yaml

EAGLE-1 (arXiv 2401.15077 §3; METHODS §2): one pass over true features. The state at index t imitates the target's next
state (smooth L1) and, through the target's LM head, its distribution (soft cross-entropy; the figure reported is the KL,
which differs by the target's entropy). Uniform noise on the input features, never on the labels.

HASS (arXiv 2408.15766; METHODS §4): further passes, each fed with the states of the pass before, over a context of true
features up to its index and its own chain behind it: what serving sees. Passes weigh the same, no gradient flows from one
into another, and the target's top-K tokens get a loss of their own. Masked scores are -inf (the reference's 0 is a defect).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heads import LAST_HIDDEN, shift
from heads.eagle1 import Eagle1Head
from heads.layers import document_starts
from heads.target import TargetParts
from recipes.objective_blocks import Eagle1Objective as Eagle1Block
from train.depths import Compared, Depths
from train.losses import HeadLoss, Teacher, compare_kl
from train.objective import Output
from train.packing import Batch

NOISE_LENGTH = 512  # tokens of a row at which `objective.noise` applies as it is (METHODS §2.2)
VALIDATION_DEPTHS = 5  # passes that validation makes, so that AL~ of longer chains is known where training makes fewer


class Eagle1Objective(nn.Module):
    """Sum over passes of feature_weight * smooth-L1 + logit_weight * KL + top_k_weight * top-K."""

    def __init__(self, head: Eagle1Head, target: TargetParts, objective: Eagle1Block):
        super().__init__()
        self.head, self.objective = head, objective
        self.compared = Compared(head.trained_vocab, target)

    def forward(self, batch: Batch) -> Output:
        head, cfg = self.head, self.objective
        depths = range(cfg.passes if self.training else max(cfg.passes, VALIDATION_DEPTHS))
        weights = [shift.label_weight(batch.loss_mask, batch.document, i) for i in depths]
        needed = [mask.nonzero()[:, 0] for mask in shift.rollout_rows(weights)]
        tokens = [shift.draft_inputs(batch.input_ids, i) for i in depths]
        feature = head.fuse({LAST_HIDDEN: batch.last_hidden})
        if self.training and cfg.noise > 0:
            feature = feature + input_noise(feature, batch.document, cfg.noise)
        rolled = head.rollout(feature, tokens, batch.positions, document_starts(batch.document), needed)

        rows = [weight.nonzero()[:, 0] for weight in weights]
        states = [state[weights[i][needed[i]]] for i, state in enumerate(rolled)]
        pairs = Depths(batch, rows, self.compared.draft_ids())
        scaled = [state * head.logit_scale for state in states]
        ones = [torch.ones(len(row), device=row.device) for row in rows]
        compared = pairs.compare(scaled, ones, self.compared.draft_head(head.lm_head), self._compare)
        imitation = [
            cfg.feature_weight
            * F.smooth_l1_loss(state.float(), batch.last_hidden[row + shift.teacher_index(i)].float(), reduction="none").mean(-1)
            for i, (state, row) in enumerate(zip(states, rows, strict=True))
        ]
        loss_sum = compared[0].loss_sum + torch.cat(imitation).sum()
        return pairs.output([HeadLoss(loss_sum, a.loss + b.detach(), a.correct) for a, b in zip(compared, imitation, strict=True)])

    def _compare(self, z: Tensor, picked: Tensor, teacher: Teacher, teacher_row: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        """logit_weight * KL + top_k_weight * top-K of a chunk of draft logits z [S, V], and the gradient (`losses.Compare`)."""
        cfg = self.objective
        if cfg.top_k_weight == 0:
            loss, grad = compare_kl(z, picked, teacher, teacher_row, *rest)
            return loss.mul_(cfg.logit_weight), grad.mul_(cfg.logit_weight)
        return kl_and_top_k(z, teacher, teacher_row, cfg.logit_weight, cfg.top_k, cfg.top_k_weight)


def kl_and_top_k(z: Tensor, teacher: Teacher, teacher_row: Tensor, kl_weight: float, k: int, top_k_weight: float) -> tuple[Tensor, Tensor]:
    """kl_weight * KL(p||q) - top_k_weight * sum over the k most likely tokens of p log q, and its gradient (METHODS §4).

    p is not normalised again over the k tokens.

    Args:
        z: [S, V] draft logits. teacher_row: int64 [S], sorted.

    Returns:
        Losses [S] and gradients with respect to z [S, V].
    """
    distinct, index = torch.unique_consecutive(teacher_row, return_inverse=True)
    log_p = F.log_softmax(teacher.draft_logits(distinct), -1)
    log_q = F.log_softmax(z, -1)
    top_log_p, top = log_p.topk(k, -1)
    top_p, top, p = top_log_p.exp()[index], top[index], log_p.exp()
    negative_entropy = torch.linalg.vecdot(p, log_p)[index]
    p = p[index]
    kl = negative_entropy - torch.linalg.vecdot(p, log_q)
    top_loss = -(top_p * log_q.gather(1, top)).sum(-1)
    # d KL = q - p, d top-K = q * (mass of the k tokens) - p on those tokens
    grad = log_q.exp_().mul_(kl_weight + top_k_weight * top_p.sum(-1, keepdim=True)).sub_(p.mul_(kl_weight))
    grad.scatter_add_(1, top, top_p.mul(-top_k_weight))
    return kl_weight * kl + top_k_weight * top_loss, grad


def input_noise(feature: Tensor, document: Tensor, noise: float) -> Tensor:
    """[N, H] U(-noise, noise) * 512 / (length of the row), drawn anew for every batch."""
    _, row, length = torch.unique_consecutive(document, return_inverse=True, return_counts=True)
    return (2 * torch.rand_like(feature) - 1) * (noise * NOISE_LENGTH / length[row])[:, None].to(feature.dtype)


if __name__ == "__main__":
    from train.loop import main

    main("eagle1", Eagle1Objective)
