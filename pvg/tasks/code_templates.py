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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pvg.config.task import CodeTask
from pvg.errors import ConfigurationError
from pvg.records import Problem, Split
from pvg.sandbox import plain
from pvg.tasks.code_problems import CodeProblem, CodeTest, make_problem


@dataclass(frozen=True)
class IntegerKind:
    name: str
    least: int
    most: int

    @property
    def edges(self) -> list[Any]:
        return [self.least, self.least + 1]

    @property
    def condition(self) -> str:
        return f"type({self.name}) is int and {self.least} <= {self.name} <= {self.most}"

    @property
    def description(self) -> str:
        return f"{self.name} is an integer from {self.least} to {self.most}"

    def draw(self, generator: random.Random) -> Any:
        return generator.randint(self.least, self.most)


@dataclass(frozen=True)
class IntegerListKind:
    name: str = "numbers"
    least: int = -20
    most: int = 20
    longest: int = 12
    shortest: int = 0

    @property
    def edges(self) -> list[Any]:
        return [[self.least] * self.shortest, [self.most] * max(1, self.shortest)]

    @property
    def condition(self) -> str:
        return (
            f"type({self.name}) is list and {self.shortest} <= len({self.name}) <= {self.longest} and "
            f"all(type(x) is int and {self.least} <= x <= {self.most} for x in {self.name})"
        )

    @property
    def description(self) -> str:
        return f"{self.name} is a list of {self.shortest} to {self.longest} integers from {self.least} to {self.most}"

    def draw(self, generator: random.Random) -> Any:
        # Sometimes from a narrow range, so that numbers repeat.
        most = generator.choice((self.most, min(self.most, self.least + 5)))
        length = generator.randint(self.shortest, self.longest)
        return [generator.randint(self.least, most) for _ in range(length)]


@dataclass(frozen=True)
class WordKind:
    """A text of a few letters."""

    name: str = "word"
    letters: str = "abcxyz"
    longest: int = 12

    @property
    def edges(self) -> list[Any]:
        return ["", self.letters[0]]

    @property
    def condition(self) -> str:
        fits = f"len({self.name}) <= {self.longest} and set({self.name}) <= set({self.letters!r})"
        return f"type({self.name}) is str and {fits}"

    @property
    def description(self) -> str:
        return f"{self.name} is a text of at most {self.longest} characters out of {self.letters!r}"

    def draw(self, generator: random.Random) -> Any:
        return "".join(generator.choice(self.letters) for _ in range(generator.randint(0, self.longest)))


Argument = IntegerKind | IntegerListKind | WordKind


@dataclass(frozen=True)
class ProblemTemplate:
    name: str
    question: str
    reference: str
    arguments: Sequence[Argument] = (IntegerListKind(),)
    parameters: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def choices(self) -> Iterator[dict[str, int]]:
        for values in itertools.product(*self.parameters.values()):
            yield dict(zip(self.parameters, values, strict=True))

    def filled(self, text: str, values: Mapping[str, int]) -> str:
        for name, value in values.items():
            text = text.replace(f"${name}", str(value))
        return text


def _loop(name: str, start: str, body: str, result: str = "total", arguments: str = "numbers") -> str:
    """A reference with one loop over its numbers."""
    inner = "\n".join(f"        {line}" for line in body.splitlines())
    return f"def {name}({arguments}):\n    {start}\n    for x in numbers:\n{inner}\n    return {result}\n"


