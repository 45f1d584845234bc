"""Ctrl-C and SIGTERM: the first asks to stop at the next good place, a second one stops at once."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Stopped(Exception):
    """The user interrupted at a good place; everything finished is on disk."""


class Stop:
    """`signum` is the signal that came, or None. Only inside `deferred` does a first signal let the work go on.

    with stop_signals() as stop:
        with stop.deferred("this shard"):
            for shard in shards:
                ...
                if stop.signum is not None:
                    raise Stopped
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        self._until: str | None = None

    @contextmanager
    def deferred(self, until: str) -> Iterator[None]:
        """While open, the work looks at `signum` itself, at the end of `until`."""
        self._until = until
        try:
            yield
        finally:
            self._until = None

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        again = self.signum is not None
        self.signum = signum
        if again or self._until is None:
            raise KeyboardInterrupt
        print(f"\nstopping after {self._until}; once more to stop at once", file=sys.stderr, flush=True)


@contextmanager
def stop_signals() -> Iterator[Stop]:
    """Listen to SIGINT and SIGTERM while open (main thread only)."""
    stop = Stop()
    before = {number: signal.signal(number, stop._handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
