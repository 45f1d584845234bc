"""Attention over packed documents equals dense attention; rotary and RMSNorm equal transformers' Llama."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from heads import layers
from heads.layers import ROWS, Linear, RMSNorm, Rotary, document_attention, document_starts, draft_llama_config, rotate, whole_rows


def dense(q, k, v, rows, document, dk, dv):
    """The same attention with an explicit [R, N + J] score matrix."""
    groups = q.shape[1] // k.shape[1]
    k, v, dk, dv = (t.repeat_interleave(groups, -2) for t in (k, v, dk, dv))
    scores = torch.einsum("rad,nad->arn", q, k) / q.shape[-1] ** 0.5
    index = torch.arange(len(k))
    visible = (index <= rows[:, None]) & (document == document[rows][:, None])
    scores = scores.masked_fill(~visible, -torch.inf)
    own = torch.einsum("rad,rjad->arj", q, dk) / q.shape[-1] ** 0.5
    p = torch.cat([scores, own], -1).softmax(-1)
    return torch.einsum("arn,nad->rad", p[..., : len(k)], v) + torch.einsum("arj,rjad->rad", p[..., len(k) :], dv)


@pytest.mark.parametrize("chunk", [3, 256])
@pytest.mark.parametrize("diagonals", [0, 2])
def test_document_attention_and_its_gradient(chunk, diagonals, monkeypatch):
    monkeypatch.setattr(layers, "ATTENTION_CHUNK_ROWS", chunk)
    torch.manual_seed(0)
    document = torch.tensor([0] * 7 + [1] * 1 + [2] * 9)
    rows = torch.tensor([2, 3, 6, 7, 8, 10, 11, 16])
    q = torch.randn(len(rows), 4, 8, dtype=torch.double, requires_grad=True)
    k, v = (torch.randn(17, 2, 8, dtype=torch.double, requires_grad=True) for _ in range(2))
    dk, dv = (torch.randn(len(rows), diagonals, 2, 8, dtype=torch.double, requires_grad=True) for _ in range(2))
    out = document_attention(q, k, v, rows, document_starts(document), dk, dv)
    expected = dense(q, k, v, rows, document, dk, dv)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    seed = torch.randn_like(out)
    got = torch.autograd.grad((out * seed).sum(), (q, k, v, dk, dv))
    want = torch.autograd.grad((expected * seed).sum(), (q, k, v, dk, dv))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("chunk", [3, 256])
def test_rows_of_one_token_with_unequal_diagonals(chunk, monkeypatch):
    """A token with several rows, each with the first few of its diagonal keys: as many calls, one a row, give the same."""
    monkeypatch.setattr(layers, "ATTENTION_CHUNK_ROWS", chunk)
    starts, rows, counts = (
        document_starts(torch.tensor([0] * 7 + [1] * 3)),
        torch.tensor([2, 2, 2, 5, 6, 6, 8]),
        torch.tensor([1, 2, 3, 0, 3, 1, 2]),
    )
    q = torch.randn(7, 4, 8, dtype=torch.double, requires_grad=True)
    k, v = (torch.randn(10, 2, 8, dtype=torch.double, requires_grad=True) for _ in range(2))
    dk, dv = (torch.randn(7, 3, 2, 8, dtype=torch.double, requires_grad=True) for _ in range(2))
    out = document_attention(q, k, v, rows, starts, dk, dv, counts)
    alone = [document_attention(q[[i]], k, v, rows[[i]], starts, dk[[i], :n], dv[[i], :n]) for i, n in enumerate(counts.tolist())]
    torch.testing.assert_close(out, torch.cat(alone), rtol=1e-10, atol=1e-10)
    seed = torch.randn_like(out)
    got = torch.autograd.grad((out * seed).sum(), (q, k, v, dk, dv))
    want = torch.autograd.grad((torch.cat(alone) * seed).sum(), (q, k, v, dk, dv))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_no_rows_is_no_work_and_zero_gradient():
    """B03: a batch without supervised rows still reaches every parameter."""
    k = torch.randn(5, 1, 8, requires_grad=True)
    q = torch.randn(0, 2, 8, requires_grad=True)
    document_attention(q, k, k, torch.zeros(0, dtype=torch.long), torch.zeros(5, dtype=torch.long)).sum().backward()
    assert k.grad is not None and not k.grad.any()


ROPES = {
    "default": {"rope_type": "default", "rope_theta": 1e5},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64},
}


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES.keys())
def test_rope_of_the_target_survives(rope):
    """METHODS §15.16: type, theta and scaling reach the draft, and rotation equals transformers'."""
    target = LlamaConfig(hidden_size=32, num_attention_heads=4, head_dim=16, max_position_embeddings=256, rope_parameters=rope)
    config = draft_llama_config(target, 1)
    assert {key: config.rope_parameters[key] for key in rope} == rope
    x, positions = torch.randn(9, 4, 16), torch.arange(100, 109)
    got = rotate(x, *Rotary(config)(x, positions))
    cos, sin = LlamaRotaryEmbedding(target)(x, positions[None])
    want, _ = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], cos, sin)
    torch.testing.assert_close(got, want[0].transpose(0, 1))


