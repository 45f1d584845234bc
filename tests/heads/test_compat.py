"""Tokenizer compatibility: told by id → token; padding is tolerated, anything else is named."""

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from heads.compat import check_same_tokenizer, check_vocab_size, pad_vocab
from recipes.errors import TargetError

WORDS = ["<unk>", "the", "cat", "sat", "on", "mat"]


def tokenizer(words: list[str], *added: str) -> PreTrainedTokenizerFast:
    made = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    made.add_special_tokens(list(added))
    return PreTrainedTokenizerFast(tokenizer_object=made)


def test_the_same_tokens_are_the_same_tokenizer():
    check_same_tokenizer(tokenizer(WORDS, "<eos>"), tokenizer(WORDS, "<eos>"), "target", "draft")


@pytest.mark.parametrize("ours, theirs", [((), ("<pad>",)), (("<think>", "</think>"), ()), (("<a>", "<b>"), ("<a>",))])
def test_padding_and_reserved_tokens_of_one_side_are_tolerated(ours, theirs):
    check_same_tokenizer(tokenizer(WORDS, *ours), tokenizer(WORDS, *theirs), "target", "draft")


def test_the_first_differing_id_is_named_with_both_tokens():
    """Two vocabularies of one size: only the tokens tell."""
    with pytest.raises(TargetError, match="draft has another tokenizer than target: id 2 is 'dog' in the draft and 'cat' in the target"):
        check_same_tokenizer(tokenizer(WORDS), tokenizer(["<unk>", "the", "dog", "on", "sat", "mat"]), "target", "draft")


def test_special_tokens_that_mean_something_else_are_a_mismatch():
    with pytest.raises(TargetError, match="id 6 is '<b>' in the draft and '<a>' in the target"):
        check_same_tokenizer(tokenizer(WORDS, "<a>"), tokenizer(WORDS, "<b>"), "target", "draft")


def test_a_word_that_only_one_side_knows_is_a_mismatch():
    with pytest.raises(TargetError, match="id 5 is None in the draft and 'mat' in the target"):
        check_same_tokenizer(tokenizer(WORDS), tokenizer(WORDS[:5]), "target", "draft")


def test_a_larger_draft_vocabulary_is_refused():
    check_vocab_size(100, 100, "target", "draft")
    check_vocab_size(100, 99, "target", "draft")
    with pytest.raises(TargetError, match="draft has a vocabulary of 101, larger than the 100 of target"):
        check_vocab_size(100, 101, "target", "draft")


def test_padded_rows_are_never_the_largest_logit():
    weight, states = torch.randn(40, 16), torch.randn(500, 16)
    padded = pad_vocab(weight, 48)
    assert torch.equal(padded[:40], weight) and padded.shape == (48, 16)
    assert bool(((states @ padded.T).argmax(-1) < 40).all())
    assert pad_vocab(weight, 40) is weight
    assert pad_vocab(weight.bfloat16(), 48).dtype == torch.bfloat16
