"""Sandboxes of the escape suite: with all walls, with those of one kind, and with none (the control)."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from pvg.errors import MissingRequirementError
from pvg.sandbox.sandbox import CaseResult, Limits, Program, Sandbox, probe

# What each kind of sandbox may use. The first three promise the same.
FULL = {
    "all walls": frozenset({"namespaces", "landlock", "seccomp"}),
    "no landlock": frozenset({"namespaces", "seccomp"}),
    "no namespaces": frozenset({"landlock", "seccomp"}),
}
LIMITS = Limits(cpu_s=3.0, wall_s=60.0)


def opened(kind: str) -> Sandbox | None:
    """A sandbox of FULL. None where this kernel lacks what it is made of: then it has been seen to refuse."""
    mechanisms = FULL[kind]
    if not probe(mechanisms).complaints:
        return Sandbox("full", LIMITS, workers=1, mechanisms=mechanisms)
    with pytest.raises(MissingRequirementError, match="cannot isolate"):
        Sandbox("full", LIMITS, workers=1, mechanisms=mechanisms)
    return None


def without_walls() -> Sandbox:
    """The control: the same interpreter and the same limits, and no walls. For harmless attacks."""
    return Sandbox("reduced", LIMITS, workers=1, mechanisms=())


def attack(sandbox: Sandbox, source: str, *arguments: object, limits: Limits | None = None) -> CaseResult:
    """What the function `attack` of `source` returns there."""
    return sandbox.run(Program.of_function(source, "attack", [list(arguments)]), limits).cases[0]


def outside(source: str, *arguments: object) -> Any:
    """What it returns in a process like any other, started by this one."""
    told = f"import json\nprint(json.dumps(attack(*{list(arguments)!r})))"
    ran = subprocess.run([sys.executable, "-c", f"{source}\n{told}"], capture_output=True, check=True)
    return json.loads(ran.stdout)


@contextmanager
def bystander(**environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that only sleeps."""
    process = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(120)"], env=environment)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
