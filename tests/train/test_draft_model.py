"""The draft model's objective: the plain loss of what the model itself would draft, depth by depth; and its export."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from eval.prepare import check_export
from heads import shift
from heads.draft_model import DraftModelHead
from heads.exported import load_exported_head
from heads.packed import Packed
from heads.target import TargetParts, read_target
from heads.vocab import DraftVocab
from recipes.errors import ExportError, TargetError
from recipes.head_blocks import DraftModelHead as Block
from recipes.objective_blocks import DraftModelObjective as Settings
from recipes.schema import Target, load_recipe
from tests.train.stored import stored_row
from train.draft_model import DraftModelObjective
from train.export import export_head, load_export_into
from train.objective import simulate_chain
from train.packing import Batch, collate

V = 260


@pytest.fixture(scope="module")
def parts(tiny_target: Path) -> TargetParts:
    return read_target(Target(path=str(tiny_target), dtype="float32"))


def make(parts, settings: dict | None = None, **block) -> DraftModelObjective:
    head = DraftModelHead(Block(**({"num_layers": 2} | block)), parts, DraftVocab(torch.arange(V), V))
    return DraftModelObjective(head, parts, Settings(**(settings or {})))


def packed(*documents: tuple[int, int], tokens: torch.Tensor | None = None) -> Batch:
    """Documents as (prompt length, answer length), random tokens and random target states."""
    lengths = torch.tensor([a + b for a, b in documents])
    n = int(lengths.sum())
    return Batch(
        input_ids=torch.randint(256, (n,)) if tokens is None else tokens,
        loss_mask=torch.cat([torch.tensor([False] * a + [True] * b) for a, b in documents]),
        document=torch.repeat_interleave(torch.arange(len(documents)), lengths),
        positions=torch.cat([torch.arange(int(length)) for length in lengths]),
        hidden={},
        last_hidden=torch.randn(n, 64),
    )


def document_of(batch: Batch, t: int) -> slice:
    """Where the document of index t lies."""
    inside = (batch.document == batch.document[t]).nonzero()[:, 0]
    return slice(int(inside[0]), int(inside[-1]) + 1)


@pytest.mark.parametrize("loss", ["kl", "ce"])
def test_is_the_plain_loss_of_real_drafts(parts, loss):
    """METHODS §16.8: depth i at index t is what the model drafts after x[0..t+1+i]; the loss counts every prediction once."""
    objective, batch = make(parts, {"loss": loss, "check_depth": 3}).eval(), packed((3, 6), (2, 5))
    head, greedy = objective.head, lambda logits: logits.argmax(-1)
    total, counts, hits = 0.0, [0] * 3, torch.zeros(3, 16, dtype=torch.bool)
    with torch.no_grad():
        out = objective(batch)
        for t in shift.draft_weight(batch.loss_mask, batch.document, 0).nonzero()[:, 0].tolist():
            where = document_of(batch, t)
            for i in range(3):
                end = t + 2 + i  # tokens up to x[t+1+i] are eaten
                if end > where.stop:
                    continue
                seen: list[torch.Tensor] = []
                prefix = batch.input_ids[where.start : end]
                choose = lambda z, seen=seen: seen.append(z) or greedy(z)  # noqa: E731
                head.propose({}, prefix, torch.arange(len(prefix) - 1), head.new_cache(), 1, choose)
                label = int(batch.input_ids[end]) if end < where.stop else -1
                counts[i] += label >= 0
                hits[i, t] = int(seen[0].argmax()) == label
                if i == 0 and loss == "kl":
                    p = (parts.lm_head @ batch.last_hidden[t + 1]).softmax(-1)
                    total += float((p * (p.log() - seen[0][0].log_softmax(-1))).sum())
                elif i == 0 and label >= 0:
                    total += float(F.cross_entropy(seen[0][0], torch.tensor(label)))
    assert float(out.loss_sum) == pytest.approx(total, rel=1e-4)
    assert out.depth_count.tolist() == counts and torch.equal(out.hits, hits) and out.depth_correct.tolist() == hits.sum(1).tolist()
    assert float(out.depth_loss[0]) == pytest.approx(total, rel=1e-4)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_loss_over_the_most_frequent_tokens(parts, frozen):
    """In training over these tokens alone, a label outside has no loss; in validation, and while drafting, over all of them."""
    some = torch.randperm(V)[:100].sort().values
    head = DraftModelHead(Block(num_layers=2, draft_vocab_size=100, train_embeddings=not frozen), parts, DraftVocab(some, V))
    objective, batch = DraftModelObjective(head, parts, Settings()).train(), packed((3, 30))
    out = objective(batch)
    out.loss_sum.backward()
    whole = make(parts, train_embeddings=not frozen)
    rows = torch.arange(3, 33)
    with torch.no_grad():
        z = head.logits(head.states(head.embed(batch.input_ids), batch.positions, packed=Packed(batch.document)))[rows]
        p = (batch.last_hidden[rows] @ parts.lm_head.T)[:, some].softmax(-1)
        losses = (p * (p.log() - z[:, some].log_softmax(-1))).sum(-1)
        known = torch.isin(batch.input_ids[4:], some)
        assert float(out.loss_sum) == pytest.approx(float(losses[:-1][known].sum() + losses[-1]), rel=1e-4)
        assert float(objective.eval()(batch).loss_sum) == pytest.approx(float(whole.eval()(batch).loss_sum), rel=1e-5)
    if not frozen:
        assert head.lm_head is not None and head.lm_head.weight.grad is not None
        assert set(head.lm_head.weight.grad.abs().sum(1).nonzero()[:, 0].tolist()) <= set(some.tolist())


def test_alignment_table(parts):
    """B20: ids 10..14, mask 0 0 1 1 1: the first reply token is never drafted, the last prompt position is row 1's."""
    batch = packed((2, 3), (2, 2), tokens=torch.tensor([10, 11, 12, 13, 14, 20, 21, 22, 23]))
    out = make(parts, {"check_depth": 3}).eval()(batch)
    assert out.depth_count.tolist() == [3, 1, 0]  # labels 13 14 23; 14; none
    assert out.hits.shape == (3, 9)


