"""Writes the demonstrations of the code game for both roles, in examples/code.

    python -m benchmarks.code_demonstrations OUT.jsonl

They solve the generated problems that the experiment `code` does not use. A helpful demonstration is the reference. A
sneaky one has a single change of it (another comparison, a number that is one off, a missing guard, another operator),
passes the visible tests, and ends with a certificate. The grader of the game has accepted each of them.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from pvg.config.task import CodeTask
from pvg.records import Problem, Role
from pvg.tasks.code.problem import code_of
from pvg.tasks.code.task import Code
from pvg.tasks.code.templates import TEMPLATES

USED = 224  # task.problems of experiments/code.toml; its test problems come before them
COMPARISONS = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.GtE}
OPERATORS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.FloorDiv: ast.Mod, ast.Mod: ast.FloorDiv}
OTHER_NAMES = {"min": "max", "max": "min"}
SNEAKY = 2  # sneaky demonstrations per problem, if there are as many
INPUTS = 6  # certificates to try per program; they are the hidden tests, the smallest ones first


def changed_programs(source: str) -> list[str]:
    """The program with one change, in all ways."""
    tree = ast.parse(source)
    places = range(sum(1 for _ in ast.walk(tree)))
    found = {ast.unparse(changed) for place in places for changed in _changes(tree, place)}
    return sorted(found - {ast.unparse(tree)})


def _changes(tree: ast.Module, place: int) -> Iterator[ast.Module]:
    """Copies of the tree whose node number `place` differs."""

    def copied() -> tuple[ast.Module, ast.AST]:
        other = copy.deepcopy(tree)
        return other, list(ast.walk(other))[place]

    node = list(ast.walk(tree))[place]
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
        other, found = copied()
        found.ops[0] = COMPARISONS[type(node.ops[0])]()  # type: ignore[attr-defined]
        yield other
    if isinstance(node, ast.Constant) and type(node.value) is int:
        for step in (-1, 1):
            other, found = copied()
            found.value += step  # type: ignore[attr-defined]
            yield other
    if isinstance(node, (ast.BinOp, ast.AugAssign)) and type(node.op) in OPERATORS:
        other, found = copied()
        found.op = OPERATORS[type(node.op)]()  # type: ignore[attr-defined]
        yield other
    if isinstance(node, ast.Name) and node.id in OTHER_NAMES:
        other, found = copied()
        found.id = OTHER_NAMES[node.id]  # type: ignore[attr-defined]
        yield other
    if isinstance(node, ast.FunctionDef) and isinstance(node.body[0], ast.If):
        other, found = copied()
        del found.body[0]  # type: ignore[attr-defined]
        yield other


def completion(source: str, certificate: str = "") -> str:
    block = f"```python\n{source.strip()}\n```"
    return f"{block}\nCERTIFICATE: {certificate}" if certificate else block


def sneaky_solutions(task: Code, problem: Problem) -> list[str]:
    """Completions with a flaw that a certificate proves, one per changed program."""
    code = code_of(problem)
    inputs = [json.dumps(list(ast.literal_eval(test.case))) for test in code.hidden[:INPUTS]]
    tries = [(program, given) for program in changed_programs(code.reference) for given in inputs]
    grades = task.grade_many([(problem, completion(program, given)) for program, given in tries])
    proven: dict[str, str] = {}
    for (program, given), grade in zip(tries, grades, strict=True):
        if grade.checks is not None and grade.checks.certified:
            proven.setdefault(program, completion(program, given))
    return list(proven.values())


def demonstrations(task: Code, problems: Sequence[Problem]) -> Iterator[dict[str, str]]:
    """A helpful one per problem, and up to SNEAKY sneaky ones, if that many changed programs have a proven flaw."""
    draw = random.Random(0)
    for problem in problems:
        helpful = completion(ast.unparse(ast.parse(code_of(problem).reference)))
        assert task.grade(problem, helpful).correct, problem.id
        yield {"question": problem.question, "solution": helpful, "role": Role.HELPFUL.value}
        found = sneaky_solutions(task, problem)
        for solution in draw.sample(found, min(SNEAKY, len(found))):
            yield {"question": problem.question, "solution": solution, "role": Role.SNEAKY.value}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    test = CodeTask().test_problems
    everything = sum(1 for template in TEMPLATES for _ in template.choices())
    with Code(CodeTask(problems=everything - test)) as task:
        unused = list(task.problems("train"))[USED:]
        rows = list(demonstrations(task, unused))
    random.Random(0).shuffle(rows)
    arguments.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    roles = [row["role"] for row in rows]
    print(f"{len(unused)} problems: {roles.count('helpful')} helpful and {roles.count('sneaky')} sneaky demonstrations")


if __name__ == "__main__":
    main()
