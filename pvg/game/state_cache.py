"""`StateCache`: states that recent policies reached, from which further games start.

A game that always starts at an opening rarely reaches the late states in which a policy must also decide well, and a
fixed library of states contains some that the current policy never reaches. So the cache keeps a random sample of the
states of each recent batch, with the policy version that reached them, and drops those that are too old.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pvg.records import Problem


@dataclass(frozen=True, slots=True)
class CachedState:
    """`problem`: the start of the game that reached it. `dump`: `GameRules.dump` of the state."""

    version: int
    problem: Problem
    dump: bytes

    @property
    def start(self) -> Problem:
        """The problem of a game from this state; its id names the state."""
        origin = self.problem.id.partition("@")[0]  # which may be a cached state itself
        return replace(self.problem, id=f"{origin}@{hashlib.sha256(self.dump).hexdigest()[:12]}")


class StateCache:
    """Keeps at most `size` states of the last `age` versions, about equally many of each version.

    The content depends only on what was offered and on the generators, so a resumed run has the same content.
    """

    def __init__(self, size: int, age: int) -> None:
        self._size, self._age = size, age
        self._states: list[CachedState] = []

    def __len__(self) -> int:
        return len(self._states)

    def offer(self, states: Sequence[CachedState], version: int, generator: np.random.Generator) -> None:
        """Add a random sample of the `states` that policy `version` reached, and drop old ones."""
        count = min(len(states), -(-self._size // self._age))
        chosen = sorted(generator.choice(len(states), count, replace=False).tolist()) if count else []
        self._states = [state for state in self._states if version - state.version < self._age]
        self._states = [*self._states, *(states[place] for place in chosen)][-self._size :]

    def draw(self, count: int, version: int, generator: np.random.Generator) -> list[CachedState]:
        """At most `count` distinct states, none older than the limit at policy `version`."""
        fresh = [state for state in self._states if version - state.version < self._age]
        chosen = generator.permutation(len(fresh))[:count]
        return [fresh[place] for place in chosen.tolist()]

    # --- resuming ----------------------------------------------------------------------------------------------------

    def state(self) -> list[list[Any]]:
        """JSON data that restores the cache."""
        return [
            [s.version, s.problem.id, s.problem.question, s.problem.answer, dict(s.problem.metadata), s.dump.hex()]
            for s in self._states
        ]

    def load_state(self, state: Sequence[Sequence[Any]]) -> None:
        self._states = [
            CachedState(version, Problem(id_, question, answer, _metadata(metadata)), bytes.fromhex(dump))
            for version, id_, question, answer, metadata, dump in state
        ]


def _metadata(data: Mapping[str, Any]) -> dict[str, Any]:
    return dict(data)
