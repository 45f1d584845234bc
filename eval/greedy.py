"""Is a greedy answer the target's own? Told by one forward without a cache, drafts or a tree.

Two forwards of different shape round differently, so where the target's best logits all but tie (a gap below `TIE` in float32),
either token is its greedy one; a wider gap is a bug.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

TIE = 1e-3  # logits; the shape of a batch moves them by about 1e-5 to 1e-4 in float32


@torch.no_grad()
def argmax_gaps(model: PreTrainedModel, prompt: Sequence[int], answer: Sequence[int]) -> Tensor:
    """How far each token's logit lies below the target's best in its place: float32 [n], 0 where it is the argmax.

    An answer whose gaps are all 0 is the target's greedy answer, token for token: each is the argmax after those before it.
    """
    ids = torch.tensor([[*prompt, *answer]], device=model.device)
    logits = model(ids, use_cache=False, logits_to_keep=len(answer) + 1).logits[0, :-1]
    written = logits.gather(-1, ids[0, len(prompt) :, None])[:, 0]
    return (logits.max(-1).values.float() - written.float()).cpu()


def not_argmax(model: PreTrainedModel, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    """Every token of these answers that is not the target's argmax: `request`, `token` (its index in the answer), `gap`."""
    found = []
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        gaps = argmax_gaps(model, prompt, answer)
        found += [{"request": number, "token": token, "gap": gaps[token].item()} for token in gaps.nonzero().flatten().tolist()]
    return found


def lines_about(runs: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """One line for the report's notes: how many tokens of greedy answers were held against the target, and how many passed."""
    checked = [run for run in runs if run.get("not_argmax") is not None]
    if not checked:
        return
    tokens, missed = sum(run["num_new_tokens"] for run in checked), [miss for run in checked for miss in run["not_argmax"]]
    widest = f"; the others lie at most {max(miss['gap'] for miss in missed):.1e} below it" if missed else ""
    yield (
        f"greedy answers: {tokens - len(missed)} of {tokens} tokens are the argmax of the target's own forward over the text, "
        f"without a cache, drafts or a tree{widest}"
    )
