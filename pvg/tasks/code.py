"""The code task: programming problems with hidden tests, solved in Python and graded by execution in a sandbox.

Without `task.path`, pvg makes the problems (pvg.tasks.code_templates); with it, pvg reads them
(pvg.tasks.code).
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson

from pvg.config.task import CodeTask
from pvg.errors import Closing, ConfigurationError, MissingRequirementError, shortened
from pvg.inputs import expanded, json_lines, json_row
from pvg.records import Grade, Problem, Split
from pvg.sandbox.inside.program import plain
from pvg.sandbox.sandbox import Limits, Sandbox
from pvg.tasks.code_problems import (
    ANY_NAME,
    WORD,
    CodeProblem,
    CodeTest,
    check_program,
    code_of,
    extract_code,
    grade_solutions,
    make_problem,
    passed,
    shown,
)
from pvg.tasks.code_templates import made_problems

# Reads programming problems from JSON lines: pvg's form, and the published forms of APPS and HumanEval.

CORRECT = "Correct the line, or download the file again."


class UnusableError(ValueError):
    """A problem that pvg cannot use; the message says why."""


@dataclass(frozen=True, slots=True)
class CodeEntry:
    """A problem as read. `inputs`: cases whose outputs the reference computes. `place`: file and line."""

    id: str
    question: str
    code: CodeProblem
    signature: str = ""
    inputs: tuple[str, ...] = ()
    place: str = ""


def read_entries(file: Path, visible_tests: int) -> Iterator[CodeEntry | UnusableError]:
    """The file's problems in order. For a problem that pvg cannot use, the error that says why.

    Raises ConfigurationError with file and line for a line in none of the three forms, and for a repeated id.
    """
    ids: dict[str, int] = {}  # -> the number of its line
    for number, line in json_lines(file):
        place = f"{file}, line {number}"
        try:
            row, form = _read(line, place)
            entry = _checked(form(row, visible_tests), place)
        except (UnusableError, RecursionError) as error:
            why = error if isinstance(error, UnusableError) else "its data is nested too deeply"
            yield UnusableError(f"{place}: {why}")
            continue
        if form is _apps and file.stem == "test":  # the published splits both count from 0
            entry = replace(entry, id=entry.id.replace("apps-", "apps-test-", 1))
        if (first := ids.setdefault(entry.id, number)) != number:
            raise ConfigurationError(f"{place}: repeats the id {entry.id!r} of line {first}.", CORRECT)
        yield entry


def _read(line: bytes, place: str) -> tuple[dict[str, Any], Any]:
    """The row of a line, and the function that reads its form."""
    row = json_row(line, place, ConfigurationError, CORRECT, exact=False)
    form = _form(row)
    if form is None:
        raise ConfigurationError(
            f"{place}: neither pvg's form (question, reference, visible, hidden) nor that of APPS (question, "
            "solutions, input_output) or HumanEval (prompt, canonical_solution, test, entry_point).",
            CORRECT,
        )
    return row, form


def _read_json(text: str | bytes) -> Any:
    """The data, with exact integers. Raises ValueError, and RecursionError for deep nesting."""
    orjson.loads(text)  # it is stricter: no NaN, and only UTF-8
    return json.loads(text)  # it does not turn large integers into floats


def _form(row: Any) -> Any:
    if not isinstance(row, dict):
        return None
    for fields, form in (
        (("reference", "visible"), _own),
        (("solutions", "input_output"), _apps),
        (("canonical_solution", "test", "entry_point"), _human_eval),
    ):
        if all(field in row for field in fields):
            return form
    return None


# --- the forms ------------------------------------------------------------------------------------------------------


def _own(row: dict[str, Any], visible_tests: int) -> CodeEntry:
    entry = _text(row, "entry", "") or None
    code = CodeProblem(
        entry=entry,
        reference=_text(row, "reference"),
        visible=_tests(entry, _list(row, "visible")),
        hidden=_tests(entry, _list(row, "hidden", [])),
        prelude=_text(row, "prelude", ""),
        check=_text(row, "check", ""),
    )
    inputs = tuple(_case(entry, given) for given in _list(row, "inputs", []))
    return CodeEntry(_text(row, "id", ""), _text(row, "question"), code, _text(row, "signature", ""), inputs)


def _tests(entry: str | None, rows: list[Any]) -> tuple[CodeTest, ...]:
    found = []
    for row in rows:
        if not isinstance(row, dict) or not {"input", "output"} <= row.keys():
            raise UnusableError("a test is an object with input and output")
        found.append(CodeTest(_case(entry, row["input"]), _output(entry, row["output"])))
    return tuple(found)


def _apps(row: dict[str, Any], visible_tests: int) -> CodeEntry:
    solutions, given = _unpacked(row, "solutions"), _unpacked(row, "input_output")
    if not isinstance(solutions, list) or not solutions or not isinstance(solutions[0], str):
        raise UnusableError("it has no solution to be the reference")
    if not isinstance(given, dict):
        raise UnusableError("its input_output is not an object")
    entry, inputs, outputs = _text(given, "fn_name", "") or None, given.get("inputs"), given.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise UnusableError("its inputs and outputs are not two lists of equal length")
    # Most published calls have their output in a list of one element, some directly.
    if entry is not None and outputs and all(isinstance(output, list) and len(output) == 1 for output in outputs):
        outputs = [output[0] for output in outputs]
    tests = tuple(CodeTest(_case(entry, i), _output(entry, o)) for i, o in zip(inputs, outputs, strict=True))
    number = row.get("problem_id", row.get("id"))
    question, starter = _text(row, "question"), _text(row, "starter_code", "")
    return CodeEntry(
        "" if number is None else f"apps-{number}",
        f"{question}\n\n{starter}" if starter.strip() else question,
        CodeProblem(entry, solutions[0], tests[:visible_tests], tests[visible_tests:]),
    )


def _human_eval(row: dict[str, Any], visible_tests: int) -> CodeEntry:
    entry, prompt = _text(row, "entry_point"), _text(row, "prompt")
    tests = _assertions(_text(row, "test"))
    prelude, found, _ = prompt.partition(f"def {entry}(")
    if not found:
        raise UnusableError(f"its prompt defines no function {entry!r}")
    code = CodeProblem(
        entry=entry,
        reference=prompt[len(prelude) :] + _text(row, "canonical_solution"),
        visible=tests[:visible_tests],
        hidden=tests[visible_tests:],
        prelude=prelude.strip("\n"),
    )
    return CodeEntry(_text(row, "task_id", ""), prompt, code)


def _assertions(source: str) -> tuple[CodeTest, ...]:
    """The tests in `def check(candidate)`: `assert candidate(LITERALS) == LITERAL`. Assertions of a literal are
    skipped."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UnusableError(f"its test is not Python ({error})") from None
    check = next((node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "check"), None)
    if check is None:
        raise UnusableError("its test has no function check")
    found = []
    for statement in check.body:
        claim = statement.test if isinstance(statement, ast.Assert) else None
        if isinstance(claim, ast.Constant) or isinstance(statement, ast.Pass):
            continue
        try:
            match claim:
                case ast.Compare(ast.Call(ast.Name("candidate"), given, []), [ast.Eq()], [expected]):
                    arguments = [ast.literal_eval(argument) for argument in given]
                    found.append(CodeTest(repr(arguments), plain(ast.literal_eval(expected))))
                case _:
                    raise ValueError
        except (ValueError, TypeError):  # TypeError: a set of lists
            shown = ast.unparse(statement).partition("\n")[0][:80]
            raise UnusableError(f"its test {shown!r} does not compare a call with a literal") from None
    return tuple(found)


