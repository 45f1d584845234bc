"""A target's own MTP layer: read from its files by every family's names, run as real drafting, and given back by the same names."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from heads import LAST_HIDDEN, shift
from heads.layers import document_starts
from heads.mtp import MtpHead
from heads.mtp_native import MtpNativeHead
from heads.target import read_target
from heads.vocab import DraftVocab
from recipes.errors import ExportError, RecipeError, TargetError
from recipes.head_blocks import MtpHead as MtpBlock
from recipes.head_blocks import MtpNativeHead as Block
from recipes.schema import Target
from tests.heads.native_targets import CONFIGS, H, make_target, mtp_shapes

FULL = DraftVocab(torch.arange(50), 50)
FAMILIES = sorted(CONFIGS)


@pytest.fixture(scope="module", params=FAMILIES)
def native(request, tmp_path_factory):
    """(family, target, head)."""
    target = read_target(Target(path=str(make_target(request.param, tmp_path_factory.mktemp(request.param))), dtype="float32"))
    return request.param, target, MtpNativeHead(Block(), target, FULL).eval()


def test_names_are_the_files_own(native):
    """Exactly the MTP tensors, with the files' values; copies of embedding and LM head are left alone."""
    family, target, head = native
    stored = load_file(target.path / "model.safetensors")
    served = head.served_tensors()
    assert {name: tuple(t.shape) for name, t in served.items()} == mtp_shapes(family) == head.served_shapes(head.served_config())
    for name, tensor in served.items():
        assert torch.equal(tensor, stored[name]), name


def test_rollout_is_sequential_drafting(native):
    """METHODS §16.8: depth i at index t equals drafting from the prefix <= t with the answer's tokens, documents apart."""
    _, _, head = native
    depths, lengths = 3, [7, 1, 4]
    ids = torch.randint(50, (sum(lengths),))
    document = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
    positions = torch.cat([torch.arange(n) for n in lengths])
    mask, last = torch.rand(len(ids)) < 0.8, torch.randn(len(ids), H)
    rows = [m.nonzero()[:, 0] for m in shift.rollout_rows([shift.draft_weight(mask, document, i) for i in range(depths)])]
    tokens = [shift.draft_inputs(ids, i) for i in range(depths)]
    with torch.no_grad():
        states = head.rollout(head.fuse({LAST_HIDDEN: last}), tokens, positions, document_starts(document), rows)
        for depth in range(depths):
            for place, t in enumerate(rows[depth].tolist()):
                prefix = slice(int((document == document[t]).nonzero()[0]), t + 1)
                seen, answer = [], iter(shift.draft_inputs(ids, 1)[t : t + depth + 1].tolist())
                head.propose(
                    {LAST_HIDDEN: last[prefix]}, shift.draft_inputs(ids, 0)[prefix], positions[prefix], head.new_cache(), depth + 1,
                    lambda logits, seen=seen, answer=answer: seen.append(logits[0]) or torch.tensor([next(answer)]),
                )  # fmt: skip
                torch.testing.assert_close(head.logits(states[depth][place]), seen[depth], rtol=1e-3, atol=1e-3)
    assert sum(map(len, rows)) > 15


def test_attention_is_the_familys_own(native):
    """Depth 0 equals the family's decoder layer under transformers' own causal attention."""
    family, _, head = native
    n = 6
    last, ids = torch.randn(n, H), torch.randint(50, (n,))
    captured = []
    hook = head.layers[0].register_forward_pre_hook(lambda module, args, kwargs: captured.append((args[0], kwargs)), with_kwargs=True)
    with torch.no_grad():
        state = head.advance(head.fuse({LAST_HIDDEN: last}), ids, torch.arange(n), head.new_cache())
        hook.remove()
        x, kwargs = captured[0]
        causal = torch.full((n, n), -torch.inf).triu(1)[None, None]
        head.config._attn_implementation = "eager"
        try:
            expected = head.layers[0](x, position_embeddings=kwargs["position_embeddings"], attention_mask=causal)[0]
        finally:
            head.config._attn_implementation = "headstart_draft"
    torch.testing.assert_close(state, expected, rtol=1e-4, atol=1e-4)


