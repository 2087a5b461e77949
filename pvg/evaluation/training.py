"""Trains policies outside the run: attackers of a frozen verifier, and the correctness baseline.

Each has a separate folder with a ledger like a run's, so it resumes like a run: after a kill at any instant it
continues from its last commit, and ends with the same bits as an uninterrupted training.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pvg.config.experiment import Experiment
from pvg.config.game import CorrectnessReward
from pvg.errors import TrainingDivergedError
from pvg.evaluation.opened_run import (
    BASELINE_RANGE,
    EvaluationContext,
    OpenedRun,
    SampleSet,
    digest,
    digest_of,
    first_version,
    open_frozen_verifier,
    remove_folder,
    sampled,
)
from pvg.evaluation.report import policy_experiment
from pvg.game.ledger import Ledger
from pvg.game.parts import TrainingStop
from pvg.game.prover_phase import open_prover_phase, read_policy, save_policy
from pvg.game.run import session_of
from pvg.game.session import Session, finite
from pvg.game.states import Phase
from pvg.game.verifier_phase import FixedVerifier
from pvg.models.sources import open_learner
from pvg.records import BASE_SOURCE, Problem, Role, Rollout
from pvg.store.atomic import make_directory, write_atomic
from pvg.store.run_directory import RunDirectory
from pvg.telemetry.events import Observer, PhaseInfo
from pvg.telemetry.spans import span
from pvg.training.batch import PolicyBatch
from pvg.training.forward import ForwardSettings, fitted, recompute_logprobs
from pvg.verifier.intervals import Estimate, Float64, percentile, ratio
from pvg.verifier.scorer import ScoringModel, VerifierScorer

if TYPE_CHECKING:
    from torch import Tensor

    from pvg.models.language_model import LowRankAdapter


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
    with directory.lock(work="evaluate"):
        ledger = Ledger(directory, training.experiment, context.code_version)
        try:
            for notice in ledger.notices:
                context.observer.noticed(notice)
            if elsewhere := ledger.record_machine(context.players.machine):
                context.observer.noticed(elsewhere)
            watcher = RenamingObserver(context.observer, phase=training.phase, unit=training.unit)
            session = session_of(
                training.experiment,
                context.task,
                ledger,
                context.players,
                context.prompts,
                watcher,
                context.stop,
                context.tracer,
                Session,
            )
            yield replace(session, evaluates=True)
        finally:
            ledger.close()


async def train(
    session: Session,
    training: PolicyTraining,
    verifier: ScoringModel | VerifierScorer,
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
    session: Session, steps: int, verifier: ScoringModel | VerifierScorer, threshold: float, rule: TrainingStop | None
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
        self._observer, self._names = observer, names
        self.progressed, self.round_finished = observer.progressed, observer.round_finished
        self.alerted, self.noticed = observer.alerted, observer.noticed

    def phase_started(self, info: PhaseInfo) -> None:
        self._observer.phase_started(replace(info, **self._names))

    def phase_finished(self, info: PhaseInfo, metrics: Mapping[str, float]) -> None:
        self._observer.phase_finished(replace(info, **self._names), metrics)


def probe_steps(total: int, probes: int, minibatches: int) -> tuple[int, ...]:
    """At most `probes` numbers of steps up to `total`, evenly spaced, none within a batch (except the last)."""
    steps: Sequence[int] = [round(total * (number + 1) / probes) for number in range(probes)]
    whole = {step // minibatches * minibatches for step in steps[:-1]}
    return tuple(sorted({step for step in whole if step > 0} | {total}))


# The legibility tax: accuracy that the game's prover loses against a prover rewarded only for correctness.


async def policy_totals(
    context: EvaluationContext,
    name: str,
    of: str,
    helpful: Sequence[Rollout],
    read: Callable[[], tuple[Mapping[str, Tensor], LowRankAdapter | None]] | None,
    *,
    shown: bool = False,
) -> PolicyTotals:
    """The accuracy of a policy and its KL to the base prover, from its `helpful` samples, whose digest is `of`.
    Computed once and stored. `read` returns the policy; None is the base prover itself, with KL 0. `shown`:
    as a phase of its own, because two forward passes of a larger model take minutes."""

    async def work() -> Any:
        info = PhaseInfo(0, context.experiment.game.rounds, "kl", "solutions", len(helpful))
        if shown:
            context.observer.phase_started(info)
        kl_N = (
            np.zeros(len(helpful))
            if read is None
            else await context.players.compute(lambda: _kl(context, helpful, *read()))
        )
        if shown:
            context.observer.phase_finished(info, {})
        return _by_problem(helpful, kl_N, context.test_problems())

    found = await context.unit(f"reach-{name}", digest("reach", of), work)
    return PolicyTotals(*(np.array(found[key], dtype=np.float64) for key in ("kl", "correct", "tokens", "solutions")))


def _kl(
    context: EvaluationContext,
    rollouts: Sequence[Rollout],
    tensors: Mapping[str, Tensor],
    adapter: LowRankAdapter | None,
) -> Any:
    """float64 [N]: sum over a solution's tokens of log pi - log start, in nats. Runs in the compute thread.

    In a dialogue only the tokens of the solution count. This is the KL between the distributions of solutions: it does
    not depend on the questions, and a change of the answers adds nothing. Correctness refers to the solution too.
    """
    import torch

    experiment, base = context.experiment, context.players.base
    batch = _batch(rollouts)
    training, _ = fitted(experiment.training, base.module, int(batch.lengths_N.max()))
    settings = ForwardSettings.of(training, experiment.rollout.temperature, base.tokenizer.pad_id)
    settings = replace(settings, precision="float32", router_replay=False)
    with base.copy(torch.float32) as policy:
        start = recompute_logprobs(policy.module, batch, settings)
        if adapter is not None:  # merged weights of 16 bits are rounded
            from pvg.models.adapters import with_adapter

            tensors = with_adapter(policy.weights(), adapter)
        policy.load_weights(tensors)
        own = recompute_logprobs(policy.module, batch, settings)
    return np.array([float(np.sum(p.astype(np.float64) - b)) for p, b in zip(own, start, strict=True)])


def _batch(rollouts: Sequence[Rollout]) -> PolicyBatch:
    """Rollouts as a batch for computing log-probs only."""
    rows = len(rollouts)
    return PolicyBatch(
        sequences=[np.concatenate([r.prompt_ids, r.completion_ids[: r.solution_tokens]]) for r in rollouts],
        prompt_lengths=np.array([len(r.prompt_ids) for r in rollouts], dtype=np.int32),
        sampled_logprobs=[r.logprobs[: r.solution_tokens] for r in rollouts],
        reference_logprobs=None,
        advantages_N=np.zeros(rows, dtype=np.float32),
        role_ids_N=np.array([r.role.number for r in rollouts], dtype=np.int8),
        group_ids_N=np.array([r.group for r in rollouts], dtype=np.int32),
        versions_N=np.array([r.version for r in rollouts], dtype=np.int32),
    )


def _by_problem(rollouts: Sequence[Rollout], kl_N: Any, pool: Sequence[Problem]) -> dict[str, list[float]]:
    places = {problem.id: place for place, problem in enumerate(pool)}
    problems_N = np.array([places[r.problem_id] for r in rollouts])
    columns = {
        "kl": kl_N,
        "correct": np.array([float(r.grade.correct) for r in rollouts]),
        "tokens": np.array([float(r.solution_tokens) for r in rollouts]),
        "solutions": np.ones(len(rollouts)),
    }
    return {
        key: [float(v) for v in np.bincount(problems_N, weights=values, minlength=len(pool))]
        for key, values in columns.items()
    }


# --- the tax ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PolicyTotals:
    """A policy's results in the helpful role, summed by test problem [P]: KL in nats, correct solutions, tokens and
    solutions. All policies of one comparison have the same problems in the same order."""

    kl_P: Float64
    correct_P: Float64
    tokens_P: Float64
    solutions_P: Float64

    def kl(self, weights_P: Float64) -> float:
        return float(weights_P @ self.kl_P / (weights_P @ self.solutions_P))

    def accuracy(self, weights_P: Float64) -> float:
        return float(weights_P @ self.correct_P / (weights_P @ self.solutions_P))


def accuracy_at(kl: float, kls_K: Float64, accuracies_K: Float64) -> float:
    """The accuracy at `kl`, interpolated between K points sorted by KL (points with equal KL are averaged). Above their
    range it is that of the largest KL, and below it NaN: there is no extrapolation."""
    levels, place_K = np.unique(kls_K, return_inverse=True)
    means = np.bincount(place_K, weights=accuracies_K) / np.bincount(place_K)
    if kl < levels[0]:
        return math.nan
    return float(np.interp(kl, levels, means))


def tax(policy: PolicyTotals, baseline: list[PolicyTotals], weights_BP: Float64) -> Estimate:
    """The baseline's accuracy at the policy's KL (`accuracy_at`) minus the policy's. Positive: the game costs accuracy.

    The bootstrap resamples problems for all policies together, because they solved the same ones. A resample in which
    the policy's KL is below the baseline's range has no value; with many of those there is no interval."""
    problems = len(policy.kl_P)

    def once(weights_P: Float64) -> float:
        kls_K = np.array([probe.kl(weights_P) for probe in baseline])
        accuracies_K = np.array([probe.accuracy(weights_P) for probe in baseline])
        return accuracy_at(policy.kl(weights_P), kls_K, accuracies_K) - policy.accuracy(weights_P)

    replicates_B = np.array([once(weights_P) for weights_P in weights_BP])
    return percentile(once(np.ones(problems)), replicates_B, int(policy.solutions_P.sum()), problems)


# --- the baseline -----------------------------------------------------------------------------------------------------

UNIT = "baseline"
DIVERGED = "diverged"  # in the stored result of a training: why it diverged


@dataclass(frozen=True)
class CorrectnessBaseline:
    """The baseline's probes by name (the start first), and a digest of all of it."""

    points: list[tuple[str, PolicyTotals]]
    digest: str


