"""Files of JSON lines: what a killed process or a full disk leaves behind."""

from pathlib import Path

import pytest

from recipes.errors import HeadstartError
from recipes.lines import append_line, read_lines


def test_lines_come_back_in_order_and_no_file_has_none(tmp_path):
    path = tmp_path / "a.jsonl"
    assert list(read_lines(path)) == []
    for number in range(3):
        append_line(path, {"n": number, "text": "é\n"})
    assert list(read_lines(path)) == [{"n": number, "text": "é\n"} for number in range(3)]
    assert len(path.read_bytes().splitlines()) == 3


@pytest.mark.parametrize("torn", [b'{"n": 1', '{"text": "é'.encode()[:-1]])
def test_a_torn_line_takes_no_other_along(tmp_path, torn):
    path = tmp_path / "a.jsonl"
    append_line(path, {"n": 0})
    path.write_bytes(path.read_bytes() + torn)
    append_line(path, {"n": 2})
    assert list(read_lines(path)) == [{"n": 0}, {"n": 2}]


def test_a_full_disk_is_named_with_the_remedy():
    with pytest.raises(HeadstartError, match=r"cannot append to /dev/full .*No space left.*is kept; free some space"):
        append_line(Path("/dev/full"), {"n": 1})
