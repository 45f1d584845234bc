"""DFlash's objective: anchors, labels and weights, and that it is the plain loss of real drafts."""

from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator

from heads import shift
from heads.dflash import DflashHead
from heads.target import load_target_model, read_target
from heads.vocab import DraftVocab
from recipes.errors import RecipeError
from recipes.head_blocks import DflashHead as Block
from recipes.objective_blocks import DflashObjective as Settings
from recipes.schema import Target
from tests.train.plain import assert_reaches_every_parameter
from tests.train.stored import states_of
from train.dflash import DflashObjective, dpace_weights
from train.objective import simulate_chain
from train.packing import collate
from train.validate import chain_hits, validate

MASK = 49


def make(target, block_size=4, layers=2, vocab_size=50, **settings) -> DflashObjective:
    vocab = DraftVocab(torch.randperm(50)[:vocab_size].sort().values, 50)
    block = Block(aux_layers=[1, 3, 5], num_layers=layers, block_size=block_size, mask_token_id=MASK, draft_vocab_size=vocab_size)
    return DflashObjective(DflashHead(block, target, vocab), target, Settings(**settings))


def real_drafts(objective, batch, t):
    """Draft logits [B - 1, D] from the prefix <= t."""
    head, seen = objective.head, []
    start = int((batch.document == batch.document[t]).nonzero()[0])
    prefix, eaten = slice(start, t + 1), shift.draft_inputs(batch.input_ids, 0)
    head.propose(
        {k: h[prefix] for k, h in batch.hidden.items()}, eaten[prefix], batch.positions[prefix], head.new_cache(), head.block.max_depth,
        lambda logits: seen.append(logits) or logits.argmax(-1),
    )  # fmt: skip
    return seen[0]


def test_alignment_table(small_target, packed_batch, monkeypatch):
    """METHODS §9, §15.22: block behind t has anchor x[t+1]; slot j predicts the token at its own position, x[t+1+j]."""
    batch = packed_batch((2, 3), (2, 2), tokens=torch.tensor([10, 11, 12, 13, 14, 20, 21, 22, 23]))
    objective = make(small_target).eval()
    one_hot = torch.eye(50)
    objective.head.lm_head = one_hot

    def oracle(feature, tokens, positions, starts, rows, slots):
        assert tokens[rows].tolist() == [12, 13, 14, 22, 23]  # the anchors
        assert shift.block_positions(positions[rows], slots)[0].tolist() == [2, 3, 4, 5]
        padded = torch.cat([batch.input_ids, torch.full((slots,), 48)])
        return torch.stack([one_hot[padded[t + 2 : t + 1 + slots]] for t in rows.tolist()])

    monkeypatch.setattr(objective.head, "denoise", oracle)
    out = objective(batch)
    assert out.depth_count.tolist() == [3, 1, 0]  # 13 14 23; 14; nothing three behind an anchor
    assert out.depth_correct.tolist() == out.depth_count.tolist()
    assert out.hits.nonzero().tolist() == [[0, 1], [0, 2], [0, 6], [1, 1]]


def test_oracle_drafts_are_all_accepted(small_target, packed_batch, monkeypatch):
    """A draft that knows the answer has AL~ = B."""
    batch = packed_batch((3, 20))
    objective = make(small_target).eval()
    objective.head.lm_head = torch.eye(50)
    padded = torch.cat([batch.input_ids, torch.full((4,), 48)])
    known = lambda f, tokens, p, s, rows, slots: torch.stack([torch.eye(50)[padded[t + 2 : t + 1 + slots]] for t in rows.tolist()])  # noqa: E731
    monkeypatch.setattr(objective.head, "denoise", known)
    assert simulate_chain(objective(batch).hits, batch.loss_mask, batch.document, 3) == [[3] * 5]


