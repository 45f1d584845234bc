"""Extraction: the right layers, whatever the batch; no pads; states that reproduce the target's own predictions."""

import copy
from contextlib import nullcontext
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)

from data_prep.extract import extract_rows, online_features, plan_batches, plan_shards, probe_row, state_buffers, tapped
from recipes.errors import FeatureError, TargetError


def test_the_copies_of_the_models_own_gpu_are_awaited(monkeypatch):
    """Rank 1 reads ahead in a thread whose current device is cuda:0: what is waited for must not depend on it."""
    waited = []
    model = SimpleNamespace(device=torch.device("cuda:1"), dtype=torch.float32, config=LlamaConfig())
    monkeypatch.setattr("torch.cuda.synchronize", lambda device=None: waited.append(device))
    monkeypatch.setattr("data_prep.extract.tapped", lambda *args: nullcontext())
    monkeypatch.setattr("data_prep.extract.forward_batch", lambda model, rows, sink: sink(None, torch.ones(1, 3, 2)))
    buffers: dict[int | None, torch.Tensor] = {None: torch.zeros(3, 2)}
    extract_rows(cast(PreTrainedModel, model), [torch.arange(3)], buffers, batch_tokens=8)
    assert waited == [torch.device("cuda:1")] and (buffers[None] == 1).all()


TINY = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}


def tiny(num_layers: int = 4, config: type[PretrainedConfig] = LlamaConfig, **extra):
    return AutoModelForCausalLM.from_config(config(num_hidden_layers=num_layers, **(TINY | extra))).eval()


def random_rows(*lengths: int) -> list[torch.Tensor]:
    return [torch.randint(3, 97, (n,)) for n in lengths]


def features(model, rows, layers, batch_tokens=10_000, codec=torch.float32):
    """Layer (None: last_hidden) → one [n, H] per row."""
    buffers = state_buffers(sum(map(len, rows)), model, layers, codec, "cpu")
    extract_rows(model, rows, buffers, batch_tokens)
    return {layer: buffer.split([len(row) for row in rows]) for layer, buffer in buffers.items()}


# ---------------------------------------------------------------------------------------------------------------- layers


@pytest.mark.parametrize("num_layers", [2, 4, 5])
@torch.no_grad()
def test_layer_is_the_stream_after_that_many_blocks(num_layers):
    """B17: every layer 0..L equals running the first i blocks by hand; L is before the final norm, last_hidden after it (B18)."""
    model = tiny(num_layers)
    row = random_rows(23)[0]
    got = features(model, [row], list(range(num_layers + 1)))
    decoder = model.model
    stream = decoder.embed_tokens(row[None])
    positions = torch.arange(len(row))[None]
    rope = decoder.rotary_emb(stream, position_ids=positions)
    for i in range(num_layers + 1):
        torch.testing.assert_close(got[i][0], stream[0])
        if i < num_layers:
            stream = decoder.layers[i](stream, attention_mask=None, position_embeddings=rope, position_ids=positions)
    torch.testing.assert_close(got[None][0], decoder.norm(stream)[0])


