"""The target writes the answers: on-policy data, which is what a draft head has to imitate (METHODS §15.9).

    python -m data_prep.regenerate --target embedded:smollm2-135m --prompts embedded:prompts --output answers.jsonl.gz \\
        --temperature 0.8 --greedy-share 0.5 --max-new-tokens 160

is the same code that `data.regenerate` in a recipe runs. Every finished answer is appended at once, so that a
killed run loses only what was in flight; run again, it goes on. At the end the rows are put into the order of the prompts.

A row of the output:

    {"id", "category", "messages": [… , {"role": "assistant", "content"}], "tools"?, "temperature", "finish_reason": "stop" | "length",
     "target", "answer_ids": [tokens of the last answer, the end-of-turn token included if the target produced it],
     "earlier_answer_ids"?: [the same of each answer before it, where the target wrote these too (every_turn)]}
"""

from __future__ import annotations

import argparse
import errno
import gzip
import hashlib
import json
import os
import sys
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data_prep.answering import ENGINES, Job, context_length, end_of_turn_ids
from data_prep.conversations import Conversation, Reject, Tally, read_conversations
from data_prep.options import add_engine_arguments, settings_of, target_of
from data_prep.progress import Progress
from data_prep.render import TemplateValue, chat_tokenizer, render_prompt
from recipes.errors import DataError, HeadstartError
from recipes.folders import make_writable
from recipes.lines import append_line
from recipes.schema import Recipe, Regenerate, Target


def regenerate_recipe(recipe: Recipe) -> Path:
    """Answer the recipe's prompts as `data.regenerate` says; returns the file of answers, to be read as conversations."""
    settings = recipe.data.regenerate
    assert settings is not None, "called for a recipe without data.regenerate"
    output = Path(recipe.features.dir) / "answers.jsonl"
    data = recipe.data
    return regenerate(
        data.prompts,
        recipe.target,
        settings,
        output,
        max_rows=data.max_rows,
        chat_template=data.chat_template,
        template_kwargs=data.template_kwargs,
    )


def regenerate(
    prompts: list[str],
    target: Target,
    settings: Regenerate,
    output: Path,
    *,
    max_rows: int | None = None,
    chat_template: str | None = None,
    template_kwargs: Mapping[str, TemplateValue] | None = None,
    max_minutes: float | None = None,
) -> Path:
    """Let the target answer every prompt that `output` does not answer yet.

    Args:
        prompts: sources as in `read_conversations`; an answer that a row already has last is replaced.
        output: a `.jsonl` file, or `.jsonl.gz` (then the work goes on beside it in the `.jsonl` until all is answered).
        chat_template: a Jinja file instead of the tokenizer's own template.
        template_kwargs: variables of the template, as in `data.template_kwargs`.
        max_minutes: stop after this wall time with what is finished.

    Returns:
        `output`, its rows in the order of the prompts.

    Raises:
        DataError: no usable prompt, `output` cannot be written, or it was written with other settings (both values are named).
        EngineError: the engine is not installed.
    """
    tokenizer = chat_tokenizer(target, chat_template, template_kwargs)
    working = output.with_suffix("") if output.suffix == ".gz" else output
    check_writable(output)
    check_settings(working, output, settings_record(prompts, target, settings, str(tokenizer.chat_template), template_kwargs))

    tally = Tally()
    context = context_length(target)
    jobs: dict[str, Job] = {}
    for conversation in read_conversations(prompts, tally=tally, max_rows=max_rows, need_answer=False):
        if (reason := add_job(jobs, conversation, settings, tokenizer, context)) is not None:
            tally.kept -= 1
            tally.skip(reason, conversation.id)
    print(f"prompts: {tally.summary()}", file=sys.stderr)
    if output.is_file() and not working.is_file():
        unpack(output, working)
    finished = recover(working)
    todo = deque(job for key, job in jobs.items() if key not in finished)
    if todo:
        answer_all(todo, len(jobs), target, settings, tokenizer, working, context, max_minutes, tally)
        for note, n in tally.notes.items():
            print(f"note: {n} rows: {note}", file=sys.stderr)
    write_in_order(working, list(jobs), output, keep_others=max_rows is not None)
    return output


def add_job(jobs: dict[str, Job], conversation: Conversation, settings: Regenerate, tokenizer, context: int) -> str | None:
    """Add the conversation's job under its key, or return the reason why it cannot be answered."""
    if conversation.text is not None:
        return "already_rendered_text"
    if conversation.key in jobs:
        return "duplicate_prompt"
    pending = questions(conversation.messages, every_turn=settings.every_turn)
    digest = hashlib.sha256(f"{settings.seed}:{conversation.key}".encode()).digest()
    greedy = int.from_bytes(digest[:4], "big") < settings.greedy_share * 2**32  # of the prompt alone: the same after any reordering
    job = Job(conversation, [], pending, 0.0 if greedy else settings.temperature, int.from_bytes(digest[4:8], "big") % 2**31)
    try:
        ask(job, tokenizer)
    except Reject as reason:
        return str(reason)
    if len(job.prompt_ids) + settings.max_new_tokens > context:
        return "prompt_too_long"
    jobs[conversation.key] = job
    return None