@pytest.mark.parametrize(
    "more", [{}, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}], ids=["default", "yarn"]
)
def test_a_partial_rotary_factor_turns_that_share_of_each_head(more):
    """METHODS §15.16: a family that turns a quarter of each head (GLM, StableLM), as vLLM does."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25} | more
    target = LlamaConfig(hidden_size=64, num_attention_heads=4, head_dim=16, max_position_embeddings=256, rope_parameters=rope)
    cos, _ = Rotary(draft_llama_config(target, 1))(torch.randn(9, 4, 16), torch.arange(9))
    assert cos.shape == (9, 4)
    if not more:
        angles = torch.arange(9)[:, None] / 1e4 ** (torch.arange(0, 4, 2) / 4)
        torch.testing.assert_close(cos, angles.cos().repeat(1, 2))


def test_partial_rotary_leaves_the_rest():
    x, angle = torch.randn(3, 2, 8), torch.rand(3, 2).repeat(1, 2) + 0.1
    turned = rotate(x, angle.cos(), angle.sin())
    assert torch.equal(turned[..., 4:], x[..., 4:]) and bool((turned[..., :4] != x[..., :4]).all())
    torch.testing.assert_close(turned[..., :4], rotate(x[..., :4], angle.cos(), angle.sin()))


def test_rms_norm_is_llamas():
    x, ours, theirs = torch.randn(5, 16), RMSNorm(16, 1e-5), LlamaRMSNorm(16, 1e-5)
    with torch.no_grad():
        ours.weight.uniform_()
        theirs.weight.copy_(ours.weight)
    torch.testing.assert_close(ours(x), theirs(x))


def test_draft_config_is_the_drafts_own():
    """B23 (untied), B24 (explicit head_dim), B27 (the target's positions), E09 (own layer count)."""
    target = LlamaConfig(
        hidden_size=40,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_hidden_layers=48,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    config = draft_llama_config(target, 1)
    assert (config.head_dim, config.num_hidden_layers, config.max_position_embeddings, config.tie_word_embeddings) == (16, 1, 4096, False)


def test_linear_of_whole_rows():
    """Padding to kernels of few shapes changes neither values nor gradients, and float32 products are not padded at all."""
    linear = Linear(8, 6)
    x = torch.randn(2 * ROWS - 5, 8, requires_grad=True)
    assert whole_rows(x) is x
    with torch.autocast("cpu", torch.bfloat16):
        assert whole_rows(x).shape == (2 * ROWS, 8) and not whole_rows(x)[len(x) :].any()
        got = linear(x)
        expected = torch.nn.functional.linear(x, linear.weight, linear.bias)
    assert got.dtype == torch.bfloat16 and torch.equal(got, expected)
    ours = torch.autograd.grad(got.float().square().sum(), [x, *linear.parameters()])
    plain = torch.autograd.grad(expected.float().square().sum(), [x, *linear.parameters()])
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2 * float(b.abs().max()))


def test_attention_under_autocast_is_in_float32_on_a_cpu():
    """bfloat16 in and out, the softmax and its products between are those of float32."""
    document = torch.tensor([0] * 7 + [1] * 5)
    starts, rows = document_starts(document), torch.tensor([2, 3, 6, 8, 11])
    q, k, v = (torch.randn(n, heads, 4).bfloat16() for n, heads in ((5, 4), (12, 2), (12, 2)))
    with torch.autocast("cpu", torch.bfloat16):
        got = document_attention(q, k, v, rows, starts)
    exact = document_attention(q.float(), k.float(), v.float(), rows, starts)
    assert got.dtype == torch.bfloat16 and torch.equal(got, exact.bfloat16())
