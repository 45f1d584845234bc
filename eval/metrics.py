"""Every number of a report as a pure function of what was counted, each with its definition (METHODS §11).

Two levels, because two engines count differently:

* `Counters`: totals, all that vLLM's Prometheus counters give. Take deltas (`subtract`), add engines up (`merge`), then `pooled`.
* `RequestCounts`: the accepted count of every round of one request, from the reference decoder (or vLLM's detailed per-request
  statistics). `count` turns them into `Counters`, so both engines' pooled numbers come from the same lines; `per_request` adds the rest.

A *round* is one target forward after the prefill. A round that verified no draft at all (an n-gram miss) is a round but not a *draft*:
vLLM counts `num_drafts` so, and so do we. `DEFINITIONS` has one entry for every key that a report may hold.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from recipes.errors import EngineError

DEFINITIONS = {
    "num_drafts": "rounds in which at least one drafted token was verified",
    "num_draft_tokens": "drafted tokens verified (for a tree: its nodes without the root)",
    "num_accepted_tokens": "drafted tokens accepted; the bonus token is not counted",
    "acceptance_length": (
        "tokens a draft yields: 1 + num_accepted_tokens / num_drafts; INCLUDES the bonus token; pooled over all drafts; 1.0 without drafts "
        "(vLLM's mean acceptance length, EAGLE's τ, PARD's accept_length, block efficiency)"
    ),
    "acceptance_rate": "num_accepted_tokens / num_draft_tokens; falls as k grows; null without drafts (vLLM's draft acceptance rate)",
    "acceptance_per_position": (
        "UNCONDITIONAL: share of drafts in which position i (and all before it) was accepted; non-increasing; sums to acceptance_length - 1"
    ),
    "acceptance_per_position_conditional": (
        "CONDITIONAL: accepted at position i / accepted at position i-1 (position 0: / num_drafts); a draft too short to reach position i "
        "counts as a miss; null where position i-1 was never accepted"
    ),
    "acceptance_per_position_reached": (
        "CONDITIONAL, where a token was drafted: accepted at position i / drafts that accepted all before it and did draft position i "
        "(EAGLE's n-α on a chain); null where none did"
    ),
    "acceptance_compared": "accepted / positions compared, up to and including the first miss (PARD's acc); null without drafts",
    "acceptance_length_per_request": (
        "mean over requests of each request's own acceptance_length (DFlash's acceptance length, HASS's τ); "
        "a request without drafts counts 1.0"
    ),
    "num_requests": "requests measured",
    "num_requests_without_drafts": "requests in which no token was ever drafted",
    "num_rounds": "target forwards after the prefill, with or without drafts",
    "num_rounds_without_drafts": "rounds in which nothing was drafted (an n-gram miss, or only one token left to write)",
    "num_rounds_trimmed": "rounds of which accepted tokens were thrown away past EOS, a stop string or max_tokens",
    "num_new_tokens": "tokens returned, after trimming at EOS, stop strings and max_tokens",
    "mean_accepted_tokens": (
        "tokens kept / rounds, trimmed at EOS, pooled over rounds with and without drafts, the prefill's token left out "
        "(Spec-Bench's #Mean Accepted Tokens, Medusa's acceleration rate); 1.0 without speculation"
    ),
    "compression_ratio": "num_new_tokens / target forwards, the prefill counted as one forward (EAGLE's compression ratio)",
    "draft_vocab_coverage": "share of the target's tokens that the draft vocabulary can name at all; an upper bound of the acceptance",
    "candidate_coverage": "share of visited tree nodes whose children include the target's own next token",
    "repeated_4gram_share": "share of 4-grams that already occurred earlier in the same text; high values flatter n-gram drafts",
    "round_seconds": (
        "seconds of one round for all requests in flight: draft, verify (the target's forward), overhead (acceptance, roll-back, the rest)"
    ),
    "draft_seconds": "seconds in which vLLM's proposer drafts for all requests in flight, mean over its calls; on a CPU only",
    "not_argmax": (
        "temperature 0: tokens of the answers that are not the argmax of the target's forward over the text, without a cache, drafts or "
        "a tree, and how far their logits lie below it; empty: the answers are the target's greedy ones, token for token"
    ),
    "lossless": "whether the verification rule keeps the target's own distribution; typical acceptance does not",
    "speedup": "tokens per second / tokens per second of the same engine without speculation, same prompts and settings",
    "AL~": "ESTIMATED acceptance length, from held-out features during training; AL without ~ is only ever counted in an engine",
}


# --- Totals -------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Counters:
    """What vLLM counts, under vLLM's names. Zero drafts are valid."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: tuple[int, ...] = ()  # [k] drafts in which position i was accepted


