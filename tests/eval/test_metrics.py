"""Metrics: each definition on counts small enough to check by hand, and B40's inputs."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval.metrics import (
    DEFINITIONS,
    Counters,
    RequestCounts,
    candidate_coverage,
    check_identity,
    count,
    draft_vocab_coverage,
    merge,
    per_request,
    pooled,
    ratio,
    repeated_4gram_share,
    subtract,
)
from recipes.errors import EngineError

# Two requests, k = 3. The first ends inside its third round: EOS is the second of four tokens.
REQUESTS = [
    RequestCounts(accepted=(3, 0, 3), drafted=(3, 3, 3), kept=(4, 1, 2)),
    RequestCounts(accepted=(1, 0, 1), drafted=(3, 0, 1)),  # an n-gram miss, then only one token to draft
]


def test_every_metric_on_a_case_by_hand():
    report = per_request(REQUESTS)
    assert report == {
        "num_drafts": 5,
        "num_draft_tokens": 13,
        "num_accepted_tokens": 8,
        "acceptance_length": 1 + 8 / 5,
        "acceptance_rate": 8 / 13,
        "acceptance_per_position": [4 / 5, 2 / 5, 2 / 5],
        "acceptance_per_position_conditional": [4 / 5, 2 / 4, 2 / 2],
        "acceptance_per_position_reached": [4 / 5, 2 / 3, 2 / 2],  # the one-token draft never reached position 1
        "acceptance_compared": 8 / (3 + 1 + 3 + 2 + 1),
        "acceptance_length_per_request": ((1 + 6 / 3) + (1 + 2 / 2)) / 2,
        "num_requests": 2,
        "num_requests_without_drafts": 0,
        "num_rounds": 6,
        "num_rounds_without_drafts": 1,
        "num_rounds_trimmed": 1,
        "num_new_tokens": 1 + 7 + 1 + 5,
        "mean_accepted_tokens": 12 / 6,
        "compression_ratio": 14 / 8,
    }


def test_every_metric_has_a_definition():
    assert set(per_request(REQUESTS)) <= set(DEFINITIONS)
    assert "INCLUDES the bonus" in DEFINITIONS["acceptance_length"]
    assert "UNCONDITIONAL" in DEFINITIONS["acceptance_per_position"]
    assert "CONDITIONAL" in DEFINITIONS["acceptance_per_position_conditional"]


def test_zero_drafts_are_length_1_and_no_rate():
    """B40: neither NaN nor 0 %; n-gram on a 3-token prompt with max_tokens 1 never drafts."""
    report = pooled(Counters())
    assert report["acceptance_length"] == 1.0 and report["acceptance_rate"] is None
    assert report["acceptance_per_position"] == [] and report["acceptance_per_position_conditional"] == []
    assert pooled(Counters(accepted_per_position=(0, 0, 0)))["acceptance_rate"] is None
    one_token = per_request([RequestCounts(accepted=(), drafted=())])
    assert one_token["acceptance_length"] == one_token["acceptance_length_per_request"] == 1.0
    assert one_token["acceptance_compared"] is None and one_token["mean_accepted_tokens"] is None
    assert one_token["compression_ratio"] == 1.0 and one_token["num_requests_without_drafts"] == 1
    nobody = per_request([])
    assert nobody["acceptance_length"] == 1.0 and nobody["compression_ratio"] is None
    assert not any(isinstance(value, float) and math.isnan(value) for value in (nobody | one_token).values())


def test_without_speculation_everything_is_one_token_a_forward():
    report = per_request([RequestCounts(accepted=(0,) * 9, drafted=(0,) * 9)])
    assert report["mean_accepted_tokens"] == report["compression_ratio"] == report["acceptance_length"] == 1.0


def test_a_rejected_draft_is_a_rate_of_zero_not_none():
    report = pooled(Counters(5, 10, 0, (0, 0)))
    assert report["acceptance_rate"] == 0 and report["acceptance_length"] == 1.0
    assert report["acceptance_per_position_conditional"] == [0, None]


def test_engines_are_added_up_position_by_position():
    """B40 (speculators#1095): two engines with drafts 10/20 and pos0 8/18 give 26/30, not the last one's 18/20."""
    both = merge([Counters(10, 20, 12, (8, 4)), Counters(20, 20, 18, (18,))])
    assert both == Counters(30, 40, 30, (26, 4))
    assert pooled(both)["acceptance_per_position"] == [26 / 30, 4 / 30]
    assert merge([]) == Counters()


def test_counters_are_deltas():
    before, after = Counters(10, 30, 12, (8, 4)), Counters(15, 45, 20, (12, 7, 1))
    assert subtract(after, before) == Counters(5, 15, 8, (4, 3, 1))
    with pytest.raises(EngineError, match="restarted"):
        subtract(before, after)


def test_tokens_accepted_past_eos_are_counted_but_not_kept():
    """B40 (vllm#56101): a 5-token block with EOS third. The verifier's count stays; what the user got is 3 tokens."""
    report = per_request([RequestCounts(accepted=(5,), drafted=(5,), kept=(3,))])
    assert report["acceptance_length"] == 6 and report["mean_accepted_tokens"] == 3
    assert report["num_rounds_trimmed"] == 1 and report["num_new_tokens"] == 4


def test_pooled_and_per_request_means_differ():
    """A long request weighs more when pooled over rounds: 1 + 9/10 against the mean of 2 and 1."""
    report = per_request([RequestCounts((1,) * 9, (1,) * 9), RequestCounts((0,), (1,))])
    assert report["acceptance_length"] == pytest.approx(1.9)
    assert report["acceptance_length_per_request"] == pytest.approx(1.5)


def test_a_tree_counts_its_nodes_as_drafted_and_its_depth_as_positions():
    report = per_request([RequestCounts(accepted=(2, 0), drafted=(59, 59), depth=(6, 5))])
    assert report["num_draft_tokens"] == 118 and report["acceptance_rate"] == 2 / 118
    assert report["acceptance_per_position"] == [0.5, 0.5, 0, 0, 0, 0]
    assert report["acceptance_per_position_reached"] == [0.5, 1.0, 0, None, None, None]


@pytest.mark.parametrize("report", [(2.5, [0.8, 0.5]), (2.2, [0.5, 0.7]), (2.2, [1.2]), (1.0, [0.1])])
def test_the_identity_is_checked(report):
    """AL == 1 + Σ unconditional per-position rates, which never rise."""
    with pytest.raises(EngineError, match="different runs or engines"):
        check_identity(dict(zip(("acceptance_length", "acceptance_per_position"), report, strict=True)))


def test_counters_that_contradict_each_other_are_refused():
    with pytest.raises(EngineError, match="different runs or engines"):
        pooled(Counters(10, 20, 12, (8, 3)))


@pytest.mark.parametrize(
    "counts", [((4,), (3,), None, None), ((2,), (9,), (1,), None), ((1,), (3,), None, (3,)), ((-1,), (3,), None, None)]
)
def test_impossible_rounds_are_refused(counts):
    with pytest.raises(EngineError, match="cannot have"):
        RequestCounts(*counts)


rounds = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=12)


