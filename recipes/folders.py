"""Folders that commands write to."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from recipes.errors import RecipeError


def make_writable(folder: Path) -> None:
    """Make `folder` where it is missing. Raises OSError where that, or writing into it, is not possible."""
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def writable_folder(folder: Path, key: str) -> Path:
    """`folder`, made where it is missing. Commands ask before their work, which may take hours.

    Args:
        key: the recipe key that names it, for the message.

    Raises:
        RecipeError: nothing can be written there.
    """
    try:
        make_writable(folder)
    except OSError as e:
        raise RecipeError(f"{key}: cannot write to {folder}: {e.strerror}. Give a folder that you may write to.") from None
    return folder
