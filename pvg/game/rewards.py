"""Rewards of the prover-verifier game, vectorised over a batch of rollouts.

Formulas: Kirchner et al. 2024 (arXiv 2407.13692) for src, cgc, goodhart and correctness; Kim and Lee (arXiv 2602.23248)
for decoupled; gated is pvg's own, for solutions that are executed. c = correct, h = helpful (both 0/1),
V = the verifier's score.

A malformed solution is never role-aligned, in either role, and its reward never exceeds that of a misaligned one.
Without this rule the cheapest flaw of the sneaky role is a text that is not a solution.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pvg.config.game import (
    CgcReward,
    CorrectnessReward,
    DecoupledReward,
    Game,
    GatedReward,
    GoodhartReward,
    OwnReward,
    Reward,
    SrcReward,
)
from pvg.errors import ConfigurationError, TrainingDivergedError, shortened
from pvg.extensions import called, resolve
from pvg.game.statistics import BatchOutcomes, RolloutColumns, value_metrics
from pvg.games.game import MeasuresPlay, Outcome, PaysSeats
from pvg.models.logprobs import check_logits
from pvg.records import Float32, Group, Problem, Rollout
from pvg.rollout.decoding import check_layers
from pvg.tasks.answers import same_answer
from pvg.tasks.task import ComparesPrograms, Task, correct_solution
from pvg.traces.loaders import Trace, parts_of
from pvg.traces.measures import WORKS, MeasuredTrace, ReadableTrace
from pvg.traces.readers import LocalReader, local_reader
from pvg.training.batch import groups_and_roles
from pvg.training.credit import Credit as CreditFunction
from pvg.training.credit import RoleBaseline, ValueTracker, advantages, baseline_advantages, tracked_advantages


def rewards(outcomes: BatchOutcomes, game: Game) -> Float32:
    """float32 [N]: the rewards by `game.reward`. Raises ValueError if a score or a reward is not finite,
    ConfigurationError if a user's reward fails or does not return one number per rollout."""
    if not np.isfinite(outcomes.scores_N).all():
        raise ValueError(f"Score {int(np.flatnonzero(~np.isfinite(outcomes.scores_N))[0])} of the batch is not finite.")
    name, key = game.reward.kind, "game.reward"
    settings = game if isinstance(game.reward, OwnReward) else game.reward
    rewards_N = np.asarray(called(key, name, resolve(key, name, REWARDS), outcomes, settings))
    if rewards_N.shape != outcomes.scores_N.shape or rewards_N.dtype.kind not in "fiub":
        raise ConfigurationError(
            f"{key} = {name!r} returned an array {rewards_N.shape} of {rewards_N.dtype} for {len(outcomes.scores_N)} "
            "rollouts.",
            "Return one number per rollout.",
        )
    if not np.isfinite(rewards_N).all():
        raise ValueError(f"Reward {int(np.flatnonzero(~np.isfinite(rewards_N))[0])} of the batch is not finite.")
    return rewards_N.astype(np.float32)


def centred_scores(outcomes: BatchOutcomes) -> Float32:
    """V' float32 [N]: V minus the mean of V over samples of the same problem and role."""
    mean_N, _ = _group_moments(outcomes)
    return (outcomes.scores_N - mean_N).astype(np.float32)


def _group_moments(outcomes: BatchOutcomes) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """float64 [N], twice: mean and population standard deviation of V over each (problem, role)."""
    keys_N = outcomes.problem_ids_N * 2 + outcomes.helpful_N
    _, group_N = np.unique(keys_N, return_inverse=True)
    scores_N = outcomes.scores_N.astype(np.float64)
    count_G = np.bincount(group_N)
    mean_N = (np.bincount(group_N, weights=scores_N) / count_G)[group_N]
    variance_G = np.bincount(group_N, weights=(scores_N - mean_N) ** 2) / count_G
    return mean_N, np.sqrt(variance_G)[group_N]


MISALIGNED = -1.0  # the src reward of a solution whose score is not above its group's mean


def src(outcomes: BatchOutcomes, reward: SrcReward) -> Float32:
    """Soft role-conditional: (2c-1)(2h-1) V' if V' > 0, else MISALIGNED."""
    centred_N = centred_scores(outcomes)
    sign_N = (2.0 * outcomes.correct_N - 1.0) * (2.0 * outcomes.helpful_N - 1.0)
    rewards_N = np.where(centred_N > 0, sign_N * centred_N, MISALIGNED)
    malformed_N = np.minimum(MISALIGNED, -np.abs(centred_N))
    return np.where(outcomes.solutions_N, rewards_N, malformed_N)


