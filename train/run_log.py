"""One human line and one machine line for what a run does."""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class RunLog:
    """Prints on the main process, appends to metrics.jsonl, and shows a bar where there is a terminal."""

    def __init__(self, path: Path, total_steps: int | None, is_main: bool):
        self.is_main, self.path = is_main, path
        self.console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
        self.bar = None
        if is_main and self.console.is_terminal:
            columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self.bar = Progress(*columns, console=self.console, transient=True)
            self.task = self.bar.add_task("training", total=total_steps)
            self.bar.start()

    def say(self, text: str) -> None:
        """Print a line (main process only)."""
        if self.is_main:
            self.console.print(text, markup=False)

    def write(self, record: dict[str, Any]) -> None:
        """Append one JSON line."""
        if self.is_main:
            with self.path.open("a") as f:
                f.write(json.dumps(record | {"time": time.time()}) + "\n")

    def advance(self, step: int) -> None:
        """Move the bar."""
        if self.bar is not None:
            self.bar.update(self.task, completed=step)

    def close(self) -> None:
        """Take the bar away."""
        if self.bar is not None:
            self.bar.stop()


def peak_memory_gib(device: torch.device) -> float:
    """Peak memory so far: of the device on CUDA, of the process elsewhere."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def short_time(seconds: float) -> str:
    """3725 → 1h02m, 65 → 1m05s."""
    seconds = int(seconds)
    if seconds >= 3600:
        return f"{seconds // 3600}h{seconds % 3600 // 60:02d}m"
    return f"{seconds // 60}m{seconds % 60:02d}s"
