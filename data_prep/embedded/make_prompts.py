"""Writes the project's own prompts: `prompts.jsonl` (training), `eval_prompts.jsonl` and `repetitive_prompts.jsonl` (both held out).

    python -m data_prep.embedded.make_prompts            # writes the three files beside this script
    python -m data_prep.embedded.make_prompts --check    # regenerates in memory; exits 1 if a file differs

Everything comes from the word lists in this folder and one seed, so the files can be made again byte for byte.
"""

import argparse
import json
import random
import sys
from collections.abc import Callable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import TypeVar

from data_prep.embedded.background import Background
from data_prep.embedded.code_tasks import code_prompts
from data_prep.embedded.held_out import held_out_prompts
from data_prep.embedded.maths import maths_prompts
from data_prep.embedded.notices import extraction_prompts, rewriting_prompts
from data_prep.embedded.questions import explanation_prompts, question_prompts
from data_prep.embedded.reasoning import reasoning_prompts
from data_prep.embedded.repetitive import repetitive_prompts
from data_prep.embedded.writing import role_play_prompts, writing_prompts
from data_prep.prompt_sets import normalised

HERE = Path(__file__).parent
SEED = 20261129
PER_CATEGORY = 720
MAX_TRIES = 200_000
# How many of a category's prompts get a line about the person who asks. None where the prompt is built around a text or a scene of its own.
BACKGROUND_SHARE = {"writing": 0.16, "question_answering": 0.2, "explanation": 0.22, "reasoning": 0.14, "maths": 0.1, "code": 0.16}

GENERATORS: dict[str, Callable[[random.Random], Iterator[str]]] = {
    "writing": writing_prompts,
    "question_answering": question_prompts,
    "explanation": explanation_prompts,
    "extraction": extraction_prompts,
    "rewriting": rewriting_prompts,
    "reasoning": reasoning_prompts,
    "maths": maths_prompts,
    "code": code_prompts,
    "role_play": role_play_prompts,
}

Row = dict[str, object]
T = TypeVar("T")


def row(kind: str, number: int, category: str, text: str) -> Row:
    return {"id": f"{kind}-{number:05d}", "category": category, "messages": [{"role": "user", "content": text}]}


def in_rounds(rng: random.Random, by_category: list[list[T]]) -> list[T]:
    """One of each category in random order, then the next of each: any prefix is a balanced mix."""
    mixed: list[T] = []
    for group in zip_longest(*by_category):
        present = [item for item in group if item is not None]
        rng.shuffle(present)
        mixed.extend(present)
    return mixed


def numbered(kind: str, prompts: list[tuple[str, str]]) -> list[Row]:
    return [row(kind, i, category, text) for i, (category, text) in enumerate(prompts, 1)]


def make_training(seed: int = SEED, per_category: int = PER_CATEGORY) -> list[Row]:
    """Equally many different prompts a category."""
    seen: set[str] = set()
    by_category: list[list[Row]] = []
    for category, generator in GENERATORS.items():
        # Seeding with a string does not depend on PYTHONHASHSEED; one generator a category keeps a change in one from moving the others.
        rng = random.Random(f"{seed}/{category}")
        background = Background(rng, BACKGROUND_SHARE.get(category, 0.0))
        texts: list[str] = []
        for tries, bare in enumerate(generator(rng)):
            text = background.around(bare)
            # The bare task decides: the same task with another greeting would not be a different prompt.
            key = normalised(bare)
            if key not in seen:
                seen.add(key)
                texts.append(text)
            if len(texts) == per_category:
                break
            if tries > MAX_TRIES:
                raise RuntimeError(f"{category}: the lists give only {len(texts)} different prompts, {per_category} are wanted")
        rng.shuffle(texts)
        by_category.append([row(category, i + 1, category, text) for i, text in enumerate(texts)])
    return in_rounds(random.Random(f"{seed}/order"), by_category)


def make_all(seed: int = SEED) -> dict[str, list[Row]]:
    rng = random.Random(f"{seed}/held out")
    held_out = [[(category, text) for category, _, text in held_out_prompts() if category == wanted] for wanted in GENERATORS]
    repetitive = [[(category, text) for category, text in repetitive_prompts() if category == wanted] for wanted in GENERATORS]
    for texts in [*held_out, *repetitive]:
        rng.shuffle(texts)
    return {
        "prompts.jsonl": make_training(seed),
        "eval_prompts.jsonl": numbered("eval", in_rounds(rng, held_out)),
        "repetitive_prompts.jsonl": numbered("repetitive", in_rounds(rng, repetitive)),
    }


def to_jsonl(rows: list[Row]) -> str:
    return "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m data_prep.embedded.make_prompts", description="Write (or check) the shipped prompt files."
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a file differs from what would be written")
    parser.add_argument("--seed", type=int, default=SEED, help="default: %(default)s, the seed of the shipped files")
    parser.add_argument("--out", type=Path, default=HERE, help="folder of the three files (default: beside this script)")
    args = parser.parse_args(argv)
    stale: list[str] = []
    for name, rows in make_all(args.seed).items():
        path, text = args.out / name, to_jsonl(rows)
        if args.check:
            if not path.is_file() or path.read_bytes() != text.encode():
                stale.append(name)
            continue
        args.out.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
        print(f"{path}: {len(rows)} prompts")
    if stale:
        print(
            f"differs from what the lists and seed {args.seed} give: {', '.join(stale)}. Run python -m data_prep.embedded.make_prompts",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
