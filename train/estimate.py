"""AL~ over the very texts that an engine decoded: estimate and count of the same tokens (the parity rule, DESIGN §8).

    python -m train.estimate recipes/smollm2-135m/eagle3.yaml

AL~ of a training run is over held-out rows, AL over the prompts of `eval`: other texts, so another acceptance length. This takes
the head's greedy answers out of reports/NAME (vLLM's `cells.jsonl`, and the reference decoder's `reference.jsonl` where there is one),
runs the target over them in float32 as extraction does, and lets the objective's own validation count the rounds.
What differs then, training does differently from serving.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import PreTrainedModel

from data_prep.extract import load_extraction_model, online_features
from data_prep.prompt_sets import prompts_of
from data_prep.render import chat_tokenizer, render_prompt
from data_prep.store import RowFeatures
from heads.exported import load_exported_head, with_own_target
from heads.target import read_target
from recipes.errors import DataError, HeadstartError
from recipes.lines import read_lines
from recipes.schema import Recipe, load_recipe
from train.objective import objective_class
from train.validate import validate

ENGINES = {"vLLM": "cells.jsonl", "reference decoder": "reference.jsonl"}
GAP = 0.02  # of AL against AL~: more is a fault


@dataclass
class DecodedTexts:
    """Prompts with an engine's greedy answers, offered as the rows that `validate` reads."""

    prompts: Sequence[Sequence[int]]
    answers: Sequence[Sequence[int]]
    model: PreTrainedModel
    batch_tokens: int

    def __post_init__(self):
        self.lengths = torch.tensor([len(p) + len(a) for p, a in zip(self.prompts, self.answers, strict=True)])
        self.greedy = torch.ones(len(self.prompts), dtype=torch.bool)
        self.manifest = self  # `validate` asks it for the width alone
        self.hidden_size: int = self.model.config.get_text_config().hidden_size

    def read_rows(self, rows: list[int], layers: list[int]) -> list[RowFeatures]:
        """Rows with the target's states; the answer is supervised."""
        tokens: list[Tensor] = [torch.tensor([*self.prompts[row], *self.answers[row]]) for row in rows]
        masks = [torch.arange(len(ids)) >= len(self.prompts[row]) for row, ids in zip(rows, tokens, strict=True)]
        return online_features(self.model, tokens, masks, layers, self.batch_tokens)


def whole_rounds(request: Mapping[str, Any], k: int) -> list[int]:
    """Accepted counts of a request's rounds whose k drafts all lie inside its answer: those that AL~ counts too.

    >>> whole_rounds({"output_ids": [5, 6, 7, 8, 9], "accepted": [1, 0, 1]}, 2)
    [1, 0]
    """
    rounds, at = [], 0  # the round at index i of the answer has chosen token i, and drafts tokens i + 1 … i + k
    for accepted in request["accepted"]:
        if at + k > len(request["output_ids"]) - 1:
            break
        rounds.append(accepted)
        at += accepted + 1
    return rounds


def head_cells(recipe: Recipe, file: str) -> dict[tuple[str, int], dict[str, Any]]:
    """{(prompt set, k): the newest finished greedy chain of the head} of an engine's file of cells; empty where there is none."""
    cells = {}
    for cell in read_lines(recipe.report_dir / file):
        if cell["method"] == recipe.method and cell["temperature"] == 0 and "error" not in cell:
            cells[cell["prompts"], cell["k"]] = cell
    return cells


def compare(recipe: Recipe) -> Iterator[tuple[str, float, float]]:
    """(which cell, AL counted, AL~ estimated) for every greedy cell of the head in the recipe's report folder.

    Raises:
        DataError: the folder holds no such cell.
    """
    cells = [(engine, *place, cell) for engine, file in ENGINES.items() for place, cell in head_cells(recipe, file).items()]
    if not cells:
        raise DataError(
            f"{recipe.report_dir} holds no greedy cell of {recipe.method} ({', '.join(ENGINES.values())}); "
            "run `python -m eval RECIPE` with the same overrides first"
        )
    recipe = with_own_target(recipe)
    target = read_target(recipe.target)
    head, trained = load_exported_head(recipe.export_dir, target)
    lengths = sorted({k for _, _, k, _ in cells})
    longest = lengths[-1]
    if head.block.max_depth is None and getattr(head.block, "unroll_steps", longest) < longest:  # it drafts further than it was trained
        head.block = head.block.model_copy(update={"unroll_steps": longest})
    # Medusa-2's heads are Medusa's once the target is the adapted one.
    objective = objective_class({"medusa2": "medusa"}.get(trained.method, trained.method))(head, target, trained.objective)
    layers, accelerator, model = head.block.feature_layers(target.num_layers), Accelerator(), load_extraction_model(recipe.target)
    objective.to(accelerator.device)
    tokenizer = chat_tokenizer(recipe.target, recipe.data.chat_template, recipe.data.template_kwargs)
    estimates: dict[str, dict[int, float]] = {}  # most cells of a prompt set hold the same answers: they are estimated once
    for engine, name, k, cell in cells:
        answers = [request["output_ids"] for request in cell["requests"]]
        if (key := f"{name} {answers}") not in estimates:
            prompts = [render_prompt(p.messages, tokenizer) for p in prompts_of(recipe, name)[: len(answers)]]
            texts, rows = DecodedTexts(prompts, answers, model, recipe.features.batch_tokens), list(range(len(prompts)))
            estimates[key] = validate(objective, texts, rows, layers, trained.train.micro_batch_tokens, accelerator, lengths)["al"]
        estimate = estimates[key]
        rounds = [accepted for request in cell["requests"] for accepted in whole_rounds(request, k)]
        where = f"{recipe.method} k={k} on {name}, {engine}"
        if k in estimate and rounds:
            yield where, 1 + sum(rounds) / len(rounds), estimate[k]
        else:
            longer = f"the objective counts chains of up to {max(estimate, default=0)} drafts"
            reason = longer if rounds else "no answer holds a whole round"
            print(f"{where}: not compared: {reason}", flush=True)


def main(argv: Iterable[str] | None = None) -> int:
    """The command line; 1 where a cell is more than 2 % off, 2 for an error."""
    parser = argparse.ArgumentParser(
        prog="python -m train.estimate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("recipe", help="a YAML file in recipes/")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="recipe values to override")
    args = parser.parse_args(None if argv is None else list(argv))
    worst = 0.0
    try:
        for name, counted, estimated in compare(load_recipe(args.recipe, args.overrides)):
            gap = estimated / counted - 1
            worst = max(worst, abs(gap))
            print(f"{name}: AL {counted:.3f}, AL~ {estimated:.3f} ({gap:+.1%})", flush=True)
    except HeadstartError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return int(worst > GAP)


if __name__ == "__main__":
    sys.exit(main())
