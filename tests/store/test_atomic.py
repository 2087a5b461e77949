"""Atomic files: the old content or the new one, full disks, leftovers."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
from full_disk import files_up_to, tmpfs_on
from store_samples import names_below, rollout

from pvg.errors import EXIT_ENVIRONMENT, MissingRequirementError
from pvg.store.atomic import new_folder, remove_temporaries, temporary_beside, write_atomic, write_output
from pvg.store.checkpoints import write_checkpoint
from pvg.store.shards import RolloutShards
from pvg.store.state import FileStateStore, JsonLines


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


def test_an_error_of_a_new_file_or_folder_names_it_and_no_temporary(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "x"
    for write in (
        partial(write_atomic, data=b""),
        partial(write_output, data=b""),
        lambda path: new_folder(path).__enter__(),
    ):
        with pytest.raises(FileNotFoundError) as caught:
            write(path)
        assert caught.value.filename == str(path)


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


def check_full_disk(root: Path, limit: AbstractContextManager[None], *writes: Callable[[Path], object]) -> None:
    """Everything that a run writes names the full disk, and leaves what was there."""
    write_atomic(root / "file", b"old")
    shards, store, journal = RolloutShards(root), FileStateStore(root / "state.json"), JsonLines(root / "metrics.jsonl")
    info = shards.write(0, "mint-00000", [rollout(0)])
    store.save({"step": 1})
    journal.append({"a": 1})
    before = {name: (root / name).read_bytes() for name in names_below(root)}
    large = "x" * 2_000_000
    rollouts = [rollout(i, problem=large[:1000] + str(i)) for i in range(2000)]
    with limit:
        for write in (
            lambda: write_atomic(root / "file", large.encode()),
            lambda: shards.write(0, "mint-00001", rollouts),
            lambda: store.save({"step": 2, "large": large}),
            lambda: journal.append({"large": large}),
            *(partial(write, root) for write in writes),
        ):
            with pytest.raises(MissingRequirementError, match="disk is full while writing") as caught:
                write()
            assert "--resume" in caught.value.remedy
            assert ".tmp-" not in caught.value.message
            # state.previous.json may be there: the copy of the commit fits.
            after = {name: (root / name).read_bytes() for name in names_below(root) if name != "state.previous.json"}
            assert after == before
        assert store.load().state == {"step": 1}
        shards.verify(info)
        journal.append({"b": 2})


def test_a_file_size_limit_is_a_full_disk(tmp_path: Path) -> None:
    def checkpoint(root: Path) -> None:
        write_checkpoint(root / "checkpoints", "c", {"w": torch.zeros(500_000)}, {})

    check_full_disk(tmp_path, files_up_to(200_000), checkpoint)
    assert not list((tmp_path / "checkpoints").iterdir())


def test_a_full_tmpfs_is_a_full_disk(tmp_path: Path) -> None:
    with tmpfs_on(tmp_path):
        check_full_disk(tmp_path, nullcontext())


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
