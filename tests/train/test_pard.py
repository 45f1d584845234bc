"""PARD's objective: which slots are trained where, and that it is the plain loss of real parallel drafts; PARD-2's weights."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from heads import LAST_HIDDEN, shift
from heads.pard import PardHead
from heads.target import TargetParts, read_target
from heads.vocab import DraftVocab
from recipes.errors import DataError, RecipeError
from recipes.head_blocks import PardHead as Block
from recipes.objective_blocks import PardObjective as Settings
from recipes.schema import Target, load_recipe
from tests.train.test_draft_model import document_of, packed
from train.objective import simulate_chain
from train.packing import collate
from train.pard import PardObjective
from train.peagle import nested_anchors
from train.start import check_mask_token

V, MASK = 260, 259
GREEDY = lambda logits: logits.argmax(-1)  # noqa: E731


@pytest.fixture(scope="module")
def parts(tiny_target: Path) -> TargetParts:
    return read_target(Target(path=str(tiny_target), dtype="float32"))


def make(parts, settings: dict | None = None, **block) -> PardObjective:
    torch.manual_seed(2)
    block = {"num_layers": 2, "mask_token_id": MASK, "unroll_steps": 4} | block
    head = PardHead(Block(**block), parts, DraftVocab(torch.arange(V), V))
    return PardObjective(head, parts, Settings(**(settings or {})))


def with_features(batch):
    """The batch with random states of layers 1 and 3."""
    batch.hidden.update({layer: torch.randn(len(batch.input_ids), 64) for layer in (1, 3)})
    return batch


def real_drafts(head, batch, t: int, slots: int) -> torch.Tensor:
    """Draft logits [slots, V] of one pass over the document up to x[t+1]."""
    start, seen = document_of(batch, t).start, []
    hidden = {layer: h[start : t + 1] for layer, h in (batch.hidden | {LAST_HIDDEN: batch.last_hidden}).items()}
    ids = batch.input_ids[start : t + 2]
    head.propose(hidden, ids, torch.arange(t + 1 - start), head.new_cache(), slots, lambda z: seen.append(z) or GREEDY(z))
    return seen[0]


@pytest.mark.parametrize("settings", [{"loss": "kl"}, {"loss": "ce"}, {"loss": "kl", "ce_weight": 0.1}], ids=str)
def test_is_the_plain_loss_of_real_drafts(parts, settings):
    """METHODS §16.8: summed over anchors and slots, from `propose` and the formulas."""
    objective, batch = make(parts, settings | {"step_decay": 0.5}).eval(), packed((3, 6), (2, 5))
    total, counts, hits = 0.0, [0] * 4, torch.zeros(4, 16, dtype=torch.bool)
    with torch.no_grad():
        out = objective(batch)
        for t in shift.draft_weight(batch.loss_mask, batch.document, 0).nonzero()[:, 0].tolist():
            logits, end = real_drafts(objective.head, batch, t, 4), document_of(batch, t).stop
            for i in range(4):
                if t + 1 + i >= end:
                    continue
                label = int(batch.input_ids[t + 2 + i]) if t + 2 + i < end else -1
                counts[i] += label >= 0
                hits[i, t] = int(logits[i].argmax()) == label
                p = (parts.lm_head @ batch.last_hidden[t + 1 + i]).softmax(-1)
                kl = float((p * (p.log() - logits[i].log_softmax(-1))).sum())
                ce = float(F.cross_entropy(logits[i], torch.tensor(label))) if label >= 0 else 0.0
                total += 0.5**i * ((kl if settings["loss"] == "kl" else ce) + settings.get("ce_weight", 0) * ce)
    assert float(out.loss_sum) == pytest.approx(total, rel=1e-4)
    assert out.depth_count.tolist() == counts and torch.equal(out.hits, hits)


@pytest.mark.parametrize("settings", [{}, {"loss": "ce"}, {"ce_weight": 0.3}], ids=str)
def test_gradients_are_those_of_the_sum(parts, settings):
    """Along a random direction, the analytic gradient equals the difference quotient of the loss."""
    objective, batch = make(parts, settings).double().eval(), packed((3, 9))
    weight = objective.head.decoder.layers[0].mlp.down_proj.weight
    direction = torch.randn_like(weight)
    objective(batch).loss_sum.backward()
    values = []
    for step in (2e-3, -2e-3):
        with torch.no_grad():
            weight.add_(step * direction)
            values.append(float(objective(batch).loss_sum))
            weight.sub_(step * direction)
    assert float((weight.grad * direction).sum()) == pytest.approx((values[0] - values[1]) / 4e-3, rel=5e-3)


def test_dropped_slots_are_nested_and_drafted_as_in_serving(parts):
    """METHODS §7.1, §16.2: nested, the published shares; what is left has the states that real drafting has."""
    objective, batch = make(parts, unroll_steps=8).train(), packed((5, 300), (3, 60))
    supervised = [shift.draft_weight(batch.loss_mask, batch.document, i) for i in range(8)]
    seen: dict[str, list] = {}
    original = objective.head.slot_states

    def slot_states(ids, positions, document, anchors, added):
        seen["anchors"], seen["states"] = anchors, original(ids, positions, document, anchors, added)
        return seen["states"]

    objective.head.slot_states = slot_states  # type: ignore[method-assign]
    out = objective(batch)
    total = len(seen["anchors"][0])
    assert total == 360
    for i, anchors in enumerate(seen["anchors"]):
        assert int(total * max(0.7**i, 0.2)) - 16 <= len(anchors) <= int(total * max(0.7**i, 0.2))
        rows = anchors - 1
        assert bool(supervised[i][rows].all()) and (i == 0 or set(anchors.tolist()) <= set(seen["anchors"][i - 1].tolist()))
        t = int(rows[len(rows) // 2])
        place = len(rows) // 2
        with torch.no_grad():
            mine = objective.head.logits(seen["states"][i][place])
            torch.testing.assert_close(mine, real_drafts(objective.head, batch, t, i + 1)[i], rtol=1e-3, atol=1e-3)
    assert out.depth_count[0] == 358  # of the 360, the last token of each document has no label


def test_the_end_of_an_answer_is_a_label_at_every_depth(parts):
    """METHODS §7.1, EOS trap: the end token, which is the padding token of many tokenizers, is predicted by every slot that reaches it."""
    objective = make(parts, {"loss": "ce"}).eval()
    for end in (parts.config.eos_token_id, parts.config.pad_token_id):
        batch = packed((3, 4), tokens=torch.tensor([1, 2, 3, 4, 5, 6, end]))
        out = objective(batch)
        # x[3] is the first reply token; slot i of the anchor at x[3] … predicts up to x[6], the end
        assert out.depth_count.tolist() == [3, 2, 1, 0]
        with torch.no_grad():
            expected = sum(
                float(F.cross_entropy(real_drafts(objective.head, batch, t, i + 1)[i], batch.input_ids[t + 2 + i]))
                for t in (2, 3, 4)
                for i in range(3)
                if t + 2 + i <= 6
            )
        assert float(out.loss_sum.detach()) == pytest.approx(expected, rel=1e-4)


def test_alignment_table(parts):
    """B20, B34: no slot passes the document's end, the first reply token is not drafted."""
    batch = packed((2, 3), (2, 2), tokens=torch.tensor([10, 11, 12, 13, 14, 20, 21, 22, 23]))
    out = make(parts, unroll_steps=3).eval()(batch)
    assert out.depth_count.tolist() == [3, 1, 0]  # labels 13 14 23; 14; the rest has only a teacher
    assert out.hits.shape == (3, 9)


