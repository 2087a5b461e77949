"""What is asked of a sandbox and what it answers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

# full: everything that docs/sandbox.md promises, or nothing is run. reduced: what this machine gives.
Level = Literal["full", "reduced"]
# ok: it ran to its end, whatever its cases did. error: it failed outside of its cases. timeout: its CPU time was used
# up. stalled: it waited for longer than `wall_s`. memory, output, threads: that limit. killed: it crashed or left
# early, or something outside ended it.
Status = Literal["ok", "error", "timeout", "stalled", "memory", "output", "threads", "killed"]
# What does not depend on how busy the machine was. A time limit that was reached is no fact about a program, and who
# killed a process is not known: the kernel does too, where memory is short.
DETERMINISTIC: frozenset[Status] = frozenset({"ok", "error", "output"})


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one execution, all its cases together. `cpu_s` decides; `wall_s` is for programs that wait, and far above it,
    so that a busy machine changes no verdict. `processes`: how many a program may start (0: threads only; more need
    namespaces). `scratch_kb` is for files, which are gone afterwards."""

    cpu_s: float = 2.0
    wall_s: float = 30.0
    memory_mb: int = 256
    scratch_kb: int = 1024
    output_kb: int = 256
    processes: int = 0

    def plain(self) -> dict[str, float]:
        return {
            "cpu_s": self.cpu_s,
            "wall_s": self.wall_s,
            "memory_bytes": self.memory_mb * 2**20,
            "scratch_bytes": self.scratch_kb * 2**10,
            "output_bytes": self.output_kb * 2**10,
            "processes": self.processes,
        }


@dataclass(frozen=True, slots=True)
class Program:
    """Python source and what it is run on. With `entry`, the name of a function (or of a method of a class `Solution`),
    cases are argument lists as Python literals; without it they are texts for its standard input."""

    source: str
    entry: str | None
    cases: tuple[str, ...]

    @classmethod
    def of_function(cls, source: str, entry: str, arguments: Sequence[Sequence[Any]]) -> Program:
        return cls(source, entry, tuple(repr(list(given)) for given in arguments))

    def digest(self, limits: Limits, python: str) -> str:
        """Of everything that its outcome depends on. `python`: the interpreter's version."""
        content = json.dumps([self.source, self.entry, self.cases, asdict(limits), python])
        return hashlib.blake2b(content.encode(errors="surrogatepass"), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class CaseResult:
    """`value` is plain data (pvg.sandbox.inside.values) where there is no `error`."""

    value: Any = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class Execution:
    """How a program ran. `cases` has a result for each of its cases; `stderr` is the end of what it said; `exit` is
    negative for a signal; `cpu_s` and `wall_s` are what this execution took (a cached one: the first)."""

    status: Status
    cases: tuple[CaseResult, ...]
    stdout: str
    stderr: str
    exit: int
    cpu_s: float
    wall_s: float
