"""transformers' own language models over packed documents, without padding, and with chains of mask slots behind the tokens.

Any model whose attention goes through transformers' attention interface runs here as it is: its projections, norms and
rotary embedding are its own, only who sees whom is ours. Made with `attn_implementation=PACKED`, and called

    with `packed=Packed(document, …)`   entries are the N tokens of packed documents, then the slots of their chains
    without it                          entries are new ones of one request, causal behind what its cache holds

Entry table of one document of 4 tokens with chains of two slots behind its tokens 1 and 2, and a third behind token 1:

    entry      0  1  2  3 | 4    5    | 6
    token      x0 x1 x2 x3| MASK MASK | MASK
    behind                | 1    2    | 1
    position   0  1  2  3 | 2    3    | 3
    sees                  | x0 x1, 4  | x0 x1, 4 6
                               x0..x2, 5

Shapes: N tokens, T entries (tokens and slots), R_i slots of depth i, A/G query/key-value heads, d head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, PretrainedConfig

from heads.cache import cached_attention
from heads.layers import document_attention, document_starts
from recipes.errors import TargetError

PACKED = "headstart_packed"  # the name under which transformers knows this attention


class Packed:
    """Who sees whom: a token the tokens of its document up to itself, a slot those up to its own token and its chain up to itself."""

    def __init__(self, document: Tensor, chains: Sequence[Tensor] = ()):
        """
        Args:
            document: [N] document of each token, ascending. chains: int64 [R_i], i = 1 …: ascending tokens behind which a slot of
                depth i stands, each a subset of the one before, so that every slot has its whole chain.
        """
        self.starts = document_starts(document)
        self.tokens = torch.arange(len(document), device=document.device)
        begin, before = len(document), document.new_empty(0)
        behind, chain_of = [before], [torch.empty(0, len(chains), dtype=torch.long, device=document.device)]
        for depth, tokens in enumerate(chains):
            entries = torch.arange(begin, begin + len(tokens), device=document.device)
            # A slot's chain is that of the slot before it, and itself; places past its own depth hold itself and are not looked at.
            chain = entries[:, None].repeat(1, len(chains))
            if depth:
                chain[:, :depth] = chain_of[-1][torch.searchsorted(before, tokens), :depth]
            behind.append(tokens)
            chain_of.append(chain)
            begin, before = begin + len(tokens), tokens
        rows, chain = torch.cat(behind), torch.cat(chain_of)
        # All slots in one call, in the order of the tokens behind which they stand.
        order = rows.argsort(stable=True)
        depths = torch.repeat_interleave(torch.arange(1, len(chains) + 1), torch.tensor([len(t) for t in chains], dtype=torch.long))
        self.slots = order + len(document)  # entries
        self.behind, self.chain, self.depth = rows[order], chain[order], depths.to(order.device)[order]
        self.back = order.argsort()

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Queries [T, A, d] over keys and values [T, G, d] → [T, A, d]."""
        N = len(self.tokens)
        out = document_attention(q[:N], k[:N], v[:N], self.tokens, self.starts)
        if len(self.slots) == 0:
            return out
        # A look-up by F.embedding: its backward adds up rows much faster on a CPU than that of indexing.
        own_k, own_v = (F.embedding(self.chain, side.flatten(1)).unflatten(-1, side.shape[1:]) for side in (k, v))
        slots = document_attention(q[self.slots], k[:N], v[:N], self.behind, self.starts, own_k, own_v, self.depth)
        return torch.cat([out, slots[self.back]])


def packed_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, packed: Packed | None = None, **_: Any
) -> tuple[Tensor, None]:
    """transformers' attention interface: query [1, A, T, d], key and value [1, G, ·, d] → [1, T, A, d]."""
    q, k, v = (side[0].transpose(0, 1) for side in (query, key, value))
    out = cached_attention(q, k, v, None) if packed is None else packed.attend(q, k, v)
    return out[None], None


AttentionInterface.register(PACKED, packed_attention)


def check_packable(config: PretrainedConfig, name: str) -> None:
    """Raise TargetError where a model does more than full causal attention and a plain LM head, which is all that runs here."""
    types = set(getattr(config, "layer_types", None) or []) - {"full_attention"}
    windowed = getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)
    scales = ("attn_logit_softcapping", "final_logit_softcapping", "logit_scale", "logits_scaling")
    scaled = [key for key in scales if getattr(config, key, None) not in (None, 1.0)]
    if types or windowed or scaled:
        what = f"layers of type {', '.join(sorted(types))}" if types else "a sliding window" if windowed else ", ".join(scaled)
        raise TargetError(
            f"{name} ({config.model_type}) has {what}, and a draft model is trained with full causal attention and a plain LM head; "
            "take a draft of another family, or train a head that reads the target's features (eagle3)."
        )
