"""Draft distribution against target distribution, LM head included, in chunks.

`head_loss` goes from states to a summed loss. The gradient with respect to states and LM head is formed in the forward
pass, chunk by chunk, so nothing of size rows x vocabulary outlives its chunk; the teacher's logits are computed once a
teacher row and compared with every depth that asks for that row.

Shapes: S student rows (all depths together), U teacher rows, H hidden size, D draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from heads.layers import whole_rows
from heads.target import TargetParts

CHUNK_LOGITS = 1 << 21  # logits held at once (rows of a chunk x D): 8 MB in float32, about a core's second-level cache
GPU_CHUNK_LOGITS = 1 << 26  # on a GPU: 256 MiB in float32, hundreds of rows even of the largest vocabulary
CHUNK_ROWS = 128  # rows of a chunk at least: below it, reading a whole vocabulary's LM head costs more than the products
GROUP_CHUNKS = (
    8  # chunks whose logit gradients go into one product with the states: each such product rewrites all of the LM head's gradient
)


class HeadLoss(NamedTuple):
    """`loss_sum` carries the gradient; the rest is detached and per student row."""

    loss_sum: Tensor  # scalar: sum of weight * loss
    loss: Tensor  # [S] unweighted
    correct: Tensor  # [S] bool: draft argmax is the label


@dataclass(frozen=True)
class Teacher:
    """Target distributions at U positions: post-norm states, and the LM head rows of the draft vocabulary.

    `target` gives the family's scale alone: its own tensors stay on the CPU, these are where the states are.
    """

    last_hidden: Tensor  # [U, H]
    rows: Tensor  # [D, H] the target's LM head at the draft vocabulary
    target: TargetParts
    all_rows: Tensor | None = None  # [V, H] the whole LM head, for what is normalised over the target's vocabulary

    def draft_logits(self, chunk: Tensor) -> Tensor:
        """Target logits [u, D] over the draft vocabulary of teacher rows `chunk`."""
        hidden = whole_rows(self.last_hidden[chunk].to(self.rows.dtype))
        return self.target.scale_logits(F.linear(hidden, self.rows)[: len(chunk)]).float()

    def log_normaliser(self, chunk: Tensor) -> Tensor:
        """[u, 1] log-sum-exp over the whole target vocabulary, in tiles of it."""
        assert self.all_rows is not None, "a loss over the whole vocabulary gets the whole LM head"
        hidden = self.last_hidden[chunk].to(self.all_rows.dtype)
        tiles = [self.target.scale_logits(F.linear(hidden, tile)).float().logsumexp(-1) for tile in self.all_rows.split(8192)]
        return torch.stack(tiles).logsumexp(0)[:, None]


# (draft logits z [S, D], z at the labels [S, 1], teacher, sorted teacher rows [S], labels [S], eta) → losses [S] and gradients of
# them with respect to z [S, D]; z may be overwritten.
Compare = Callable[[Tensor, Tensor, Teacher, Tensor, Tensor, float], tuple[Tensor, Tensor]]


def head_loss(
    states: Tensor,
    weight: Tensor,
    teacher: Teacher,
    teacher_row: Tensor,
    row_weight: Tensor,
    label: Tensor,
    kind: str | Compare,
    lk_eta: float = 3.0,
) -> HeadLoss:
    """Sum of weighted losses of student rows against the target.

    Args:
        states: [S, H] normed draft states. weight: [D, H] draft LM head.
        teacher_row: int64 [S], which teacher row each student row is compared with.
        row_weight: [S] weight of each row in the sum. label: int64 [S] draft id of the answer's token, -1 if it has none.
        kind: "kl": KL(p||q), p the target's distribution over the draft vocabulary; "ce": -log q(label), rows without
            a label give no loss; "lk": e^(-eta a) KL(p||q) + (1 - e^(-eta a)) (1 - a) with the acceptance
            a = sum min(p, q), p there normalised over the whole vocabulary (arXiv 2602.23881). Or a function of a method's own.
    """
    compare = _COMPARE[kind] if isinstance(kind, str) else kind
    loss_sum, loss, correct = _HeadLoss.apply(states, weight, teacher, teacher_row, row_weight, label, compare, lk_eta)  # type: ignore[misc]
    return HeadLoss(loss_sum, loss, correct)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, states, weight, teacher, teacher_row, row_weight, label, compare, lk_eta):
        need_x, need_w = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        compute = torch.get_autocast_dtype(states.device.type) if torch.is_autocast_enabled(states.device.type) else states.dtype
        x, w = states.to(compute), weight.to(compute)
        grad_x = torch.zeros_like(states) if need_x else None
        grad_w = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if need_w else None
        losses = torch.zeros(len(x), dtype=torch.float32, device=x.device)
        correct = torch.zeros(len(x), dtype=torch.bool, device=x.device)
        teacher = replace(teacher, rows=teacher.rows.to(compute))
        order = torch.argsort(teacher_row, stable=True)
        chunk = max(CHUNK_ROWS, (CHUNK_LOGITS if x.device.type == "cpu" else GPU_CHUNK_LOGITS) // len(w))
        for group in order.split(GROUP_CHUNKS * chunk):
            rows = whole_rows(x[group])
            grads = x.new_zeros(len(rows), len(w)) if need_x or need_w else None
            for number, part in enumerate(group.split(chunk)):
                z = F.linear(rows[number * chunk : (number + 1) * chunk], w)[: len(part)].float()
                target_id = label[part]
                picked = z.gather(1, target_id.clamp(min=0)[:, None])
                correct[part] = (target_id >= 0) & (picked[:, 0] >= z.amax(-1))
                losses[part], grad = compare(z, picked, teacher, teacher_row[part], target_id, lk_eta)
                if grads is not None:
                    torch.mul(grad, row_weight[part][:, None], out=grads[number * chunk : number * chunk + len(part)])
            if grads is not None and grad_x is not None:
                grad_x[group] = (grads @ w)[: len(group)].to(grad_x.dtype)
            if grads is not None and grad_w is not None:
                grad_w.addmm_(grads.t(), rows) if grads.dtype == grad_w.dtype else grad_w.add_(grads.t() @ rows)
        ctx.save_for_backward(grad_x, grad_w)
        ctx.weight_dtype = weight.dtype
        ctx.mark_non_differentiable(losses, correct)
        return (losses * row_weight).sum(), losses, correct

    @staticmethod
    def backward(ctx, scale, *_):  # type: ignore[override]
        grad_x, grad_w = ctx.saved_tensors
        return (
            None if grad_x is None else grad_x * scale.to(grad_x.dtype),
            None if grad_w is None else (grad_w * scale).to(ctx.weight_dtype),
            None, None, None, None, None, None,
        )  # fmt: skip


def _teacher_logits(teacher: Teacher, teacher_row: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Distinct teacher rows of a chunk (sorted rows, so each is computed once), their logits, and each student's index."""
    distinct, index = torch.unique_consecutive(teacher_row, return_inverse=True)
    return distinct, teacher.draft_logits(distinct), index


