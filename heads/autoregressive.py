"""What heads share that draft token by token through decoder layers of their own (EAGLE-1, EAGLE-3, MTP; P-EAGLE in training).

A state is what the last layer puts out at one (index, depth). Depth 0 eats the target's feature of index t and the token
x[t+1]; depth i eats the fed-back state of depth i - 1 and x[t+1+i], at position t + i. At depth i the query of index t
sees the depth-0 keys at indices <= t and its own keys of depths 1..i: what a server's draft cache holds after i drafted
tokens. `rollout` computes that for all indices of packed documents at once (training), `advance` for one request
(serving); tests hold one against the other.

Shapes: N packed tokens, R rows computed at a depth, n entries of one request, H hidden size, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from heads.cache import DraftCache, cached_attention
from heads.layers import Attention, RMSNorm, Rotary, SwiGLU, document_attention
from heads.target import TargetParts
from heads.vocab import DraftVocab
from recipes.head_blocks import HeadBlock

Choose = Callable[[Tensor], Tensor]  # draft logits [n, D] → draft ids [n]


class DraftLayer(nn.Module):
    """What all drafts have of a Llama decoder layer; a subclass says what enters attention and what the residual is."""

    def __init__(self, config: LlamaConfig, input_size: int):
        super().__init__()
        self.self_attn = Attention(config, input_size)
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def enter(self, embedding: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """[n, H] embedding and layer input → attention input and residual [n, H]."""
        raise NotImplementedError

    def leave(self, residual: Tensor, attended: Tensor) -> Tensor:
        """Residual [n, H] and attention output [n, A, d] → the layer's output [n, H]."""
        x = residual + self.self_attn.o_proj(attended.flatten(1))
        return x + self.mlp(self.post_attention_layernorm(x))


