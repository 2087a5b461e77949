"""The lease of a run: lets one driver commit, when drivers on several hosts can reach the run's folder.

The kernel's lock keeps drivers on one host apart, but another host's kernel may not know of it. So each driver holds a
lease with an epoch: the file `lease-000004.json`, which names the driver and counts its beats.

- A driver on the host of its predecessor keeps the file: the kernel's lock has told that the predecessor is gone.
- A driver on another host creates the file of the next epoch, which only one driver can do, and then removes the file
  of the epoch before. A driver that finds its file missing has lost the lease, and commits nothing more.
- Both first write their own file and then read the other's. So if they start at once, at least one sees the other.
- A lease of another host is free if it was released, or if it has not beaten for WATCH_S. Clocks of two hosts are never
  compared.

A driver that was silent for so long may still have a commit in progress. Its check just before a rename fails if it
comes after the new file. If it comes before, the rename fails, because the new driver first removes all temporary
files. Its journals are other files than the new driver's, which replaces them by copies.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import orjson

from pvg.errors import StateError, UsageError
from pvg.store.atomic import DamagedFileError, atomic_file, disk_full_explained, read_stored, sync_directory

BEAT_S = 5.0
WATCH_S = 30.0  # six beats

LEASE_NAME = re.compile(r"lease-(\d{6,})\.json")

Work = Literal["play", "evaluate"]
# host, boot, namespace, process, start, beats and work of a driver; `ended`: it has released the lease
Driver = dict[str, Any]


def this_boot() -> str:
    """Identifies the running kernel: containers on one host share it, and with it the kernel's locks."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # not Linux
        return socket.gethostname()


def this_namespace() -> str:
    """Identifies the processes that this process can see: two containers on one host see different ones."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:  # not Linux
        return ""


def sees(driver: Driver) -> bool:
    """Whether this process would see the driver's process, if it lived."""
    return driver.get("boot") == this_boot() and driver.get("namespace") == this_namespace()


def is_gone(driver: Driver) -> bool:
    """Whether the driver's process has ended. False if this process would not see it: on another host, or in another
    container, where its number means another process."""
    process = driver.get("process")
    if not sees(driver) or not process:
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # it belongs to another user
        return False
    stat = _stat(process)
    return stat is not None and (stat[0] in "ZX" or driver.get("start", stat[1]) != stat[1])


def _stat(process: int) -> tuple[str, int] | None:
    """The state of a process (Z and X: it has ended), and its start in the kernel's ticks since the boot. The start
    differs from that of a later process with the same number. None where the kernel does not say it."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], int(fields[19])


def is_lease(path: Path) -> bool:
    return LEASE_NAME.fullmatch(path.name) is not None


def newest_lease(folder: Path) -> Path | None:
    """The lease with the highest epoch in `folder`; None if it was never leased."""
    found = [path for path in folder.iterdir() if is_lease(path)]
    return max(found, key=_epoch, default=None)


def read_driver(lease: Path | None) -> Driver:
    """The driver that a lease names; empty if there is no lease, or if its driver died while it wrote it."""
    try:
        driver = dict(orjson.loads(read_stored(lease))) if lease is not None else {}
    except (OSError, DamagedFileError, orjson.JSONDecodeError, TypeError, ValueError):
        return {}
    return driver if isinstance(driver.get("process", 0), int) else {}


def name_of(driver: Driver) -> str:
    """A driver's name in messages."""
    return f"process {driver.get('process', '?')} on {driver.get('host', 'another host')}"


_held: dict[Path, Path] = {}  # the leases of this process, by the folder's real path


def lease_of(folder: Path) -> Path | None:
    """The lease of `folder` that this process holds, or the one that it has now."""
    return _held.get(folder.resolve()) or newest_lease(folder)


