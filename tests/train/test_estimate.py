"""`python -m train.estimate`: which rounds are compared, and what it says where it cannot compare."""

import json

import pytest

from recipes.schema import load_recipe
from train import estimate
from train.estimate import head_cells, main, whole_rounds

RECIPE = "recipes/debug/eagle3.yaml"


@pytest.mark.parametrize(
    ("accepted", "length", "k", "whole"),
    [
        ([0, 0, 0], 4, 1, [0, 0, 0]),
        ([0, 0, 0], 4, 3, [0]),  # the second round would draft tokens 2, 3 and 4 of an answer that ends with token 3
        ([3, 2], 8, 3, [3, 2]),
        ([3, 2], 7, 3, [3]),
        ([1], 2, 3, []),
        ([], 1, 3, []),
    ],
)
def test_rounds_that_reach_past_the_answer_are_left_out(accepted, length, k, whole):
    assert whole_rounds({"output_ids": list(range(length)), "accepted": accepted}, k) == whole


def test_only_finished_greedy_chains_of_the_head_are_read_the_newest_of_each(tmp_path):
    cell = {"method": "eagle3", "k": 3, "prompts": "p", "temperature": 0.0, "requests": []}
    lines = [cell | {"key": 1}, cell | {"temperature": 1.0}, cell | {"method": "eagle3, eagle2 tree"}, cell | {"method": "ngram"}]
    lines += [cell | {"k": 5, "error": "out of memory"}, cell | {"key": 2}]
    (tmp_path / "cells.jsonl").write_text("\n".join(map(json.dumps, lines)))
    recipe = load_recipe(RECIPE, [f"eval.dir={tmp_path}"])
    assert head_cells(recipe, "cells.jsonl") == {("p", 3): cell | {"key": 2}}
    assert head_cells(recipe, "none.jsonl") == {}


def test_a_gap_over_two_percent_is_an_exit_code(monkeypatch, capsys):
    monkeypatch.setattr(estimate, "compare", lambda recipe: iter([("a", 2.0, 2.03), ("b", 2.0, 1.97)]))
    assert main([RECIPE]) == 0
    assert "a: AL 2.000, AL~ 2.030 (+1.5%)" in capsys.readouterr().out
    monkeypatch.setattr(estimate, "compare", lambda recipe: iter([("a", 2.0, 2.05), ("b", 2.0, 2.0)]))
    assert main([RECIPE]) == 1


def test_a_recipe_that_is_wrong_is_one_line(capsys):
    assert main([RECIPE, "head.unrol_steps=3"]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_no_report_is_an_error_that_names_the_remedy(tmp_path, capsys):
    assert main([RECIPE, f"eval.dir={tmp_path}"]) == 2
    assert "run `python -m eval RECIPE` with the same overrides first" in capsys.readouterr().err
