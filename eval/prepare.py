"""From a recipe to what an engine is to measure: the export checked, the prompts rendered, the engines listed."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from pathlib import Path
from typing import Any

import torch

from data_prep.prompt_sets import prompts_of
from data_prep.render import chat_tokenizer, render_prompt
from eval.vllm_engine import Engine, Job
from heads.exported import META_FILE, load_exported_head, read_config, read_meta
from heads.target import TargetParts, kv_cache_bytes
from recipes.errors import ExportError, RecipeError
from recipes.schema import Recipe

LIBRARY_FIELDS = {"transformers_version", "dtype", "torch_dtype", "_name_or_path"}  # of config.json; they say nothing about the head
SUFFIX_PACKAGE = "arctic-inference==0.1.1"


def check_export(recipe: Recipe, target: TargetParts, recipe_path: str = "RECIPE") -> dict[str, Any]:
    """headstart.json of the recipe's export, after comparing the export with its target, its tensors and what was trained.

    The head is rebuilt from the recipe that trained it, and every field it would write into config.json must be there with the
    same value: a server guesses what is missing, and accepts next to nothing then (B31).

    Raises:
        ExportError: no export (names the command that makes one), another method or target, a tensor or field that is missing or
            altered, or a head that drafts fewer tokens in a round than `eval.k` asks for.
    """
    folder = recipe.export_dir
    if not folder.is_dir():
        raise ExportError(
            f"no export at {folder}; make it with `accelerate launch train/{recipe.method}.py {recipe_path}`, or from a checkpoint of "
            f"the run with `python -m train.export {recipe.run_dir}`."
        )
    meta, config = read_meta(folder), read_config(folder)
    if meta["method"] != recipe.method:
        raise ExportError(
            f"{folder} holds a head of method {meta['method']!r}, the recipe says {recipe.method!r}; set export.dir to the right folder."
        )
    again = f"export it again: `python -m train.export {recipe.run_dir}`"
    try:
        head, trained = load_exported_head(folder, target)
    except KeyError as e:
        raise ExportError(f"{folder / 'config.json'} lacks {e}, which vLLM would guess; {again}.") from None
    reach = trained.head.max_depth
    if reach is not None and max(recipe.eval.k) > reach:
        raise ExportError(
            f"{folder} holds a head that drafts {reach} tokens in a round, and eval.k={recipe.eval.k} asks for {max(recipe.eval.k)}: "
            f"lower eval.k to {reach}, or train a head with more."
        )
    expected: dict[str, Any] = json.loads(json.dumps(head.served_config(), default=str))  # type: ignore[operator]
    faults = [
        f"{key} is {json.dumps(config[key]) if key in config else 'missing'}, trained was {json.dumps(value)}"
        for key, value in expected.items()
        if key not in LIBRARY_FIELDS and config.get(key, "missing") != value
    ]
    if faults:
        raise ExportError(f"{folder / 'config.json'} is not what {META_FILE} says was trained: {'; '.join(faults)}. Mend it, or {again}.")
    return meta


def read_prompts(recipe: Recipe) -> dict[str, list[list[int]]]:
    """Token ids of every prompt of every set (the first user turn), by the chat template that the head was trained on.

    Raises:
        DataError: unknown or unusable prompt set.
    """
    tokenizer = chat_tokenizer(recipe.target, recipe.data.chat_template, recipe.data.template_kwargs)
    prompts = {}
    for name in recipe.eval.prompts:
        chosen = prompts_of(recipe, name)[: recipe.eval.max_prompts]
        prompts[name] = [render_prompt(prompt.messages, tokenizer) for prompt in chosen]
    return prompts


def model_length(recipe: Recipe, prompts: dict[str, list[list[int]]], positions: int) -> int:
    """The engine's context: `eval.max_model_len`, or what the target allows up to 4096, shortened on a CPU to what is needed.

    Raises:
        RecipeError: a prompt and its answer do not fit.
    """
    limit = min(recipe.eval.max_model_len or 4096, positions)
    name, longest = max(((name, len(ids)) for name, rows in prompts.items() for ids in rows), key=lambda item: item[1])
    needed = longest + recipe.eval.max_tokens
    if needed > limit:
        raise RecipeError(
            f"eval.prompts: the longest prompt of {name} has {longest} tokens and eval.max_tokens={recipe.eval.max_tokens} come on top: "
            f"{needed}, but the engine's context is {limit} (eval.max_model_len={recipe.eval.max_model_len}, target: {positions}). "
            f"Lower eval.max_tokens or raise eval.max_model_len."
        )
    if torch.cuda.is_available():
        return limit
    return min(limit, -(-(needed + max(recipe.eval.k) + 1) // 64) * 64)


def engines_of(recipe: Recipe, meta: dict[str, Any] | None) -> tuple[list[Engine], dict[Engine, str]]:
    """The engines that the recipe asks for, baseline first and always, and those that cannot start, with the reason."""
    cfg = recipe.eval
    engines, impossible = [Engine("baseline")], {}
    if "head" in cfg.methods and meta is not None:
        served = {"method": recipe.method} | meta.get("speculative_config", {})
        more = dict(meta.get("llm_kwargs", {}))
        (more if recipe.head.inside_target else served)["model"] = str(recipe.export_dir)
        if cfg.draft_sample_method != "greedy":
            served["draft_sample_method"] = cfg.draft_sample_method
        fingerprint = fingerprint_of(recipe.export_dir)
        for k in cfg.k:
            engines.append(Engine(recipe.method, k, served | {"num_speculative_tokens": k}, more, fingerprint))
    if "suffix" in cfg.methods:
        suffix = [Engine("suffix", k, {"method": "suffix", "num_speculative_tokens": k}) for k in cfg.k]
        if importlib.util.find_spec("arctic_inference") is None:
            reason = (
                f"eval.methods: suffix needs the package {SUFFIX_PACKAGE} in vLLM: pip install 'headstart[suffix]', or drop suffix from "
                "eval.methods, or set eval.engine=reference (E03)"
            )
            impossible = dict.fromkeys(suffix, reason)
        engines += suffix
    if "ngram" in cfg.methods:
        lookup = {"prompt_lookup_max": cfg.ngram_max, "prompt_lookup_min": cfg.ngram_min}
        engines += [Engine("ngram", k, {"method": "ngram", "num_speculative_tokens": k} | lookup) for k in cfg.k]
    return engines, impossible


def fingerprint_of(folder: Path) -> str:
    """A hash of an export's config.json and weights (PARD-2's projection lies one folder down): a head trained anew is measured anew."""
    digest = hashlib.sha256()
    for file in sorted([folder / "config.json", *folder.rglob("*.safetensors")]):
        with file.open("rb") as f:
            digest.update(hashlib.file_digest(f, "sha256").digest())
    return digest.hexdigest()[:16]


def make_job(recipe: Recipe, target: TargetParts, prompts: dict[str, list[list[int]]], engines: list[Engine]) -> Job:
    """The job for `eval.vllm_engine.run_cells`."""
    cfg = recipe.eval
    length = model_length(recipe, prompts, target.config.max_position_embeddings)
    more = {"seed": cfg.seed, "tensor_parallel_size": recipe.target.tp, "trust_remote_code": recipe.target.trust_remote_code}
    cpu = not torch.cuda.is_available()
    return Job(
        llm=llm_arguments(target.path, target.config, recipe.target.dtype, length, max(cfg.concurrency), cpu, **more),
        target_fingerprint=target.fingerprint,
        engines=engines,
        prompts=prompts,
        temperature=cfg.temperature,
        concurrency=cfg.concurrency,
        max_tokens=cfg.max_tokens,
        cpu=cpu,
    )


def llm_arguments(
    target_path: Path, text_config: Any, dtype: str, max_model_len: int, concurrency: int, cpu: bool, **more: Any
) -> dict[str, Any]:
    """vLLM's engine arguments for measuring one target.

    Prefix caching is off, so that no request is sped up by an earlier one and methods are timed alike. On a CPU the engine is
    eager with a KV cache just large enough (VLLM_FORMATS §13): the requests in flight at full length, and as much again for
    a drafting model. On CUDA, memory and graphs are left to vLLM.
    """
    args: dict[str, Any] = {
        "model": str(target_path),
        "dtype": dtype,
        "max_model_len": max_model_len,
        "max_num_seqs": concurrency,
        "enable_prefix_caching": False,
        "disable_log_stats": False,
        **more,
    }
    if cpu:
        args["enforce_eager"] = True
        args["kv_cache_memory_bytes"] = max(2 * kv_cache_bytes(text_config, dtype) * (max_model_len + 256) * concurrency, 64 << 20)
        args["max_num_batched_tokens"] = max(512, min(max_model_len, 2048), concurrency)
    return args
