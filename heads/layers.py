"""Building blocks that several heads share: RMSNorm, rotary embedding, SwiGLU, and attention over packed documents.

Draft heads are served by vLLM as Llama-shaped modules whatever the target's family is, so these are Llama's
conventions: RMSNorm multiplies by w, rotary embedding rotates halves, projections have no bias unless told.

Shapes: N packed tokens, R query rows (ascending indices into the N tokens), A query heads, G key/value heads,
d head size, J diagonal keys a row.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

ROWS = 128  # bfloat16 products on a CPU have a multiple of so many rows
ATTENTION_CHUNK_ROWS = 256  # query rows whose scores are held at once; bounds memory at A * 256 * document length


def draft_llama_config(target: PretrainedConfig, num_layers: int, **changes: Any) -> LlamaConfig:
    """The draft's own Llama config: dimensions, rope and positions of the target, the draft's own layer count (E09).

    `head_dim` is explicit (B24), embeddings untied (B23), `max_position_embeddings` the target's (B27).
    """
    heads = target.num_attention_heads
    fields: dict[str, Any] = {
        "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(target, "num_key_value_heads", None) or heads,
        "head_dim": getattr(target, "head_dim", None) or target.hidden_size // heads,
        "hidden_act": "silu",
        "max_position_embeddings": target.max_position_embeddings,
        "rms_norm_eps": getattr(target, "rms_norm_eps", 1e-6),
        "vocab_size": target.vocab_size,
        "rope_parameters": rope_parameters(target),
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": target.bos_token_id,
        "eos_token_id": target.eos_token_id,
    }
    return LlamaConfig(**(fields | changes))


def rope_parameters(target: PretrainedConfig) -> dict[str, Any]:
    """The target's rope settings as one flat dictionary (type, theta, scaling, partial factor).

    Families with a rope per layer type (Gemma 3) give the one of their full-attention layers, which spans the context.
    """
    rope = dict(getattr(target, "rope_parameters", None) or {})
    if "full_attention" in rope:
        rope = dict(rope["full_attention"])
    rope.setdefault("rope_type", "default")
    rope.setdefault("rope_theta", getattr(target, "rope_theta", None) or 10000.0)
    if (partial := getattr(target, "partial_rotary_factor", None)) is not None:
        rope.setdefault("partial_rotary_factor", partial)
    return rope


class RMSNorm(nn.Module):
    """x / rms(x) * w, statistics in float32."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.eps)


