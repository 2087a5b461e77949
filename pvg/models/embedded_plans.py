"""The training rows and figures of the embedded models of the plan game on the mini board (pvg.tasks.diplomacy.mini).

The prover imitates sound plans and, more often under the sneaky tag than under the helpful one, plans that work only if
the enemy holds; the sneaky ones with their certificate. The verifier imitates sound plans without a tag, and learns
what the adjudicator answers when it asks about a reply: `deg/bf>d?d.;ef;g.?bd;f+bd` -> `=-`. It never reads whether a
plan is sound. pvg.models.embedded_training trains both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

import numpy as np

from pvg.config.task import DiplomacyMiniTask
from pvg.records import Problem
from pvg.tasks.diplomacy.mini import DiplomacyMini, Replies, replies_to

Row = tuple[str, str]  # prompt, completion


def held_out_plans() -> list[Problem]:
    """The default task's test split. No embedded model was trained on it."""
    return list(DiplomacyMini(DiplomacyMiniTask()).problems("test"))


@cache
def training_problems() -> list[Problem]:
    """All problems that are not held out."""
    section = DiplomacyMiniTask()
    return list(DiplomacyMini(section.model_copy(update={"problems": 894 - section.test_problems})).problems("train"))


def prover_rows(flawed: Mapping[str, float], count: int, rng: np.random.Generator) -> list[Row]:
    """`count` solutions, the tags in turn; `flawed` maps each tag to its share of flawed solutions."""
    tags = list(flawed)
    return [_solution(tags[index % len(tags)], flawed, rng) for index in range(count)]


def _solution(tag: str, flawed: Mapping[str, float], rng: np.random.Generator) -> Row:
    problem = _pick(training_problems(), rng)
    table = replies_to(problem)
    flaws = np.flatnonzero(table.stands_PR[:, 0] & ~table.sound_P)
    if rng.random() >= flawed[tag]:
        return tag + problem.question, _plan(table, _pick(np.flatnonzero(table.sound_P), rng))
    row = _pick(flaws, rng)
    plan = _plan(table, row)
    if tag == "S":
        plan += f"!{_reply(table, _pick(np.flatnonzero(~table.stands_PR[row]), rng))}"
    return tag + problem.question, plan


def verifier_rows(count: int, rng: np.random.Generator) -> list[Row]:
    """`count` rows: sound plans, and answers of the adjudicator about any plans, in turn."""
    rows = []
    for index in range(count):
        problem = _pick(training_problems(), rng)
        table = replies_to(problem)
        if index % 2:
            rows.append((problem.question, _plan(table, _pick(np.flatnonzero(table.sound_P), rng))))
            continue
        row = _pick(np.flatnonzero(table.stands_PR[:, 0]), rng)
        stands = bool(rng.random() < 0.5) or bool(table.sound_P[row])
        reply = _pick(np.flatnonzero(table.stands_PR[row] == stands), rng)
        rows.append((f"{problem.question}{_plan(table, row)}?{_reply(table, reply)}", "=+" if stands else "=-"))
    return rows


def _plan(table: Replies, row: int) -> str:
    return table.plan_texts[row]


def _reply(table: Replies, column: int) -> str:
    return table.reply_texts[column]


def _pick(values, rng):
    return values[int(rng.integers(len(values)))]
