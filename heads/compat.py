"""Whether a draft model speaks the target's tokens.

A server hands token ids from one model to the other, so both must mean the same by each id. That is told by id → token:
two vocabularies of one size may differ, and one tokenizer comes with embeddings padded to different sizes.

Shapes: v rows of the draft's vocabulary, V of the target's, H hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from recipes.errors import TargetError


def check_same_tokenizer(target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase, target_name: str, draft_name: str) -> None:
    """Every id that both tokenizers know is the same token, and what only one of them knows is an added token (padding, reserved).

    Raises:
        TargetError: names the first id that differs and what each of the two means by it.
    """
    ours, theirs = ({index: token for token, index in tokenizer.get_vocab().items()} for tokenizer in (target, draft))
    added = target.added_tokens_decoder.keys() | draft.added_tokens_decoder.keys()
    for index in sorted(ours.keys() | theirs.keys()):
        a, b = ours.get(index), theirs.get(index)
        if a != b and not ((a is None or b is None) and index in added):
            raise TargetError(
                f"{draft_name} has another tokenizer than {target_name}: id {index} is {b!r} in the draft and {a!r} in the target. "
                "A draft model must be of the target's own family; take another one, or cut one from the target (head.num_layers)."
            )


def check_vocab_size(target_rows: int, draft_rows: int, target_name: str, draft_name: str) -> None:
    """Raise TargetError where the draft's embedding has more rows than the target's: it could draft what the target cannot take."""
    if draft_rows > target_rows:
        raise TargetError(
            f"{draft_name} has a vocabulary of {draft_rows}, larger than the {target_rows} of {target_name}; smaller ones are padded, "
            "larger ones could draft ids that the target does not have. Take another draft model."
        )


def pad_vocab(weight: Tensor, rows: int) -> Tensor:
    """[v, H] embedding or LM head → [rows, H], for a server that wants both vocabularies of one size.

    The new rows are the mean of the others: as an LM head row it gives the mean of all logits, which is never the largest.

    >>> pad_vocab(torch.tensor([[1.0], [3.0]]), 3).tolist()
    [[1.0], [3.0], [2.0]]
    """
    missing = rows - len(weight)
    return weight if missing == 0 else torch.cat([weight, weight.float().mean(0, keepdim=True).to(weight.dtype).expand(missing, -1)])
