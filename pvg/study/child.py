"""Becomes a command that ends when its owner does: `python child.py OWNER_PID COMMAND ...`

A cell that went on after its study was killed would hold its run's lock against the next start, unseen. So on Linux it
gets SIGKILL with its owner, which loses nothing that it committed. Only the standard library: it starts at once.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h; it outlives the exec


def main(owner: int, command: list[str]) -> None:
    """Does not return."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != owner:
        sys.exit("The study that wanted this cell is gone.")
    os.execv(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
