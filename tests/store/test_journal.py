"""JSON lines: appending, torn ends, damage, cutting back."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_samples import flip_byte

from pvg.store.atomic import DamagedFileError
from pvg.store.state import JournalMark, JsonLines, JsonLinesReader, verify

pytestmark = pytest.mark.slow

RECORDS = st.lists(st.dictionaries(st.text(), st.integers(-(2**53), 2**53) | st.text() | st.none(), max_size=3))


@settings(max_examples=40, deadline=None)
@given(records=RECORDS, cut=st.integers(1, 30))
def test_any_torn_end_costs_only_the_last_line(tmp_path_factory, records, cut) -> None:
    path = tmp_path_factory.mktemp("journal") / "metrics.jsonl"
    with JsonLines(path) as journal:
        for record in records:
            journal.append(record)
    last = {"last": "x" * 30}
    with open(path, "ab") as file:
        file.write(orjson.dumps(last)[:cut])
    reader = JsonLinesReader(path)
    assert (list(reader), reader.torn) == (records, 1)
    with JsonLines(path) as journal:
        assert journal.torn == cut
        journal.append(last)
    reader = JsonLinesReader(path)
    assert (list(reader), reader.torn) == ([*records, last], 0)


def test_truncate_goes_back_to_a_commit(tmp_path: Path) -> None:
    with JsonLines(tmp_path / "a.jsonl") as journal:
        journal.append({"step": 0})
        committed = journal.mark.bytes
        journal.append({"step": 1})
        journal.truncate(committed)
        assert journal.mark.bytes == committed
        journal.append({"step": 10})
    assert list(JsonLinesReader(journal.path)) == [{"step": 0}, {"step": 10}]


def test_truncate_refuses_a_file_that_is_not_the_one_committed(tmp_path: Path) -> None:
    with JsonLines(tmp_path / "a.jsonl") as journal:
        journal.append({"step": 0})
        end = journal.mark.bytes
        for offset, message in ((end + 1, "were committed"), (end - 1, "No line"), (-1, "No line")):
            with pytest.raises(DamagedFileError, match=message):
                journal.truncate(offset)
        assert journal.path.stat().st_size == end
        journal.truncate(0)
        assert journal.path.stat().st_size == 0


@pytest.mark.parametrize("line", [b"\n", b"{\n", b"[1]\n", b"\x00\x00\n", b'{"a": "\xff"}\n'])
def test_damage_in_a_whole_line_is_an_error_with_file_and_line(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a":1}\n' + line + b'{"b":1}\n')
    rows = iter(JsonLinesReader(path))
    assert next(rows) == {"a": 1}
    with pytest.raises(DamagedFileError, match=r"a\.jsonl, line 2, is damaged"):
        next(rows)


def test_numbers_without_json_become_null_and_numpy_becomes_plain(tmp_path: Path) -> None:
    with JsonLines(tmp_path / "a.jsonl") as journal:
        journal.append({"nan": math.nan, "inf": -math.inf, "f": np.float32(0.5), "i": np.int64(3), "v": np.arange(2)})
    assert list(JsonLinesReader(journal.path)) == [{"nan": None, "inf": None, "f": 0.5, "i": 3, "v": [0, 1]}]


def three_commits(path: Path) -> list[JournalMark]:
    """Two lines before each mark, and one line that no commit vouches for."""
    marks = []
    with JsonLines(path) as journal:
        for number in range(6):
            journal.append({"step": number, "loss": 0.25})
            if number % 2:
                marks.append(journal.mark)
        journal.append({"step": 6})
    return marks


def test_a_mark_is_of_what_the_file_holds(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    marks = three_commits(path)
    data = path.read_bytes()
    assert [mark.sha256 for mark in marks] == [hashlib.sha256(data[: mark.bytes]).hexdigest() for mark in marks]
    with JsonLines(path) as journal:
        assert journal.mark == JournalMark(len(data), hashlib.sha256(data).hexdigest())
        journal.truncate(marks[1].bytes)
        assert journal.mark == marks[1]
        journal.append({"step": 4, "loss": 0.25})
        journal.append({"step": 5, "loss": 0.25})
        assert journal.mark == marks[2]


def test_any_change_before_a_mark_is_found_with_its_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    marks = three_commits(path)
    verify(path, marks)
    whole = path.read_bytes()
    for place in range(len(whole)):
        flip_byte(path, place)
        if place >= marks[-1].bytes:
            verify(path, marks)
        else:
            number = next(number for number, mark in enumerate(marks) if place < mark.bytes)
            with pytest.raises(DamagedFileError) as caught:
                verify(path, marks)
            if whole[place] != 10:  # a lost line end leaves one line fewer
                assert f"a.jsonl, lines {2 * number + 1} to {2 * number + 2}: " in caught.value.message
        path.write_bytes(whole)
    flip_byte(path, 3)
    with pytest.raises(DamagedFileError, match=r"a\.jsonl, lines 1 to 6: "):
        verify(path, marks[-1:])


def test_a_journal_that_is_too_short_or_missing_is_found(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    marks = three_commits(path)
    path.write_bytes(path.read_bytes()[: marks[-1].bytes - 1])
    with pytest.raises(DamagedFileError, match="were committed"):
        verify(path, marks)
    verify(path, marks[:2])
    path.unlink()
    with pytest.raises(DamagedFileError, match="the file is missing"):
        verify(path, marks)
    verify(path, [])
    verify(path, [JournalMark(0, hashlib.sha256().hexdigest())])
