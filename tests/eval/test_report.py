"""The report: figures from counts, what it finds wrong, and its three files."""

import json
from pathlib import Path
from typing import Any

import pytest

from eval.findings import findings
from eval.metrics import DEFINITIONS
from eval.report import (
    COLUMNS,
    build_report,
    failures_of,
    first_difference,
    learning_curve,
    rounds_of,
    tables_of,
    to_markdown,
    write_report,
)
from recipes.errors import EngineError
from recipes.schema import Recipe, load_recipe

PROMPTS = {"few": [[1, 2, 3], [4, 5]]}


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    """The debug recipe with every folder in a temporary place."""
    folders = [f"{key}.dir={tmp_path / key}" for key in ("train", "export", "eval")]
    return load_recipe("recipes/debug/eagle3.yaml", folders)


def request(
    kept: list[int], accepted: list[int], drafted: list[int], ids: list[int] | None = None, prompt_tokens: int = 3
) -> dict[str, Any]:
    """One request as the engine reports it."""
    ids = list(range(sum(kept))) if ids is None else ids
    return {
        "prompt_tokens": prompt_tokens,
        "output_ids": ids,
        "finish_reason": "length",
        "kept": kept,
        "accepted": accepted,
        "drafted": drafted,
    }


def record(
    method: str, k: int, requests: list[dict[str, Any]], seconds: float = 2.0, temperature: float = 0.0, **more: Any
) -> dict[str, Any]:
    """One cell as the engine reports it; counters that agree unless given."""
    counters = {
        "drafts": sum(len(r["accepted"]) for r in requests),
        "draft_tokens": sum(sum(r["drafted"]) for r in requests),
        "accepted_tokens": sum(sum(r["accepted"]) for r in requests),
    }
    place = {"prompts": "few", "temperature": temperature, "concurrency": 1}
    return {"method": method, "k": k, **place, "requests": requests, "seconds": seconds, "counters": counters, "note": None} | more


PLAIN = [request([1] * 8, [], []), request([1] * 4, [], [])]
DRAFTED = [request([1, 3, 1, 3], [2, 0, 2], [3, 3, 3]), request([1, 2, 1], [1, 3], [3, 3])]  # the last round is cut by max_tokens


def report_of(recipe: Recipe, records: list[dict[str, Any]], export: dict[str, Any] | None = None) -> dict[str, Any]:
    return build_report(recipe, records, PROMPTS, export, Path("targets/tiny-llama"))


def test_figures_follow_from_the_counts(recipe: Recipe):
    """AL includes the bonus token, per-position rates are unconditional, speed is a ratio over the baseline of the same place (B40)."""
    baseline, run = report_of(recipe, [record("baseline", 0, PLAIN, 4.0), record("eagle3", 3, DRAFTED)])["runs"]
    assert (baseline["acceptance_length"], baseline["acceptance_rate"], baseline["per_position"]) == (1.0, None, [])
    assert (run["num_drafts"], run["num_accepted_tokens"], run["num_draft_tokens"]) == (5, 8, 15)
    assert run["acceptance_length"] == pytest.approx(1 + 8 / 5)
    assert run["acceptance_rate"] == pytest.approx(8 / 15)
    assert run["per_position"] == pytest.approx([4 / 5, 3 / 5, 1 / 5])
    assert run["conditional"] == pytest.approx([4 / 5, 3 / 4, 1 / 3])
    assert run["output_tokens_per_second"] == pytest.approx(12 / 2.0)
    assert run["speedup"] == pytest.approx((12 / 2.0) / (12 / 4.0))
    assert run["mean_accepted_tokens"] == pytest.approx(10 / 5)  # 3+1+3+2+1 kept in 5 rounds, the prefill's token left out
    assert [r["accepted"] for r in run["requests"]] == [[2, 0, 2], [1, 3]]
    assert run["num_rounds_trimmed"] == 1


def test_a_step_without_a_draft_counts_as_a_step():
    """n-gram drafts in few steps: its AL is over those, tokens/step over all (METHODS §11)."""
    counts = rounds_of({"kept": [1, 1, 3, 1, 1, 2], "accepted": [2, 0, 3], "drafted": [3, 3, 3]})
    assert counts.accepted == (0, 2, 0, 0, 3)
    assert counts.drafted == (0, 3, 3, 0, 3)
    assert counts.kept == (1, 3, 1, 1, 2)
    assert counts.num_new_tokens == 9


def test_a_request_that_ends_with_its_first_token():
    """max_tokens 1: no round, no draft (B40)."""
    counts = rounds_of({"kept": [1], "accepted": [], "drafted": []})
    assert (counts.accepted, counts.num_new_tokens) == ((), 1)


