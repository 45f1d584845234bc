"""One row, coloured by its mask."""

import io
import json

import pytest
import yaml
from rich.console import Console

from data_prep.conversations import Conversation
from data_prep.render import render
from data_prep.show import main, show_row
from recipes.schema import Data


@pytest.fixture
def recipe(tiny_target, tmp_path):
    """A recipe file over three rows, the second of them bad."""
    rows = tmp_path / "rows.jsonl"
    chat = [{"role": "user", "content": "alpha?"}, {"role": "assistant", "content": "beta."}]
    other = [{"role": "user", "content": "gamma?"}, {"role": "assistant", "content": "delta [bold] :smile:"}]
    rows.write_text("".join(json.dumps({"id": i, "messages": m}) + "\n" for i, m in (("first", chat), ("bad", []), ("second", other))))
    file = tmp_path / "recipe.yaml"
    raw = {
        "method": "eagle3",
        "target": {"path": str(tiny_target), "dtype": "float32"},
        "data": {"prompts": [str(rows)], "max_length": 64},
        "features": {"dir": str(tmp_path / "features")},
        "train": {"max_steps": 1},
    }
    file.write_text(yaml.safe_dump(raw))
    return str(file)


def test_supervised_part_is_marked(recipe, capsys):
    assert main([recipe]) == 0
    said = capsys.readouterr().out
    assert "⟦beta.<|im_end|>⟧" in said and "alpha?" in said
    assert "first: " in said and "6 supervised" in said and "text, tokenised here" in said


def test_row_number_and_overrides(recipe, capsys):
    """Square brackets and colons of the text are not taken for markup."""
    assert main([recipe, "1"]) == 0
    said = capsys.readouterr().out
    assert "⟦delta [bold] :smile:<|im_end|>⟧" in said and "kept 2 / skipped 1 (empty=1)" in said
    assert main([recipe, "1", "data.supervise=all"]) == 0
    assert "⟦<|im_start|>user" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["7"], "there is no row 7: kept 2 / skipped 1"),
        (["data.max_lenght=3"], "did you mean max_length"),
        (["data.regenerate={engine: hf}"], "answers.jsonl yet; run python -m data_prep RECIPE first"),
        (["data.prompts=[nowhere.jsonl]"], "no file or folder 'nowhere.jsonl'"),
    ],
)
def test_errors_are_one_line(recipe, capsys, arguments, said):
    assert main([recipe, *arguments]) == 1
    assert said in capsys.readouterr().err


def test_colours(tiny_tokenizer):
    row = render(
        Conversation("r", [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]),
        tiny_tokenizer,
        Data(prompts=["a.jsonl"]),
    )
    out = io.StringIO()
    show_row(Conversation("r", []), row, tiny_tokenizer, Console(file=out, force_terminal=True, width=100))
    assert "\x1b[1;32m⟦b<|im_end|>⟧" in out.getvalue()
