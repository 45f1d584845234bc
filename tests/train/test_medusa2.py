"""Medusa-2: what learns when, the self-distillation loss, and that the exported target is the adapted one."""

import copy
import json
import shutil
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_model
from transformers import AutoModelForCausalLM

from heads.exported import load_exported_head, read_meta, with_own_target
from heads.medusa import MedusaHead
from heads.target import load_target_model, read_target
from heads.vocab import DraftVocab
from recipes.errors import ExportError, RecipeError, TargetError
from recipes.head_blocks import MedusaHead as Block
from recipes.objective_blocks import Medusa2Objective as Settings
from recipes.schema import Target, load_recipe
from tests.train.stored import states_of
from train import medusa2
from train.medusa2 import Medusa2Objective, heads_schedule, merged
from train.optimizer import make_optimizer
from train.packing import collate


@pytest.fixture(scope="module")
def tiny(tiny_target):
    """The tiny target's parts and whole model."""
    cfg = Target(path=str(tiny_target), dtype="float32")
    return SimpleNamespace(parts=read_target(cfg), model=load_target_model(cfg))


def make(tiny, heads=2, **settings) -> Medusa2Objective:
    head = MedusaHead(Block(num_heads=heads, shared_lm_head=True), tiny.parts, DraftVocab(torch.arange(260), 260))
    return Medusa2Objective(head, tiny.parts, Settings(**{"lora_rank": 4, "lora_dropout": 0.0, **settings})).train()


class Source:
    """A feature store of random rows with the tiny target's own states."""

    def __init__(self, model, lengths=(14, 9, 11)):
        self.rows = [self._row(model, n) for n in lengths]
        self.lengths, self.validation = torch.tensor(lengths), torch.tensor([False, True, False])
        self.supervised = torch.tensor([int(row.loss_mask.sum()) for row in self.rows])
        self.manifest = SimpleNamespace(hidden_size=64)

    @staticmethod
    def _row(model, n):
        ids = torch.randint(256, (n,))
        _, last = states_of(model, ids, [])
        return SimpleNamespace(input_ids=ids, loss_mask=torch.arange(n) >= 4, hidden={}, last_hidden=last)

    def read(self, row, layers):
        return self.rows[row]

    def read_rows(self, rows, layers):
        return [self.rows[row] for row in rows]


@pytest.fixture(scope="module")
def source(tiny):
    torch.manual_seed(0)
    return Source(tiny.model)


@pytest.fixture
def batch(source):
    return collate(source.rows, [], 64)


def learn(objective, batch, steps=3, lr=0.02):
    optimizer = torch.optim.Adam([p for p in objective.parameters() if p.requires_grad], lr=lr)
    for _ in range(steps):
        optimizer.zero_grad()
        objective(batch).loss_sum.backward()
        optimizer.step()


def test_fresh_adapters_change_nothing(tiny, batch):
    """Before the first step the adapted target is the target: its states, and a distillation loss of 0."""
    objective = make(tiny)
    states = objective.adapted_states(batch)
    torch.testing.assert_close(states, batch.last_hidden, rtol=1e-4, atol=1e-4)
    result, count = objective.target_loss(states, batch, "kl")
    assert result.loss_sum.item() == pytest.approx(0, abs=1e-4) and count == 34 - 3 * 4


def test_loss_is_the_papers(tiny, batch):
    """METHODS §1.3: L_target + λ0 s(t) Σ 0.8^(i+1) L_i; the target's part only over supervised labels (not all positions)."""
    objective = make(tiny, loss="ce", target_loss="ce", heads_weight=0.3, heads_schedule="linear")
    learn(objective, batch, 1)
    objective.progress = 0.5
    states = objective.adapted_states(batch)
    expected, kl = torch.zeros(()), 0.0
    for t in range(len(states)):
        same = lambda by, t=t: t + by < len(states) and batch.document[t + by] == batch.document[t]  # noqa: E731
        if same(1) and batch.loss_mask[t + 1]:
            log_q = (states[t] @ tiny.parts.lm_head.T).log_softmax(-1)
            expected = expected - log_q[batch.input_ids[t + 1]]
            kl += F.kl_div(log_q, (batch.last_hidden[t] @ tiny.parts.lm_head.T).softmax(-1), reduction="sum").item()
        for i in range(2):
            if same(2 + i) and batch.loss_mask[t + 1 + i]:
                log_q = (objective.head.states(states[t], i) @ objective.head.lm_head_of(i).T).log_softmax(-1)
                expected = expected - 0.3 * 0.5 * 0.8 ** (i + 1) * log_q[batch.input_ids[t + 2 + i]]
    torch.testing.assert_close(objective(batch).loss_sum, expected, rtol=1e-4, atol=1e-3)
    assert objective.target_loss(states, batch, "kl")[0].loss_sum.item() == pytest.approx(kl, rel=1e-3)


