"""MINT: sample the solutions that the verifier learns from, on the verifier's half of the problems.

The mixture gives each source (the base prover and the provers of earlier rounds) a share of the problems. Every problem
gets the same number of solutions, of which `game.sneaky_share` are sneaky. One chunk of problems is one step and one
commit.
"""

from __future__ import annotations

from dataclasses import dataclass

from pvg.game.orders import RunWithPlayers, apportion, interaction_of, mint_orders, source_weights, sources_for_round
from pvg.game.prover_phase import read_prover
from pvg.game.session import Session, sample_chunks
from pvg.game.states import Phase
from pvg.records import BASE_SOURCE, Problem
from pvg.rollout.dispatcher import GroupOrder, SampleCall
from pvg.seeds import generator_for, seed_for
from pvg.telemetry.spans import span


@dataclass(frozen=True, slots=True)
class ProblemChunk:
    """Problems that one source solves in one call."""

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
            chunks.append(ProblemChunk(source, problems[first:last]))
        start += count
    return chunks


async def mint(session: Session) -> None:
    """Run the phase from the last committed chunk on, then enter TRAIN_VERIFIER."""
    per_problem, round_, first = session.game.mint_samples, session.state.round, session.state.step
    chunks = plan(session)
    sizes = [len(chunk.problems) * per_problem for chunk in chunks]
    info = session.begin("rollouts", sum(sizes), sum(sizes[:first]))

    async def load(number: int) -> int:
        """All chunks of a source share one version, even if a resumed process loads the source again."""
        source, version = chunks[number].source, session.state.version
        begun = number > 0 and chunks[number - 1].source == source
        if not begun or number == first:
            version += not begun
            with span("sync"):
                await load_source(session, source, version)
        return version

    def orders(number: int) -> tuple[list[GroupOrder], SampleCall]:
        rng = generator_for(session.seed, round_, "mint-roles", number)
        call = SampleCall(
            round=round_,
            source=chunks[number].source,
            step=number,
            seed=seed_for(session.seed, round_, "mint", number),
            prefix=f"{round_:03d}/mint/{number:05d}",
            interaction=interaction_of(session, None),
        )
        return mint_orders(session, chunks[number].problems, rng), call

    await sample_chunks(session, info, len(chunks), orders, load)
    await session.leave_phase(session.state.enter(Phase.TRAIN_VERIFIER))


async def load_source(session: RunWithPlayers, source: str, version: int) -> None:
    """Publish the weights of `source` to the engine as policy `version`."""
    players = session.players
    if source == BASE_SOURCE:
        await players.publish(players.base.weights(), version)
    else:
        tensors, adapter = await players.compute(lambda: read_prover(session, source))
        await players.publish(tensors, version, adapter)
