"""One process at a time: a lock on a file, which the kernel releases however the process ends."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pvg.errors import PvgError


@contextmanager
def exclusive(file: Path, refusal: Callable[[str], PvgError]) -> Iterator[None]:
    """Hold `file`, which is created where it is not there. Raises `refusal(owner)` when another process holds it.

    The lock belongs to the open file, so a forked child shares it until it ends or executes another program.
    """
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise refusal(_owner(os.pread(descriptor, 32, 0))) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _owner(content: bytes) -> str:
    # Empty for the instant between another process's flock and its writing of the number.
    return f"process {content.decode()}" if content.isdigit() else "another process"
