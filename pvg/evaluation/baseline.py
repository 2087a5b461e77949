"""The legibility tax: accuracy that the game's prover loses against a prover rewarded only for correctness.

The two are compared at the same KL to the start (Kirchner et al. 2024, arXiv 2407.13692). KL(policy || start) in nats
is estimated on the policy's samples as the mean over completions of sum_t [log pi(z_t) - log start(z_t)]. This is
unbiased if solutions are sampled from the whole distribution (rollout.top_p = 1, top_k = 0). Both log-probs are
computed at the sampling temperature. The baseline's accuracy at the game prover's KL is interpolated between its
probes, sorted by KL. A game prover with a larger KL than all probes is compared with the probe of the largest KL. Then
the tax is a lower bound, if the baseline's accuracy does not fall with more KL.

The baseline is trained here: only the helpful role, with the run's training settings and `evaluate.baseline_probes`
probes.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from pvg.config.experiment import Experiment
from pvg.config.game import PlainReward
from pvg.errors import TrainingDivergedError
from pvg.evaluation.intervals import Estimate, Float64, percentile, ratio
from pvg.evaluation.opened_run import (
    BASELINE_RANGE,
    EvaluationContext,
    digest,
    first_version,
    open_frozen_verifier,
)
from pvg.evaluation.opponents import policy_experiment
from pvg.evaluation.samples import SampleSet, digest_of, sampled
from pvg.evaluation.training import PolicyTraining, probe_steps, train, training_session
from pvg.records import BASE_SOURCE, Problem, Role, Rollout
from pvg.telemetry.events import PhaseInfo
from pvg.training.batch import PolicyBatch
from pvg.training.forward import ForwardSettings, recompute_logprobs

if TYPE_CHECKING:
    from torch import Tensor


async def policy_totals(
    context: EvaluationContext,
    name: str,
    of: str,
    helpful: Sequence[Rollout],
    read: Callable[[], Mapping[str, Tensor]] | None,
    *,
    shown: bool = False,
) -> PolicyTotals:
    """The accuracy of a policy and its KL to the base prover, from its `helpful` samples, whose digest is `of`.
    Computed once and stored. `read` returns the policy's weights; None is the base prover itself, with KL 0. `shown`:
    as a phase of its own, because two forward passes of a larger model take minutes."""
    for_ = digest("reach", of)
    found = context.units.read(f"reach-{name}", for_)
    if found is None:
        context.begin(f"reach-{name}")
        info = PhaseInfo(0, context.experiment.game.rounds, "kl", "solutions", len(helpful))
        if shown:
            context.observer.phase_started(info)
        kl_N = (
            np.zeros(len(helpful))
            if read is None
            else await context.players.compute(lambda: _kl(context, helpful, read()))
        )
        if shown:
            context.observer.phase_finished(info, {})
        found = _by_problem(helpful, kl_N, context.test_problems())
        context.units.write(f"reach-{name}", for_, found)
    return PolicyTotals(*(np.array(found[key], dtype=np.float64) for key in ("kl", "correct", "tokens", "solutions")))


def _kl(context: EvaluationContext, rollouts: Sequence[Rollout], tensors: Mapping[str, Tensor]) -> Any:
    """float64 [N]: sum over a solution's tokens of log pi - log start, in nats. Runs in the compute thread.

    In a dialogue only the tokens of the solution count. This is the KL between the distributions of solutions: it does
    not depend on the questions, and a change of the answers adds nothing. Correctness refers to the solution too.
    """
    experiment, base = context.experiment, context.players.base
    settings = ForwardSettings.of(experiment.training, experiment.rollout.temperature, base.tokenizer.pad_id)
    settings = replace(settings, precision="float32", router_replay=False)
    batch = _batch(rollouts)
    with base.copy() as policy:
        policy.load_weights(tensors)
        own = recompute_logprobs(policy.module, batch, settings)
    start = recompute_logprobs(base.module, batch, settings)
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


def tax(policy: PolicyTotals, baseline: list[PolicyTotals], weights_BP: Float64, confidence: float) -> Estimate:
    """The baseline's accuracy at the policy's KL (`accuracy_at`) minus the policy's. Positive: the game costs accuracy.

    The bootstrap resamples problems for all policies together, because they solved the same ones. A resample in which
    the policy's KL is below the baseline's range has no value; with many of those there is no interval."""
    problems = len(policy.kl_P)

    def once(weights_P: Float64) -> float:
        kls_K = np.array([probe.kl(weights_P) for probe in baseline])
        accuracies_K = np.array([probe.accuracy(weights_P) for probe in baseline])
        return accuracy_at(policy.kl(weights_P), kls_K, accuracies_K) - policy.accuracy(weights_P)

    replicates_B = np.array([once(weights_P) for weights_P in weights_BP])
    return percentile(once(np.ones(problems)), replicates_B, confidence, int(policy.solutions_P.sum()), problems)


# --- the baseline -----------------------------------------------------------------------------------------------------

UNIT = "baseline"
DIVERGED = "diverged"  # in the stored result of a training: why it diverged


@dataclass(frozen=True)
class CorrectnessBaseline:
    """The baseline's probes by name (the start first), and a digest of all of it."""

    points: list[tuple[str, PolicyTotals]]
    digest: str


