"""The shipped prompt files: counts, no text twice or on both sides, and the script still gives them byte for byte."""

import json
import os
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from data_prep.embedded.held_out import held_out_prompts
from data_prep.embedded.make_prompts import GENERATORS, HERE, main, make_training
from data_prep.prompt_sets import normalised, word_runs

FILES = ["prompts.jsonl", "eval_prompts.jsonl", "repetitive_prompts.jsonl"]
ROOT = Path(__file__).resolve().parents[2]


@cache
def rows(name: str) -> list[dict]:
    return [json.loads(line) for line in (HERE / name).read_text(encoding="utf-8").splitlines()]


def texts(name: str) -> list[str]:
    return [r["messages"][0]["content"] for r in rows(name)]


@pytest.mark.parametrize("name", FILES)
def test_rows_have_the_agreed_shape(name: str) -> None:
    for r in rows(name):
        assert list(r) == ["id", "category", "messages"]
        assert r["category"] in GENERATORS
        (message,) = r["messages"]
        assert message["role"] == "user"
        assert message["content"] == message["content"].strip() != ""


def test_counts_and_balance() -> None:
    counts = Counter(r["category"] for r in rows("prompts.jsonl"))
    assert set(counts) == set(GENERATORS)
    assert sum(counts.values()) >= 6000 and min(counts.values()) >= 500
    held_out = Counter(r["category"] for r in rows("eval_prompts.jsonl"))
    assert set(held_out) == set(GENERATORS)
    assert sum(held_out.values()) == 160 and max(held_out.values()) - min(held_out.values()) <= 1
    assert len(rows("repetitive_prompts.jsonl")) == 48


@pytest.mark.parametrize(("name", "n"), [("prompts.jsonl", 90), ("prompts.jsonl", 4001), ("eval_prompts.jsonl", 32)])
def test_any_prefix_is_a_balanced_mix(name: str, n: int) -> None:
    counts = Counter(r["category"] for r in rows(name)[:n])
    assert max(counts.values()) - min(counts.values()) <= 1


def test_no_text_and_no_id_occurs_twice_in_all_files() -> None:
    every_text = [normalised(t) for name in FILES for t in texts(name)]
    every_id = [r["id"] for name in FILES for r in rows(name)]
    assert len(set(every_text)) == len(every_text)
    assert len(set(every_id)) == len(every_id)


def test_no_slot_of_a_template_is_left_unfilled() -> None:
    for name in FILES:
        for r in rows(name):
            text = r["messages"][0]["content"]
            if r["category"] != "code":  # JavaScript's ${n} and Python's {n: n * n} look like slots
                assert not any(f"{{{letter}}}" in text for letter in "abcdefghijklmnopqrstuvwxyzFSTPV"), text
                assert "[]" not in text


def test_what_the_held_out_prompts_are_about_never_occurs_in_training() -> None:
    training = "\n".join(texts("prompts.jsonl")).lower()
    for _, key, prompt in held_out_prompts():
        assert key.lower() in prompt.lower(), f"{key!r} is not in its own prompt"
        assert key.lower() not in training, f"{key!r} occurs in a training prompt"


def test_held_out_and_training_prompts_share_no_long_run_of_words() -> None:
    training = set().union(*(word_runs(t) for t in texts("prompts.jsonl")))
    for name in FILES[1:]:
        for text in texts(name):
            assert not word_runs(text) & training, text


def test_check_passes_on_the_shipped_files_whatever_the_hash_seed() -> None:
    # This process has some random hash seed of its own; the other one is fixed.
    assert main(["--check"]) == 0
    command = [sys.executable, "-m", "data_prep.embedded.make_prompts", "--check"]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": "12345"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_check_names_a_file_that_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--out", str(tmp_path)])
    (tmp_path / "eval_prompts.jsonl").write_text("{}\n")
    assert main(["--check", "--out", str(tmp_path)]) == 1
    assert "eval_prompts.jsonl" in capsys.readouterr().err


def test_another_seed_gives_other_prompts() -> None:
    assert make_training(seed=1, per_category=20) != make_training(seed=2, per_category=20)
