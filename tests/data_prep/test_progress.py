"""The progress display: plain lines in a log, a bar on a terminal, nothing for short work."""

import io

import pytest

from data_prep.progress import Progress


def test_plain_lines_tell_pace_and_time_left(capsys, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("data_prep.progress.time.monotonic", lambda: clock[0])
    with Progress("answers", total=30, done=10) as progress:  # ten were there before: they do not count for the pace
        clock[0] += 4
        progress.add(items=5, tokens=400)  # too early for a line
        clock[0] += 6
        progress.add(items=5, tokens=600)
        assert progress.seconds == 10
        clock[0] += 62
        progress.add(items=10, tokens=1000)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "answers: 20/30 rows | 1,000 tokens | 100 tokens/s | 10s left"
    assert lines[-1] == "answers: 30/30 rows | 2,000 tokens | 27.8 tokens/s | took 1m12s"


def test_unknown_end_and_items_without_tokens(capsys, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("data_prep.progress.time.monotonic", lambda: clock[0])
    with Progress("rows", total=None) as progress:
        clock[0] += 8
        progress.add(items=4000)
    assert capsys.readouterr().err.splitlines()[0] == "rows: 4,000 rows | 500 rows/s"


def test_short_work_leaves_no_line(capsys):
    with Progress("verify", total=1, unit="files") as progress:
        progress.add(items=1)
    assert capsys.readouterr().err == ""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_a_bar(monkeypatch):
    """The bar is taken away also when the work fails."""
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    with pytest.raises(RuntimeError), Progress("features", total=4, unit="tokens") as progress:
        progress.add(items=3)
        assert progress._bar is not None
        progress._bar.refresh()
        assert "features" in terminal.getvalue() and "3/4" in terminal.getvalue()
        raise RuntimeError
    assert progress._bar is None