def merge(counters: Iterable[Counters]) -> Counters:
    """Add up the counters of several engines (data-parallel replicas), position by position; lengths may differ (B40).

    >>> a, b = Counters(10, 10, 8, (8,)), Counters(20, 20, 18, (18,))
    >>> merge([a, b]).accepted_per_position
    (26,)
    """
    counters = list(counters)
    return Counters(
        sum(c.num_drafts for c in counters),
        sum(c.num_draft_tokens for c in counters),
        sum(c.num_accepted_tokens for c in counters),
        tuple(map(sum, zip_longest(*(c.accepted_per_position for c in counters), fillvalue=0))),
    )


def subtract(after: Counters, before: Counters) -> Counters:
    """What one run counted: engines count since their start, so a run is after − before (B40)."""
    delta = Counters(
        after.num_drafts - before.num_drafts,
        after.num_draft_tokens - before.num_draft_tokens,
        after.num_accepted_tokens - before.num_accepted_tokens,
        tuple(a - b for a, b in zip_longest(after.accepted_per_position, before.accepted_per_position, fillvalue=0)),
    )
    if min(delta.num_drafts, delta.num_draft_tokens, delta.num_accepted_tokens, *delta.accepted_per_position) < 0:
        raise EngineError(
            f"counters went down between two readings ({before} → {after}): the engine was restarted; run the measurement again."
        )
    return delta


def pooled(counters: Counters) -> dict[str, Any]:
    """The metrics that totals give, checked against each other."""
    drafts, per_position = counters.num_drafts, counters.accepted_per_position
    report = {
        "num_drafts": drafts,
        "num_draft_tokens": counters.num_draft_tokens,
        "num_accepted_tokens": counters.num_accepted_tokens,
        "acceptance_length": 1 + counters.num_accepted_tokens / drafts if drafts else 1.0,
        "acceptance_rate": ratio(counters.num_accepted_tokens, counters.num_draft_tokens),
        "acceptance_per_position": [accepted / drafts for accepted in per_position] if drafts else [],
        "acceptance_per_position_conditional": [
            ratio(now, before) for now, before in zip(per_position, (drafts, *per_position), strict=False)
        ]
        if drafts
        else [],
    }
    check_identity(report)
    return report


def check_identity(report: dict[str, Any]) -> None:
    """Raise EngineError unless acceptance_length == 1 + Σ unconditional per-position rates, which fall from position to position.

    Called on every report: a mismatch means that counters were lost, doubled or mixed from two runs (METHODS §11, B40).
    """
    length, rates = report["acceptance_length"], report["acceptance_per_position"]
    if abs(length - (1 + sum(rates))) > 1e-9 * max(1.0, length):
        raise EngineError(
            f"acceptance_length is {length} but 1 + the sum of acceptance_per_position {rates} is {1 + sum(rates)}; "
            "the counters come from different runs or engines. Read them all, before and after the same run."
        )
    if any(later > earlier for earlier, later in zip([1.0, *rates], rates, strict=False)):
        raise EngineError(f"acceptance_per_position {rates} must not rise or exceed 1; the counters come from different runs or engines.")


def ratio(numerator: float, denominator: float) -> float | None:
    """None where nothing was counted: no draft is not a rate of 0 % (B40)."""
    return numerator / denominator if denominator else None


# --- Round by round -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RequestCounts:
    """One request, one entry a round in each tuple."""

    accepted: tuple[int, ...]  # drafted tokens the verifier accepted, the bonus token not counted
    drafted: tuple[int, ...]  # drafted tokens verified; 0 in a round without drafts
    depth: tuple[int, ...] | None = None  # positions drafted: the tree's depth; None for chains, where it is `drafted`
    kept: tuple[int, ...] | None = None  # tokens returned, after trimming at EOS, stop strings, max_tokens; None: accepted + 1
    first_tokens: int = 1  # tokens that the prefill gave, before the first round

    def __post_init__(self):
        for accepted, drafted, depth, kept in zip(self.accepted, self.drafted, self.depths, self.kept_tokens, strict=True):
            if not 0 <= accepted <= depth <= drafted or not 0 <= kept <= accepted + 1:
                raise EngineError(
                    f"a round with {drafted} drafted tokens at depth {depth} cannot have {accepted} accepted and {kept} kept: "
                    "need accepted <= depth <= drafted and kept <= accepted + 1."
                )

    @property
    def depths(self) -> tuple[int, ...]:
        return self.drafted if self.depth is None else self.depth

    @property
    def kept_tokens(self) -> tuple[int, ...]:
        return tuple(a + 1 for a in self.accepted) if self.kept is None else self.kept

    @property
    def num_new_tokens(self) -> int:
        return self.first_tokens + sum(self.kept_tokens)


