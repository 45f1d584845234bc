"""Conversations from files, folders, HF datasets or the embedded data, in one shape; every bad row is counted by its reason.

Accepted rows (one JSON object each):

    {"messages": [{"role": "user", "content": "…"}, …], "tools": […]}      OpenAI
    {"conversations": [{"from": "human", "value": "…"}, …]}                ShareGPT (role/content inside works too)
    {"instruction": "…", "input": "…", "output": "…"}                      Alpaca
    {"prompt": "…"} or {"turns": ["…", "…"]}                               questions without answers, for data.regenerate
    {"text": "<|im_start|>user\\n…"}                                        already rendered by a chat template,
                                                                           or any document with data.supervise: all

Optional keys: `id`, `category`, `system`, and those that regeneration writes (`answer_ids`, `earlier_answer_ids`, `temperature`,
`finish_reason`, `target`).
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recipes.errors import DataError

EMBEDDED = Path(__file__).parent / "embedded"

_ROLES = {
    "user": "user", "human": "user",
    "assistant": "assistant", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant", "bot": "assistant",
    "system": "system", "developer": "developer",
    "tool": "tool", "observation": "tool", "function": "tool", "function_response": "tool",
    "function_call": "function_call",
}  # fmt: skip
_HF_ID = re.compile(r"^[\w.-]+/[\w.-]+(:[\w.-]+)?$")


@dataclass(frozen=True)
class Conversation:
    """One row in the project's shape: OpenAI messages, checked and cleaned, or an already rendered text."""

    id: str
    messages: list[dict[str, Any]]  # role, content (always a string), and where given reasoning_content, tool_calls, tool_call_id, name
    tools: list[dict[str, Any]] | None = None
    text: str | None = None  # already rendered; `messages` is then empty
    category: str = ""
    answer_ids: list[int] | None = None  # the tokens that the target itself produced for the last message
    earlier_answer_ids: list[list[int]] = field(default_factory=list)  # of the answers before it; empty: not known to be the target's
    temperature: float | None = None  # at which the target wrote the answer; None: not known to be the target's
    finish_reason: str | None = None
    target: str | None = None

    @property
    def key(self) -> str:
        """Hash of everything but the answers: one prompt has one key, however often it was answered."""
        asked = self.text if self.text is not None else [[m for m in self.messages if m["role"] != "assistant"], self.tools]
        return hashlib.sha256(json.dumps(asked, sort_keys=True, ensure_ascii=False).encode()).hexdigest()[:16]

    @property
    def greedy(self) -> bool:
        """Whether the last answer, and those of `earlier_answer_ids`, are known to be the target's own greedy decoding."""
        return self.temperature == 0.0


class Reject(Exception):
    """A row that cannot be used; the message is the reason that is counted."""


@dataclass
class Tally:
    """What became of the rows: kept, or skipped by reason, with the place of the first row of each reason."""

    kept: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)
    notes: Counter[str] = field(default_factory=Counter)  # rows that were kept, but not as they came

    def skip(self, reason: str, where: str) -> None:
        self.skipped[reason] += 1
        self.first.setdefault(reason, where)

    def summary(self) -> str:
        """`kept 2 / skipped 4 (empty=2, no_assistant=1, empty_answer=1)`."""
        line = f"kept {self.kept} / skipped {self.skipped.total()}"
        if self.skipped:
            line += " (" + ", ".join(f"{reason}={n}" for reason, n in self.skipped.most_common()) + ")"
        return line + "".join(f"; {note}={n}" for note, n in self.notes.items())

    def explain(self) -> str:
        """One line a reason, with the first row it was met at."""
        return "\n".join(f"  {n} × {reason}, first at {self.first[reason]}" for reason, n in self.skipped.most_common())


def held_out(key: str, share: float, seed: int = 0) -> bool:
    """Whether the row with this `Conversation.key` belongs to validation: stable under adding, removing and reordering rows."""
    digest = hashlib.sha256(f"{seed}:{key}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def read_conversations(
    sources: list[str], *, tally: Tally | None = None, max_rows: int | None = None, need_answer: bool = True
) -> Iterator[Conversation]:
    """Yield the usable conversations of `sources` in order.

    Args:
        sources: JSONL (`.gz` too), JSON or Parquet files, folders of them or of `save_to_disk`, `embedded:NAME`,
            or a HF data set `owner/name[:split]` (split `train` unless given). A local path wins over a HF id.
        tally: counts kept and skipped rows; made here unless given.
        max_rows: stop after this many kept rows.
        need_answer: reject rows without an assistant message; False for prompts that the target will answer.

    Raises:
        DataError: a source cannot be read, or nothing at all was kept.
    """
    tally = tally if tally is not None else Tally()
    for source in sources:
        for where, row in read_rows(source):
            if max_rows is not None and tally.kept >= max_rows:
                return
            try:
                conversation = normalise(row, where, need_answer=need_answer)
            except Reject as reason:
                tally.skip(str(reason), where)
                continue
            tally.kept += 1
            yield conversation
    if not tally.kept:
        where = ", ".join(sources) or "data.prompts: []"
        if not tally.skipped:
            raise DataError(f"no usable conversation in {where}: it holds no row at all. Give a file or data set with rows.")
        raise DataError(f"no usable conversation in {where}: {tally.summary()}\n{tally.explain()}")


