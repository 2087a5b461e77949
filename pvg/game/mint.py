"""MINT: sample the solutions that the verifier learns from, on the verifier's half of the problems.

The mixture gives each source (the base prover and the provers of earlier rounds) a share of the problems. Every problem
gets the same number of solutions, of which `game.sneaky_share` are sneaky. One chunk of problems is one step and one
commit.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from pvg.game.orders import apportion, environment_of, mint_orders, source_weights, sources_for_round
from pvg.game.prover_phase import RunWithPlayers, read_prover
from pvg.game.session import Session
from pvg.game.states import Phase
from pvg.game.statistics import sample_metrics
from pvg.records import BASE_SOURCE, Problem, Rollout
from pvg.rollout.episodes import SampleCall
from pvg.seeds import generator_for, seed_for
from pvg.store.samples import SampleColumns
from pvg.telemetry.spans import span


@dataclass(frozen=True, slots=True)
class ProblemChunk:
    """Problems that one source solves in one call."""

    number: int
    source: str
    problems: list[Problem]


def plan(session: Session) -> list[ProblemChunk]:
    """All chunks of this round's mint, oldest source first. Every process computes the same list."""
    game, round_ = session.game, session.state.round
    shares = source_weights(game, sources_for_round(round_))
    size = game.problems_of_mint(round_)
    counts = apportion(size, shares)
    drawn = sum(game.problems_of_mint(earlier) for earlier in range(round_))
    problems = session.draw("verifier", drawn, size, "mint")
    per_chunk = max(1, session.rollout.chunk // game.mint_samples)
    chunks: list[ProblemChunk] = []
    start = 0
    for source, count in counts.items():
        for first in range(start, start + count, per_chunk):
            last = min(first + per_chunk, start + count)
            chunks.append(ProblemChunk(len(chunks), source, problems[first:last]))
        start += count
    return chunks


async def mint(session: Session) -> None:
    """Run the phase from the last committed chunk on, then enter TRAIN_VERIFIER."""
    game, state = session.game, session.state
    chunks = plan(session)
    per_problem = game.mint_samples
    rollouts_done = sum(len(chunk.problems) for chunk in chunks[: state.step]) * per_problem
    info = session.begin("rollouts", sum(len(chunk.problems) for chunk in chunks) * per_problem, rollouts_done)
    started = time.perf_counter()
    session.first_step()
    loaded: str | None = None
    for chunk in chunks[state.step :]:
        version, chunk_started = session.state.version, time.perf_counter()
        if chunk.source != loaded:
            # All chunks of a source share one version, even if a resumed process loads the source again.
            begun = chunk.number > 0 and chunks[chunk.number - 1].source == chunk.source
            version += not begun
            with span("sync"):
                await load_source(session, chunk.source, version)
            loaded = chunk.source
        with span("rollout"):
            rollouts = await _sample(session, chunk)
        with span("record"):
            session.ledger.keep(rollouts)
            rollouts_done += len(rollouts)
            metrics = sample_metrics(SampleColumns.of(rollouts), time.perf_counter() - chunk_started)
        session.report_step(info, rollouts_done, metrics)
        await session.commit(step=chunk.number + 1, version=version)
    with span("record"):
        minted = await session.ledger.sample_columns(state.round, Phase.MINT.value)
        seconds = time.perf_counter() - started
        metrics = sample_metrics(minted, seconds)
    if state.step:  # an earlier process sampled a part, and this process does not know its seconds
        del metrics["tokens_per_s"]
    session.finish_phase(info, metrics, seconds)
    await session.leave_phase(session.state.enter(Phase.TRAIN_VERIFIER))


async def load_source(session: RunWithPlayers, source: str, version: int) -> None:
    """Publish the weights of `source` to the engine as policy `version`."""
    players = session.players
    if source == BASE_SOURCE:
        await players.publish(players.base.weights(), version)
    else:
        tensors, adapter = await players.compute(lambda: read_prover(session, source))
        await players.publish(tensors, version, adapter)


async def _sample(session: Session, chunk: ProblemChunk) -> list[Rollout]:
    state = session.state
    rng = generator_for(session.seed, state.round, "mint-roles", chunk.number)
    orders = mint_orders(session, chunk.problems, rng)
    groups = await session.players.dispatcher.sample(
        orders,
        SampleCall(
            round=state.round,
            source=chunk.source,
            step=chunk.number,
            seed=seed_for(session.seed, state.round, "mint", chunk.number),
            prefix=f"{state.round:03d}/mint/{chunk.number:05d}",
            environment=environment_of(session, None),
        ),
    )
    return [rollout for group in groups for rollout in group.rollouts]