def test_the_end_of_an_answer_is_a_label(parts):
    """METHODS §7.1, EOS trap: the target's end token (also its padding token here, id 256) has a loss like any other."""
    objective = make(parts, {"loss": "ce"}).eval()
    for end in (parts.config.eos_token_id, parts.config.pad_token_id):
        batch = packed((3, 4), tokens=torch.tensor([1, 2, 3, 4, 5, 6, end]))
        assert objective(batch).depth_count[0] == 3
        batch.loss_mask[:5] = False  # x[5] → x[6], the end, alone
        out = objective(batch)
        assert out.depth_count[0] == 1 and float(out.loss_sum.detach()) > 0


def test_overfits_one_row_and_drafts_it(parts):
    """Loss near 0; the estimate says that every draft is accepted, and real drafting gives the row's tokens."""
    objective, batch = make(parts, {"loss": "ce", "check_depth": 4}), packed((4, 20))
    optimizer = torch.optim.AdamW(objective.parameters(), lr=5e-3)
    for _ in range(40):
        objective.train()(batch).loss_sum.div(20).backward()
        optimizer.step()
        optimizer.zero_grad()
    out = objective.eval()(batch)
    assert float(out.loss_sum.detach()) / 20 < 0.05 and out.depth_correct.tolist() == out.depth_count.tolist()
    assert simulate_chain(out.hits, batch.loss_mask, batch.document, 4) == [[4] * 4]
    drafted = objective.head.propose({}, batch.input_ids[:10], torch.arange(9), objective.head.new_cache(), 4, lambda z: z.argmax(-1))
    assert torch.equal(drafted, batch.input_ids[10:14])


@pytest.mark.parametrize("frozen", [False, True])
def test_batches_without_supervision_touch_every_parameter(parts, frozen):
    """B03, B36."""
    objective = make(parts, train_embeddings=not frozen)
    for batch in (packed((7, 0)), packed((4, 1)), collate([], [], 64)):
        out = objective(batch)
        out.loss_sum.backward()
        assert torch.isfinite(out.loss_sum)
        for name, p in objective.named_parameters():
            assert not p.requires_grad or (p.grad is not None and bool(torch.isfinite(p.grad).all())), name
            assert p.requires_grad or p.grad is None, name


def test_export(parts, tiny_target, tmp_path):
    """The made draft loads in transformers, comes back by its files alone, and an altered or foreign one is noticed (B31, E07)."""
    folders = [f"{key}.dir={tmp_path / key}" for key in ("train", "export", "eval", "features")]
    recipe = load_recipe("recipes/debug/draft_model.yaml", [f"target.path={tiny_target}", *folders])
    head = DraftModelHead(recipe.head, parts, DraftVocab(torch.arange(V), V))  # type: ignore[arg-type]
    store = stored_row(tiny_target, 256)
    folder = export_head(recipe, head, parts, store, {}, recipe.export_dir)
    check_export(recipe, parts)

    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert model.config.num_hidden_layers == head.config.num_hidden_layers == 1
    ids = torch.randint(V, (9,))
    drafted = head.propose({}, ids, torch.arange(8), head.new_cache(), 5, lambda logits: logits.argmax(-1))
    assert drafted.tolist() == model.generate(ids[None], max_new_tokens=5, do_sample=False, eos_token_id=-1)[0, 9:].tolist()

    again = load_exported_head(folder, parts)[0]
    for name, tensor in head.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    longer = DraftModelHead(Block(init_from=str(folder)), parts, DraftVocab(torch.arange(V), V))  # what PARD starts from
    load_export_into(longer, folder)
    assert torch.equal(longer.head_weight, head.head_weight)

    config = json.loads((folder / "config.json").read_text())
    for change in ({"rope_parameters": {"rope_type": "default", "rope_theta": 1.0}}, {"rms_norm_eps": 0.1}):
        (folder / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(ExportError, match=next(iter(change))):
            check_export(recipe, parts)
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(TargetError, match="id 97 is 'b' in the draft and 'a' in the target"):
        check_export(recipe, parts)