def questions(messages: list[dict[str, Any]], *, every_turn: bool) -> deque[list[dict[str, Any]]]:
    """Cut messages into what is asked before each answer that the target shall write.

    >>> chat = [{"role": r, "content": c} for r, c in [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]]
    >>> [[m["content"] for m in part] for part in questions(chat, every_turn=False)]
    [['a', 'b', 'c']]
    >>> [[m["content"] for m in part] for part in questions(chat, every_turn=True)]
    [['a'], ['c']]
    """
    last = max(i for i, m in enumerate(messages) if m["role"] in ("user", "tool"))
    if not every_turn or any(m.get("tool_calls") for m in messages):  # a tool's result belongs to the call that was made: keep both
        return deque([messages[: last + 1]])
    parts: deque[list[dict[str, Any]]] = deque([[]])
    for m in messages[: last + 1]:
        if m["role"] == "assistant":
            continue
        parts[-1].append(m)
        if m["role"] == "user":
            parts.append([])
    parts.pop()
    return parts


def ask(job: Job, tokenizer) -> None:
    """Put the job's next question behind its messages and render the prompt."""
    job.messages = job.messages + job.pending.popleft()
    job.prompt_ids = render_prompt(job.messages, tokenizer, job.conversation.tools)


def ask_next(job: Job, settings: Regenerate, tokenizer, context: int) -> str | None:
    """Ask the job's next question, or return the reason why it cannot be asked; its messages then end with the last answer."""
    answered = job.messages
    try:
        ask(job, tokenizer)
    except Reject as reason:
        job.messages = answered
        return str(reason)
    if len(job.prompt_ids) + settings.max_new_tokens > context:
        job.messages = answered
        return "prompt_too_long"
    return None


def answer_all(
    todo: deque[Job],
    total: int,
    target: Target,
    settings: Regenerate,
    tokenizer,
    working: Path,
    context: int,
    max_minutes: float | None,
    tally: Tally,
) -> None:
    """Run the engine until `todo` is empty, appending each finished row to `working`.

    A conversation whose next turn cannot be asked ends with the answer before it; `tally.notes` counts these by reason.
    """
    stop_ids = end_of_turn_ids(target, tokenizer)
    start = time.monotonic()
    with Progress("answers", total, total - len(todo)) as progress:
        for job, ids, finish_reason in ENGINES[settings.engine](todo, target, settings, stop_ids, context):
            kept = ids[:-1] if ids and ids[-1] in stop_ids else ids
            job.messages = [*job.messages, {"role": "assistant", "content": answer_text(kept, tokenizer)}]
            job.answers.append(ids)
            progress.add(tokens=len(ids))
            if job.pending and finish_reason == "stop":  # a question behind an unfinished answer would make no sense
                if (reason := ask_next(job, settings, tokenizer, context)) is None:
                    todo.appendleft(job)
                    continue
                tally.notes[f"ended before a later turn: {reason}"] += 1
            append_line(working, row_of(job, finish_reason, target))
            progress.add(items=1)
            if max_minutes is not None and time.monotonic() - start > max_minutes * 60:
                break


def answer_text(ids: list[int], tokenizer) -> str:
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def row_of(job: Job, finish_reason: str, target: Target) -> dict[str, Any]:
    """The JSON row of a finished job."""
    c = job.conversation
    row: dict[str, Any] = {"id": c.id, "category": c.category, "key": c.key, "messages": job.messages}
    if c.tools:
        row["tools"] = c.tools
    *earlier, last = job.answers
    row |= {"temperature": job.temperature, "finish_reason": finish_reason, "target": target.path, "answer_ids": last}
    return row | ({"earlier_answer_ids": earlier} if earlier else {})


# ---------------------------------------------------------------- the file


def settings_record(
    prompts: list[str], target: Target, settings: Regenerate, template: str, template_kwargs: Mapping[str, TemplateValue] | None
) -> dict[str, Any]:
    """What must not differ between the runs that fill one file. Engine and concurrency may: they do not change what is asked for."""
    record = settings.model_dump(mode="json", exclude={"engine", "concurrency"})
    record |= {"target": target.path, "revision": target.revision, "dtype": target.dtype, "prompts": prompts}
    record |= {"template_kwargs": dict(template_kwargs)} if template_kwargs else {}  # files that are older than the key had none
    return record | {"chat_template": hashlib.sha256(template.encode()).hexdigest()[:16]}


