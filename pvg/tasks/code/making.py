"""Programming problems made from templates (pvg.tasks.code.templates), the same in every process.

A problem is a template with one choice of its parameters. Tests are drawn from the domains of the arguments, the
smallest inputs among the hidden ones, and their outputs are the reference's. The domains are also the problem's own
check of what a certificate names.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Callable
from typing import Any

from pvg.errors import ConfigurationError
from pvg.records import Problem, Split
from pvg.sandbox import plain
from pvg.sections import CodeTask
from pvg.tasks.code.problem import CodeProblem, CodeTest, make_problem
from pvg.tasks.code.templates import TEMPLATES, Template

HIDDEN_TESTS = 12
DRAWS = 50  # per test that is wanted, to find inputs that are not there yet


def made_problems(section: CodeTask, split: Split) -> list[Problem]:
    """The split's problems: test problems first in one shuffle by `task.seed`, so that they stay when others are asked
    for. Raises ConfigurationError when there are not as many."""
    everything = [(template, values) for template in TEMPLATES for values in template.choices()]
    _generator("order", section.seed).shuffle(everything)
    asked = section.problems + section.test_problems
    if asked > len(everything):
        raise ConfigurationError(
            f"task.problems = {section.problems} and task.test_problems = {section.test_problems} are {asked}, and "
            f"there are {len(everything)} problems to be made.",
            "Ask for fewer, or read others with task.path.",
        )
    chosen = everything[: section.test_problems] if split == "test" else everything[section.test_problems : asked]
    return [made(template, values, section) for template, values in chosen]


def made(template: Template, values: dict[str, int], section: CodeTask) -> Problem:
    """One problem; its id names the template and the parameters."""
    reference = template.filled(template.reference, values)
    function = _function(reference, template.name)
    generator = _generator(template.name, sorted(values.items()), section.seed)
    inputs = _inputs(template, generator, section.visible_tests + HIDDEN_TESTS)
    tests = tuple(CodeTest(repr(given), plain(function(*given))) for given in inputs)
    # The smallest inputs are where flaws hide, so they are no examples.
    visible, hidden = tests[-section.visible_tests :], tests[: -section.visible_tests]
    names = [argument.name for argument in template.arguments]
    conditions = " and ".join(f"({argument.condition})" for argument in template.arguments)
    code = CodeProblem(
        entry=template.name,
        reference=reference,
        visible=visible,
        hidden=hidden,
        check=f"def valid({', '.join(names)}):\n    return {conditions}\n",
    )
    told = " ".join(f"{argument.told}." for argument in template.arguments)
    shown = "-".join(f"{name}{value}" for name, value in values.items())
    return make_problem(
        f"code-{template.name}{'-' if shown else ''}{shown}",
        f"{template.filled(template.question, values)} {told}",
        f"{template.name}({', '.join(names)})",
        code,
    )


def _function(source: str, name: str) -> Callable[..., Any]:
    """A reference of ours, from our own templates: nothing that a model has written gets here."""
    namespace: dict[str, Any] = {}
    exec(compile(source, f"{name}.py", "exec"), namespace)
    found: Callable[..., Any] = namespace[name]
    return found


def _inputs(template: Template, generator: random.Random, count: int) -> list[list[Any]]:
    """`count` different argument lists, the smallest ones first; fewer where the domains hold fewer."""
    smallest = itertools.product(*(argument.edges for argument in template.arguments))
    found: dict[str, list[Any]] = {}
    for given in itertools.islice(smallest, HIDDEN_TESTS // 3):
        found.setdefault(repr(given), list(given))
    for _ in range(DRAWS * count):
        if len(found) == count:
            break
        drawn = [argument.draw(generator) for argument in template.arguments]
        found.setdefault(repr(tuple(drawn)), drawn)
    return list(found.values())


def _generator(*place: object) -> random.Random:
    return random.Random(int.from_bytes(hashlib.sha256(repr(place).encode()).digest()[:8], "big"))
