"""EAGLE-3: the training-time test is real drafting, and the served layout is complete."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from heads import shift
from heads.eagle3 import Eagle3Head
from heads.exported import check_served, served_vocab
from heads.layers import document_starts
from heads.target import read_target
from heads.vocab import DraftVocab
from recipes.errors import ExportError, RecipeError
from recipes.head_blocks import Eagle3Head as Block
from recipes.schema import Target

SWITCHES = [
    {},
    {"norm_before_residual": True},
    {"norm_before_fc": True, "norm_output": True},
    {"fc_norm": True, "norm_output": True, "norm_before_residual": True},
    {"num_layers": 2},
]


def make(parts, vocab_size=30, **switches) -> Eagle3Head:
    torch.manual_seed(1)
    vocab = DraftVocab(torch.randperm(50)[:vocab_size].sort().values, 50)
    head = Eagle3Head(Block(aux_layers=[1, 3, 5], draft_vocab_size=vocab_size, unroll_steps=4, **switches), parts, vocab)
    with torch.no_grad():  # far from the initial weights, so that every part matters
        for p in head.parameters():
            p.normal_(std=0.3)
    return head.eval()


@pytest.mark.parametrize("switches", SWITCHES, ids=str)
def test_rollout_is_sequential_drafting(parts, switches):
    """METHODS §16.8: depth i at index t equals drafting i tokens one by one from the prefix <= t with the answer's tokens."""
    head = make(parts, **switches)
    lengths, depths = [9, 1, 6], 4
    ids = torch.randint(50, (sum(lengths),))
    document = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
    positions = torch.cat([torch.arange(n) for n in lengths])
    mask = torch.rand(len(ids)) < 0.7
    hidden = {layer: torch.randn(len(ids), 32) for layer in head.aux_layers}
    weights = [shift.draft_weight(mask, document, i) for i in range(depths)]
    rows = [m.nonzero()[:, 0] for m in shift.rollout_rows(weights)]
    tokens = [shift.draft_inputs(ids, i) for i in range(depths)]
    with torch.no_grad():
        states = head.rollout(head.fuse(hidden), tokens, positions, document_starts(document), rows)
        compared = 0
        for depth in range(depths):
            for place, t in enumerate(rows[depth].tolist()):
                start = int((document == document[t]).nonzero()[0])
                cache = head.new_cache()
                prefix = slice(start, t + 1)
                state = head.advance(
                    head.fuse({k: h[prefix] for k, h in hidden.items()}), ids[start + 1 : t + 2], positions[prefix], cache
                )[-1:]
                for i in range(1, depth + 1):
                    state = head.advance(head.feedback(state), ids[t + 1 + i : t + 2 + i], positions[t : t + 1] + i, cache)
                torch.testing.assert_close(states[depth][place], state[0], rtol=1e-4, atol=1e-5)
                compared += 1
    assert compared > 20


def test_depth_zero_is_a_plain_causal_pass(parts):
    """METHODS §16.8, first half."""
    head = make(parts)
    ids, n = torch.randint(50, (8,)), 8
    hidden = {layer: torch.randn(n, 32) for layer in head.aux_layers}
    everywhere = torch.arange(n - 1)
    with torch.no_grad():
        states = head.rollout(
            head.fuse(hidden), [shift.draft_inputs(ids, 0)], torch.arange(n), torch.zeros(n, dtype=torch.long), [everywhere]
        )
        plain = head.advance(head.fuse({k: h[:-1] for k, h in hidden.items()}), ids[1:], everywhere, head.new_cache())
    torch.testing.assert_close(states[0], plain, rtol=1e-4, atol=1e-5)


def test_propose_leaves_only_committed_entries(parts):
    """A second round starts from true features: what was drafted is forgotten."""
    head = make(parts)
    hidden = {layer: torch.randn(9, 32) for layer in head.aux_layers}
    ids = torch.randint(50, (10,))
    greedy = lambda logits: logits.argmax(-1)  # noqa: E731
    cache = head.new_cache()
    head.propose({k: h[:5] for k, h in hidden.items()}, ids[1:6], torch.arange(5), cache, 4, greedy)
    assert cache.length == 5
    second = head.propose({k: h[5:9] for k, h in hidden.items()}, ids[6:10], torch.arange(5, 9), cache, 4, greedy)
    fresh = head.propose(hidden, ids[1:10], torch.arange(9), head.new_cache(), 4, greedy)
    assert torch.equal(second, fresh)
    assert set(fresh.tolist()) <= set(head.vocab.ids.tolist())


