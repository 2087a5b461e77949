"""The plan game on the mini map (pvg.games.diplomacy_board).

    question  deg/bf>d?     own armies d, e, g; enemy armies b, f; target d
    solution  d.;e+d;g.     one order for each own army, in the order of the question

A plan is *sound* if an own army stands in the target whatever the enemy orders. The task tries all replies, so the
grade is exact. A solution may end with a certificate, `!` and the reply that refutes it: `d.;ef;g.!bd;f+bd`. The
verifier does not read it.

Invariants: an id names its problem (`diplomacy-mini-deg/bf>d`). No problem is in both splits."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, reduce
from importlib.resources import files

import numpy as np
from numpy.typing import NDArray

from pvg.config.task import DiplomacyMiniTask
from pvg.errors import ConfigurationError
from pvg.games.diplomacy_board import mini_board
from pvg.records import Checks, Grade, Problem, Split

# The movement of all plans against all replies on the mini map (pvg.games.diplomacy_board), and orders as text.

PROVINCES = "".join(mini_board().provinces)
NEIGHBOURS = {
    here: "".join(sorted(PROVINCES[there] for there in near))
    for here, near in zip(PROVINCES, mini_board().armies, strict=True)
}

Bools = NDArray[np.bool_]
Int8 = NDArray[np.int8]


@lru_cache(maxsize=4096)
def orders_of(army: str, friends: str) -> tuple[str, ...]:
    """All legal orders of the army in province `army`, as text; `friends`: the provinces of its side's other armies."""
    near = NEIGHBOURS[army]
    helped = [f"{army}+{friend}" for friend in friends if friend in near]
    helped += [f"{army}+{friend}{to}" for friend in friends for to in NEIGHBOURS[friend] if to in near]
    return (f"{army}.", *(army + to for to in near), *helped)


@dataclass(frozen=True)
class MiniPosition:
    """Where the armies of the two sides stand. `own` and `enemy` are provinces in ascending order, such as "deg"."""

    own: str
    enemy: str

    @cached_property
    def choices(self) -> tuple[tuple[str, ...], ...]:
        """The legal orders of each army: the own ones, then those of the enemy."""
        return tuple(orders_of(army, side.replace(army, "")) for side in (self.own, self.enemy) for army in side)

    @cached_property
    def plans(self) -> dict[str, int]:
        """Every plan of the own side as text (`d.;e+d;g.`), and its row in `held`."""
        return _joined(self.choices[: len(self.own)])

    @cached_property
    def replies(self) -> dict[str, int]:
        """Every set of orders of the enemy as text, and its column in `held`."""
        return _joined(self.choices[len(self.own) :])

    def held(self) -> NDArray[np.uint8]:
        """uint8 [plans, replies]: the provinces in which an own army stands afterwards, bit k for PROVINCES[k]."""
        sides = [0] * len(self.own) + [1] * len(self.enemy)
        held_N = _Movement(self.own + self.enemy, sides, self.choices).held()
        return held_N.reshape(len(self.plans), len(self.replies))


def _joined(choices: tuple[tuple[str, ...], ...]) -> dict[str, int]:
    return {";".join(orders): number for number, orders in enumerate(itertools.product(*choices))}