# --- fields ---------------------------------------------------------------------------------------------------------


def _checked(read: CodeEntry, place: str) -> CodeEntry:
    """The problem with its place, and with an id if it has none. Raises UnusableError."""
    code, question = read.code, read.question
    if WORD in f"{question}{read.signature}{code.prelude}{code.reference}{code.entry}".lower():
        raise UnusableError(f"it contains the word {WORD}, which ends what a verifier reads of a solution")
    if not code.visible:
        raise UnusableError("it has no visible test")
    if not code.hidden and not read.inputs:
        raise UnusableError("it has no hidden test")
    name = read.id or f"code-{hashlib.sha256(question.encode(errors='surrogatepass')).hexdigest()[:16]}"
    return replace(read, id=name, place=place)


def _text(row: dict[str, Any], field: str, default: str | None = None) -> str:
    value = row.get(field, default)
    if value is None and default is not None:
        return default
    if not isinstance(value, str) or (default is None and not value.strip()):
        raise UnusableError(f"the field {field!r} is missing or not a text")
    return value


def _list(row: dict[str, Any], field: str, default: list[Any] | None = None) -> list[Any]:
    value = row.get(field, default)
    if not isinstance(value, list):
        raise UnusableError(f"the field {field!r} is missing or not a list")
    return value


