"""One progress display for all long work: a bar on a terminal, a plain line every few seconds elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType


class Progress:
    """Counts items (and, where there are any, tokens) on standard error, with the pace and the time left.

    >>> with Progress("answers", total=3, done=1) as progress:  # one was finished by an earlier run
    ...     progress.add(items=1, tokens=120)

    Without `with`, call `close()` at the end. `total` None: the end is not known.
    """

    def __init__(self, label: str, total: int | None, done: int = 0, unit: str = "rows", every_seconds: float = 5.0):
        self.label, self.total, self.done, self.unit, self.tokens = label, total, done, unit, 0
        self._done_before, self._every = done, every_seconds
        self._start = self._last = time.monotonic()
        self._bar = _bar(label, total, done) if sys.stderr.isatty() else None

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self._start

    def add(self, items: int = 0, tokens: int = 0) -> None:
        """Count more as done."""
        self.done += items
        self.tokens += tokens
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=self.done, pace=self._pace())
        elif time.monotonic() - self._last >= self._every:
            self._last = time.monotonic()
            self._print(self._pace())

    def close(self) -> None:
        """Take the bar away and leave one line, unless the work was too short to be worth one."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        if self.seconds >= self._every:
            self._print(f"{self._rate()} | took {_duration(self.seconds)}")

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _print(self, pace: str) -> None:
        of = "" if self.total is None else f"/{self.total:,}"
        tokens = f" | {self.tokens:,} tokens" if self.tokens else ""
        print(f"{self.label}: {self.done:,}{of} {self.unit}{tokens} | {pace}", file=sys.stderr, flush=True)

    def _rate(self) -> str:
        count, unit = (self.tokens, "tokens") if self.tokens else (self.done - self._done_before, self.unit)
        rate = count / max(self.seconds, 1e-9)
        return f"{rate:,.{0 if rate >= 100 else 1}f} {unit}/s"

    def _pace(self) -> str:
        fresh = self.done - self._done_before
        if self.total is None or not fresh:
            return self._rate()
        return f"{self._rate()} | {_duration((self.total - self.done) * self.seconds / fresh)} left"


def _bar(label: str, total: int | None, done: int):
    """A running rich bar with one task; `pace` is the text behind it."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
    from rich.progress import Progress as Bar

    bar = Bar(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[pace]}"),
        console=Console(stderr=True),
        transient=True,
    )
    bar.add_task(label, total=total, completed=done, pace="")
    bar.start()
    return bar


def _duration(seconds: float) -> str:
    """
    >>> _duration(3725), _duration(75)
    ('1h02m', '1m15s')
    """
    whole = max(int(seconds), 0)
    if whole >= 3600:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 60}m{whole % 60:02d}s" if whole >= 60 else f"{whole}s"
