"""The code task: programming problems with hidden tests, solved in Python and graded by execution in a sandbox.

Without `task.path`, pvg makes the problems (pvg.tasks.code.templates); with it, pvg reads them
(pvg.tasks.code.reading).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from pvg.config.task import CodeTask
from pvg.errors import ConfigurationError, MissingRequirementError, shortened
from pvg.inputs import expanded
from pvg.records import Grade, Problem, Split
from pvg.sandbox import Limits, Sandbox
from pvg.tasks.code.grading import grade_solutions, passed
from pvg.tasks.code.problem import CodeTest, check_program, code_of, extract_code, make_problem, shown
from pvg.tasks.code.reading import CodeEntry, read_entries
from pvg.tasks.code.templates import made_problems

REMEDY = "Set task.path to a directory with train.jsonl and test.jsonl, or leave it out for generated problems."
WALL_PER_CPU, LEAST_WALL_S = 10.0, 20.0  # so that a machine with ten times the load changes no verdict


class Code:
    """The code task of one section. It owns a sandbox: `close` it, or use it in a `with` statement."""

    def __init__(self, section: CodeTask) -> None:
        """Raises MissingRequirementError if a file is missing, or if the machine cannot isolate as well as
        `task.sandbox` requires."""
        self._section = section
        if section.path is not None:
            for split in ("train", "test"):
                if not self._file(section.path, split).is_file():
                    raise MissingRequirementError(f"There is no file {self._file(section.path, split)}.", REMEDY)
        limits = Limits(
            cpu_s=section.cpu_s,
            wall_s=LEAST_WALL_S + WALL_PER_CPU * section.cpu_s,
            memory_mb=section.memory_mb,
            output_kb=section.output_kb,
        )
        self._sandbox = Sandbox(section.sandbox, limits, workers=section.workers)
        self._read: dict[Split, list[Problem]] = {}

    def problems(self, split: Split) -> Iterator[Problem]:
        """The problems of the split, equal in every process.

        Raises ConfigurationError for a file that is not readable as problems, for a file without usable problems, and
        for unusable problems unless `task.unusable` is 'skip'.
        """
        if split not in self._read:
            path = self._section.path
            self._read[split] = made_problems(self._section, split) if path is None else self._from_file(path, split)
        return iter(self._read[split])

    def grade(self, problem: Problem, completion: str) -> Grade:
        """See pvg.tasks.code.grading. It blocks while programs run, so do not call it on an event loop."""
        return self.grade_many([(problem, completion)])[0]

    def grade_many(self, solutions: Sequence[tuple[Problem, str]]) -> list[Grade]:
        """The same grades, with up to `task.workers` programs at once."""
        return grade_solutions(self._sandbox, solutions)

    def shown(self, completion: str) -> str:
        """The part of a completion that a verifier may read: without the certificate."""
        return shown(completion)

    def solution(self, completion: str) -> str:
        """The program, for comparisons (pvg.tasks.code.grading)."""
        return extract_code(completion)

    def written(self, problem: Problem, correct: bool) -> str:
        """The reference, or a program that gives no output (pvg.tasks.task.WritesSolutions)."""
        code = code_of(problem)
        wrong = "pass" if code.entry is None else f"def {code.entry}(*arguments):\n    return None"
        return f"```python\n{code.reference if correct else wrong}\n```"

    def close(self) -> None:
        self._sandbox.close()

    def __enter__(self) -> Code:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _file(self, path: Path, split: str) -> Path:
        return expanded(path, "task.path") / f"{split}.jsonl"

    def _from_file(self, path: Path, split: Split) -> list[Problem]:
        """The first `limit` usable problems: their references pass their tests, and their checks accept these."""
        found: list[Problem] = []
        entries, limit = self._usable(self._file(path, split)), self._section.limit
        start = 0
        while start < len(entries) and (limit is None or len(found) < limit):
            part = entries[start : start + (limit or len(entries))]
            start += len(part)
            found += self._tried(part)
        if not found:
            raise ConfigurationError(f"{self._file(path, split)} has no usable problem.", "Add problems to it.")
        return found[:limit]

    def _usable(self, file: Path) -> list[CodeEntry]:
        """The problems of a file that can be tried."""
        found = []
        for entry in read_entries(file, self._section.visible_tests):
            if isinstance(entry, CodeEntry):
                found.append(entry)
            else:
                self._refuse(str(entry))
        return found

    def _refuse(self, why: str) -> None:
        if self._section.unusable == "refuse":
            raise ConfigurationError(f"{why}.", "Fix it, or set task.unusable to 'skip'.")

    def _tried(self, entries: list[CodeEntry]) -> list[Problem]:
        programs = [
            e.code.program(e.code.reference, [*(test.case for test in e.code.tests), *e.inputs]) for e in entries
        ]
        checks = [
            program for e, p in zip(entries, programs, strict=True) if (program := check_program(e.code, *p.cases))
        ]
        executions = self._sandbox.run_many(programs)
        checked = dict(zip(checks, self._sandbox.run_many(checks), strict=True))
        found = []
        for entry, program, execution in zip(entries, programs, executions, strict=True):
            results = execution.cases[len(entry.code.tests) :]
            added = tuple(CodeTest(case, result.value) for case, result in zip(entry.inputs, results, strict=True))
            right = passed(entry.code, replace(execution, cases=execution.cases[: len(entry.code.tests)]))
            failures = [result.error for result in execution.cases if result.error]
            if failures or not all(right):
                self._refuse(
                    f"{entry.place}: the reference of {entry.id!r} fails its tests "
                    f"({failures[0] if failures else f'test {right.index(False) + 1}: another output'})"
                )
                continue
            check = check_program(entry.code, *program.cases)
            accepted = checked[check].cases if check else []
            if wrong := [(n, case) for n, case in enumerate(accepted, 1) if case.error or case.value is not True]:
                number, case = wrong[0]
                said = case.error or f"valid returns {shortened(repr(case.value))}"
                self._refuse(
                    f"{entry.place}: the check of {entry.id!r} does not accept the input of test {number} ({said})"
                )
                continue
            code = replace(entry.code, hidden=entry.code.hidden + added)
            found.append(make_problem(entry.id, entry.question, entry.signature, code))
        return found
