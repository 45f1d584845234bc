"""The reference decoder's speed beside transformers' own assisted generation, in one run.

    python -m eval.bench recipes/smollm2-135m/eagle3.yaml [--prompts 8] [--layers 1] [key=value …]

Both decode greedily with the same drafts: an independent draft model made of the target's first layers (so each draft costs the
same on both sides), and n-gram lookup. The recipe's own head stands beside them where it has been exported. Contenders take turns
prompt by prompt, in alternating order, so that a busy machine is busy for all alike; where it is busy, compare the tokens per second of
CPU time. Committed tokens are those of the answers.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from eval.decode import Drafter, Settings, decode
from eval.drafters import Eagle2Drafter, HeadDrafter, ModelDrafter, NgramDrafter, NoDrafter, grows_trees
from eval.prepare import read_prompts
from eval.reference import eos_ids, load_target
from heads.exported import load_exported_head, with_own_target
from heads.precision import cast
from heads.target import read_target
from recipes.errors import HeadstartError, RecipeError
from recipes.schema import Recipe, load_recipe

Contender = Callable[[list[int]], tuple[list[int], float | None]]  # prompt → answer, seconds spent drafting (None: not known)


def first_layers(model: PreTrainedModel, count: int) -> PreTrainedModel:
    """A draft model that shares the target's embedding, first `count` layers, final norm and LM head.

    Raises:
        RecipeError: the target has fewer layers.
    """
    config = copy.deepcopy(model.config.get_text_config())
    if not 1 <= count <= config.num_hidden_layers:
        raise RecipeError(f"--layers {count}: the target has {config.num_hidden_layers} layers; give 1 to {config.num_hidden_layers}.")
    config.num_hidden_layers = count
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:count]
    draft = AutoModelForCausalLM.from_config(config, dtype=model.dtype, attn_implementation=config._attn_implementation)
    draft.load_state_dict(model.state_dict(), strict=False, assign=True)  # not strict: the other layers are not wanted
    draft.tie_weights()
    return draft.eval().requires_grad_(False).to(model.device)


def ours(model: PreTrainedModel, drafter: Drafter, settings: Settings) -> Contender:
    """The reference decoder with one drafter."""

    def answer(prompt: list[int]) -> tuple[list[int], float]:
        decoded = decode(model, [prompt], drafter, settings)
        return decoded.requests[0].answer, decoded.seconds["draft"]

    return answer


def theirs(model: PreTrainedModel, settings: Settings, draft: PreTrainedModel | None = None, **lookup: int) -> Contender:
    """transformers' generate, greedy, with a draft model or with fields of its generation config for n-gram lookup."""
    config = GenerationConfig(
        do_sample=False,
        max_new_tokens=settings.max_tokens,
        eos_token_id=sorted(settings.eos_ids) or None,
        pad_token_id=next(iter(sorted(settings.eos_ids)), 0),
        **lookup,
    )
    assistance = {"assistant_model": draft} if draft is not None else {}

    @torch.no_grad()
    def answer(prompt: list[int]) -> tuple[list[int], None]:
        ids = torch.tensor([prompt], device=model.device)
        out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config, **assistance)  # type: ignore[operator]
        return out[0, len(prompt) :].tolist(), None

    return answer


