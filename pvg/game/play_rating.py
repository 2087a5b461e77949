"""CHECKPOINT of self-play: rate the round's policy by matches against fixed references.

In a match, the policy plays one seat and the reference plays all others. Each test start is played from each seat
`game.test.samples` times. The result of a match is 1 point for the highest value, and 0.5 for a tie with it.

A rating against fixed references does not rise when both sides of self-play become worse together. Matches from one
start are not independent, so the start is the sampling unit of the intervals: mean of the starts' means, plus or minus
1.96 standard errors.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pvg.config.task import PlayReference
from pvg.game.mint import load_source
from pvg.game.play_phase import encoder, play_task, points
from pvg.game.session import Session, finite
from pvg.records import BASE_SOURCE, Rollout, source_of_round
from pvg.rollout.episodes import SampleCall
from pvg.rollout.games import Fork, Opponent, PlayedGame, game_record, game_start, play_games
from pvg.seeds import draw_cyclic, seed_for
from pvg.telemetry.spans import span

Z = 1.96  # of a 95 % interval


async def rate(session: Session) -> None:
    """Play the matches of the round, then enter TRAIN_PROVER of the next round, or COMPLETE after the last. In round 0
    the base prover plays the scripts too, as a starting point."""
    section, round_ = play_task(session).section, session.state.round
    started = time.perf_counter()
    own = source_of_round(round_)
    sources = [BASE_SOURCE, own] if round_ == 0 else [own]
    info = session.begin("matches", sum(len(_references(session, source)) for source in sources))
    session.first_step()
    metrics: dict[str, float] = {}
    version = session.state.version
    async with AsyncExitStack() as stack:
        base = await stack.enter_async_context(session.players.base_policy()) if "base" in section.references else None
        with span("evaluate"):
            for source in sources:
                version += 1
                with span("sync"):
                    await load_source(session, source, version)
                prefix = "base_" if source == BASE_SOURCE else ""
                for reference in _references(session, source):
                    opponent: Opponent = reference if reference != "base" else base  # type: ignore[assignment]
                    with span("rollout"):
                        found = await _matches(session, source, reference, opponent)
                    metrics |= {f"{prefix}{name}_{reference}": value for name, value in found.items()}
    session.report_step(info, info.total, metrics)
    session.finish_phase(info, metrics, time.perf_counter() - started)
    session.finish_round(metrics)
    rounds = (*session.state.rounds, finite(metrics))
    following = session.state.after_round(session.game.rounds, self_play=True)
    await session.leave_phase(replace(following, version=version, rounds=rounds))


def _references(session: Session, source: str) -> list[PlayReference]:
    """Those that `source` plays: the base does not play itself."""
    return [name for name in play_task(session).section.references if (name, source) != ("base", BASE_SOURCE)]


async def _matches(session: Session, source: str, reference: str, opponent: Opponent) -> dict[str, float]:
    """The results against one reference. Every source, round and reference gets the same starts."""
    test, game = session.game.test, play_task(session).game
    pool = session.test_problems()
    chosen = draw_cyclic(len(pool), 0, min(test.problems, len(pool)), seed_for(session.seed, "evaluation"))
    starts = [game_start(game, pool[index]) for index in chosen]
    seats = [(number, seat) for number, start in enumerate(starts) for seat in game.values(start.state)]
    call = SampleCall(
        session.state.round,
        source,
        step=0,
        seed=seed_for(session.seed, session.state.round, "evaluation", source, reference),
        prefix=f"{session.state.round:03d}/evaluation/{source}/{reference}",
    )
    played = await play_games(
        session.players.dispatcher,
        [starts[number] for number, _ in seats],
        game,
        call,
        encode=encoder(session),
        forks=Fork(samples=test.samples),
        opponents=[dict.fromkeys(set(game.values(starts[n].state)) - {seat}, opponent) for n, seat in seats],
    )
    session.ledger.keep(_rollouts(played, seats))
    if source != BASE_SOURCE and seats:  # one game for `pvg report` to show
        seat, match = seats[0][1], played[0][0]
        players = {other: "policy" if other == seat else reference for other in game.values(match.states[0])}
        name = play_task(session).section.game
        session.ledger.record("game", **game_record(session.state.round, name, game, match, players).plain())
    results: list[list[float]] = [[] for _ in starts]
    gains: list[list[float]] = [[] for _ in starts]
    for (number, seat), matches in zip(seats, played, strict=True):
        for match in matches:
            final = game.values(match.states[-1])
            results[number].append(points(final, seat))
            gains[number].append(final[seat] - game.values(match.states[0])[seat])
    return match_metrics(results, gains)


def _rollouts(played: Sequence[Sequence[PlayedGame[Any]]], seats: Sequence[tuple[int, str]]) -> list[Rollout]:
    """The rollouts of the rated policy."""
    return [
        decision.rollout
        for (_, seat), matches in zip(seats, played, strict=True)
        for match in matches
        for decision in match.decisions
        if decision.rollout is not None and decision.seat == seat
    ]


def match_metrics(results: Sequence[Sequence[float]], gains: Sequence[Sequence[float]]) -> dict[str, float]:
    """Points per match (0 to 1) and the mean gain in value, each with the bounds of a 95 % interval over starts, and
    the difference in Elo that the points mean (NaN for 0 and 1). A game of one seat has no points."""
    points_S = np.array([np.mean(of_start) for of_start in results])
    gains_S = np.array([np.mean(of_start) for of_start in gains])
    share = float(points_S.mean())
    low, high = interval(points_S)
    gain_low, gain_high = interval(gains_S)
    gain = {"gain": float(gains_S.mean()), "gain_low": gain_low, "gain_high": gain_high}
    if math.isnan(share):
        return gain
    return {
        "points": share,
        "points_low": max(0.0, low),
        "points_high": min(1.0, high),
        **gain,
        "elo": elo(share),
    }


def interval(means_S: NDArray[np.float64]) -> tuple[float, float]:
    """The 95 % interval of the mean of independent numbers; NaN with fewer than two."""
    if len(means_S) < 2:
        return math.nan, math.nan
    half = Z * float(means_S.std(ddof=1)) / math.sqrt(len(means_S))
    return float(means_S.mean()) - half, float(means_S.mean()) + half


def elo(share: float) -> float:
    """The difference in Elo at which a player expects this share of the points; NaN for 0 and 1."""
    return 400.0 * math.log10(share / (1.0 - share)) if 0.0 < share < 1.0 else math.nan
