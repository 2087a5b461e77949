"""`pvg rollout`: sample the base prover, grade its solutions and store them. It uses no verifier and trains nothing."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from typing import Literal

from pvg.config.experiment import Experiment
from pvg.errors import StateError, UsageError
from pvg.game.challenge import environment_of
from pvg.game.run import GameOutcome, open_session
from pvg.game.seeds import seed_for
from pvg.game.session import InterruptedByUser, Session
from pvg.game.states import Phase
from pvg.game.statistics import sample_metrics
from pvg.records import BASE_SOURCE, Problem, Role, Split
from pvg.store.run_directory import RunDirectory
from pvg.store.samples import SampleColumns
from pvg.telemetry.observer import Observer
from pvg.telemetry.spans import span

RoleChoice = Literal["both", "helpful", "sneaky"]


async def sample_only(
    experiment: Experiment,
    run: RunDirectory,
    *,
    observer: Observer,
    stop: asyncio.Event,
    problems: int | None,
    role: RoleChoice,
    split: Split,
) -> GameOutcome:
    """Sample `rollout.group_size` solutions per problem and role of the first `problems` problems (None: all).

    Commits after every chunk of at most `rollout.max_rows` rollouts. Raises StateError if the run is not empty,
    UsageError for a decoupled game.
    """
    started = time.perf_counter()
    if experiment.game.protocol.kind == "decoupled":
        raise UsageError(
            "pvg rollout samples direct solutions, but game.protocol = 'decoupled' samples translations of a solver's.",
            "Add -s game.protocol=direct, or play the game: pvg train",
        )
    async with AsyncExitStack() as stack:
        session = await open_session(experiment, run, observer, stop, stack, scoring=False)
        if session.state.phase is not Phase.INIT or session.state.shards:
            raise StateError(f"{run.path} is not empty.", "Choose another name with --name.")
        roles = list(Role) if role == "both" else [Role(role)]
        pool = list(session.task.problems(split))[:problems]
        status: Literal["complete", "interrupted"] = "complete"
        metrics: dict[str, float] = {}
        try:
            metrics = await _sample_all(session, pool, roles)
        except InterruptedByUser:
            status = "interrupted"
        session.finish_run(status)
        return GameOutcome(status, run.path, [metrics], time.perf_counter() - started)


async def _sample_all(session: Session, pool: list[Problem], roles: list[Role]) -> dict[str, float]:
    size = session.experiment.rollout.group_size
    per_chunk = max(1, session.experiment.rollout.max_rows // (size * len(roles)))
    info = session.begin("rollouts", len(pool) * len(roles) * size)
    everything = SampleColumns.of([])
    started = time.perf_counter()
    session.first_step()
    for number, first in enumerate(range(0, len(pool), per_chunk)):
        orders = [
            session.order(problem, role, len(roles) * (first + position) + rank, size)
            for position, problem in enumerate(pool[first : first + per_chunk])
            for rank, role in enumerate(roles)
        ]
        with span("rollout"):
            groups = await session.players.dispatcher.sample(
                orders,
                round_=0,
                source=BASE_SOURCE,
                step=number,
                seed=seed_for(session.seed, "rollout", number),
                prefix=f"rollout/{number:05d}",
                environment=environment_of(session, None),
            )
        session.tell_rollouts(groups, number)
        with span("record"):
            rollouts = [rollout for group in groups for rollout in group.rollouts]
            everything = SampleColumns.joined([everything, SampleColumns.of(rollouts)])
            session.ledger.keep(rollouts)
            metrics = sample_metrics(everything, time.perf_counter() - started)
        session.report_step(info, len(everything), metrics)
        await session.commit(step=number + 1)
    session.finish_phase(info, metrics, time.perf_counter() - started)
    await session.commit()
    return metrics
