"""Grading solutions by execution: tests for all, and for the sneaky role the certificate.

A solution is correct when it passes the visible and the hidden tests and nothing proves it wrong. It is certified when
it passes the visible tests and names a valid input on which it differs from the reference, or fails: then it is
incorrect, whatever the hidden tests say. What takes too long on that input proves nothing, because how long something
takes is no fact about a program. A certificate is tried in processes of its own: a program that behaves otherwise the
tenth time has no flaw to show.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pvg.records import Checks, Grade, Problem
from pvg.sandbox import CaseResult, Execution, Program, Sandbox, same
from pvg.tasks.code.inputs import case_of, check_program
from pvg.tasks.code.problem import CodeProblem, code_of
from pvg.tasks.code.solutions import extract_code, read_certificate

UNLOADED = frozenset({"error", "memory"})  # statuses of what failed before its first case
LATE = frozenset({"timeout", "stalled"})


@dataclass(slots=True)
class _Attempt:
    code: CodeProblem
    source: str
    execution: Execution | None = None
    passed: list[bool] | None = None
    named: str | None = None  # the certificate's case
    claim: str = ""  # what became of the certificate; "": there is none

    @property
    def visible(self) -> list[bool]:
        return (self.passed or [])[: len(self.code.visible)]


def grade_solutions(sandbox: Sandbox, solutions: Sequence[tuple[Problem, str]]) -> list[Grade]:
    """The grades of completions, whose programs run side by side. Raises what `Sandbox.run` raises."""
    attempts = [_Attempt(code_of(problem), extract_code(completion)) for problem, completion in solutions]
    loaded = [attempt for attempt in attempts if attempt.source.strip()]
    programs = [attempt.code.program(attempt.source, [t.case for t in attempt.code.tests]) for attempt in loaded]
    for attempt, execution in zip(loaded, sandbox.run_many(programs), strict=True):
        attempt.execution = execution
        attempt.passed = passed(attempt.code, execution)
    for attempt, (_, completion) in zip(attempts, solutions, strict=True):
        _read_claim(attempt, completion)
    certified = _certify(sandbox, [attempt for attempt in attempts if attempt.named is not None])
    return [_grade(attempt, id(attempt) in certified) for attempt in attempts]


def passed(code: CodeProblem, execution: Execution) -> list[bool]:
    """Which of the problem's tests a run of them has passed."""
    return [
        not result.error and same_output(code, result.value, test.output)
        for result, test in zip(execution.cases, code.tests, strict=True)
    ]


def same_output(code: CodeProblem, left: object, right: object) -> bool:
    """Whether two outputs are the same answer; of what is printed, spaces at the ends of lines do not count."""
    if code.entry is None:
        return isinstance(left, str) and isinstance(right, str) and _stripped(left) == _stripped(right)
    return same(left, right)


def _stripped(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


def _read_claim(attempt: _Attempt, completion: str) -> None:
    certificate = read_certificate(completion)
    if certificate is None or attempt.passed is None:
        return
    attempt.claim = certificate.complaint
    if attempt.claim:
        return
    if not all(attempt.visible):
        attempt.claim = "its certificate counts for nothing: it fails visible tests"
        return
    attempt.named = case_of(attempt.code, certificate.value)
    if attempt.named is None:
        attempt.claim = "its certificate names no input of this problem"


def _certify(sandbox: Sandbox, attempts: Sequence[_Attempt]) -> set[int]:
    """The ids of those whose certificates hold; the others' claims say why not."""
    programs: list[Program] = []
    asked: list[tuple[_Attempt, Program, Program, Program | None]] = []
    for attempt in attempts:
        assert attempt.named is not None
        tried = attempt.code.program(attempt.source, [attempt.named])
        reference = attempt.code.program(attempt.code.reference, [attempt.named])
        check = check_program(attempt.code, attempt.named)
        asked.append((attempt, tried, reference, check))
        programs += [tried, reference, *([] if check is None else [check])]
    ran = dict(zip(programs, sandbox.run_many(programs), strict=True))
    held = set()
    for attempt, tried, reference, check in asked:
        attempt.claim = _refusal(attempt.code, ran[tried], ran[reference], None if check is None else ran[check])
        if not attempt.claim:
            attempt.claim = "its flaw is proven"
            held.add(id(attempt))
    return held


def _refusal(code: CodeProblem, tried: Execution, reference: Execution, check: Execution | None) -> str:
    """Why a certificate proves nothing; "" where it does."""
    if check is not None and (check.cases[0].error or check.cases[0].value is not True):
        return "its certificate names no input of this problem"
    if reference.cases[0].error:
        return "the reference fails on what its certificate names"
    if tried.status in LATE:
        return "it takes too long on what its certificate names"
    if not tried.cases[0].error and same_output(code, tried.cases[0].value, reference.cases[0].value):
        return "it is right on what its certificate names"
    return ""


def _grade(attempt: _Attempt, certified: bool) -> Grade:
    if attempt.execution is None or attempt.passed is None:
        return Grade(correct=False, well_formed=False, note="no code", checks=Checks(0.0, 0.0, False))
    passed_, visible = attempt.passed, attempt.visible
    checks = Checks(sum(visible) / len(visible), sum(passed_) / len(passed_), certified)
    note = _note(attempt)
    return Grade(
        correct=all(passed_) and not certified,
        well_formed=attempt.execution.status not in UNLOADED,
        answer=f"{sum(passed_)}/{len(passed_)} tests",
        note=f"{note}; {attempt.claim}" if attempt.claim else note,
        checks=checks,
    )


def _note(attempt: _Attempt) -> str:
    """The first test that fails, and how; without the expected output, which may be hidden."""
    assert attempt.execution is not None
    assert attempt.passed is not None
    if all(attempt.passed):
        return "passes all tests"
    first = attempt.passed.index(False)
    kind = "visible" if first < len(attempt.code.visible) else "hidden"
    result: CaseResult = attempt.execution.cases[first]
    return f"fails {kind} test {first + 1}: {result.error or 'wrong output'}"