# ---------------------------------------------------------------- rows of one source


def read_rows(source: str) -> Iterator[tuple[str, Any]]:
    """Yield (place, raw row) of one source; a line that is not JSON is yielded as it is and rejected later."""
    if source.startswith("embedded:"):
        yield from _read_file(embedded_file(source))
        return
    path = Path(source).expanduser()
    if path.is_dir():
        if (path / "state.json").exists() or (path / "dataset_dict.json").exists():
            yield from _read_saved_dataset(path)
            return
        files = sorted(p for p in path.rglob("*") if p.name.endswith((".jsonl", ".jsonl.gz", ".json", ".parquet")))
        if not files:
            raise DataError(f"data.prompts: folder {path} holds no .jsonl, .jsonl.gz, .json or .parquet file")
        for file in files:
            yield from _read_file(file)
    elif path.is_file():
        yield from _read_file(path)
    elif _HF_ID.match(source) and not source.endswith((".jsonl", ".json", ".parquet", ".gz")):
        yield from _read_hub(source)
    else:
        raise DataError(f"data.prompts: no file or folder {source!r}, and it is not of the form owner/name[:split] or embedded:NAME")


def embedded_file(source: str) -> Path:
    """The file behind `embedded:NAME`.

    Raises:
        DataError: no such embedded data, naming those there are.
    """
    name = source.removeprefix("embedded:")
    for suffix in (".jsonl", ".jsonl.gz", "_prompts.jsonl"):  # `embedded:eval` is eval_prompts.jsonl
        if (EMBEDDED / (name + suffix)).is_file():
            return EMBEDDED / (name + suffix)
    files = [*EMBEDDED.glob("*.jsonl"), *EMBEDDED.glob("*.jsonl.gz")]
    known = sorted(file.name.split(".jsonl")[0].removesuffix("_prompts") for file in files)
    raise DataError(f"no embedded data {source!r}; there is {', '.join('embedded:' + k for k in known) or 'none'}")


def _read_file(path: Path) -> Iterator[tuple[str, Any]]:
    if path.name.endswith(".parquet"):
        import pyarrow
        import pyarrow.parquet

        try:
            n = 0
            for batch in pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    n += 1
                    yield f"{path}:{n}", row
        except (pyarrow.ArrowInvalid, OSError) as e:
            raise DataError(f"{path} is not a readable Parquet file: {e}") from None
        return
    opener = gzip.open if path.name.endswith(".gz") else open
    try:
        with opener(path, "rb") as f:
            if path.name.endswith(".json"):
                rows = json.loads(f.read())
                for n, row in enumerate(rows if isinstance(rows, list) else [rows], 1):
                    yield f"{path}[{n}]", row
                return
            for n, line in enumerate(f, 1):
                if line.strip():
                    yield f"{path}:{n}", _loads(line)
    except (OSError, EOFError, ValueError) as e:
        raise DataError(f"cannot read {path}: {e}") from None


