"""MINT: sample the solutions that the verifier learns from, on the verifier's half of the problems.

The mixture gives each source (the base prover and the provers of earlier rounds) a share of the problems. Every problem
gets the same number of solutions, of which `game.sneaky_share` are sneaky. One chunk of problems is one step and one
commit. After the mint of round 0, a critic is compared with a judge (`examine_critic`).
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from functools import partial

import numpy as np

from pvg.config.training import VerdictHead
from pvg.game.orders import RunWithPlayers, apportion, interaction_of, mint_orders, source_weights, sources_for_round
from pvg.game.prover_phase import read_prover
from pvg.game.session import Session, sample_chunks
from pvg.game.states import Phase
from pvg.game.verifier_phase import SCORED_AT_ONCE, calibration_view, trained
from pvg.records import BASE_SOURCE, Problem
from pvg.rollout.dispatcher import GroupOrder, SampleCall
from pvg.seeds import generator_for, seed_for
from pvg.telemetry.alerts import Alert
from pvg.telemetry.spans import span
from pvg.verifier.calibration import accepted_by_halves, balanced_accuracy, balanced_lead
from pvg.verifier.data import read_critique


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

    await sample_chunks(session, info, len(chunks), orders, load, partial(examine_critic, session))
    await session.leave_phase(session.state.enter(Phase.TRAIN_VERIFIER))


async def load_source(session: RunWithPlayers, source: str, version: int) -> None:
    """Publish the weights of `source` to the engine as policy `version`."""
    players = session.players
    if source == BASE_SOURCE:
        await players.publish(players.base.weights(), version)
    else:
        tensors, adapter = await players.compute(lambda: read_prover(session, source))
        await players.publish(tensors, version, adapter)


# --- is the critic better than a judge? -------------------------------------------------------------------------------


async def examine_critic(session: Session) -> dict[str, float]:
    """Compare the base prover as a critic with a judge that reads no critiques: the balanced accuracy of both on the
    same minted solutions of held-out problems. Raises an alert if the critic is not better, because it helps a verifier
    only then (arXiv 2605.27483).

    The judge is a verifier with the training of the game's, on solutions alone. A generative verifier judges before its
    training, as the critic does. Returns nothing after round 0, without a critic, and for too few solutions."""
    players = session.players
    if session.game.protocol.kind != "critic" or session.state.round:
        return {}
    view, too_few = await players.compute(lambda: calibration_view(session))
    with closing(view):
        rows_N, correct_N = view.rows_R[:SCORED_AT_ONCE], view.correct_R[:SCORED_AT_ONCE]
        problems_N = view.problems_R[:SCORED_AT_ONCE]
        alone, whole = [await players.compute(partial(view.rows, rows_N, alone=each)) for each in (True, False)]
    if too_few:
        return {}
    if isinstance(session.verifier.head, VerdictHead):
        judge = await players.compute(players.open_verifier)
    else:
        session.observer.noticed("A judge of solutions without critiques is trained, to compare the critic with it.")
        judge = await trained(session, None)
    try:
        with span("score"):
            scores_N = await players.scorer(judge).score(alone)
    finally:
        judge.close()
    if (accepted_N := accepted_by_halves(scores_N, correct_N, problems_N)) is None:
        return {}
    heard = [row.text.removeprefix(own.text) for row, own in zip(whole, alone, strict=True)]
    critic_N = np.array([not read_critique(critique, session.prompts.section.kind) for critique in heard])
    critic, judged = (balanced_accuracy(each_N, correct_N) for each_N in (critic_N, accepted_N))
    lead, low, high = balanced_lead(critic_N, accepted_N, correct_N, problems_N)
    says = f"a balanced accuracy of {critic:.2f}, and a judge that reads no critiques {judged:.2f}"
    message = f"The critic has {says} (difference {lead:+.2f}, 95 % interval {low:+.2f} to {high:+.2f})."
    if lead > 0.0:
        session.observer.noticed(message)
    else:
        session.alert([Alert("weak_critic", message)], session.state.step)
    found = {"critic_balanced": critic, "judge_balanced": judged}
    return found | {"critic_lead": lead, "critic_lead_low": low, "critic_lead_high": high}
