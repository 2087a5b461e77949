"""Memory that processes of one machine share. This module does not import torch.

    memory = SharedMemory(1 << 20)              # the owner
    memory.view[:4] = b"1234"
    memory.close()

On Linux the memory has no name in any folder: other processes open it through the owner's file descriptors, and nothing
is left when all processes are gone, however they ended. Elsewhere it is a temporary file.
"""

from __future__ import annotations

import mmap
import os
import tempfile


class SharedMemory:
    """`size` bytes, which other processes map at `path`. `close` frees them."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._file: int | None = None
        if hasattr(os, "memfd_create"):
            self._file = os.memfd_create("pvg-weights")
            self.path = f"/proc/{os.getpid()}/fd/{self._file}"
        else:
            self._file, self.path = tempfile.mkstemp(prefix="pvg-weights-")
        os.ftruncate(self._file, size)
        self.view = mmap.mmap(self._file, size)

    def close(self) -> None:
        """Give the memory back. A second call does nothing."""
        if self._file is None:
            return
        os.close(self._file)
        if not self.path.startswith("/proc/"):
            os.unlink(self.path)
        self._file = None  # the mapping ends with its last view
