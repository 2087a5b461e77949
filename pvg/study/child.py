"""Becomes a command that ends when its owner ends: `python child.py OWNER_PID COMMAND ...`

If a cell outlived its killed study, it would hold its run's lock unseen and block the next start. So on Linux it gets
SIGKILL when its owner ends, which loses nothing that it committed. Uses only the standard library, to start fast.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # from linux/prctl.h; it stays in effect after exec


def main(owner: int, command: list[str]) -> None:
    """Replaces this process by the command; does not return."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != owner:
        sys.exit("The study that started this cell has ended.")
    os.execv(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
