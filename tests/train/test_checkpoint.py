"""Checkpoints: whole or not there, by step, the newest kept; a full disk costs only the one at hand."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors import SafetensorError

from recipes.errors import HeadstartError
from train.checkpoint import latest, save


def accelerator(error: Exception | None = None) -> Any:
    """What `save` asks of accelerate; with `error`, the disk is full half-way."""

    def save_state(folder: str) -> None:
        Path(folder).mkdir(parents=True)
        (Path(folder) / "model.safetensors").write_bytes(b"as much as fitted")
        if error is not None:
            raise error

    return SimpleNamespace(is_main_process=True, wait_for_everyone=lambda: None, save_state=save_state)


def test_the_newest_are_kept_by_step(tmp_path):
    """A million has more digits than the names are padded to."""
    for step in (999_998, 999_999, 1_000_000):
        assert save(accelerator(), tmp_path, step, keep=2) == latest(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_1000000", "step_999999"]
    assert latest(tmp_path / "nowhere") is None


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        RuntimeError("PytorchStreamWriter failed writing file data/3: file write failed"),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
    ids=lambda e: type(e).__name__,
)
def test_a_full_disk_loses_no_finished_checkpoint(tmp_path, error):
    save(accelerator(), tmp_path, 20, keep=1)
    with pytest.raises(HeadstartError, match=r"step_000040\.tmp .* GB free.*kept \(step_000020\).*run the same command again"):
        save(accelerator(error), tmp_path, 40, keep=1)
    assert latest(tmp_path) == tmp_path / "step_000020"
    assert save(accelerator(), tmp_path, 40, keep=1) == latest(tmp_path)  # what was left over does not stand in the way
    assert [p.name for p in tmp_path.iterdir()] == ["step_000040"]
