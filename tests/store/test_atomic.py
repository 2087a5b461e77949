"""Atomic files: the old content or the new one, full disks, leftovers."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pvg.errors import EXIT_ENVIRONMENT, MissingRequirementError
from pvg.store.atomic import make_directory, remove_temporaries, temporary_beside, write_atomic, write_output


def test_write_replaces_the_whole_file_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomic(path, b"a long old content")
    write_atomic(path, b"new")
    assert path.read_bytes() == b"new"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_data_is_synced_before_the_rename_and_the_folder_after_it(tmp_path: Path, monkeypatch) -> None:
    calls: list[str] = []
    sync, rename = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (calls.append(os.readlink(f"/proc/self/fd/{fd}")), sync(fd)))
    monkeypatch.setattr(os, "replace", lambda a, b: (calls.append("rename"), rename(a, b)))
    write_atomic(tmp_path / "file", b"x")
    assert len(calls) == 3
    assert Path(calls[0]).name.startswith(".tmp-file-")
    assert calls[1:] == ["rename", str(tmp_path)]


def test_a_failed_write_leaves_the_old_file_and_no_temporary(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "file"
    write_atomic(path, b"old")

    def refuse(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="Input/output error") as caught:
        write_atomic(path, b"new")
    assert caught.value.errno == errno.EIO
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_what_a_user_names_may_be_a_link_or_a_device(tmp_path: Path) -> None:
    link, pipe = tmp_path / "link.html", tmp_path / "pipe"
    link.symlink_to("page.html")
    for text in (b"new", b"newer"):
        write_output(link, text)
        assert link.is_symlink()
        assert (tmp_path / "page.html").read_bytes() == text
    os.mkfifo(pipe)  # as good as /dev/null, which root would lose by a rename
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_output(pipe, b"through it")
    assert os.read(reader, 100) == b"through it"
    os.close(reader)
    assert pipe.is_fifo()
    with pytest.raises(IsADirectoryError):
        write_output(tmp_path, b"into a folder")
    assert {path.name for path in tmp_path.iterdir()} == {"link.html", "page.html", "pipe"}


def test_other_system_errors_surface(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_atomic(tmp_path / "absent" / "file", b"x")


FULL_DISK = """
import resource, sys
from pathlib import Path
from pvg.errors import MissingRequirementError
from pvg.records import *
from pvg.store.atomic import write_atomic
from pvg.store import FileStateStore, JsonLines, RolloutShards
sys.path.insert(0, sys.argv[2])
from store_samples import rollout, names_below

root = Path(sys.argv[1])
limited = sys.argv[3] == "limit"
write_atomic(root / "file", b"old")
shards, store, journal = RolloutShards(root), FileStateStore(root / "state.json"), JsonLines(root / "metrics.jsonl")
info = shards.write(0, "mint-00000", [rollout(0)])
store.save({"step": 1})
journal.append({"a": 1})
before = {name: (root / name).read_bytes() for name in names_below(root)}
if limited:
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))

large = "x" * 2_000_000
def fails(action):
    try:
        action()
    except MissingRequirementError as error:
        assert "disk is full while writing" in error.message, error.message
        assert "--resume" in error.remedy
        assert ".tmp-" not in error.message, error.message
    else:
        sys.exit("it fitted")
    # state.previous.json may be there: the copy of the commit fits.
    after = {name: (root / name).read_bytes() for name in names_below(root) if name != "state.previous.json"}
    assert after == before, after.keys()

fails(lambda: write_atomic(root / "file", large.encode()))
fails(lambda: shards.write(0, "mint-00001", [rollout(i, problem=large[:1000] + str(i)) for i in range(2000)]))
fails(lambda: store.save({"step": 2, "large": large}))
fails(lambda: journal.append({"large": large}))
assert store.load().state == {"step": 1}
shards.verify(info)
journal.append({"b": 2})
if not limited:
    print("survived")
    sys.exit()
import torch
from pvg.store.checkpoints import write_checkpoint
before = {name: (root / name).read_bytes() for name in names_below(root) if name != "state.previous.json"}
fails(lambda: write_checkpoint(root / "checkpoints", "c", {"w": torch.zeros(500_000)}, {}))
assert not list((root / "checkpoints").iterdir())
print("survived")
"""


def _run_full_disk(root: Path, how: str) -> None:
    arguments = [sys.executable, "-c", FULL_DISK, str(root), str(Path(__file__).parent), how]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stdout) == (0, "survived\n"), done.stderr


def test_a_file_size_limit_is_a_full_disk(tmp_path: Path) -> None:
    _run_full_disk(tmp_path, "limit")


def test_a_full_tmpfs_is_a_full_disk(tmp_path: Path) -> None:
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("no right to mount a tmpfs")
    try:
        _run_full_disk(tmp_path, "tmpfs")
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_every_way_of_being_full_has_a_remedy(tmp_path: Path, monkeypatch, number: int) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(MissingRequirementError) as caught:
        write_atomic(tmp_path / "file", b"new")
    assert caught.value.exit_code == EXIT_ENVIRONMENT
    assert str(tmp_path / "file") in caught.value.message
    assert caught.value.remedy
    assert list(tmp_path.iterdir()) == []


def test_leftovers_are_recognised_and_only_they_are_removed(tmp_path: Path) -> None:
    (tmp_path / "kept").write_bytes(b"1")
    file = temporary_beside(tmp_path / "a.arrow")
    file.write_bytes(b"half")
    folder = temporary_beside(tmp_path / "checkpoint")
    (folder / "inner").mkdir(parents=True)
    assert remove_temporaries(tmp_path, "a.arrow") == [file]
    assert remove_temporaries(tmp_path) == [folder]
    assert remove_temporaries(tmp_path / "absent") == []
    assert [entry.name for entry in tmp_path.iterdir()] == ["kept"]


def test_make_directory_makes_parents_once(tmp_path: Path) -> None:
    make_directory(tmp_path / "a" / "b" / "c")
    make_directory(tmp_path / "a" / "b" / "c")
    assert (tmp_path / "a" / "b" / "c").is_dir()
