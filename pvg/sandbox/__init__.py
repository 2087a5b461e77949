"""Runs untrusted programs: `Sandbox`. docs/sandbox.md says what it guarantees."""

from __future__ import annotations

from pvg.sandbox.inside.program import plain, same
from pvg.sandbox.sandbox import (
    DETERMINISTIC,
    MECHANISMS,
    CaseResult,
    Execution,
    Isolation,
    Level,
    Limits,
    Program,
    Sandbox,
    probe,
)

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