class AutoregressiveHead(nn.Module):
    """Base of a head that drafts token by token. `embed_tokens` is borrowed from the target, frozen, and in no checkpoint or export."""

    embed_tokens: Tensor  # [V, H]
    draft_ids: Tensor  # int64 [D], target ids

    def __init__(self, block: HeadBlock, target: TargetParts, vocab: DraftVocab, config: LlamaConfig, layers: list[DraftLayer]):
        super().__init__()
        self.block, self.vocab, self.config = block, vocab, config
        self.layers = nn.ModuleList(layers)
        self.rotary = Rotary(config)
        self.register_buffer("embed_tokens", target.embed_tokens, persistent=False)
        self.register_buffer("draft_ids", vocab.ids.to(target.embed_tokens.device), persistent=False)

    # ---- what a head defines ----------------------------------------------------------------------------------

    def fuse(self, hidden: dict[int, Tensor]) -> Tensor:
        """The target's states {layer: [n, H]} → features [n, H] that depth 0 eats."""
        raise NotImplementedError

    def combine(self, embedding: Tensor, feature: Tensor) -> Tensor:
        """Embedding and feature (or fed-back state), [n, H] each → input of the first layer [n, H]."""
        return feature

    def feedback(self, state: Tensor) -> Tensor:
        """State [n, H] → what the next depth eats in place of a feature."""
        return state

    def logits(self, state: Tensor) -> Tensor:
        """States [n, H] → draft logits [n, D]."""
        raise NotImplementedError

    # ---- shared -----------------------------------------------------------------------------------------------

    @property
    def stack(self) -> list[DraftLayer]:
        """The layers, typed."""
        return list(self.layers)  # type: ignore[arg-type]

    @property
    def dtype(self) -> torch.dtype:
        """Of the trained weights."""
        return self.stack[0].self_attn.o_proj.weight.dtype

    def embed(self, ids: Tensor) -> Tensor:
        """Target ids [n] → the target's embeddings [n, H]."""
        return self.embed_tokens[ids].to(self.dtype)

    @torch.no_grad()
    def reset_projections(self) -> None:
        """Draw all projections as Llama's are drawn."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=self.config.initializer_range)

    def rollout(self, feature: Tensor, tokens: list[Tensor], positions: Tensor, starts: Tensor, rows: list[Tensor]) -> list[Tensor]:
        """States of every depth: depth i at its `rows[i]` only.

        Args:
            feature: [N, H] fused features. tokens: [N] eaten at each depth. positions: [N] inside the document.
            starts: [N] first index of each document. rows: [R_i] ascending indices wanted at depth i, each a subset
                of the one before.

        Returns:
            [R_i, H] states, one a depth.
        """
        first_kv: list[tuple[Tensor, Tensor]] = []  # a layer: depth-0 keys and values [N, G, d]
        later_kv: list[list[tuple[Tensor, Tensor]]] = [[] for _ in self.stack]  # a layer, a depth >= 1: [R_i, G, d] at the rows
        states: list[Tensor] = []
        for depth, row in enumerate(rows):
            # Depth 0 needs keys and values at every index; later depths live on their rows alone.
            index = torch.arange(len(feature), device=row.device) if depth == 0 else row
            x = feature if depth == 0 else self.feedback(states[-1])[_position_in(rows[depth - 1], row)]
            embedding = self.embed(tokens[depth][index])
            x = self.combine(embedding, x)
            cos, sin = self.rotary(x, positions[index] + depth)
            for number, layer in enumerate(self.stack):
                entered, residual = layer.enter(embedding, x)
                key, value = layer.self_attn.key_value(entered, cos, sin)
                last = number == len(self.layers) - 1
                # Past its keys and values the last layer is needed only where a loss (or a later depth) reads it.
                ask = _position_in(index, row) if depth == 0 and last else slice(None)
                query_rows = row if last else index
                query = layer.self_attn.query(entered[ask], cos[ask], sin[ask])
                if depth == 0:
                    first_kv.append((key, value))
                    attended = document_attention(query, key, value, query_rows, starts)
                else:
                    kept = _position_in(rows[depth - 1], row)
                    later_kv[number] = [(k[kept], v[kept]) for k, v in later_kv[number]]
                    later_kv[number].append((key, value))
                    diagonal_k, diagonal_v = (torch.stack(side, 1) for side in zip(*later_kv[number], strict=True))
                    attended = document_attention(query, *first_kv[number], row, starts, diagonal_k, diagonal_v)
                x = layer.leave(residual[ask], attended)
            states.append(x)
        return states

    def new_cache(self) -> DraftCache:
        """An empty draft cache for one request."""
        return DraftCache(len(self.layers))

    def advance(self, feature: Tensor, tokens: Tensor, positions: Tensor, cache: DraftCache, visible: Tensor | None = None) -> Tensor:
        """Run n new entries through the draft and add them to its cache.

        Args:
            feature: [n, H] fused features, or fed-back states. tokens: [n] eaten. positions: [n].
            visible: [n, w] bool, w >= n, which of the last w entries each new one sees (a tree); None is causal.

        Returns:
            [n, H] states.
        """
        embedding = self.embed(tokens)
        x = self.combine(embedding, feature)
        cos, sin = self.rotary(x, positions)
        for number, layer in enumerate(self.stack):
            entered, residual = layer.enter(embedding, x)
            key, value = cache.append(number, *layer.self_attn.key_value(entered, cos, sin))
            query = layer.self_attn.query(entered, cos, sin)
            x = layer.leave(residual, cached_attention(query, key, value, visible))
        return x

    @torch.no_grad()
    def propose(self, hidden: dict[int, Tensor], tokens: Tensor, positions: Tensor, cache: DraftCache, k: int, choose: Choose) -> Tensor:
        """Draft a chain of k tokens after committed ones.

        The draft cache is first extended with the n entries committed since the last round, each with the target's
        true feature, then k tokens are drafted and their entries dropped again.

        Args:
            hidden: {layer: [n, H]} the target's states at the n committed positions. tokens: [n], x[t+1] for each of
                them (the last is the newest token, which the target has not processed yet). positions: [n].
            choose: draft logits [1, D] → draft id [1]: argmax, or a sampler that remembers its distribution.

        Returns:
            [k] target ids.
        """
        state = self.advance(self.fuse(hidden), tokens, positions, cache)[-1:]
        committed, position, drafted = cache.length, positions[-1:], []
        for depth in range(k):
            drafted.append(self.draft_ids[choose(self.logits(state))])
            if depth + 1 < k:
                state = self.advance(self.feedback(state), drafted[-1], position + 1 + depth, cache)
        cache.crop(committed)
        return torch.cat(drafted)


def _position_in(rows: Tensor, subset: Tensor) -> Tensor:
    """Where each index of `subset` stands in `rows`; both ascending, `subset` within `rows`.

    >>> _position_in(torch.tensor([2, 5, 9]), torch.tensor([5, 9])).tolist()
    [1, 2]
    """
    return torch.searchsorted(rows, subset)
