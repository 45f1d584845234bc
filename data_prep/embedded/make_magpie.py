"""Writes `magpie_prompts.jsonl.gz`: questions that SmolLM2-135M-Instruct asks itself (data_prep/magpie.py), for the training answers.

    python -m data_prep.embedded.make_magpie            # 5,000 draws with vLLM: about 10 minutes on 2 cores
    python -m data_prep.regenerate --target embedded:smollm2-135m --dtype bfloat16 --prompts embedded:magpie_prompts \\
        --output data_prep/embedded/answers-smollm2-135m-magpie.jsonl.gz --temperature 0.8 --greedy-share 0.5 \\
        --max-new-tokens 160 --concurrency 256

The draws have seeds of their own; what a bfloat16 product rounds to, and so the text, may differ on another processor.
"""

from __future__ import annotations

from data_prep.conversations import Tally
from data_prep.embedded.held_out import held_out_prompts
from data_prep.embedded.make_prompts import HERE
from data_prep.magpie import draw_prompts, write_rows
from recipes.schema import Regenerate, Target

DRAWS = 5000
EXCLUDE = ["embedded:eval", "embedded:repetitive", "mt_bench", "humaneval"]
SETTINGS = Regenerate(temperature=0.85, max_new_tokens=160, concurrency=256)
OUTPUT = HERE / "magpie_prompts.jsonl.gz"


def without_held_out_subjects(rows: list[dict]) -> list[dict]:
    """The rows that do not even mention what a held-out prompt is about."""
    subjects = [key.lower() for _, key, _ in held_out_prompts()]
    return [row for row in rows if not any(subject in row["messages"][0]["content"].lower() for subject in subjects)]


def main() -> None:
    tally = Tally()
    target = Target(path="embedded:smollm2-135m", dtype="bfloat16")
    rows = without_held_out_subjects(list(draw_prompts(target, SETTINGS, DRAWS, EXCLUDE, tally=tally)))
    write_rows(rows, OUTPUT)
    print(f"{tally.summary()}; without held-out subjects {len(rows):,}: {OUTPUT}")


if __name__ == "__main__":
    main()