def test_tokens_without_a_count_are_an_error():
    with pytest.raises(EngineError, match="0 drafted tokens"):
        rounds_of({"kept": [1, 3, 1], "accepted": [], "drafted": []})


@pytest.mark.parametrize(
    ("tokens", "reference", "index"),
    [([1, 2, 3], [1, 2, 3], None), ([1, 9, 3], [1, 2, 3], 1), ([1, 2], [1, 2, 3], 2), ([], [], None), ([5], [], 0)],
)
def test_first_difference(tokens: list[int], reference: list[int], index: int | None):
    assert first_difference(tokens, reference) == index


@pytest.mark.parametrize(("dtype", "why"), [("float32", "anything else is a bug"), ("bfloat16", "near ties flip")])
def test_greedy_output_that_changed_is_found(recipe: Recipe, dtype: str, why: str):
    """Greedy speculative decoding is the target's own text; what differs is counted and located (METHODS §15.6)."""
    recipe = recipe.model_copy(update={"target": recipe.target.model_copy(update={"dtype": dtype})})
    changed = [DRAFTED[0] | {"output_ids": [0, 1, 2, 99, 4, 5, 6, 7]}, DRAFTED[1]]
    report = report_of(recipe, [record("baseline", 0, PLAIN), record("eagle3", 3, changed)])
    run = report["runs"][1]
    assert run["identical_to_baseline"] == "1/2"
    assert [r["first_difference"] for r in run["requests"]] == [3, None]
    (line,) = [line for line in report["findings"] if "greedy output" in line]
    assert "1 of 2 requests" in line and "token 3" in line and why in line


@pytest.mark.parametrize(("gap", "why"), [(2e-5, "a tie: logits 2.0e-05 apart"), (0.4, "this is a bug")])
def test_a_token_that_is_not_the_targets_argmax_is_found_with_its_margin(recipe: Recipe, gap: float, why: str):
    """The reference decoder holds greedy answers against the target; whose token is off, the draft's or the baseline's, does not matter."""
    changed = [DRAFTED[0] | {"output_ids": [0, 1, 2, 99, 4, 5, 6, 7]}, DRAFTED[1]]
    off = {"figures": {"not_argmax": [{"request": 0, "token": 3, "gap": gap}, {"request": 1, "token": 2, "gap": 1e-6}]}}
    report = report_of(recipe, [record("baseline", 0, PLAIN, **off), record("eagle3", 3, changed, figures={"not_argmax": []})])
    ours, differing = report["findings"]
    assert "baseline" in ours and "2 tokens" in ours and "token 3 of request 0" in ours and why in ours
    assert "eagle3" in differing and "1 of 2 requests" in differing and why in differing
    assert "not_argmax" in report["definitions"]


def test_sampled_output_is_not_compared(recipe: Recipe):
    records = [record("baseline", 0, PLAIN, temperature=1.0), record("eagle3", 3, DRAFTED, temperature=1.0)]
    assert report_of(recipe, records)["runs"][1]["identical_to_baseline"] is None


def export_with(al: float, length: int = 256) -> dict[str, Any]:
    return {"method": "eagle3", "trained_max_length": length, "training": {"validation": {"al": {"3": al}}}, "speculative_config": {}}


@pytest.mark.parametrize(("estimate", "gap"), [(2.6, False), (2.62, False), (2.68, True), (2.5, True)])
def test_parity_rule(recipe: Recipe, estimate: float, gap: bool):
    """AL against AL~: more than 2 % is printed as a bug, with the usual causes (DESIGN §8)."""
    report = report_of(recipe, [record("baseline", 0, PLAIN), record("eagle3", 3, DRAFTED)], export_with(estimate))
    assert report["runs"][1]["acceptance_length_estimate"] == estimate
    assert any(line.startswith("PARITY") and "2.600" in line for line in report["findings"]) == gap
    assert any("off by one" in line for line in report["findings"]) == gap


def test_next_to_no_acceptance_names_the_fields_a_server_guesses(recipe: Recipe):
    """B31: mean acceptance <= 1.1 triggers a hint listing the config fields."""
    poor = [request([1] * 8, [0] * 7, [3] * 7), request([1] * 4, [0] * 3, [3] * 3)]
    (line,) = report_of(recipe, [record("baseline", 0, PLAIN), record("eagle3", 3, poor)])["findings"]
    assert all(field in line for field in ("eagle_aux_hidden_state_layer_ids", "norm_before_residual", "norm_before_fc", "norm_output"))
    assert report_of(recipe, [record("baseline", 0, PLAIN), record("ngram", 3, poor)])["findings"] == []