def test_gradients_reach_every_parameter(native):
    """Fine-tuning trains the whole layer (experts that no token chose aside)."""
    _, _, head = native
    n = 12
    ids = torch.randint(50, (n,))
    everywhere = torch.arange(n - 2)
    states = head.rollout(
        head.fuse({LAST_HIDDEN: torch.randn(n, H)}),
        [shift.draft_inputs(ids, i) for i in range(2)],
        torch.arange(n),
        torch.zeros(n).long(),
        [everywhere] * 2,
    )
    head.zero_grad()
    sum(head.logits(s).logsumexp(-1).sum() for s in states).backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in head.parameters())


def test_mimo_layer_is_our_own_head(tmp_path):
    """The MiMo layer run by transformers' Qwen2 code and by heads/mtp.py: the same drafts, to rounding."""
    target = read_target(Target(path=str(make_target("mimo", tmp_path)), dtype="float32"))
    native = MtpNativeHead(Block(), target, FULL).eval()
    own = MtpHead(MtpBlock(layout="mimo"), target, FULL).eval()
    own.load_served(native.served_tensors())
    last, ids = torch.randn(7, H), torch.randint(50, (7,))
    logits = []
    for head in (native, own):
        seen = []
        head.propose(
            {LAST_HIDDEN: last}, ids, torch.arange(7), head.new_cache(), 3, lambda x, seen=seen: seen.append(x) or torch.tensor([len(seen)])
        )
        logits.append(torch.cat(seen))
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)


def test_load_served_round_trip(native):
    family, target, head = native
    changed = {name: tensor + 1 for name, tensor in head.served_tensors().items()}
    other = MtpNativeHead(Block(), target, FULL)
    other.load_served(changed)
    assert all(torch.equal(tensor, changed[name]) for name, tensor in other.served_tensors().items())
    changed.pop(next(iter(changed)))
    with pytest.raises(ExportError, match="missing m"):
        other.load_served(changed)


def test_missing_mtp_tensors(tmp_path):
    """An MTP target whose files lack its MTP keys, one of them or all, or whose index does."""
    folder = make_target("deepseek_v3", tmp_path / "a")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.2.mlp.experts.3.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        TargetError, match=r"lacks 1 of the \d+ tensors of its MTP layer: model\.layers\.2\.mlp\.experts\.3\.up_proj\.weight"
    ):
        MtpNativeHead(Block(), read_target(Target(path=str(folder), dtype="float32")), FULL)
    folder = make_target("qwen3_next", tmp_path / "b")
    kept = {name: t for name, t in load_file(folder / "model.safetensors").items() if not name.startswith("mtp.")}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(TargetError, match=r"lacks 2\d of the 2\d tensors of its MTP layer.*train a head from scratch"):
        MtpNativeHead(Block(), read_target(Target(path=str(folder), dtype="float32")), FULL)
    folder = make_target("mimo", tmp_path / "c", sharded=True)
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"] = {name: shard for name, shard in index["weight_map"].items() if ".mtp_layers." not in name}
    file.write_text(json.dumps(index))
    with pytest.raises(TargetError, match=r"lacks 16 of the 16 tensors of its MTP layer: model\.mtp_layers\.0\."):
        MtpNativeHead(Block(), read_target(Target(path=str(folder), dtype="float32")), FULL)


def test_unreadable_targets(tmp_path, tiny_target):
    """Other families, FP8 weights with a scale, and shapes that config.json does not give are refused by name."""
    with pytest.raises(TargetError, match="family 'llama', whose MTP layer Headstart does not read"):
        MtpNativeHead(Block(), read_target(Target(path=str(tiny_target), dtype="float32")), DraftVocab(torch.arange(260), 260))
    folder = make_target("mimo", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    scaled = tensors | {"model.mtp_layers.0.input_proj.weight_scale_inv": torch.ones(1, 1)}
    save_file(scaled, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(TargetError, match="input_proj.weight is stored in FP8"):
        MtpNativeHead(Block(), read_target(Target(path=str(folder), dtype="float32")), FULL)
    tensors["model.mtp_layers.0.input_proj.weight"] = torch.zeros(H, H)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(TargetError, match=r"is \(64, 64\), config.json gives \(64, 128\)"):
        MtpNativeHead(Block(), read_target(Target(path=str(folder), dtype="float32")), FULL)
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["MiMoForCausalLM"]
    with pytest.raises(RecipeError, match="draft vocabulary has 9"):
        MtpNativeHead(Block(), read_target(Target(path=str(folder), dtype="float32")), DraftVocab(torch.arange(9), 50))
