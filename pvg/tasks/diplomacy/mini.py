"""The plan game on the mini map (see pvg.tasks.diplomacy.mini_movement for the map and the orders).

    question  deg/bf>d?     own armies d, e, g; enemy armies b, f; target d
    solution  d.;e+d;g.     one order for each own army, in the order of the question

A plan is *sound* if an own army stands in the target whatever the enemy orders. The task tries all replies, so the
grade is exact. A solution may end with a certificate, `!` and the reply that refutes it: `d.;ef;g.!bd;f+bd`. The
verifier does not read the certificate. A sneaky solution counts as a flaw only if its plan works when all enemy armies
hold, and its certificate is right (pvg.records.Rollout.proven).

Problems are positions of three own and two enemy armies: see `usable_problems`. Invariants: an id names its problem
(`diplomacy-mini-deg/bf>d`). No problem is in both splits. The order of the problems is that of the hashes of seed and
id.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files

import numpy as np
from numpy.typing import NDArray

from pvg.config.task import DiplomacyMiniTask
from pvg.errors import ConfigurationError
from pvg.records import Checks, Grade, Problem, Split
from pvg.tasks.diplomacy.mini_movement import PROVINCES, MiniPosition

OWN, ENEMY = 3, 2  # armies of a problem
LISTED = "mini_problems.txt"  # the problems of `usable_problems`, which takes seconds to compute
CERTIFICATE, QUESTION, ANSWERS = "!", "?", ("=-", "=+")


class DiplomacyMini:
    def __init__(self, section: DiplomacyMiniTask) -> None:
        """Raises ConfigurationError if the settings require more problems than there are."""
        self._section = section
        self._listed = listed_problems()
        required = section.problems + section.test_problems
        if required > len(self._listed):
            raise ConfigurationError(
                f"task.problems + task.test_problems = {required}, but the mini map has only {len(self._listed)} "
                "problems.",
                "Set fewer problems.",
            )

    def problems(self, split: Split) -> Iterator[Problem]:
        """The problems of `split`. The test problems are drawn first, so they do not change with `problems`."""
        section = self._section
        drawn = sorted(self._listed, key=lambda name: hashlib.sha256(f"{section.seed}/{name}".encode()).digest())
        first, last = (0, section.test_problems) if split == "test" else (section.test_problems, None)
        count = section.test_problems if split == "test" else section.problems
        return (plan_problem(name) for name in drawn[first:last][:count])

    def grade(self, problem: Problem, completion: str) -> Grade:
        """Correct: the plan is sound. Well-formed: it has one legal order for each own army, in the documented format.
        The note names the first reply that refutes the plan. Each reply is a test of the plan; the reply in which all
        enemy armies hold is the visible one (pvg.records.Checks)."""
        table = replies_to(problem)
        plan, _, certificate = completion.partition(CERTIFICATE)
        row = _row(table, completion)
        if row is None:
            return Grade(False, False, note=f"malformed: {_fault(table, plan)}", checks=Checks(0.0, 0.0, False))
        stands_R = table.stands_PR[row]
        column, visible = table.replies.get(certificate), bool(stands_R[0])
        certified = visible and column is not None and not stands_R[column]
        note = "" if stands_R.all() else f"refuted by {table.reply_texts[int(stands_R.argmin())]}"
        checks = Checks(float(visible), float(stands_R.mean()), certified)
        return Grade(not note, True, answer=plan, note=note, checks=checks)

    def shown(self, completion: str) -> str:
        """The part of a completion that a verifier may read: without the certificate."""
        plan, mark, rest = completion.partition(CERTIFICATE)
        return plan + QUESTION + rest.partition(QUESTION)[2] if mark and QUESTION in rest else plan

    def steps(self, completion: str) -> list[tuple[int, int]]:
        """The orders of the plan, each with the semicolon after it."""
        plan = completion.partition(CERTIFICATE)[0].partition(QUESTION)[0]
        ends = list(itertools.accumulate(len(order) + 1 for order in plan.split(";")))
        places = zip([0, *ends[:-1]], [*ends[:-1], len(plan)], strict=True)
        return [(start, end) for start, end in places if start < end]

    def cuts(self, completion: str) -> list[int]:
        """The ends of the orders (pvg.tasks.task.LocatesFlaws)."""
        places = self.steps(completion)
        return [end for _, end in places] if len(places) == OWN else []

    def flaw(self, problem: Problem, completion: str) -> int | None:
        """The first order after which no sound plan remains, whatever the later orders are."""
        table = replies_to(problem)
        row = _row(table, completion)
        if row is None or table.sound_P[row]:
            return None
        counts = [len(orders) for orders in table.position.choices[:OWN]]
        sound, chosen = table.sound_P.reshape(counts), np.unravel_index(row, counts)
        return next(number for number in range(OWN) if not sound[chosen[: number + 1]].any())

    def questions(self, problem: Problem, completion: str) -> list[str]:
        """What a verifier may ask: "what if the enemy orders this?" for every reply; nothing of a malformed plan."""
        table = replies_to(problem)
        if _row(table, completion) is None:
            return []
        return [QUESTION + reply for reply in table.replies]

    def answer(self, problem: Problem, completion: str, question: str) -> str:
        """What the adjudicator says: `=+` if an own army stands in the target after this reply, otherwise `=-`."""
        table = replies_to(problem)
        row, column = table.plans[completion.partition(CERTIFICATE)[0]], table.replies[question.removeprefix(QUESTION)]
        return ANSWERS[int(table.stands_PR[row, column])]

    def written(self, problem: Problem, correct: bool) -> str:
        """The first plan that is sound, or that some reply refutes (pvg.tasks.task.WritesSolutions)."""
        table = replies_to(problem)
        return table.plan_texts[int(np.flatnonzero(table.sound_P == correct)[0])]


# --- problems -----------------------------------------------------------------------------------------------------


def plan_problem(name: str) -> Problem:
    """The problem with a name such as `deg/bf>d`."""
    own, enemy, target = name[:OWN], name[OWN + 1 : -2], name[-1]
    metadata = {"own": own, "enemy": enemy, "target": target}
    return Problem(f"diplomacy-mini-{name}", f"{name}?", answer="", metadata=metadata)  # many plans are right


def listed_problems() -> list[str]:
    """The names in the file LISTED, which `usable_problems` wrote."""
    return files("pvg.tasks.diplomacy").joinpath(LISTED).read_text(encoding="ascii").split()


def usable_problems(own: str, enemy: str) -> list[str]:
    """The names of the problems of one position: targets for which some plans are sound, and others work if the enemy
    holds but can be refuted. Holding with all armies must not be sound, which would be too easy."""
    position = MiniPosition(own, enemy)
    held_PR = position.held()
    holding = position.plans[";".join(f"{army}." for army in own)]
    found = []
    for place, target in enumerate(PROVINCES):
        stands_PR = (held_PR >> place & 1).astype(bool)
        sound_P = np.logical_and.reduce(stands_PR, axis=1)
        if sound_P.any() and not sound_P[holding] and (stands_PR[:, 0] & ~sound_P).any():
            found.append(f"{own}/{enemy}>{target}")
    return found


def positions() -> Iterator[tuple[str, str]]:
    """The own and enemy armies of every position."""
    for own in itertools.combinations(PROVINCES, OWN):
        rest = [province for province in PROVINCES if province not in own]
        for enemy in itertools.combinations(rest, ENEMY):
            yield "".join(own), "".join(enemy)


@dataclass(frozen=True, eq=False)
class Replies:
    """A problem with all its plans and replies. `stands_PR` bool [plans, replies]: an own army stands in the target."""

    position: MiniPosition
    plans: dict[str, int]
    replies: dict[str, int]
    plan_texts: tuple[str, ...]
    reply_texts: tuple[str, ...]
    stands_PR: NDArray[np.bool_]
    sound_P: NDArray[np.bool_]


def replies_to(problem: Problem) -> Replies:
    return _replies(problem.metadata["own"], problem.metadata["enemy"], problem.metadata["target"])


@lru_cache(maxsize=2048)  # at most about 60 kB each
def _replies(own: str, enemy: str, target: str) -> Replies:
    position, held_PR = _solved(own, enemy)
    stands_PR = (held_PR >> PROVINCES.index(target) & 1).astype(bool)
    plans, replies = position.plans, position.replies
    sound_P: NDArray[np.bool_] = np.logical_and.reduce(stands_PR, axis=1)
    return Replies(position, plans, replies, tuple(plans), tuple(replies), stands_PR, sound_P)


@lru_cache(maxsize=1024)
def _solved(own: str, enemy: str) -> tuple[MiniPosition, NDArray[np.uint8]]:
    position = MiniPosition(own, enemy)
    return position, position.held()


def _row(table: Replies, completion: str) -> int | None:
    """The row of a completion's plan, None if it is malformed. A question mark in the certificate is malformed, because
    the verifier reads what follows one: the text could pretend to be an answer of the adjudicator."""
    plan, _, certificate = completion.partition(CERTIFICATE)
    return None if QUESTION in certificate else table.plans.get(plan)


def _fault(table: Replies, plan: str) -> str:
    """Why a text is malformed, in a few words."""
    if plan in table.plans:
        return "the certificate has a question mark"
    orders = plan.split(";", maxsplit=OWN)
    if len(orders) != OWN:
        return f"needs {OWN} orders"
    wrong = next(n for n, order in enumerate(orders) if order not in table.position.choices[n])
    return f"order {wrong + 1} is not legal"


if __name__ == "__main__":
    for own_armies, enemy_armies in positions():
        for name in usable_problems(own_armies, enemy_armies):
            print(name)
