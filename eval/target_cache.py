"""The target's real KV cache for a batch of requests of different lengths, with the roll-back that speculation needs.

Slot j of row i holds the token at position j of request i. A forward pass appends its tree behind the longest row; `keep` then
moves the accepted path to the row's own end and drops the rest, so that the cache is again what a prefill of the committed tokens
would have left (METHODS §1.5, §10.4).

    before     row 0   p p p p p p . . .        S slots, rows end at their own length
               row 1   p p p . . . . . .
    forward    row 0   p p p p p p r a b c      r root (last committed token), a..c drafts
               row 1   p p p . . . r a b c
    keep       row 0   p p p p p p r a          row 0 accepted a
               row 1   p p p r a c . .          row 1 accepted a, then c

Shapes: B requests in flight, n nodes of the largest tree, S slots, V vocabulary, H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from eval.trees import Tree
from heads import LAST_HIDDEN
from heads.target import Sink, needs_equal_lengths, reset_rope, rope_kinds, tapped
from recipes.errors import TargetError

ROLLED_BACK = {"full_attention", "sliding_attention"}  # layer types whose entries can be dropped one by one


class States(NamedTuple):
    """What one target forward gives: logits [B, n, V] (n = 1 for a prefill: the last token's), hidden {layer: [B, n, H]}."""

    logits: Tensor
    hidden: dict[int, Tensor]


def check_rollback(model: PreTrainedModel) -> None:
    """Raise TargetError for a target whose state cannot be rolled back by dropping cache entries, or that takes no tree mask."""
    config = model.config.get_text_config()
    if other := set(getattr(config, "layer_types", None) or []) - ROLLED_BACK:
        raise TargetError(
            f"{type(model).__name__} has layers of type {', '.join(sorted(other))}, whose state cannot be rolled back token by token; "
            "measure this target with eval.engine=vllm."
        )
    if config._attn_implementation not in ("sdpa", "eager"):
        raise TargetError(
            f"target.attn={config._attn_implementation!r} takes no tree mask; use target.attn=sdpa (or eager) with eval.engine=reference."
        )


def _stacked(states: list[States]) -> States:
    """States of several prefills as those of one, padded on the right."""
    hidden = {}
    for layer in states[0].hidden:
        parts = [one.hidden[layer] for one in states]
        longest = max(part.shape[1] for part in parts)
        hidden[layer] = torch.cat([F.pad(part, (0, 0, 0, longest - part.shape[1])) for part in parts])
    return States(torch.cat([one.logits for one in states]), hidden)


class TargetCache:
    """Prefill, forward over trees, keep the accepted paths; requests join and leave between rounds.

    Args:
        layers: which states a forward pass hands out: layer i as in DESIGN §4, LAST_HIDDEN for the post-norm state.
    """

    def __init__(self, model: PreTrainedModel, layers: Sequence[int] = ()):
        check_rollback(model)
        self.model, self.layers = model, list(layers)
        # Without a config every layer keeps all its entries, sliding ones too: an entry that a window has left may come back
        # when the round is rolled back. The masks keep the windows.
        self.cache = DynamicCache()
        self.lengths: list[int] = []  # tokens of each request in the cache

    @property
    def slots(self) -> int:
        """S: slots of every row."""
        return self.cache.get_seq_length()

    # ---- requests come and go ------------------------------------------------------------------------------------------------

    def prefill(self, prompts: Sequence[Sequence[int]]) -> States:
        """Process whole prompts (of any lengths, at least one token each) and add them as new rows.

        Returns:
            logits [B, 1, V] after each prompt's last token; hidden {layer: [B, T, H]} padded on the right to the longest, T.
        """
        if needs_equal_lengths(self.model) and len({len(prompt) for prompt in prompts}) > 1:
            return _stacked([self._prefill([prompt]) for prompt in prompts])
        return self._prefill(prompts)

    def _prefill(self, prompts: Sequence[Sequence[int]]) -> States:
        """Prompts in one forward pass."""
        lengths = [len(prompt) for prompt in prompts]
        ids = torch.zeros(len(prompts), max(lengths), dtype=torch.long)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = torch.tensor(prompt)
        # Padded on the right without a mask: a causal model never looks right, so no token sees a pad. The pads' entries are
        # hidden by the masks of later rounds and overwritten.
        last = sorted(set(lengths))
        new = DynamicCache()
        reset_rope(self.model)
        with self._capture() as hidden:
            logits = self.model(
                input_ids=ids.to(self.model.device),
                past_key_values=new,
                use_cache=True,
                logits_to_keep=torch.tensor(last, device=self.model.device) - 1,
            ).logits
        self._join(new)
        self.lengths += lengths
        where = torch.tensor([last.index(length) for length in lengths], device=logits.device)
        return States(logits[torch.arange(len(prompts), device=logits.device), where][:, None], hidden)

    def _join(self, new: DynamicCache) -> None:
        """Add another cache's rows below these, both padded to the longer."""
        if not self.lengths:
            self.cache = new
            return
        slots = max(self.slots, new.get_seq_length())
        for mine, theirs in zip(self.cache.layers, new.layers, strict=True):
            for name in ("keys", "values"):
                pair = [getattr(layer, name) for layer in (mine, theirs)]
                setattr(mine, name, torch.cat([F.pad(x, (0, 0, 0, slots - x.shape[2])) for x in pair]))

    def select(self, rows: Sequence[int]) -> None:
        """Keep these requests only, in this order."""
        if list(rows) == list(range(len(self.lengths))):
            return
        self.lengths = [self.lengths[row] for row in rows]
        if not rows:
            self.cache = DynamicCache()
            return
        self.cache.batch_select_indices(torch.tensor(rows, device=self.model.device))
        self._crop()

    # ---- a round -------------------------------------------------------------------------------------------------------------

    def forward(self, trees: Sequence[Tree]) -> States:
        """One target forward over every request's tree, root first; smaller trees are padded. Their entries wait for `keep`."""
        self._check_rope(trees)
        n, slots, device = max(tree.num_nodes for tree in trees), self.slots, self.model.device
        ids = torch.zeros(len(trees), n, dtype=torch.long)
        positions = torch.zeros(len(trees), n, dtype=torch.long)
        among = torch.eye(n, dtype=torch.bool).repeat(len(trees), 1, 1)  # a padding node sees itself: a row of nothing would be NaN
        for row, tree in enumerate(trees):
            m = tree.num_nodes
            ids[row, :m], positions[row, :m], among[row, :m, :m] = tree.tokens, tree.positions(self.lengths[row]), tree.mask
        mask = None
        # One token behind rows of equal length sees everything: no mask keeps attention on its fast path.
        if n > 1 or any(length != slots for length in self.lengths) or self._sliding():
            mask = self._mask(among.to(device), positions.to(device), slots)
        with self._capture() as hidden:
            logits = self.model(
                input_ids=ids.to(device),
                position_ids=positions.to(device),
                attention_mask=mask,
                past_key_values=self.cache,
                use_cache=True,
            ).logits
        return States(logits, hidden)

    def keep(self, paths: Sequence[Sequence[int]]) -> None:
        """After `forward`: keep each tree's root and the nodes of its path (in order), drop all others.

        Args:
            paths: one a request, node numbers as in `Verdict.path`: accepted nodes from depth 1 down.
        """
        first = max(self.lengths)  # slot of the roots
        rows, source, target = [], [], []
        for row, (length, path) in enumerate(zip(self.lengths, paths, strict=True)):
            for i, node in enumerate((0, *path)):
                if first + node != length + i:  # already where it belongs: the longest row's chains
                    rows.append(row)
                    source.append(first + node)
                    target.append(length + i)
        if rows:
            index = [torch.tensor(x, device=self.model.device) for x in (rows, source, target)]
            for layer in cast(list[DynamicLayer], self.cache.layers):
                for states in cast(
                    tuple[Tensor, Tensor], (layer.keys, layer.values)
                ):  # [B, G, S, d]; the right side is a copy, so overlaps are safe
                    states[index[0], :, index[2]] = states[index[0], :, index[1]]
        self.lengths = [length + 1 + len(path) for length, path in zip(self.lengths, paths, strict=True)]
        self._crop()

    # ---- pieces --------------------------------------------------------------------------------------------------------------

    def _check_rope(self, trees: Sequence[Tree]) -> None:
        """Raise TargetError where the longest of several rows would set the rotary frequencies of the others."""
        if len(trees) == 1 or not needs_equal_lengths(self.model):
            return
        config = self.model.config.get_text_config()
        original = [kind["original_max_position_embeddings"] for kind in rope_kinds(config) if "original_max_position_embeddings" in kind]
        limit = min([*original, config.max_position_embeddings])
        if (longest := max(length + tree.depth + 1 for length, tree in zip(self.lengths, trees, strict=True))) > limit:
            raise TargetError(
                f"{type(self.model).__name__}: a request of {longest} tokens is past the {limit} that its rotary embedding was trained "
                "with, where the longest request changes the others' states; set eval.concurrency=1, or lower eval.max_tokens"
            )

    def _crop(self) -> None:
        """Drop the slots behind the longest row."""
        if (surplus := self.slots - max(self.lengths)) > 0:
            self.cache.crop(-surplus)

    def _sliding(self) -> int | None:
        """The window, where this target has layers with one."""
        config = self.model.config.get_text_config()
        types = getattr(config, "layer_types", None)
        return getattr(config, "sliding_window", None) if types is None or "sliding_attention" in types else None

    def _mask(self, among: Tensor, positions: Tensor, slots: int) -> Any:
        """The additive attention mask [B, 1, n, S + n], or one a layer type where the target has several.

        Args:
            among: [B, n, n] who sees whom inside the trees. positions: [B, n].
        """
        slot = torch.arange(slots, device=among.device)
        lengths = torch.tensor(self.lengths, device=among.device)
        prefix = (slot < lengths[:, None])[:, None].expand(-1, among.shape[1], -1)  # [B, n, S]
        visible = torch.cat([prefix, among], -1)  # [B, n, S + n]
        if (window := self._sliding()) is None:
            return self._additive(visible)
        key_positions = torch.cat([slot.expand(len(positions), -1), positions], -1)  # [B, S + n]
        near = positions[:, :, None] - key_positions[:, None] < window
        types = set(getattr(self.model.config.get_text_config(), "layer_types", None) or ["sliding_attention"])
        if types == {"sliding_attention"}:
            return self._additive(visible & near)
        return {"full_attention": self._additive(visible), "sliding_attention": self._additive(visible & near)}

    def _additive(self, visible: Tensor) -> Tensor:
        """[B, n, S + n] bool → [B, 1, n, S + n], 0 where visible and the most negative number elsewhere."""
        mask = torch.zeros(visible.shape, dtype=self.model.dtype, device=visible.device)
        return mask.masked_fill_(~visible, torch.finfo(self.model.dtype).min)[:, None]

    @contextmanager
    def _capture(self) -> Iterator[dict[int, Tensor]]:
        """Collect the wanted states of the forward pass inside, without gradients."""
        hidden: dict[int, Tensor] = {}

        def last(module: nn.Module, args: Any, output: Any) -> None:
            hidden[LAST_HIDDEN] = output.last_hidden_state

        handle = self.model.get_decoder().register_forward_hook(last) if LAST_HIDDEN in self.layers else None
        try:
            blocks = [layer for layer in self.layers if layer != LAST_HIDDEN]
            with torch.no_grad(), tapped(self.model, blocks, cast(Sink, hidden.__setitem__)):
                yield hidden
        finally:
            if handle is not None:
                handle.remove()
