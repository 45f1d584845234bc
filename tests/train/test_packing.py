"""Steps hold the same rows however they are cut; positions resume exactly."""

import pytest
import torch

from data_prep.store import RowFeatures
from recipes.errors import DataError
from train.packing import StepSampler, collate, deal, fixed_batches


def sampler(**changes) -> StepSampler:
    lengths = torch.randint(5, 60, (40,), generator=torch.Generator().manual_seed(0))
    return StepSampler(**({"lengths": lengths, "rows": torch.arange(100, 140), "tokens_per_step": 128, "seed": 3} | changes))


def test_every_row_once_an_epoch():
    s, seen = sampler(), []
    while s.epoch == 0:
        step = s.next_step()
        if s.epoch == 0:
            seen += step
    assert len(seen) == len(set(seen)) and set(seen) <= set(range(100, 140)) and len(seen) > 30


def test_a_step_respects_its_size():
    s = sampler()
    for _ in range(20):
        step = s.next_step()
        assert step and sum(int(s.lengths[r - 100]) for r in step) <= 128


def test_position_resumes():
    a, b = sampler(), sampler()
    for _ in range(9):
        a.next_step()
    b.load_state_dict(a.state_dict())
    assert [a.next_step() for _ in range(5)] == [b.next_step() for _ in range(5)]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("capacity", [40, 64, 200])
def test_ranks_and_accumulation_share_one_step(ranks, capacity):
    """B36, B38: all rows once, every rank the same number of micro-batches, none above its size."""
    lengths = {i: 7 + 5 * (i % 8) for i in range(11)}
    dealt = deal(list(lengths), lengths.__getitem__, capacity, ranks)
    assert len(dealt) == ranks and len({len(micro) for micro in dealt}) == 1
    assert sorted(row for rank in dealt for micro in rank for row in micro) == list(lengths)
    assert all(sum(lengths[r] for r in micro) <= max(capacity, 42) for rank in dealt for micro in rank)


def test_a_long_row_stands_alone():
    assert deal([0, 1], {0: 500, 1: 3}.__getitem__, 100, 1) == [[[0], [1]]]


def test_no_rows():
    with pytest.raises(DataError, match="holdout"):
        sampler(lengths=torch.zeros(0), rows=torch.zeros(0))


def test_validation_batches_keep_order():
    assert list(fixed_batches([3, 1, 2], {1: 4, 2: 4, 3: 4}.__getitem__, 8)) == [[3, 1], [2]]


def test_collate_packs_without_padding():
    def row(n):
        return RowFeatures(torch.arange(n), torch.ones(n, dtype=torch.bool), {2: torch.randn(n, 4)}, torch.randn(n, 4))

    batch = collate([row(3), row(2)], [2], 4)
    assert batch.document.tolist() == [0, 0, 0, 1, 1] and batch.positions.tolist() == [0, 1, 2, 0, 1]
    assert batch.hidden[2].shape == (5, 4) and batch.supervised == 5


def test_nothing_to_do_is_one_unsupervised_token():
    """B36: a rank without rows still has a batch."""
    assert collate([], [2], 4).supervised == 0 and collate([], [2], 4).hidden[2].shape == (1, 4)
