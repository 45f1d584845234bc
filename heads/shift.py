"""Every index shift of the project, each with a worked example. No other file slices `[:, 1:]`.

Rows are packed: one flat sequence of N tokens with a document id per token and no padding. A shift never crosses a
document: positions that would are filled and reported invalid.
"""

from __future__ import annotations

import torch
from torch import Tensor


def shift_left(x: Tensor, by: int, fill: float | int | bool = 0) -> Tensor:
    """`x[t + by]` at index t along dim 0; the tail is `fill`.

    >>> shift_left(torch.tensor([10, 11, 12, 13]), 1).tolist()
    [11, 12, 13, 0]
    """
    if by == 0:
        return x
    tail = torch.full_like(x[:by], fill)
    return torch.cat([x[by:], tail])[: len(x)]


def shift_right(x: Tensor, by: int, fill: float | int | bool = 0) -> Tensor:
    """`x[t - by]` at index t along dim 0; the first `by` are `fill`.

    >>> shift_right(torch.tensor([10, 11, 12, 13]), 1).tolist()
    [0, 10, 11, 12]
    """
    if by == 0:
        return x
    front = torch.full_like(x[:by], fill)
    return torch.cat([front, x[: len(x) - by]])[: len(x)]


def same_document(document: Tensor, by: int) -> Tensor:
    """[N] bool: whether index t + by exists and lies in the document of index t.

    >>> same_document(torch.tensor([0, 0, 0, 1, 1]), 1).tolist()
    [True, True, False, True, False]
    """
    return shift_left(document, by, fill=-1) == document


def draft_inputs(input_ids: Tensor, depth: int) -> Tensor:
    """Token that a feature-reading draft eats at index t and depth i: x[t + 1 + i].

    The draft pairs the feature of position t with the token after it (the target has already chosen that one), and
    each depth moves one token on.

    >>> draft_inputs(torch.tensor([10, 11, 12, 13, 14]), 0).tolist()
    [11, 12, 13, 14, 0]
    >>> draft_inputs(torch.tensor([10, 11, 12, 13, 14]), 1).tolist()
    [12, 13, 14, 0, 0]
    """
    return shift_left(input_ids, 1 + depth)


def draft_labels(input_ids: Tensor, depth: int) -> Tensor:
    """Token that the draft should predict at index t and depth i: x[t + 2 + i].

    >>> draft_labels(torch.tensor([10, 11, 12, 13, 14]), 0).tolist()
    [12, 13, 14, 0, 0]
    """
    return shift_left(input_ids, 2 + depth)


def teacher_index(depth: int) -> int:
    """How far right of index t the teacher's distribution for depth i lies: the target at t + 1 + i predicts x[t + 2 + i].

    >>> teacher_index(0)
    1
    """
    return 1 + depth


def draft_weight(loss_mask: Tensor, document: Tensor, depth: int) -> Tensor:
    """[N] bool: which indices are supervised at depth i (KNOWN_FAULTS B20).

    The mask moves with the teacher: index t counts when the token it eats, x[t + 1 + i], is supervised, for then the
    target's distribution after that token is one that serving asks the draft for. The first reply token is never
    drafted (the target's prefill gives it), the last prompt position is supervised, and the last index of a document
    pairs with nothing.

    ids 10..14, mask 0 0 1 1 1: index 1 eats 12 and predicts 13, index 3 eats 14 and predicts what follows.

    >>> mask, document = torch.tensor([0, 0, 1, 1, 1]).bool(), torch.zeros(5, dtype=torch.long)
    >>> draft_weight(mask, document, 0).int().tolist()
    [0, 1, 1, 1, 0]
    >>> draft_weight(mask, document, 1).int().tolist()
    [1, 1, 1, 0, 0]
    """
    return shift_left(loss_mask, 1 + depth, fill=False) & same_document(document, 1 + depth)


def label_weight(loss_mask: Tensor, document: Tensor, depth: int) -> Tensor:
    """[N] bool: `draft_weight` where the predicted token x[t + 2 + i] is supervised too.

    Nothing is learnt then of what follows an answer's end, which serving never asks for (METHODS §2.2).

    ids 10..14, mask 0 0 1 1 1: index 1 eats 12 and predicts 13, index 2 eats 13 and predicts 14.

    >>> mask, document = torch.tensor([0, 0, 1, 1, 1]).bool(), torch.zeros(5, dtype=torch.long)
    >>> label_weight(mask, document, 0).int().tolist()
    [0, 1, 1, 0, 0]
    >>> label_weight(mask, document, 1).int().tolist()
    [1, 1, 0, 0, 0]
    """
    return draft_weight(loss_mask, document, depth) & draft_weight(loss_mask, document, depth + 1)


def next_tokens(input_ids: Tensor) -> Tensor:
    """What the target itself predicts at index t: x[t + 1].

    >>> next_tokens(torch.tensor([10, 11, 12])).tolist()
    [11, 12, 0]
    """
    return shift_left(input_ids, 1)


def next_weight(loss_mask: Tensor, document: Tensor) -> Tensor:
    """[N] bool: which indices train the target itself: the token x[t + 1] is supervised.

    >>> next_weight(torch.tensor([0, 0, 1, 1, 1]).bool(), torch.zeros(5, dtype=torch.long)).int().tolist()
    [0, 1, 1, 1, 0]
    """
    return shift_left(loss_mask, 1, fill=False) & same_document(document, 1)


def has_label(document: Tensor, depth: int) -> Tensor:
    """[N] bool: whether x[t + 2 + i] exists in the same document (hard labels and exact matches need it).

    >>> has_label(torch.zeros(5, dtype=torch.long), 0).int().tolist()
    [1, 1, 1, 0, 0]
    """
    return same_document(document, 2 + depth)


def block_positions(positions: Tensor, slots: int) -> Tensor:
    """[R, B] positions of the block behind each index t at positions [R]: t + 1, the anchor's, to t + B.

    >>> block_positions(torch.tensor([4, 9]), 3).tolist()
    [[5, 6, 7], [10, 11, 12]]
    """
    return positions[:, None] + 1 + torch.arange(slots, device=positions.device)


def rollout_rows(weights: list[Tensor]) -> list[Tensor]:
    """[N] bool a depth: indices whose state must be computed at depth i, because depth i or a later one supervises them.

    >>> w = [torch.tensor([0, 1, 1]).bool(), torch.tensor([1, 1, 0]).bool()]
    >>> [r.int().tolist() for r in rollout_rows(w)]
    [[1, 1, 1], [1, 1, 0]]
    """
    rows, needed = [], torch.zeros_like(weights[-1])
    for weight in reversed(weights):
        needed = needed | weight
        rows.append(needed)
    return rows[::-1]