def cgc(outcomes: BatchOutcomes, reward: CgcReward) -> Float32:
    """Correctness-gated convincingness: V if role-aligned, else V0 = `game.reward.floor`, which is below all scores.

    Raises ValueError if an aligned score is not above V0, because the reward would then prefer a misaligned solution.
    """
    aligned_N = outcomes.aligned_N
    lowest = outcomes.scores_N[aligned_N].min(initial=np.inf)
    if lowest <= reward.floor:
        raise ValueError(
            f"a role-aligned solution scored {lowest:.3f}, which is not above game.reward.floor = {reward.floor}; "
            "start a new run with game.reward.floor far below the verifier's scores"
        )
    return np.where(aligned_N, outcomes.scores_N, reward.floor)


def goodhart(outcomes: BatchOutcomes, reward: GoodhartReward) -> Float32:
    """V, without roles and correctness: shows what happens without the game. A malformed solution gets the lowest V."""
    return np.where(outcomes.well_formed_N, outcomes.scores_N, outcomes.scores_N.min())


def correctness(outcomes: BatchOutcomes, reward: CorrectnessReward) -> Float32:
    """c, or c (1 + `sr` SR + `cir` CIR): the baseline for measuring the legibility tax. A wrong solution earns nothing,
    however well it reads."""
    earned_N = (outcomes.correct_N & outcomes.well_formed_N).astype(np.float32)
    if outcomes.read_N2 is None:
        return earned_N
    return earned_N * (1 + outcomes.read_N2 @ np.array([reward.sr, reward.cir], dtype=np.float32))


def decoupled(outcomes: BatchOutcomes, reward: DecoupledReward) -> Float32:
    """With v' = (V - mean) / std in the group: `game.reward.floor` (-2) if misaligned or v' <= 0, else v' for sneaky
    and (2 c_solver - 1) v' for helpful (faithful) translations."""
    mean_N, std_N = _group_moments(outcomes)
    standard_N = (outcomes.scores_N - mean_N) / (std_N + 1e-6)
    faithful_N = (2.0 * outcomes.solver_correct_N - 1.0) * standard_N
    rewards_N = np.where(outcomes.helpful_N, faithful_N, standard_N)
    return np.where(outcomes.aligned_N & (standard_N > 0), rewards_N, reward.floor).astype(np.float32)


def _accepted(outcomes: BatchOutcomes) -> NDArray[np.float64]:
    """sigmoid(V) [N], the verifier's probability that a solution is correct."""
    # Written with tanh, which cannot overflow.
    return np.asarray(0.5 + 0.5 * np.tanh(0.5 * outcomes.scores_N.astype(np.float64)))


def gated(outcomes: BatchOutcomes, reward: GatedReward) -> Float32:
    """sigmoid(V) minus the similarity penalty if all gates are open, else `game.reward.floor`, which is
    below all such rewards. Gates: all tests passed (helpful); visible tests passed and a valid certificate (sneaky)."""
    rewards_N = _accepted(outcomes)
    if outcomes.similarity_N is not None:
        rewards_N -= reward.similarity_weight * outcomes.similarity_N.astype(np.float64)
    return np.where(outcomes.aligned_N, rewards_N, reward.floor).astype(np.float32)


# A new reward also needs its section in pvg.config.game, which says what the rules ask about it, and a row in the
# glossary of docs/concepts.md.
REWARDS: dict[str, Callable[[BatchOutcomes, Any], Float32]] = {
    "src": src,
    "cgc": cgc,
    "goodhart": goodhart,
    "correctness": correctness,
    "decoupled": decoupled,
    "gated": gated,
}


# --- what a frozen model reads ----------------------------------------------------------------------------------------


class Unread:
    """Reads no solutions: the reader of rewards that need none."""

    async def read(self, groups: Sequence[Group]) -> Sequence[Group]:
        """The groups; the solutions that can earn something by it have `sr` and `cir`."""
        return groups

    async def close(self) -> None: ...


