"""One process at a time: a lock that the kernel releases however the process ends.

The process locks the folder that contains the lock file, and the file. A deleted or replaced lock file does not let
another process in, because the folder stays locked. A moved folder stays locked under its new name. On a file system
that cannot lock folders (NFS) only the file is locked; `Unchanged` then detects a deleted or replaced lock file.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pvg.errors import PvgError, StateError
from pvg.store.atomic import disk_full_explained

Identity = tuple[int, int]  # device and inode of a file or a folder

# What flock answers on a file system that cannot lock folders.
NO_FOLDER_LOCKS = frozenset({errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EISDIR})


@contextmanager
def exclusive(file: Path, refusal: Callable[[str], PvgError]) -> Iterator[None]:
    """Lock `file`, which is created if it is missing, and its folder. Raises `refusal(owner)` if another process has
    locked either.

    The lock belongs to the open files, so a forked child shares it until it ends or executes another program.
    """
    folder = os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if not _lock_folder(folder):
            raise refusal(_owner(_read(file)))
        with disk_full_explained(file):
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise refusal(_owner(os.pread(descriptor, 32, 0))) from None
            with disk_full_explained(file):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, str(os.getpid()).encode(), 0)
            yield
        finally:
            os.close(descriptor)
    finally:
        os.close(folder)


class Unchanged:
    """Checks whether a folder and its lock file are still the same as when this object was made.

    A process that has locked a folder calls this before each commit, because its lock does not cover another folder
    that was moved to the same path.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._folder_was, self._file_was = _identity(file.parent), _identity(file)

    def __call__(self) -> None:
        """Raises StateError if the folder was moved, deleted or replaced, or if its lock no longer protects it."""
        folder = self._file.parent
        if self._folder_was is None or _identity(folder) != self._folder_was:
            raise StateError(
                f"The folder {folder} was moved, deleted or replaced while this process was writing to it.",
                "All commits are in the old folder. If you moved it, continue there: pvg train --resume PATH",
            )
        file = _identity(self._file)
        if file == self._file_was or (file is None and _can_lock(folder)):
            return
        raise StateError(
            f"The lock file {self._file} was deleted or replaced, so another process may be writing to {folder}.",
            "This process stopped before its next commit. Stop the other process, or continue later: "
            f"pvg train --resume {folder.resolve().name}",
        )


def _lock_folder(descriptor: int) -> bool:
    """Lock an open folder; False if another process has locked it. True if the file system cannot lock folders."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NO_FOLDER_LOCKS:
            raise
    return True


def _can_lock(folder: Path) -> bool:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError as error:
        if error.errno not in NO_FOLDER_LOCKS:
            raise
        return False
    finally:
        os.close(descriptor)
    return True


def _identity(path: Path) -> Identity | None:
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_dev, found.st_ino


def _read(file: Path) -> bytes:
    return file.read_bytes()[:32] if file.is_file() else b""


def _owner(content: bytes) -> str:
    # Empty for the instant between another process's flock and its writing of the number.
    return f"process {content.decode()}" if content.isdigit() else "another process"
