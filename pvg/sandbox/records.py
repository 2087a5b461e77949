"""The sandbox's inputs and results: programs, limits, executions."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

# full: all guarantees of docs/sandbox.md, otherwise nothing runs. reduced: what this machine offers.
Level = Literal["full", "reduced"]
# ok: the program ran to its end, even if cases failed. error: it failed outside its cases. timeout: it used up its
# CPU time. stalled: it waited for longer than `wall_s`. memory, output, threads: it reached that limit. killed: it
# crashed or exited early, or was ended from outside.
Status = Literal["ok", "error", "timeout", "stalled", "memory", "output", "threads", "killed"]
# Statuses that do not depend on the machine's load. A timeout or a kill proves nothing about a program: the kernel also
# kills processes if memory is short.
DETERMINISTIC: frozenset[Status] = frozenset({"ok", "error", "output"})


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one execution, for all its cases together. `cpu_s` is the deciding one. `wall_s` is for programs that
    wait; it is far larger, so that a busy machine changes no verdict. `processes`: how many the program may start (0:
    only threads; more need namespaces). `scratch_kb`: for files, which are deleted afterwards."""

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
    """Python source and its cases. With `entry`, the name of a function (or of a method of a class `Solution`), a case
    is an argument list as a Python literal; without it, a case is a text for standard input."""

    source: str
    entry: str | None
    cases: tuple[str, ...]

    @classmethod
    def of_function(cls, source: str, entry: str, arguments: Sequence[Sequence[Any]]) -> Program:
        return cls(source, entry, tuple(repr(list(given)) for given in arguments))

    def digest(self, limits: Limits, python: str) -> str:
        """The digest of everything that determines the outcome. `python`: the interpreter's version."""
        content = json.dumps([self.source, self.entry, self.cases, asdict(limits), python])
        return hashlib.blake2b(content.encode(errors="surrogatepass"), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class CaseResult:
    """`value` is plain data (pvg.sandbox.inside.values) if there is no `error`."""

    value: Any = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class Execution:
    """The result of a program. `cases` has a result for each of its cases. `stderr`: the end of its error output.
    `exit`: negative for a signal. `cpu_s` and `wall_s`: of this execution, or of the first one if it was cached."""

    status: Status
    cases: tuple[CaseResult, ...]
    stdout: str
    stderr: str
    exit: int
    cpu_s: float
    wall_s: float
