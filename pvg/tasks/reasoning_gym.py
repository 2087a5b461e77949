"""Datasets of the reasoning-gym package (extra `reasoning-gym`), graded by its graders, with unsafe answers refused.

The package makes problem i of a dataset from `seed + i`, so train and test begin at distant seeds. No question is in
both splits or comes twice. A completion's answer is the content of its last `<answer>` tag, otherwise its last line.

Some graders pass the answer to Python's `eval` or to sympy's parser. A model that is rewarded for whatever the grader
accepts may write code, so `refusal` lets only harmless answers pass. It also refuses `nan`, because a grader's test for
"the distance is too large" is false for it, and numbers with more digits than an answer has, because some graders
repeat a move as often as a number says. Some graders accept wrong answers, such as `-18` for 18: what they accept must
also have the reference's value (`VALUES`). Datasets whose graders cannot be made safe are not opened
(`UNSAFE_GRADERS`), nor those that accept one text for most problems (`Dataset.constant`). All this was found by reading
and trying reasoning-gym 0.1.19."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from itertools import zip_longest
from typing import Any

import orjson

from pvg.config.task import ReasoningGymTask
from pvg.errors import ConfigurationError, MissingRequirementError, shortened
from pvg.installation import install_extra
from pvg.records import Grade, Problem, Split
from pvg.tasks.answers import extract, parse_number
from pvg.tasks.data import tagged
from pvg.tasks.expressions import value_of
from pvg.tasks.task import tag_wording

# Correct answers are short. Graders parse, compare and permute answers, not always in linear time.
LONGEST_ANSWER = 4000
LONGEST_SHORT = 600

# Letters that occur in these datasets' answers and name no variable of a grader, or quoted words in brackets. Neither
# can call, loop or look up anything.
LIST = re.compile(r"[A-EQ0-9_\s]*+|(?>(?:[0-9\s,\[\]-]|'[A-Za-z0-9_ ]*+'|\"[A-Za-z0-9_ ]*+\")*)")
# Without `**` and `//`: sympy would compute 9**9**9**9.
ARITHMETIC = re.compile(r"(?>(?:[-+().0-9\s]|\*(?!\s*\*)|/(?!\s*/))*)")
# Only a variable of one letter may have a power.
POLYNOMIAL = re.compile(
    r"(?>(?:[-+()0-9\s]|[a-zA-Z](?![A-Za-z0-9_(])(?:\s?\*\*\s?[0-9]{1,2}+(?![0-9]|\s*\*\*))?|\*(?!\s*\*))*)"
)
GRID = re.compile(r"[01\s]*+")
# Digits of a whole number, unless the reference has longer ones: a count of steps, of turns, and in general.
STEPS, TURNS, MOST_DIGITS = 2, 1, 12
WHOLE = re.compile(r"(?<![.\d])\d++")
POWER_OF_TEN = re.compile(r"[eE][-+]?[\d_]{4}")
NOT_FINITE = re.compile(r"\b(?:nan|inf|infinity)j?\b", re.IGNORECASE)

SCREENS = {
    **dict.fromkeys(("n_queens", "binary_matrix", "spiral_matrix", "string_insertion"), (LIST, "no plain list")),
    **dict.fromkeys(("countdown", "puzzle24"), (ARITHMETIC, "not plain arithmetic")),
    "polynomial_multiplication": (POLYNOMIAL, "no plain polynomial"),
    "kakurasu": (GRID, "no grid of 0 and 1"),
}
SHORT = frozenset({"countdown", "puzzle24", "polynomial_multiplication", "rubiks_cube"})
DIGITS = {"rush_hour": STEPS, "rubiks_cube": TURNS}


def _words(text: str) -> list[str]:
    return text.lower().split()


# The value of an answer, which must be that of the reference. These graders compare only beginnings, absolute values,
# or numbers up to 1.
VALUES: dict[str, Callable[[str], Any]] = {
    "coin_flip": lambda text: f"{float(Fraction(text.replace(',', ''))):.4g}",  # references have 10 digits
    "game_of_life": json.loads,
    "gsm_symbolic": lambda text: (found := extract(f"#### {text}")) and found.value,
    "letter_jumble": _words,
    "number_sorting": lambda text: [Decimal(str(number)) for number in json.loads(text.replace("'", '"'))],
    "puzzle24": lambda text: (value_of(text), sorted(re.findall(r"[0-9.]+", text))),
    "spell_backward": _words,
    "word_sorting": lambda text: re.split(r",\s*", text.strip()),
}

SIMPLIFIES = "its grader lets sympy simplify the model's answer, which may never end"
UNSAFE_GRADERS = {
    "simple_integration": SIMPLIFIES,
    "intermediate_integration": SIMPLIFIES,
    "game_of_life_halting": "its grader accepts any answer",
}


def refusal(dataset: str, answer: str, reference: str) -> str:
    """Why the grader of `dataset` must not see `answer`; "" if it may. The reference itself is always allowed."""
    reason = ""
    longest = LONGEST_SHORT if dataset in SHORT else LONGEST_ANSWER
    if answer == reference:
        reason = ""
    elif len(answer) > max(longest, 4 * len(reference)):
        reason = "far too long"
    elif NOT_FINITE.search(answer) and not NOT_FINITE.search(reference):
        reason = "not a finite number"
    elif _digits(answer) > max(_digits(reference), DIGITS.get(dataset, MOST_DIGITS)) or (
        POWER_OF_TEN.search(answer) and not POWER_OF_TEN.search(reference)
    ):
        reason = "a number in it is too large"
    elif dataset in SCREENS:
        allowed, complaint = SCREENS[dataset]
        reason = "" if allowed.fullmatch(answer) else complaint
    return reason


def _digits(text: str) -> int:
    return max(map(len, WHOLE.findall(text)), default=0)


# --- the task ---------------------------------------------------------------------------------------------------------
# Items drawn per required problem, to replace repeated questions.
DRAWS_PER_PROBLEM = 2
# Seeds of a split begin in [base, base + SEED_SPREAD); the gap to the next base has room for any number of items.
SEED_SPREAD = 2**28
SEED_BASES: dict[Split, int] = {"train": 0, "test": 2**30}
# Found by comparing processes and sizes (reasoning-gym 0.1.19). These iterate over Python sets, whose order differs
# between processes.
ORDERED_BY_HASH = frozenset({"isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note"})
# This one makes all items at once, so they depend on their number.
ORDERED_BY_SIZE = frozenset({"acre"})
WORDING = tag_wording("answer", "11", "9")
OWNED_SETTINGS = ("seed", "size")
# A grader's labels are useless if it accepts, at the set threshold, NONSENSE for any problem, or for more than half of
# PROBED problems one of CONSTANTS, the reference of another problem, or their references with the other sign.
NONSENSE = "?"
CONSTANTS = ("0", "1", "-1", "6*4*1*1")
PROBED, FEWEST = 8, 4
# Errors that graders raise for answers that they cannot read.
UNREADABLE = (ArithmeticError, AssertionError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


class ReasoningGym:
    """The reasoning-gym task of one section: its datasets in equal parts, in turn. The first call of `problems` for a
    split makes its problems and keeps them."""

    def __init__(self, section: ReasoningGymTask) -> None:
        """Raises MissingRequirementError without the extra, ConfigurationError for a wrong dataset or setting."""
        self._section = section
        self._datasets = {name: Dataset(section, name, place) for place, name in enumerate(section.datasets)}
        self._made: dict[Split, list[Problem]] = {}

    def problems(self, split: Split) -> Iterator[Problem]:
        """As many problems as the section sets, with distinct questions, none of them in both splits.

        Raises ConfigurationError if a dataset has too many repetitions, or if its grader accepts one answer for all.
        """
        if split not in self._made:
            # The test problems come first, so they do not change with `problems`.
            taken = {problem.question for problem in self.problems("test")} if split == "train" else set()
            parts = [dataset.distinct(split, taken) for dataset in self._datasets.values()]
            made = [problem for turn in zip_longest(*parts) for problem in turn if problem is not None]
            for (name, dataset), part in zip(self._datasets.items(), parts, strict=True):
                if (text := dataset.constant(part)) is not None:
                    raise ConfigurationError(
                        f"reasoning-gym's grader of {name!r} accepts {shortened(repr(text))} as a correct answer at "
                        f"task.threshold = {self._section.threshold}.",
                        "Raise task.threshold, or use another task.dataset.",
                    )
            self._made[split] = made
        return iter(self._made[split])

    def grade(self, problem: Problem, completion: str) -> Grade:
        """Correct: the dataset's score (0 to 1) of the answer reaches `threshold`. Well-formed: there is an answer.

        An answer that the grader cannot read or must not see (`refusal`) is incorrect; the note says which.
        """
        answer, _ = tagged(completion) or ("", "")
        if not answer:
            return Grade(correct=False, well_formed=False, note="no answer")
        return self._datasets[problem.metadata["dataset"]].grade(problem, answer)


class Dataset:
    """One dataset of a section, the `place`-th: its problems and its grader."""

    def __init__(self, section: ReasoningGymTask, name: str, place: int) -> None:
        parts, self._name, self._threshold = len(section.datasets), name, section.threshold
        self._settings = section.settings if parts == 1 else section.settings.get(name, {})
        self._config = _configuration(name, self._settings)
        whole: dict[Split, int] = {"train": section.problems, "test": section.test_problems}
        self._asked = {split: count // parts + (place < count % parts) for split, count in whole.items()}
        if name in ORDERED_BY_HASH and os.environ.get("PYTHONHASHSEED", "random") == "random":
            raise ConfigurationError(
                f"task.dataset = {name!r} gives other problems in every process, because reasoning-gym "
                "uses the order of Python's hashes.",
                "Set PYTHONHASHSEED=0 in the environment, which fixes this order.",
            )
        self._opened = {split: self._open(split) for split in SEED_BASES}

    def grade(self, problem: Problem, answer: str) -> Grade:
        if reason := refusal(self._name, answer, problem.answer):
            return Grade(correct=False, well_formed=True, answer=answer, note=f"answer refused: {reason}")
        try:
            score = float(self._opened["train"].score_answer(answer, problem.metadata["entry"]))
            value = VALUES.get(self._name) if score >= 1 else None
            if value is not None and value(answer) != value(problem.answer):
                return Grade(False, well_formed=True, answer=answer, note="its grader accepts this wrong answer")
        except UNREADABLE as error:
            note = f"answer unreadable for its grader ({type(error).__name__})"
            return Grade(correct=False, well_formed=True, answer=answer, note=note)
        correct = score >= self._threshold
        partial = f"score {score:.2f} of {self._threshold:.2f}" if not correct and score > 0 else ""
        return Grade(correct, well_formed=True, answer=answer, note=partial)

    def constant(self, problems: Sequence[Problem]) -> str | None:
        """An answer that the grader accepts although it is no answer, or wrong for most problems."""
        if any(self.grade(problem, NONSENSE).correct for problem in problems):
            return NONSENSE
        some = problems[:PROBED]
        texts = [[text] * len(some) for text in (*CONSTANTS, *(problem.answer for problem in some))]
        for row in (*texts, [_opposite(problem.answer) for problem in some]):
            tried = [
                (problem, text) for problem, text in zip(some, row, strict=True) if text not in ("", problem.answer)
            ]
            if len(tried) >= FEWEST and sum(self.grade(*each).correct for each in tried) > len(tried) / 2:
                return tried[0][1]
        return None

    def _open(self, split: Split) -> Any:
        key = f"0/{split}".encode()
        start = SEED_BASES[split] + int.from_bytes(hashlib.sha256(key).digest()) % SEED_SPREAD
        size = DRAWS_PER_PROBLEM * self._asked[split]
        return _opened(self._name, {**self._settings, "seed": start, "size": size})

    def distinct(self, split: Split, taken: set[str]) -> list[Problem]:
        """Its problems of a split, without the questions in `taken`, which get theirs."""
        asked = self._asked[split]
        prefix = f"reasoning_gym-{self._name}-{self._digest(split)}-{split}"
        found: list[Problem] = []
        for index in range(DRAWS_PER_PROBLEM * asked):
            entry = self._opened[split][index]
            if entry["question"] in taken:
                continue
            taken.add(entry["question"])
            # Some datasets have many correct answers and give none.
            answer = "" if entry["answer"] is None else str(entry["answer"])
            metadata = {"entry": entry, "wording": WORDING, "dataset": self._name}
            found.append(Problem(f"{prefix}-{index}", entry["question"], answer, metadata))
            if len(found) == asked:
                return found
        setting = "task.problems" if split == "train" else "task.test_problems"
        raise ConfigurationError(
            f"reasoning-gym's {self._name!r} repeats questions: {DRAWS_PER_PROBLEM * asked} draws gave "
            f"{len(found)} new questions for {setting} = {asked}.",
            f"Set fewer problems, or make the dataset larger with task.settings ({', '.join(self._config)}).",
        )

    def _digest(self, split: Split) -> str:
        """8 hex digits of everything that determines a problem, except split and index."""
        import reasoning_gym

        decisive: dict[str, Any] = {"settings": self._settings, "version": reasoning_gym.__version__}
        if self._name in ORDERED_BY_HASH:
            decisive["hash_seed"] = os.environ["PYTHONHASHSEED"]
        if self._name in ORDERED_BY_SIZE:
            decisive["size"] = self._asked[split]
        return hashlib.sha256(orjson.dumps(decisive, option=orjson.OPT_SORT_KEYS)).hexdigest()[:8]


def _opposite(reference: str) -> str:
    """The number with the other sign; "" for 0 and for other texts."""
    return f"-{reference}".removeprefix("--") if parse_number(reference) else ""


def _configuration(dataset: str, settings: Mapping[str, Any]) -> list[str]:
    """The dataset's settings. Checks the name of the dataset and of the settings given."""
    try:
        from reasoning_gym.factory import DATASETS
    except ModuleNotFoundError as error:
        raise MissingRequirementError(
            f"task.kind = 'reasoning_gym' needs the package reasoning-gym (there is no module {error.name!r}).",
            install_extra("reasoning-gym"),
        ) from None
    if dataset not in DATASETS:
        alike = difflib.get_close_matches(dataset, DATASETS, n=3, cutoff=0.4)
        raise ConfigurationError(
            f"reasoning-gym has no dataset {dataset!r}.",
            f"The nearest names are {', '.join(alike)}." if alike else f"It has {', '.join(sorted(DATASETS))}.",
        )
    if dataset in UNSAFE_GRADERS:
        raise ConfigurationError(
            f"pvg does not open reasoning-gym's {dataset!r}: {UNSAFE_GRADERS[dataset]}.", "Use another task.dataset."
        )
    known = [field.name for field in dataclasses.fields(DATASETS[dataset][1])]
    for name in settings:
        if name in OWNED_SETTINGS:
            raise ConfigurationError(f"pvg sets task.settings.{name}.", "Leave it out.")
        if name not in known:
            raise ConfigurationError(
                f"reasoning-gym's {dataset!r} has no setting {name!r}.", f"It has {', '.join(known)}."
            )
    return [name for name in known if name not in OWNED_SETTINGS]


def _opened(dataset: str, settings: dict[str, Any]) -> Any:
    import reasoning_gym

    try:
        return reasoning_gym.create_dataset(dataset, **settings)
    except (AssertionError, AttributeError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"reasoning-gym rejects the settings of {dataset!r}: {str(error) or type(error).__name__}.",
            "Change task.settings, task.problems or task.test_problems.",
        ) from None
