"""The cost model against the tables of METHODS §12, and the schedule against the rules that vLLM checks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval.ledger import (
    RoundCost,
    active_experts,
    best_k,
    break_even_acceptance,
    dynamic_schedule,
    expected_tokens,
    expected_tokens_iid,
    ledger,
    modelled_best_k,
    modelled_speedup,
    one_more_pays,
    operations_inflation,
)
from recipes.errors import EngineError, RecipeError


@pytest.mark.parametrize("alpha, tokens", [(0.5, 1.88), (0.6, 2.18), (0.7, 2.53), (0.8, 2.95), (0.9, 3.44)])
def test_expected_tokens_at_k_3(alpha, tokens):
    assert expected_tokens_iid(alpha, 3) == pytest.approx(tokens, abs=0.005)
    assert expected_tokens_iid(alpha, 3) == pytest.approx((1 - alpha**4) / (1 - alpha))


def test_expected_tokens_at_the_ends():
    assert expected_tokens([]) == 1 and expected_tokens([0.9, 0.0, 1.0]) == 1.9
    assert expected_tokens_iid(1.0, 5) == 6 and expected_tokens_iid(0.0, 5) == 1


BEST = {
    0.02: [(6, 2.17), (8, 2.76), (11, 3.82), (19, 6.37)],
    0.05: [(4, 1.92), (6, 2.35), (8, 3.09), (13, 4.67)],
    0.10: [(3, 1.67), (4, 1.98), (6, 2.47), (10, 3.43)],
    0.20: [(2, 1.40), (3, 1.58), (4, 1.87), (7, 2.37)],
}


@pytest.mark.parametrize(
    "c, alpha, k, speedup", [(c, a, *best) for c, row in BEST.items() for a, best in zip((0.6, 0.7, 0.8, 0.9), row, strict=True)]
)
def test_best_k_table(c, alpha, k, speedup):
    assert modelled_best_k(alpha, c) == (k, pytest.approx(speedup, abs=0.005))
    assert all(one_more_pays(alpha, smaller, c) for smaller in range(k))
    assert not one_more_pays(alpha, k, c)


def test_a_draft_that_costs_as_much_as_the_target_is_not_worth_it():
    assert modelled_best_k(0.6, c=1.0) == (0, 1.0)
    assert modelled_best_k(0.3, c=0.05, v=2.0) == (0, 1.0)  # a MoE target whose verification doubles


def test_parallel_drafting_costs_one_step():
    assert modelled_speedup(0.8, 8, 0.1, parallel=True) == pytest.approx(expected_tokens_iid(0.8, 8) / 1.1)
    assert modelled_speedup(0.8, 8, 0.1) == pytest.approx(expected_tokens_iid(0.8, 8) / 1.8)
    assert modelled_speedup(0.8, 0, 0.1, parallel=True) == 1


@pytest.mark.parametrize("tokens, experts", [(1, 8), (2, 15.5), (4, 29), (8, 52), (16, 82)])
def test_experts_read_by_a_moe_target(tokens, experts):
    assert active_experts(128, 8, tokens) == pytest.approx(experts, abs=0.6)


def test_operations_inflation():
    assert operations_inflation(0.8, 3, 0.05) == pytest.approx((1 - 0.8) * (3 * 0.05 + 3 + 1) / (1 - 0.8**4))


@given(k=st.integers(1, 12), alpha=st.floats(0.05, 0.99))
def test_break_even_inverts_the_expected_tokens(k, alpha):
    assert break_even_acceptance(k, expected_tokens_iid(alpha, k)) == pytest.approx(alpha, abs=1e-6)


def test_break_even_at_the_ends():
    assert break_even_acceptance(3, 0.9) == 0.0  # a round cheaper than a decode step always pays
    assert break_even_acceptance(3, 4.0) == pytest.approx(1.0)
    assert break_even_acceptance(3, 4.1) is None  # nothing can pay for it


COSTS = {
    1: {0: RoundCost(0, 10e-3), 2: RoundCost(1e-3, 10e-3, 0.5e-3), 4: RoundCost(2e-3, 10.5e-3, 0.5e-3)},
    16: {0: RoundCost(0, 12e-3), 2: RoundCost(2e-3, 15e-3, 1e-3), 4: RoundCost(4e-3, 24e-3, 1e-3)},
    64: {0: RoundCost(0, 20e-3), 2: RoundCost(4e-3, 50e-3, 2e-3), 4: RoundCost(8e-3, 90e-3, 2e-3)},
}
ACCEPTANCE = [0.8, 0.7, 0.6, 0.5]


def test_ledger_line_by_hand():
    entry = next(e for e in ledger(ACCEPTANCE, COSTS) if (e.concurrency, e.k) == (16, 2))
    assert entry.tokens_per_round == pytest.approx(1 + 0.8 + 0.56)
    assert entry.cost.total == pytest.approx(18e-3)
    assert entry.tokens_per_second == pytest.approx(16 * 2.36 / 18e-3)
    assert entry.speedup == pytest.approx(2.36 / 1.5)
    assert expected_tokens_iid(entry.break_even_alpha or 0, 2) == pytest.approx(1.5)


def test_best_k_falls_with_load_and_feeds_the_schedule():
    best = best_k(ledger(ACCEPTANCE, COSTS))
    assert {concurrency: entry.k for concurrency, entry in best.items()} == {1: 4, 16: 2, 64: 0}
    assert best[64].speedup == 1.0 and best[64].tokens_per_second == pytest.approx(64 / 20e-3)
    assert dynamic_schedule({c: e.k for c, e in best.items()}, 256) == [[1, 1, 4], [2, 16, 2], [17, 256, 0]]


def test_ties_go_to_the_smaller_k():
    flat = {1: {0: RoundCost(0, 1.0), 1: RoundCost(0.5, 1.0), 2: RoundCost(0.75, 1.0)}}
    assert best_k(ledger([0.5, 0.5], flat))[1].k == 0


def test_what_was_not_measured_is_named():
    with pytest.raises(EngineError, match="no baseline"):
        ledger(ACCEPTANCE, {4: {2: RoundCost(1, 1)}})
    with pytest.raises(EngineError, match="k=4 but acceptances only for 2"):
        ledger(ACCEPTANCE[:2], COSTS)


def test_schedule_merges_equal_neighbours_and_stops_at_the_batch_limit():
    assert dynamic_schedule({1: 3}, 8) == [[1, 8, 3]]
    assert dynamic_schedule({4: 3, 8: 3, 32: 1}, 16) == [[1, 8, 3], [9, 16, 1]]
    assert dynamic_schedule({4: 5, 64: 2}, 4) == [[1, 4, 5]]
    for bad in ({}, {0: 3}):
        with pytest.raises(RecipeError, match="at least one concurrency"):
            dynamic_schedule(bad, 8)


@given(st.dictionaries(st.integers(1, 200), st.integers(0, 9), min_size=1), st.integers(1, 300))
def test_schedule_is_what_vllm_accepts(k_by_concurrency, max_batch):
    """vLLM's rules: it starts at 1, ranges ascend without overlap; ours also leaves no gap and covers the whole batch range."""
    schedule = dynamic_schedule(k_by_concurrency, max_batch)
    assert schedule[0][0] == 1 and schedule[-1][1] == max_batch
    for (_, end, k), (start, _, next_k) in zip(schedule, schedule[1:], strict=False):
        assert start == end + 1 and k != next_k
    for first, last, k in schedule:
        assert first <= last
        for concurrency, measured in k_by_concurrency.items():
            assert not first <= concurrency <= last or measured == k
