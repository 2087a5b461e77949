"""What a run measured: the planner's inputs from its records, and the figures to compare a prediction with."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pvg.config.experiment import Experiment
from pvg.config.rollout import TorchSampling
from pvg.errors import UsageError
from pvg.planning.inputs import Inputs, PlanInput, workers_of
from pvg.planning.simulation import simulate
from pvg.planning.world import World
from pvg.records import Role
from pvg.reporting.run_summary import RunSummary, StepRecord, read_run
from pvg.store.run_directory import RunDirectory
from pvg.store.shards import RolloutShards, ShardInfo
from pvg.telemetry.spans import trained_seconds

PHASE = "train_prover"
# Parts of a step's budget in which rollouts are sampled, or the trainer waits for them.
SAMPLING_PARTS = ("rollout", "wait_for_rollouts", "prefill", "decode", "generate", "grade", "queue")
DECODING_PARTS = ("prefill", "decode", "grade")
LEAST_S = 1e-9
LEAST = 3  # batches
MOST_ROLLOUTS = 20_000  # of the newest shards


@dataclass(frozen=True, slots=True)
class RunFigures:
    """Means over the counted batches of a run. `dropped`: rollouts dropped as too stale per rollout sampled."""

    batches: int
    batch_s: float
    idle: float
    staleness: float
    dropped: float


def measured_in(run: RunDirectory) -> tuple[Inputs, RunFigures]:
    """Lengths of completions and times from the run's prover phases. Raises UsageError if it has too few batches."""
    summary = read_run(run)
    batches = _batches(summary)
    if len(batches) < LEAST:
        raise UsageError(
            f"The run {run.name!r} has {len(batches)} batches of prover training after the first; {LEAST} are needed.",
            "Let it train longer, or plan without --from.",
        )
    experiment, source = run.experiment(), f"measured in {run.name}"
    inputs = Inputs()
    tokens = sum(b[0].metrics["rollouts"] * b[0].metrics["completion_tokens"] for b in batches)
    trained = [sum(trained_seconds(step.budget) for step in batch) for batch in batches]
    sync = [sum(step.budget.get("sync", 0.0) for step in batch) for batch in batches]
    sampling = [sum(step.budget.get(part, 0.0) for step in batch for part in SAMPLING_PARTS) for batch in batches]
    walls = [sum(sum(step.budget.values()) for step in batch) for batch in batches]
    inputs.values["train_token_s"] = PlanInput(sum(trained) / tokens, source)
    inputs.values["update_s"] = PlanInput(float(np.mean(sync)), source)
    inputs.values["pause_s"] = _pause(experiment, batches, float(np.mean(sync)), run.name)
    inputs.values["other_s"] = PlanInput(
        max(0.0, sum(walls) - sum(trained) - sum(sync) - sum(sampling)) / len(batches), source
    )
    _sampling_inputs(run, inputs, source)
    if isinstance(experiment.rollout.engine, TorchSampling) and inputs.lengths:
        # The engine shares its thread with the trainer, so the seconds of a request include other work.
        decoding = [sum(step.busy.get(part, 0.0) for step in batch for part in DECODING_PARTS) for batch in batches]
        inputs.values["token_s"] = PlanInput(_decoding_s(experiment, inputs, float(np.mean(decoding))), source)
        inputs.values["request_s"] = PlanInput(0.0, source)
    lost = sum(b[0].metrics.get("dropped_stale", 0.0) for b in batches)
    kept = sum(b[0].metrics["rollouts"] for b in batches)
    measured = RunFigures(
        len(batches),
        float(np.mean(walls)),
        1.0 - sum(trained) / sum(walls),
        float(np.mean([b[0].metrics.get("staleness", 0.0) for b in batches])),
        lost / (lost + kept),
    )
    return inputs, measured


