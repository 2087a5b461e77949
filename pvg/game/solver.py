"""SOLVE: in the decoupled game, a fixed solver solves every problem of the task once, before the first round.

In the decoupled game (Kim and Lee, arXiv 2602.23248) the solver is trained only for correctness, or not at all. The
prover translates its solutions. The faithful role makes them checkable and keeps their answer; the sneaky role changes
them so that they reach another, wrong answer. The verifier sees problem and translation.

`game.protocol.solver` is "base" (the base prover with its helpful prompt) or the directory of a run, such as one with
game.reward = "correctness", whose newest prover becomes the solver. Its solutions are stored as rollouts of the phase
"solve". Every translation carries the solution that it translates.

Invariant: each problem keeps one solver's solution for the whole run, also after kills and resumes.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pvg.config.sections import DecoupledProtocol
from pvg.errors import ConfigurationError, StateError
from pvg.game.seeds import seed_for
from pvg.game.session import Session
from pvg.game.states import Phase
from pvg.game.statistics import sample_metrics
from pvg.inputs import expanded
from pvg.records import BASE_SOURCE, Problem, Role, Rollout, SolverSolution
from pvg.store.checkpoints import read_checkpoint
from pvg.store.run_directory import RunDirectory
from pvg.store.samples import SampleColumns
from pvg.store.state import FileStateStore
from pvg.telemetry.spans import span

if TYPE_CHECKING:
    from torch import Tensor

SOLVER_SOURCE = "solver"
PROVERS = re.compile(r"round-\d{3}-prover")


async def solve(session: Session) -> None:
    """Run the phase from the last committed chunk on, then enter MINT."""
    problems = [problem for split in ("train", "test") for problem in session.task.problems(split)]
    size = session.experiment.rollout.max_rows
    chunks = [problems[first : first + size] for first in range(0, len(problems), size)]
    done = session.state.step * size
    info = session.begin("rollouts", len(problems), min(done, len(problems)))
    started = time.perf_counter()
    session.first_step()
    version = session.state.version
    if session.state.step == 0:
        version += 1
    if session.state.step < len(chunks):
        with span("sync"):
            tensors = await session.players.compute(lambda: solver_weights(session))
            await session.players.publish(tensors, version)
    for number in range(session.state.step, len(chunks)):
        chunk_started = time.perf_counter()
        with span("rollout"):
            rollouts = await _sample(session, chunks[number], number)
        with span("record"):
            session.ledger.keep(rollouts)
            metrics = sample_metrics(SampleColumns.of(rollouts), time.perf_counter() - chunk_started)
        session.report_step(info, min((number + 1) * size, len(problems)), metrics)
        await session.commit(step=number + 1, version=version)
    with span("record"):
        session.asked.solutions = await read_solutions(session)
        solved = await session.ledger.sample_columns(0, Phase.SOLVE.value)
    seconds = time.perf_counter() - started
    metrics = sample_metrics(solved, seconds)
    if done:  # an earlier process sampled a part, and this process does not know its seconds
        del metrics["tokens_per_s"]
    session.finish_phase(info, metrics, seconds)
    await session.leave_phase(session.state.enter(Phase.MINT))


async def _sample(session: Session, problems: list[Problem], number: int) -> list[Rollout]:
    orders = [session.order(problem, Role.HELPFUL, group, 1) for group, problem in enumerate(problems)]
    groups = await session.players.dispatcher.sample(
        orders,
        round_=0,
        source=SOLVER_SOURCE,
        step=number,
        seed=seed_for(session.seed, "solve", number),
        prefix=f"000/solve/{number:05d}",
    )
    session.tell_rollouts(groups, number)
    return [rollout for group in groups for rollout in group.rollouts]


async def read_solutions(session: Session) -> dict[str, SolverSolution]:
    """The committed solutions by problem id."""
    return solutions_of(await session.ledger.read_rollouts(0, Phase.SOLVE.value))


def solutions_of(solved: Iterable[Rollout]) -> dict[str, SolverSolution]:
    """The solutions by problem id, from the phase's rollouts."""
    return {
        r.problem_id: SolverSolution(r.id, r.text, r.grade.answer, r.grade.correct, r.grade.well_formed) for r in solved
    }


def solver_weights(session: Session) -> Mapping[str, Tensor]:
    """The weights of `game.protocol.solver`, in the shapes of the base prover.

    Raises ConfigurationError if the directory has no finished prover, or one of another model.
    """
    protocol, base = session.experiment.game.protocol, session.players.base.weights()
    assert isinstance(protocol, DecoupledProtocol), "only the decoupled game has a solver"
    solver = protocol.solver
    if solver == BASE_SOURCE:
        return base
    tensors = read_newest_prover(Path(solver))
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if shapes != {name: tuple(tensor.shape) for name, tensor in base.items()}:
        raise ConfigurationError(
            f"The prover of game.protocol.solver = {solver!r} does not have the architecture of models.prover.",
            "Choose a run that was trained from the same model.",
        )
    return tensors


def read_newest_prover(directory: Path) -> dict[str, Tensor]:
    """The weights of the newest finished prover of the run in `directory`. Raises ConfigurationError if it has none."""
    run = RunDirectory(expanded(directory, "game.protocol.solver"))
    remedy = 'Set game.protocol.solver to the directory of a run with a finished round (runs/NAME), or to "base".'
    if not run.state.exists():
        raise ConfigurationError(f"game.protocol.solver: there is no run in {directory}.", remedy)
    try:
        state = FileStateStore(run.state).load().state or {}
    except StateError as error:
        raise ConfigurationError(
            f"game.protocol.solver: the run in {directory} cannot be read: {error}", remedy
        ) from None
    names = sorted(name for name in state.get("weights", ()) if PROVERS.fullmatch(name))
    if not names:
        raise ConfigurationError(f"game.protocol.solver: the run in {directory} has no finished prover.", remedy)
    tensors, _ = read_checkpoint(run.weights, names[-1])
    return tensors
