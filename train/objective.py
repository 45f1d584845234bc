"""What every objective returns, and what validation counts from it.

Layout shared by all methods: row t, depth i is the draft of x[t + 2 + i] made once the target has processed x[..t] and
chosen x[t + 1].
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module

import torch
from torch import Tensor, nn


@dataclass
class Output:
    """One batch through an objective: sums and weights, never means. K depths, N tokens."""

    loss_sum: Tensor  # scalar with gradient
    depth_loss: Tensor  # [K] summed unweighted loss, detached
    depth_correct: Tensor  # [K] count of rows whose draft argmax is the answer's token
    depth_count: Tensor  # [K] count of supervised rows that have a label (tokens outside the draft vocabulary included)
    hits: Tensor  # bool [K, N]: draft of depth i at row t is the answer's token

    def sums(self) -> Tensor:
        """[3, K] loss, correct, count: what is added up over micro-batches and ranks."""
        return torch.stack([self.depth_loss.double(), self.depth_correct.double(), self.depth_count.double()])


def objective_class(method: str) -> type[nn.Module]:
    """The objective that `train/<method>.py` defines."""
    module = import_module(f"train.{method}")
    return next(v for name, v in vars(module).items() if name.endswith("Objective") and getattr(v, "__module__", "") == module.__name__)


def simulate_chain(hits: Tensor, loss_mask: Tensor, document: Tensor, k: int) -> list[list[int]]:
    """Accepted drafts of every round that a greedy chain of k tokens would make on the answers' own tokens.

    A span of supervised tokens follows one that is given: the prompt's last, or a document's first where all of it is supervised.
    A draft is accepted when it is the answer's token. With greedy answers that is greedy verification; with sampled
    ones it is lossless sampling with one-hot drafts (METHODS §10.3: draw y from p, accept the draft equal to y), at the
    temperature of the answers. Depths are teacher-forced, which is exact here: a depth counts only when all drafts
    before it were the answer's tokens. A round that reaches past the answer's end is left out.

    Args:
        hits: bool [K, N], K >= k. loss_mask: bool [N]. document: [N].

    Returns:
        One list of per-round accepted counts for every supervised span.

    >>> hits = torch.tensor([[0, 1, 0, 1, 0, 0, 0], [0, 0, 1, 1, 0, 0, 0]]).bool()
    >>> simulate_chain(hits, torch.tensor([0, 0, 1, 1, 1, 1, 1]).bool(), torch.zeros(7), 2)
    [[1, 2]]
    """
    runs = hits[:k].int().cumprod(0).sum(0).tolist()  # leading accepted depths at each row
    mask, doc = loss_mask.tolist(), document.tolist()
    spans, t, n = [], 0, len(mask)
    while t + 1 < n:
        given = not mask[t] or t == 0 or doc[t - 1] != doc[t]
        if not (given and mask[t + 1] and doc[t + 1] == doc[t]):
            t += 1
            continue
        end = t + 1  # the span's last supervised index
        while end + 1 < n and mask[end + 1] and doc[end + 1] == doc[t]:
            end += 1
        rounds = []
        while t + 1 + k <= end:
            rounds.append(runs[t])
            t += runs[t] + 1
        if rounds:
            spans.append(rounds)
        t = end
    return spans
