"""EAGLE-1's objective and HASS: alignment, noise, and that they are the plain losses of real drafts."""

import pytest
import torch
import torch.nn.functional as F

from heads import LAST_HIDDEN, shift
from heads.eagle1 import Eagle1Head
from heads.target import TargetParts
from heads.vocab import DraftVocab
from recipes.errors import TargetError
from recipes.head_blocks import Eagle1Head as Block
from recipes.objective_blocks import Eagle1Objective as Settings
from train import losses
from train.eagle1 import VALIDATION_DEPTHS, Eagle1Objective, input_noise, kl_and_top_k
from train.losses import Teacher
from train.objective import simulate_chain

HASS = {"passes": 3, "top_k": 4, "top_k_weight": 0.7}


def make(target: TargetParts, frequent=range(50), **settings) -> Eagle1Objective:
    head = Eagle1Head(Block(), target, DraftVocab(torch.tensor(list(frequent)), 50))
    with torch.no_grad():
        for p in head.parameters():
            p.normal_(std=0.15)
    return Eagle1Objective(head, target, Settings(**{"noise": 0.0, **settings}))


def test_alignment_table(small_target, packed_batch, monkeypatch):
    """METHODS §2.2, B20: feature h_t, token x[t+1], position t; compared with h_{t+1}; where x[t+1] and x[t+2] are the answer's."""
    batch = packed_batch((2, 3), (2, 2), tokens=torch.tensor([10, 11, 12, 13, 14, 20, 21, 22, 23]))
    features = torch.eye(9, 32)  # row t is the t-th unit vector
    object.__setattr__(batch, "last_hidden", features)
    objective, asked = make(small_target, passes=2).train(), {}

    def spy(feature, tokens, positions, starts, rows):
        asked.update(feature=feature, tokens=tokens, positions=positions, starts=starts, rows=rows)
        # An oracle: at index t and pass i the target's state of t + 1 + i.
        return [features[row + 1 + i].clone().requires_grad_() for i, row in enumerate(rows)]

    monkeypatch.setattr(objective.head, "rollout", spy)
    out = objective(batch)
    assert torch.equal(asked["feature"], features)  # h_t stays at index t in every pass
    table = [
        (i, t, int(asked["tokens"][i][t]), int(batch.input_ids[t + 2 + i]), int(asked["positions"][t]) + i)
        for i, weight in enumerate(shift.label_weight(batch.loss_mask, batch.document, i) for i in range(2))
        for t in weight.nonzero()[:, 0].tolist()
    ]
    #       pass, index, eaten, predicted, position
    assert table == [(0, 1, 12, 13, 1), (0, 2, 13, 14, 2), (0, 6, 22, 23, 1), (1, 0, 12, 13, 1), (1, 1, 13, 14, 2), (1, 5, 22, 23, 1)]
    assert asked["starts"].tolist() == [0] * 5 + [5] * 4 and out.depth_count.tolist() == [3, 3]
    # The oracle imitates exactly: any other pairing of states, teachers or rows would cost something.
    assert out.loss_sum.item() == pytest.approx(0, abs=1e-5) and torch.allclose(out.depth_loss, torch.zeros(2), atol=1e-5)


def test_oracle_states_are_all_accepted(small_target, packed_batch, monkeypatch):
    """The target's own next states score 100 % at every depth where the answer is the target's argmax, and AL~ is k + 1."""
    objective = make(small_target).eval()
    tokens = torch.randint(50, (24,))
    batch = packed_batch((4, 20), tokens=tokens)
    states = F.normalize(small_target.lm_head, dim=-1)[shift.next_tokens(tokens)] * 30  # at t the LM head says x[t+1]
    object.__setattr__(batch, "last_hidden", states)
    oracle = lambda feature, tokens, positions, starts, rows: [states[row + 1 + i] for i, row in enumerate(rows)]  # noqa: E731
    monkeypatch.setattr(objective.head, "rollout", oracle)
    out = objective(batch)
    assert len(out.hits) == VALIDATION_DEPTHS and torch.equal(out.depth_correct, out.depth_count) and out.depth_count[0] == 19
    assert simulate_chain(out.hits, batch.loss_mask, batch.document, 4) == [[4] * 4]


