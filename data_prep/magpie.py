"""Prompts that the target writes itself (Magpie, arXiv 2406.08464): data for whoever has no traffic yet.

    python -m data_prep.magpie --target embedded:smollm2-135m --draws 5600 --output prompts.jsonl.gz

The chat template is rendered up to where a user's text would stand; an instruction-tuned target goes on with a question such as it
was tuned on, so its questions differ as much as that data did.

A row of the output: {"id": "magpie-00017", "category": "magpie", "messages": [{"role": "user", "content"}]}
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shlex
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path

from data_prep.answering import ENGINES, Job, context_length, end_of_turn_ids
from data_prep.conversations import Conversation, Tally
from data_prep.options import add_engine_arguments, engine_options, settings_of, target_of
from data_prep.progress import Progress
from data_prep.prompt_sets import normalised, questions_of, word_runs
from data_prep.regenerate import answer_text, check_writable, write_whole
from data_prep.render import TemplateValue, chat_tokenizer, question_header
from recipes.errors import DataError, HeadstartError
from recipes.schema import Regenerate, Target

MIN_WORDS = 3  # "Hello." asks for nothing


def draw_prompts(
    target: Target,
    settings: Regenerate,
    draws: int,
    exclude: list[str],
    *,
    chat_template: str | None = None,
    template_kwargs: Mapping[str, TemplateValue] | None = None,
    tally: Tally | None = None,
) -> Iterator[dict]:
    """Let the target write `draws` questions and yield the usable ones as rows, in the order in which they are finished.

    Args:
        settings: engine, temperature, top_p, max_new_tokens, concurrency and seed are read; every draw has a seed of its own.
        exclude: prompt sets (as in `eval.prompts`) that are measured on: no row shares a run of words with them.
        chat_template, template_kwargs: as in `data`.
        tally: counts kept and skipped draws; made here unless given.

    Raises:
        DataError: no draws, a greedy temperature (every draw would be the same), or a chat template without a place for a user's text.
        EngineError: the engine is not installed.
    """
    if draws < 1:
        raise DataError(f"--draws {draws}: at least 1 is needed.")
    if settings.temperature == 0:
        raise DataError("--temperature 0 writes one and the same prompt again and again; give 0.7 to 1.0.")
    tally = tally if tally is not None else Tally()
    tokenizer = chat_tokenizer(target, chat_template, template_kwargs)
    header, ending = question_header(tokenizer)
    stop_ids = sorted({*end_of_turn_ids(target, tokenizer), ending})
    held_out = {run for name in exclude for text in questions_of(name) for run in word_runs(text)}
    seen: set[str] = set()
    todo = deque(_job(number, header, settings) for number in range(draws))
    with Progress("prompts", draws) as progress:
        for job, ids, finish_reason in ENGINES[settings.engine](todo, target, settings, stop_ids, context_length(target)):
            progress.add(items=1, tokens=len(ids))
            text = answer_text([i for i in ids if i not in stop_ids], tokenizer).strip()
            reason = "unfinished" if finish_reason != "stop" else unusable(text, seen, held_out)
            if reason is not None:
                tally.skip(reason, job.conversation.id)
            else:
                tally.kept += 1
                seen.add(normalised(text))
                yield {"id": job.conversation.id, "category": "magpie", "messages": [{"role": "user", "content": text}]}


def unusable(text: str, seen: set[str], held_out: set[tuple[str, ...]]) -> str | None:
    """Why the text is no prompt to train on, or None.

    Args:
        seen: normalised texts of the prompts so far.
        held_out: `word_runs` of the prompts that are measured on.

    >>> unusable("Hello.", set(), set()), unusable("What is  a prime?", {"what is a prime?"}, set())
    ('too_short', 'seen_before')
    >>> unusable("Why is the sky blue?", set(), word_runs("why is the sky  blue?")), unusable("Why is the sky blue?", set(), set())
    ('held_out', None)
    """
    if len(text.split()) < MIN_WORDS:
        return "too_short"
    if normalised(text) in seen:
        return "seen_before"
    return "held_out" if word_runs(text) & held_out else None


def _job(number: int, header: list[int], settings: Regenerate) -> Job:
    """Draw `number`: nothing has been said, the target goes on behind the user's header."""
    seed = int.from_bytes(hashlib.sha256(f"{settings.seed}:{number}".encode()).digest()[:4], "big") % 2**31
    conversation = Conversation(f"magpie-{number:05d}", [{"role": "user", "content": str(number)}])  # for its key alone: one a draw
    return Job(conversation, [], deque(), settings.temperature, seed, header)


def write_rows(rows: list[dict], output: Path) -> None:
    """Write the rows in the order of their ids."""
    data = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in sorted(rows, key=lambda row: row["id"])).encode()
    check_writable(output)
    write_whole(output, data)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m data_prep.magpie", description="Let the target write prompts (Magpie).")
    add_engine_arguments(parser)
    parser.add_argument("--output", required=True, type=Path, help="a .jsonl or .jsonl.gz file")
    parser.add_argument("--draws", type=int, required=True, help="questions to draw; most are kept, the rest is counted by reason")
    parser.add_argument("--temperature", type=float, default=0.9, help="of sampling (default 0.9)")
    parser.add_argument("--top-p", type=float, default=0.95, help="of sampling (default 0.95)")
    parser.add_argument("--max-new-tokens", type=int, default=160, help="of a prompt; a longer one is dropped (default 160)")
    parser.add_argument("--seed", type=int, default=0, help="of the draws (default 0)")
    parser.add_argument("--exclude", nargs="*", default=[], help="prompt sets to measure on: embedded:eval, mt_bench, a file …")
    args = parser.parse_args(argv)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: threads that spin slow each other down on a shared machine
    rows, tally = [], Tally()
    template = {"chat_template": args.chat_template, "template_kwargs": args.template_kwargs}
    interrupted = False
    try:
        check_writable(args.output)
        for row in draw_prompts(target_of(args), settings_of(args), args.draws, args.exclude, **template, tally=tally):
            rows.append(row)
    except KeyboardInterrupt:
        interrupted = True
    except HeadstartError as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    if not rows and not interrupted:
        print(
            f"error: none of {args.draws} draws is a usable prompt ({tally.summary()}). The target must be tuned to chat with this "
            "template; a base model never ends a question.",
            file=sys.stderr,
        )
        return 1
    write_rows(rows, args.output)
    print(f"prompts: {tally.summary()}: {args.output}")
    if interrupted:
        print("stopped; the prompts so far are kept.", file=sys.stderr)
        return 130
    files = shlex.join(["--prompts", str(args.output), "--output", "answers.jsonl.gz"])
    print(f"next: python -m data_prep.regenerate {shlex.join(engine_options(args))} {files}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
