"""How far a policy is from its start, and how often it is right: what the legibility tax compares."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from pvg.config.experiment import Experiment
from pvg.config.sections import PlainReward
from pvg.errors import UsageError
from pvg.evaluation.intervals import Estimate, Float64, percentile, ratio
from pvg.evaluation.opened_run import BASELINE_RANGE, MOST_PROBES, Reading, Study, digest, first_version, judged
from pvg.evaluation.opponents import course_experiment
from pvg.evaluation.samples import SampleSet, digest_of, sampled
from pvg.evaluation.training import Course, opened, policy_name, probe_steps, train
from pvg.game.prover_phase import Written, read_policy
from pvg.records import BASE_SOURCE, Problem, Role, Rollout, source_of_round
from pvg.store.run_directory import RunDirectory
from pvg.telemetry.observer import PhaseInfo
from pvg.training.batch import PolicyBatch
from pvg.training.forward import ForwardSettings, recompute_logprobs

if TYPE_CHECKING:
    from torch import Tensor

    from pvg.servers.update import Adapter


def has_reach(study: Study, name: str, of: str) -> bool:
    """Whether `reach` has nothing to compute."""
    return study.units.read(f"reach-{name}", digest("reach", of)) is not None


async def reach(
    study: Study,
    name: str,
    of: str,
    helpful: Sequence[Rollout],
    pool: Sequence[Problem],
    read: Callable[[], Mapping[str, Tensor]] | None,
) -> Reach:
    """The reach of the policy whose weights `read` gives (None: the start itself, whose KL is 0) by its `helpful`
    samples, whose digest is `of`. Log-probs are computed once."""
    for_ = digest("reach", of)
    found = study.units.read(f"reach-{name}", for_)
    if found is None:
        study.begin(f"reach-{name}")
        kl_N = (
            np.zeros(len(helpful)) if read is None else await study.players.compute(lambda: _kl(study, helpful, read()))
        )
        found = _by_problem(helpful, kl_N, pool)
        study.units.write(f"reach-{name}", for_, found)
    return Reach(*(np.array(found[key], dtype=np.float64) for key in ("kl", "correct", "tokens", "solutions")))


def _kl(study: Study, rollouts: Sequence[Rollout], tensors: Mapping[str, Tensor]) -> Any:
    """float64 [N]: sum over a solution's tokens of log pi - log start, in nats. In the compute thread.

    Of a dialogue those of the solution alone: that is the KL between the distributions of solutions, it does not depend
    on who asks, and being right is of the solution. What drifts in the answers would be added to it.
    """
    experiment, base = study.experiment, study.players.base
    settings = ForwardSettings.of(experiment.training, experiment.rollout.temperature, base.tokenizer.pad_id)
    settings = replace(settings, precision="float32", router_replay=False)
    batch = _batch(rollouts)
    with base.copy() as policy:
        policy.load_weights(tensors)
        own = recompute_logprobs(policy.module, batch, settings)
    start = recompute_logprobs(base.module, batch, settings)
    return np.array([float(np.sum(p.astype(np.float64) - b)) for p, b in zip(own, start, strict=True)])


def _batch(rollouts: Sequence[Rollout]) -> PolicyBatch:
    """Rollouts as a batch that nothing is learnt from."""
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


# The legibility tax: accuracy that the game's prover lacks against a prover paid for correctness alone, at the same
# KL to the start (Kirchner et al. 2024, arXiv 2407.13692).
#
# KL(policy || start) in nats, estimated on the policy's own samples as the mean over completions of sum_t [log
# pi(z_t) - log start(z_t)]: unbiased where solutions are sampled from the whole distribution (rollout.top_p = 1,
# top_k = 0). Both log-probs are computed at the sampling temperature.
#
# The baseline's accuracy at the game prover's KL is interpolated on the line through its probes in the order of their
# KL; outside of the range that the probes cover there is no tax, and the sides are told.


@dataclass(frozen=True, slots=True)
class Reach:
    """What a policy did with its helpful role, summed by test problem [P]: KL in nats, correct solutions, tokens and
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
    """The accuracy at `kl` on the line through K points sorted by their KL (of points with one KL the mean); NaN where
    `kl` lies outside of them: nothing is extrapolated."""
    levels, place_K = np.unique(kls_K, return_inverse=True)
    means = np.bincount(place_K, weights=accuracies_K) / np.bincount(place_K)
    if not levels[0] <= kl <= levels[-1]:
        return math.nan
    return float(np.interp(kl, levels, means))