def real_passes(objective, batch) -> list[list[tuple[int, torch.Tensor]]]:
    """For every pass (index, state with its graph), drafted one entry after the other; given features carry no gradient."""
    head, passes = objective.head, objective.objective.passes
    found: list[list[tuple[int, torch.Tensor]]] = [[] for _ in range(passes)]
    weights = [shift.label_weight(batch.loss_mask, batch.document, i) for i in range(passes)]
    for t in range(len(batch.input_ids)):
        start = int((batch.document == batch.document[t]).nonzero()[0])
        if not any(weight[t] for weight in weights):
            continue
        cache, prefix = head.new_cache(), slice(start, t + 1)
        state = head.advance(batch.last_hidden[prefix], batch.input_ids[start + 1 : t + 2], batch.positions[prefix], cache)[-1:]
        for i in range(passes):
            if i and t + 1 + i < len(batch.input_ids):
                eaten = batch.input_ids[t + 1 + i : t + 2 + i]
                state = head.advance(state.detach(), eaten, batch.positions[t : t + 1] + i, cache)
            if weights[i][t]:
                found[i].append((t, state[0]))
    return found


@pytest.mark.parametrize("frequent", [range(50), range(0, 50, 2)], ids=["all tokens", "frequent tokens"])
@pytest.mark.parametrize("settings", [{}, {"feature_weight": 0.0, "logit_weight": 1.0}, HASS], ids=str)
def test_is_the_plain_loss_of_real_drafts(small_target, packed_batch, settings, frequent, monkeypatch):
    """METHODS §2.3, §4, §16.8: value and gradient; passes are detached, masked scores are -inf, weights are the paper's.

    Over the frequent tokens alone, rows whose label is another one only imitate the state.
    """
    ids = torch.tensor(list(frequent))
    monkeypatch.setattr(losses, "CHUNK_LOGITS", 50 * 3)
    monkeypatch.setattr(losses, "CHUNK_ROWS", 1)
    objective, batch = make(small_target, frequent, **settings).train(), packed_batch((3, 6), (1, 1), (2, 5))
    cfg, total = objective.objective, torch.zeros(())
    depth_loss, correct = torch.zeros(cfg.passes), torch.zeros(cfg.passes, dtype=torch.long)
    for i, drafted in enumerate(real_passes(objective, batch)):
        for t, state in drafted:
            target_state = batch.last_hidden[t + 1 + i]
            rows, label = small_target.lm_head[ids], batch.input_ids[t + 2 + i]
            p, log_q = (target_state @ rows.T).softmax(-1), (state @ rows.T).log_softmax(-1)
            kl = F.kl_div(log_q, p, reduction="sum")
            top = p.topk(cfg.top_k)
            loss = cfg.feature_weight * F.smooth_l1_loss(state, target_state)
            if label in ids:
                loss = loss + cfg.logit_weight * kl - cfg.top_k_weight * (top.values * log_q[top.indices]).sum()
                correct[i] += ids[log_q.argmax()] == label
            total, depth_loss[i] = total + loss, depth_loss[i] + loss.item()
    out = objective(batch)
    torch.testing.assert_close(out.loss_sum, total, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(out.depth_loss, depth_loss, rtol=1e-4, atol=1e-4)
    assert out.depth_correct.tolist() == correct.tolist() == out.hits.sum(1).tolist()
    parameters = dict(objective.named_parameters())
    ours = torch.autograd.grad(out.loss_sum, list(parameters.values()))
    plain = torch.autograd.grad(total, list(parameters.values()))
    for name, a, b in zip(parameters, ours, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")
        assert b.abs().max() > 0, name


def test_top_k_loss_and_its_gradient(small_target):
    """METHODS §4: soft cross-entropy on the target's k most likely tokens, p not normalised again."""
    hidden, z = torch.randn(3, 32), torch.randn(5, 50, requires_grad=True)
    rows = torch.tensor([0, 0, 1, 2, 2])
    p, log_q = (hidden @ small_target.lm_head.T).softmax(-1)[rows], z.log_softmax(-1)
    top = p.topk(6, -1)
    expected = 0.1 * (p * (p.log() - log_q)).sum(-1) - 2.0 * (top.values * log_q.gather(1, top.indices)).sum(-1)
    gradient = torch.autograd.grad(expected.sum(), z)[0]
    loss, grad = kl_and_top_k(z.detach().clone(), Teacher(hidden, small_target.lm_head, small_target), rows, 0.1, 6, 2.0)
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(grad, gradient, rtol=1e-4, atol=1e-5)


def test_noise_is_on_inputs_only_and_scaled_by_the_rows_length(small_target, packed_batch, monkeypatch):
    """METHODS §2.2: U(-0.1, 0.1) * 512 / L, L the row's own length; labels, and validation, see none of it."""
    batch = packed_batch((4, 60), (2, 6))
    noise = input_noise(batch.last_hidden, batch.document, 0.1)
    for part, length in ((noise[:64], 64), (noise[64:], 8)):
        bound = 0.1 * 512 / length
        assert part.abs().max() <= bound and part.abs().max() > 0.95 * bound and abs(part.mean()) < 0.1 * bound
    fed, objective = [], make(small_target, noise=0.1)
    rollout = objective.head.rollout
    monkeypatch.setattr(objective.head, "rollout", lambda feature, *rest: fed.append(feature) or rollout(feature, *rest))
    before = batch.last_hidden.clone()
    objective.train()(batch)
    objective.eval()(batch)
    assert not torch.equal(fed[0], before) and torch.equal(fed[1], before) and torch.equal(batch.last_hidden, before)


@pytest.mark.parametrize("documents", [[(3, 0)], [(2, 1)], [(1, 2), (5, 1)]], ids=str)
def test_short_rows_and_nothing_supervised(small_target, packed_batch, documents):
    """B03: a row shorter than the passes, or without an answer, gives a finite loss that reaches every parameter."""
    objective, batch = make(small_target, **HASS).train(), packed_batch(*documents)
    out = objective(batch)
    out.loss_sum.backward()
    assert torch.isfinite(out.loss_sum) and all(p.grad is not None and torch.isfinite(p.grad).all() for p in objective.parameters())
    if not out.depth_count.any():
        assert out.loss_sum.item() == 0 and not any(p.grad.any() for p in objective.parameters())


def test_a_target_with_a_soft_cap_is_refused(small_target):
    """PEERS §4.4: losses through the target's LM head know no soft-cap; a logit scale they do."""
    small_target.config.logit_scale = 0.25
    assert make(small_target).head.logit_scale == 0.25
    small_target.config.final_logit_softcapping = 30.0
    with pytest.raises(TargetError, match="logit soft-cap of 30.0"):
        make(small_target)


def test_drafts_are_tempered_as_they_were_trained(small_target, packed_batch):
    """With a logit scale, q of real drafts is what training compares with the target's p, and the export tells vLLM the scale."""
    small_target.config.logit_scale = 0.25
    objective, batch = make(small_target, feature_weight=0, logit_weight=1).eval(), packed_batch((3, 6))
    head, p, total = objective.head, small_target.logits(batch.last_hidden).softmax(-1), 0.0
    for t in shift.label_weight(batch.loss_mask, batch.document, 0).nonzero()[:, 0].tolist():
        seen, cache, eaten = [], head.new_cache(), shift.draft_inputs(batch.input_ids, 0)[: t + 1]
        head.propose(
            {LAST_HIDDEN: batch.last_hidden[: t + 1]}, eaten, batch.positions[: t + 1], cache, 1,
            lambda logits, seen=seen: seen.append(logits[0]) or logits.argmax(-1),
        )  # fmt: skip
        log_q = seen[0].log_softmax(-1)
        total += float((p[t + 1] * (p[t + 1].log() - log_q)).sum())
    assert float(objective(batch).depth_loss[0]) == pytest.approx(total, rel=1e-4)
    assert head.served_config()["logit_scale"] == 0.25
    small_target.config.logit_scale = None
    assert "logit_scale" not in make(small_target).head.served_config()


@pytest.mark.parametrize("settings", [{}, HASS], ids=str)
def test_overfits_one_row(small_target, packed_batch, settings):
    """One row learnt by heart: every draft is accepted at every trained depth."""
    tokens = torch.randint(50, (20,))
    batch = packed_batch((4, 16), tokens=tokens)
    states = F.normalize(small_target.lm_head, dim=-1)[shift.next_tokens(tokens)] * 30
    object.__setattr__(batch, "last_hidden", states)
    objective = make(small_target, **{"logit_weight": 1.0, **settings}).train()
    optimizer = torch.optim.Adam(objective.parameters(), lr=5e-3)
    for _ in range(150):
        out = objective(batch)
        optimizer.zero_grad()
        (out.loss_sum / out.depth_count.sum()).backward()
        optimizer.step()
    k = objective.objective.passes
    (rounds,) = simulate_chain(objective.eval()(batch).hits, batch.loss_mask, batch.document, k)
    assert rounds == [k] * len(rounds) and len(rounds) >= 3
    drafts = objective.head.propose(
        {LAST_HIDDEN: states[:8]}, tokens[1:9], torch.arange(8), objective.head.new_cache(), k, lambda z: z.argmax(-1)
    )
    assert drafts.tolist() == tokens[9 : 9 + k].tolist()
