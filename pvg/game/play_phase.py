"""Both phases of self-play (`task.kind = "play"`), which has no verifier: TRAIN_PROVER, in which the policy learns from
whole games (`train_player`), and CHECKPOINT, in which it plays matches against fixed references (`rate`).

A batch plays `training.groups` starts. Each is played once for a few phases (`task.warmup`), and then
`rollout.group_size` times from the state that it reached. The first round starts from the base prover, each later round
from the prover of the round before.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from pvg.config.task import PlayReference
from pvg.errors import ConfigurationError
from pvg.game.mint import load_source
from pvg.game.orders import prover_orders
from pvg.game.parts import Batches, BatchLogprobs, Progress, Tensors
from pvg.game.prover_phase import open_phase, open_round_learner, save_prover
from pvg.game.rewards import credit_of
from pvg.game.roles import WordedPrompt
from pvg.game.session import Session, finite
from pvg.game.states import Phase
from pvg.game.statistics import sampling_metrics, staleness_metrics
from pvg.games.game import ExplainsRules, GameRules
from pvg.records import BASE_SOURCE, Int32, Problem, Role, Rollout, source_of_round
from pvg.rollout.interaction import (
    Decider,
    Fork,
    GameStart,
    PlayedGame,
    SampleCall,
    SeatDecision,
    game_record,
    game_start,
    play_games,
)
from pvg.seeds import draw_cyclic, generator_for, seed_for
from pvg.tasks.play import Play
from pvg.telemetry.spans import span
from pvg.training.batch import PolicyBatch, batch_of, groups_and_roles
from pvg.training.credit import zero_signal_groups
from pvg.training.losses import PolicyObjective

if TYPE_CHECKING:
    from torch import Tensor

# CHECKPOINT of self-play: rate the round's policy by matches against fixed references.

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
                    opponent: Decider = reference if reference != "base" else base  # type: ignore[assignment]
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


async def _matches(session: Session, source: str, reference: str, opponent: Decider) -> dict[str, float]:
    """The results against one reference. Every source, round and reference gets the same starts."""
    test, game = session.game.test, play_task(session).game
    pool = session.test_problems()
    chosen = draw_cyclic(len(pool), 0, min(test.problems, len(pool)), seed_for(session.seed, "evaluation"))
    starts = await _started(session, [pool[index] for index in chosen])
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
    session.ledger.keep(list(_policy_rollouts(played, [seat for _, seat in seats]).values()))
    if source != BASE_SOURCE and seats:  # one game for `pvg view` to show
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


async def _started(session: Session, problems: Sequence[Problem]) -> list[GameStart[Any]]:
    """The starts of the games, off the event loop if a server makes them."""
    game = play_task(session).game

    def start() -> list[GameStart[Any]]:
        return [game_start(game, problem) for problem in problems]

    return await session.players.off_loop(start) if getattr(game, "waits", False) else start()


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
    return {"points": share, "points_low": max(0.0, low), "points_high": min(1.0, high), **gain, "elo": elo(share)}


def interval(means_S: NDArray[np.float64]) -> tuple[float, float]:
    """The 95 % interval of the mean of independent numbers; NaN with fewer than two."""
    if len(means_S) < 2:
        return math.nan, math.nan
    half = Z * float(means_S.std(ddof=1)) / math.sqrt(len(means_S))
    return float(means_S.mean()) - half, float(means_S.mean()) + half


def elo(share: float) -> float:
    """The difference in Elo at which a player expects this share of the points; NaN for 0 and 1."""
    return 400.0 * math.log10(share / (1.0 - share)) if 0.0 < share < 1.0 else math.nan


# Rewards and groups of decisions in whole games, as pure functions of played games.

RewardKind = Literal["horizon", "dense"]
Grouping = Literal["first", "phase", "stratified"]


def rewarded_decisions(
    game: GameRules[Any],
    played: Sequence[Sequence[PlayedGame[Any]]],
    seats: Sequence[str | None],
    *,
    reward: RewardKind,
    groups: Grouping,
) -> list[Rollout]:
    """The rollouts of the policy after each fork, with rewards and groups. `played[n]`: the continuations of start n.
    `seats[n]`: the seat whose decisions count there; None: all.

    Groups are numbered in the order of their first decisions. A group may have a single decision.
    """
    found: list[Rollout] = []
    numbers: dict[Hashable, int] = {}
    for start, continuations in enumerate(played):
        for one in continuations:
            for decision in one.decisions:
                counts = decision.number >= one.fork if groups != "first" else decision.number == one.fork
                if decision.rollout is None or not counts or seats[start] not in (None, decision.seat):
                    continue
                key = _group_of(game, start, decision, groups)
                gain = change_in_value(game, one, decision, reward)
                group = numbers.setdefault(key, len(numbers))
                found.append(replace(decision.rollout, reward=gain, group=group, score=None))
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
        return game.phase(decision.state), math.floor(game.values(decision.state)[decision.seat])
    return start, decision.seat, decision.number


def phase_statistics(game: GameRules[Any], played: Sequence[Sequence[PlayedGame[Any]]]) -> list[dict[str, Any]]:
    """One row per phase, ordered by name: the number of decisions, the mean number of decisions requested together,
    mean tokens of prompts and completions, and the median and largest latency in seconds. Scripts are left out."""
    by_phase: dict[str, dict[str, tuple[Rollout, int]]] = {}
    for decision in (one for continuations in played for each in continuations for one in each.decisions):
        if decision.rollout is not None:
            by_phase.setdefault(game.phase(decision.state), {})[decision.rollout.id] = (
                decision.rollout,
                decision.batch,
            )
    return [_phase_row(phase, list(found.values())) for phase, found in sorted(by_phase.items())]


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


def play_task(session: Session) -> Play:
    assert isinstance(session.task, Play), "a rule of pvg.game.run"
    return session.task


def encoder(session: Session) -> Callable[[str], Int32]:
    """A function from the text of a decision's prompt to its token ids, int32 [P], in the style of the experiment. It
    raises ConfigurationError for a prompt that is too long."""
    game, base, rollout = play_task(session).game, session.players.base, session.rollout
    rules = game.instructions if isinstance(game, ExplainsRules) else ""
    style = session.prompts.section.kind
    context = base.max_length - session.players.engine.gives_reference  # vLLM wants room for a token after a reference
    limits = {"models.prover": context, "training.micro_batch_tokens": session.training.micro_batch_tokens}
    limit, key = min((limit, key) for key, limit in limits.items())

    def encode(prompt: str) -> Int32:
        worded = WordedPrompt(rules, (), prompt)
        if style == "chat":
            ids = base.tokenizer.chat(worded.messages())
        elif style == "text":
            ids = base.tokenizer.opening(worded.text())
        else:
            ids = session.prompts.render(Problem("", prompt, ""), Role.HELPFUL)
        if len(ids) + rollout.max_tokens > limit:
            raise ConfigurationError(
                f"A prompt of the game has {len(ids)} tokens, and a completion may have "
                f"{rollout.max_tokens}, but {key} takes {limit}.",
                "Lower rollout.max_tokens, raise training.micro_batch_tokens, or choose a model with a longer context.",
            )
        return ids

    return encode


async def train_player(session: Session) -> None:
    """Run the phase from the last committed step on, then enter CHECKPOINT."""
    info = session.begin("steps", session.training.steps, session.state.step)
    started = time.perf_counter()
    with span("open_models"):
        learner = await session.players.compute(lambda: open_round_learner(session, from_previous=True))
    try:
        async with AsyncExitStack() as stack:
            opponent: Decider | None = None
            with span("open_models"):
                named = play_task(session).section.opponent
                if named == "base":
                    opponent = await stack.enter_async_context(session.players.base_policy())
                elif named != "self":
                    opponent = named
            phase = open_phase(session, info, learner, partial(PlayBatches, session, opponent))
            await phase.play()
        with span("checkpoint"):
            names = await save_prover(session, learner, phase.done)
        session.finish_phase(info, phase.last_metrics, time.perf_counter() - started)
        entered = session.state.enter(Phase.CHECKPOINT)
        await session.leave_phase(replace(entered, weights=(*entered.weights, *names), version=phase.version))
    finally:
        learner.close()


@dataclass
class PlayBatches(Batches):
    """Produces one batch of decisions per call, from games that the current policy plays. A batch depends only on the
    weights and its number. `opponent`: who plays the other seats; None: the policy itself.

    `metrics`: those of the newest batch. It samples nothing ahead.
    """

    session: Session
    opponent: Decider | None
    objective: PolicyObjective
    logprobs: BatchLogprobs
    done: int = 0
    metrics: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.credit = credit_of(self.session.training.loss.kind, self.objective.credit, _seat_of)
        task = play_task(self.session)
        self.game, self.section = task.game, task.section

    async def next_batch(self) -> PolicyBatch:
        session, number = self.session, self.done
        players = session.players
        began, before = time.perf_counter(), players.engine.stats
        with span("rollout"):
            played, seats = await self._play(number)
        seconds, engine = time.perf_counter() - began, players.engine.stats.since(before)
        with span("credit"):
            reward, groups = self.section.reward, self.section.groups
            trained = rewarded_decisions(self.game, played, seats, reward=reward, groups=groups)
            if not trained:
                raise ConfigurationError(
                    f"The policy decides nothing after the forks of batch {number}.",
                    "Check that the starts of the game have seats that decide, or raise training.groups.",
                )
            rewards_N = np.array([one.reward for one in trained], dtype=np.float32)
            groups_N, roles_N = groups_and_roles(trained)
            advantages_N, of_credit = self.credit.observe(trained, rewards_N)
            batch = batch_of(trained, advantages_N)
        session.tell_rollouts(trained, number)
        await players.engine.rest(replaced=True)
        batch = await self.logprobs.add(batch)
        with span("record"):
            sampled = _policy_rollouts(played, seats)
            everything = list((sampled | {rollout.id: rollout for rollout in trained}).values())
            session.ledger.keep(everything)
            session.ledger.record(
                "play_phases", round=session.state.round, step=number, phases=phase_statistics(self.game, played)
            )
            self.done += 1
            games = [one for continuations in played for one in continuations]
            self.metrics = {
                "rollouts": float(len(everything)),
                "decisions_trained": float(len(trained)),
                "legal": float(np.mean([r.grade.correct for r in everything])),
                "truncated": float(np.mean([r.finish_reason == "length" for r in everything])),
                "phases": float(np.mean([len(one.states) - 1 - one.fork for one in games])),
                "reward_mean": float(rewards_N.mean()),
                "zero_signal": zero_signal_groups(rewards_N, groups_N, roles_N),
                **of_credit,
                **sampling_metrics(everything, engine, seconds),
                **staleness_metrics(everything, players.engine.version),
            }
        return batch

    async def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return {}, {"done": self.done, "credit": self.credit.state()}

    def load_state(self, tensors: Tensors, progress: Progress) -> tuple[dict[str, Tensor], int]:
        self.credit.load_state(progress["credit"])
        return super().load_state(tensors, progress)

    async def _play(self, number: int) -> tuple[list[list[PlayedGame[Any]]], list[str | None]]:
        """The games of batch `number`, and for each start the only seat of the policy; None: it plays all seats."""
        session, section, round_ = self.session, self.section, self.session.state.round
        training, size = session.training, session.rollout.group_size
        generator = generator_for(session.seed, round_, "play-starts", number)
        problems = session.draw("prover", number * training.groups, training.groups, f"prover-{round_}")
        warmups = generator.integers(section.warmup + 1, size=training.groups).tolist()
        starts = await _started(session, problems)
        seats: list[str | None] = [None] * len(starts)
        against: list[dict[str, Decider]] = [{} for _ in starts]
        if self.opponent is not None:
            for n, start in enumerate(starts):
                names = list(self.game.values(start.state))
                seats[n] = names[(number * len(starts) + n) % len(names)]
                against[n] = dict.fromkeys(set(names) - {seats[n]}, self.opponent)
        played = await play_games(
            session.players.dispatcher,
            starts,
            self.game,
            prover_orders(session, reference=self.logprobs.served).call(number),
            encode=encoder(session),
            forks=[Fork(warmup, size, section.horizon, seat) for warmup, seat in zip(warmups, seats, strict=True)],
            opponents=against,
        )
        return played, seats


def _seat_of(decision: Rollout) -> str:
    """The seat of a decision, from its id (`play_games`)."""
    return decision.id.rpartition("/")[2].partition("-")[2]


def _policy_rollouts(played: Sequence[Sequence[PlayedGame[Any]]], seats: Sequence[str | None]) -> dict[str, Rollout]:
    """The policy's rollouts by id, in the order of play. `seats[n]`: its only seat in start n; None: it plays all."""
    return {
        decision.rollout.id: decision.rollout
        for continuations, seat in zip(played, seats, strict=True)
        for one in continuations
        for decision in one.decisions
        if decision.rollout is not None and seat in (None, decision.seat)
    }
