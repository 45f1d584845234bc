"""Measure what a head is worth: in vLLM, against the same target without speculation and with n-gram drafts.

    python -m eval recipes/smollm2-135m/quickstart.yaml
    python -m eval recipes/smollm2-135m/quickstart.yaml eval.k=[1,3,5] eval.prompts=[mt_bench] eval.concurrency=[1,8]

Ends with a table, the command that serves the head, and report.json, report.md and report.html in reports/NAME. Keys of the recipe
that matter here (docs/recipe.md has all):

    eval.methods                           of baseline, ngram, suffix, head
    eval.prompts                           embedded:eval, embedded:repetitive, mt_bench, humaneval, or files
    eval.max_prompts, eval.max_tokens      how much is measured
    eval.k                                 drafted tokens a round
    eval.temperature, eval.concurrency     each is measured with each
    eval.engine                            vllm, or reference: plain PyTorch, with trees (eval.tree)

It may be interrupted and run again: cells that are already measured with the same recipe, head, prompts and vLLM are taken from
reports/NAME/cells.jsonl. Exit status: 0 measured, 1 a method failed, 2 nothing could be measured, 130 interrupted. Related:
python -m eval.parity (where the two engines part), python -m eval.bench (speed of the reference decoder).
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from typing import Any

from data_prep.progress import Progress
from data_prep.stop import stop_signals
from recipes.errors import HeadstartError
from recipes.folders import writable_folder
from recipes.schema import Recipe, load_recipe


def main(argv: list[str] | None = None) -> int:
    """The command line; 0 measured, 1 a method failed, 2 nothing could be measured, 130 interrupted."""
    parser = argparse.ArgumentParser(
        prog="python -m eval", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("recipe", help="a YAML file in recipes/")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="recipe values to override, for instance eval.k=[1,3,5]")
    args = parser.parse_args(argv)
    try:
        from heads.exported import with_own_target

        recipe = with_own_target(load_recipe(args.recipe, args.overrides))
        if recipe.eval.engine == "reference":
            from eval.reference import run  # type: ignore[import-not-found]
        else:
            run = run_in_vllm
        with stop_signals():
            report = run(recipe, args.recipe)
    except HeadstartError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted; finished cells are kept. Run the same command again to go on.", file=sys.stderr)
        return 130
    show(report, recipe, args.recipe, args.overrides)
    return 1 if any("error" in measured for measured in report["runs"]) else 0


def run_in_vllm(recipe: Recipe, recipe_path: str) -> dict[str, Any]:
    """Measure every cell that the recipe asks for and write the report; returns it.

    Raises:
        HeadstartError: target, export, prompts or vLLM are missing or do not fit each other.
    """
    from eval.prepare import check_export, engines_of, make_job, read_prompts
    from eval.report import build_report, write_report
    from eval.vllm_engine import finished_cells, run_cells
    from heads.target import read_target

    cfg, cells_file = recipe.eval, writable_folder(recipe.report_dir, "eval.dir") / "cells.jsonl"
    target = read_target(recipe.target)
    meta = check_export(recipe, target, recipe_path) if "head" in cfg.methods else None
    prompts = read_prompts(recipe)
    engines, impossible = engines_of(recipe, meta)
    job = make_job(recipe, target, prompts, engines)
    cells, done = len(engines) * len(job.cells()), len(finished_cells(job, cells_file))
    sets = ", ".join(f"{name} ({len(ids)} prompts)" for name, ids in prompts.items())
    print(
        f"measuring {', '.join(dict.fromkeys(e.method for e in engines))} on {sets}: k={cfg.k}, temperature={cfg.temperature}, "
        f"concurrency={cfg.concurrency}, {cells} cells{f' ({done} of them already in {cells_file})' if done else ''}; "
        f"vLLM's log: {cells_file.with_suffix('.log')}",
        flush=True,
    )
    for reason in dict.fromkeys(impossible.values()):
        print(f"left out: {reason}", flush=True)
    with Ticker() as ticker:
        records = run_cells(job, cells_file, ticker, impossible)
    report = build_report(recipe, records, prompts, meta, target.path)
    write_report(report, recipe.report_dir)
    return report


class Ticker:
    """Shows the engine's ticks: a line when an engine starts, a progress bar for each cell."""

    def __init__(self) -> None:
        self._cell: dict[str, Any] | None = None
        self._bar: Progress | None = None

    def __call__(self, tick: dict[str, Any]) -> None:
        name, cell = f"{tick['method']} k={tick['k']}" if tick["k"] else tick["method"], tick["cell"]
        if cell is None:
            self.__exit__()
            print(f"starting vLLM with {name}", flush=True)
        else:
            if self._bar is None or cell != self._cell:
                self.__exit__()
                label = f"{name}, {cell['prompts']}, T={cell['temperature']:g}, {cell['concurrency']} in flight"
                self._bar, self._cell = Progress(label, tick["total"], unit="requests"), cell
            self._bar.add(tick["done"] - self._bar.done, tick["tokens"] - self._bar.tokens)

    def __enter__(self) -> Ticker:
        return self

    def __exit__(self, *_: Any) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def show(report: dict[str, Any], recipe: Recipe, recipe_path: str, overrides: list[str]) -> None:
    """The tables, failures and findings on the terminal, where everything lies, and what to try next."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from eval.report import COLUMNS, LEGEND, failures_of, tables_of

    console = Console(highlight=False, soft_wrap=not sys.stdout.isatty(), width=None if sys.stdout.isatty() else 140)
    shown = [i for i, column in enumerate(COLUMNS) if column != "rate"]  # what fits into 80 columns
    for heading, rows in tables_of(report).items():
        console.print(f"\n{heading}", style="bold", markup=False)
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
        for i in shown:
            header = COLUMNS[i].replace("/", "\n/").replace("d-", "d-\n").replace(" p", "\np").replace("= ", "=\n")
            table.add_column(header, justify="left" if i == 0 else "right", no_wrap=True)
        for row in rows:
            table.add_row(*(row[i] for i in shown))
        console.print(table)
    console.print()
    console.print(LEGEND, style="dim", markup=False)
    for title, lines in (("failed", failures_of(report)), ("finding", report["findings"]), ("note", report["notes"])):
        for line in lines:
            console.print(f"{title}: " + line.replace("\n", "\n  - "), markup=False)
    print(f"\nreport         {recipe.report_dir / 'report.html'} (also report.md, report.json)")
    if report["export"]:
        print(f"exported head  {report['export']['dir']}")
    print(f"try next       {next_command(recipe, recipe_path, overrides)}")
    if report["export"] and recipe.eval.engine == "vllm":
        print(f"serve it       {serve_command(recipe, report['export'], report['target_folder'])}")


def serve_command(recipe: Recipe, export: dict[str, Any], target_folder: str) -> str:
    """How a server loads the head: beside the target, or inside it; `export` is headstart.json with its folder as `dir`."""
    served = export["speculative_config"] | {"num_speculative_tokens": recipe.eval.k[0]}
    model = target_folder
    if recipe.head.inside_target:
        model = export["dir"]
    else:
        served["model"] = export["dir"]
    command = ["vllm", "serve", model, "--speculative-config", json.dumps(served)]
    if overrides := export.get("llm_kwargs", {}).get("hf_overrides"):
        command += ["--hf-overrides", json.dumps(overrides)]
    return shlex.join(command)


def next_command(recipe: Recipe, recipe_path: str, overrides: list[str]) -> str:
    """The most telling measurement that this recipe did not make yet."""
    cfg = recipe.eval
    if "mt_bench" not in cfg.prompts:
        more = "eval.prompts=[mt_bench,humaneval]"
    elif len(cfg.k) == 1:
        more = "eval.k=[1,2,3,4,5]"
    else:
        more = "eval.concurrency=[1,4,16]"
    key = more.partition("=")[0]
    return shlex.join(["python", "-m", "eval", recipe_path, *(o for o in overrides if o.partition("=")[0] != key), more])


if __name__ == "__main__":
    sys.exit(main())