class Rotary(nn.Module):
    """Cosines and sines of positions; the rope types are transformers' own (default, llama3, yarn, …)."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        rope: dict[str, Any] = dict(config.rope_parameters or {})  # type: ignore[arg-type]
        if rope.get("rope_type", "default") == "default" and (share := rope.get("partial_rotary_factor", 1.0)) < 1:
            # transformers' default type turns whole heads whatever the factor says; its other types, and vLLM, obey it
            config = copy.copy(config)
            config.head_dim = int(config.head_dim * share)  # type: ignore[operator]  # always explicit here
        self.inner = LlamaRotaryEmbedding(config)

    def forward(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[N] positions → cos, sin, each [N, rotary size], in x's dtype."""
        cos, sin = self.inner(x, positions[None])
        return cos[0], sin[0]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first `cos.shape[-1]` channels of each head of x [N, heads, d]; the rest passes (partial rotary)."""
    size = cos.shape[-1]
    turned, rest = x[..., :size], x[..., size:]
    half = size // 2
    swapped = torch.cat([-turned[..., half:], turned[..., :half]], -1)
    turned = turned * cos[:, None] + swapped * sin[:, None]
    return torch.cat([turned, rest], -1) if rest.shape[-1] else turned


def whole_rows(x: Tensor) -> Tensor:
    """[n, …] with zero rows added up to a multiple of `ROWS`, for bfloat16 products on a CPU; anything else as it is.

    oneDNN compiles a kernel for each shape of such a product and keeps a thousand of them. Rows that carry a loss are a different
    number in every batch, so half of a training step would go into compiling.
    """
    bf16 = x.dtype == torch.bfloat16 or torch.is_autocast_enabled("cpu")
    if x.ndim == 2 and x.device.type == "cpu" and bf16 and (missing := -len(x) % ROWS):
        return F.pad(x, (0, 0, 0, missing))
    return x


class Linear(nn.Linear):
    """nn.Linear over `whole_rows`."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(whole_rows(input))[: len(input)]


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, size: int, intermediate: int):
        super().__init__()
        self.gate_proj = Linear(size, intermediate, bias=False)
        self.up_proj = Linear(size, intermediate, bias=False)
        self.down_proj = Linear(intermediate, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Attention(nn.Module):
    """Projections of grouped-query attention; who sees whom is decided by the caller."""

    def __init__(self, config: LlamaConfig, input_size: int):
        super().__init__()
        assert config.num_key_value_heads is not None and config.head_dim is not None, "draft_llama_config sets both"
        self.heads, self.kv_heads, self.head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        bias = config.attention_bias
        self.q_proj = Linear(input_size, self.heads * self.head_dim, bias=bias)
        self.k_proj = Linear(input_size, self.kv_heads * self.head_dim, bias=bias)
        self.v_proj = Linear(input_size, self.kv_heads * self.head_dim, bias=bias)
        self.o_proj = Linear(self.heads * self.head_dim, config.hidden_size, bias=False)

    def query(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[R, input] → rotated queries [R, A, d]."""
        return rotate(self.q_proj(x).unflatten(-1, (self.heads, self.head_dim)), cos, sin)

    def key_value(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """[N, input] → rotated keys and values, each [N, G, d]."""
        key = rotate(self.k_proj(x).unflatten(-1, (self.kv_heads, self.head_dim)), cos, sin)
        return key, self.v_proj(x).unflatten(-1, (self.kv_heads, self.head_dim))


def document_starts(document: Tensor) -> Tensor:
    """[N] index of the first token of each token's document (document ids are contiguous runs).

    >>> document_starts(torch.tensor([0, 0, 0, 1, 1])).tolist()
    [0, 0, 0, 3, 3]
    """
    index = torch.arange(len(document), device=document.device)
    first = torch.ones_like(document, dtype=torch.bool)
    first[1:] = document[1:] != document[:-1]
    return torch.where(first, index, 0).cummax(0).values


def document_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: Tensor,
    starts: Tensor,
    diagonal_k: Tensor | None = None,
    diagonal_v: Tensor | None = None,
    diagonal_count: Tensor | None = None,
) -> Tensor:
    """Causal attention inside packed documents, with optional extra keys that only one row sees.

    Row r is the query of token `rows[r]`, or B queries of it that see the same keys. It sees keys `starts[rows[r]] …
    rows[r]` and its own J diagonal keys, in one softmax. The cost of the diagonal is linear in J: no [R, J * N] matrix
    exists, and scores are formed in chunks of query rows and formed again in the backward pass, so memory stays linear in N.

    Args:
        q: [R, A, d] or [R, B, A, d]. k, v: [N, G, d], A a multiple of G. rows: [R] int64, ascending (a token may have several rows).
        starts: [N] from `document_starts`.
        diagonal_k, diagonal_v: [R, J, G, d], or None for plain causal attention. diagonal_count: [R] how many of its J diagonal
            keys, from the first on, a row sees; None: all.

    Returns:
        As q.
    """
    G, chunk_rows = k.shape[1], ATTENTION_CHUNK_ROWS
    if diagonal_k is None or diagonal_v is None:
        diagonal_k = diagonal_v = q.new_zeros(len(q), 0, G, k.shape[2])
    if block := q.ndim == 4:  # queries of a row are to the keys what further heads are
        B, chunk_rows = q.shape[1], max(1, chunk_rows // q.shape[1])
        q = q.unflatten(2, (G, -1)).transpose(1, 2).flatten(1, 3)
    hidden = None  # [R, J] diagonal keys that a row does not see
    if diagonal_count is not None:
        hidden = torch.arange(diagonal_k.shape[1], device=q.device) >= diagonal_count[:, None]
    spans = _spans(rows, starts, chunk_rows)
    out: Tensor = _DocumentAttention.apply(q, k, v, diagonal_k, diagonal_v, rows, spans, hidden)  # type: ignore[assignment]
    return out.unflatten(1, (G, B, -1)).transpose(1, 2).flatten(2, 3) if block else out


def _spans(rows: Tensor, starts: Tensor, chunk_rows: int) -> list[tuple[int, int, int, int]]:
    """Chunks of query rows of one document: (first row, end row, first key, end key)."""
    if len(rows) == 0:
        return []
    row_start = starts[rows]
    _, counts = torch.unique_consecutive(row_start, return_counts=True)
    spans, begin = [], 0
    row_list, start_list = rows.tolist(), row_start.tolist()
    for count in counts.tolist():
        for a in range(begin, begin + count, chunk_rows):
            b = min(a + chunk_rows, begin + count)
            spans.append((a, b, start_list[a], row_list[b - 1] + 1))
        begin += count
    return spans


class _DocumentAttention(torch.autograd.Function):
    """Flash-style: keeps only the output and the log-sum-exp of each row, and forms probabilities again in backward."""

    @staticmethod
    def forward(ctx, q, k, v, dk, dv, rows, spans, hidden):
        # On a CPU in float32: documents have all lengths, and oneDNN would compile a kernel for each (see `Linear`).
        given = q.dtype
        compute = torch.float32 if q.device.type == "cpu" and given == torch.bfloat16 else given
        q, k, v, dk, dv = (t.to(compute) for t in (q, k, v, dk, dv))
        q5 = q.unflatten(1, (k.shape[1], -1))  # [R, G, A/G, d]
        out = torch.empty_like(q5)
        lse = q.new_empty(q5.shape[:3], dtype=_wide(q))
        scale = q.shape[-1] ** -0.5
        with torch.autocast(q.device.type, enabled=False):
            for a, b, lo, hi in spans:
                scores, own = _scores(q5[a:b], k[lo:hi], dk[a:b], rows[a:b], lo, scale, None if hidden is None else hidden[a:b])
                peak = scores.amax(-1, keepdim=True)
                if own.shape[-1]:
                    peak = torch.maximum(peak, own.amax(-1, keepdim=True))
                p, p_own = scores.sub_(peak).exp_(), own.sub_(peak).exp_()
                total = p.sum(-1, keepdim=True) + p_own.sum(-1, keepdim=True)
                mixed = torch.einsum("garl,lgd->rgad", p.to(v.dtype), v[lo:hi])
                mixed = mixed + torch.einsum("garj,rjgd->rgad", p_own.to(v.dtype), dv[a:b])
                out[a:b] = mixed / total.permute(2, 0, 1, 3).to(mixed.dtype)
                lse[a:b] = (peak + total.log()).squeeze(-1).permute(2, 0, 1)
        ctx.save_for_backward(q5, k, v, dk, dv, rows, out, lse, hidden)
        ctx.spans, ctx.scale = spans, scale
        return out.flatten(1, 2).to(given)

    @staticmethod
    def backward(ctx, grad_out):  # type: ignore[override]
        q5, k, v, dk, dv, rows, out, lse, hidden = ctx.saved_tensors
        grad5 = grad_out.to(out.dtype).unflatten(1, q5.shape[1:3])
        g_q, g_k, g_v = torch.zeros_like(q5), torch.zeros_like(k), torch.zeros_like(v)
        g_dk, g_dv = torch.zeros_like(dk), torch.zeros_like(dv)
        delta = (grad5 * out).sum(-1).to(_wide(out))  # [R, G, A/G]
        for a, b, lo, hi in ctx.spans:
            scores, own = _scores(q5[a:b], k[lo:hi], dk[a:b], rows[a:b], lo, ctx.scale, None if hidden is None else hidden[a:b])
            level, d = (t[a:b].permute(1, 2, 0).unsqueeze(-1) for t in (lse, delta))
            p, p_own = scores.sub_(level).exp_(), own.sub_(level).exp_()
            go = grad5[a:b]
            g_v[lo:hi] += torch.einsum("garl,rgad->lgd", p.to(v.dtype), go)
            g_dv[a:b] = torch.einsum("garj,rgad->rjgd", p_own.to(v.dtype), go)
            ds = p.mul_(torch.einsum("rgad,lgd->garl", go, v[lo:hi]).sub_(d)).mul_(ctx.scale).to(k.dtype)
            ds_own = p_own.mul_(torch.einsum("rgad,rjgd->garj", go, dv[a:b]).sub_(d)).mul_(ctx.scale).to(k.dtype)
            g_q[a:b] = torch.einsum("garl,lgd->rgad", ds, k[lo:hi]) + torch.einsum("garj,rjgd->rgad", ds_own, dk[a:b])
            g_k[lo:hi] += torch.einsum("garl,rgad->lgd", ds, q5[a:b])
            g_dk[a:b] = torch.einsum("garj,rgad->rjgd", ds_own, q5[a:b])
        return g_q.flatten(1, 2), g_k, g_v, g_dk, g_dv, None, None, None


def _scores(q: Tensor, k: Tensor, dk: Tensor, rows: Tensor, lo: int, scale: float, hidden: Tensor | None) -> tuple[Tensor, Tensor]:
    """Scaled scores of a chunk, in float32 at least: [G, A/G, r, L] over the document's keys (future ones -inf) and
    [G, A/G, r, J] over its own (`hidden` ones -inf)."""
    scores = torch.einsum("rgad,lgd->garl", q, k).to(_wide(q)).mul_(scale)
    first = int(rows[0]) - lo + 1  # keys up to the first row are seen by every row of the chunk
    future = torch.arange(first, len(k), device=rows.device) + lo > rows[:, None]
    scores[..., first:].masked_fill_(future, -torch.inf)
    own = torch.einsum("rgad,rjgd->garj", q, dk).to(_wide(q)).mul_(scale)
    if hidden is not None:
        own.masked_fill_(hidden, -torch.inf)
    return scores, own


def _wide(x: Tensor) -> torch.dtype:
    """Softmax statistics are kept in float32 at least."""
    return torch.promote_types(x.dtype, torch.float32)
