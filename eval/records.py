"""Measured cells on disk: one JSON line each, appended as the cell ends, found again by its key."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def read_records(path: Path) -> dict[str, dict[str, Any]]:
    """Records by key, the last one of each; a torn last line (a killed process, a full disk) is passed over."""
    records = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        records[record["key"]] = record
    return records


def append_record(path: Path, record: dict[str, Any]) -> None:
    """Append one line and make sure that it is on disk."""
    with path.open("a", encoding="utf-8") as f:
        f.write(json.dumps(record) + "\n")
        f.flush()
        os.fsync(f.fileno())


def forget_failures(path: Path) -> None:
    """Drop failed records, so that a rerun tries them again."""
    good = [json.dumps(record) + "\n" for record in read_records(path).values() if "error" not in record]
    partial = path.with_suffix(".partial")
    partial.write_text("".join(good), encoding="utf-8")
    os.replace(partial, path)