def check_writable(output: Path) -> None:
    """Make the folder of `output`; the hours of work come after this.

    Raises:
        DataError: a file cannot be written there.
    """
    try:
        make_writable(output.parent)
        if output.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    except OSError as e:
        raise DataError(f"cannot write {output}: {e.strerror}. Give a file in a folder that you may write to.") from None


def check_settings(working: Path, output: Path, record: dict[str, Any]) -> None:
    """Write `record` beside `working`, or compare it with the one that the answers there were made with."""
    path = working.with_name(working.name + ".settings.json")
    found = next((file for file in (working, output) if file.is_file()), None)
    if found is not None and path.is_file():
        before = json.loads(path.read_text(encoding="utf-8"))
        for key in sorted(before.keys() | record.keys()):
            if before.get(key) != record.get(key):
                raise DataError(
                    f"{found} was begun with {key}={before.get(key)!r}, now {key}={record.get(key)!r} is asked for. "
                    f"Go on with the former value, or delete {found.name} and {path.name} to answer anew."
                )
    elif found is not None:
        raise DataError(
            f"{found} exists, but {path.name}, which says how it was made, does not. Move it away, or give another output file."
        )
    else:
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_text(json.dumps(record, indent=1, ensure_ascii=False), encoding="utf-8")
        os.replace(temporary, path)


def recover(working: Path) -> set[str]:
    """Keys that are answered in `working`; a torn last line (the process was killed) is cut off so that it can be written again."""
    keys: set[str] = set()
    if not working.is_file():
        return keys
    with open(working, "rb+") as f:
        end = 0
        for line in f:
            try:
                key = json.loads(line)["key"]
            except (ValueError, KeyError, TypeError):
                break
            if not line.endswith(b"\n"):
                break
            keys.add(key)
            end += len(line)
        f.truncate(end)
    return keys


def unpack(packed: Path, working: Path) -> None:
    """Go on from a finished `.jsonl.gz`, for instance after prompts were added."""
    working.write_bytes(gzip.decompress(packed.read_bytes()))


def write_in_order(working: Path, keys: list[str], output: Path, *, keep_others: bool) -> None:
    """Write the rows of `working` to `output`, in the order of `keys`.

    Answers to prompts that are no longer asked are dropped. With `keep_others` (only the first prompts were asked) they stay,
    behind the rest: they are hours of work, and the reader stops at the same number of rows.
    """
    rows = {}
    with open(working, "rb") as f:
        for line in f:
            rows[json.loads(line)["key"]] = line
    asked = set(keys)
    order = keys + [key for key in rows if key not in asked] if keep_others else keys
    data = b"".join(rows[key] for key in order if key in rows)
    write_whole(output, data)
    if output != working and rows.keys() >= asked:
        working.unlink()


def write_whole(output: Path, data: bytes) -> None:
    """Write a file atomically; packed without a time stamp where its name ends in .gz."""
    temporary = output.with_name(output.name + ".tmp")
    with open(temporary, "wb") as f:
        f.write(gzip.compress(data, 9, mtime=0) if output.suffix == ".gz" else data)
        f.flush()
        os.fsync(f.fileno())
    os.replace(temporary, output)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m data_prep.regenerate", description="Let the target write the answers to prompts.")
    add_engine_arguments(parser)
    parser.add_argument("--prompts", required=True, nargs="+", help="files, folders, HF ids or embedded:NAME")
    parser.add_argument("--output", required=True, type=Path, help="a .jsonl or .jsonl.gz file; run again to go on")
    parser.add_argument("--temperature", type=float, default=0.0, help="of sampling; 0, the default, is greedy")
    parser.add_argument("--greedy-share", type=float, default=0.0, help="share of the rows that is decoded greedily all the same")
    parser.add_argument("--top-p", type=float, default=1.0, help="of sampled rows (default 1.0: all tokens)")
    parser.add_argument("--max-new-tokens", type=int, default=512, help="of an answer (default 512)")
    parser.add_argument("--every-turn", action="store_true", help="answer each user turn in order, not only the last")
    parser.add_argument("--seed", type=int, default=0, help="decides which rows are greedy, and what is sampled (default 0)")
    parser.add_argument("--max-rows", type=int, help="only the first so many prompts")
    parser.add_argument("--max-minutes", type=float, help="stop then, with what is finished")
    args = parser.parse_args(argv)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: threads that spin slow each other down on a shared machine
    try:
        path = regenerate(
            args.prompts,
            target_of(args),
            settings_of(args),
            args.output,
            max_rows=args.max_rows,
            chat_template=args.chat_template,
            template_kwargs=args.template_kwargs,
            max_minutes=args.max_minutes,
        )
    except HeadstartError as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; every finished answer is kept. Run the same command again to go on.", file=sys.stderr)
        return 130
    print(f"answers: {path}\nnext: give it to a recipe as data.prompts: [{path}], or look at a row with python -m data_prep.show RECIPE")
    return 0


if __name__ == "__main__":
    sys.exit(main())
