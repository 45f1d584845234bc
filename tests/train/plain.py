"""What objective tests of several methods ask: a pair's plain loss by the formulas, and gradients that reach everything."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from train.packing import Batch


def plain_pair(objective: Any, batch: Batch, t: int, depth: int, logits: Tensor, kind: str) -> tuple[float, bool, bool, bool]:
    """Draft logits [D] of one (row, depth) over a draft vocabulary, by the formulas.

    Returns:
        Its loss ("kl" from the target, or "ce"; 0 without a label or with one outside the draft vocabulary), whether it has a label,
        whether the draft's argmax is that label, and whether the label lies outside the draft vocabulary.
    """
    has = t + 2 + depth < len(batch.document) and bool(batch.document[t + 2 + depth] == batch.document[t])
    label = int(objective.to_draft[batch.input_ids[t + 2 + depth]]) if has else -1
    outside, hit = has and label < 0, has and int(logits.argmax()) == label
    if outside:
        return 0.0, has, hit, outside
    if kind == "ce":
        return float(F.cross_entropy(logits, torch.tensor(label))) if has else 0.0, has, hit, outside
    p = (objective.teacher_rows @ batch.last_hidden[t + 1 + depth]).softmax(-1)
    return float((p * (p.log() - logits.log_softmax(-1))).sum()), has, hit, outside


def assert_reaches_every_parameter(objective: nn.Module, batches: Iterable[Batch]) -> None:
    """B03, B36: whatever a batch supervises, its loss is finite and every parameter gets a finite gradient."""
    for batch in batches:
        out = objective(batch)
        out.loss_sum.backward()
        assert torch.isfinite(out.loss_sum)
        for name, p in objective.named_parameters():
            assert p.grad is not None and bool(torch.isfinite(p.grad).all()), name
