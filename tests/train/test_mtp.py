"""MTP's objective: FastMTP's weights, the table of what each depth eats and predicts, and the plain loss of real drafts."""

import pytest
import torch
import torch.nn.functional as F

from heads import LAST_HIDDEN, shift
from heads.mtp import MtpHead
from heads.mtp_native import MtpNativeHead
from heads.target import read_target
from heads.vocab import DraftVocab
from recipes.errors import RecipeError
from recipes.head_blocks import MtpHead as Block
from recipes.head_blocks import MtpNativeHead as NativeBlock
from recipes.objective_blocks import MtpObjective as Settings
from recipes.schema import Target, load_recipe
from tests.heads.native_targets import CONFIGS, H, make_target
from tests.train.plain import assert_reaches_every_parameter
from train.export import _model_card
from train.mtp import MtpObjective, depth_weights
from train.objective import simulate_chain
from train.packing import collate

FULL = DraftVocab(torch.arange(50), 50)
KINDS = [{"shared": True}, {"shared": False}, {"shared": True, "layout": "mimo"}]


def make(target, depths=3, settings=None, **fields) -> MtpObjective:
    return MtpObjective(MtpHead(Block(unroll_steps=depths, **fields), target, FULL), target, Settings(**(settings or {})))


def real_drafts(objective, batch, t, depths, tokens=None):
    """Draft logits [depths, V] from the prefix <= t, eating the answer's own tokens, or the drafts where `tokens` is "own"."""
    head, seen = objective.head, []
    start = int((batch.document == batch.document[t]).nonzero()[0])
    prefix, eaten = slice(start, t + 1), shift.draft_inputs(batch.input_ids, 0)
    answer = iter(shift.draft_inputs(batch.input_ids, 1)[t:].tolist() + [0] * depths)
    choose = (lambda logits: logits.argmax(-1)) if tokens == "own" else (lambda logits: torch.tensor([next(answer)]))
    head.propose(
        {LAST_HIDDEN: batch.last_hidden[prefix]}, eaten[prefix], batch.positions[prefix], head.new_cache(), depths,
        lambda logits: seen.append(logits[0]) or choose(logits),
    )  # fmt: skip
    return torch.stack(seen)


def test_weights():
    """METHODS §16.5: .51, .31, .18; and DeepSeek-V3's mean over depths."""
    assert [round(w, 2) for w in depth_weights(Settings().step_decay, 3)] == [0.51, 0.31, 0.18]
    assert depth_weights(1.0, 4) == [0.25] * 4


def test_alignment_table(small_target, packed_batch, monkeypatch):
    """METHODS §8: depth i at index t eats x[t+1+i] and is compared with x[t+2+i]; documents stay apart."""
    batch = packed_batch((2, 3), (2, 2), tokens=torch.tensor([10, 11, 12, 13, 14, 20, 21, 22, 23]))
    objective = make(small_target, settings={"loss": "ce"}).eval()
    objective.head.lm_head = torch.eye(50)

    def oracle(feature, tokens, positions, starts, rows):
        assert torch.equal(feature, batch.last_hidden)
        assert [eaten[1].item() for eaten in tokens] == [12, 13, 14]
        assert [row.tolist() for row in rows] == [[0, 1, 2, 3, 5, 6, 7], [0, 1, 2, 5, 6], [0, 1, 5]]  # a depth's rows and later ones' needs
        labels = torch.cat([batch.input_ids, torch.zeros(5).long()])
        return [torch.eye(50)[labels[row + 2 + i]] for i, row in enumerate(rows)]

    monkeypatch.setattr(objective.head, "rollout", oracle)
    out = objective(batch)
    assert out.depth_count.tolist() == [3, 3, 1]  # 13 14 23; 13 14 23; 14
    assert out.depth_correct.tolist() == out.depth_count.tolist()
    assert out.hits[1].nonzero()[:, 0].tolist() == [0, 1, 5]


@pytest.mark.parametrize("fields", KINDS, ids=str)
@pytest.mark.parametrize("loss", ["kl", "ce"])
def test_is_the_plain_loss_of_real_drafts(small_target, packed_batch, loss, fields):
    """METHODS §16.8: summed over indices and depths, from `propose` and the formulas."""
    objective, batch = make(small_target, settings={"loss": loss}, **fields).eval(), packed_batch((3, 6), (2, 5))
    total, counts, hits, lm_head = 0.0, [0] * 3, [0] * 3, objective.head.lm_head
    with torch.no_grad():
        for p in objective.parameters():
            p.normal_(std=0.3)
        for i in range(3):
            for t in shift.draft_weight(batch.loss_mask, batch.document, i).nonzero()[:, 0].tolist():
                logits = real_drafts(objective, batch, t, i + 1)[i]
                has = bool(shift.has_label(batch.document, i)[t])
                label = int(batch.input_ids[t + 2 + i]) if has else -1
                counts[i] += has
                hits[i] += has and int(logits.argmax()) == label
                if loss == "ce":
                    value = float(F.cross_entropy(logits, torch.tensor(label))) if has else 0.0
                else:
                    p = (lm_head @ batch.last_hidden[t + 1 + i]).softmax(-1)
                    value = float((p * (p.log() - logits.log_softmax(-1))).sum())
                total += 0.6**i / 1.96 * value
        out = objective(batch)
    assert float(out.loss_sum) == pytest.approx(total, rel=1e-3)
    assert out.depth_count.tolist() == counts and out.depth_correct.tolist() == hits


