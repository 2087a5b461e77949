"""A driver of a run on one of several hosts that share its folder, but not the kernel's locks. Run by test_lease.py.

    python driver_on_a_host.py RUN_DIRECTORY HOST

Commits as fast as it can, and prints a line per commit. Time passes faster than in the product.
"""

from __future__ import annotations

import fcntl
import socket
import sys
from pathlib import Path

from committing_writer import commit_for_ever

from pvg.errors import PvgError
from pvg.store import lease
from pvg.store.run_directory import RunDirectory


def main() -> None:
    path, host = sys.argv[1:]
    fcntl.flock = lambda *_: None  # type: ignore[assignment]
    socket.gethostname = lambda: host
    lease.this_boot = lambda: f"boot of {host}"
    lease.BEAT_S, lease.WATCH_S = 0.1, 1.5
    try:
        commit_for_ever(RunDirectory.open(path, Path()), 1)
    except PvgError as error:
        print(type(error).__name__, error.message, file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
