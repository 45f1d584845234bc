"""The parity rule, request by request: the reference decoder and vLLM must accept the same drafts (DESIGN §8).

    python -m eval.parity recipes/smollm2-135m/eagle3.yaml eval.max_prompts=50

Measures the recipe's greedy cells in both engines (finished cells are taken from reports/NAME) and compares what each request had
accepted in each round. Where they part, it says at which token of the answer, and how far the target's best two logits lie apart
there: a margin near 0 is rounding, a wide one a bug.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from eval.findings import PARITY_GAP
from eval.greedy import TIE
from eval.report import first_difference, rounds_of
from heads.exported import with_own_target
from recipes.errors import HeadstartError
from recipes.schema import load_recipe

Margin = Callable[[int, int], float]  # (request, token of its answer) → the target's logit margin there


@dataclass(frozen=True)
class Difference:
    """Where two engines part in one request."""

    request: int
    token: int  # index in the answer at which the round's outcome differs
    accepted: tuple[int | None, int | None]  # of that round, ours and vLLM's; None: no such round
    same_text: bool  # the answers are equal: only drafts differ
    margin: float | None  # best minus second-best logit of the target at that token


@dataclass(frozen=True)
class Parity:
    """What `compare_requests` found."""

    requests: int
    differences: list[Difference]
    acceptance_length: tuple[float, float]  # ours, vLLM's

    @property
    def equal_share(self) -> float:
        """Share of requests whose accepted counts are equal in every round."""
        return 1 - len(self.differences) / self.requests

    @property
    def gap(self) -> float:
        """Relative difference of the acceptance lengths."""
        ours, theirs = self.acceptance_length
        return abs(ours - theirs) / theirs

    def lines(self) -> list[str]:
        """For a person: a summary, then one line a difference."""
        ours, theirs = self.acceptance_length
        summary = (
            f"{self.requests - len(self.differences)} of {self.requests} requests ({self.equal_share:.0%}) accept the same in every round; "
            f"acceptance length {ours:.3f} (reference) and {theirs:.3f} (vLLM), {self.gap:.1%} apart"
        )
        return [summary] + [
            f"  request {d.request}: at token {d.token} of the answer the reference accepts {d.accepted[0]}, vLLM {d.accepted[1]}; "
            + ("same text" if d.same_text else "the texts part")
            + ("" if d.margin is None else f"; logit margin of the target {d.margin:.2e}{' (a tie)' * (d.margin < TIE)}")
            for d in self.differences
        ]


def compare_requests(ours: Sequence[Mapping[str, Any]], vllm: Sequence[Mapping[str, Any]], margin: Margin | None = None) -> Parity:
    """Compare `requests` of a record of each engine: same prompts, same order, same head, temperature 0.

    Args:
        margin: usually `logit_margin(model, prompts, ours)`; None leaves margins out.
    """
    differences = []
    for number, (mine, theirs) in enumerate(zip(ours, vllm, strict=True)):
        a, b = rounds_of(mine), rounds_of(theirs)
        text = first_difference(mine["output_ids"], theirs["output_ids"])
        if (part := first_difference(a.accepted, b.accepted)) is None and text is None:
            continue
        token, pair = len(mine["output_ids"]), (None, None)
        if part is not None:
            pair = (a.accepted[part] if part < len(a.accepted) else None, b.accepted[part] if part < len(b.accepted) else None)
            token = a.first_tokens + sum(x + 1 for x in a.accepted[:part]) + min(x for x in pair if x is not None)
        # Texts that part inside a round part there, whatever the counts say.
        token = token if text is None else min(token, text)
        gap = margin(number, token) if margin is not None and token < len(mine["output_ids"]) else None
        differences.append(Difference(number, token, pair, text is None, gap))
    return Parity(len(ours), differences, (_acceptance_length(ours), _acceptance_length(vllm)))


def _acceptance_length(requests: Sequence[Mapping[str, Any]]) -> float:
    accepted = [a for request in requests for a in request["accepted"]]
    return 1 + sum(accepted) / len(accepted) if accepted else 1.0


def logit_margin(model: PreTrainedModel, prompts: Sequence[Sequence[int]], requests: Sequence[Mapping[str, Any]]) -> Margin:
    """The target's best minus second-best logit where token i of a request's answer was chosen, from a forward without a cache."""

    @torch.no_grad()
    def margin(request: int, token: int) -> float:
        ids = [*prompts[request], *requests[request]["output_ids"][:token]]
        logits = model(torch.tensor([ids], device=model.device), use_cache=False, logits_to_keep=1).logits[0, -1].float()
        best, second = logits.topk(2).values.tolist()
        return best - second

    return margin


def main(argv: list[str] | None = None) -> int:
    """The command line; 0 where every method is within the rule (95 % of requests equal, acceptance length within 2 %)."""
    parser = argparse.ArgumentParser(
        prog="python -m eval.parity", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("recipe", help="a YAML file in recipes/")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="recipe values to override")
    args = parser.parse_args(argv)
    try:
        return compare_engines(args.recipe, args.overrides)
    except HeadstartError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def compare_engines(recipe_path: str, overrides: list[str]) -> int:
    """Measure in both engines, compare method by method, print; 1 where the rule is broken or a cell failed."""
    from eval.__main__ import Ticker
    from eval.prepare import engines_of, make_job
    from eval.reference import measure_cells
    from eval.vllm_engine import run_cells

    fixed = ["eval.temperature=[0.0]", "eval.tree=chain"]
    recipe = load_recipe(recipe_path, [*overrides, *fixed, "eval.engine=reference"])
    if recipe.head.not_served:
        print(f"not compared: {recipe.head.not_served}")
        return 0
    ours = measure_cells(with_own_target(recipe), recipe_path)
    recipe = with_own_target(load_recipe(recipe_path, [*overrides, *fixed, "eval.engine=vllm"]))
    engines, impossible = engines_of(recipe, ours.export)
    job = make_job(recipe, ours.target, ours.prompts, engines)
    with Ticker() as ticker:
        theirs = {place(r): r for r in run_cells(job, recipe.report_dir / "cells.jsonl", ticker, impossible)}
    broken = False
    for record in ours.records:
        other = theirs.get(place(record))
        if other is None:
            print(f"{record['method']} k={record['k']} on {record['prompts']}: vLLM has no such cell")
            broken |= "target states" not in record["method"]  # PARD-2 with them, which vLLM does not run
            continue
        name = f"{record['method']} k={record['k']} on {record['prompts']}, {record['concurrency']} in flight"
        if reason := record.get("error") or other.get("error"):
            print(f"{name}: not compared: {reason}")
            broken = True
            continue
        margin = logit_margin(ours.model, ours.prompts[record["prompts"]], record["requests"])
        parity = compare_requests(record["requests"], other["requests"], margin)
        print(f"{name}: " + "\n".join(parity.lines()))
        broken |= parity.equal_share < 0.95 or parity.gap > PARITY_GAP
    return int(broken)


def place(record: Mapping[str, Any]) -> tuple[Any, ...]:
    """What tells the cells of one recipe apart."""
    return tuple(record[key] for key in ("method", "k", "prompts", "temperature", "concurrency"))


if __name__ == "__main__":
    sys.exit(main())
