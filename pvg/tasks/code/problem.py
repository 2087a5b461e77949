"""A programming problem: what a solution must do, and how that is found out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pvg.records import Problem
from pvg.sandbox import Program

CODE = "code"  # in a Problem's metadata: its CodeProblem
WORDING = "code"  # of its prompts (pvg.game.roles)


@dataclass(frozen=True, slots=True)
class CodeTest:
    """`case`: the arguments as a Python list literal, or the text for standard input (see pvg.sandbox.Program);
    `output`: plain data (pvg.sandbox.plain), or the text that is printed."""

    case: str
    output: Any


@dataclass(frozen=True, slots=True)
class CodeProblem:
    """`entry`: the function that is called; None for programs that read standard input and print.

    `prelude` stands before every solution (imports that the question shows). `check` is Python source of a function
    `valid`, which says of arguments (or of a text) whether they are an input of this problem; "" without one: then
    they must lie within what the tests show (pvg.tasks.code.inputs). Solutions must have one right output for
    every input.
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
        """A solution on these cases."""
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
    """Plain data as Python writes it."""
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
