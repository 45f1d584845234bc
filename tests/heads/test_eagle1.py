"""EAGLE-1's body: its layer, that HASS's rollout is real drafting, and the published layout."""

import json

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from heads import LAST_HIDDEN, shift
from heads.eagle1 import Eagle1Head
from heads.exported import check_served, read_tensors
from heads.layers import document_starts
from heads.vocab import DraftVocab
from recipes.errors import ExportError, RecipeError
from recipes.head_blocks import Eagle1Head as Block
from recipes.objective_blocks import Eagle1Objective as Settings

FULL = DraftVocab(torch.arange(50), 50)


def make(parts, **block) -> Eagle1Head:
    torch.manual_seed(1)
    head = Eagle1Head(Block(**block), parts, FULL)
    with torch.no_grad():  # far from the initial weights, so that every part matters; without norms they must not blow up
        for p in head.parameters():
            p.normal_(std=0.15)
    return head.eval()


@pytest.mark.parametrize("num_layers", [1, 2])
def test_layer_is_llamas_without_the_first_input_norm(parts, num_layers):
    """METHODS §2.1, B31: fc of embedding then feature, no first input norm, no final norm, residual from fc's output."""
    head, n = make(parts, num_layers=num_layers), 7
    tokens, feature = torch.randint(50, (n,)), torch.randn(n, 32)
    config = head.config
    config._attn_implementation = "eager"
    x = (torch.cat([parts.embed_tokens[tokens], feature], -1) @ head.fc.weight.T)[None]
    rope = LlamaRotaryEmbedding(config)(x, torch.arange(n)[None])
    causal = torch.full((n, n), -torch.inf).triu(1)[None, None]
    for number, layer in enumerate(head.layers):
        theirs = LlamaDecoderLayer(config, number)
        theirs.load_state_dict(layer.state_dict(), strict=False)
        if number == 0:
            theirs.input_layernorm = nn.Identity()
        x = theirs(x, attention_mask=causal, position_embeddings=rope)
    with torch.no_grad():
        ours = head.advance(head.fuse({LAST_HIDDEN: feature}), tokens, torch.arange(n), head.new_cache())
        torch.testing.assert_close(ours, x[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(head.logits(ours), x[0] @ parts.lm_head.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("num_layers", [1, 2])
def test_rollout_is_sequential_drafting(parts, num_layers):
    """METHODS §4, §16.8: HASS pass i + 1 equals drafting i tokens one by one from the prefix <= t with the answer's tokens."""
    head, lengths, passes = make(parts, num_layers=num_layers), [9, 1, 6], 4
    ids = torch.randint(50, (sum(lengths),))
    document = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
    positions = torch.cat([torch.arange(n) for n in lengths])
    mask, last_hidden = torch.rand(len(ids)) < 0.7, torch.randn(len(ids), 32)
    rows = [m.nonzero()[:, 0] for m in shift.rollout_rows([shift.label_weight(mask, document, i) for i in range(passes)])]
    tokens = [shift.draft_inputs(ids, i) for i in range(passes)]
    compared = 0
    with torch.no_grad():
        states = head.rollout(head.fuse({LAST_HIDDEN: last_hidden}), tokens, positions, document_starts(document), rows)
        for depth in range(passes):
            for place, t in enumerate(rows[depth].tolist()):
                start, cache = int((document == document[t]).nonzero()[0]), head.new_cache()
                prefix = slice(start, t + 1)
                state = head.advance(last_hidden[prefix], ids[start + 1 : t + 2], positions[prefix], cache)[-1:]
                for i in range(1, depth + 1):
                    state = head.advance(head.feedback(state), ids[t + 1 + i : t + 2 + i], positions[t : t + 1] + i, cache)
                torch.testing.assert_close(states[depth][place], state[0], rtol=1e-4, atol=1e-5)
                compared += 1
    assert compared > 20


def test_drafts_do_not_depend_on_how_entries_were_committed(parts):
    """METHODS §2.4: each round brings true states for what was accepted; what was drafted is forgotten."""
    head, ids, last_hidden = make(parts), torch.randint(50, (10,)), torch.randn(9, 32)
    greedy = lambda logits: logits.argmax(-1)  # noqa: E731
    cache = head.new_cache()
    head.propose({LAST_HIDDEN: last_hidden[:5]}, ids[1:6], torch.arange(5), cache, 4, greedy)
    assert cache.length == 5
    second = head.propose({LAST_HIDDEN: last_hidden[5:]}, ids[6:10], torch.arange(5, 9), cache, 4, greedy)
    assert torch.equal(second, head.propose({LAST_HIDDEN: last_hidden}, ids[1:10], torch.arange(9), head.new_cache(), 4, greedy))


def test_drafts_are_over_all_tokens(parts):
    """VLLM_FORMATS §1: vLLM does not honour draft_vocab_size here; a frequent part of the vocabulary is for training only."""
    head = Eagle1Head(Block(draft_vocab_size=30), parts, DraftVocab(torch.arange(30), 50))
    assert head.vocab.full and head.logits(torch.randn(1, 32)).shape == (1, 50) and len(head.trained_vocab.ids) == 30
    assert "draft_vocab_size" not in head.served_config()


@pytest.mark.parametrize("num_layers", [1, 2])
def test_served_layout_round_trip(parts, num_layers):
    """B24, B27, B31, E07, E09: names of VLLM_FORMATS §1, the draft's own layer count, the target's positions, nothing borrowed."""
    head = make(parts, num_layers=num_layers)
    tensors, config = {k: v.clone() for k, v in head.served_tensors().items()}, head.served_config()
    check_served(Eagle1Head.served_shapes(config), tensors, "export")
    names = {"fc.weight", "layers.0.post_attention_layernorm.weight"}
    names |= {f"layers.0.self_attn.{p}_proj.weight" for p in "qkvo"} | {f"layers.0.mlp.{p}_proj.weight" for p in ("gate", "up", "down")}
    assert {name for name in tensors if not name.startswith("layers.1.")} == names
    assert ("layers.1.input_layernorm.weight" in tensors) == (num_layers == 2)
    assert (config["num_hidden_layers"], config["max_position_embeddings"], config["head_dim"]) == (num_layers, 64, 8)
    assert config["architectures"] == ["LlamaForCausalLM"] and config["tie_word_embeddings"] is False
    other = Eagle1Head(head.block, parts, FULL)
    other.load_served(tensors)
    assert all(torch.equal(other.state_dict()[name], value) for name, value in head.state_dict().items())


def test_published_file_is_read(parts, tmp_path):
    """METHODS §14: pytorch_model.bin with the target's embedding, through weights_only; a bias of zeros is no bias."""
    head = make(parts)
    published = {name: value.half() for name, value in head.served_tensors().items()}
    published |= {"embed_tokens.weight": parts.embed_tokens.half(), "fc.bias": torch.zeros(32)}
    torch.save(published, tmp_path / "pytorch_model.bin")
    other = Eagle1Head(head.block, parts, FULL)
    other.load_served(read_tensors(tmp_path))
    for name, value in head.state_dict().items():
        assert torch.equal(other.state_dict()[name], value.half().float()), name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fc.bias": torch.full((32,), 0.1)}, r"fc\.bias of the draft is not zero.*vLLM has no such bias"),
        ({"embed_tokens.weight": torch.zeros(50, 32)}, r"embed_tokens\.weight .* is not the target's"),
        ({"lm_head.weight": torch.zeros(60, 32)}, r"lm_head\.weight of the draft \(60, 32\)"),
        ({"fc.weight": None}, r"(?s)does not fit.*missing fc\.weight \(32, 64\)"),
        ({"fc.weight": torch.zeros(32, 96)}, r"fc\.weight is \(32, 96\), this head needs \(32, 64\)"),
        ({"layers.1.mlp.up_proj.weight": torch.zeros(48, 32)}, r"unknown layers\.1\.mlp\.up_proj\.weight"),
        ({"layers.0.input_layernorm.weight": torch.ones(32)}, r"unknown layers\.0\.input_layernorm\.weight"),
    ],
)
def test_published_file_that_does_not_fit(parts, change, message):
    """VLLM_FORMATS §1: what the server would drop or leave out without a word is an error here."""
    head = make(parts)
    tensors = {name: value for name, value in (head.served_tensors() | change).items() if value is not None}
    with pytest.raises(ExportError, match=message):
        Eagle1Head(head.block, parts, FULL).load_served(tensors)


def test_own_rope(parts):
    """METHODS §15.16: a converted draft keeps the rotary embedding it was trained with."""
    head = make(parts, rope={"rope_type": "default", "rope_theta": 500.0})
    assert head.served_config()["rope_parameters"]["rope_theta"] == 500.0
    other = make(parts)
    assert other.served_config()["rope_parameters"]["rope_theta"] != 500.0
    ids, last_hidden = torch.randint(50, (8,)), torch.randn(8, 32)
    a, b = (h.advance(last_hidden, ids, torch.arange(8), h.new_cache()) for h in (head, other))
    assert torch.allclose(a[0], b[0], atol=1e-5) and not torch.allclose(a[-1], b[-1], atol=1e-3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"top_k": 5}, "objective.top_k=5 has no effect with objective.top_k_weight=0"),
        ({"feature_weight": 0.0, "logit_weight": 0.0}, "there is no loss"),
    ],
)
def test_contradictory_settings(settings, message):
    with pytest.raises(RecipeError, match=message):
        Settings(**settings)


def test_resolved_settings_can_be_read_back():
    """A resolved recipe holds every value: none may count as contradictory for being written down."""
    assert Settings.model_validate(json.loads(Settings().model_dump_json())) == Settings()
