"""Medusa-1's objective: which head learns which token, with which weight."""

import pytest
import torch
import torch.nn.functional as F

from heads import LAST_HIDDEN, shift
from heads.medusa import MedusaHead
from heads.vocab import DraftVocab
from recipes.head_blocks import MedusaHead as Block
from recipes.objective_blocks import MedusaObjective as Settings
from train.medusa import MedusaObjective
from train.objective import simulate_chain

LM_HEADS = [{}, {"shared_lm_head": True}, {"shared_lm_head": True, "train_lm_head": False}]


def make(target, loss="kl", heads=3, decay=0.8, frequent=range(50), **block) -> MedusaObjective:
    head = MedusaHead(Block(num_heads=heads, **block), target, DraftVocab(torch.tensor(list(frequent)), 50))
    with torch.no_grad():
        for p in head.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    return MedusaObjective(head, target, Settings(loss=loss, head_decay=decay)).train()


@pytest.mark.parametrize("loss", ["kl", "ce"])
@pytest.mark.parametrize("lm_heads", LM_HEADS, ids=str)
def test_alignment_table(small_target, packed_batch, monkeypatch, loss, lm_heads):
    """METHODS §1.2, §15.20: head i at index t predicts x[t+2+i], its teacher is the target at t + 1 + i; labels do not add up."""
    batch = packed_batch((2, 4), (2, 2), tokens=torch.tensor([10, 11, 12, 13, 14, 15, 20, 21, 22, 23]))
    object.__setattr__(batch, "last_hidden", torch.eye(10, 32))  # row t is the t-th unit vector
    rows = torch.full((50, 32), -30.0)
    for t in range(9):
        rows[batch.input_ids[t + 1], t] = 30.0  # the target at t says x[t+1]
    object.__setattr__(small_target, "lm_head", rows)
    objective = make(small_target, loss, **lm_heads)
    with torch.no_grad():
        for i in range(3):
            if lm_heads.get("train_lm_head", True):
                objective.head.lm_head_of(i).copy_(rows)
    # An oracle: head i turns the unit vector of t into that of t + 1 + i.
    monkeypatch.setattr(objective.head, "states", lambda x, i: torch.roll(x, 1 + i, 1).requires_grad_())
    out = objective(batch)
    table = [(i, t, int(shift.draft_labels(batch.input_ids, i)[t]), t + shift.teacher_index(i)) for i, t in out.hits.nonzero().tolist()]
    #       head, index, predicted, teacher
    assert table == [(0, 1, 13, 2), (0, 2, 14, 3), (0, 3, 15, 4), (0, 7, 23, 8)] + [
        (1, 0, 13, 2),
        (1, 1, 14, 3),
        (1, 2, 15, 4),
        (1, 6, 23, 8),
    ] + [
        (2, 0, 14, 3),
        (2, 1, 15, 4),
    ]
    assert out.depth_count.tolist() == out.depth_correct.tolist() == [4, 4, 2]
    assert out.loss_sum.item() == pytest.approx(0, abs=1e-4)


@pytest.mark.parametrize("frequent", [range(50), range(0, 50, 2)], ids=["all tokens", "draft vocabulary"])
@pytest.mark.parametrize("loss", ["kl", "ce"])
@pytest.mark.parametrize("lm_heads", LM_HEADS, ids=str)
def test_is_the_plain_loss(small_target, packed_batch, loss, lm_heads, frequent):
    """METHODS §1.3: sum over heads of 0.8^(i + 1) times KL to the target or CE on the token; every head gets a gradient.

    Over a draft vocabulary, rows whose label is another token give no loss and count as missed.
    """
    objective, batch = make(small_target, loss, frequent=frequent, **lm_heads), packed_batch((3, 6), (1, 1), (2, 5))
    head, total, depth_loss, ids = objective.head, torch.zeros(()), torch.zeros(3), torch.tensor(list(frequent))
    for i in range(3):
        for t in shift.label_weight(batch.loss_mask, batch.document, i).nonzero()[:, 0].tolist():
            label = batch.input_ids[t + 2 + i]
            if label not in ids:
                continue
            log_q = (head.states(batch.last_hidden[t], i) @ head.lm_head_of(i).T).log_softmax(-1)
            if loss == "ce":
                value = -log_q[(ids == label).nonzero()[0, 0]]
            else:
                value = F.kl_div(log_q, (batch.last_hidden[t + 1 + i] @ small_target.lm_head[ids].T).softmax(-1), reduction="sum")
            total, depth_loss[i] = total + 0.8 ** (i + 1) * value, depth_loss[i] + value.item()
    out = objective(batch)
    torch.testing.assert_close(out.loss_sum, total, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(out.depth_loss, depth_loss, rtol=1e-4, atol=1e-4)
    parameters = dict(objective.named_parameters())
    ours, plain = (torch.autograd.grad(x, list(parameters.values()), retain_graph=True) for x in (out.loss_sum, total))
    for name, a, b in zip(parameters, ours, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")
        assert b.abs().max() > 0, name
    checked = objective.eval()(batch)
    for i, t in checked.hits.nonzero().tolist():
        assert ids[(head.states(batch.last_hidden[t], i) @ head.lm_head_of(i).T).argmax()] == batch.input_ids[t + 2 + i]
    assert checked.depth_count.tolist() == out.depth_count.tolist()


@pytest.mark.parametrize("documents", [[(3, 0)], [(2, 1)], [(1, 2), (5, 1)]], ids=str)
@pytest.mark.parametrize("lm_heads", LM_HEADS, ids=str)
def test_short_rows_and_nothing_supervised(small_target, packed_batch, documents, lm_heads):
    """B03, Medusa#95/#134: rows shorter than the heads reach, or without an answer, give a finite loss that reaches every parameter."""
    objective, batch = make(small_target, **lm_heads), packed_batch(*documents)
    out = objective(batch)
    out.loss_sum.backward()
    assert torch.isfinite(out.loss_sum) and all(p.grad is not None and torch.isfinite(p.grad).all() for p in objective.parameters())
    if not out.depth_count.any():
        assert out.loss_sum.item() == 0 and not any(p.grad.any() for p in objective.parameters())


@pytest.mark.parametrize("lm_heads", LM_HEADS[:2], ids=str)
def test_overfits_one_row(small_target, packed_batch, lm_heads):
    """B33: one row learnt by heart, every draft is accepted; training accuracy is what `propose` drafts."""
    tokens = torch.randint(50, (20,))
    batch = packed_batch((4, 16), tokens=tokens)
    objective = make(small_target, "ce", **lm_heads)
    optimizer = torch.optim.Adam(objective.parameters(), lr=1e-2)
    for _ in range(200):
        out = objective(batch)
        optimizer.zero_grad()
        (out.loss_sum / out.depth_count.sum()).backward()
        optimizer.step()
    out = objective.eval()(batch)
    assert simulate_chain(out.hits, batch.loss_mask, batch.document, 3) == [[3] * 4]
    head = objective.head
    for t in (6, 11):
        seen = {LAST_HIDDEN: batch.last_hidden[: t + 1]}
        drafts = head.propose(seen, tokens[1 : t + 2], torch.arange(t + 1), head.new_cache(), 3, lambda z: z.argmax(-1))
        assert drafts.tolist() == tokens[t + 2 : t + 5].tolist()
