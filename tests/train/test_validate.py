"""Validation counts blocks, and keeps greedy and sampled answers apart."""

from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn

from data_prep.store import RowFeatures
from train.objective import Output, simulate_chain
from train.packing import collate
from train.step import take_step
from train.validate import validate

LENGTHS = (12, 9, 10)


class Known(nn.Module):
    """An objective whose drafts are right where a token is even: depth i of row t where x[t + 2 + i] is."""

    def forward(self, batch) -> Output:
        n = len(batch.input_ids)
        hits = torch.stack([torch.cat([batch.input_ids[2 + i :] % 2 == 0, torch.zeros(2 + i, dtype=torch.bool)])[:n] for i in range(3)])
        counts = torch.full((3,), n)
        return Output(torch.zeros(()), torch.full((3,), 2.0 * n), hits.sum(1), counts, hits)


def source_of(greedy: list[bool]) -> SimpleNamespace:
    """Rows of random tokens, all but the first two supervised."""
    rows = []
    for n in LENGTHS:
        mask = torch.arange(n) >= 2
        rows.append(RowFeatures(torch.randint(50, (n,)), mask, {}, torch.zeros(n, 4)))
    source = SimpleNamespace(lengths=torch.tensor(LENGTHS), greedy=torch.tensor(greedy), manifest=SimpleNamespace(hidden_size=4), rows=rows)
    source.read_rows = lambda picked, layers: [rows[i] for i in picked]
    return source


def rounds_by_hand(row: RowFeatures, k: int) -> list[int]:
    """Accepted drafts of each round of a chain of k along a row: the first answer token is the prefill's."""
    right, at, rounds = (row.input_ids % 2 == 0).tolist(), 2, []  # `at`: the newest token
    while at + k < len(right):
        accepted = 0
        while accepted < k and right[at + 1 + accepted]:
            accepted += 1
        rounds.append(accepted)
        at += accepted + 1
    return rounds


@pytest.mark.parametrize("tokens", [12, 100], ids=["row by row", "packed"])
def test_al_is_counted_from_blocks(tokens):
    """Not a product of accuracies: rounds of real chains, pooled, however rows are batched; greedy rows apart from sampled ones."""
    source = source_of([True, False, True])
    result = validate(Known(), source, [0, 1, 2], [], tokens, Accelerator(cpu=True))
    for k in (1, 2, 3):
        greedy, sampled = (
            [
                accepted
                for row, is_greedy in zip(source.rows, source.greedy, strict=True)
                if is_greedy == kind
                for accepted in rounds_by_hand(row, k)
            ]
            for kind in (True, False)
        )
        assert result["al"][k] == pytest.approx(1 + sum(greedy) / len(greedy)) and result["rounds"][k] == len(greedy)
        assert result["al_sampled"][k] == pytest.approx(1 + sum(sampled) / len(sampled))
        assert result["per_position"][k] == pytest.approx([sum(a > i for a in greedy) / len(greedy) for i in range(k)])
    assert result["loss"] == 2.0 and len(result["accuracy"]) == 3


def test_sampled_rows_alone_are_the_estimate():
    source = source_of([False, False, False])
    result = validate(Known(), source, [0, 1, 2], [], 100, Accelerator(cpu=True))
    rounds = [accepted for row in source.rows for accepted in rounds_by_hand(row, 2)]
    assert result["al"][2] == pytest.approx(1 + sum(rounds) / len(rounds)) and "al_sampled" not in result


def test_a_document_that_is_supervised_whole_has_rounds():
    """data.supervise: all: the first token is given, the rest is drafted."""
    hits = torch.ones(2, 7, dtype=torch.bool)
    assert simulate_chain(hits, torch.ones(7, dtype=torch.bool), torch.zeros(7), 2) == [[2, 2]]
    two = torch.tensor([0, 0, 0, 0, 1, 1, 1])
    assert simulate_chain(hits, torch.ones(7, dtype=torch.bool), two, 2) == [[2]]  # the second one ends before a whole round


def test_what_was_not_estimated_is_not_reported():
    """Answers shorter than a round say nothing of k, not AL~ = 1; short greedy rows hide no sampled ones."""
    source = source_of([True, False, False])
    source.rows[0].loss_mask[:] = torch.arange(12) >= 10  # two supervised tokens
    result = validate(Known(), source, [0, 1, 2], [], 100, Accelerator(cpu=True))
    sampled = validate(Known(), source, [1, 2], [], 100, Accelerator(cpu=True))
    assert set(result["al"]) == {1} and result["al_sampled"] == sampled["al"] and set(sampled["al"]) == {1, 2, 3}
    source.rows[0].loss_mask[:] = torch.arange(12) >= 11
    assert validate(Known(), source, [0, 1, 2], [], 100, Accelerator(cpu=True))["al"] == sampled["al"]
    alone = validate(Known(), source, [0], [], 100, Accelerator(cpu=True))
    assert alone["al"] == alone["rounds"] == alone["per_position"] == {} and "al_sampled" not in alone


@pytest.fixture
def fresh_accelerate():
    """accelerate keeps a process's first settings: forget them before and after."""
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


def test_rounded_logits_do_not_tie(fresh_accelerate):
    """Validation computes in float32 whatever training's precision is: of two drafts that bfloat16 cannot tell apart, one is wrong."""

    class Close(nn.Module):
        """Drafts token 1 everywhere; token 0 stands 2^-10 below it, which bfloat16 rounds away."""

        def __init__(self):
            super().__init__()
            self.logits = nn.Linear(1, 2, bias=False)
            self.logits.weight.data = torch.tensor([[1.0], [1.0 + 2**-10]])
            self.dtypes = []

        def forward(self, batch) -> Output:
            n = len(batch.input_ids)
            logits = self.logits(torch.ones(n, 1))
            self.dtypes.append(logits.dtype)
            hits = (logits[:, 0] >= logits.amax(-1))[None]
            return Output(logits.sum() * 0, torch.zeros(1), hits.sum(1), torch.full((1,), n), hits)

    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    objective = accelerator.prepare(Close())
    assert validate(objective, source_of([True] * 3), [0, 1, 2], [], 100, accelerator)["al"] == {1: 1.0}
    batch = collate(source_of([True] * 3).rows, [], 4)
    take_step(objective, torch.optim.SGD(objective.parameters(), 0.0), accelerator, [batch], 0.0, 1.0, "here")
    assert objective.dtypes == [torch.float32, torch.bfloat16]
