"""Fresh samples: the same problems for every policy, sampled once and shared by all parts.

A set of samples consists of chunks, each committed as one shard. Its manifest names the shards and is replaced after
every chunk. A killed process leaves at most one shard that no manifest names; the next start removes it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import orjson

from pvg.evaluation.intervals import Ints
from pvg.evaluation.opened_run import (
    EvaluationContext,
    committed_shards,
    digest,
    open_frozen_verifier,
    questions,
    read_json,
    verifier_asks,
)
from pvg.game.statistics import sample_metrics
from pvg.records import Float32, Problem, Role, Rollout
from pvg.rollout.episodes import Environment
from pvg.seeds import seed_for
from pvg.store.atomic import make_directory, remove_temporaries, write_atomic
from pvg.store.samples import SampleColumns
from pvg.store.shards import ShardInfo
from pvg.telemetry.events import PhaseInfo, Progress

MANIFESTS = "samples"


@dataclass(frozen=True)
class SampleSet:
    """What to sample: `size` solutions of each problem in each role. `policy`: a digest of the policy. `name`: the
    policy's name in the evaluation. `round`: for the path of the shards and for the display. In a challenge game the
    verifier of round `asking` asks about the steps; later verifiers score the same dialogues."""

    name: str
    round: int
    problems: Sequence[Problem]
    roles: tuple[Role, ...]
    size: int
    policy: str
    asking: int = 0

    @property
    def rollouts(self) -> int:
        return len(self.problems) * len(self.roles) * self.size


def digest_of(context: EvaluationContext, wanted: SampleSet) -> str:
    ids = [problem.id for problem in wanted.problems]
    roles = [role.value for role in wanted.roles]
    asking = [context.ledger.players_of(wanted.asking)] if verifier_asks(context.experiment) else []
    return digest("samples", context.config, wanted.name, wanted.policy, ids, roles, wanted.size, *asking)


async def sampled(context: EvaluationContext, wanted: SampleSet, load: Callable[[], Awaitable[None]]) -> list[Rollout]:
    """The set's rollouts in order of problems and roles, read from disk or sampled.

    `load` publishes the policy; it is called only if something must be sampled. Raises InterruptedByUser after a chunk
    if a stop was requested."""
    for_ = digest_of(context, wanted)
    shards = _committed(context, wanted.name, for_)
    chunks = _chunks(context, wanted)
    if len(shards) < len(chunks):
        context.begin(wanted.name)
        done = sum(shard.rows for shard in shards)
        info = PhaseInfo(wanted.round, context.experiment.game.rounds, "samples", "rollouts", wanted.rollouts, done)
        context.observer.phase_started(info)
        await load()
        with open_frozen_verifier(context, wanted.asking) as asking:
            environment = await questions(context, asking)
            for number in range(len(shards), len(chunks)):
                rollouts = await _sample(context, wanted, number, chunks[number], environment)
                label = f"{wanted.name}-{for_[:8]}-{number:05d}"
                shards.append(context.shards.write(wanted.round, label, rollouts))
                _write_manifest(context, wanted.name, for_, shards)
                done += len(rollouts)
                context.observer.progressed(Progress(done, _shown_metrics(rollouts)))
                context.check_stop()
        context.observer.phase_finished(info, {})
    return [rollout for shard in shards for rollout in context.shards.read(shard)]


def is_complete(context: EvaluationContext, wanted: SampleSet) -> bool:
    return sum(shard.rows for shard in _committed(context, wanted.name, digest_of(context, wanted))) == wanted.rollouts


def _shown_metrics(rollouts: list[Rollout]) -> dict[str, float]:
    metrics = sample_metrics(SampleColumns.of(rollouts), 1.0)
    del metrics["tokens_per_s"]
    return metrics


def _chunks(context: EvaluationContext, wanted: SampleSet) -> list[Sequence[Problem]]:
    per_chunk = max(1, context.experiment.rollout.chunk // (wanted.size * len(wanted.roles)))
    return [wanted.problems[first : first + per_chunk] for first in range(0, len(wanted.problems), per_chunk)]


async def _sample(
    context: EvaluationContext,
    wanted: SampleSet,
    number: int,
    problems: Sequence[Problem],
    environment: Environment | None,
) -> list[Rollout]:
    first = sum(len(chunk) for chunk in _chunks(context, wanted)[:number])
    orders = [
        context.order(problem, role, len(wanted.roles) * (first + position) + rank, wanted.size)
        for position, problem in enumerate(problems)
        for rank, role in enumerate(wanted.roles)
    ]
    groups = await context.players.dispatcher.sample(
        orders,
        round_=wanted.round,
        source=wanted.name,
        step=number,
        seed=seed_for(context.seed, "evaluate", wanted.name, number),
        prefix=f"evaluate/{wanted.name}/{number:05d}",
        environment=environment,
    )
    return [rollout for group in groups for rollout in group.rollouts]


# --- what is committed -------------------------------------------------------------------------------------------


def _write_manifest(context: EvaluationContext, name: str, for_: str, shards: list[ShardInfo]) -> None:
    plain = {"digest": for_, "shards": [shard.plain() for shard in shards]}
    make_directory(context.folder / MANIFESTS)
    write_atomic(context.folder / MANIFESTS / f"{name}.json", orjson.dumps(plain, option=orjson.OPT_INDENT_2))


def _committed(context: EvaluationContext, name: str, for_: str) -> list[ShardInfo]:
    path = context.folder / MANIFESTS / f"{name}.json"
    manifest = read_json(path, "shards")
    return [] if manifest is None or manifest["digest"] != for_ else committed_shards([manifest])


def recover(context: EvaluationContext) -> int:
    """Remove files of killed processes and of stale sets; returns their number."""
    folder = context.folder / MANIFESTS
    remove_temporaries(folder)
    found = (read_json(path, "shards") for path in sorted(folder.glob("*.json")))
    return len(context.shards.recover(committed_shards([manifest for manifest in found if manifest is not None])))


# --- samples as arrays -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScoredRollouts:
    """Rollouts with one verifier's scores, as arrays [N]. `pool`: the problems, indexed by `problems_N`."""

    rollouts: Sequence[Rollout]
    scores_N: Float32
    pool: Sequence[Problem]

    @cached_property
    def correct_N(self) -> Any:
        return np.array([r.grade.correct for r in self.rollouts], dtype=bool)

    @cached_property
    def helpful_N(self) -> Any:
        return np.array([r.role is Role.HELPFUL for r in self.rollouts], dtype=bool)

    @cached_property
    def flaws_N(self) -> Any:
        """Whether each rollout is a flaw (pvg.records.Rollout.is_flaw)."""
        return np.array([r.is_flaw for r in self.rollouts], dtype=bool)

    @cached_property
    def problems_N(self) -> Ints:
        places = {problem.id: place for place, problem in enumerate(self.pool)}
        return np.array([places[r.problem_id] for r in self.rollouts], dtype=np.int64)