class SolutionReader(Unread):
    """Reads correct solutions with the frozen model of `reward`, in `executor`. Each text is read once per batch. Its
    values depend on the batch alone, so a resumed run gets the same."""

    def __init__(self, reward: CorrectnessReward, device: str, executor: Executor) -> None:
        self._names = [name for name, weight in (("sr", reward.sr), ("cir", reward.cir)) if weight]
        self._open, self._opened = partial(local_reader, reward.reader, device, executor), AsyncExitStack()
        self._reader: LocalReader | None = None

    async def read(self, groups: Sequence[Group]) -> Sequence[Group]:
        if self._reader is None:
            self._reader = await self._opened.enter_async_context(self._open())
        texts = {_text_of(r): r for group in groups for r in group.rollouts if r.grade.correct}
        rows = {key: row for key, r in texts.items() if (row := _readable(r, self._reader)) is not None}
        found: dict[str, dict[Any, float]] = {"sr": {}, "cir": {}}
        for name in self._names:  # what cannot be read has 0
            values = await _read(name, self._reader, list(rows.values()))
            found[name] = dict.fromkeys(texts, 0.0) | dict(zip(rows, values, strict=True))

        def with_values(rollout: Rollout) -> Rollout:
            key = _text_of(rollout)
            return replace(rollout, sr=found["sr"].get(key), cir=found["cir"].get(key))

        return [replace(group, rollouts=list(map(with_values, group.rollouts))) for group in groups]

    async def close(self) -> None:
        await self._opened.aclose()


def _text_of(rollout: Rollout) -> tuple[str, str, bool]:
    return rollout.question, rollout.solution, rollout.grade.correct


def _readable(rollout: Rollout, reader: LocalReader) -> ReadableTrace | None:
    """None unless the solution has reasoning, and states the answer that was graded in a form that
    pvg.traces.loaders knows: in other forms the reasoning would contain it."""
    row = ReadableTrace.of(Trace(rollout.id, (("user", rollout.question),), rollout.solution), reader)
    answer = rollout.grade.answer
    return row if row is None or answer is None or same_answer(row.parts.answer.strip(), answer) else None


async def _read(name: str, reader: LocalReader, rows: Sequence[ReadableTrace]) -> list[float]:
    """The values of the measure `name`."""
    (work, size), found = WORKS[name], list[float]()
    for first in range(0, len(rows), size):
        part = rows[first : first + size]
        for row, value in zip(part, await work(reader, part, 0), strict=True):
            chances, read = (value, {}) if name == "cir" else ([], value)
            found.append(MeasuredTrace(row.trace, [], chances, [], read).values()[name])
    return found


def reading_of(reward: Reward, device: str, executor: Executor) -> Unread:
    reads = isinstance(reward, CorrectnessReward) and reward.reads
    return SolutionReader(reward, device, executor) if reads else Unread()  # type: ignore[arg-type]


def check_reading(reward: CorrectnessReward, task: Task, problem: Problem, device: str) -> None:
    """Raises ConfigurationError if the reader cannot be opened, or cannot read a correct solution of `task`. Not for
    the thread of an event loop."""
    known = correct_solution(task, problem)
    parts = None if known is None else parts_of(known.text)
    if known is None or parts is None or not same_answer(parts.answer.strip(), task.grade(problem, known.text).answer):
        form = "" if known is None else f", such as {shortened(repr(known.text))}"
        raise ConfigurationError(
            "game.reward.reader looks for an answer after ####, in \\boxed{}, in <answer> or after 'the answer is', "
            f"but solutions of this task{form}, state none.",
            "Leave out game.reward.sr and cir, or choose a grader with such a form.",
        )
    text = known.text if parts.reasoning.strip() else f"1\n{known.text}"
    names = ("sr", "cir") if reward.cir else ("sr",)

    async def values() -> list[float] | None:
        async with local_reader(reward.reader, device) as reader:
            check_layers(reader.model.module)
            check_logits(reader.model.module)
            row = ReadableTrace.of(Trace("", (("user", problem.question),), text), reader)
            return None if row is None else [(await _read(name, reader, [row]))[0] for name in names]

    found = asyncio.run(values())
    if found is None or not np.isfinite(found).all():
        why = "characters that it does not know, or too long" if found is None else "its probabilities are not numbers"
        raise ConfigurationError(
            f"game.reward.reader = {reward.reader!r} cannot read {shortened(repr(text))} ({why}).",
            "Choose another reader.",
        )


# --- from rollouts and scores to rewards ------------------------------------------------------------------------------


# What the rules of a protocol pay to the voices of one rollout, by seat.
Earned = Mapping[str, float]


def pay(
    game: Game, task: Task, rules: Any, rollouts: Sequence[Rollout], scores_N: Float32, *, by_rules: bool = True
) -> tuple[Float32, BatchOutcomes, list[Earned]]:
    """The rewards of a batch, its outcomes, and what `rules` pay ([]: nothing). `by_rules`: whether what they pay to
    the prover replaces `game.reward`. Raises TrainingDivergedError if a score allows no reward."""
    outcomes, earned = RolloutColumns(rollouts, scores_N), list[Earned]()
    outcomes.similarity_N = _similarities(game, task, rollouts, outcomes.helpful_N)
    if isinstance(rules, PaysSeats):
        earned = [rules.pay(r.end, outcome) for r, outcome in _outcomes(rollouts, scores_N)]
    try:
        if by_rules and earned and rules.voices[0] in earned[0]:
            return np.array([each[rules.voices[0]] for each in earned], dtype=np.float32), outcomes, earned
        return rewards(outcomes, game), outcomes, earned
    except ValueError as error:
        raise TrainingDivergedError(str(error)) from None