def count(requests: Iterable[RequestCounts]) -> Counters:
    """The totals that vLLM would have counted for these requests. Tokens accepted past EOS count as accepted, as in vLLM."""
    accepted, drafted, positions = [], [], 0
    for request in requests:
        for round_accepted, round_drafted, depth in zip(request.accepted, request.drafted, request.depths, strict=True):
            if round_drafted:
                accepted.append(round_accepted)
                drafted.append(round_drafted)
                positions = max(positions, depth)
    per_position = tuple(sum(a > i for a in accepted) for i in range(positions))
    return Counters(len(accepted), sum(drafted), sum(accepted), per_position)


def per_request(requests: Sequence[RequestCounts]) -> dict[str, Any]:
    """All metrics that round-by-round counts give: those of `pooled` and the ones that totals cannot tell."""
    report = pooled(count(requests))
    rounds = [pair for r in requests for pair in zip(r.accepted, r.depths, strict=True)]  # (accepted, depth)
    kept = [(kept, accepted) for r in requests for kept, accepted in zip(r.kept_tokens, r.accepted, strict=True)]
    reached = [sum(a >= i and depth > i for a, depth in rounds) for i in range(len(report["acceptance_per_position"]))]
    passed = [sum(a > i for a, _ in rounds) for i in range(len(reached))]
    lengths = [pooled(count([r]))["acceptance_length"] for r in requests]
    new_tokens = sum(r.num_new_tokens for r in requests)
    return report | {
        "acceptance_per_position_reached": [ratio(p, r) for p, r in zip(passed, reached, strict=True)],
        "acceptance_compared": ratio(report["num_accepted_tokens"], sum(min(a + 1, depth) for a, depth in rounds)),
        "acceptance_length_per_request": ratio(sum(lengths), len(lengths)),
        "num_requests": len(requests),
        "num_requests_without_drafts": sum(not any(r.drafted) for r in requests),
        "num_rounds": len(rounds),
        "num_rounds_without_drafts": sum(depth == 0 for _, depth in rounds),
        "num_rounds_trimmed": sum(k < a + 1 for k, a in kept),
        "num_new_tokens": new_tokens,
        "mean_accepted_tokens": ratio(sum(k for k, _ in kept), len(kept)),
        "compression_ratio": ratio(new_tokens, len(requests) + len(rounds)),
    }


def seconds_drafting(run: Mapping[str, Any]) -> float | None:
    """Drafting time of a round of a report's run, for all requests in flight, from either engine; None where it was not taken."""
    return run.get("draft_seconds") or run.get("round_seconds", {}).get("draft")


# --- Coverage and repetition ---------------------------------------------------------------------------------------------------


def draft_vocab_coverage(target_tokens: Iterable[int], draft_vocab: Collection[int]) -> float | None:
    """Share of the target's tokens that are in the draft vocabulary (target ids); None without tokens."""
    vocab, tokens = set(draft_vocab), list(target_tokens)
    return ratio(sum(token in vocab for token in tokens), len(tokens))


def candidate_coverage(nodes: Iterable[tuple[int, Collection[int]]]) -> float | None:
    """Share of nodes whose children include the target's own next token.

    Args:
        nodes: for each visited node with children, the target's token after it and the tokens of its children.
    """
    nodes = list(nodes)
    return ratio(sum(token in children for token, children in nodes), len(nodes))


def repeated_4gram_share(tokens: Sequence[int]) -> float | None:
    """Share of 4-grams that already occurred earlier in the same text; None for a text too short to have one.

    >>> repeated_4gram_share([1, 2, 3, 4, 1, 2, 3, 4])
    0.2
    """
    grams = [tuple(tokens[i : i + 4]) for i in range(len(tokens) - 3)]
    return ratio(len(grams) - len(set(grams)), len(grams))
