"""The fused head loss equals the plain formulas, in value and gradient."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig

from heads.layers import RMSNorm
from heads.target import TargetParts
from train import losses
from train.losses import Teacher, head_loss

V, D, H, U, S = 40, 24, 16, 9, 21


def case(softcap=None):
    config = LlamaConfig(hidden_size=H, vocab_size=V, num_attention_heads=2)
    if softcap:
        config.final_logit_softcapping = softcap
    lm_head = torch.randn(V, H)
    target = TargetParts(Path("x"), config, lm_head, lm_head, None, RMSNorm(H, 1e-6), "x")
    ids = torch.randperm(V)[:D].sort().values
    teacher = Teacher(torch.randn(U, H), lm_head[ids], target, lm_head)
    states = torch.randn(S, H, requires_grad=True)
    weight = (0.5 * torch.randn(D, H)).requires_grad_(True)
    label = torch.randint(D, (S,))
    label[::5] = -1
    return states, weight, teacher, torch.randint(U, (S,)), torch.rand(S), label


def plain(states, weight, teacher, teacher_row, row_weight, label, kind, eta=3.0):
    t = teacher.target.scale_logits(teacher.last_hidden @ teacher.rows.T)[teacher_row]
    full = (t - teacher.target.logits(teacher.last_hidden).logsumexp(-1)[teacher_row][:, None]).exp()
    log_q = F.log_softmax(states @ weight.T, -1)
    p = t.softmax(-1)
    kl = (p * (p.log() - log_q)).sum(-1)
    if kind == "kl":
        loss = kl
    elif kind == "ce":
        loss = F.cross_entropy(states @ weight.T, label.clamp(min=0), reduction="none") * (label >= 0)
    else:
        acceptance = torch.minimum(full, log_q.exp()).sum(-1)
        share = torch.exp(-eta * acceptance).detach()
        loss = share * kl + (1 - share) * (1 - acceptance)
    return loss, (loss * row_weight).sum()


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("kind", ["kl", "ce", "lk"])
@pytest.mark.parametrize("chunk", [D * 2, 1 << 21])
def test_value_and_gradient(kind, chunk, softcap, monkeypatch):
    """E04: chunks, and groups of them, change nothing; PEERS §4.4: the target's soft-cap is in the teacher."""
    monkeypatch.setattr(losses, "CHUNK_LOGITS", chunk)
    monkeypatch.setattr(losses, "CHUNK_ROWS", 1)
    args = case(softcap)
    states, weight = args[:2]
    result = head_loss(*args, kind=kind)
    rows, total = plain(*args, kind=kind)
    torch.testing.assert_close(result.loss, rows.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(result.loss_sum, total, rtol=1e-4, atol=1e-5)
    got = torch.autograd.grad(result.loss_sum * 2, (states, weight))
    want = torch.autograd.grad(total * 2, (states, weight))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
    correct = (states @ weight.T).argmax(-1) == args[5]
    assert torch.equal(result.correct, correct)


@pytest.mark.parametrize("kind", ["kl", "ce"])
def test_half_precision_is_close(kind, monkeypatch):
    """Under autocast products are in bfloat16, sums over rows and the gradients that come out in float32."""
    monkeypatch.setattr(losses, "CHUNK_LOGITS", D * 2)
    monkeypatch.setattr(losses, "CHUNK_ROWS", 1)
    args = case()
    states, weight = args[:2]
    with torch.autocast("cpu", torch.bfloat16):
        result = head_loss(*args, kind=kind)
    result.loss_sum.backward()
    rows, total = plain(*args, kind=kind)
    grads = torch.autograd.grad(total, [states, weight])
    assert result.loss_sum.dtype == torch.float32 and weight.grad.dtype == torch.float32
    torch.testing.assert_close(result.loss_sum, total, rtol=0.03, atol=0)
    for ours, exact in zip((states.grad, weight.grad), grads, strict=True):
        assert (ours - exact).norm() < 0.03 * exact.norm()


@pytest.mark.parametrize("kind", ["kl", "ce", "lk"])
def test_no_rows_gives_zero_that_reaches_everything(kind):
    """B03, B36: nothing supervised is a finite zero with a gradient for every parameter."""
    states, weight, teacher, teacher_row, row_weight, label = case()
    empty = slice(0, 0)
    result = head_loss(states[empty], weight, teacher, teacher_row[empty], row_weight[empty], label[empty], kind)
    grads = torch.autograd.grad(result.loss_sum, (states, weight))
    assert result.loss_sum.item() == 0 and not any(g.any() for g in grads)


def test_frozen_lm_head_gets_no_gradient():
    states, weight, *rest = case()
    head_loss(states, weight.detach(), *rest, kind="kl").loss_sum.backward()
    assert states.grad is not None


def test_nothing_of_size_rows_by_vocabulary_is_kept():
    """E04: what the graph holds between forward and backward is states and LM head sized."""
    states, weight, *rest = case()
    out = head_loss(states, weight, *rest, kind="kl").loss_sum
    saved = out.grad_fn.next_functions[0][0].saved_tensors if out.grad_fn.name() != "_HeadLossBackward" else out.grad_fn.saved_tensors
    assert sorted(t.numel() for t in saved) == sorted([states.numel(), weight.numel()])