def contenders(recipe: Recipe, model: PreTrainedModel, settings: Settings, k: int, layers: int) -> dict[str, Contender]:
    """All that take part, by the name they are printed under."""
    model.generation_config = GenerationConfig()  # else `generate` adds what the target's file asks for, a repetition penalty say
    draft = first_layers(model, layers)
    assert draft.generation_config is not None
    # As ours: always k drafts, whatever became of the last ones.
    draft.generation_config.update(num_assistant_tokens=k, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0)
    cfg = recipe.eval
    result = {
        "transformers, no draft": theirs(model, settings),
        "reference, no draft": ours(model, NoDrafter(), settings),
        f"transformers, draft of {layers} layers, k={k}": theirs(model, settings, draft),
        f"reference, draft of {layers} layers, k={k}": ours(model, ModelDrafter(draft, model, k), settings),
        f"transformers, n-gram, k={k}": theirs(model, settings, prompt_lookup_num_tokens=k, max_matching_ngram_size=cfg.ngram_max),
        f"reference, n-gram, k={k}": ours(model, NgramDrafter(k, 1, cfg.ngram_max), settings),
    }
    if recipe.export_dir.is_dir():
        head = cast(load_exported_head(recipe.export_dir, read_target(recipe.target))[0], model.device, model.dtype)
        result[f"reference, {recipe.method}, k={k}"] = ours(model, HeadDrafter(head, model, k), settings)
        if grows_trees(head):
            tree = Eagle2Drafter(head, model, nodes=cfg.tree_nodes, depth=cfg.tree_depth, top_k=cfg.tree_top_k)
            result[f"reference, {recipe.method}, eagle2 tree"] = ours(model, tree, settings)
    return result


def bench(recipe: Recipe, prompts: list[list[int]], k: int, layers: int) -> list[dict[str, Any]]:
    """Let every contender answer every prompt; one line of figures each."""
    model = load_target(recipe)
    settings = Settings(
        max_tokens=recipe.eval.max_tokens,
        max_length=min(model.config.get_text_config().max_position_embeddings, max(map(len, prompts)) + recipe.eval.max_tokens + k + 1),
        eos_ids=eos_ids(recipe, model),
    )
    who = contenders(recipe, model, settings, k, layers)
    seconds, cpu, drafting = (dict.fromkeys(who, 0.0) for _ in range(3))
    answers: dict[str, list[list[int]]] = {name: [] for name in who}
    for number, prompt in enumerate([prompts[0], *prompts]):  # the first one warms up
        for name, contender in list(who.items())[:: -1 if number % 2 else 1]:
            if model.device.type == "cuda":
                torch.cuda.synchronize(model.device)
            began, began_cpu = time.perf_counter(), time.process_time()
            answer, drafted = contender(prompt)
            if number:
                seconds[name] += time.perf_counter() - began
                cpu[name] += time.process_time() - began_cpu
                drafting[name] += drafted or 0.0
                answers[name].append(answer)
        print(f"prompt {number} of {len(prompts)} done", file=sys.stderr, flush=True)
    plain = answers["transformers, no draft"]
    return [
        {
            "name": name,
            "tokens": sum(map(len, answers[name])),
            "seconds": seconds[name],
            "tokens_per_second": sum(map(len, answers[name])) / seconds[name],
            "tokens_per_cpu_second": sum(map(len, answers[name])) / cpu[name],
            "draft_share": drafting[name] / seconds[name] if name.startswith("reference") else None,
            "equal_answers": sum(a == b for a, b in zip(answers[name], plain, strict=True)),
            "prompts": len(prompts),
        }
        for name in who
    ]


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m eval.bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("recipe", help="a YAML file in recipes/")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="recipe values to override, for instance eval.max_tokens=64")
    parser.add_argument("--prompts", type=int, default=8, help="how many prompts of the recipe's first set (default 8)")
    parser.add_argument("--layers", type=int, default=1, help="how many of the target's first layers make up the draft model (default 1)")
    args = parser.parse_intermixed_args(argv)
    try:
        recipe = with_own_target(load_recipe(args.recipe, args.overrides))
        prompts = next(iter(read_prompts(recipe).values()))[: args.prompts]
        lines = bench(recipe, prompts, recipe.eval.k[0], args.layers)
    except HeadstartError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{'':44}  tokens/s  per CPU-s   tokens  drafting  = no draft")
    for line in lines:
        share = "" if line["draft_share"] is None else f"{line['draft_share']:.0%}"
        same = f"{line['equal_answers']}/{line['prompts']}"
        rates = f"{line['tokens_per_second']:8.1f}  {line['tokens_per_cpu_second']:9.1f}"
        print(f"{line['name']:44}  {rates}  {line['tokens']:7}  {share:>8}  {same:>10}")
    print(json.dumps(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