@pytest.mark.parametrize("progress", [0.1, 0.6], ids=["heads alone", "both"])
@pytest.mark.parametrize("documents", [[], [(3, 0)], [(2, 1)], [(1, 2), (5, 1)]], ids=str)
def test_short_rows_and_nothing_supervised(tiny, documents, progress):
    """B03, B36: rows shorter than the heads reach, without an answer, or none at all: a finite loss that reaches every parameter."""
    objective = make(tiny, heads=4, head_warmup=0.4)
    objective.progress = progress
    rows = []
    for prompt, answer in documents:
        n = prompt + answer
        rows.append(SimpleNamespace(input_ids=torch.randint(256, (n,)), loss_mask=torch.arange(n) >= prompt, hidden={}))
        rows[-1].last_hidden = torch.randn(n, 64)
    out = objective(collate(rows, [], 64))
    out.loss_sum.backward()
    learning = [p for p in objective.parameters() if p.requires_grad]
    assert torch.isfinite(out.loss_sum) and all(p.grad is not None and torch.isfinite(p.grad).all() for p in learning)
    if not any(answer for _, answer in documents):
        assert out.loss_sum.item() == 0 and not any(p.grad.any() for p in learning)


def test_schedules():
    """METHODS §1.3: constant, step / max, sin(π/2 · step / max); with a ramp, the same over that share of the run, then 1."""
    of = lambda name, t: heads_schedule(Settings(heads_schedule=name), t)  # noqa: E731
    assert [of("constant", t) for t in (0.0, 0.5, 1.0)] == [1, 1, 1]
    assert [of("linear", t) for t in (0.0, 0.5, 1.0)] == [0, 0.5, 1]
    assert [of("sine", t) for t in (0.0, 0.5, 1.0)] == pytest.approx([0, 0.5**0.5, 1])
    ramp = Settings(heads_schedule="sine", heads_ramp=0.4)
    assert [heads_schedule(ramp, t) for t in (0.0, 0.2, 0.4, 1.0)] == pytest.approx([0, 0.5**0.5, 1, 1])
    with pytest.raises(RecipeError, match="heads_ramp=0.4 has no effect with objective.heads_schedule='constant'"):
        Settings(heads_ramp=0.4)


@pytest.mark.parametrize("backbone", ["lora", "full"])
def test_heads_warm_up_alone_then_both_learn(tiny, batch, backbone):
    """METHODS §1.3: during the warm-up the target gets gradients of zero (every parameter takes part), after it its own."""
    lora = {} if backbone == "lora" else {"lora_rank": 32, "lora_dropout": 0.05}
    objective = make(tiny, backbone=backbone, head_warmup=0.4, **lora)
    target_of = lambda: [p for p in objective.model.parameters() if p.requires_grad]  # noqa: E731
    for progress, learns in ((0.1, False), (0.6, True)):
        objective.zero_grad()
        objective.progress = progress
        objective(batch).loss_sum.backward()
        assert all(p.grad is not None for p in objective.parameters() if p.requires_grad)
        assert any(p.grad.any() for p in target_of()) == learns
        assert any(p.grad.any() for p in objective.head.parameters())
    frozen = [p for p in objective.model.parameters() if not p.requires_grad]
    assert bool(frozen) == (backbone == "lora")


def test_heads_learn_faster(tiny):
    """METHODS §1.3: the heads' learning rate is a multiple of the target's."""
    objective = make(tiny, head_lr_multiplier=4.0)
    cfg = load_recipe("recipes/debug/medusa.yaml").train
    scale = {id(p): group["lr_scale"] for group in make_optimizer(objective, cfg).param_groups for p in group["params"]}
    assert {scale[id(p)] for p in objective.head.parameters()} == {4.0}
    assert {scale[id(p)] for p in objective.model.parameters() if p.requires_grad} == {1.0}
    assert len(scale) == sum(p.requires_grad for p in objective.parameters())


