"""Folders that are whole or not there: each is written under a temporary name and swapped in."""

from __future__ import annotations

import shutil
from pathlib import Path


def partial_of(final: Path) -> Path:
    """An empty folder beside `final` to write in until `swap_in`; what an earlier, killed run left there goes."""
    partial = final.with_name(final.name + ".tmp")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def swap_in(partial: Path, final: Path) -> Path:
    """Rename the finished folder `partial` to `final`; what stood there goes only once the new one is in its place.

    A process that dies in between leaves the former one as `NAME.old`, and the next call removes it.
    """
    old = final.with_name(final.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        final.rename(old)
    partial.rename(final)
    shutil.rmtree(old, ignore_errors=True)
    return final
