"""P-EAGLE's objective: which slots are trained where, and that it is the plain loss of real parallel drafts."""

from types import SimpleNamespace

import pytest
import torch

from heads import shift
from heads.peagle import PeagleHead
from heads.vocab import DraftVocab
from recipes.errors import DataError
from recipes.head_blocks import PeagleHead as Block
from recipes.objective_blocks import PeagleObjective as Settings
from recipes.schema import load_recipe
from tests.train.plain import assert_reaches_every_parameter, plain_pair
from train.objective import simulate_chain
from train.packing import collate
from train.peagle import PeagleObjective, drop, kept_share
from train.start import check_mask_token

MASK = 49


def make(target, slots=4, layers=2, vocab_size=50, **settings) -> PeagleObjective:
    vocab = DraftVocab(torch.randperm(50)[:vocab_size].sort().values, 50)
    block = Block(aux_layers=[1, 3, 5], num_layers=layers, unroll_steps=slots, mask_token_id=MASK, draft_vocab_size=vocab_size)
    return PeagleObjective(PeagleHead(block, target, vocab), target, Settings(**settings))


def real_drafts(objective, batch, t, slots):
    """Draft logits [slots, D] of one pass over the prefix <= t."""
    head, seen = objective.head, []
    start = int((batch.document == batch.document[t]).nonzero()[0])
    prefix, eaten = slice(start, t + 1), shift.draft_inputs(batch.input_ids, 0)
    head.propose(
        {k: h[prefix] for k, h in batch.hidden.items()}, eaten[prefix], batch.positions[prefix], head.new_cache(), slots,
        lambda logits: seen.append(logits) or logits.argmax(-1),
    )  # fmt: skip
    return seen[0]


def test_drop_totals():
    """METHODS §16.2: 3.373 L for eight slots, ratio 0.7 and minimum 0.2; 3.959 L for sixteen and 0.1."""
    assert sum(kept_share(i, 0.7, 0.2) for i in range(8)) == pytest.approx(3.3731)
    assert sum(kept_share(i, 0.7, 0.1) for i in range(16)) == pytest.approx(3.959, abs=1e-3)


def test_dropped_slots_are_nested(small_target, packed_batch):
    """Every trained slot finds the slots before it; shares are as published; held-out rows are judged everywhere."""
    objective, batch = make(small_target, slots=8), packed_batch((5, 1000), (3, 200))
    supervised = [shift.draft_weight(batch.loss_mask, batch.document, i) for i in range(8)]
    rows = objective.train()._anchors(supervised)
    for earlier, later in zip(rows, rows[1:], strict=False):
        assert set(later.tolist()) <= set(earlier.tolist()) and bool((later[1:] > later[:-1]).all())
    total = len(rows[0])
    assert total == 1000 + 200  # each supervised token is eaten once
    for i, row in enumerate(rows):  # where the share no longer falls, anchors near a document's end drop out
        assert int(total * kept_share(i, 0.7, 0.2)) - 8 <= len(row) <= int(total * kept_share(i, 0.7, 0.2))
    assert not torch.equal(objective._anchors(supervised)[3], rows[3])  # drawn anew
    assert [len(row) for row in objective.eval()._anchors(supervised)] == [total - 2 * i for i in range(8)]
    assert torch.equal(drop(rows[0], 5000), rows[0])


def test_alignment_table(small_target, packed_batch):
    """METHODS §6, B20: ids 10..14, mask 0 0 1 1 1; (anchor, slot) → what it predicts; no slot passes the document's end."""
    batch = packed_batch((2, 3), (2, 2), tokens=torch.tensor([10, 11, 12, 13, 14, 20, 21, 22, 23]))
    objective = make(small_target, slots=3).eval()
    supervised = [shift.draft_weight(batch.loss_mask, batch.document, i) for i in range(3)]
    rows = objective._anchors(supervised)
    assert [row.tolist() for row in rows] == [[1, 2, 3, 6, 7], [1, 2, 6], [1]]
    out = objective(batch)
    assert out.depth_count.tolist() == [3, 1, 0]  # labels 13 14 23; 14; the rest has only a teacher
    assert out.hits.shape == (3, 9)


