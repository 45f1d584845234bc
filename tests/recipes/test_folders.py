"""A folder that nothing can be written to is said before the work."""

import pytest

from recipes.errors import RecipeError
from recipes.folders import writable_folder


def test_it_is_made(tmp_path):
    assert writable_folder(tmp_path / "a/b", "train.dir").is_dir()


def test_a_file_in_the_way(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RecipeError, match=f"eval.dir: cannot write to {tmp_path}/file/x: Not a directory. Give a folder"):
        writable_folder(tmp_path / "file/x", "eval.dir")


def test_no_permission(tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda folder, mode: False)  # root may write anywhere
    with pytest.raises(RecipeError, match=f"export.dir: cannot write to {tmp_path}: Permission denied"):
        writable_folder(tmp_path, "export.dir")