def compare_kl(z: Tensor, picked: Tensor, teacher: Teacher, teacher_row: Tensor, label: Tensor, eta: float) -> tuple[Tensor, Tensor]:
    """KL(p||q) a row, and its gradient q - p; z is overwritten."""
    _, t, index = _teacher_logits(teacher, teacher_row)
    log_p = F.log_softmax(t, -1)
    p = log_p.exp()
    negative_entropy = torch.linalg.vecdot(p, log_p)
    p = p[index]
    cross = torch.linalg.vecdot(p, z)
    q, log_total = _softmax_(z)
    return (negative_entropy[index] - cross + log_total).clamp_(min=0), q.sub_(p)


def _ce(z: Tensor, picked: Tensor, teacher: Teacher, teacher_row: Tensor, label: Tensor, eta: float) -> tuple[Tensor, Tensor]:
    """-log q(label), 0 without a label, and its gradient."""
    has = (label >= 0)[:, None]
    q, log_total = _softmax_(z)
    grad = q.mul_(has)
    grad.scatter_add_(1, label.clamp(min=0)[:, None], -has.to(grad.dtype))
    return (log_total - picked[:, 0]) * has[:, 0], grad


def _lk(z: Tensor, picked: Tensor, teacher: Teacher, teacher_row: Tensor, label: Tensor, eta: float) -> tuple[Tensor, Tensor]:
    """The hybrid LK loss: KL while the acceptance is low, 1 - acceptance once it is high."""
    distinct, t, index = _teacher_logits(teacher, teacher_row)
    full = (t - teacher.log_normaliser(distinct)).exp()[index]  # p over the whole vocabulary: what serving accepts with
    log_p = F.log_softmax(t, -1)
    p = log_p.exp()[index]
    log_q = F.log_softmax(z, -1)
    q = log_q.exp()
    kl = (p * (log_p[index] - log_q)).sum(-1)
    acceptance = torch.minimum(full, q).sum(-1)
    share = torch.exp(-eta * acceptance)[:, None]
    below = q * (q < full)
    grad_acceptance = below - q * below.sum(-1, keepdim=True)
    grad = share * (q - p) - (1 - share) * grad_acceptance
    return share[:, 0] * kl + (1 - share[:, 0]) * (1 - acceptance), grad


def _softmax_(z: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax of z in place, and its log-sum-exp [rows]."""
    peak = z.amax(-1, keepdim=True)
    q = z.sub_(peak).exp_()
    total = q.sum(-1, keepdim=True)
    return q.div_(total), (peak + total.log()).squeeze(-1)


_COMPARE = {"kl": compare_kl, "ce": _ce, "lk": _lk}


def plus_ce(kind: str, weight: float) -> Compare:
    """The loss `kind` plus `weight` times the cross-entropy on the answer's token."""

    def compare(z: Tensor, picked: Tensor, teacher: Teacher, teacher_row: Tensor, label: Tensor, eta: float) -> tuple[Tensor, Tensor]:
        ce, ce_grad = _ce(z.clone(), picked, teacher, teacher_row, label, eta)
        loss, grad = _COMPARE[kind](z, picked, teacher, teacher_row, label, eta)
        return loss + weight * ce, grad.add_(ce_grad, alpha=weight)

    return compare
