"""Results in a file: what survives a kill, a torn line, a damaged line, and a second process."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pvg.errors import UsageError
from pvg.store.atomic import DamagedFileError
from pvg.traces.kept_results import KeptResults, digest_of_question


def test_results_are_there_again_in_another_process(tmp_path):
    file = tmp_path / "new" / "results.jsonl"
    with KeptResults(file) as kept:
        kept.put("a", {"p": [0.25, 1 / 3]})
        kept.put("b", "text with \n a line end")
    with KeptResults(file) as kept:
        assert (kept.get("a"), kept.get("b"), kept.get("c")) == ({"p": [0.25, 1 / 3]}, "text with \n a line end", None)


def test_a_torn_last_line_is_dropped_and_written_again(tmp_path):
    file = tmp_path / "results.jsonl"
    with KeptResults(file) as kept:
        kept.put("a", 1)
        kept.put("b", 2)
    file.write_bytes(file.read_bytes()[:-3])
    with KeptResults(file) as kept:
        assert kept.get("b") is None
        kept.put("b", 3)
    with KeptResults(file) as kept:
        assert (kept.get("a"), kept.get("b")) == (1, 3)


def test_a_killed_process_loses_nothing_that_it_put(tmp_path):
    file = tmp_path / "results.jsonl"
    program = (
        "import os, signal, pathlib; from pvg.traces.kept_results import KeptResults\n"
        f"kept = KeptResults(pathlib.Path({str(file)!r}))\n"
        "for n in range(50): kept.put(str(n), n)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", program], check=False)
    with KeptResults(file) as kept:
        assert [kept.get(str(n)) for n in range(50)] == list(range(50))


@pytest.mark.parametrize("line", [b"not json\n", b"[1]\n", b'{"key": "a"}\n', b"\xff\xfe\n"])
def test_a_damaged_line_is_an_error(tmp_path, line):
    file = tmp_path / "results.jsonl"
    file.write_bytes(line)
    with pytest.raises(DamagedFileError, match="line 1"):
        KeptResults(file)
    with pytest.raises(DamagedFileError):  # the lock is free again
        KeptResults(file)


def test_two_processes_do_not_share_a_file(tmp_path):
    with KeptResults(tmp_path / "results.jsonl"), pytest.raises(UsageError, match="in use"):
        KeptResults(tmp_path / "results.jsonl")


def test_a_digest_depends_on_every_part():
    found = {digest_of_question(*parts) for parts in (("a", "b"), ("ab",), ("a", ["b"]), ("b", "a"), ("a", "b", None))}
    assert len(found) == 5
