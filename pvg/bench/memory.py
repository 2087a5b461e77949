"""The most memory that this process held while something ran.

with PeakMemory() as peak:
    work()
peak.megabytes

Resident memory: of the Python process with everything it has loaded. What the allocator keeps of memory that was freed
before counts too.
"""

from __future__ import annotations

import threading
from types import TracebackType

import psutil

EVERY_S = 0.01  # a look takes some 20 microseconds; what lives for less than this may be missed


class PeakMemory:
    """A context manager. A thread of its own looks every EVERY_S, and so do the beginning and the end."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._ended = threading.Event()
        self._most = 0

    @property
    def megabytes(self) -> float:
        return self._most / 1e6

    def __enter__(self) -> PeakMemory:
        self._look()
        self._thread = threading.Thread(target=self._watch, name="pvg-memory", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        self._look()

    def _watch(self) -> None:
        while not self._ended.wait(EVERY_S):
            self._look()

    def _look(self) -> None:
        self._most = max(self._most, self._process.memory_info().rss)
