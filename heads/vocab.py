"""The draft vocabulary: which target tokens a head can draft, and the maps the server reads (METHODS §5.2)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from recipes.errors import RecipeError


@dataclass(frozen=True)
class DraftVocab:
    """`ids` int64 [D], ascending target ids that the head can draft; `size` is the target's vocabulary V."""

    ids: Tensor
    size: int

    @property
    def full(self) -> bool:
        """Whether every target token can be drafted (then no maps are exported, B15)."""
        return len(self.ids) == self.size

    @property
    def d2t(self) -> Tensor:
        """int64 [D] *offsets*: target id = draft id + d2t[draft id].

        >>> DraftVocab(torch.tensor([1, 4, 5, 9]), 10).d2t.tolist()
        [1, 3, 3, 6]
        """
        return self.ids - torch.arange(len(self.ids), device=self.ids.device)

    @property
    def t2d(self) -> Tensor:
        """bool [V]: whether a target token can be drafted."""
        return torch.zeros(self.size, dtype=torch.bool, device=self.ids.device).index_fill_(0, self.ids, True)

    def to_draft(self, target_ids: Tensor) -> Tensor:
        """Draft id of each target id, -1 where the draft vocabulary lacks it.

        >>> DraftVocab(torch.tensor([1, 4, 5, 9]), 10).to_draft(torch.tensor([5, 6, 1])).tolist()
        [2, -1, 0]
        """
        table = torch.full((self.size,), -1, dtype=torch.long, device=self.ids.device)
        table[self.ids] = torch.arange(len(self.ids), device=self.ids.device)
        return table.to(target_ids.device)[target_ids]

    def coverage(self, counts: Tensor) -> float:
        """Share of counted tokens that the draft vocabulary holds; it caps the acceptance."""
        total = counts.sum().item()
        return counts[self.ids].sum().item() / total if total else 0.0


def whole_vocab(vocab: DraftVocab) -> DraftVocab:
    """All tokens of the target."""
    return DraftVocab(torch.arange(vocab.size, device=vocab.ids.device), vocab.size)


def build_draft_vocab(counts: Tensor, size: int | None, special_ids: list[int]) -> DraftVocab:
    """The `size` most frequent supervised tokens; unseen ones fill up, special tokens first, then by ascending id (B13).

    Args:
        counts: int64 [V], how often each token is supervised in the training rows.
        size: D, or None for the whole vocabulary.
        special_ids: the target's special tokens.

    Raises:
        RecipeError: `size` larger than the target's vocabulary.
    """
    vocab = len(counts)
    if size is None or size == vocab:
        return DraftVocab(torch.arange(vocab), vocab)
    if size > vocab:
        raise RecipeError(
            f"head.draft_vocab_size={size} is larger than the target's vocabulary of {vocab}; lower it, or leave it empty for all."
        )
    rank = counts.double()
    unseen_special = [i for i in special_ids if 0 <= i < vocab and counts[i] == 0]
    rank[unseen_special] = 0.5
    order = torch.sort(rank, descending=True, stable=True).indices  # stable: equal counts stay in ascending id order
    return DraftVocab(order[:size].sort().values, vocab)
