"""Runs one command and makes sure that no process of it survives, no matter how it ends.

    python supervisor.py GRACE_S LOG COMMAND ...     stdin: the lifeline; stdout: "pid N", then "exit CODE"

vLLM is a tree of processes: a web server, an engine core, workers. SIGKILL of the root leaves the others running with
their memory. So pvg starts this program in a new session and holds the other end of its stdin. This program ends the
tree when that end closes (for any reason), on SIGTERM, SIGINT or SIGHUP, and when the command ends. A guard process,
forked at the start, ends the tree if this program is killed.

Invariant: while this program or its guard lives, every process of the tree is a descendant of this program (on Linux it
is their subreaper) or a member of its session.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import psutil

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
POLL_S = 0.05  # between two checks of processes that were asked to end
TIDY_S, TERM_S = 0.3, 1.2  # after the command ends, remaining processes such as a resource tracker get TIDY_S to end
# by themselves, and TERM_S after SIGTERM
KILL_S = 30.0  # a killed process disappears once its memory is released, which takes long for GPU memory


def main(arguments: list[str]) -> int:
    grace_s, log, command = float(arguments[0]), arguments[1], arguments[2:]
    wake, interrupts = _signals_to_pipe()
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    release = _start_guard()
    with open(log, "ab", buffering=0) as output:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            preexec_fn=_die_with(os.getpid()),  # noqa: PLW1509  (there is one thread)
        )
        _tell(f"pid {child.pid}")
        code = _watch(child.pid, wake, interrupts)
        if code is None:
            code = _end_in_order(child.pid, grace_s)
        _sweep()
    os.write(release, b"x")
    _tell(f"exit {code}")
    return code if code >= 0 else 128 - code


# --- watching --------------------------------------------------------------------------------------------------------


def _signals_to_pipe() -> tuple[int, set[int]]:
    """A descriptor that becomes readable with every signal, and the set of received stop signals."""
    readable, writable = os.pipe()
    os.set_blocking(writable, False)
    os.set_blocking(readable, False)
    signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
    came: set[int] = set()
    for number in STOP_SIGNALS:
        signal.signal(number, lambda number, frame: came.add(number))
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    return readable, came


def _watch(child: int, wake: int, interrupts: set[int]) -> int | None:
    """Wait until the command ends (returns its exit code, negative for a signal) or must be ended (returns None)."""
    while True:
        ready, _, _ = select.select([0, wake], [], [])
        if wake in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(wake, 4096)
        code = _reap(child)
        if code is not None:
            return code
        if interrupts or (0 in ready and not os.read(0, 4096)):
            return None


def _reap(child: int) -> int | None:
    """Reap all ended processes, including orphans. Returns the command's exit code if it was among them."""
    found = None
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            if pid == child:
                found = os.waitstatus_to_exitcode(status)
    return found


# --- ending ----------------------------------------------------------------------------------------------------------


def _end_in_order(child: int, grace_s: float) -> int:
    """Send SIGTERM to the root, which ends the others in order; send SIGKILL after `grace_s`. Returns the exit code."""
    os.kill(child, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while (code := _reap(child)) is None:
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            deadline = float("inf")
        time.sleep(POLL_S)
    return code


def _sweep() -> None:
    """End all remaining processes of the tree: wait a moment, then SIGTERM, then SIGKILL until all are gone.

    Stops after KILL_S: a process that still exists then hangs in the kernel, and waiting does not help.
    """
    began = time.monotonic()
    terminated = False
    while rest := _tree():
        passed = time.monotonic() - began
        if passed > KILL_S:
            return
        if passed > TIDY_S + TERM_S:
            _send(rest, signal.SIGKILL)
        elif passed > TIDY_S and not terminated:
            terminated = True
            _send(rest, signal.SIGTERM)
        time.sleep(POLL_S)
        _reap(0)


def _tree() -> set[int]:
    """The live processes of the tree, without this program and its guard."""
    found = {process.pid for process in psutil.Process().children(recursive=True) if _lives(process)}
    found |= members(os.getpid())
    return found - {os.getpid(), GUARD}


def _send(pids: set[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # it has already ended
            os.kill(pid, number)


def members(session: int) -> set[int]:
    """The pids of a session's live processes."""
    return {process.pid for process in psutil.process_iter() if _lives(process, session)}


def _lives(process: psutil.Process, session: int | None = None) -> bool:
    """Whether it exists, is no zombie, and belongs to the session, if one is given."""
    try:
        ours = session is None or os.getsid(process.pid) == session
        return ours and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except (psutil.Error, OSError):  # it has ended
        return False


# --- when this program itself is killed ------------------------------------------------------------------------------

GUARD = 0  # its pid


def _start_guard() -> int:
    """Fork the guard. Returns the descriptor that releases it: if this program ends without releasing it, the guard
    kills the session."""
    global GUARD  # noqa: PLW0603
    readable, writable = os.pipe()
    GUARD = os.fork()
    if GUARD:
        os.close(readable)
        return writable
    os.close(writable)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # the supervisor handles them; the guard waits for its end
    for descriptor in (0, 1):
        os.close(descriptor)
    if not os.read(readable, 1):
        _kill_session()
    os._exit(0)


def _kill_session() -> None:
    deadline = time.monotonic() + KILL_S
    while (rest := members(os.getsid(0)) - {os.getpid()}) and time.monotonic() < deadline:
        _send(rest, signal.SIGKILL)
        time.sleep(POLL_S)


def _die_with(parent: int) -> Callable[[], None]:
    """What the command does before it starts: request SIGTERM when `parent` dies, and exit if it is already dead."""

    def ask() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)

    return ask


def prctl(option: int, value: int) -> None:
    """Linux's prctl; does nothing on other systems."""
    if LIBC is not None and LIBC.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def _tell(text: str) -> None:
    with contextlib.suppress(OSError):  # the reader is gone
        os.write(1, f"{text}\n".encode())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
