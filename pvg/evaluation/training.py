"""Trains policies outside the run: attackers of a frozen verifier, and the correctness baseline.

Each has a separate folder with a ledger like a run's, so it resumes like a run: after a kill at any instant it
continues from its last commit, and ends with the same bits as an uninterrupted training.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pvg.config.experiment import Experiment
from pvg.evaluation.opened_run import EvaluationContext, OpenedRun, first_version, remove_folder
from pvg.game.ledger import Ledger
from pvg.game.parts import TrainingStop
from pvg.game.prover_phase import open_prover_phase, read_policy, save_policy
from pvg.game.session import Session, finite
from pvg.game.simultaneous import FixedVerifier
from pvg.game.states import Phase
from pvg.models.starts import open_learner
from pvg.store.atomic import make_directory, write_atomic
from pvg.store.run_directory import RunDirectory
from pvg.telemetry.events import Observer, PhaseInfo, Progress
from pvg.telemetry.spans import span
from pvg.verifier.backend import ScoringModel

if TYPE_CHECKING:
    from torch import Tensor

    from pvg.models.low_rank import LowRankAdapter

DIGEST_FILE = "digest"


@dataclass(frozen=True)
class PolicyTraining:
    """One policy's training: the place of its files in the evaluation, the digest of what it depends on, its settings,
    and the numbers of steps after which the policy is saved (ascending; the last one ends the training)."""

    place: str
    digest: str
    experiment: Experiment
    round: int
    phase: str  # its name on the display
    unit: str  # the unit that the display counts
    versions: int  # the range of its versions (pvg.evaluation.opened_run)
    saved_steps: tuple[int, ...]

    def folder(self, context: EvaluationContext) -> Path:
        """One folder per digest: training with other settings discards no results."""
        return context.folder / f"{self.place}-{self.digest[:12]}"

    def read(self, context: EvaluationContext, steps: int) -> tuple[dict[str, Tensor], LowRankAdapter | None]:
        """The policy that was saved after `steps` steps."""
        return read_policy(OpenedRun.open(RunDirectory(self.folder(context))), policy_name(steps))

    def tensors(self, context: EvaluationContext, steps: int) -> dict[str, Tensor]:
        return self.read(context, steps)[0]

    async def publish(self, context: EvaluationContext, steps: int, version: int) -> None:
        """Give a saved policy to the engine as `version`."""
        tensors, adapter = await context.players.compute(partial(self.read, context, steps))
        await context.players.publish(tensors, version, adapter)


def policy_name(steps: int) -> str:
    return f"policy-{steps:06d}"


@contextmanager
def training_session(context: EvaluationContext, training: PolicyTraining) -> Iterator[Session]:
    """The session of a policy's training, with its existing ledger, or with a new one if it never began."""
    folder = training.folder(context)
    mark = folder / DIGEST_FILE
    if not mark.exists():  # new, or killed before its first commit
        remove_folder(folder)
        make_directory(folder)
        write_atomic(mark, training.digest.encode())
    directory = RunDirectory(folder)
    for part in (directory.manifest, directory.rollouts, directory.checkpoints, directory.weights):
        make_directory(part)
    ledger = Ledger(directory, training.experiment, context.code_version)
    try:
        for notice in ledger.notices:
            context.observer.noticed(notice)
        if elsewhere := ledger.record_machine(context.players.machine):
            context.observer.noticed(elsewhere)
        watcher = RenamingObserver(context.observer, phase=training.phase, unit=training.unit)
        yield Session(
            training.experiment,
            context.task,
            ledger,
            context.players,
            context.prompts,
            watcher,
            context.stop,
            context.tracer,
        )
    finally:
        ledger.close()


async def train(
    session: Session,
    training: PolicyTraining,
    verifier: ScoringModel,
    threshold: float,
    rule: TrainingStop | None = None,
) -> None:
    """Train to the end from the last commit on. The ledger's weights then contain every policy to keep.

    If `rule` stops the training early, the policy is stored under the planned number of steps. Raises InterruptedByUser
    at a commit point, and TrainingDivergedError."""
    ledger = session.ledger
    if ledger.state.phase is Phase.INIT:
        state = replace(ledger.state, phase=Phase.TRAIN_PROVER, round=training.round)
        await session.commit_state(replace(state, version=first_version(training.versions)))
    for steps in training.saved_steps:
        if policy_name(steps) not in ledger.state.weights:
            await _train_to(session, steps, verifier, threshold, rule)


async def _train_to(
    session: Session, steps: int, verifier: ScoringModel, threshold: float, rule: TrainingStop | None
) -> None:
    started = time.perf_counter()
    info = session.begin("steps", steps, session.state.step)
    with span("open_models"):
        learner = await session.players.compute(lambda: open_learner(session.players, session.state.round))
    try:
        with session.players.divided_workers():
            with span("open_models"):
                phase = open_prover_phase(session, info, verifier, FixedVerifier(threshold), learner, rule)
            await phase.play()
        phase.tell_unfinished()
        meta = {
            "steps": phase.done,
            "rule": None if rule is None else rule.state(),
            "metrics": finite(phase.last_metrics),
        }
        with span("checkpoint"):
            names = await save_policy(session, learner, policy_name(steps), meta)
        session.finish_phase(info, phase.last_metrics, time.perf_counter() - started)
        # The next part publishes the final policy of this one again, as another version.
        version = phase.version + 1
        progress = {**session.state.progress, "version": version}
        weights = (*session.state.weights, *names)
        await session.commit(weights=weights, version=version, progress=progress)
    finally:
        learner.close()


class RenamingObserver:
    """Forwards all reports; `names` replaces these fields of each phase."""

    def __init__(self, observer: Observer, **names: Any) -> None:
        self._observer = observer
        self._names = names

    def phase_started(self, info: PhaseInfo) -> None:
        self._observer.phase_started(replace(info, **self._names))

    def phase_finished(self, info: PhaseInfo, metrics: Mapping[str, float]) -> None:
        self._observer.phase_finished(replace(info, **self._names), metrics)

    def progressed(self, progress: Progress) -> None:
        self._observer.progressed(progress)

    def round_finished(self, round_: int, metrics: Mapping[str, float]) -> None:
        self._observer.round_finished(round_, metrics)

    def alerted(self, name: str, message: str) -> None:
        self._observer.alerted(name, message)

    def noticed(self, message: str) -> None:
        self._observer.noticed(message)


def kept_policy(session: Session, steps: int) -> Mapping[str, Any]:
    """The metadata that `train` stored with the policy of `steps` steps."""
    _, meta = session.ledger.read_weights(policy_name(steps))
    return meta


def probe_steps(total: int, probes: int, minibatches: int) -> tuple[int, ...]:
    """At most `probes` numbers of steps up to `total`, evenly spaced, none within a batch (except the last)."""
    steps: Sequence[int] = [round(total * (number + 1) / probes) for number in range(probes)]
    whole = {step // minibatches * minibatches for step in steps[:-1]}
    return tuple(sorted({step for step in whole if step > 0} | {total}))