def test_confidence_weights(parts):
    """METHODS §7.2: slot j weighs the product of the target's probabilities of the j tokens that come before its own."""
    objective = make(parts, {"confidence_weights": True, "keep_ratio": 1.0, "keep_min": 1.0}).train()
    batch = packed((3, 6), (2, 5))
    p = (batch.last_hidden @ parts.lm_head.T).softmax(-1)  # at s: of x[s+1]
    rows = nested_anchors([shift.draft_weight(batch.loss_mask, batch.document, i) for i in range(4)], None)
    for i, (row, reach) in enumerate(zip(rows, objective._reach(batch, rows), strict=True)):
        for t, weight in zip(row.tolist(), reach.tolist(), strict=True):
            expected = 1.0
            for s in range(i):
                expected *= float(p[t + 1 + s, batch.input_ids[t + 2 + s]])
            assert weight == pytest.approx(expected, rel=1e-3)
    with torch.no_grad():
        plain = make(parts, {"keep_ratio": 1.0, "keep_min": 1.0}).train()
        assert float(objective(batch).loss_sum) < float(plain(batch).loss_sum)


def test_dropped_features(parts):
    """METHODS §7.2: whole rows are trained without the target's states, then exactly as they are drafted without; so is validation."""
    always = make(parts, {"keep_ratio": 1.0, "keep_min": 1.0, "feature_drop": 1e-9}, aux_layers=[1, 3]).train()
    with torch.no_grad():
        always.head.target_proj.weight.normal_()
    batch = with_features(packed((3, 6), (2, 5)))
    added = always._added(batch)
    assert added is not None and bool((added[[0, 9]] == 0).all()) and bool((added[1:9] != 0).any(1).all())
    with torch.no_grad():
        out, twin, total = always(batch), always.head.with_target_states(), 0.0
        for t in shift.draft_weight(batch.loss_mask, batch.document, 0).nonzero()[:, 0].tolist():
            logits, end = real_drafts(twin, batch, t, 4), document_of(batch, t).stop
            for i in range(min(4, end - t - 1)):
                q = logits[i].log_softmax(-1)
                p = (parts.lm_head @ batch.last_hidden[t + 1 + i]).softmax(-1)
                total += float((p * (p.log() - q)).sum())
        assert float(out.loss_sum) == pytest.approx(total, rel=1e-4)
        without = make(parts, {"keep_ratio": 1.0, "keep_min": 1.0}).train()
        without.head.load_state_dict(always.head.state_dict(), strict=False)
        assert float(always.eval()(batch).loss_sum) == pytest.approx(float(without.eval()(batch).loss_sum), rel=1e-5)
    some = make(parts, {"feature_drop": 0.5}, aux_layers=[1, 3]).train()
    many = with_features(packed(*[(1, 2)] * 400))
    added = some._added(many)
    assert added is not None
    has = (added != 0).any(1).view(400, 3)
    assert not has[:, 0].any() and torch.equal(has[:, 1], has[:, 2]) and 120 < int(has[:, 1].sum()) < 280


