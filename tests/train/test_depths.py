"""Which tokens draft and target are compared over, and what is kept for it."""

import torch

from heads.vocab import DraftVocab
from train.depths import Compared


def test_the_most_frequent_tokens_in_training_and_all_elsewhere(small_target):
    ids = torch.tensor([3, 7, 11])
    compared, weight = Compared(DraftVocab(ids, 50), small_target), torch.randn(50, 32)
    seen = compared.train().draft_head(weight)
    assert torch.equal(seen.weight, weight[ids]) and torch.equal(seen.teacher_rows, small_target.lm_head[ids])
    places = compared.draft_ids()
    assert places[ids].tolist() == [0, 1, 2] and int((places == -1).sum()) == 47
    seen = compared.eval().draft_head(weight)
    assert seen.weight is weight and torch.equal(seen.teacher_rows, small_target.lm_head)
    assert torch.equal(compared.draft_ids(), torch.arange(50))


def test_the_targets_lm_head_is_kept_once(small_target):
    """Every buffer becomes a tensor of its own on another device or in another type, so over all tokens there must be one alone."""
    compared, weight = Compared(DraftVocab(torch.arange(50), 50), small_target).to(torch.float64), torch.randn(50, 32)
    assert [name for name, tensor in compared.named_buffers() if tensor.shape == (50, 32)] == ["all_rows"]
    for mode in (True, False):
        seen = compared.train(mode).draft_head(weight)
        assert seen.weight is weight and seen.teacher_rows is compared.all_rows
