"""Generated programming problems: templates of small functions of integers, lists and words; equal in every process.

A template's question and reference contain its parameters as `$k`; each choice of parameters is another problem. An
argument can draw a value, list its smallest values, and state the condition for a valid value. Tests are drawn from
these domains, the smallest inputs are hidden tests, and the reference computes the outputs. The domains are also the
problem's check of certificates.
"""

from __future__ import annotations

import hashlib
import itertools
import random
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from pvg.config.task import CodeTask
from pvg.errors import ConfigurationError
from pvg.records import Problem, Split
from pvg.sandbox.inside.program import plain
from pvg.tasks.code_problems import CodeProblem, CodeTest, make_problem


@dataclass(frozen=True)
class Argument:
    """An argument of a function, and its valid values: an integer, a list of integers, or a word of a few letters."""

    kind: Literal["integer", "integers", "word"] = "integers"
    name: str = "numbers"
    least: int = -20
    most: int = 20
    shortest: int = 0
    longest: int = 12
    letters: str = "abcxyz"

    @property
    def edges(self) -> list[Any]:
        """The smallest values."""
        if self.kind == "integer":
            return [self.least, self.least + 1]
        if self.kind == "word":
            return ["", self.letters[0]]
        return [[self.least] * self.shortest, [self.most] * max(1, self.shortest)]

    @property
    def condition(self) -> str:
        """Python code that is true for a valid value."""
        name = self.name
        if self.kind == "integer":
            return f"type({name}) is int and {self.least} <= {name} <= {self.most}"
        if self.kind == "word":
            return f"type({name}) is str and len({name}) <= {self.longest} and set({name}) <= set({self.letters!r})"
        return (
            f"type({name}) is list and {self.shortest} <= len({name}) <= {self.longest} and "
            f"all(type(x) is int and {self.least} <= x <= {self.most} for x in {name})"
        )

    @property
    def description(self) -> str:
        if self.kind == "integer":
            return f"{self.name} is an integer from {self.least} to {self.most}"
        if self.kind == "word":
            return f"{self.name} is a text of at most {self.longest} characters out of {self.letters!r}"
        return f"{self.name} is a list of {self.shortest} to {self.longest} integers from {self.least} to {self.most}"

    def draw(self, generator: random.Random) -> Any:
        if self.kind == "integer":
            return generator.randint(self.least, self.most)
        if self.kind == "word":
            return "".join(generator.choice(self.letters) for _ in range(generator.randint(0, self.longest)))
        # Sometimes from a narrow range, so that numbers repeat.
        most = generator.choice((self.most, min(self.most, self.least + 5)))
        length = generator.randint(self.shortest, self.longest)
        return [generator.randint(self.least, most) for _ in range(length)]


@dataclass(frozen=True)
class ProblemTemplate:
    name: str
    question: str
    reference: str
    parameters: Mapping[str, Sequence[int]]
    arguments: Sequence[Argument] = (Argument(),)

    def choices(self) -> Iterator[dict[str, int]]:
        for values in itertools.product(*self.parameters.values()):
            yield dict(zip(self.parameters, values, strict=True))

    def filled(self, text: str, values: Mapping[str, int]) -> str:
        for name, value in values.items():
            text = text.replace(f"${name}", str(value))
        return text


@cache
def templates() -> tuple[ProblemTemplate, ...]:
    listed = tomllib.loads(files(__package__).joinpath("code_templates.toml").read_text(encoding="utf-8"))["template"]
    for row in listed:
        if "arguments" in row:
            row["arguments"] = tuple(Argument(**argument) for argument in row["arguments"])
    return tuple(ProblemTemplate(**row) for row in listed)


# --- problems ---------------------------------------------------------------------------------------------------------

SEED = 0  # of the problems: equal in every run
HIDDEN_TESTS = 12
DRAWS = 50  # per required test, to find new inputs


def made_problems(section: CodeTask, split: Split) -> list[Problem]:
    """The split's problems. Test problems come first in the shuffle, so they do not change with the
    number of problems. Raises ConfigurationError if there are too few."""
    everything = [(template, values) for template in templates() for values in template.choices()]
    _generator("order", SEED).shuffle(everything)
    asked = section.problems + section.test_problems
    if asked > len(everything):
        raise ConfigurationError(
            f"task.problems = {section.problems} and task.test_problems = {section.test_problems} are {asked} "
            f"together, but there are only {len(everything)} generated problems.",
            "Set fewer, or read other problems with task.path.",
        )
    chosen = everything[: section.test_problems] if split == "test" else everything[section.test_problems : asked]
    return [made(template, values, section) for template, values in chosen]


def made(template: ProblemTemplate, values: dict[str, int], section: CodeTask) -> Problem:
    """One problem. Its id names the template and the parameters."""
    reference = template.filled(template.reference, values)
    function = _function(reference, template.name)
    generator = _generator(template.name, sorted(values.items()), SEED)
    inputs = _inputs(template, generator, section.visible_tests + HIDDEN_TESTS)
    tests = tuple(CodeTest(repr(given), plain(function(*given))) for given in inputs)
    # The smallest inputs reveal flaws best, so they are not examples.
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
    description = " ".join(f"{argument.description}." for argument in template.arguments)
    shown = "-".join(f"{name}{value}" for name, value in values.items())
    return make_problem(
        f"code-{template.name}{'-' if shown else ''}{shown}",
        f"{template.filled(template.question, values)} {description}",
        f"{template.name}({', '.join(names)})",
        code,
    )


def _function(source: str, name: str) -> Callable[..., Any]:
    """A reference from pvg's templates, as a function. Text of a model never gets here."""
    namespace: dict[str, Any] = {}
    exec(compile(source, f"{name}.py", "exec"), namespace)
    found: Callable[..., Any] = namespace[name]
    return found


def _inputs(template: ProblemTemplate, generator: random.Random, count: int) -> list[list[Any]]:
    """`count` different argument lists, the smallest ones first; fewer if the domains have fewer."""
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