@pytest.mark.parametrize("change", [{"logit_scale": 0.25}, {"final_logit_softcapping": 5.0}], ids=str)
def test_drafts_are_tempered_as_they_were_trained(small_target, packed_batch, change):
    """The target's scale or soft-cap is in p alone: q of real drafts is, unscaled, what training compares with p, as vLLM drafts."""
    small_target.config.update(change)
    objective, batch, total = make(small_target, depths=2, settings={"step_decay": 1.0}).eval(), packed_batch((3, 6)), 0.0
    with torch.no_grad():
        p = small_target.logits(batch.last_hidden).softmax(-1)
        for i in range(2):
            for t in shift.draft_weight(batch.loss_mask, batch.document, i).nonzero()[:, 0].tolist():
                log_q = real_drafts(objective, batch, t, i + 1)[i].log_softmax(-1)
                total += float((p[t + 1 + i] * (p[t + 1 + i].log() - log_q)).sum()) / 2
        assert float(objective(batch).loss_sum) == pytest.approx(total, rel=1e-3)


def test_frequent_tokens_in_training_only(small_target, packed_batch):
    """`head.draft_vocab_size`: training compares the frequent tokens, rare labels are misses; drafts and validation are over all."""
    frequent = DraftVocab(torch.arange(30), 50)
    part = MtpObjective(MtpHead(Block(draft_vocab_size=30), small_target, frequent), small_target, Settings(loss="ce"))
    whole = MtpObjective(part.head, small_target, Settings(loss="ce"))
    whole.compared = type(whole.compared)(FULL, small_target)
    batch = packed_batch((3, 6), (2, 5))
    batch.input_ids[4] = 45  # rare, and a label at depth 0
    assert part.head.vocab.full
    assert float(part.eval()(batch).loss_sum) == float(whole.eval()(batch).loss_sum)
    trained, everything = part.train()(batch), whole.train()(batch)
    assert trained.depth_count.tolist() == everything.depth_count.tolist()
    assert float(trained.loss_sum) < float(everything.loss_sum)  # fewer tokens compete, and one label is left out


@pytest.mark.parametrize("fields", KINDS[:2], ids=str)
def test_overfits_one_row(small_target, packed_batch, fields):
    """Loss near 0 and every draft accepted, in the estimate and in drafting that eats its own drafts."""
    objective, batch = make(small_target, settings={"loss": "ce"}, **fields), packed_batch((4, 20))
    optimizer = torch.optim.AdamW(objective.parameters(), lr=1e-2)
    for _ in range(120):
        objective.train()(batch).loss_sum.div(20).backward()
        optimizer.step()
        optimizer.zero_grad()
    out = objective.eval()(batch)
    assert float(out.loss_sum.detach()) / 20 < 0.05 and out.depth_correct.tolist() == out.depth_count.tolist()
    assert simulate_chain(out.hits, batch.loss_mask, batch.document, 3) == [[3] * 5]
    assert torch.equal(real_drafts(objective, batch, 10, 3, "own").argmax(-1), batch.input_ids[12:15])


@pytest.mark.parametrize("fields", KINDS, ids=str)
def test_batches_without_supervision_touch_every_parameter(small_target, packed_batch, fields):
    """B03, B36: a rank with nothing to do still takes part in the step."""
    objective = make(small_target, **fields)
    assert_reaches_every_parameter(objective, (packed_batch((7, 0)), packed_batch((4, 1)), collate([], [], 32)))


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_native_layers_take_part_without_supervision(family, tmp_path, packed_batch):
    """B03, B36: as above for a target's own layer; experts that no token chose get gradients of zero."""
    target = read_target(Target(path=str(make_target(family, tmp_path)), dtype="float32"))
    objective = MtpObjective(MtpNativeHead(NativeBlock(), target, FULL), target, Settings())
    assert_reaches_every_parameter(objective, (packed_batch((7, 0), width=H), packed_batch((4, 1), width=H), collate([], [], H)))


def test_more_modules_than_the_server_runs():
    """A chain is refused for vLLM with the remedy, and has no more depths than modules."""
    with pytest.raises(RecipeError, match="head.draft_vocab_size=128 with head.shared=false"):
        load_recipe("recipes/debug/mtp.yaml", ["head.shared=false", "head.draft_vocab_size=128"])
    with pytest.raises(RecipeError, match=r"vLLM runs only the first MTP module.*chain of 3.*eval.engine: reference"):
        load_recipe("recipes/debug/mtp.yaml", ["head.shared=false"])
    recipe = load_recipe("recipes/debug/mtp.yaml", ["head.shared=false", "eval.engine=reference"])
    assert recipe.head.max_depth == 3
    said = {"date": "", "speculative_config": {"method": "mtp"}, "llm_kwargs": {}, "training": {}}
    card = _model_card(recipe, said, {})
    assert "Not for vLLM: vLLM runs only the first MTP module" in card and "vllm serve" not in card
    assert "vllm serve" in _model_card(load_recipe("recipes/debug/mtp.yaml"), said, {})
    with pytest.raises(RecipeError, match="eval.k=4 asks for more drafted tokens"):
        load_recipe("recipes/debug/mtp.yaml", ["head.shared=false", "eval.engine=reference", "eval.k=[4]"])
    assert load_recipe("recipes/debug/mtp.yaml", ["head.shared=false", "head.unroll_steps=1", "eval.k=[1]"]).eval.engine == "vllm"
