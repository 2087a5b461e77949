"""Reads programming problems from JSON lines: pvg's form, and the published forms of APPS and HumanEval.

The fields of each line of `train.jsonl` and `test.jsonl` determine its form.

pvg's form:

    {"id": "add-up", "question": "Add the numbers up.", "entry": "add_up", "signature": "add_up(numbers)",
     "reference": "def add_up(numbers): return sum(numbers)",
     "visible": [{"input": [[1, 2]], "output": 3}], "hidden": [{"input": [[]], "output": 0}],
     "inputs": [[[5, -5]]], "check": "def valid(numbers): return len(numbers) < 100"}

`input` is the list of arguments. Without `entry` the solution is a program: `input` is the text for its standard input
and `output` the text that it prints. Optional: `signature`, `prelude`, `inputs` (hidden tests whose outputs the
reference computes) and `check`; see CodeProblem.

APPS (arXiv 2105.09938): `question`, `solutions` and `input_output` (both as JSON text or as data), and `starter_code`.
The first solution is the reference. HumanEval (arXiv 2107.03374): `task_id`, `prompt`, `canonical_solution`, `test`,
`entry_point`. pvg reads the assertions `assert candidate(LITERALS) == LITERAL` of `test` and executes none of it. In
both, the first `task.visible_tests` tests are visible.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson

from pvg.errors import ConfigurationError
from pvg.inputs import check_regular
from pvg.sandbox import plain
from pvg.tasks.code.problem import WORD, CodeProblem, CodeTest

CORRECT = "Correct the line, or download the file again."


class UnusableError(ValueError):
    """A problem that pvg cannot use; the message says why."""


@dataclass(frozen=True, slots=True)
class CodeEntry:
    """A problem as read. `inputs`: cases whose outputs the reference computes. `place`: file and line."""

    id: str
    question: str
    signature: str
    code: CodeProblem
    inputs: tuple[str, ...]
    place: str


def read_entries(file: Path, visible_tests: int) -> Iterator[CodeEntry | UnusableError]:
    """The file's problems in order. For a problem that pvg cannot use, the error that says why.

    Raises ConfigurationError with file and line for a line in none of the three forms, and for a repeated id.
    """
    check_regular(file)
    ids: dict[str, int] = {}  # -> the number of its line
    for number, line in enumerate(file.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if not line.strip():
            continue
        place = f"{file}, line {number}"
        try:
            row, form = _read(line, place)
            entry = form(row, visible_tests, place)
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
    try:
        row = _read_json(line)
    except ValueError as error:
        raise ConfigurationError(f"{place}: not valid JSON ({error}).", CORRECT) from None
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


def _own(row: dict[str, Any], visible_tests: int, place: str) -> CodeEntry:
    entry = _text(row, "entry", "") or None
    return _entry(
        row,
        place,
        id_=_text(row, "id", ""),
        question=_text(row, "question"),
        signature=_text(row, "signature", ""),
        inputs=tuple(_case(entry, given) for given in _list(row, "inputs", [])),
        code=CodeProblem(
            entry=entry,
            reference=_text(row, "reference"),
            visible=_tests(entry, _list(row, "visible")),
            hidden=_tests(entry, _list(row, "hidden", [])),
            prelude=_text(row, "prelude", ""),
            check=_text(row, "check", ""),
        ),
    )


def _tests(entry: str | None, rows: list[Any]) -> tuple[CodeTest, ...]:
    found = []
    for row in rows:
        if not isinstance(row, dict) or not {"input", "output"} <= row.keys():
            raise UnusableError("a test is an object with input and output")
        found.append(CodeTest(_case(entry, row["input"]), _output(entry, row["output"])))
    return tuple(found)


def _apps(row: dict[str, Any], visible_tests: int, place: str) -> CodeEntry:
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
    return _entry(
        row,
        place,
        id_="" if number is None else f"apps-{number}",
        question=f"{question}\n\n{starter}" if starter.strip() else question,
        signature="",
        inputs=(),
        code=CodeProblem(entry, solutions[0], tests[:visible_tests], tests[visible_tests:]),
    )


def _human_eval(row: dict[str, Any], visible_tests: int, place: str) -> CodeEntry:
    entry, prompt = _text(row, "entry_point"), _text(row, "prompt")
    tests = _assertions(_text(row, "test"))
    prelude, found, _ = prompt.partition(f"def {entry}(")
    if not found:
        raise UnusableError(f"its prompt defines no function {entry!r}")
    return _entry(
        row,
        place,
        id_=_text(row, "task_id", ""),
        question=prompt,
        signature="",
        inputs=(),
        code=CodeProblem(
            entry=entry,
            reference=prompt[len(prelude) :] + _text(row, "canonical_solution"),
            visible=tests[:visible_tests],
            hidden=tests[visible_tests:],
            prelude=prelude.strip("\n"),
        ),
    )


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


def _entry(
    row: dict[str, Any],
    place: str,
    *,
    id_: str,
    question: str,
    signature: str,
    inputs: tuple[str, ...],
    code: CodeProblem,
) -> CodeEntry:
    if WORD in f"{question}{signature}{code.prelude}{code.reference}{code.entry}".lower():
        raise UnusableError(f"it contains the word {WORD}, which ends what a verifier reads of a solution")
    if not code.visible:
        raise UnusableError("it has no visible test")
    if not code.hidden and not inputs:
        raise UnusableError("it has no hidden test")
    name = id_ or f"code-{hashlib.sha256(question.encode(errors='surrogatepass')).hexdigest()[:16]}"
    return CodeEntry(name, question, signature, code, inputs, place)


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