@pytest.mark.parametrize(
    ("config", "extra"),
    [
        (LlamaConfig, {}),
        (Qwen3Config, {}),
        (MistralConfig, {"sliding_window": 8}),
        (Gemma2Config, {"sliding_window": 8, "query_pre_attn_scalar": 16}),
        (Gemma3TextConfig, {"sliding_window": 8, "query_pre_attn_scalar": 16}),
    ],
)
@torch.no_grad()
def test_families_agree_with_their_own_hidden_states(config, extra):
    """B17: layer i is `hidden_states[i]` for i < L, and last_hidden its last entry; Gemma's scaled embedding and sliding windows too."""
    model = tiny(4, config, **extra)
    rows = random_rows(9, 30, 17)
    got = features(model, rows, [0, 1, 2, 3])
    for i, row in enumerate(rows):
        states = model(row[None], output_hidden_states=True, use_cache=False).hidden_states
        for layer in range(4):
            torch.testing.assert_close(got[layer][i], states[layer][0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(got[None][i], states[4][0], rtol=1e-4, atol=1e-4)


def test_hooks_are_gone_afterwards():
    """B16: a later forward pass of the same model hands nothing to an earlier extraction, even one that failed."""
    model, seen = tiny(), []
    with pytest.raises(RuntimeError), tapped(model, [1, 4], lambda layer, states: seen.append(layer)):
        model(torch.tensor([[5, 6]]))
        raise RuntimeError
    assert sorted(seen) == [1, 4]
    model(torch.tensor([[5, 6]]))
    assert len(seen) == 2


def test_a_model_without_blocks_is_refused():
    model = tiny()
    model.model.layers = torch.nn.ModuleDict({str(i): block for i, block in enumerate(model.model.layers)})
    with pytest.raises(TargetError, match="list of blocks"), tapped(model, [1], lambda layer, states: None):
        pass


# --------------------------------------------------------------------------------------------------------------- batches


def test_batch_equals_single_rows_and_repeated_calls():
    """B16: two prompts sharing a 64-token prefix, and others, in one batch, again, and each alone: the same states."""
    model = tiny()
    prefix = torch.randint(3, 97, (64,))
    rows = [torch.cat([prefix, tail]) for tail in random_rows(5, 20)] + random_rows(1, 40)
    batched, again = features(model, rows, [1, 4]), features(model, rows, [1, 4])
    for i, row in enumerate(rows):
        alone = features(model, [row], [1, 4])
        for layer in (None, 1, 4):
            assert torch.equal(batched[layer][i], again[layer][i])
            assert len(batched[layer][i]) == len(row)
            torch.testing.assert_close(batched[layer][i], alone[layer][0], rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
def test_no_pad_is_stored(side):
    """B16: our rows, padded on the right without a mask, equal the target's own masked batch, padded on either side."""
    model = tiny()
    rows = random_rows(7, 25, 13)
    got = features(model, rows, [2])
    width = max(map(len, rows))
    ids, mask = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width, dtype=torch.long)
    places = [slice(width - len(row), width) if side == "left" else slice(0, len(row)) for row in rows]
    for i, (row, place) in enumerate(zip(rows, places, strict=True)):
        ids[i, place], mask[i, place] = row, 1
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    states = model(ids, attention_mask=mask, position_ids=positions, output_hidden_states=True, use_cache=False).hidden_states
    for i, place in enumerate(places):
        torch.testing.assert_close(got[2][i], states[2][i, place], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(got[None][i], states[-1][i, place], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rope_that_depends_on_the_batch_gets_equal_lengths(kind):
    """B16: where rotary frequencies follow the longest row, a short row keeps the states that it has alone."""
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 8, "long_factor": [3.0] * 8, "original_max_position_embeddings": 16}
    model = tiny(max_position_embeddings=16 if kind == "dynamic" else 128, rope_parameters=rope)
    fresh = copy.deepcopy(model)
    rows = random_rows(10, 60, 10, 40)
    batched = features(model, rows, [2])
    for row, states in zip(rows, batched[2], strict=True):  # 40 too, which a model that has just seen 60 would rotate like those
        torch.testing.assert_close(states, features(copy.deepcopy(fresh), [row], [2])[2][0], rtol=1e-4, atol=1e-5)


@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=40), limit=st.integers(1, 120), equal=st.booleans())
def test_plans_hold_every_row_once(lengths, limit, equal):
    batches = plan_batches(lengths, limit, equal)
    assert sorted(row for batch in batches for row in batch) == list(range(len(lengths)))
    for batch in batches:
        widths = [lengths[row] for row in batch]
        assert widths == sorted(widths, reverse=True)
        assert len(batch) == 1 or len(batch) * widths[0] <= limit
        assert min(widths) >= (1 if equal else 7 / 8) * widths[0]
    shards = plan_shards(lengths, limit)
    assert [row for first, n in shards for row in range(first, first + n)] == list(range(len(lengths)))
    assert all(n == 1 or sum(lengths[first : first + n]) <= limit for first, n in shards)


# ---------------------------------------------------------------------------------------------------------------- states


@torch.no_grad()
def test_last_hidden_reproduces_the_targets_predictions():
    """B18: lm_head(last_hidden) gives the target's own argmax; without the norm, or with it twice, it does not."""
    model = tiny()
    rows = random_rows(60, 40, 50)
    got = features(model, rows, [4])
    own = torch.cat([model(row[None]).logits[0].argmax(-1) for row in rows])

    def agreement(states: torch.Tensor) -> float:
        return (model.lm_head(states).argmax(-1) == own).float().mean().item()

    with_scaled_norm = copy.deepcopy(model.model.norm)
    assert agreement(torch.cat(got[None])) >= 0.999
    model.model.norm.weight.uniform_(0.1, 3.0)  # a trained norm is no constant: now pre-norm and twice-normed states show
    got = features(model, rows, [4])
    own = torch.cat([model(row[None]).logits[0].argmax(-1) for row in rows])
    assert agreement(torch.cat(got[None])) >= 0.999
    assert agreement(torch.cat(got[4])) < 0.9
    assert agreement(model.model.norm(torch.cat(got[None]))) < 0.9
    assert agreement(with_scaled_norm(torch.cat(got[4]))) < 0.9


def test_codec_rounds_layers_but_not_last_hidden():
    model = tiny()
    rows = random_rows(11, 8)
    exact, rounded = features(model, rows, [1]), features(model, rows, [1], codec=torch.bfloat16)
    assert rounded[1][0].dtype == torch.bfloat16
    assert torch.equal(rounded[1][0], exact[1][0].bfloat16())
    assert torch.equal(rounded[None][0], exact[None][0])


def test_states_that_are_not_finite_name_the_row():
    model = tiny()
    rows = random_rows(8, 12)
    rows[1][5] = 96
    model.model.embed_tokens.weight.data[96] = torch.inf
    buffers = state_buffers(20, model, [1], torch.float32, "cpu")
    with pytest.raises(FeatureError, match=r"of row 101.*target\.dtype"):
        extract_rows(model, rows, buffers, 1000, first_row=100)


def test_online_features_are_what_is_stored():
    model = tiny()
    rows = random_rows(14, 3, 9)
    masks = [torch.ones(len(row), dtype=torch.bool) for row in rows]
    stored = features(model, rows, [1, 3], batch_tokens=30)
    for i, online in enumerate(online_features(model, rows, masks, [1, 3], batch_tokens=30)):
        assert torch.equal(online.input_ids, rows[i]) and torch.equal(online.loss_mask, masks[i])
        assert torch.equal(online.last_hidden, stored[None][i])
        assert all(torch.equal(online.hidden[layer], stored[layer][i]) for layer in (1, 3))
        assert not online.last_hidden.requires_grad


@torch.no_grad()
def test_probe_is_the_targets_own_forward(monkeypatch):
    """B18: argmax, max logit and logsumexp at every position, also of a row longer than the logits held at once; soft-cap included."""
    monkeypatch.setattr("data_prep.extract.PROBE_LOGITS", 16)
    model = tiny(4, Gemma2Config, final_logit_softcapping=5.0)
    row = random_rows(41)[0]
    probe = probe_row(model, row)
    logits = model(row[None]).logits[0]
    assert logits.abs().max() <= 5.0
    assert torch.equal(probe["argmax"], logits.argmax(-1))
    torch.testing.assert_close(probe["max_logit"], logits.max(-1).values)
    torch.testing.assert_close(probe["logsumexp"], logits.logsumexp(-1))


def test_logits_are_not_computed():
    """Extraction costs no LM head."""
    model = tiny()
    assert isinstance(model, LlamaForCausalLM)
    model.lm_head.register_forward_hook(lambda *args: pytest.fail("the LM head ran"))
    features(model, random_rows(5, 6), [1])