def distance(name: str, found: PolicyTotals, weights_BP: Float64) -> dict[str, Any]:
    """A policy's KL and accuracy with their intervals (pvg.evaluation.report.PolicyDistance)."""
    n, tokens = int(found.solutions_P.sum()), int(found.tokens_P.sum())
    return {
        "name": name,
        "kl": ratio(found.kl_P, found.solutions_P, weights_BP, n),
        "kl_per_token": ratio(found.kl_P, found.tokens_P, weights_BP, tokens),
        "accuracy": ratio(found.correct_P, found.solutions_P, weights_BP, n),
    }


async def baseline_of(context: EvaluationContext, start: SampleSet) -> CorrectnessBaseline:
    """The baseline's probes. Trains, samples and measures what is missing. `start`: the base prover's samples.

    Raises TrainingDivergedError if the training of the baseline diverges, or has diverged in an earlier call."""
    marks = [digest_of(context, start)]
    helpful = [r for r in await sampled(context, start) if r.role is Role.HELPFUL]
    points = [(BASE_SOURCE, await policy_totals(context, BASE_SOURCE, marks[0], helpful, None))]
    experiment = baseline_experiment(context.experiment)
    steps, probes = experiment.training.steps, context.experiment.evaluate.baseline_probes
    saved_steps = probe_steps(steps, probes, experiment.training.minibatches)
    training = PolicyTraining(
        place=UNIT,
        digest=digest(UNIT, context.config, steps, saved_steps, context.ledger.players_of(0)),
        experiment=experiment,
        round=0,
        phase=UNIT,
        unit="steps",
        versions=BASELINE_RANGE,
        saved_steps=saved_steps,
    )
    stored = await context.unit(UNIT, training.digest, partial(_train_baseline, context, training))
    if DIVERGED in stored:
        raise TrainingDivergedError(stored[DIVERGED])
    size, pool = context.experiment.evaluate.samples, context.test_problems()
    for place, steps in enumerate(saved_steps):
        load = partial(training.publish, context, steps, first_version(BASELINE_RANGE + 1 + place))
        policy = digest(training.digest, steps)
        wanted = SampleSet(f"{UNIT}-{steps:06d}", 0, pool, (Role.HELPFUL,), size, policy, load)
        rollouts = await sampled(context, wanted)
        marks.append(digest_of(context, wanted))
        read = partial(training.read, context, steps)
        totals = await policy_totals(context, wanted.name, marks[-1], rollouts, read, shown=True)
        points.append((f"step {steps}", totals))
    return CorrectnessBaseline(points, digest("baseline", marks))


def baseline_experiment(experiment: Experiment) -> Experiment:
    """The settings of the baseline, which learns for as many steps as the prover of the last round. Raises
    ConfigurationError."""
    rounds = experiment.game.rounds if experiment.game.start == "previous" else 1
    steps = {"steps": max(1, rounds * experiment.training.steps)}
    return policy_experiment(experiment, "helpful", CorrectnessReward(), steps, UNIT)


async def _train_baseline(context: EvaluationContext, training: PolicyTraining) -> list[int] | dict[str, str]:
    """The result to store: the steps of the saved policies, or why the training diverged."""
    with open_frozen_verifier(context, 0) as frozen:  # scores are stored, but the reward ignores them
        verifier = await frozen.verifier()
        with training_session(context, training) as session:
            try:
                await train(session, training, verifier, (await frozen.facts())["threshold"])
            except TrainingDivergedError as error:
                return {DIVERGED: str(error)}
    return list(training.saved_steps)
