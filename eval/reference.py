"""`eval.engine=reference`: the cells that `eval.vllm_engine` measures, measured by the reference decoder, in the same records.

    python -m eval recipes/smollm2-135m/eagle3.yaml eval.engine=reference
    python -m eval recipes/smollm2-135m/eagle3.yaml eval.engine=reference eval.tree=eagle2

Besides what vLLM tells: trees, candidate and draft-vocabulary coverage, the time of draft and verification apart, and for greedy
answers whether every token is the target's own (`eval.greedy`). It is right before it is fast; figures of speed are for comparing
its own methods with each other. Finished cells are kept in reports/NAME/reference.jsonl and not measured again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from eval.decode import Decoded, Drafter, Request, Settings, decode
from eval.drafters import Chooser, Eagle2Drafter, HeadDrafter, MedusaDrafter, NgramDrafter, NoDrafter, StaticTreeDrafter
from eval.greedy import lines_about, not_argmax
from eval.ledger import RoundCost, best_k, dynamic_schedule, ledger
from eval.metrics import candidate_coverage, count, draft_vocab_coverage
from eval.prepare import check_export, fingerprint_of, model_length, read_prompts
from eval.records import append_record, read_records
from eval.suffix import SuffixDrafter
from eval.target_cache import TargetCache
from eval.trees import check_fits, medusa_paths, rank_accuracies, rank_hits, shape_from_paths
from eval.verify import RULES, TorchDice
from eval.vllm_engine import Cell, threads
from heads.exported import load_exported_head
from heads.precision import cast
from heads.target import TargetParts, load_target_model, load_tokenizer, read_target
from recipes.errors import RecipeError
from recipes.folders import writable_folder
from recipes.schema import Recipe

WARM_UP_TOKENS = 8
CALIBRATION_PROMPTS = 16  # whose answers tell how often each rank of each Medusa head is right


@dataclass(frozen=True)
class Method:
    """One line of the report: who drafts, and how far ahead."""

    name: str
    k: int
    drafter: Drafter


@dataclass(frozen=True)
class Measured:
    """All cells of one recipe, with what the report needs beside them."""

    records: list[dict[str, Any]]
    prompts: dict[str, list[list[int]]]
    export: dict[str, Any] | None  # headstart.json
    target: TargetParts
    model: PreTrainedModel


def run(recipe: Recipe, recipe_path: str) -> dict[str, Any]:
    """Measure every cell that the recipe asks for and write the report; returns it. Raises what `measure_cells` raises."""
    from eval.report import build_report, write_report

    measured = measure_cells(recipe, recipe_path)
    report = build_report(recipe, measured.records, measured.prompts, measured.export, measured.target.path)
    report["ledger"] = list(ledgers(recipe, measured.records, max(recipe.eval.concurrency)))
    report["notes"] += lines_about(report["runs"])
    write_report(report, recipe.report_dir)
    return report


def measure_cells(recipe: Recipe, recipe_path: str) -> Measured:
    """Measure what reports/NAME/reference.jsonl does not hold yet.

    Raises:
        HeadstartError: target, export, prompts, tree or k do not fit each other.
    """
    from data_prep.progress import Progress

    target = read_target(recipe.target)
    meta = check_export(recipe, target, recipe_path) if "head" in recipe.eval.methods else None
    prompts = read_prompts(recipe)
    max_length = model_length(recipe, prompts, target.config.max_position_embeddings)
    model = load_target(recipe)
    head = cast(load_exported_head(recipe.export_dir, target)[0], model.device, model.dtype) if meta else None
    methods = methods_of(recipe, model, head)
    cells = [Cell(*c) for c in product(prompts, recipe.eval.temperature, recipe.eval.concurrency)]
    file = writable_folder(recipe.report_dir, "eval.dir") / "reference.jsonl"
    done = {key: record for key, record in read_records(file).items() if "error" not in record}
    todo = {
        key_of(recipe, target.fingerprint, method, cell, prompts[cell.prompts]): (method, cell) for method, cell in product(methods, cells)
    }
    requests = {key: len(prompts[cell.prompts]) for key, (_, cell) in todo.items()}
    with Progress("reference decoder", sum(requests.values()), sum(requests.get(key, 0) for key in done), unit="requests") as progress:
        for key, (method, cell) in todo.items():
            if key in done:
                continue
            record = {"key": key, "method": method.name, "k": method.k, **asdict(cell)}
            settings = settings_for(recipe, method.drafter, cell, max_length, model)
            record |= measure(model, prompts[cell.prompts], method.drafter, settings, cell.concurrency, progress)
            append_record(file, record)
            done[key] = record
    return Measured([done[key] for key in todo], prompts, meta, target, model)


def load_target(recipe: Recipe) -> PreTrainedModel:
    """The target, on the GPU where there is one; FlashAttention takes no tree mask, so such targets run with SDPA here."""
    attn = "sdpa" if recipe.target.attn == "flash_attention_2" else recipe.target.attn
    model = load_target_model(recipe.target.model_copy(update={"attn": attn}))
    return model.to("cuda") if torch.cuda.is_available() else model  # type: ignore[arg-type]


def methods_of(recipe: Recipe, model: PreTrainedModel, head: Any | None) -> list[Method]:
    """What the recipe asks for, the baseline first and always; a tree stands beside the chains of the same head.

    Raises:
        RecipeError, EngineError: k or a tree does not fit the head.
    """
    cfg, methods = recipe.eval, [Method("baseline", 0, NoDrafter())]
    if head is not None:
        sampled = cfg.draft_sample_method == "probabilistic"
        methods += [Method(recipe.method, k, HeadDrafter(head, model, k, sampled=sampled)) for k in cfg.k]
        if getattr(head, "target_layers", None) is not None:  # PARD-2 drafts both ways
            twin = head.with_target_states()
            methods += [Method(f"{recipe.method}, target states", k, HeadDrafter(twin, model, k, sampled=sampled)) for k in cfg.k]
        tree = None
        if cfg.tree == "eagle2":
            tree = Eagle2Drafter(head, model, nodes=cfg.tree_nodes, depth=cfg.tree_depth, top_k=cfg.tree_top_k)
        elif cfg.tree == "static":
            tree = StaticTreeDrafter(head, model, shape_from_paths(cfg.tree_paths or []), sampled=sampled)
        elif cfg.tree == "medusa":
            tree = calibrated_medusa(recipe, model, head)
        if tree is not None:
            methods.append(Method(f"{recipe.method}, {cfg.tree} tree", tree.depth, tree))
    if "suffix" in cfg.methods:
        methods += [Method("suffix", k, SuffixDrafter(k)) for k in cfg.k]
    if "ngram" in cfg.methods:
        methods += [Method("ngram", k, NgramDrafter(k, cfg.ngram_min, cfg.ngram_max)) for k in cfg.k]
    return methods


def settings_for(recipe: Recipe, drafter: Drafter, cell: Cell, max_length: int, model: PreTrainedModel) -> Settings:
    """Block verification is for sampled drafts; others are verified token by token, which is as good for them. The baseline has none."""
    rule = recipe.eval.verification
    tokenwise = drafter.depth == 0 or (rule == "block" and not drafter.sampled)
    return Settings(
        max_tokens=recipe.eval.max_tokens,
        max_length=max_length,
        temperature=cell.temperature,
        rule="tokenwise" if tokenwise else rule,
        eos_ids=eos_ids(recipe, model),
        seed=recipe.eval.seed,
    )


def eos_ids(recipe: Recipe, model: PreTrainedModel) -> frozenset[int]:
    """Tokens that end an answer, as vLLM finds them: the tokenizer's and those of generation_config.json."""
    own = load_tokenizer(recipe.target).eos_token_id
    given = model.generation_config.eos_token_id if model.generation_config else None
    return frozenset(i for i in [own, *(given if isinstance(given, list) else [given])] if isinstance(i, int))