@pytest.mark.parametrize("frozen", [False, True])
def test_overfits_one_row_and_drafts_it(parts, frozen):
    """Loss near 0 and every draft accepted, in the estimate and in real drafting; the mask token's row takes part."""
    objective = make(parts, {"loss": "ce", "keep_ratio": 0.9}, num_layers=1, unroll_steps=3, train_embeddings=not frozen)
    batch, before = packed((4, 20)), objective.head.mask_slots(1)[0].detach().clone()
    optimizer = torch.optim.AdamW([p for p in objective.parameters() if p.requires_grad], lr=5e-3)
    for _ in range(80):
        objective.train()(batch).loss_sum.div(20).backward()
        optimizer.step()
        optimizer.zero_grad()
    out = objective.eval()(batch)
    assert float(out.loss_sum.detach()) / 20 < 0.2 and out.depth_correct.tolist() == out.depth_count.tolist()
    assert simulate_chain(out.hits, batch.loss_mask, batch.document, 3) == [[3] * 5]
    assert torch.equal(real_drafts(objective.head, batch, 10, 3).argmax(-1), batch.input_ids[12:15])
    assert not torch.equal(objective.head.embedding[MASK], before)


@pytest.mark.parametrize("block", [{}, {"train_embeddings": False}, {"aux_layers": [1, 3]}], ids=str)
def test_batches_without_supervision_touch_every_parameter(parts, block):
    """B03, B36: a rank with nothing to do still takes part in the step."""
    objective = make(parts, {"confidence_weights": True, "feature_drop": 0.99 if "aux_layers" in block else 0.0}, **block).train()
    for batch in (packed((7, 0)), packed((4, 1)), collate([], [1, 3], 64)):
        out = objective(with_features(batch))
        out.loss_sum.backward()
        assert torch.isfinite(out.loss_sum)
        for name, p in objective.named_parameters():
            assert not p.requires_grad or (p.grad is not None and bool(torch.isfinite(p.grad).all())), name


def test_a_mask_token_that_occurs_in_the_data(tiny_target):
    """B34: refused before the first step, with the reason."""
    recipe = load_recipe("recipes/debug/pard.yaml", [f"target.path={tiny_target}", f"head.mask_token_id={MASK}"])
    store = SimpleNamespace(rows=SimpleNamespace(input_ids=torch.tensor([1, 2, MASK, 3, MASK], dtype=torch.int32)))
    with pytest.raises(DataError, match="head.mask_token_id=259 occurs 2 times in the rows"):
        check_mask_token(recipe, store)  # type: ignore[arg-type]


def test_bad_settings(parts):
    with pytest.raises(RecipeError, match="objective.ce_weight=0.1 has no effect with objective.loss='ce'"):
        Settings(loss="ce", ce_weight=0.1)
    with pytest.raises(RecipeError, match="objective.feature_drop=0.2 with head.aux_layers=None"):
        make(parts, {"feature_drop": 0.2})
    with pytest.raises(RecipeError, match=r"objective.feature_drop=0 with head.aux_layers=\[1, 3\].*vLLM does not give it"):
        make(parts, aux_layers=[1, 3])
