"""One human line and one machine line for what a run does."""

from __future__ import annotations

import math
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from recipes.lines import append_line
from train import step as steps


class RunLog:
    """Prints on the main process, appends to metrics.jsonl, feeds the trackers, and shows a bar where there is a terminal."""

    def __init__(self, path: Path, total_steps: int | None, accelerator: Accelerator):
        self.path, self.total_steps, self.accelerator = path, total_steps, accelerator
        self.console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
        self.bar = None
        if accelerator.is_main_process and self.console.is_terminal:
            columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self.bar = Progress(*columns, console=self.console, transient=True)
            self.task = self.bar.add_task("training", total=total_steps)
            self.bar.start()
        self.forget()

    def forget(self) -> None:
        """Begin a new window of steps."""
        self.sums: Tensor | None = None
        self.tokens, self.seconds = 0, 0.0

    def say(self, text: str) -> None:
        """Print a line (main process only)."""
        if self.accelerator.is_main_process:
            self.console.print(text, markup=False)

    def write(self, record: dict[str, Any]) -> None:
        """Append one JSON line."""
        if self.accelerator.is_main_process:
            append_line(self.path, record | {"time": time.time()})

    def took(self, sums: Tensor, tokens: int, seconds: float, step: int) -> None:
        """Add a step to the window and move the bar."""
        self.sums = sums if self.sums is None else self.sums + sums
        self.tokens += tokens
        self.seconds += seconds
        if self.bar is not None:
            self.bar.update(self.task, completed=step)

    def step(self, progress: steps.Progress, lr: float, grad_norm: float, done: float) -> None:
        """Say and write what happened since the last time."""
        assert self.sums is not None, "called after at least one step"
        loss, correct, count = self.sums.tolist()
        record = {
            "step": progress.step,
            "loss": loss[0] / max(count[0], 1),
            "accuracy": [c / n if n else None for c, n in zip(correct, count, strict=True)],  # None: this depth was not trained
            "lr": lr,
            "grad_norm": grad_norm if math.isfinite(grad_norm) else None,  # DeepSpeed need not tell it
            "tokens_per_second": self.tokens / max(self.seconds, 1e-9),
            "peak_gib": peak_memory_gib(self.accelerator.device),
            "tokens": progress.tokens,
            "supervised": progress.supervised,
        }
        self.write(record)
        tracked = ("loss", "lr", "grad_norm", "tokens_per_second")
        self.accelerator.log({f"train/{name}": record[name] for name in tracked}, step=progress.step)
        eta = progress.seconds * max(0.0, 1 - done) / max(done, 1e-9)  # the last step ends past a limit in minutes
        accuracy = " ".join("-" if a is None else f"{a:.2f}" for a in record["accuracy"])
        self.say(
            f"step {progress.step}/{self.total_steps or '?'} | loss {record['loss']:.3f} | acc {accuracy} | lr {lr:.2e} "
            f"| grad {grad_norm:.2f} | {record['tokens_per_second']:,.0f} tok/s | mem {record['peak_gib']:.1f} GiB | eta {short_time(eta)}"
        )
        self.forget()

    def validation(self, progress: steps.Progress, result: dict[str, Any], rows: str) -> None:
        """Say and write a validation; `rows` says which rows it was counted on."""
        self.write({"step": progress.step, "tokens": progress.tokens, "supervised": progress.supervised, "validation": result})
        self.accelerator.log({f"val/al_k{k}": al for k, al in result["al"].items()} | {"val/loss": result["loss"]}, step=progress.step)
        shown = " ".join(f"k={k} {al:.3f}" for k, al in result["al"].items()) or "unknown: no answer holds a whole round"
        accuracy = " ".join(f"{a:.3f}" for a in result["accuracy"])
        self.say(f"  {rows} at step {progress.step}: loss {result['loss']:.3f} | accuracy by depth {accuracy} | AL~ {shown}")

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