def tax(policy: Reach, baseline: list[Reach], weights_BP: Float64, confidence: float) -> Estimate:
    """The baseline's accuracy at the policy's KL, less the policy's: positive where the game costs accuracy.

    The bootstrap draws problems for all policies together, for they solved the same ones. A resample in which the
    policy's KL lies outside of the baseline's has no value; with many of those there is no interval."""
    problems = len(policy.kl_P)

    def once(weights_P: Float64) -> float:
        kls_K = np.array([probe.kl(weights_P) for probe in baseline])
        accuracies_K = np.array([probe.accuracy(weights_P) for probe in baseline])
        return accuracy_at(policy.kl(weights_P), kls_K, accuracies_K) - policy.accuracy(weights_P)

    replicates_B = np.array([once(weights_P) for weights_P in weights_BP])
    return percentile(once(np.ones(problems)), replicates_B, confidence, int(policy.solutions_P.sum()), problems)


# The correctness baseline: a prover paid for correct answers alone, probed along its training.
#
# It comes from another run (`--baseline RUN`, a game with game.reward = "correctness": one probe per round), or is
# trained here: helpful role only, the run's own training settings, `evaluate.baseline_probes` probes.

UNIT = "baseline"
TRAINED = "trained"
CHOICE = "baseline-choice"


@dataclass(frozen=True)
class Baseline:
    """Where it comes from, its probes by name (the start first), and a digest of all of it."""

    source: str
    points: list[tuple[str, Reach]]
    digest: str


def distance(name: str, found: Reach, weights_BP: Float64, confidence: float) -> dict[str, Any]:
    """A policy's KL and accuracy with their intervals (pvg.evaluation.report.Distance)."""
    n, tokens = int(found.solutions_P.sum()), int(found.tokens_P.sum())
    return {
        "name": name,
        "kl": ratio(found.kl_P, found.solutions_P, weights_BP, confidence, n).plain(),
        "kl_per_token": ratio(found.kl_P, found.tokens_P, weights_BP, confidence, tokens).plain(),
        "accuracy": ratio(found.correct_P, found.solutions_P, weights_BP, confidence, n).plain(),
    }


def remember(study: Study, run: RunDirectory | None) -> None:
    """Which baseline was asked for, so that a later call without the tax still finds it."""
    path = None if run is None else str(run.path.resolve())
    if not study.units.exists(CHOICE) or study.units.read(CHOICE, digest(CHOICE)) != path:
        study.units.write(CHOICE, digest(CHOICE), path)


def choice(study: Study) -> str | None:
    """The path of the run that was asked for; None: none, or one trained here."""
    path: str | None = study.units.read(CHOICE, digest(CHOICE))
    return path


def remembered(study: Study) -> RunDirectory | None:
    """The run of `choice`. Raises UsageError where it is no longer there."""
    path = choice(study)
    return None if path is None else RunDirectory.open(path, study.folder)


async def baseline_of(
    study: Study, start: SampleSet, run: RunDirectory | None, of_start: Callable[[], Awaitable[list[Rollout]]]
) -> Baseline:
    """The baseline's probes, sampled and measured where they are not there yet. `start` are the untrained prover's
    samples, which `of_start` gives."""
    base_digest = digest_of(study, start)
    helpful = [r for r in await of_start() if r.role is Role.HELPFUL]
    origin = await reach(study, BASE_SOURCE, base_digest, helpful, study.test_problems(), None)
    points = [(BASE_SOURCE, origin)]
    probes = await _trained(study) if run is None else _of_run(study, run)
    for place, probe in enumerate(probes):
        rollouts = await sampled(
            study, probe.samples, partial(_load, study, probe, first_version(BASELINE_RANGE + 1 + place))
        )
        points.append((probe.label, await _reach(study, probe, rollouts)))
    marks = [base_digest, *(digest_of(study, probe.samples) for probe in probes)]
    return Baseline(TRAINED if run is None else run.name, points, digest("baseline", marks))


@dataclass(frozen=True)
class Probe:
    """One policy of the baseline: how the report calls it, what it samples, and how its weights are read."""

    label: str
    samples: SampleSet
    read: Callable[[], tuple[Mapping[str, Tensor], Adapter | None]]

    def tensors(self) -> Mapping[str, Tensor]:
        return self.read()[0]