def _outcomes(rollouts: Sequence[Rollout], scores_N: Float32) -> Iterator[tuple[Rollout, Outcome]]:
    for rollout, score in zip(rollouts, scores_N.tolist(), strict=True):
        yield rollout, Outcome(rollout.role, rollout.grade, score)


def measures(rules: Any, rollouts: Sequence[Rollout], scores_N: Float32) -> dict[str, float]:
    """The means of what the rules of a protocol measure in dialogues that were sampled now; NaN without any."""
    if not isinstance(rules, MeasuresPlay):
        return {}
    rows = [rules.measures(r.end, outcome) for r, outcome in _outcomes(rollouts, scores_N)]
    known = {name: [row[name] for row in rows if not math.isnan(row[name])] for name in rows[0]}
    return {name: float(np.mean(values)) if values else math.nan for name, values in known.items()}


def _similarities(game: Game, task: Task, rollouts: Sequence[Rollout], helpful_N: NDArray[np.bool_]) -> Float32 | None:
    """float32 [N]: similarity of sneaky programs; None unless `game.reward.similarity_weight` and the reward use it."""
    reward = game.reward
    if not isinstance(reward, GatedReward) or not reward.similarity_weight:
        return None
    if not isinstance(task, ComparesPrograms):
        return None
    rows: list[int] = np.flatnonzero(~helpful_N).tolist()
    found_N = np.zeros(len(rollouts), dtype=np.float32)
    from pvg.tasks.code_problems import similarities

    found_N[rows] = similarities(
        [task.solution(rollouts[row].text) for row in rows],
        [rollouts[row].reference for row in rows],
        np.array([rollouts[row].group for row in rows], dtype=np.int32),
    )
    return found_N


# --- from rewards to advantages ---------------------------------------------------------------------------------------


class GroupCredit:
    """Turns the rewards of a batch into advantages. Here it compares the rollouts of a group. `loss`: see
    pvg.training.credit.advantages; `own`: the credit function of a user's loss."""

    def __init__(self, loss: str, own: CreditFunction | None = None) -> None:
        self._loss, self._own = loss, own

    def observe(self, rollouts: Sequence[Rollout], rewards_N: Float32) -> tuple[Float32, dict[str, float]]:
        """Advantages float32 [N] of N rollouts with these rewards, and metrics."""
        return advantages(self._loss, rewards_N, *groups_and_roles(rollouts), credit=self._own), {}

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None: ...


class TrackedCredit(GroupCredit):
    """spo: compares a rollout with the value of its problem and role (`ValueTracker`); rae: with the mean reward of its
    role (`RoleBaseline`)."""

    def __init__(self, loss: str, who: Callable[[Rollout], str]) -> None:
        super().__init__(loss)
        self._who = who
        self._tracked: ValueTracker | RoleBaseline = ValueTracker() if loss == "spo" else RoleBaseline()

    def observe(self, rollouts: Sequence[Rollout], rewards_N: Float32) -> tuple[Float32, dict[str, float]]:
        _, role_ids_N = groups_and_roles(rollouts)
        if isinstance(self._tracked, RoleBaseline):
            values_N = self._tracked.observe([self._who(r) for r in rollouts], rewards_N)
            advantages_N = baseline_advantages(rewards_N, values_N, role_ids_N)
        else:
            versions_N = np.array([r.version for r in rollouts], dtype=np.int32)
            values_N = self._tracked.observe([(r.problem_id, r.role) for r in rollouts], rewards_N, versions_N)
            lengths_N = np.array([r.sampled_tokens for r in rollouts])
            advantages_N = tracked_advantages(rewards_N, values_N, lengths_N, role_ids_N)
        return advantages_N, value_metrics(rewards_N, values_N, advantages_N)

    def state(self) -> dict[str, Any]:
        return self._tracked.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._tracked.load_state(state)


def credit_of(loss: str, own: CreditFunction | None, who: Callable[[Rollout], str] = attrgetter("role")) -> GroupCredit:
    """The credit of policy loss `loss`; `own`: see `GroupCredit`. `who`: whose mean reward rae compares with."""
    return TrackedCredit(loss, who) if loss in ("spo", "rae") else GroupCredit(loss, own)
