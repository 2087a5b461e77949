"""Rewards and groups of decisions in whole games, as pure functions of played games.

The reward of a decision is the change in its seat's value: from the decision to the end of the continuation
("horizon"), or to the seat's next decision ("dense"). A group holds decisions that are compared with each other:

- "first": those at a fork. Their states are identical, so this is GRPO.
- "phase": those of one start, seat and phase. After the fork their states differ.
- "stratified": those of one phase and one value of the seat, rounded down, over all starts of the batch.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pvg.games.game import GameRules
from pvg.records import Rollout
from pvg.rollout.games import PlayedGame, SeatDecision

RewardKind = Literal["horizon", "dense"]
Grouping = Literal["first", "phase", "stratified"]


@dataclass(frozen=True, slots=True)
class RewardedDecision:
    """A rollout to train on, its reward, and the number of its group."""

    rollout: Rollout
    reward: float
    group: int


def rewarded_decisions(
    game: GameRules[Any],
    played: Sequence[Sequence[PlayedGame[Any]]],
    seats: Sequence[str | None],
    *,
    reward: RewardKind,
    groups: Grouping,
    illegal: float = 0.0,
) -> list[RewardedDecision]:
    """The decisions of the policy after each fork, with rewards and groups. `played[n]`: the continuations of start n.
    `seats[n]`: the seat whose decisions count there; None: all. `illegal` is subtracted for an illegal decision.

    Groups are numbered in the order of their first decisions. A group may have a single decision.
    """
    found: list[RewardedDecision] = []
    numbers: dict[Hashable, int] = {}
    for start, continuations in enumerate(played):
        for one in continuations:
            for decision in one.decisions:
                counts = decision.number >= one.fork if groups != "first" else decision.number == one.fork
                if decision.rollout is None or not counts or seats[start] not in (None, decision.seat):
                    continue
                key = _group_of(game, start, decision, groups)
                gain = change_in_value(game, one, decision, reward) - illegal * (not decision.action.legal)
                found.append(RewardedDecision(decision.rollout, gain, numbers.setdefault(key, len(numbers))))
    return found


def change_in_value(
    game: GameRules[Any], played: PlayedGame[Any], decision: SeatDecision[Any], reward: RewardKind
) -> float:
    """The change in the seat's value from the decision on: to the end, or to the seat's next decision."""
    until = len(played.states) - 1
    if reward == "dense":
        later = (d.number for d in played.decisions if d.seat == decision.seat and d.number > decision.number)
        until = next(later, until)
    return game.values(played.states[until])[decision.seat] - game.values(decision.state)[decision.seat]


def _group_of(game: GameRules[Any], start: int, decision: SeatDecision[Any], groups: Grouping) -> Hashable:
    if groups == "stratified":
        return decision.phase, math.floor(game.values(decision.state)[decision.seat])
    return start, decision.seat, decision.number


def phase_statistics(played: Sequence[Sequence[PlayedGame[Any]]]) -> list[dict[str, Any]]:
    """One row per phase, ordered by name: the number of decisions, the mean number of decisions requested together,
    mean tokens of prompts and completions, and the median and largest latency in seconds. Scripts are left out."""
    by_phase: dict[str, dict[str, tuple[Rollout, int]]] = {}
    for continuations in played:
        for one in continuations:
            for decision in one.decisions:
                if decision.rollout is not None:
                    rows = by_phase.setdefault(decision.phase, {})
                    rows[decision.rollout.id] = (decision.rollout, decision.batch)
    return [_phase_row(phase, list(rows.values())) for phase, rows in sorted(by_phase.items())]


def _phase_row(phase: str, rows: Sequence[tuple[Rollout, int]]) -> dict[str, Any]:
    latencies = sorted(rollout.timing.queued_s + rollout.timing.service_s for rollout, _ in rows)
    count = len(rows)
    return {
        "phase": phase,
        "decisions": count,
        "batch": sum(batch for _, batch in rows) / count,
        "prompt_tokens": sum(len(rollout.prompt_ids) for rollout, _ in rows) / count,
        "completion_tokens": sum(len(rollout.completion_ids) for rollout, _ in rows) / count,
        "latency_p50_s": latencies[count // 2],
        "latency_max_s": latencies[-1],
    }


def points(values: Mapping[str, float], seat: str) -> float:
    """The result of a match for `seat`: 1 if its value is above every other seat's, 0.5 if it equals the highest of the
    others, else 0. NaN in a game of one seat."""
    if len(values) == 1:
        return math.nan
    best = max(value for other, value in values.items() if other != seat)
    return 0.5 if values[seat] == best else float(values[seat] > best)
