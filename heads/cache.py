"""The draft's own key/value cache while it drafts for one request."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


class DraftCache:
    """Keys and values [n, G, d] a layer. `crop` forgets what was drafted and not accepted."""

    def __init__(self, num_layers: int):
        self.keys: list[Tensor | None] = [None] * num_layers
        self.values: list[Tensor | None] = [None] * num_layers

    @property
    def length(self) -> int:
        return 0 if self.keys[0] is None else len(self.keys[0])

    def append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add [n, G, d] to a layer and return all of that layer."""
        old_key, old_value = self.keys[layer], self.values[layer]
        if old_key is not None and old_value is not None:
            key, value = torch.cat([old_key, key]), torch.cat([old_value, value])
        self.keys[layer], self.values[layer] = key, value
        return key, value

    def crop(self, length: int) -> None:
        """Keep the first `length` entries of every layer."""
        self.keys = [None if k is None else k[:length] for k in self.keys]
        self.values = [None if v is None else v[:length] for v in self.values]


def cached_attention(q: Tensor, key: Tensor, value: Tensor, visible: Tensor | None) -> Tensor:
    """Attention of n new queries [n, A, d] over a cache [m, G, d] that ends with their own keys → [n, A, d].

    `visible` [n, w] bool, w >= n, says which of the last w entries each query sees (a tree, grown in one call or level by level);
    None is causal. Entries before those are always seen.
    """
    n, m = len(q), len(key)
    if visible is None:
        visible = torch.ones(n, n, dtype=torch.bool, device=q.device).tril()
    mask = torch.cat([visible.new_ones(n, m - visible.shape[1]), visible], 1) if n > 1 or not bool(visible.all()) else None
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        key.transpose(0, 1)[None],
        value.transpose(0, 1)[None],
        attn_mask=mask,
        enable_gqa=q.shape[1] != key.shape[1],
    )
    return out[0].transpose(0, 1)
