"""Input and output of the sandbox: limits, programs and executions."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

# full: everything that docs/sandbox.md promises, otherwise nothing runs. reduced: whatever this machine offers.
Level = Literal["full", "reduced"]
# ok: ran to its end, whatever its cases did. error: failed outside of its cases. timeout: used up its CPU time.
# stalled: waited for longer than `wall_s`. memory, output, threads: reached that limit. killed: crashed, exited early,
# or was killed from outside.
Status = Literal["ok", "error", "timeout", "stalled", "memory", "output", "threads", "killed"]
# Statuses that do not depend on the machine's load. A time limit says nothing reliable about a program, and the cause
# of a kill is unknown: the kernel also kills when memory is short.
DETERMINISTIC: frozenset[Status] = frozenset({"ok", "error", "output"})


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one execution, for all its cases together. `cpu_s` normally decides. `wall_s` is for programs that
    wait, and far larger, so that a busy machine changes no verdict. `processes`: how many a program may start (0: only
    threads; more require namespaces). `scratch_kb`: space for files, which are deleted afterwards."""

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
    """Python source and its inputs. With `entry`, the name of a function or of a method of a class `Solution`, each
    case is an argument list as a Python literal. Without it, each case is text for standard input."""

    source: str
    entry: str | None
    cases: tuple[str, ...]

    @classmethod
    def of_function(cls, source: str, entry: str, arguments: Sequence[Sequence[Any]]) -> Program:
        return cls(source, entry, tuple(repr(list(given)) for given in arguments))

    def digest(self, limits: Limits, python: str) -> str:
        """A digest of everything that the outcome depends on. `python`: the interpreter's version."""
        content = json.dumps([self.source, self.entry, self.cases, asdict(limits), python])
        return hashlib.blake2b(content.encode(errors="surrogatepass"), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class CaseResult:
    """The result of one case. Without an `error`, `value` is plain data (pvg.sandbox.inside.values)."""

    value: Any = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class Execution:
    """How a program ran. `cases` has one result per case. `stderr` is the end of its error output. `exit` is negative
    for a signal. `cpu_s` and `wall_s` are the time of this execution (from the cache: of the first one)."""

    status: Status
    cases: tuple[CaseResult, ...]
    stdout: str
    stderr: str
    exit: int
    cpu_s: float
    wall_s: float
