"""Disks that are full: real faults for code that runs in the process of the tests."""

from __future__ import annotations

import resource
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """The system lets this process make no file larger than `size` bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


@contextmanager
def tmpfs_on(folder: Path) -> Iterator[None]:
    """`folder` is a file system of 1 MB. Skips the test where this process may not mount one."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs root, who may mount: `sudo make test`")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)  # lazily: this process still has files open there
