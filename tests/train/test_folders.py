"""What stood under a name goes only once the new folder is in its place."""

from pathlib import Path

import pytest

from train.folders import swap_in


def folder(path: Path, text: str) -> Path:
    path.mkdir()
    (path / "file").write_text(text)
    return path


@pytest.mark.parametrize("former", [False, True])
def test_the_new_folder_takes_the_name_and_nothing_is_left_over(tmp_path, former):
    if former:
        folder(tmp_path / "x", "old")
    final = swap_in(folder(tmp_path / "x.tmp", "new"), tmp_path / "x")
    assert (final / "file").read_text() == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_a_swap_that_dies_leaves_the_former_folder_whole(tmp_path, monkeypatch):
    final, partial = folder(tmp_path / "x", "old"), folder(tmp_path / "x.tmp", "new")
    rename = Path.rename

    def dies(self, target):
        if self == partial:
            raise OSError("killed")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", dies)
    with pytest.raises(OSError, match="killed"):
        swap_in(partial, final)
    assert (tmp_path / "x.old" / "file").read_text() == "old" and (partial / "file").read_text() == "new"
    monkeypatch.undo()
    assert (swap_in(partial, final) / "file").read_text() == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["x"]
