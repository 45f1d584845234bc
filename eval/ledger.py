"""The cost model: what a round yields, what it costs, and from both the best number of drafts k (METHODS §12).

    speed = tokens committed a round / time of a round,    time of a round = draft + verify + overhead

Two ways to use it. *Closed form*, in units of one decode step of the target: c = time of one draft step, v = time of verifying k+1
tokens (1 where decoding is bound by reading weights). *Measured*: a `RoundCost` in seconds for each k and concurrency, from which come
the best k, the break-even acceptance, and vLLM's dynamic schedule.

A conditional acceptance a_i is the probability that draft i is accepted given that all before it were; α is one value for all i.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from recipes.errors import EngineError, RecipeError

# --- Tokens a round -----------------------------------------------------------------------------------------------------------


def expected_tokens(conditional: Sequence[float]) -> float:
    """E[tokens a round] of a chain, bonus token included: 1 + Σ_i Π_{j≤i} a_j. Its length is k.

    >>> expected_tokens([0.5, 0.5, 0.5])
    1.875
    """
    total, reach = 1.0, 1.0
    for a in conditional:
        reach *= a
        total += reach
    return total


def expected_tokens_iid(alpha: float, k: int) -> float:
    """The same with one α for every position: (1 − α^{k+1}) / (1 − α) (Leviathan, arXiv 2211.17192, equation 1)."""
    return expected_tokens([alpha] * k)


# --- Closed form --------------------------------------------------------------------------------------------------------------


def modelled_speedup(alpha: float, k: int, c: float, v: float = 1.0, *, parallel: bool = False) -> float:
    """S = E / (v + k·c); a head that drafts all k tokens in one pass (`parallel`) costs c once: S = E / (v + c)."""
    return expected_tokens_iid(alpha, k) / (v + (c * (k > 0) if parallel else k * c))


def modelled_best_k(alpha: float, c: float, v: float = 1.0, max_k: int = 64) -> tuple[int, float]:
    """(k, S) with the largest speed-up of sequential drafting. k = 0, S = 1 is no speculation, which verifies nothing (v = 1)."""
    choices = [(1.0, 0)] + [(modelled_speedup(alpha, k, c, v), -k) for k in range(1, max_k + 1)]
    speedup, negative_k = max(choices)
    return -negative_k, speedup


def one_more_pays(alpha: float, k: int, c: float, v: float = 1.0) -> bool:
    """Whether k+1 drafts are faster than k: α^{k+1} > c / (v + k·c) · E(k). Holds until the best k and never after it."""
    return alpha ** (k + 1) > c / (v + k * c) * expected_tokens_iid(alpha, k)


def operations_inflation(alpha: float, k: int, c_ops: float) -> float:
    """Arithmetic per token relative to no speculation: (1 − α)(k·ĉ + k + 1) / (1 − α^{k+1}); ĉ = draft / target operations per token."""
    return (k * c_ops + k + 1) / expected_tokens_iid(alpha, k)


def active_experts(num_experts: int, top_k: int, num_tokens: int) -> float:
    """Experts a MoE layer reads for n tokens, E(1 − (1 − top_k/E)^n), routing taken as uniform. Why v grows at once for MoE targets."""
    return num_experts * (1 - (1 - top_k / num_experts) ** num_tokens)


def break_even_acceptance(k: int, relative_cost: float) -> float | None:
    """The α at which k drafts a round are as fast as none: E(α, k) = cost of a round / cost of a decode step.

    0.0 where speculation wins whatever is accepted; None where it cannot win even with everything accepted.
    """
    if relative_cost <= 1:
        return 0.0
    if relative_cost > k + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(60):  # E rises with α: halve the interval down to the last bit
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tokens_iid(middle, k) < relative_cost else (low, middle)
    return high


# --- Measured -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RoundCost:
    """Seconds that one round takes for the whole batch (every request in it does one round). For k = 0: one plain decode step."""

    draft: float
    verify: float
    overhead: float = 0.0  # everything else: scheduling, sampling, rolling the cache back

    @property
    def total(self) -> float:
        return self.draft + self.verify + self.overhead


@dataclass(frozen=True)
class Entry:
    """One line of the ledger: k drafts a round at one concurrency."""

    concurrency: int
    k: int
    tokens_per_round: float  # of one request
    cost: RoundCost
    tokens_per_second: float  # of the whole batch
    speedup: float  # over k = 0 at the same concurrency
    break_even_alpha: float | None  # α at which this k would only just pay


def ledger(conditional: Sequence[float], costs: Mapping[int, Mapping[int, RoundCost]]) -> list[Entry]:
    """Every measured (concurrency, k) with what it yields.

    Args:
        conditional: a_1..a_K, measured with at least as many drafts as the largest k below (the first k hold for a shorter chain too).
        costs: {concurrency: {k: cost}}; each concurrency needs k = 0, the baseline without speculation.
    """
    entries = []
    for concurrency, by_k in sorted(costs.items()):
        if 0 not in by_k:
            raise EngineError(f"no baseline (k = 0) was measured at concurrency {concurrency}; add `baseline` to eval.methods.")
        for k, cost in sorted(by_k.items()):
            if k > len(conditional):
                raise EngineError(
                    f"a cost was measured for k={k} but acceptances only for {len(conditional)} positions; "
                    f"measure with eval.k: [{k}] or leave that k out."
                )
            tokens = expected_tokens(conditional[:k])
            relative = cost.total / by_k[0].total
            entry = Entry(
                concurrency, k, tokens, cost, concurrency * tokens / cost.total, tokens / relative, break_even_acceptance(k, relative)
            )
            entries.append(entry)
    return entries


def best_k(entries: Sequence[Entry]) -> dict[int, Entry]:
    """The fastest entry of each concurrency; on a tie the smaller k. k = 0 where speculation does not pay."""
    best: dict[int, Entry] = {}
    for entry in sorted(entries, key=lambda e: (e.concurrency, e.k)):
        if entry.concurrency not in best or entry.tokens_per_second > best[entry.concurrency].tokens_per_second:
            best[entry.concurrency] = entry
    return best


def dynamic_schedule(k_by_concurrency: Mapping[int, int], max_batch_size: int) -> list[list[int]]:
    """vLLM's `num_speculative_tokens_per_batch_size`: [[first, last, k], ...], inclusive, from 1 to `max_batch_size` without gaps.

    A batch size between two measured ones takes the k of the larger, which is the safer: more load never makes more drafts pay. Sizes above
    the largest measured take its k, as vLLM does with the tail.

    >>> dynamic_schedule({1: 5, 8: 3, 32: 0}, max_batch_size=64)
    [[1, 1, 5], [2, 8, 3], [9, 64, 0]]
    """
    if not k_by_concurrency or min(k_by_concurrency) < 1 or max_batch_size < 1:
        raise RecipeError(
            f"a schedule needs k for at least one concurrency >= 1 and a batch size >= 1, not {dict(k_by_concurrency)}, {max_batch_size}."
        )
    schedule: list[list[int]] = []
    first = 1
    measured = sorted(k_by_concurrency.items())
    for i, (concurrency, k) in enumerate(measured):
        last = max_batch_size if i == len(measured) - 1 else min(concurrency, max_batch_size)
        if first > last:
            break
        if schedule and schedule[-1][2] == k:
            schedule[-1][1] = last
        else:
            schedule.append([first, last, k])
        first = last + 1
    return schedule