@given(st.lists(rounds, max_size=5))
def test_identities_hold_on_any_counts(requests):
    counts = [RequestCounts(tuple(min(pair) for pair in r), tuple(pair[1] for pair in r)) for r in requests]
    report = per_request(counts)
    assert report["acceptance_length"] == pytest.approx(1 + sum(report["acceptance_per_position"]))
    conditional, product = report["acceptance_per_position_conditional"], 1.0
    for unconditional, rate in zip(report["acceptance_per_position"], conditional, strict=True):
        product *= rate or 0
        assert product == pytest.approx(unconditional)
    assert merge(count([c]) for c in counts) == count(counts)
    assert report["num_new_tokens"] == len(counts) + report["num_rounds"] + report["num_accepted_tokens"]


def test_coverage_and_repetition():
    assert draft_vocab_coverage([1, 2, 2, 9], {1, 2}) == 0.75
    assert candidate_coverage([(3, [1, 3]), (4, [1, 3]), (1, {1})]) == 2 / 3
    assert draft_vocab_coverage([], {1}) is None and candidate_coverage([]) is None
    assert repeated_4gram_share([1, 2, 3]) is None
    assert repeated_4gram_share([1, 2, 3, 4, 5]) == 0
    assert repeated_4gram_share([7] * 10) == 6 / 7
    assert ratio(1, 0) is None