def test_requests_beyond_the_trained_length_are_reported(recipe: Recipe):
    """E08/B27: prompt + output longer than the trained length."""
    report = report_of(recipe, [record("baseline", 0, PLAIN), record("eagle3", 3, DRAFTED)], export_with(2.6, length=10))
    (line,) = report["findings"]
    assert "1 requests are longer" in line and "10 tokens" in line


def test_counters_that_disagree_are_reported(recipe: Recipe):
    wrong = record("eagle3", 3, DRAFTED, counters={"drafts": 5, "draft_tokens": 15, "accepted_tokens": 9})
    (line,) = report_of(recipe, [record("baseline", 0, PLAIN), wrong])["findings"]
    assert "'accepted_tokens': 9" in line and "'accepted_tokens': 8" in line


def test_a_failed_method_stands_in_the_report_with_its_reason(recipe: Recipe):
    broken = {"method": "suffix", "k": 3, "prompts": "few", "temperature": 0.0, "concurrency": 1, "error": "needs arctic-inference"}
    report = report_of(recipe, [record("baseline", 0, PLAIN), broken, record("ngram", 3, DRAFTED)])
    assert report["runs"][1]["error"] == "needs arctic-inference"
    assert failures_of(report) == ["suffix (1 cell): needs arctic-inference"]
    assert report["runs"][2]["speedup"] == pytest.approx(1.0)
    assert "needs arctic-inference" in to_markdown(report)


def test_every_figure_is_defined(recipe: Recipe):
    """A number without a definition is how two papers mean two things by acceptance (METHODS §11)."""
    report = report_of(recipe, [record("baseline", 0, PLAIN), record("eagle3", 3, DRAFTED)])
    settings = {"method", "k", "temperature", "concurrency", "prompts", "seconds", "counters", "requests"}
    for run in report["runs"]:
        assert run.keys() - settings <= report["definitions"].keys()
    assert "bonus" in report["definitions"]["acceptance_length"].lower()
    assert "UNCONDITIONAL" in report["definitions"]["per_position"] and "UNCONDITIONAL" in DEFINITIONS["acceptance_per_position"]


def test_learning_curve_passes_over_a_torn_line(tmp_path: Path):
    """A run that was killed while it wrote; a resumed run validates a step again: the later line counts."""
    file = tmp_path / "metrics.jsonl"
    lines = [
        {"step": 1, "loss": 3.0},
        {"step": 20, "supervised": 900, "validation": {"al": {"1": 1.1}}},
        {"step": 40, "supervised": 1800, "validation": {"al": {"1": 1.2}}},
        {"step": 40, "supervised": 1800, "validation": {"al": {"1": 1.3}}},
    ]
    file.write_text("\n".join(map(json.dumps, lines)) + '\n{"step": 60, "valid')
    assert learning_curve(file) == [
        {"step": 20, "supervised": 900, "al": {"1": 1.1}},
        {"step": 40, "supervised": 1800, "al": {"1": 1.3}},
    ]
    assert learning_curve(tmp_path / "none.jsonl") == []


def test_written_files(recipe: Recipe, tmp_path: Path):
    """report.json is what was built, the table has every run, the page stands alone and escapes what it shows."""
    recipe.run_dir.mkdir()
    points = [{"step": s, "supervised": 100 * s, "validation": {"al": {"1": 1 + s / 90, "3": 1 + s / 50}}} for s in (10, 20, 30)]
    (recipe.run_dir / "metrics.jsonl").write_text("\n".join(map(json.dumps, points)))
    broken = {"method": "ngram", "k": 3, "prompts": "few", "temperature": 0.0, "concurrency": 1, "error": "<script>alert(1)</script>"}
    records = [record("baseline", 0, PLAIN, 4.0), record("eagle3", 3, DRAFTED), broken]
    report = report_of(recipe, records, export_with(2.9))
    write_report(report, tmp_path / "out")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["report.html", "report.json", "report.md"]
    assert json.loads((tmp_path / "out/report.json").read_text()) == report
    markdown = (tmp_path / "out/report.md").read_text()
    ((heading, rows),) = tables_of(report).items()
    assert f"## {heading}" in markdown and all("| " + " | ".join(row) + " |" in markdown for row in rows)
    assert all(len(row) == len(COLUMNS) for row in rows)
    page = (tmp_path / "out/report.html").read_text()
    assert page.count("<svg") == 4  # positions, lengths, speeds, learning curve
    assert "<script" not in page and 'src="' not in page and "@import" not in page and "<link" not in page
    assert "PARITY" in page and "2.00×" in page


def test_findings_need_no_export(recipe: Recipe):
    runs = report_of(recipe, [record("baseline", 0, PLAIN), record("ngram", 3, DRAFTED)])["runs"]
    assert findings(recipe, runs, None) == []
