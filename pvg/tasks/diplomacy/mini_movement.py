r"""The movement of all plans against all replies on the mini map (pvg.games.diplomacy.mini), and orders as text.

    a---b---c
    |  / \  |        own armies d, e, g; enemy armies b, f; target d:  deg/bf>d
    | /   \ |
    d---e---f        d.     the army in d holds          e+d    the army in e supports the army in d
     \ / \ /         de     the army in d moves to e     e+gd   the army in e supports the move from g to d
      g---h

A side supports only its own armies, which keeps the number of replies small (about 35). Everything else follows the
rules of movement. pvg.games.diplomacy.movement adjudicates one set of orders at a time, on any map. Here all plans and
all replies of a position are one array, because a game needs millions of sets of orders. A test compares the two.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, reduce

import numpy as np
from numpy.typing import NDArray

from pvg.games.diplomacy.mini import mini_board

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
