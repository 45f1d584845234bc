"""Measured cells on disk: one JSON line each, appended as the cell ends, found again by its key."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from recipes.lines import append_line, read_lines


def read_records(path: Path) -> dict[str, dict[str, Any]]:
    """Records by key, the last one of each."""
    return {record["key"]: record for record in read_lines(path)}


def append_record(path: Path, record: dict[str, Any]) -> None:
    """Append one record and make sure that it is on disk: a cell is minutes of work."""
    append_line(path, record, durable=True)


def forget_failures(path: Path) -> None:
    """Drop failed records, so that a rerun tries them again."""
    good = [json.dumps(record) + "\n" for record in read_records(path).values() if "error" not in record]
    partial = path.with_suffix(".partial")
    partial.write_text("".join(good), encoding="utf-8")
    os.replace(partial, path)