def _unpacked(row: dict[str, Any], field: str) -> Any:
    value = row[field]
    if not isinstance(value, str):
        return value
    try:
        return _read_json(value)
    except ValueError:
        raise UnusableError(f"the field {field!r} is not valid JSON") from None


def _case(entry: str | None, given: Any) -> str:
    if entry is not None:
        if not isinstance(given, list):
            raise UnusableError("an input is not a list of arguments")
        return repr(given)
    return _lines(given, "an input")


def _output(entry: str | None, output: Any) -> Any:
    return plain(output) if entry is not None else _lines(output, "an output")


def _lines(text: Any, what: str) -> str:
    """A text, or a list of its lines as in some published tests."""
    if isinstance(text, list) and all(isinstance(line, str) for line in text):
        return "\n".join(text)
    if not isinstance(text, str):
        raise UnusableError(f"{what} is not a text")
    return text


REMEDY = "Set task.path to a directory with train.jsonl and test.jsonl, or leave it out for generated problems."
WALL_PER_CPU, LEAST_WALL_S = 10.0, 20.0  # so that a machine with ten times the load changes no verdict


class Code(Closing):
    """The code task of one section. It owns a sandbox: `close` it, or use it in a `with` statement."""

    def __init__(self, section: CodeTask) -> None:
        """Raises MissingRequirementError if a file is missing, or if the machine cannot isolate as well as
        `task.sandbox` requires."""
        self._section = section
        if section.path is not None:
            for split in ("train", "test"):
                if not self._file(section.path, split).is_file():
                    raise MissingRequirementError(f"There is no file {self._file(section.path, split)}.", REMEDY)
        limits = Limits(cpu_s=section.cpu_s, wall_s=LEAST_WALL_S + WALL_PER_CPU * section.cpu_s)
        self._sandbox = Sandbox(section.sandbox, limits)
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
        """See pvg.tasks.code_problems. It blocks while programs run, so do not call it on an event loop."""
        return self.grade_many([(problem, completion)])[0]

    def grade_many(self, solutions: Sequence[tuple[Problem, str]]) -> list[Grade]:
        """The same grades, with one program per core at once."""
        return grade_solutions(self._sandbox, solutions)

    def shown(self, completion: str) -> str:
        """The part of a completion that a verifier may read: without the certificate."""
        return shown(completion)

    def solution(self, completion: str) -> str:
        """The program, for comparisons (pvg.tasks.code_problems)."""
        return extract_code(completion, ANY_NAME)

    def written(self, problem: Problem, correct: bool) -> str:
        """The reference, or a program that gives no output (pvg.tasks.task.WritesSolutions)."""
        code = code_of(problem)
        wrong = "pass" if code.entry is None else f"def {code.entry}(*arguments):\n    return None"
        return f"```python\n{code.reference if correct else wrong}\n```"

    def close(self) -> None:
        self._sandbox.close()

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
