"""Several reports side by side: one row a draft and k, one column a prompt set.

    python -m eval.compare reports/smollm2-135m-eagle3 reports/smollm2-135m-medusa …

Figures are the reports' own (vLLM's or the reference decoder's, as each says); nothing is measured here. Draft time is that of a
round, for all requests in flight, mean over the prompt sets. Parameters, speed, time and memory are those of the training run that
the export names.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from eval.metrics import seconds_drafting
from recipes.errors import HeadstartError

NOT_DRAFTS = ("baseline",)


def read_report(folder: Path) -> dict[str, Any]:
    """A report's JSON.

    Raises:
        HeadstartError: there is none.
    """
    path = folder / "report.json" if folder.is_dir() else folder
    if not path.is_file():
        raise HeadstartError(f"no report at {path}; make one with `python -m eval RECIPE`, or give the folder that it printed")
    return json.loads(path.read_text(encoding="utf-8"))


def rows_of(report: dict[str, Any]) -> list[dict[str, Any]]:
    """One row for each draft, k, temperature and concurrency of a report, its prompt sets side by side.

    Returns:
        {"report", "engine", "method", "k", "temperature", "cells": {prompt set: run}, "training": figures of the export or {}}
    """
    training = (report.get("export") or {}).get("training") or {}
    rows: dict[tuple, dict[str, Any]] = {}
    for run in report["runs"]:
        if run["method"] in NOT_DRAFTS or "error" in run:
            continue
        key = (run["method"], run["k"], run["temperature"], run["concurrency"])
        own = training if run["method"] not in ("ngram", "suffix") else {}
        head = {
            "report": report["name"],
            "engine": report["engine"],
            "method": run["method"],
            "k": run["k"],
            "temperature": run["temperature"],
        }
        rows.setdefault(key, head | {"cells": {}, "training": own})["cells"][run["prompts"]] = run
    return list(rows.values())


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as a Markdown table; a dash where a report does not hold the figure."""
    sets = list(dict.fromkeys(name for row in rows for name in row["cells"]))
    header = ["draft", "engine", "k", *(f"AL {name}" for name in sets), f"per position, {sets[0] if sets else ''}"]
    header += ["draft ms/round", "M parameters", "CPU-min", "training tokens/s", "peak GiB"]
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    for row in rows:
        first, training = row["cells"].get(sets[0], {}), row["training"]
        draft = [seconds for run in row["cells"].values() if (seconds := seconds_drafting(run))]
        seconds = training.get("seconds")
        cells = [
            f"{row['report']}: {row['method']}" + (f", T={row['temperature']:g}" if row["temperature"] else ""),
            row["engine"],
            str(row["k"]),
            *(_figure(row["cells"].get(name, {}).get("acceptance_length"), "{:.3f}") for name in sets),
            " ".join(f"{rate:.3f}".removeprefix("0") for rate in first.get("per_position", [])) or "–",
            _figure(1e3 * sum(draft) / len(draft) if draft else None, "{:.1f}"),
            _figure(training.get("trainable_parameters"), "{:.2f}", 1e-6),
            _figure(training.get("cpu_seconds"), "{:.1f}", 1 / 60),
            _figure(training["tokens"] / seconds if seconds else None, "{:.0f}"),
            _figure(training.get("peak_gib"), "{:.2f}"),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _figure(value: float | None, text: str, scale: float = 1.0) -> str:
    return "–" if value is None else text.format(value * scale)


def main(argv: Iterable[str] | None = None) -> int:
    """The command line; 2 where a report is missing."""
    parser = argparse.ArgumentParser(
        prog="python -m eval.compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("reports", nargs="+", type=Path, metavar="REPORT", help="folders of reports, or report.json files")
    args = parser.parse_args(None if argv is None else list(argv))
    try:
        print(table([row for folder in args.reports for row in rows_of(read_report(folder))]))
    except HeadstartError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