def _pause(experiment: Experiment, batches: list[list[StepRecord]], update_s: float, run: str) -> PlanInput:
    """The mean time in which the slowest engine works on an update. The rest of an update writes, sends and waits."""
    if experiment.weights.transport.kind == "lora":
        return PlanInput(0.0, "adapters pause nothing")
    metrics = [step.metrics for batch in batches for step in batch if "weights_wall_s" in step.metrics]
    if not metrics:
        return PlanInput(update_s, f"at most: the update in {run}")
    worked_s = float(np.mean([found["weights_wall_s"] - found["weights_queue_s"] for found in metrics]))
    return PlanInput(min(worked_s, update_s), f"measured in {run}")


def _decoding_s(experiment: Experiment, inputs: Inputs, batch_s: float) -> float:
    """Seconds of a decoding step with which the model samples a batch in `batch_s` seconds."""
    rollout, training = experiment.rollout, experiment.training
    workers, slots = workers_of(experiment)
    unit = World(
        training.groups,
        rollout.group_size,
        inputs.lengths,
        workers,
        slots,
        rollout.concurrency,
        1.0,
        0.0,
        experiment.game.sneaky_share,
    )
    return max(LEAST_S, batch_s / simulate(unit).batch_s)


def _batches(summary: RunSummary) -> list[list[StepRecord]]:
    """The prover's steps by batch. The first step of a batch has its metrics."""
    batches: list[list[StepRecord]] = []
    warm_up: set[int] = set()
    for step in summary.steps:
        if step.phase != PHASE:
            continue
        if "rollouts" in step.metrics:
            batches.append([step])
            if step.round not in warm_up:
                warm_up.add(step.round)
                batches[-1].clear()
        elif batches and batches[-1]:
            batches[-1].append(step)
    return [batch for batch in batches if batch]


def _sampling_inputs(run: RunDirectory, inputs: Inputs, source: str) -> None:
    """Lengths by role, and the time of a request: least squares of seconds by tokens."""
    state = run.load_state().state or {}
    shards, infos = RolloutShards(run.path), [ShardInfo.from_plain(plain) for plain in state.get("shards", ())]
    lengths: dict[Role, list[NDArray[np.int64]]] = {role: [] for role in Role}
    tokens, seconds, prompts, count = [], [], [], 0
    for info in reversed([info for info in infos if PHASE in info.label]):
        batch = shards.map(info)
        tokens_N = batch.column("completion_ids").value_lengths().to_numpy().astype(np.int64)
        roles = np.array(batch.column("role").to_pylist())
        for role in Role:
            lengths[role].append(np.maximum(1, tokens_N[roles == role.value]))
        tokens.append(tokens_N)
        seconds.append(batch.column("service_s").to_numpy())
        prompts.append(batch.column("prompt_ids").value_lengths().to_numpy())
        count += len(tokens_N)
        if count >= MOST_ROLLOUTS:
            break
    if not count:
        return
    tokens_N, seconds_N = np.concatenate(tokens), np.concatenate(seconds)
    inputs.lengths = {role: np.concatenate(found) for role, found in lengths.items() if sum(map(len, found))}
    for role in Role:  # a run with one role
        inputs.lengths.setdefault(role, next(iter(inputs.lengths.values())))
    inputs.values["mean_tokens"] = PlanInput(float(tokens_N.mean()), source)
    inputs.values["sigma"] = PlanInput(float(np.log(np.maximum(1, tokens_N)).std()), source)
    inputs.values["prompt_tokens"] = PlanInput(float(np.concatenate(prompts).mean()), source)
    if seconds_N.sum() > 0:
        spread = float(tokens_N.var())
        slope = float(np.cov(tokens_N, seconds_N, bias=True)[0, 1] / spread) if spread else 0.0
        if slope <= 0:
            slope = float(seconds_N.sum() / tokens_N.sum())
        inputs.values["token_s"] = PlanInput(slope, source)
        inputs.values["row_s"] = PlanInput(0.0, source)
        inputs.values["request_s"] = PlanInput(max(0.0, float(seconds_N.mean() - slope * tokens_N.mean())), source)