def _loads(line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError:  # malformed JSON or UTF-8; `normalise` rejects what is not a mapping
        return line


def _read_saved_dataset(path: Path) -> Iterator[tuple[str, Any]]:
    import datasets

    loaded = datasets.load_from_disk(str(path))
    parts = loaded.items() if isinstance(loaded, datasets.DatasetDict) else [("", loaded)]
    for name, part in parts:
        for n, row in enumerate(part, 1):
            yield f"{path}{'/' + str(name) if name else ''}[{n}]", row


def _read_hub(source: str) -> Iterator[tuple[str, Any]]:
    import datasets

    name, _, split = source.partition(":")
    try:
        rows = datasets.load_dataset(name, split=split or "train", streaming=True)
        for n, row in enumerate(rows, 1):
            yield f"{source}[{n}]", row
    except Exception as e:  # the hub client raises many kinds; all mean that the rows cannot be had
        reason = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
        raise DataError(
            f"data.prompts: {source!r} is no local path, and the HF hub did not give it: {reason}. "
            f"Check the name and split (owner/name:split), or give a local JSONL or Parquet file."
        ) from None


# ---------------------------------------------------------------- one row


def normalise(row: Any, where: str = "row", *, need_answer: bool = True) -> Conversation:
    """Turn one raw row into a Conversation.

    Raises:
        Reject: the reason to count (`bad_json`, `unknown_shape`, `empty`, `no_user`, `no_assistant`, `empty_answer`, `unknown_role: …`, …).
    """
    if not isinstance(row, dict):
        raise Reject("bad_json" if isinstance(row, bytes) else "not_a_mapping")
    meta: dict[str, Any] = {
        "id": str(row.get("id") or row.get("question_id") or row.get("task_id") or where),
        "category": str(row.get("category") or ""),
        "answer_ids": _answer_ids(row.get("answer_ids")),
        "earlier_answer_ids": _earlier_answer_ids(row.get("earlier_answer_ids")),
        "temperature": row.get("temperature"),
        "finish_reason": row.get("finish_reason"),
        "target": row.get("target"),
    }
    if isinstance(row.get("text"), str) and "messages" not in row and "conversations" not in row:
        if not row["text"].strip():
            raise Reject("empty")
        return Conversation(messages=[], text=row["text"], **meta)
    messages = [_message(m) for m in _raw_messages(row)]
    if not any(m["role"] == "user" for m in messages):
        raise Reject("no_user" if any(m["role"] == "assistant" for m in messages) else "no_assistant" if need_answer else "no_user")
    if any(m["role"] == "assistant" and not (m["content"].strip() or m.get("reasoning_content") or m.get("tool_calls")) for m in messages):
        raise Reject("empty_answer")
    if need_answer:
        last = max((i for i, m in enumerate(messages) if m["role"] == "assistant"), default=-1)
        if last < 0:
            raise Reject("no_assistant")
        messages = messages[: last + 1]  # what follows the last answer teaches nothing
    return Conversation(messages=messages, tools=_tools(row.get("tools")), **meta)


def _raw_messages(row: dict[str, Any]) -> list[Any]:
    for key in ("messages", "conversations"):
        if key in row:
            raw = row[key]
            if raw is None or raw == []:
                raise Reject("empty")
            if not isinstance(raw, list):
                raise Reject(f"{key}_not_a_list")
            break
    else:
        if isinstance(row.get("instruction"), str):
            question = "\n\n".join(part for part in (row["instruction"], row.get("input")) if part)
            raw = [{"role": "user", "content": question}]
            if row.get("output") is not None:
                raw.append({"role": "assistant", "content": row["output"]})
        elif isinstance(row.get("prompt"), str):
            raw = [{"role": "user", "content": row["prompt"]}]
        elif isinstance(row.get("turns"), list):
            raw = [{"role": "user", "content": turn} for turn in row["turns"]]
        else:
            raise Reject("unknown_shape")
    system = row.get("system")
    return [{"role": "system", "content": system}, *raw] if isinstance(system, str) and system else raw


def _message(raw: Any) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise Reject("message_not_a_mapping")
    given = raw.get("role") or raw.get("from")
    role = _ROLES.get(str(given).lower())
    if role is None:
        raise Reject(f"unknown_role: {given}")
    content = raw.get("content") if raw.get("content") is not None else raw.get("value")
    calls = raw.get("tool_calls")
    if role == "function_call":  # ShareGPT's way of writing a call: the message is the call
        role, calls, content = "assistant", _json(content, "bad_tool_calls"), None
    message: dict[str, Any] = {"role": role, "content": _content(content)}
    if role == "user" and not message["content"].strip():
        raise Reject("empty_user_turn")
    if role == "assistant":
        if calls:
            message["tool_calls"] = _tool_calls(calls)
        reasoning = raw.get("reasoning_content") or raw.get("reasoning")
        if isinstance(reasoning, str) and reasoning.strip():
            message["reasoning_content"] = reasoning
        elif "</think>" in message["content"]:  # one way to write reasoning, so that no template wraps it twice (B06)
            before, _, after = message["content"].partition("</think>")
            before = before.strip().removeprefix("<think>").strip("\n")
            message["content"] = after.lstrip("\n")
            if before.strip():
                message["reasoning_content"] = before
    for key in ("tool_call_id", "name"):
        if isinstance(raw.get(key), str):
            message[key] = raw[key]
    return message


def _content(content: Any) -> str:
    if content is None:
        return ""  # most templates would print a null as the word None
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
        return "".join(part["text"] for part in content)
    raise Reject("non_text_content")


def _tool_calls(raw: Any) -> list[dict[str, Any]]:
    """Calls as chat templates expect them: arguments as a mapping, not as a JSON string."""
    raw = _json(raw, "bad_tool_calls")
    calls = []
    for call in raw if isinstance(raw, list) else [raw]:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise Reject("bad_tool_calls")
        arguments = _json(function.get("arguments") or {}, "bad_tool_arguments")
        if not isinstance(arguments, dict):
            raise Reject("bad_tool_arguments")
        call_id = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
        calls.append({**call_id, "type": "function", "function": {"name": function["name"], "arguments": arguments}})
    return calls


def _tools(raw: Any) -> list[dict[str, Any]] | None:
    if not raw:
        return None
    raw = _json(raw, "bad_tools")
    if not isinstance(raw, list) or not all(isinstance(tool, dict) for tool in raw):
        raise Reject("bad_tools")
    return raw or None


def _json(value: Any, reason: str) -> Any:
    """A value that may come as JSON text (Parquet and ShareGPT store nested values so)."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        raise Reject(reason) from None


def _answer_ids(raw: Any) -> list[int] | None:
    if raw is None:
        return None
    if not isinstance(raw, list) or not raw or not all(isinstance(i, int) and i >= 0 for i in raw):
        raise Reject("bad_answer_ids")
    return raw


def _earlier_answer_ids(raw: Any) -> list[list[int]]:
    if not isinstance(raw or [], list):
        raise Reject("bad_answer_ids")
    return [_answer_ids(ids) or [] for ids in raw or []]
