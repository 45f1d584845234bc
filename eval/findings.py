"""What in a report a reader should not have to find out alone: one line each.

Counters that disagree, greedy output that speculation changed, a head that accepts next to nothing, a gap between what
training estimated and what the engine counted (the parity rule, DESIGN §8), requests longer than the head was trained for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from eval.greedy import TIE
from recipes.schema import Recipe

PARITY_GAP = 0.02  # AL against AL~
LOW_ACCEPTANCE = 1.1  # about what a head gives whose config does not describe it (B31)
CONFIG_FIELDS = (
    "layer ids (eagle_aux_hidden_state_layer_ids), norm_before_residual, norm_before_fc, fc_norm, norm_output, rope_parameters, "
    "draft_vocab_size with d2t, and the chat template it was trained on"
)
PARITY_CAUSES = (  # METHODS §15
    "other texts: AL~ is over held-out training rows, AL over these prompts; compare on the same texts with python -m train.estimate",
    "tapped layers guessed or off by one (vllm#50170, #43671): layer ids in config.json against `layers` in headstart.json",
    "a dropped config field: norm order, fc_norm, norm_output (vllm#38111, #11672)",
    "rope theta, scaling or partial factor lost in the export (speculators#574, #613)",
    "tokens shifted by one at the prompt's end (vllm#14647, #49406)",
    "d2t missing, or read as ids instead of offsets; a tied LM head left at random",
    "another chat template, system prompt, BOS or thinking mode than in training",
    "prompt + output longer than the trained length, or max_position_embeddings too small (vllm#48894)",
    "bfloat16 or float16 in the server, float32 in training",
)


def name_of(run: Mapping[str, Any]) -> str:
    """How a run is called in messages: `eagle3 k=3 on embedded:eval, T=0, concurrency 1`."""
    k = f" k={run['k']}" if run["k"] else ""
    return f"{run['method']}{k} on {run['prompts']}, T={run['temperature']:g}, concurrency {run['concurrency']}"


def findings(recipe: Recipe, runs: Sequence[Mapping[str, Any]], export: Mapping[str, Any] | None) -> list[str]:
    """All findings of a report's runs; one of several lines is a list under its first. `export` is the head's headstart.json."""
    runs = [run for run in runs if "error" not in run]
    lines = [line for run in runs for line in _about_run(recipe, run, runs)]
    lines += _low_acceptance(recipe, runs)
    lowest = min((run["concurrency"] for run in runs), default=1)  # acceptance does not depend on it: once is enough
    parity = [gap for run in runs if run["concurrency"] == lowest and (gap := _parity(run))]
    if parity:
        lines += [*parity, "\n".join(["Usual causes of a parity gap:", *PARITY_CAUSES])]
    return lines + list(_too_long(recipe, runs, export))


def _about_run(recipe: Recipe, run: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    where = name_of(run)
    counted = {"drafts": run["num_drafts"], "draft_tokens": run["num_draft_tokens"], "accepted_tokens": run["num_accepted_tokens"]}
    if run["counters"] is not None and run["counters"] != counted:
        yield f"{where}: the engine's counters say {run['counters']}, its per-request counts add up to {counted}. Do not trust this run."
    if run.get("lossless") is False:
        yield (
            f"{where}: verified by typical acceptance, which is NOT lossless: it writes other answers than the target would, so its "
            "acceptance and speed cannot be compared with those of lossless rules."
        )
    if missed := run.get("not_argmax"):
        widest = max(missed, key=lambda miss: miss["gap"])
        yield (
            f"{where}: {len(missed)} tokens of greedy answers are not the target's argmax. The widest: token {widest['token']} of request "
            f"{widest['request']}, whose logit lies {widest['gap']:.1e} below the best ({_cause(recipe, widest['gap'])}; METHODS §15.6)."
        )
    differing = [r["first_difference"] for r in run["requests"] if r["first_difference"] is not None]
    if differing:
        here = [other for other in runs if all(other[key] == run[key] for key in ("prompts", "temperature", "concurrency"))]
        gaps = [miss["gap"] for other in here for miss in other.get("not_argmax") or []]
        yield (
            f"{where}: greedy output is not the one without speculation in {len(differing)} of {len(run['requests'])} requests, "
            f"the earliest at token {min(differing)} ({_cause(recipe, max(gaps, default=None))}; METHODS §15.6)."
        )


def _cause(recipe: Recipe, gap: float | None) -> str:
    """Why greedy tokens may differ, given how far the target's logits lie apart there; None where only an engine's texts are known."""
    if recipe.target.dtype != "float32":
        return f"{recipe.target.dtype} kernels round k+1 tokens unlike one token, near ties flip; float32 tells whether that is all"
    if gap is None:
        return "in float32 only a tie may do this, anything else is a bug: `python -m eval.parity` tells the margin"
    return f"a tie: logits {gap:.1e} apart, rounding decides" if gap < TIE else "in float32 they should be equal: this is a bug"


def _low_acceptance(recipe: Recipe, runs: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    low = [run for run in runs if run["method"] == recipe.method and run["num_drafts"] and run["acceptance_length"] <= LOW_ACCEPTANCE]
    if low:
        best = max(low, key=lambda run: run["acceptance_length"])
        more = f" (and {len(low) - 1} more)" if len(low) > 1 else ""
        yield (
            f"{name_of(best)}{more}: an acceptance length of {best['acceptance_length']:.2f} is hardly more than none. If training "
            f"looked better, the server reads the head otherwise than training did; compare: {CONFIG_FIELDS} (B31)."
        )


def _parity(run: Mapping[str, Any]) -> str | None:
    estimate = run["acceptance_length_estimate"]
    if not estimate or abs(gap := run["acceptance_length"] / estimate - 1) <= PARITY_GAP:
        return None
    return (
        f"PARITY: {name_of(run)}: counted AL {run['acceptance_length']:.3f}, training estimated AL~ {estimate:.3f} ({gap:+.1%}). "
        f"AL~ is over held-out training rows, not these prompts: `python -m train.estimate RECIPE` takes the same texts on both sides, and "
        f"there more than {PARITY_GAP:.0%} is a bug of ours."
    )


def _too_long(recipe: Recipe, runs: Sequence[Mapping[str, Any]], export: Mapping[str, Any] | None) -> Iterator[str]:
    limit = (export or {}).get("trained_max_length")
    longer: Counter[str] = Counter()
    for run in runs:
        if limit and run["method"] == recipe.method:
            n = sum(r["prompt_tokens"] + r["new_tokens"] > limit for r in run["requests"])
            longer[run["prompts"]] = max(longer[run["prompts"]], n)
    for prompts, n in longer.items():
        if n:
            yield (
                f"{prompts}: {n} requests are longer (prompt + output) than the {limit} tokens that the head was trained on; what it "
                f"accepts beyond is untrained (E08). Train with a larger data.max_length, or lower eval.max_tokens."
            )