@pytest.mark.parametrize("switches", SWITCHES, ids=str)
@pytest.mark.parametrize("vocab_size", [30, 50])
def test_served_layout_round_trip(parts, switches, vocab_size):
    """B15, B23, B31, E07: everything served is there, nothing borrowed is, and it comes back the same."""
    head = make(parts, vocab_size, **switches)
    tensors, config = {k: v.clone() for k, v in head.served_tensors().items()}, head.served_config()
    check_served(Eagle3Head.served_shapes(config), tensors, "export")
    assert "embed_tokens.weight" not in tensors and ("d2t" in tensors) == (vocab_size < 50) == ("t2d" in tensors)
    other = Eagle3Head(head.block, parts, served_vocab(tensors, 50))
    other.load_served(tensors)
    for name, value in head.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name


def test_published_names_are_read(parts):
    """METHODS §14: `midlayer.` is `layers.0.`; rows of the LM head are matched by target token."""
    head = make(parts, 30)
    published = {name.replace("layers.0.", "midlayer."): v.clone() for name, v in head.served_tensors().items()}
    wider = Eagle3Head(head.block.model_copy(update={"draft_vocab_size": None}), parts, DraftVocab(torch.arange(50), 50))
    wider.load_served(published)
    assert torch.equal(wider.lm_head.weight[head.vocab.ids], head.lm_head.weight)
    others = torch.tensor(sorted(set(range(50)) - set(head.vocab.ids.tolist())))
    assert torch.equal(wider.lm_head.weight[others], parts.lm_head[others])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fc.weight": None}, r"(?s)does not fit.*missing fc\.weight \(32, 96\)"),
        ({"midlayer.hidden_norm.weight": None}, r"missing layers\.0\.hidden_norm\.weight"),
        ({"midlayer.self_attn.q_norm.weight": torch.ones(8)}, r"unknown layers\.0\.self_attn\.q_norm\.weight"),
        ({"norm.weight": torch.ones(16)}, r"norm\.weight is \(16,\), this head needs \(32,\)"),
        ({"layers.0.hidden_norm.weight": torch.ones(32)}, r"layers\.0\.hidden_norm\.weight twice, as midlayer\.hidden_norm\.weight and as"),
        ({"d2t": None}, r"lm_head\.weight of the draft is \(30, 32\), but without d2t it covers all 50 tokens"),
        ({"lm_head.weight": torch.zeros(50, 32)}, r"lm_head\.weight of the draft is \(50, 32\), but its d2t names 30 tokens"),
        ({"lm_head.weight": None}, r"no lm_head\.weight"),
        ({"embed_tokens.weight": torch.zeros(50, 32)}, r"embed_tokens\.weight .* is not the target's"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_published_file_that_does_not_fit(parts, change, message):
    """B15, B29, VLLM_FORMATS §2: missing, extra and doubled tensors are named; the server would draft wrong tokens without a word."""
    head = make(parts, 30)
    published = {name.replace("layers.0.", "midlayer."): v.clone() for name, v in head.served_tensors().items()}
    tensors = {name: value for name, value in (published | change).items() if value is not None}
    with pytest.raises(ExportError, match=message):
        Eagle3Head(head.block, parts, head.vocab).load_served(tensors)


def test_the_targets_embedding_in_a_published_file_is_left_out(parts):
    head = make(parts, 30)
    other = Eagle3Head(head.block, parts, head.vocab)
    other.load_served(head.served_tensors() | {"embed_tokens.weight": parts.embed_tokens.half()})
    assert torch.equal(other.fc.weight, head.fc.weight) and torch.equal(other.lm_head.weight, head.lm_head.weight)


def test_missing_and_extra_tensors_are_named(parts):
    """VLLM_FORMATS §0: the server does not notice a missing tensor, so the export does."""
    head = make(parts)
    tensors, shapes = dict(head.served_tensors()), Eagle3Head.served_shapes(head.served_config())
    del tensors["fc.weight"]
    tensors["embed_tokens.weight"] = torch.zeros(50, 32)
    tensors["norm.weight"] = torch.full((32,), torch.nan)
    with pytest.raises(ExportError, match=r"(?s)missing fc\.weight.*norm\.weight is empty or not finite.*unexpected embed_tokens\.weight"):
        check_served(shapes, tensors, "export")


@pytest.mark.parametrize("layers", [2, 4, 5])
def test_shallow_targets_need_explicit_layers(layers):
    """B17: (2, L//2, L-3) must be three distinct ascending layers."""
    with pytest.raises(RecipeError, match="explicitly"):
        Block().feature_layers(layers)


@pytest.mark.parametrize(("given", "good"), [([0], True), ([6], True), ([7], False), ([-1], False), ([2, 2], False)])
def test_explicit_layers(given, good):
    """B17: 0 is the embedding, L the state after the last block."""
    block = Block(aux_layers=given)
    if good:
        assert block.feature_layers(6) == given
    else:
        with pytest.raises(RecipeError, match="distinct layers within 0..6"):
            block.feature_layers(6)


def test_auto_layers():
    """METHODS §16.3."""
    assert Block().feature_layers(32) == [2, 16, 29] and Block().feature_layers(36) == [2, 18, 33]


@pytest.mark.parametrize("num_layers", [1, 2])
def test_start_as_the_targets_last_blocks(tiny_target, num_layers):
    """`head.init_layer: target`: features pass, the layers are the last blocks, only what reads the embedding is random."""
    target = read_target(Target(path=str(tiny_target), dtype="float32"))
    vocab = DraftVocab(torch.arange(target.vocab_size), target.vocab_size)
    block = Block(aux_layers=[1, 2, 4], draft_vocab_size=None, init_layer="target", num_layers=num_layers)
    head = Eagle3Head(block, target, vocab)
    first, layer, H = target.decoder_block(target.num_layers - num_layers), head.layers[0], target.hidden_size
    hidden = {i: torch.randn(5, H) for i in (1, 2, 4)}
    torch.testing.assert_close(head.fuse(hidden), hidden[4])
    assert torch.equal(layer.self_attn.k_proj.weight[:, H:], first["self_attn.k_proj.weight"])
    assert torch.equal(layer.mlp.down_proj.weight, first["mlp.down_proj.weight"])
    assert torch.equal(layer.hidden_norm.weight, first["input_layernorm.weight"])
    assert layer.self_attn.k_proj.weight[:, :H].std() > 0 and bool((layer.input_layernorm.weight == 1).all())
    assert torch.equal(head.norm.weight, target.norm_weight())
    if num_layers == 2:
        last = target.decoder_block(target.num_layers - 1)
        assert last.keys() == dict(head.layers[1].named_parameters()).keys()
        assert all(torch.equal(own, last[name]) for name, own in head.layers[1].named_parameters())


def test_tied_target_with_its_own_head_dim(tmp_path):
    """B23: tied embeddings and a reduced draft vocabulary, through files; B24: head_dim is not hidden_size / heads."""
    config = LlamaConfig(
        hidden_size=40,
        intermediate_size=48,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=256,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "target")
    target = read_target(Target(path=str(tmp_path / "target"), dtype="float32"))
    vocab = DraftVocab(torch.randperm(256)[:64].sort().values, 256)
    head = Eagle3Head(Block(aux_layers=[1, 3, 5], draft_vocab_size=64), target, vocab)
    served = head.served_config()
    assert served["head_dim"] == 16 and served["tie_word_embeddings"] is False
    save_file(dict(head.served_tensors()), tmp_path / "model.safetensors")  # shares no memory with the target's embedding
    tensors = load_file(tmp_path / "model.safetensors")
    check_served(Eagle3Head.served_shapes(served), tensors, "export")
    shapes = {name.removeprefix("layers.0.self_attn."): tuple(tensor.shape) for name, tensor in tensors.items()}
    assert (shapes["q_proj.weight"], shapes["k_proj.weight"], shapes["o_proj.weight"]) == ((64, 80), (32, 80), (40, 64))
    assert shapes["lm_head.weight"] == (64, 40)
    other = Eagle3Head(head.block, target, served_vocab(tensors, 256))
    other.load_served(tensors)
    assert all(torch.equal(other.state_dict()[name], value) for name, value in head.state_dict().items())
    hidden = {layer: torch.randn(7, 40) for layer in (1, 3, 5)}
    drafts = [
        h.eval().propose(hidden, torch.arange(1, 8), torch.arange(7), h.new_cache(), 3, lambda z: z.argmax(-1)) for h in (head, other)
    ]
    assert torch.equal(*drafts) and set(drafts[0].tolist()) <= set(vocab.ids.tolist())