class _Movement:
    """The movement of U armies under all N combinations of their orders.

    Whether a move succeeds has a lower bound (it certainly does) and an upper one (it may). They start far apart and
    are computed from each other until they stay the same. A move that is open then is part of a ring, in which each
    army moves to the place of the next; such rings move. Nothing else stays open without convoys.
    """

    def __init__(self, places: str, sides: Sequence[int], choices: Sequence[Sequence[str]]) -> None:
        self.armies = range(len(places))
        self.here = [PROVINCES.index(place) for place in places]
        self.sides = sides
        number_UN = np.indices(tuple(map(len, choices)), dtype=np.int16).reshape(len(choices), -1)
        ends = [[PROVINCES.index(_end(order)) for order in orders] for orders in choices]
        self.dest_UN = np.stack([np.array(ends[u], dtype=np.int8)[number_UN[u]] for u in self.armies])
        self.moving_UN = np.stack([self.dest_UN[u] != self.here[u] for u in self.armies])
        # attack_UUN[u, v]: u moves to the place of v. The lists below have only pairs for which this happens.
        self.attack_UUN = self.moving_UN[:, None] & (self.dest_UN[:, None] == np.array(self.here)[None, :, None])
        others = [[v for v in self.armies if v != u] for u in self.armies]
        pairs = [(u, v) for u in self.armies for v in others[u]]
        met = {(u, v): self.moving_UN[u] & self.moving_UN[v] & (self.dest_UN[u] == self.dest_UN[v]) for u, v in pairs}
        crossed = {(u, v): self.attack_UUN[u, v] & self.attack_UUN[v, u] for u, v in pairs}
        self.attacked = [[v for v in self.armies if self.attack_UUN[u, v].any()] for u in self.armies]
        self.rivals = [[(v, met[u, v]) for v in others[u] if met[u, v].any()] for u in self.armies]
        self.crossing = [[(v, crossed[u, v]) for v in others[u] if crossed[u, v].any()] for u in self.armies]
        self.helpers = [self._helpers(army, places, choices, number_UN) for army in self.armies]

    def _helpers(
        self, army: int, places: str, choices: Sequence[Sequence[str]], number_UN: NDArray[np.int16]
    ) -> list[tuple[Bools, list[tuple[int, Bools]]]]:
        """For each friend that may support `army`: bool [N], whether its support fits the order of `army` and no attack
        cuts it; and the attacks out of the province that the support is directed to, which cut it only by dislodging.
        """
        found = []
        for friend in self.armies:
            helps = [order[2:] if order[1:3] == f"+{places[army]}" else "" for order in choices[friend]]
            if not any(helps):
                continue
            ends = [PROVINCES.index(help_[-1]) if help_ else -1 for help_ in helps]
            given_N = np.array(ends, dtype=np.int8)[number_UN[friend]] == self.dest_UN[army]
            risks = []
            for enemy in self._enemies(friend):
                against_N = self.dest_UN[army] == self.here[enemy]
                given_N &= ~(self.attack_UUN[enemy, friend] & ~against_N)
                risk_N = self.attack_UUN[enemy, friend] & against_N
                if risk_N.any():
                    risks.append((enemy, risk_N))
            found.append((given_N, risks))
        return found

    def _enemies(self, army: int) -> list[int]:
        return [other for other in self.armies if self.sides[other] != self.sides[army]]

    def held(self) -> NDArray[np.uint8]:
        """uint8 [N]: the provinces in which an army of side 0 stands afterwards, as bits."""
        moved_UN = self._moved()
        held_N = np.zeros(moved_UN.shape[1], dtype=np.uint8)
        for army in self.armies:
            if self.sides[army] == 0:
                lost_N = _any([moved_UN[u] & self.attack_UUN[u, army] for u in self._enemies(army)]) & ~moved_UN[army]
                end_N = np.where(moved_UN[army], self.dest_UN[army], np.int8(self.here[army]))
                held_N |= np.where(lost_N, 0, 1 << end_N).astype(np.uint8)
        return held_N

    def _moved(self) -> Bools:
        """bool [U, N]: the armies that move."""
        low_UN, high_UN = np.zeros_like(self.moving_UN), self.moving_UN.copy()
        while True:
            new_low_UN, new_high_UN = self._bound(low_UN, high_UN), self._bound(high_UN, low_UN)
            if (new_low_UN == low_UN).all() and (new_high_UN == high_UN).all():
                return high_UN
            low_UN, high_UN = new_low_UN, new_high_UN

    def _bound(self, same_UN: Bools, other_UN: Bools) -> Bools:
        """bool [U, N]: whether each move succeeds, by the bound `same_UN` for everything that helps it and by the
        opposite bound `other_UN` for everything that hinders it. From (low, high) a new low bound, and vice versa."""
        helped_UN = [1 + self._supports(army, other_UN) for army in self.armies]
        hinders_UN = [1 + self._supports(army, same_UN) for army in self.armies]
        # Dislodged by an army that came the other way: its own move has no effect on others.
        gone_UN = [_any([crossed_N & same_UN[v] for v, crossed_N in self.crossing[u]]) for u in self.armies]
        return np.stack([self._succeeds(u, helped_UN[u], hinders_UN, gone_UN, same_UN) for u in self.armies])

    def _succeeds(
        self, army: int, strength_N: Int8, hinders_UN: Sequence[Int8], gone_UN: Sequence[Bools], same_UN: Bools
    ) -> Bools:
        success_N: Bools = self.moving_UN[army].copy()
        for other in self.attacked[army]:
            # The army in the way: it defends with its supports if it stays or comes the other way, with strength 1 if
            # it fails to leave, and not at all if it leaves. A side never dislodges its own armies.
            leaving_N = self.moving_UN[other] & ~self.attack_UUN[other, army]
            free_N = ~self.attack_UUN[army, other] | (leaving_N & same_UN[other])
            if self.sides[other] != self.sides[army]:
                free_N |= strength_N > np.where(leaving_N, np.int8(1), hinders_UN[other])
            success_N &= free_N
        for other, met_N in self.rivals[army]:
            success_N &= ~met_N | gone_UN[other] | (strength_N > hinders_UN[other])
        return success_N

    def _supports(self, army: int, dislodging_UN: Bools) -> Int8:
        """int8 [N]: supports that `army` gets, if the moves in `dislodging_UN` succeed."""
        total_N = np.zeros(self.moving_UN.shape[1], dtype=np.int8)
        for given_N, risks in self.helpers[army]:
            total_N += given_N & ~_any([attack_N & dislodging_UN[enemy] for enemy, attack_N in risks])
        return total_N


def _end(order: str) -> str:
    """The province in which an army with this order wants to stand: `d.` d, `de` e, `d+eb` d."""
    return order[1] if order[1] in PROVINCES else order[0]


def _any(arrays: Sequence[Bools]) -> Bools:
    """bool [N], or [1] without arrays."""
    return reduce(np.bitwise_or, arrays, np.zeros(1, dtype=np.bool_))


OWN, ENEMY = 3, 2  # armies of a problem
LISTED = "diplomacy_mini_problems.txt"  # computed once; the tests compute some of them again
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
        drawn = sorted(self._listed, key=lambda name: hashlib.sha256(f"0/{name}".encode()).digest())
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
    """The problems of each position: targets for which some plans are sound, and others work if the enemy holds but can
    be refuted. Holding with all armies is not sound, which would be too easy."""
    return files("pvg.tasks").joinpath(LISTED).read_text(encoding="ascii").split()


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