@pytest.mark.parametrize(
    "settings", [{"loss": "ce"}, {"loss": "kl", "gamma": 2.0}, {"loss": "ce", "weights": "dpace", "alpha": 0.25}], ids=str
)
@pytest.mark.parametrize("vocab_size", [50, 30])
def test_is_the_plain_loss_of_real_drafts(small_target, packed_batch, settings, vocab_size):
    """METHODS §9.2, §16.8: summed over anchors and slots, from `propose` and the formulas."""
    objective, batch = make(small_target, vocab_size=vocab_size, **settings).eval(), packed_batch((3, 6), (2, 5))
    cfg, total, counts, hits = objective.objective, 0.0, [0] * 3, [0] * 3
    with torch.no_grad():
        for p in objective.parameters():
            p.normal_(std=0.3)
        for t in shift.draft_weight(batch.loss_mask, batch.document, 0).nonzero()[:, 0].tolist():
            logits, losses, confidence, valid = real_drafts(objective, batch, t), [0.0] * 3, [0.0] * 3, [False] * 3
            for i in range(3):
                valid[i] = t + 1 + i < len(batch.document) and bool(batch.document[t + 1 + i] == batch.document[t])
                has = t + 2 + i < len(batch.document) and bool(batch.document[t + 2 + i] == batch.document[t])
                label = int(objective.to_draft[batch.input_ids[t + 2 + i]]) if has else -1
                counts[i] += has
                hits[i] += has and int(logits[i].argmax()) == label
                if not valid[i] or (has and label < 0):
                    continue
                log_q = logits[i].log_softmax(-1)
                confidence[i] = float(log_q[label].exp()) if has else 0.0
                if cfg.loss == "ce":
                    losses[i] = -float(log_q[label]) if has else 0.0
                else:
                    p = (objective.head.lm_head @ batch.last_hidden[t + 1 + i]).softmax(-1)
                    losses[i] = float((p * (p.log() - log_q)).sum())
            if cfg.weights == "decay":
                weights = [float(torch.tensor(-i / cfg.gamma).exp()) for i in range(3)]
            else:
                s = [(1 - cfg.alpha) * q + cfg.alpha for q in confidence]
                weights = [sum(valid[m] * float(torch.tensor(s[: m + 1]).prod()) for m in range(j, 3)) for j in range(3)]
            total += sum(w * x for w, x in zip(weights, losses, strict=True))
        out = objective(batch)
    assert float(out.loss_sum) == pytest.approx(total, rel=1e-4)
    assert out.depth_count.tolist() == counts and out.depth_correct.tolist() == hits


@pytest.mark.parametrize("change", [{"logit_scale": 0.25}, {"final_logit_softcapping": 5.0}], ids=str)
def test_drafts_are_tempered_as_they_were_trained(small_target, packed_batch, change):
    """The target's scale or soft-cap is in p alone: q of real drafts is, unscaled, what training compares with p, as vLLM drafts."""
    small_target.config.update(change)
    objective, batch, total = make(small_target, vocab_size=30, loss="kl").eval(), packed_batch((3, 6)), 0.0
    with torch.no_grad():
        p = small_target.logits(batch.last_hidden, objective.head.draft_ids).softmax(-1)
        for t in shift.draft_weight(batch.loss_mask, batch.document, 0).nonzero()[:, 0].tolist():
            label = int(objective.to_draft[batch.input_ids[t + 2]]) if t + 2 < len(p) else 0
            log_q = real_drafts(objective, batch, t)[0].log_softmax(-1)
            total += float((p[t + 1] * (p[t + 1].log() - log_q)).sum()) * (label >= 0)
        assert float(objective(batch).depth_loss[0]) == pytest.approx(total, rel=1e-3)


def test_dpace_weights_are_suffix_sums():
    """METHODS §9.2: w_j = sum over m >= j of prod over i <= m of (1 - alpha) q_i + alpha; slots past the end count nothing."""
    q, asked = torch.tensor([[0.5, 0.2, 0.8]]), torch.tensor([[True, True, False]])
    a, b = 0.75, 0.75 * 0.6
    torch.testing.assert_close(dpace_weights(q, asked, 0.5), torch.tensor([[a + b, b, 0.0]]))


def test_anchors_per_document(small_target, packed_batch):
    """PEERS §2.4: the limit is a document's, only supervised tokens are anchors, blocks stand for all of them; drawn anew each time."""
    objective, batch = make(small_target, anchors=16).train(), packed_batch((10, 90), (60, 8), (5, 0), (1, 40))
    anchors, scale = objective._anchors(batch)
    per_document = torch.bincount(batch.document[anchors], minlength=4)
    assert per_document.tolist() == [16, 8, 0, 16]
    assert bool(batch.loss_mask[anchors + 1].all()) and bool((anchors[1:] > anchors[:-1]).all())
    assert [round(float(scale[batch.document[anchors] == d].sum()), 3) for d in (0, 1, 3)] == [90, 8, 40]
    assert not torch.equal(objective._anchors(batch)[0], anchors)
    everywhere, ones = objective.eval()._anchors(batch)
    assert len(everywhere) == 138 and bool((ones == 1).all())


def test_block_longer_than_the_row(small_target, packed_batch):
    """Slots past the row's end have no loss and no count; the others are as ever."""
    objective = make(small_target, block_size=16).eval()
    out = objective(packed_batch((1, 3)))
    assert torch.isfinite(out.loss_sum) and out.depth_count.tolist() == [2, 1] + [0] * 13


def test_overfits_one_row(small_target, packed_batch):
    """Loss near 0 and every draft accepted, in the estimate and in real drafting."""
    objective, batch = make(small_target, layers=1, block_size=4, anchors=12), packed_batch((4, 20))
    optimizer = torch.optim.AdamW(objective.parameters(), lr=1e-2)
    for _ in range(200):
        objective.train()(batch).loss_sum.div(20).backward()
        optimizer.step()
        optimizer.zero_grad()
    out = objective.eval()(batch)
    assert float(out.loss_sum.detach()) / 20 < 0.05 and out.depth_correct.tolist() == out.depth_count.tolist()
    assert simulate_chain(out.hits, batch.loss_mask, batch.document, 3) == [[3] * 5]
    assert torch.equal(real_drafts(objective, batch, 10).argmax(-1), batch.input_ids[12:15])


