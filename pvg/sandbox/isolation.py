"""Determines by trial which isolation this machine offers, and whether it suffices.

`full` needs a system call filter, and a separate file system through namespaces or Landlock. Each of the two gives the
guarantees of docs/sandbox.md; if both are available, both are used. Then a trial program tries to escape. If it can,
the sandbox does not run other programs at this level.
"""

from __future__ import annotations

import os
import socket
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from pvg.errors import MissingRequirementError
from pvg.sandbox.records import Level, Limits, Program
from pvg.sandbox.warden_process import WardenFailedError, WardenProcess

MECHANISMS = frozenset({"namespaces", "landlock", "seccomp"})
REMEDY = (
    "Run on a machine that offers it (a container needs user namespaces or Landlock, and seccomp), or set "
    "task.sandbox = 'reduced': programs written by a model then run with the isolation that is available."
)

# Each attempt returns whether it succeeded.
ATTEMPTS = """
import fcntl, mmap, os, socket

def read_a_file(secret, folder, port, pid):
    return "secret" in open(secret).read()

def write_a_file(secret, folder, port, pid):
    open(folder + "/written", "w").close()
    return True

def reach_the_network(secret, folder, port, pid):
    socket.create_connection(("127.0.0.1", port), timeout=2).close()
    return True

def signal_a_process(secret, folder, port, pid):
    os.kill(pid, 0)
    return True

def have_a_process_signalled(secret, folder, port, pid):
    reading, writing = os.pipe()
    fcntl.fcntl(reading, 10, 9)  # F_SETSIG: SIGKILL would be sent, were there anything to read
    fcntl.fcntl(reading, fcntl.F_SETOWN, pid)
    return True

def use_too_much_memory(secret, folder, port, pid):
    mmap.mmap(-1, TOO_MUCH, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()  # asked for, and never touched
    return True

def attempt(name, *given):
    try:
        return bool(globals()[name](*given))
    except OSError:
        return False
"""
NAMES = (
    "read_a_file",
    "write_a_file",
    "reach_the_network",
    "signal_a_process",
    "have_a_process_signalled",
    "use_too_much_memory",
)
TRIAL = Limits(cpu_s=10.0)


@dataclass(frozen=True)
class Isolation:
    """A sandbox's isolation. `refused`: the mechanisms that are missing, and why. `open_`: the escape attempts that
    succeeded. `unlimited`: resources without a limit."""

    given: frozenset[str]
    refused: dict[str, str] = field(default_factory=dict)
    open_: tuple[str, ...] = ()
    unlimited: tuple[str, ...] = ()

    @property
    def complaints(self) -> list[str]:
        """Why this is not `full`; empty if it is."""
        found = []
        if "seccomp" not in self.given:
            found.append(f"no system call filter ({self.refused.get('seccomp', 'not offered')})")
        if not self.given & {"namespaces", "landlock"}:
            why = " and ".join(
                f"{name}: {self.refused.get(name, 'not offered')}" for name in ("namespaces", "landlock")
            )
            found.append(f"no separate file system ({why})")
        found += [f"nothing limits {what} (this process cannot see it in /proc)" for what in self.unlimited]
        return found + [f"a program could {name.replace('_', ' ')}" for name in self.open_]

    def describe(self) -> str:
        """A summary such as "full (landlock, namespaces, seccomp)"."""
        level = "reduced" if self.complaints else "full"
        return f"{level} ({', '.join(sorted(self.given)) or 'limits only'})"


def open_first_warden(level: Level, offered: frozenset[str]) -> tuple[WardenProcess, Isolation]:
    """A warden that has passed the trial, and its isolation.

    Raises MissingRequirementError if `level` needs more than the machine offers, or if no warden starts.
    """
    try:
        warden = WardenProcess(offered)
    except (WardenFailedError, OSError) as error:
        raise MissingRequirementError(f"The sandbox does not start: {error}.", REMEDY) from None
    try:
        isolation = Isolation(warden.given, warden.refused, _ways_out(warden), warden.unlimited)
        if level == "full" and isolation.complaints:
            raise MissingRequirementError(
                f"This machine cannot isolate programs: {'; '.join(isolation.complaints)}.", REMEDY
            )
    except BaseException as error:
        warden.close()
        if isinstance(error, WardenFailedError):
            raise MissingRequirementError(f"The sandbox does not work: {error}.", REMEDY) from None
        raise
    return warden, isolation


def probe(offered: frozenset[str] = MECHANISMS) -> Isolation:
    """The isolation of this machine. Raises MissingRequirementError if not even a reduced sandbox starts."""
    warden, isolation = open_first_warden("reduced", offered)
    warden.close()
    return isolation


def _ways_out(warden: WardenProcess) -> tuple[str, ...]:
    """The names of the escape attempts that succeed."""
    with tempfile.TemporaryDirectory(prefix="pvg-sandbox-") as folder, socket.create_server(("127.0.0.1", 0)) as server:
        secret = Path(folder) / "secret"
        secret.write_text("secret")
        os.chmod(folder, 0o777)
        given = [str(secret), folder, server.getsockname()[1], os.getpid()]
        source = f"TOO_MUCH = {2 * TRIAL.memory_mb * 2**20}\n{ATTEMPTS}"
        program = Program.of_function(source, "attempt", [[name, *given] for name in NAMES])
        header, (reports, _, said) = warden.run(program, TRIAL)
    lines = reports.decode(errors="replace").splitlines()
    if header["status"] != "ok" or len(lines) != len(NAMES):
        raise WardenFailedError(f"its trial ended {header['status']} ({said.decode(errors='replace')[-200:]})")
    return tuple(name for name, line in zip(NAMES, lines, strict=True) if line != '["value", false]')
