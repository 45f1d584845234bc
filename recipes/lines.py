"""Files of JSON lines that grow while a run goes on: appended to, and read however the run ended."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from recipes.errors import HeadstartError


def append_line(path: Path, record: dict[str, Any], *, durable: bool = False) -> None:
    """Append one record; a torn last line (of a killed process) is closed first, so that it takes no other along.

    Args:
        durable: wait until it is on disk. For few and dear records: it takes milliseconds.

    Raises:
        HeadstartError: the line cannot be written (a full disk); all lines before it are kept.
    """
    try:
        with path.open("ab+") as f:
            torn = b""
            if f.tell():
                f.seek(-1, os.SEEK_END)
                torn = b"" if f.read(1) == b"\n" else b"\n"
            f.write(torn + json.dumps(record, ensure_ascii=False).encode() + b"\n")
            f.flush()
            if durable:
                os.fsync(f.fileno())
    except OSError as e:
        free = shutil.disk_usage(path.parent).free
        raise HeadstartError(
            f"cannot append to {path} ({free / 1e9:.3g} GB free): {e.strerror}. What it held before is kept; free some space and run the "
            "same command again."
        ) from e


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a file, none where there is no file; a torn line is passed over."""
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else ():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        yield record