@pytest.fixture(scope="module")
def learnt(tiny_target):
    """Blocks of 5 for the tiny target, whose slots heed one another, and rows of its states whose answers they know in part."""
    cfg, layers, lengths = Target(path=str(tiny_target), dtype="float32"), [1, 2, 3], torch.tensor([24, 40, 33])
    torch.manual_seed(0)
    parts, model, rows = read_target(cfg), load_target_model(cfg), []
    for length in lengths.tolist():
        ids = torch.randint(250, (length,))
        hidden, last = states_of(model, ids, layers)
        rows.append(SimpleNamespace(input_ids=ids, loss_mask=torch.arange(length) >= 5, hidden=hidden, last_hidden=last))
    block = Block(aux_layers=layers, num_layers=2, block_size=5, mask_token_id=254)
    objective = DflashObjective(DflashHead(block, parts, DraftVocab(torch.arange(260), 260)), parts, Settings())
    for p in objective.parameters():
        if p.ndim == 2:
            torch.nn.init.normal_(p, std=0.1)
    optimizer, batch = torch.optim.AdamW(objective.parameters(), lr=1e-2), collate(rows, layers, 64)
    for _ in range(10):
        objective.train()(batch).loss_sum.div(80).backward()
        optimizer.step()
        optimizer.zero_grad()
    source = SimpleNamespace(lengths=lengths, greedy=lengths > 0, manifest=SimpleNamespace(hidden_size=64))
    source.read_rows = lambda picked, layers: [rows[i] for i in picked]
    return objective.eval(), source, rows, layers


def real_rounds(head, row, k) -> list[int]:
    """Accepted drafts of every round of real drafting with one cache, k at a time, along the row's own answer."""
    ids, cache, rounds, done, t = row.input_ids, head.new_cache(), [], 0, int(row.loss_mask.nonzero()[0]) - 1
    while t + 1 + k < len(ids):
        hidden = {layer: states[done : t + 1] for layer, states in row.hidden.items()}
        drafted = head.propose(hidden, ids[done + 1 : t + 2], torch.arange(done, t + 1), cache, k, lambda logits: logits.argmax(-1))
        right = drafted == ids[t + 2 : t + 2 + k]
        done, accepted = t + 1, int(right.int().cumprod(0).sum())
        rounds.append(accepted)
        t += accepted + 1
    return rounds


def test_estimate_is_real_drafting_at_every_k(learnt):
    """AL~ of k is of blocks of k + 1 slots, which is what `propose` and vLLM draft with, and not of the first k slots of whole blocks."""
    objective, source, rows, layers = learnt
    result = validate(objective, source, [0, 1, 2], layers, 70, Accelerator(cpu=True), served=[1, 2, 3, 9])
    assert list(result["al"]) == [1, 2, 3, 4]  # 9 is longer than a block
    batch = collate(rows, layers, 64)
    with torch.no_grad():
        whole = objective(batch).hits
    for k, estimate in result["al"].items():
        rounds = [accepted for row in rows for accepted in real_rounds(objective.head, row, k)]
        assert estimate == pytest.approx(1 + sum(rounds) / len(rounds)) and result["rounds"][k] == len(rounds)
        leading = [accepted for span in simulate_chain(whole, batch.loss_mask, batch.document, k) for accepted in span]
        assert (leading == rounds) == (k == 4)


def test_only_lengths_that_are_served_are_drafted_anew(learnt, monkeypatch):
    """Whole blocks come with the loss; every other k is one more pass."""
    objective, _, rows, layers = learnt
    batch, slots = collate(rows, layers, 64), []
    denoise = objective.head.denoise
    monkeypatch.setattr(objective.head, "denoise", lambda *args: slots.append(args[-1]) or denoise(*args))
    with torch.no_grad():
        hits = chain_hits(objective, objective(batch), batch, [3, 4, 1, 3])
    assert slots == [5, 2, 4] and {k: len(h) for k, h in hits.items()} == {1: 1, 3: 3, 4: 4}


def test_batches_without_supervision_touch_every_parameter(small_target, packed_batch):
    """B03, B36: a rank with nothing to do still takes part in the step."""
    for weights in ("decay", "dpace"):
        objective = make(small_target, weights=weights)
        assert_reaches_every_parameter(objective, (packed_batch((7, 0)), packed_batch((4, 1)), collate([], [1, 3, 5], 32)))


def test_settings_without_effect():
    with pytest.raises(RecipeError, match=r"objective\.gamma=4\.0 has no effect"):
        Settings(weights="dpace", gamma=4.0)
    with pytest.raises(RecipeError, match=r"objective\.alpha=0\.1 has no effect"):
        Settings(alpha=0.1)
