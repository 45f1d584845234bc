"""Reports side by side."""

import json

import pytest

from eval.compare import main, read_report, rows_of, table
from recipes.errors import HeadstartError


def run(method, k, prompts, al, rates, **more):
    cell = {"method": method, "k": k, "temperature": 0.0, "concurrency": 1, "prompts": prompts}
    return cell | {"acceptance_length": al, "per_position": rates} | more


@pytest.fixture
def reports(tmp_path):
    training = {"trainable_parameters": 12_340_000, "seconds": 200.0, "cpu_seconds": 360.0, "tokens": 100_000, "peak_gib": 3.21}
    chat, code, timed = "embedded:eval", "humaneval", {"draft": 0.0042, "verify": 0.04, "overhead": 0.0}
    for name, engine, runs in (
        ("a", "vllm", [
            run("baseline", 0, chat, 1.0, []), run("ngram", 3, chat, 1.25, [0.15, 0.06, 0.04]),
            run("eagle3", 3, chat, 1.613, [0.42, 0.143, 0.05]), run("eagle3", 3, code, 1.5, [0.4, 0.08, 0.02]),
            run("eagle3", 5, chat, 1.65, [0.42, 0.15, 0.05, 0.02, 0.01]), {"method": "eagle3", "k": 9, "error": "out of memory"},
        ]),
        ("b", "reference", [run("medusa", 3, chat, 1.4, [0.3, 0.1, 0.0], round_seconds=timed)]),
    ):  # fmt: skip
        folder = tmp_path / name
        folder.mkdir()
        report = {"name": name, "engine": engine, "runs": runs, "export": {"training": training if name == "a" else None}}
        (folder / "report.json").write_text(json.dumps(report))
    return tmp_path


def test_table(reports):
    rows = [row for name in "ab" for row in rows_of(read_report(reports / name))]
    header, _, ngram, three, five, medusa = table(rows).splitlines()
    assert header.startswith("| draft | engine | k | AL embedded:eval | AL humaneval | per position, embedded:eval | draft ms/round |")
    assert ngram == "| a: ngram | vllm | 3 | 1.250 | – | .150 .060 .040 | – | – | – | – | – |"
    assert three == "| a: eagle3 | vllm | 3 | 1.613 | 1.500 | .420 .143 .050 | – | 12.34 | 6.0 | 500 | 3.21 |"
    assert five.startswith("| a: eagle3 | vllm | 5 | 1.650 | – |")
    assert medusa == "| b: medusa | reference | 3 | 1.400 | – | .300 .100 .000 | 4.2 | – | – | – | – |"


def test_command(reports, capsys):
    assert main([str(reports / "a"), str(reports / "b" / "report.json")]) == 0
    assert "a: eagle3" in capsys.readouterr().out


def test_missing_report(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert "python -m eval RECIPE" in capsys.readouterr().err
    with pytest.raises(HeadstartError, match="no report at"):
        read_report(tmp_path / "none.json")
