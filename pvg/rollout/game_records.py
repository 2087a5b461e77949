"""A played game as a plain record of metrics.jsonl, with everything that `pvg report` needs to show it phase by phase.

session.ledger.record("game", **game_record(0, "diplomacy", game, played, {"France": "policy", ...}).plain())
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pvg.games.game import GameRules
from pvg.rollout.games import PlayedGame

MOST_STATE_BYTES = 2**20  # of all states of a record; a state that lists all moves grows with the game


@dataclass(frozen=True, slots=True)
class SeatRecord:
    """What one seat decided: `text` in the game's standard form, and a `note` on what was illegal."""

    seat: str
    text: str
    note: str


@dataclass(frozen=True, slots=True)
class PhaseRecord:
    """A phase: its name, the state before it as `GameRules.dump` writes it (in hex; empty beyond
    MOST_STATE_BYTES), and the value of each seat."""

    phase: str
    state: str
    values: Mapping[str, float]
    decisions: Sequence[SeatRecord]


@dataclass(frozen=True, slots=True)
class GameRecord:
    """`game`: its name in the settings. `start`: the id of its start. `players`: who plays each seat. `phases`: those
    that were played; the last entry is the final state, without a name and without decisions."""

    round: int
    game: str
    start: str
    players: Mapping[str, str]
    ended: str
    phases: Sequence[PhaseRecord]

    def plain(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> GameRecord:
        """The record that `plain` wrote. Raises KeyError or TypeError for another mapping."""
        phases = [
            PhaseRecord(p["phase"], p["state"], p["values"], [SeatRecord(**seat) for seat in p["decisions"]])
            for p in plain["phases"]
        ]
        found = {name: plain[name] for name in ("round", "game", "start", "players", "ended")}
        return cls(**found, phases=phases)


def game_record(
    round_: int, name: str, game: GameRules[Any], played: PlayedGame[Any], players: Mapping[str, str]
) -> GameRecord:
    """The record of a game, from its start. `players`: seat -> "policy", "random", "greedy" or "base"."""
    decisions: dict[int, list[SeatRecord]] = {}
    names: dict[int, str] = {}
    for decision in played.decisions:
        names[decision.number] = decision.phase
        seat = SeatRecord(decision.seat, decision.action.text, decision.action.note)
        decisions.setdefault(decision.number, []).append(seat)
    phases, left = [], MOST_STATE_BYTES
    for number, state in enumerate(played.states):
        dump = game.dump(state) if left > 0 else b""
        left -= len(dump)
        written = dump.hex() if left >= 0 else ""
        values = dict(game.values(state))
        phases.append(PhaseRecord(names.get(number, ""), written, values, decisions.get(number, [])))
    return GameRecord(round_, name, played.start.problem.id, dict(players), played.ended, phases)
