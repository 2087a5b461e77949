"""Folders of versions: whole or not there, removed only by whom they belong to."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import orjson
import pytest

from pvg.errors import ConfigurationError, StateError
from pvg.servers.publishing import PublishingSession, WeightLabel
from pvg.servers.transports import files
from pvg.servers.transports.files import STABLE, VersionFolders
from pvg.store.atomic import write_synced

FIRST, SECOND = PublishingSession(1000, "aaaaaaaa"), PublishingSession(2000, "bbbbbbbb")


def fill(folder: Path) -> dict[str, int]:
    write_synced(folder / "model.safetensors", b"12345")
    return {"model.safetensors": 5}


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_lock_that_another_process_holds_and_keeps_is_not_waited_for(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(files, "LOCK_S", 0.1)
    take, held = fcntl.flock, []

    def taken_first(descriptor: int, how: int) -> None:
        if not held:  # the other process looks in the instant between opening and locking
            held.append(os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR))
            take(held[0], fcntl.LOCK_EX)
        take(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", taken_first)
    with pytest.raises(StateError, match="Another process holds the new lock"):
        VersionFolders(tmp_path, "run", FIRST)
    os.close(held[0])


def test_a_version_is_a_folder_with_its_sizes(tmp_path: Path) -> None:
    folders = VersionFolders(tmp_path / "root", "run", FIRST)
    label = WeightLabel(FIRST, 12)
    folders.write(label, fill)
    assert folders.name(label) == "run/v000012-aaaaaaaa"
    folder = tmp_path / "root" / folders.name(label)
    assert names(folder) == {"model.safetensors", STABLE}
    assert orjson.loads((folder / STABLE).read_bytes()) == {"version": 1, "files": {"model.safetensors": {"bytes": 5}}}
    with pytest.raises(StateError, match="already staged"):
        folders.write(label, fill)
    with pytest.raises(ValueError, match="not a label of the session"):
        folders.write(WeightLabel(SECOND, 13), fill)
    folders.close()
    folders.close()
    assert names(tmp_path / "root" / "run") == set()


def test_everything_is_synced_before_the_rename_and_stable_is_the_last_file(tmp_path: Path, monkeypatch) -> None:
    folders, seen = VersionFolders(tmp_path, "run", FIRST), []
    fsync, rename = os.fsync, os.rename
    monkeypatch.setattr(os, "fsync", lambda d: (seen.append(os.readlink(f"/proc/self/fd/{d}")), fsync(d)))
    monkeypatch.setattr(os, "rename", lambda a, b: (seen.append("rename"), rename(a, b)))
    folders.write(WeightLabel(FIRST, 1), fill)
    temporary = Path(seen[0]).parent
    assert temporary.name.startswith(".tmp-v000001-aaaaaaaa-")
    assert seen == [
        str(temporary / "model.safetensors"),
        str(temporary / STABLE),
        str(temporary),
        "rename",
        str(tmp_path / "run"),
    ]


def test_two_sessions_share_a_root_and_leave_each_other_alone(tmp_path: Path) -> None:
    first, second = VersionFolders(tmp_path, "run", FIRST), VersionFolders(tmp_path, "run", SECOND)
    other = VersionFolders(tmp_path, "other", SECOND)
    writing = tmp_path / "run" / ".tmp-v000009-aaaaaaaa-0a1b2c3d"  # the first session is in the middle of it
    writing.mkdir()
    for version in (1, 2, 3):
        first.write(WeightLabel(FIRST, version), fill)
        second.write(WeightLabel(SECOND, version), fill)
    other.write(WeightLabel(SECOND, 1), fill)
    second.retire(1, [])
    assert writing.is_dir()
    assert first.made == (1, 2, 3)
    assert all((tmp_path / first.name(WeightLabel(FIRST, version))).is_dir() for version in first.made)
    second.close()
    assert all((tmp_path / first.name(WeightLabel(FIRST, version))).is_dir() for version in first.made)
    assert (tmp_path / other.name(WeightLabel(SECOND, 1))).is_dir()
    with pytest.raises(StateError, match="already open"):
        VersionFolders(tmp_path, "run", FIRST)


def test_what_a_dead_session_left_is_removed(tmp_path: Path) -> None:
    dead = VersionFolders(tmp_path, "run", FIRST)
    dead.write(WeightLabel(FIRST, 1), fill)
    os.close(dead._lock)  # what a SIGKILL does
    dead._lock = None
    run = tmp_path / "run"
    (run / ".tmp-v000002-aaaaaaaa-0a1b2c3d").mkdir()
    (run / ".tmp-v000002-aaaaaaaa-0a1b2c3d" / "model.safetensors").write_bytes(b"half")
    (run / "notes.txt").touch()
    (run / "v000009-dddddddd").mkdir()  # a copy: there is no lock of such a session
    living = VersionFolders(tmp_path, "run", SECOND)
    living.retire(1, [])
    assert names(run) == {"v000009-dddddddd", ".session-bbbbbbbb", "notes.txt"}


def test_no_link_is_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").touch()
    root = tmp_path / "root"
    folders = VersionFolders(root, "run", FIRST)
    for version in (1, 2):
        folders.write(WeightLabel(FIRST, version), fill)
    replaced = root / folders.name(WeightLabel(FIRST, 1))
    replaced.rename(tmp_path / "moved")
    replaced.symlink_to(outside)
    (root / "run" / ".tmp-v000003-dddddddd-0a1b2c3d").symlink_to(outside)
    (root / "run" / ".session-dddddddd").symlink_to(outside / "precious")
    folders.retire(1, [])
    assert (outside / "precious").exists()
    assert replaced.is_symlink()
    (root / "linked").symlink_to(outside)
    with pytest.raises(ConfigurationError, match="link"):
        VersionFolders(root, "linked", SECOND)


@pytest.mark.parametrize("run", ["", "..", ".", "a/b", "/etc", "../other", ".hidden", "a\0b", "a b"])
def test_a_run_name_leads_nowhere_else(tmp_path: Path, run: str) -> None:
    with pytest.raises(ConfigurationError, match="cannot name a folder"):
        VersionFolders(tmp_path / "root", run, FIRST)
    assert not (tmp_path / "root").exists()
