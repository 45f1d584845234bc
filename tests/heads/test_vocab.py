"""The draft vocabulary and its maps."""

import pytest
import torch

from heads.vocab import DraftVocab, build_draft_vocab
from recipes.errors import RecipeError


def test_offsets_not_ids():
    """B15: target id = draft id + d2t[draft id]."""
    vocab = DraftVocab(torch.tensor([1, 4, 5, 9]), 10)
    assert vocab.d2t.tolist() == [1, 3, 3, 6]
    assert (torch.arange(4) + vocab.d2t).tolist() == vocab.ids.tolist()
    assert vocab.t2d.nonzero()[:, 0].tolist() == vocab.ids.tolist()


def test_more_ids_than_seen_tokens():
    """B13: filled with unseen ids, special tokens first, in a fixed order."""
    counts = torch.zeros(256, dtype=torch.long)
    counts[torch.arange(40) * 3] = torch.arange(40) + 1
    vocab = build_draft_vocab(counts, 64, special_ids=[250, 251])
    assert len(vocab.ids) == 64 == int(vocab.t2d.sum()) and len(vocab.d2t) == 64
    assert {250, 251} <= set(vocab.ids.tolist())
    assert set((torch.arange(40) * 3).tolist()) <= set(vocab.ids.tolist())
    assert vocab.coverage(counts) == 1.0


def test_most_frequent_first_and_ties_by_id():
    counts = torch.tensor([5, 0, 7, 7, 7, 1])
    assert build_draft_vocab(counts, 2, []).ids.tolist() == [2, 3]


def test_full_vocabulary_has_no_maps_to_write():
    """B15: both or neither."""
    assert build_draft_vocab(torch.zeros(10, dtype=torch.long), None, []).full
    assert build_draft_vocab(torch.zeros(10, dtype=torch.long), 10, []).full


def test_larger_than_the_target():
    """B13: names both sizes."""
    with pytest.raises(RecipeError, match=r"draft_vocab_size=11 .* 10"):
        build_draft_vocab(torch.zeros(10, dtype=torch.long), 11, [])
