"""A programming problem with its tests, and the parts of a completion: the program and the certificate.

A completion looks like this:

    some words
    ```python
    def add_up(numbers): ...
    ```
    CERTIFICATE: [[3, 1, 2]]

The certificate, which only the sneaky role writes, names an input on which the program is wrong: a JSON list of
arguments, or a JSON text for standard input. The verifier must not read it. The text shown to a verifier therefore ends
at the first occurrence of the word, wherever it is: a malformed certificate proves nothing, but it would reveal the
role. The program is read from the shown part only, so what is graded is what the verifier reads.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from pvg.records import Problem
from pvg.sandbox import Program

CODE = "code"  # key in a Problem's metadata: its CodeProblem
WORDING = "code"  # the wording of its prompts (pvg.game.roles)


@dataclass(frozen=True, slots=True)
class CodeTest:
    """`case`: the arguments as a Python list literal, or the text for standard input (see pvg.sandbox.Program).
    `output`: plain data (pvg.sandbox.plain), or the printed text."""

    case: str
    output: Any


@dataclass(frozen=True, slots=True)
class CodeProblem:
    """`entry`: the function to call; None for a program that reads standard input and prints.

    `prelude` precedes every solution (imports that the question shows). `check` is Python source of a function `valid`
    that says whether arguments (or a text) are an input of this problem; with "", inputs must lie within the tests
    (pvg.tasks.code.inputs). For every input there must be exactly one correct output.
    """

    entry: str | None
    reference: str
    visible: tuple[CodeTest, ...]
    hidden: tuple[CodeTest, ...]
    prelude: str = ""
    check: str = ""

    @property
    def tests(self) -> tuple[CodeTest, ...]:
        return self.visible + self.hidden

    def program(self, source: str, cases: Sequence[str]) -> Program:
        """A solution, to be run on these cases."""
        return Program(f"{self.prelude}\n{source}" if self.prelude else source, self.entry, tuple(cases))


def code_of(problem: Problem) -> CodeProblem:
    found = problem.metadata[CODE]
    assert isinstance(found, CodeProblem)
    return found


def make_problem(id_: str, question: str, signature: str, code: CodeProblem) -> Problem:
    """The problem as a model reads it: the question, what to write, and the visible tests."""
    lines = [question.rstrip(), ""]
    if code.entry is None:
        lines.append("Write a Python program that reads standard input and prints the answer. Examples:")
        for test in code.visible:
            lines += ["Input:", test.case.rstrip("\n"), "Output:", str(test.output).rstrip("\n")]
    else:
        lines.append(f"Write the Python function {signature or code.entry}. Examples:")
        lines += [f"{code.entry}({test.case[1:-1]}) == {shown_output(test.output)}" for test in code.visible]
    return Problem(id_, "\n".join(lines), code.reference, {CODE: code, "wording": WORDING})


def shown_output(output: Any) -> str:
    """Plain data in Python's notation."""
    if isinstance(output, dict):
        ((kind, held),) = output.items()
        if kind == "set":
            return "{" + ", ".join(map(shown_output, held)) + "}" if held else "set()"
        if kind == "dict":
            return "{" + ", ".join(f"{shown_output(key)}: {shown_output(value)}" for key, value in held) + "}"
        return f"float({json.dumps(held)})"
    if isinstance(output, list):
        return "[" + ", ".join(map(shown_output, output)) + "]"
    return repr(output)


# --- completions ------------------------------------------------------------------------------------------------------

LONGEST_CERTIFICATE = 4000
WORD = "certificate"
# The word, with bullets, comment signs or stars before it on its line.
MENTION = re.compile(rf"(?:^[ \t>*_#`~-]{{0,12}})?{WORD}", re.IGNORECASE | re.MULTILINE)
COLON = re.compile(r"[ \t*_`]{0,6}:[*_`]{0,3}")
FENCE = re.compile(r"^[ \t]*(`{3,}|~{3,})[ \t]*([A-Za-z0-9_+-]*)[^\n]*$", re.MULTILINE)
PYTHON = frozenset({"", "python", "python3", "py"})


@dataclass(frozen=True, slots=True)
class Certificate:
    """The named input, or the `complaint` why the text names none."""

    value: Any = None
    complaint: str = ""


def shown(completion: str) -> str:
    """The part of a completion that a verifier may read."""
    found = MENTION.search(completion)
    return (completion[: found.start()] if found else completion).rstrip()


def extract_code(completion: str) -> str:
    """The last fenced Python block of the shown part, or all of it without a fence; "" without code. An unclosed fence
    extends to the end."""
    text = shown(completion)
    blocks: list[str] = []
    opened: tuple[str, str, int] | None = None  # fence, language, start of its text
    for mark in FENCE.finditer(text):
        fence, language = mark.group(1), mark.group(2).lower()
        if opened is None:
            opened = (fence, language, mark.end() + 1)
        elif fence[0] == opened[0][0] and len(fence) >= len(opened[0]) and not language:
            if opened[1] in PYTHON:
                blocks.append(text[opened[2] : mark.start()])
            opened = None
    if opened is not None and opened[1] in PYTHON:
        blocks.append(text[opened[2] :])
    if blocks or FENCE.search(text):
        return next((block for block in reversed(blocks) if block.strip()), "").rstrip()
    return text


def read_certificate(completion: str) -> Certificate | None:
    """The certificate on the line of the word's first occurrence; None if the word does not occur."""
    found = MENTION.search(completion)
    if found is None:
        return None
    colon = COLON.match(completion, found.end())
    if colon is None or completion[: found.start()][-1:] not in ("", "\n"):
        return Certificate(complaint="its certificate is not on a separate line")
    written = completion[colon.end() :].partition("\n")[0].strip().strip("`").strip()
    if not written:
        return Certificate(complaint="its certificate names nothing")
    if len(written) > LONGEST_CERTIFICATE:
        return Certificate(complaint="its certificate is far too long")
    try:
        return Certificate(json.loads(written, parse_constant=_no_number))
    except (ValueError, RecursionError):
        return Certificate(complaint="its certificate is not JSON")


def _no_number(name: str) -> NoReturn:
    raise ValueError(name)
