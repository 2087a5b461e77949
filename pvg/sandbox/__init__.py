"""Runs untrusted programs: `Sandbox`. docs/sandbox.md says what it guarantees."""

from __future__ import annotations

from pvg.sandbox.inside.values import plain, same
from pvg.sandbox.isolation import MECHANISMS, Isolation, probe
from pvg.sandbox.records import DETERMINISTIC, CaseResult, Execution, Level, Limits, Program
from pvg.sandbox.sandbox import Sandbox

__all__ = [
    "DETERMINISTIC",
    "MECHANISMS",
    "CaseResult",
    "Execution",
    "Isolation",
    "Level",
    "Limits",
    "Program",
    "Sandbox",
    "plain",
    "probe",
    "same",
]