def distance(name: str, found: PolicyTotals, weights_BP: Float64, confidence: float) -> dict[str, Any]:
    """A policy's KL and accuracy with their intervals (pvg.evaluation.report.PolicyDistance)."""
    n, tokens = int(found.solutions_P.sum()), int(found.tokens_P.sum())
    return {
        "name": name,
        "kl": ratio(found.kl_P, found.solutions_P, weights_BP, confidence, n).plain(),
        "kl_per_token": ratio(found.kl_P, found.tokens_P, weights_BP, confidence, tokens).plain(),
        "accuracy": ratio(found.correct_P, found.solutions_P, weights_BP, confidence, n).plain(),
    }


async def baseline_of(
    context: EvaluationContext, start: SampleSet, of_start: Callable[[], Awaitable[list[Rollout]]]
) -> CorrectnessBaseline:
    """The baseline's probes. Trains, samples and measures what is missing. `start`: the base prover's samples, which
    `of_start` returns. Raises TrainingDivergedError if the training of the baseline diverges, or has diverged in an
    earlier call."""
    marks = [digest_of(context, start)]
    helpful = [r for r in await of_start() if r.role is Role.HELPFUL]
    points = [(BASE_SOURCE, await policy_totals(context, BASE_SOURCE, marks[0], helpful, None))]
    training = _baseline_training(context)
    await _trained(context, training)
    size, pool = context.experiment.evaluate.samples, context.test_problems()
    for place, steps in enumerate(training.saved_steps):
        wanted = SampleSet(f"{UNIT}-{steps:06d}", 0, pool, (Role.HELPFUL,), size, digest(training.digest, steps))
        version = first_version(BASELINE_RANGE + 1 + place)
        rollouts = await sampled(context, wanted, partial(training.publish, context, steps, version))
        marks.append(digest_of(context, wanted))
        read = partial(training.tensors, context, steps)
        totals = await policy_totals(context, wanted.name, marks[-1], rollouts, read, shown=True)
        points.append((f"step {steps}", totals))
    return CorrectnessBaseline(points, digest("baseline", marks))


def _steps(experiment: Experiment) -> int:
    """As many as the prover of the last round has learned for."""
    rounds = experiment.game.rounds if experiment.game.start.kind == "previous" else 1
    return max(1, rounds * experiment.training.steps)


def baseline_experiment(experiment: Experiment) -> Experiment:
    """The settings of a baseline trained here. Raises ConfigurationError."""
    return policy_experiment(
        experiment, "helpful", PlainReward(kind="correctness"), {"steps": _steps(experiment)}, UNIT
    )


def _baseline_training(context: EvaluationContext) -> PolicyTraining:
    section, steps = context.experiment.evaluate, _steps(context.experiment)
    saved_steps = probe_steps(steps, section.baseline_probes, context.experiment.training.minibatches)
    return PolicyTraining(
        place=UNIT,
        digest=digest(UNIT, context.config, steps, saved_steps, context.ledger.players_of(0)),
        experiment=baseline_experiment(context.experiment),
        round=0,
        phase=UNIT,
        unit="steps",
        versions=BASELINE_RANGE,
        saved_steps=saved_steps,
    )


async def _trained(context: EvaluationContext, training: PolicyTraining) -> None:
    stored: Any = context.units.read(UNIT, training.digest)
    if stored is None:
        context.begin(UNIT)
        stored = await _train_baseline(context, training)
        context.units.write(UNIT, training.digest, stored)
    if DIVERGED in stored:
        raise TrainingDivergedError(stored[DIVERGED])


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