def check_lease(folder: Path, lease: Path | None) -> None:
    """Raises StateError if another driver has taken over `folder` since it had this `lease`."""
    try:
        if lease is not None:
            # Opened, because a network file system may answer `stat` from a cache.
            os.close(os.open(lease, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    except FileNotFoundError:
        driver = name_of(read_driver(newest_lease(folder)))
        raise StateError(
            f"Another driver ({driver}) has taken over the run in {folder}.",
            "This process stopped before its next commit, and the other driver continues the run.",
        ) from None


@contextmanager
def leased(
    folder: Path, journals: Sequence[Path], waiting: Callable[[str], None], work: Work = "play"
) -> Iterator[None]:
    """Hold the lease of `folder`. The caller holds the kernel's lock.

    `journals`: files to which a driver appends. `waiting` gets a line if this call has to wait for another host.
    `work`: what the driver does with the run, for commands that show the run.
    Raises UsageError if a driver on another host is alive or takes the lease at the same time.
    """
    before = newest_lease(folder)
    driver = read_driver(before)
    elsewhere = before is not None and driver.get("boot") != this_boot()
    lost = elsewhere and not driver.get("ended")
    if before is not None and lost:
        driver = _watch(before, driver, waiting)
    if before is None or elsewhere:
        mine = folder / f"lease-{(0 if before is None else _epoch(before)) + 1:06d}.json"
    else:
        mine = before
    held = _Held(mine, work, new=mine != before)
    try:
        _refuse_contest(mine, before, driver)
        _held[folder.resolve()] = mine
        for older in [path for path in folder.iterdir() if is_lease(path) and _epoch(path) < _epoch(mine)]:
            older.unlink(missing_ok=True)
        if lost:
            for journal in filter(Path.is_file, journals):
                # A driver that still has the old file open then writes to a deleted file, not to the new one.
                with journal.open("rb") as old, atomic_file(journal) as new:  # in pieces: it may be larger than memory
                    shutil.copyfileobj(old, new)
        sync_directory(folder)
        yield
    finally:
        _held.pop(folder.resolve(), None)
        held.release()


def _refuse_contest(mine: Path, before: Path | None, driver: Driver) -> None:
    """Raise UsageError if another host has taken the lease `mine`, or if the lease `before` is in use again. `driver`:
    what `before` named last."""
    newest = newest_lease(mine.parent)
    if newest != mine:
        raise _taken_over(mine.parent)
    if before is None or before == mine:
        return
    now = read_driver(before)
    if now != driver and not now.get("ended"):
        mine.unlink()
        raise _driven(mine.parent, now)


class _Held:
    """A lease of this process, with a new file or its predecessor's. A thread counts its beats until `release`."""

    def __init__(self, path: Path, work: Work, *, new: bool) -> None:
        self._driver: Driver = {
            "host": socket.gethostname(),
            "boot": this_boot(),
            "namespace": this_namespace(),
            "process": os.getpid(),
            **({} if (stat := _stat(os.getpid())) is None else {"start": stat[1]}),
            "work": work,
            "beats": 0,
            "ended": False,
        }
        with disk_full_explained(path):
            self._file = _opened(path, self._line(), new)
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="pvg-lease", daemon=True)
        self._thread.start()

    def release(self) -> None:
        self._released.set()
        self._thread.join()
        # Always the same bytes, so that a run that was only read has the same files as before.
        self._driver |= {"namespace": "", "process": 0, "work": "", "beats": 0, "ended": True}
        self._driver.pop("start", None)
        self._write()
        os.close(self._file)

    def _beat(self) -> None:
        while not self._released.wait(BEAT_S):
            self._driver["beats"] += 1
            self._write()

    def _write(self) -> None:
        try:
            os.pwrite(self._file, self._line(), 0)
            os.fsync(self._file)  # otherwise a network file system may show it to other hosts half a minute later
        except OSError:
            # A beat that is missing costs at most the lease, which every commit checks. A disk that cannot be written
            # stops the next commit with its own message.
            return

    def _line(self) -> bytes:
        # Of constant length, so that a write always covers the one before.
        return orjson.dumps(self._driver).ljust(511) + b"\n"


def _watch(lease: Path, driver: Driver, waiting: Callable[[str], None]) -> Driver:
    """Return when the driver on another host has not beaten for WATCH_S: what the lease says then. Raises UsageError if
    it beats."""
    waiting(
        f"This run was driven by {name_of(driver)}, which did not end it. Waiting {WATCH_S:g} s to see that it is gone."
    )
    until = time.monotonic() + WATCH_S
    while time.monotonic() < until:
        time.sleep(min(1.0, BEAT_S))
        seen = read_driver(lease)
        if seen.get("ended"):
            return seen
        if seen.get("beats") != driver.get("beats"):
            raise _driven(lease.parent, driver)
    return driver


def _driven(folder: Path, driver: Driver) -> UsageError:
    return UsageError(
        f"The run in {folder} is being driven by {name_of(driver)}.",
        "Wait until it is done, or stop it there (Ctrl-C commits first).",
    )


def _taken_over(folder: Path) -> UsageError:
    return UsageError(
        f"Another driver has just taken over the run in {folder}.", "Wait until it is done, or stop it there."
    )


def _opened(path: Path, content: bytes, new: bool) -> int:
    """Write `content` to `path`, which must not exist if it is `new`, and must exist otherwise; returns the open
    file."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if new else 0), 0o644)
    except (FileExistsError, FileNotFoundError):
        raise _taken_over(path.parent) from None
    try:
        os.pwrite(file, content, 0)
        os.fsync(file)
    except BaseException:
        os.close(file)
        raise
    return file


def _epoch(lease: Path) -> int:
    found = LEASE_NAME.fullmatch(lease.name)
    assert found is not None
    return int(found[1])