def key_of(recipe: Recipe, target_fingerprint: str, method: Method, cell: Cell, prompts: list[list[int]]) -> str:
    """A hash of all that decides a cell's figures."""
    head = fingerprint_of(recipe.export_dir) if method.name.startswith(recipe.method) else ""
    ignored = {"engine", "methods", "prompts", "max_prompts", "k", "temperature", "concurrency", "dir"}  # the cell has them
    if not method.name.endswith(" tree"):
        ignored |= {key for key in type(recipe.eval).model_fields if key.startswith("tree")}
    settings = [recipe.eval.model_dump(mode="json", exclude=ignored), recipe.target.model_dump(mode="json"), target_fingerprint, head]
    settings += [method.name, method.k, asdict(cell), prompts, torch.__version__, torch.cuda.is_available(), threads()]
    if isinstance(method.drafter, MedusaDrafter):
        settings.append(method.drafter.shape)  # calibrated on prompts that the settings of a cell do not name
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def measure(
    model: PreTrainedModel, prompts: list[list[int]], drafter: Drafter, settings: Settings, concurrency: int, progress: Any
) -> dict[str, Any]:
    """Warm up, decode one prompt set, and tell it as vLLM does."""

    def tick(cache: TargetCache, active: list[Request]) -> None:
        finished = [request for request in active if request.finish_reason]
        progress.add(len(finished), sum(len(request.answer) for request in finished))

    warm_up = [prompt[::-1] for prompt in prompts[:concurrency]]
    decode(model, warm_up, drafter, replace(settings, max_tokens=WARM_UP_TOKENS), concurrency=concurrency)
    if isinstance(drafter, SuffixDrafter):
        drafter.forget()
    decoded = decode(model, prompts, drafter, settings, concurrency=concurrency, on_round=tick)
    record = record_of(decoded, drafter, settings)
    if settings.temperature == 0:
        record["figures"]["not_argmax"] = not_argmax(model, prompts, [request.answer for request in decoded.requests])
    return record