async def _reach(study: Study, probe: Probe, rollouts: list[Rollout]) -> Reach:
    """Two forward passes over all of them: minutes with a larger model, so whoever watches is told."""
    of = digest_of(study, probe.samples)
    info = PhaseInfo(0, study.experiment.game.rounds, "kl", "solutions", len(rollouts))
    if computed := not has_reach(study, probe.samples.name, of):
        study.begin(f"reach-{probe.samples.name}")
        study.observer.phase_started(info)
    found = await reach(study, probe.samples.name, of, rollouts, study.test_problems(), probe.tensors)
    if computed:
        study.observer.phase_finished(info, {})
    return found


async def _load(study: Study, probe: Probe, version: int) -> None:
    tensors, adapter = await study.players.compute(probe.read)
    await study.players.publish(tensors, version, adapter)


def _samples(study: Study, name: str, policy: str) -> SampleSet:
    return SampleSet(name, 0, study.test_problems(), (Role.HELPFUL,), study.experiment.evaluate.samples, policy)


# --- trained here ------------------------------------------------------------------------------------------------


def _steps(experiment: Experiment) -> int:
    return experiment.evaluate.baseline_steps or max(1, experiment.training.steps)


def baseline_experiment(experiment: Experiment) -> Experiment:
    """The settings of a baseline that is trained here. Raises ConfigurationError."""
    return course_experiment(
        experiment, "helpful", PlainReward(kind="correctness"), {"steps": _steps(experiment)}, UNIT
    )


def _course(study: Study) -> Course:
    section, steps = study.experiment.evaluate, _steps(study.experiment)
    kept = probe_steps(steps, section.baseline_probes, study.experiment.training.minibatches)
    return Course(
        place=UNIT,
        digest=digest(UNIT, study.config, steps, kept, study.ledger.players_of(0)),
        experiment=baseline_experiment(study.experiment),
        round=0,
        phase=UNIT,
        unit="steps",
        versions=BASELINE_RANGE,
        kept=kept,
    )


async def _trained(study: Study) -> list[Probe]:
    course = _course(study)
    if study.units.read(UNIT, course.digest) is None:
        study.begin(UNIT)
        with judged(study, 0) as judge:  # its scores are recorded beside the rollouts; the reward does not read them
            verifier = await judge.verifier()
            with opened(study, course) as session:
                await train(session, course, verifier, (await judge.facts())["threshold"])
        study.units.write(UNIT, course.digest, list(course.kept))

    def read(steps: int) -> tuple[Mapping[str, Tensor], Adapter | None]:
        return read_policy(course.written(study), policy_name(steps))

    return [
        Probe(
            f"step {steps}",
            _samples(study, f"{UNIT}-{steps:06d}", digest(course.digest, steps)),
            partial(read, steps),
        )
        for steps in course.kept
    ]


# --- from another run --------------------------------------------------------------------------------------------

# What both runs must share for their KL and their accuracy to be comparable.
SHARED = ("task", "models.prover", "rollout.prompts", "rollout.temperature", "rollout.top_p", "rollout.top_k")


def check_comparable(study: Study, run: RunDirectory) -> Reading:
    """Raises UsageError for a run that is no correctness baseline of this one."""
    mine, theirs = study.experiment, run.experiment()
    if theirs.game.reward.kind != "correctness":
        raise UsageError(
            f"{run.name!r} is no baseline: its game.reward is {theirs.game.reward.kind!r}, not 'correctness'.",
            "Play one with -s game.reward=correctness -s game.sneaky_share=0, or leave --baseline out to train one.",
        )
    differing = [key for key in (*SHARED, "rollout.max_tokens") if _value(mine, key) != _value(theirs, key)]
    if differing:
        raise UsageError(
            f"{run.name!r} is no baseline of this run: {', '.join(differing)} differ.",
            "Give a run with the same values, or leave --baseline out to train one.",
        )
    reading = Reading.open(run)
    if not reading.rounds:
        raise UsageError(f"The baseline {run.name!r} has no finished round.", "Play it on, or leave --baseline out.")
    return reading


def _value(experiment: Any, key: str) -> Any:
    for part in key.split("."):
        experiment = getattr(experiment, part)
    return experiment


def _of_run(study: Study, run: RunDirectory) -> list[Probe]:
    reading: Written = (found := check_comparable(study, run))
    return [
        Probe(
            f"{run.name} {source_of_round(round_)}",
            _samples(study, f"{UNIT}-{run.name}-{source_of_round(round_)}", found.players_of(round_)),
            partial(read_policy, reading, f"{source_of_round(round_)}-prover"),
        )
        for round_ in range(found.rounds)[-MOST_PROBES:]
    ]