@pytest.mark.parametrize("backbone", ["lora", "full"])
def test_checkpoint_holds_what_learns(tiny, batch, backbone, tmp_path):
    """E07: the frozen target is in no checkpoint; what is in it comes back through accelerate's strict loading."""
    from safetensors.torch import load_model

    lora = {} if backbone == "lora" else {"lora_rank": 32, "lora_dropout": 0.05}
    objective = make(tiny, backbone=backbone, **lora)
    learn(objective, batch, 2)
    names = set(objective.state_dict())
    if backbone == "lora":
        assert all("lora_" in name for name in names if name.startswith("model."))
    assert any(name.startswith("model.") for name in names) and "head.lm_heads.0.weight" in names
    save_model(objective, str(tmp_path / "model.safetensors"))
    other = make(tiny, backbone=backbone, **lora)
    load_model(other, str(tmp_path / "model.safetensors"), strict=True)
    with torch.no_grad():
        torch.testing.assert_close(other.adapted_states(batch), objective.adapted_states(batch))


@pytest.mark.parametrize("backbone", ["lora", "full"])
def test_exported_target_is_the_adapted_one(tiny, batch, source, backbone, tmp_path, tiny_target):
    """Merged weights give the adapted logits; heads belong to that target and to no other; the report says how far it moved."""
    lora = {} if backbone == "lora" else {"lora_rank": 32, "lora_dropout": 0.05}
    objective = make(tiny, backbone=backbone, **lora)
    learn(objective, batch, 4)
    overrides = [f"target.path={tiny_target}", "method=medusa2", f"export.dir={tmp_path / 'heads'}", f"objective.backbone={backbone}"]
    recipe = load_recipe("recipes/debug/medusa.yaml", [*overrides, "head.num_heads=2", "head.shared_lm_head=true", "eval.k=[2]"])
    objective.export(recipe, source, {"steps": 4}, tmp_path / "heads")

    objective.eval()
    written = AutoModelForCausalLM.from_pretrained(tmp_path / "heads-target", dtype=torch.float32)
    with torch.no_grad():
        adapted, plain = objective.model(batch.input_ids[None]).logits, tiny.model(batch.input_ids[None]).logits
        torch.testing.assert_close(written(batch.input_ids[None]).logits, adapted, rtol=1e-3, atol=1e-3)
    assert (adapted - plain).abs().max() > 0.1
    changed = merged(objective.model)
    assert len(changed) == (4 * 7 if backbone == "lora" else len(list(tiny.model.parameters())))

    moved = read_meta(tmp_path / "heads")["training"]["target_moved"]
    rows = collate([source.rows[1]], [], 64)  # the held-out row
    with torch.no_grad():
        log_q = (objective.adapted_states(rows) @ objective.lm_head().T).log_softmax(-1)[3:-1]
        log_p = (rows.last_hidden @ tiny.parts.lm_head.T).log_softmax(-1)[3:-1]
    labels = rows.input_ids[4:, None]
    assert moved["tokens"] == 5 and moved["kl"] == pytest.approx((log_p.exp() * (log_p - log_q)).sum(-1).mean().item(), rel=1e-3)
    assert moved["cross_entropy_before"] == pytest.approx(-log_p.gather(1, labels).mean().item(), rel=1e-3)
    assert moved["cross_entropy_after"] == pytest.approx(-log_q.gather(1, labels).mean().item(), rel=1e-3)
    assert moved["same_top1"] == pytest.approx((log_p.argmax(-1) == log_q.argmax(-1)).float().mean().item())

    own = with_own_target(recipe)
    assert own.target.path == str(tmp_path / "heads-target")
    head, _ = load_exported_head(tmp_path / "heads", read_target(own.target))
    assert torch.equal(head.lm_heads[0].weight, objective.head.lm_heads[0].weight)
    with pytest.raises(ExportError, match="with fingerprint"):
        load_exported_head(tmp_path / "heads", tiny.parts)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rope_that_depends_on_the_batch(tiny_target, tmp_path, kind):
    """B16: where rotary frequencies follow the longest row, a row of a batch has the states that it has alone, whatever came before."""
    shutil.copytree(tiny_target, tmp_path / "target")
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 16, "long_factor": [3.0] * 16, "original_max_position_embeddings": 16}
    file = tmp_path / "target/config.json"
    changes = {"rope_parameters": rope, "max_position_embeddings": 16 if kind == "dynamic" else 512}
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    cfg = Target(path=str(tmp_path / "target"), dtype="float32")
    objective = make(SimpleNamespace(parts=read_target(cfg)))  # fresh adapters change nothing
    rows = [torch.randint(256, (n,)) for n in (10, 60, 40)]
    items = [SimpleNamespace(input_ids=ids, loss_mask=ids >= 0, hidden={}, last_hidden=torch.zeros(len(ids), 64)) for ids in rows]
    with torch.no_grad():
        states = objective.adapted_states(collate(items, [], 64)).split([10, 60, 40])
        for ids, got in zip(rows, states, strict=True):
            alone = load_target_model(cfg).get_decoder()(input_ids=ids[None]).last_hidden_state[0]
            torch.testing.assert_close(got, alone, rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def half(tmp_path_factory, tiny, tiny_target):
    """The tiny target in bfloat16, in its files and loaded."""
    folder = tmp_path_factory.mktemp("half") / "target"
    shutil.copytree(tiny_target, folder)
    (folder / "model.safetensors").unlink()
    copy.deepcopy(tiny.model).to(torch.bfloat16).save_pretrained(folder)
    cfg = Target(path=str(folder), dtype="bfloat16")
    return SimpleNamespace(parts=read_target(cfg), model=load_target_model(cfg))


@pytest.mark.parametrize("backbone", ["lora", "full"])
def test_rounding_is_no_fault_and_a_wrong_merge_is(half, batch, source, backbone, tmp_path, monkeypatch):
    """B18: a bfloat16 target trained in float32 is written rounded, which is accepted; half an adapter, or none of it, is not."""
    lora = {} if backbone == "lora" else {"lora_rank": 32, "lora_dropout": 0.05}
    objective = make(half, backbone=backbone, **lora)
    learn(objective, batch, 3, lr=0.003)
    before = {name: p.detach().clone() for name, p in objective.model.named_parameters()}
    objective.write_target(tmp_path / "good")
    objective.check_target(tmp_path / "good", source)
    for name, p in objective.model.named_parameters():
        assert p.dtype == before[name].dtype and torch.equal(p, before[name]), name
    files = load_file(tmp_path / "good/model.safetensors")
    assert all(tensor.dtype == torch.bfloat16 for tensor in files.values())

    def wrongly(model):
        plain = dict(half.model.named_parameters())
        return {name: (tensor.float() + plain[name].float()) / 2 for name, tensor in merged(model).items()}

    monkeypatch.setattr(medusa2, "merged", wrongly)
    objective.write_target(tmp_path / "wrong")
    for folder in (tmp_path / "wrong", half.parts.path):
        with pytest.raises(ExportError, match="the merged target has the adapted one's logits at"):
            objective.check_target(folder, source)


def test_adapted_targets_differ_in_fingerprint(tiny, batch, tmp_path):
    """The fingerprint reads the first MiB of the weights, where adapters may change nothing: config.json says what was merged."""
    objective = make(tiny)
    objective.write_target(tmp_path / "a")
    learn(objective, batch, 1)
    objective.write_target(tmp_path / "b")
    prints = {read_target(Target(path=str(tmp_path / name), dtype="float32")).fingerprint for name in "ab"} | {tiny.parts.fingerprint}
    assert len(prints) == 3
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in "ab"]
    assert configs[0]["headstart_adapted"] != configs[1]["headstart_adapted"]


def test_parts_without_their_recipe_block_are_refused(small_target):
    head = MedusaHead(Block(num_heads=1), small_target, DraftVocab(torch.arange(50), 50))
    with pytest.raises(TargetError, match="make them with read_target"):
        Medusa2Objective(head, small_target, Settings())


def test_lora_without_peft_is_one_line(tiny, monkeypatch):
    """DESIGN §9: the message names the package and the recipe key."""
    import sys

    from recipes.errors import RecipeError

    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(RecipeError, match="pip install peft, or set objective.backbone: full"):
        make(tiny)