def record_of(decoded: Decoded, drafter: Drafter, settings: Settings) -> dict[str, Any]:
    """The fields of a record of `eval.vllm_engine.run_cells`, and under `figures` what only this engine tells."""
    counters = count(request.counts for request in decoded.requests)
    vocab = getattr(drafter, "vocab", None)
    written = [token for request in decoded.requests for token in request.answer[1:]]  # the first is the prefill's, never drafted
    rule = "greedy" if settings.temperature == 0 else settings.rule
    return {
        "requests": [request_of(request) for request in decoded.requests],
        "seconds": decoded.seconds["all"],
        "counters": {
            "drafts": counters.num_drafts,
            "draft_tokens": counters.num_draft_tokens,
            "accepted_tokens": counters.num_accepted_tokens,
        },
        "note": f"verification: {RULES[rule]}",
        "figures": {
            "candidate_coverage": candidate_coverage(pair for request in decoded.requests for pair in request.candidates),
            "draft_vocab_coverage": draft_vocab_coverage(written, vocab.ids.tolist()) if vocab else None,
            "round_seconds": asdict(decoded.round_cost),
            "lossless": rule != "typical",
        },
    }


def request_of(request: Request) -> dict[str, Any]:
    """One request as vLLM tells it: `kept` of the prefill and every round, the other counts of rounds with a draft."""
    drafts = [r for r in request.rounds if r.drafted]
    return {
        "prompt_tokens": len(request.prompt),
        "output_ids": request.answer,
        "finish_reason": request.finish_reason,
        "kept": [1, *(r.kept for r in request.rounds)],
        "accepted": [r.accepted for r in drafts],
        "drafted": [r.drafted for r in drafts],
        "depth": [r.depth for r in drafts],
    }


def ledgers(recipe: Recipe, records: Sequence[dict[str, Any]], max_batch_size: int) -> Iterator[dict[str, Any]]:
    """The cost model of `eval.ledger` for the head's chains: one entry a prompt set and temperature."""
    for prompts, temperature in product(recipe.eval.prompts, recipe.eval.temperature):
        here = [r for r in records if (r["prompts"], r["temperature"]) == (prompts, temperature) and "error" not in r]
        costs: dict[int, dict[int, RoundCost]] = {}
        for r in here:
            if r["method"] in ("baseline", recipe.method):
                costs.setdefault(r["concurrency"], {})[r["k"]] = RoundCost(**r["figures"]["round_seconds"])
        longest = max((r for r in here if r["method"] == recipe.method), key=lambda r: r["k"], default=None)
        if longest is None:
            continue
        counts = [request["accepted"] for request in longest["requests"]]
        accepted = [a for request in counts for a in request]
        reached = [sum(a >= i for a in accepted) for i in range(longest["k"] + 1)]
        conditional = [b / a if a else 0.0 for a, b in zip(reached, reached[1:], strict=False)]
        entries = ledger(conditional, costs)
        best = {concurrency: entry.k for concurrency, entry in best_k(entries).items()}
        yield {
            "prompts": prompts,
            "temperature": temperature,
            "entries": [asdict(entry) for entry in entries],
            "best_k": best,
            "num_speculative_tokens_per_batch_size": dynamic_schedule(best, max_batch_size),
        }