TEMPLATES: tuple[ProblemTemplate, ...] = (
    ProblemTemplate(
        "sum_of_multiples", "Return the sum of the numbers that are divisible by $k.",
        _loop("sum_of_multiples", "total = 0", "if x % $k == 0:\n    total += x"), parameters={"k": range(2, 16)},
    ),
    ProblemTemplate(
        "count_above", "Return how many of the numbers are greater than $t.",
        _loop("count_above", "total = 0", "if x > $t:\n    total += 1"), parameters={"t": range(-12, 13)},
    ),
    ProblemTemplate(
        "sum_between", "Return the sum of the numbers from $a to $b, both included.",
        _loop("sum_between", "total = 0", "if $a <= x <= $b:\n    total += x"),
        parameters={"a": range(-8, 0, 2), "b": range(1, 16, 2)},
    ),
    ProblemTemplate(
        "every_kth", "Return the list of every $k-th number: the ones at positions $k, 2*$k, ..., counted from 1.",
        "def every_kth(numbers):\n    return numbers[$k - 1::$k]\n", parameters={"k": range(2, 8)},
    ),
    ProblemTemplate(
        "rotate_left", "Return the list rotated to the left by $k places; an empty list stays empty.",
        "def rotate_left(numbers):\n    if not numbers:\n        return []\n    k = $k % len(numbers)\n"
        "    return numbers[k:] + numbers[:k]\n", parameters={"k": range(1, 16)},
    ),
    ProblemTemplate(
        "clip_all", "Return the list with every number below $a replaced by $a and every number above $b by $b.",
        "def clip_all(numbers):\n    return [min(max(x, $a), $b) for x in numbers]\n",
        parameters={"a": range(-12, -2, 2), "b": range(3, 13, 2)},
    ),
    ProblemTemplate(
        "longest_run", "Return the length of the longest run of neighbouring numbers that are all at least $t.",
        _loop("longest_run", "best = run = 0", "run = run + 1 if x >= $t else 0\nbest = max(best, run)", "best"),
        parameters={"t": range(-9, 12)},
    ),
    ProblemTemplate(
        "pairs_with_sum", "Return the number of pairs of positions i < j whose numbers add up to $s.",
        "def pairs_with_sum(numbers):\n    total = 0\n    seen = {}\n    for x in numbers:\n"
        "        total += seen.get($s - x, 0)\n        seen[x] = seen.get(x, 0) + 1\n    return total\n",
        (IntegerListKind(least=-6, most=6),), {"s": range(-9, 10)},
    ),
    ProblemTemplate(
        "largest_window", "Return the largest sum of $k neighbouring numbers, or 0 if there are fewer than $k.",
        "def largest_window(numbers):\n    if len(numbers) < $k:\n        return 0\n"
        "    return max(sum(numbers[i:i + $k]) for i in range(len(numbers) - $k + 1))\n", parameters={"k": range(2, 9)},
    ),
    ProblemTemplate(
        "differences_at", "Return the list of differences numbers[i + $k] - numbers[i], for all i where both exist.",
        "def differences_at(numbers):\n    return [b - a for a, b in zip(numbers, numbers[$k:])]\n",
        parameters={"k": range(1, 8)},
    ),
    ProblemTemplate(
        "alternating_sum", "Add the numbers up, but subtract every $k-th one (positions counted from 1).",
        "def alternating_sum(numbers):\n    total = 0\n    for i, x in enumerate(numbers, 1):\n"
        "        total += -x if i % $k == 0 else x\n    return total\n", parameters={"k": range(2, 9)},
    ),
    ProblemTemplate(
        "top_k", "Return the $k largest numbers in descending order (all of them if there are fewer).",
        "def top_k(numbers):\n    return sorted(numbers, reverse=True)[:$k]\n", parameters={"k": range(1, 9)},
    ),
    ProblemTemplate(
        "drop_copies", "Keep each number's first $k occurrences, in order, and drop its further ones.",
        "def drop_copies(numbers):\n    seen = {}\n    kept = []\n    for x in numbers:\n"
        "        seen[x] = seen.get(x, 0) + 1\n        if seen[x] <= $k:\n            kept.append(x)\n"
        "    return kept\n",
        (IntegerListKind(least=0, most=5),), {"k": range(1, 5)},
    ),
    ProblemTemplate(
        "remainders", "Return how many different remainders the numbers leave when divided by $m (Python's %).",
        "def remainders(numbers):\n    return len({x % $m for x in numbers})\n", parameters={"m": range(2, 20)},
    ),
    ProblemTemplate(
        "capped_sum", "Add the numbers up from the left, but whenever the sum exceeds $c, set it back to $c.",
        _loop("capped_sum", "total = 0", "total = min(total + x, $c)"), parameters={"c": range(5, 40, 2)},
    ),
    ProblemTemplate(
        "first_reaching", "Return the position (from 0) at which the running sum first reaches $s or more, else -1.",
        "def first_reaching(numbers):\n    total = 0\n    for i, x in enumerate(numbers):\n        total += x\n"
        "        if total >= $s:\n            return i\n    return -1\n",
        (IntegerListKind(least=-5),), {"s": range(1, 40, 2)},
    ),
    ProblemTemplate(
        "chunk_sums", "Split the list into pieces of $k (the last may be shorter) and return the list of their sums.",
        "def chunk_sums(numbers):\n    return [sum(numbers[i:i + $k]) for i in range(0, len(numbers), $k)]\n",
        parameters={"k": range(2, 9)},
    ),
    ProblemTemplate(
        "peaks", "Return how many numbers are greater than both neighbours by at least $d (the ends have only one and "
        "do not count).",
        "def peaks(numbers):\n    return sum(1 for a, b, c in zip(numbers, numbers[1:], numbers[2:]) "
        "if b - a >= $d and b - c >= $d)\n", parameters={"d": range(1, 9)},
    ),
    ProblemTemplate(
        "near_median", "Return how many numbers differ from the middle one of the sorted list by at most $d; of an "
        "even count the lower middle one is taken. An empty list gives 0.",
        "def near_median(numbers):\n    if not numbers:\n        return 0\n"
        "    middle = sorted(numbers)[(len(numbers) - 1) // 2]\n"
        "    return sum(abs(x - middle) <= $d for x in numbers)\n", parameters={"d": range(0, 9)},
    ),
    ProblemTemplate(
        "weighted_digits", "Return the sum of the decimal digits of n, each multiplied by $w if its position from the "
        "right (from 0) is odd.",
        "def weighted_digits(n):\n    digits = enumerate(reversed(str(n)))\n"
        "    return sum(int(d) * ($w if i % 2 else 1) for i, d in digits)\n",
        (IntegerKind("n", 0, 99999),), {"w": range(2, 12)},
    ),
    ProblemTemplate(
        "digits_in_base", "Return the digits of n in base $b as a list, the most significant first; 0 gives [0].",
        "def digits_in_base(n):\n    digits = []\n    while n:\n        n, d = divmod(n, $b)\n"
        "        digits.append(d)\n    return digits[::-1] or [0]\n", (IntegerKind("n", 0, 5000),), {"b": range(2, 13)},
    ),
    ProblemTemplate(
        "steps_to_one", "Halve n if it is even, else replace it by n + $a, until it is 1 or $m steps are made; return "
        "the number of steps.",
        "def steps_to_one(n):\n    steps = 0\n    while n != 1 and steps < $m:\n"
        "        n = n // 2 if n % 2 == 0 else n + $a\n        steps += 1\n    return steps\n",
        (IntegerKind("n", 1, 200),), {"a": (1, 3, 5, 7), "m": (10, 15, 20)},
    ),
    ProblemTemplate(
        "count_divisors", "Return how many divisors of n are at least $d.",
        "def count_divisors(n):\n    return sum(1 for d in range($d, n + 1) if n % d == 0)\n",
        (IntegerKind("n", 1, 300),), {"d": range(1, 13)},
    ),
    ProblemTemplate(
        "next_multiple", "Return the smallest multiple of $k that is greater than n.",
        "def next_multiple(n):\n    return (n // $k + 1) * $k\n", (IntegerKind("n", -100, 100),), {"k": range(2, 16)},
    ),
    ProblemTemplate(
        "power_digits", "Return the sum of the $p-th powers of the decimal digits of n.",
        "def power_digits(n):\n    return sum(int(d) ** $p for d in str(n))\n", (IntegerKind("n", 0, 9999),),
        {"p": range(2, 6)},
    ),
    ProblemTemplate(
        "bits_of", "Return how many of the lowest $k bits of n are set.",
        "def bits_of(n):\n    return bin(n & ((1 << $k) - 1)).count('1')\n", (IntegerKind("n", 0, 5000),),
        {"k": range(2, 12)},
    ),
    ProblemTemplate(
        "steps_down", "In each step subtract from n the largest square that is at most n, until n is below $t; return "
        "the number of steps.",
        "def steps_down(n):\n    steps = 0\n    while n >= $t:\n        root = 1\n"
        "        while (root + 1) ** 2 <= n:\n            root += 1\n        n -= root * root\n        steps += 1\n"
        "    return steps\n", (IntegerKind("n", 0, 2000),), {"t": range(1, 9)},
    ),
    ProblemTemplate(
        "shift_letters", "Replace every letter by the one $k places further in 'abcxyz', going round at its end.",
        "def shift_letters(word):\n    letters = 'abcxyz'\n"
        "    return ''.join(letters[(letters.index(c) + $k) % 6] for c in word)\n", (WordKind(),), {"k": range(1, 6)},
    ),
    ProblemTemplate(
        "squeeze", "Shorten every run of one letter that is longer than $k to $k letters.",
        "def squeeze(word):\n    kept = ''\n    for c in word:\n        if kept[-$k:] != c * $k:\n"
        "            kept += c\n    return kept\n", (WordKind(letters="ab"),), {"k": range(1, 5)},
    ),
    ProblemTemplate(
        "count_runs", "Return how many runs of one letter in the word are at least $k long.",
        "def count_runs(word):\n    total = run = 0\n    for i, c in enumerate(word):\n"
        "        run = run + 1 if i and word[i - 1] == c else 1\n        total += run == $k\n    return total\n",
        (WordKind(letters="ab"),), {"k": range(1, 6)},
    ),
    ProblemTemplate(
        "mirrored_ends", "Return how many of the first $k letters equal their mirror images, counted from the word's "
        "end; only positions that exist count.",
        "def mirrored_ends(word):\n    return sum(1 for i in range(min($k, len(word))) if word[i] == word[-1 - i])\n",
        (WordKind(letters="abc"),), {"k": range(1, 8)},
    ),
    ProblemTemplate(
        "balanced_prefix", "With '(' counting 1 and ')' counting -1, return the length of the longest prefix in which "
        "no count is below -$d or above $d.",
        "def balanced_prefix(word):\n    depth = 0\n    for i, c in enumerate(word):\n"
        "        depth += 1 if c == '(' else -1\n        if abs(depth) > $d:\n            return i\n"
        "    return len(word)\n", (WordKind(letters="()"),), {"d": range(1, 6)},
    ),
    ProblemTemplate(
        "merge_close", "Go through the sorted numbers and start a new group whenever the gap to the one before exceeds "
        "$g; return the number of groups.",
        "def merge_close(numbers):\n    ordered = sorted(numbers)\n"
        "    return sum(1 for i, x in enumerate(ordered) if i == 0 or x - ordered[i - 1] > $g)\n",
        parameters={"g": range(1, 9)},
    ),
    ProblemTemplate(
        "best_gain", "The numbers are prices by day. Return the largest gain from buying on one day and selling on a "
        "later one at most $k days after, or 0 if there is none.",
        "def best_gain(numbers):\n    best = 0\n    for i, low in enumerate(numbers):\n"
        "        for high in numbers[i + 1:i + 1 + $k]:\n            best = max(best, high - low)\n    return best\n",
        (IntegerListKind(least=0, most=30),), {"k": range(1, 8)},
    ),
    ProblemTemplate(
        "swap_neighbours", "Reverse every piece of $k numbers; a last piece that is shorter stays as it is.",
        "def swap_neighbours(numbers):\n    result = []\n    for i in range(0, len(numbers), $k):\n"
        "        piece = numbers[i:i + $k]\n        result += piece[::-1] if len(piece) == $k else piece\n"
        "    return result\n", parameters={"k": range(2, 8)},
    ),
    ProblemTemplate(
        "majority", "Return the numbers that make up more than $p percent of the list, ascending, each once.",
        "def majority(numbers):\n"
        "    return sorted(x for x in set(numbers) if 100 * numbers.count(x) > $p * len(numbers))\n",
        (IntegerListKind(least=0, most=4),), {"p": range(10, 60, 5)},
    ),
)  # fmt: skip


# --- problems ---------------------------------------------------------------------------------------------------------

SEED = 0  # of the problems: equal in every run
HIDDEN_TESTS = 12
DRAWS = 50  # per required test, to find new inputs


def made_problems(section: CodeTask, split: Split) -> list[Problem]:
    """The split's problems. Test problems come first in the shuffle, so they do not change with the
    number of problems. Raises ConfigurationError if there are too few."""
    everything = [(template, values) for template in TEMPLATES for values in template.choices()]
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
