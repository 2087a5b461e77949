"""Processes that keep cores busy during a benchmark, as other programs on the machine would.

    with busy_processes(2):
        ...                         # two processes compute, each in its own session

Each process has its own session, because Linux divides the cores between sessions first (autogroup), and a program in
another terminal has its own session too. A process ends when its standard input ends, so it also ends when its owner is
killed.
"""

from __future__ import annotations

import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

TURNS = 20_000  # loop turns between two checks of the standard input: about a millisecond


@contextmanager
def busy_processes(count: int) -> Iterator[list[int]]:
    """The process ids of `count` processes. All of them compute when the block begins; none is left when it ends."""
    with ExitStack() as stack:
        processes = [stack.enter_context(_busy_process()) for _ in range(count)]
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()  # it has begun
        yield [process.pid for process in processes]


@contextmanager
def _busy_process() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    with process:  # closes the pipes and waits, last of all
        try:
            yield process
        finally:
            process.kill()


def compute() -> None:
    """Use a core until the standard input ends."""
    print("computing", flush=True)
    while not select.select([sys.stdin], [], [], 0)[0]:
        for _ in range(TURNS):
            pass


if __name__ == "__main__":
    compute()