def test_an_oracle_on_one_hot_positions(small_target, packed_batch, monkeypatch):
    """METHODS §6: states that name their position show which one each (anchor, slot) reads, eats and is compared with."""
    batch = packed_batch((3, 9), (2, 6), tokens=torch.arange(20))
    named = torch.eye(20, 32)
    batch.last_hidden.copy_(20 * named)
    for states in batch.hidden.values():
        states.copy_(named)
    small_target.lm_head.zero_()
    small_target.lm_head[1:21, :20] = torch.eye(20)  # the target at position p predicts token p + 1, the one that follows
    objective = make(small_target, slots=3).eval()
    objective.head.lm_head.weight.data = 20 * small_target.lm_head

    def oracle(feature, tokens, positions, starts, rows):
        assert torch.equal(feature, objective.head.fuse(dict.fromkeys([1, 3, 5], named)))
        assert tokens[0].tolist() == [*range(1, 20), 0] and all(slot.tolist() == [MASK] * 20 for slot in tokens[1:])
        return [named[row + 1 + i] for i, row in enumerate(rows)]

    monkeypatch.setattr(objective.head, "rollout", oracle)
    objective.head.norm = torch.nn.Identity()  # type: ignore[assignment]
    out = objective(batch)
    assert float(out.depth_loss.max()) < 1e-4  # another teacher's row would cost about 20 a pair
    assert out.depth_count.tolist() == [13, 11, 9] and out.depth_correct.tolist() == out.depth_count.tolist()
    assert simulate_chain(out.hits, batch.loss_mask, batch.document, 3) == [[3, 3], [3]]


@pytest.mark.parametrize("loss", ["kl", "ce"])
@pytest.mark.parametrize("vocab_size", [50, 30])
def test_is_the_plain_loss_of_real_drafts(small_target, packed_batch, loss, vocab_size):
    """METHODS §16.8: summed over anchors and slots, from `propose` and the formulas; out-of-vocabulary tokens are misses without loss."""
    objective = make(small_target, vocab_size=vocab_size, loss=loss, step_decay=0.5).eval()
    batch, total, counts, hits = packed_batch((3, 6), (2, 5)), 0.0, [0] * 4, [0] * 4
    with torch.no_grad():
        for p in objective.parameters():
            p.normal_(std=0.2)
        for t in shift.draft_weight(batch.loss_mask, batch.document, 0).nonzero()[:, 0].tolist():
            logits = real_drafts(objective, batch, t, 4)
            for i in range(4):
                if not (t + 1 + i < len(batch.document) and batch.document[t + 1 + i] == batch.document[t]):
                    continue
                value, has, hit, _ = plain_pair(objective, batch, t, i, logits[i], loss)
                total, counts[i], hits[i] = total + 0.5**i * value, counts[i] + has, hits[i] + hit
        out = objective(batch)
    assert float(out.loss_sum) == pytest.approx(total, rel=1e-4)
    assert out.depth_count.tolist() == counts and out.depth_correct.tolist() == hits


def test_overfits_one_row(small_target, packed_batch):
    """Loss near 0 and every draft accepted, in the estimate and in real drafting; the learned state takes part."""
    objective, batch = make(small_target, layers=1, slots=3, loss="ce", keep_ratio=0.9), packed_batch((4, 20))
    start = objective.head.mask_hidden.detach().clone()
    optimizer = torch.optim.AdamW(objective.parameters(), lr=1e-2)
    for _ in range(150):
        objective.train()(batch).loss_sum.div(20).backward()
        optimizer.step()
        optimizer.zero_grad()
    out = objective.eval()(batch)
    assert float(out.loss_sum.detach()) / 20 < 0.05 and out.depth_correct.tolist() == out.depth_count.tolist()
    assert simulate_chain(out.hits, batch.loss_mask, batch.document, 3) == [[3] * 5]
    assert torch.equal(real_drafts(objective, batch, 10, 3).argmax(-1), batch.input_ids[12:15])
    assert not torch.equal(objective.head.mask_hidden, start)


def test_batches_without_supervision_touch_every_parameter(small_target, packed_batch):
    """B03, B36: a rank with nothing to do still takes part in the step."""
    objective = make(small_target)
    assert_reaches_every_parameter(objective, (packed_batch((7, 0)), packed_batch((4, 1)), collate([], [1, 3, 5], 32)))


def test_mask_token_in_the_data():
    """B34: refused before training, with the count, whichever method has one."""
    for method in ("peagle", "dflash"):
        recipe = load_recipe(f"recipes/debug/{method}.yaml")
        store = SimpleNamespace(rows=SimpleNamespace(input_ids=torch.tensor([1, 2, 254, 254], dtype=torch.int32)))
        with pytest.raises(DataError, match=r"mask_token_id=254 occurs 2 times in the rows of features/debug.*special token that no text"):
            check_mask_token(recipe, store)
        store.rows.input_ids[2:] = 258
        check_mask_token(recipe, store)
    check_mask_token(load_recipe("recipes/debug/eagle3.yaml"), store)