# --- Medusa's tree ------------------------------------------------------------------------------------------------------------


def calibrated_medusa(recipe: Recipe, model: PreTrainedModel, head: Any) -> MedusaDrafter:
    """Medusa's tree for this head, from the ranks of the target's own tokens in answers to prompts that are not measured.

    Raises:
        RecipeError: the tree does not fit the head, or eval.max_prompts leaves no prompt of the first set for calibration.
    """
    cfg = recipe.eval
    check_fits(cfg.tree_depth, cfg.tree_top_k, head_depth=head.block.max_depth, vocab_size=len(head.vocab.ids))
    if cfg.tree_nodes < 2:
        raise RecipeError(f"eval.tree_nodes={cfg.tree_nodes} leaves no room for a draft beside the root; set it to 2 or more.")
    spare = read_prompts(recipe.model_copy(update={"eval": cfg.model_copy(update={"max_prompts": None, "prompts": cfg.prompts[:1]})}))
    prompts = spare[cfg.prompts[0]][cfg.max_prompts or len(spare[cfg.prompts[0]]) :][:CALIBRATION_PROMPTS]
    if not prompts:
        raise RecipeError(
            f"eval.tree=medusa is calibrated on prompts that are not measured, but eval.max_prompts={cfg.max_prompts} takes all "
            f"{len(spare[cfg.prompts[0]])} of {cfg.prompts[0]}; lower eval.max_prompts."
        )
    settings = Settings(max_tokens=cfg.max_tokens, max_length=max(map(len, prompts)) + cfg.max_tokens, eos_ids=eos_ids(recipe, model))
    chain = HeadDrafter(head, model, cfg.tree_depth)
    answers = decode(model, prompts, NoDrafter(), settings, concurrency=len(prompts)).requests
    accuracies = calibrate(model, chain, [(request.prompt, request.answer) for request in answers], cfg.tree_top_k)
    paths = medusa_paths(accuracies, cfg.tree_nodes, max_children=cfg.tree_top_k)
    return MedusaDrafter(head, model, shape_from_paths(paths))


@torch.no_grad()
def calibrate(model: PreTrainedModel, chain: HeadDrafter, answers: Sequence[tuple[list[int], list[int]]], ranks: int) -> Tensor:
    """How often each depth's rank-r guess is the target's own token: accuracies [K, R] for `eval.trees.medusa_paths` (METHODS §1.5).

    Args:
        chain: drafts K tokens. answers: (prompt, greedy answer) token ids.
    """
    hits, counts = torch.zeros(chain.depth, ranks, dtype=torch.long), torch.zeros(chain.depth, dtype=torch.long)
    for prompt, answer in answers:
        tokens = prompt + answer
        cache = TargetCache(model, chain.layers)
        hidden = {layer: h[0] for layer, h in cache.prefill([tokens]).hidden.items()}
        request = Request(prompt, TorchDice(torch.Generator()), state=chain.start())
        begin, K = 0, chain.depth
        for end in range(len(prompt), len(tokens)):  # states 0..end-1 are known and token `end` is chosen
            request.tokens, request.hidden = tokens[: end + 1], {layer: h[begin:end] for layer, h in hidden.items()}
            chooser = Chooser(Settings(1, 1), request.dice, sampled=False)
            chain.propose(request, chooser)
            guesses = chain.ids[torch.cat(chooser.chosen_from).topk(ranks).indices]  # [K, R]
            labels = torch.tensor((tokens[end + 1 :] + [-1] * K)[:K], device=guesses.device)
            new_hits, new_counts = rank_hits(guesses[None], labels[None], labels[None] >= 0)
            hits, counts, begin = hits + new_hits.cpu(), counts + new_counts.cpu(), end
    return rank_accuracies(hits, counts)
