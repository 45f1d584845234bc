"""Fixtures of the feature store: a recipe on the tiny target, and the command run in this process."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from data_prep.__main__ import main
from recipes.schema import Recipe, load_recipe

# 12 rows: lengths differ, rows 2 and 9 are equal, rows 4 and 5 answer one prompt. A temperature means that the target wrote the answer.
CHATS: list[tuple[str, str, float | None]] = [
    ("alpha?", "beta.", 0.0),
    ("Count to nine.", "one two three four five six seven eight nine", 0.8),
    ("Say it again", "again and again", None),
    ("Describe a long river. " * 3, "It flows. " * 6, 0.0),
    ("Name a bird.", "A heron.", 0.8),
    ("Name a bird.", "A wagtail, or a kingfisher by the water.", 0.8),
    ("x", "y", None),
    ("What is a shard?", "A piece of a whole store.", 0.0),
    ("Give me code", "print('hello')\nprint('world')", None),
    ("Say it again", "again and again", None),
    ("Why?", "Because " * 9, None),
    ("Last one", "done", 0.0),
]


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    """A JSONL file of the conversations above."""
    path = tmp_path / "chats.jsonl"
    rows: list[dict[str, Any]] = [{"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]} for q, a, _ in CHATS]
    for row, (_, answer, temperature) in zip(rows, CHATS, strict=True):
        if temperature is not None:
            row |= {"temperature": temperature, "answer_ids": [*answer.encode(), 258]}  # bytes and <|im_end|>
    del rows[-1]["answer_ids"]  # greedy once, but its text may not be the target's own tokens any more
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def recipe_file(tmp_path: Path, tiny_target: Path, chats: Path) -> Path:
    """A recipe whose store is `tmp_path/store`: several shards, several batches a shard."""
    raw: dict[str, Any] = {
        "method": "eagle3",
        "target": {"path": str(tiny_target), "dtype": "float32"},
        "data": {"prompts": [str(chats)], "max_length": 128, "holdout": 0.3},
        "features": {"dir": str(tmp_path / "store"), "codec": "f32", "shard_tokens": 300, "batch_tokens": 200},
        "head": {"aux_layers": [1, 2, 3], "draft_vocab_size": 64},
        "train": {"max_steps": 10},
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(raw), encoding="utf-8")
    return path


@pytest.fixture
def recipe(recipe_file: Path) -> Callable[..., Recipe]:
    """`recipe("data.max_length=64")`: the recipe with overrides."""
    return lambda *overrides: load_recipe(recipe_file, list(overrides))


@pytest.fixture
def data_prep(recipe_file: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """`data_prep("data.max_length=64")`: `python -m data_prep recipe.yaml data.max_length=64` in this process; its exit code."""

    def run(*arguments: str) -> int:
        argv = [str(recipe_file), *arguments]
        monkeypatch.setattr(sys, "argv", ["data_prep", *argv])
        return main(argv)

    return run
