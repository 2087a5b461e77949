"""The training rows and figures of the embedded models of the plan game on the mini board (pvg.tasks.diplomacy.mini).

The prover imitates sound plans and, more often under the sneaky tag than under the helpful one, plans that work only if
the enemy holds; the sneaky ones with their certificate. The verifier imitates sound plans without a tag, and learns
what the adjudicator answers when it asks about a reply: `deg/bf>d?d.;ef;g.?bd;f+bd` -> `=-`. It never reads whether a
plan is sound. pvg.models.embedded_training trains both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from pvg.config.task import DiplomacyMiniTask
from pvg.records import Problem
from pvg.tasks.diplomacy.mini import DiplomacyMini, listed_problems, replies_to

Row = tuple[str, str]  # prompt, completion


def held_out_plans() -> list[Problem]:
    """The default task's test split. No embedded model was trained on it."""
    return list(DiplomacyMini(DiplomacyMiniTask()).problems("test"))


@cache
def training_problems() -> list[Problem]:
    """All problems that are not held out."""
    section = DiplomacyMiniTask()
    count = len(listed_problems()) - section.test_problems
    return list(DiplomacyMini(section.model_copy(update={"problems": count})).problems("train"))


def rows_of(flawed: Mapping[str, float], count: int, rng: np.random.Generator) -> list[Row]:
    """`count` rows for the prover, whose solutions have role tags, or for the verifier."""
    return prover_rows(flawed, count, rng) if "H" in flawed else verifier_rows(count, rng)


def prover_rows(flawed: Mapping[str, float], count: int, rng: np.random.Generator) -> list[Row]:
    """`count` solutions, the tags in turn; `flawed` maps each tag to its share of flawed solutions."""
    tags = list(flawed)
    return [_solution(tags[index % len(tags)], flawed, rng) for index in range(count)]


def _solution(tag: str, flawed: Mapping[str, float], rng: np.random.Generator) -> Row:
    problem = _pick(training_problems(), rng)
    table = replies_to(problem)
    if rng.random() >= flawed[tag]:
        return tag + problem.question, table.plan_texts[_row(table.sound_P, rng)]
    row = _row(table.stands_PR[:, 0] & ~table.sound_P, rng)
    plan = table.plan_texts[row]
    if tag == "S":
        plan += f"!{table.reply_texts[_row(~table.stands_PR[row], rng)]}"
    return tag + problem.question, plan


def verifier_rows(count: int, rng: np.random.Generator) -> list[Row]:
    """`count` rows: sound plans, and answers of the adjudicator about any plans, in turn."""
    rows = []
    for index in range(count):
        problem = _pick(training_problems(), rng)
        table = replies_to(problem)
        if index % 2:
            rows.append((problem.question, table.plan_texts[_row(table.sound_P, rng)]))
            continue
        row = _row(table.stands_PR[:, 0], rng)
        stands = bool(rng.random() < 0.5) or bool(table.sound_P[row])
        reply = table.reply_texts[_row(table.stands_PR[row] == stands, rng)]
        rows.append((f"{problem.question}{table.plan_texts[row]}?{reply}", "=+" if stands else "=-"))
    return rows


Element = TypeVar("Element")


def _pick(values: Sequence[Element], rng: np.random.Generator) -> Element:
    return values[int(rng.integers(len(values)))]


def _row(mask_P: NDArray[np.bool_], rng: np.random.Generator) -> int:
    """A random place at which the mask is True."""
    return int(_pick(np.flatnonzero(mask_P).tolist(), rng))
