"""Inputs of workloads: groups of fixed prompts, batches of rollouts, and batches of a recorded run.

Everything follows from the experiment and a seed, so every sample and every variant does the same work. A replay reads
only committed shards, and only those that contain a chosen batch. It changes nothing, so an active run can be replayed
too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pvg.config.experiment import Experiment
from pvg.errors import ConfigurationError, StateError, UsageError
from pvg.game.roles import Render, assign_roles
from pvg.models.language_model import LanguageModel
from pvg.records import Float32, Int32, Rollout
from pvg.rollout.dispatcher import GroupOrder
from pvg.seeds import draw_cyclic, generator_for, seed_for
from pvg.store.journal import read_json_lines
from pvg.store.run_directory import RunDirectory
from pvg.store.shards import RolloutShards, ShardInfo
from pvg.store.state import FileStateStore
from pvg.tasks.task import Task, problems_of_half
from pvg.telemetry.spans import trained_seconds
from pvg.training.batch import PolicyBatch
from pvg.training.credit import advantages, baseline_advantages, tracked_advantages
from pvg.training.losses import policy_loss

# --- batches of a recorded run ----------------------------------------------------------------------------------------

PHASE = "train_prover"

Place = tuple[int, int]  # round, and the batch's number in the prover phase of that round


@dataclass(frozen=True, slots=True)
class RecordedBatch:
    """The rollouts of one on-policy batch in training order, each with its reward."""

    round: int
    number: int
    rollouts: tuple[Rollout, ...]

    @property
    def place(self) -> str:
        return f"{self.round}/{self.number}"


def recorded_batches(run: RunDirectory, most: int) -> list[RecordedBatch]:
    """At most `most` batches of prover training, evenly spread over the committed ones, in their order.

    Raises UsageError if there are none, DamagedFileError if a shard differs from what was committed.
    """
    shards = RolloutShards(run.path)
    places: dict[Place, list[ShardInfo]] = {}
    for info in prover_shards(run):
        steps = shards.map(info).column("step").to_numpy()
        for number in np.unique(steps).tolist():
            places.setdefault((info.round, number), []).append(info)
    batches = []
    for place in _spread(sorted(places), most):
        rollouts = [r for info in places[place] for r in shards.read(info) if r.step == place[1]]
        batches.append(RecordedBatch(*place, tuple(rollouts)))
    return batches


def train_seconds(run: RunDirectory, batches: Sequence[RecordedBatch]) -> list[float]:
    """Seconds of the trainer's work on each batch: all optimizer steps on it, without waiting.

    Raises UsageError if the run's metrics lack a step.
    """
    minibatches = run.experiment().training.minibatches
    if not run.metrics.is_file():
        raise UsageError(
            f"The run {run.name!r} has no {run.metrics.name}, which has the times of its trainer.",
            "Replay another run.",
        )
    worked: dict[Place, float] = {}
    for record in read_json_lines(run.metrics):
        if record.get("kind") == "step" and record.get("phase") == PHASE:
            worked[record["round"], record["step"]] = _trainer_seconds(record)
    found = []
    for batch in batches:
        steps = range(batch.number * minibatches + 1, (batch.number + 1) * minibatches + 1)  # counted from 1
        missing = [step for step in steps if (batch.round, step) not in worked]
        if missing:
            raise UsageError(
                f"{run.metrics} lacks step {missing[0]} of prover training in round {batch.round}.",
                "Replay a run whose metrics are complete.",
            )
        found.append(sum(worked[batch.round, step] for step in steps))
    return found


def _trainer_seconds(record: dict[str, Any]) -> float:
    """The trainer's work in one step. Prefers `busy`, which includes work that overlapped with other parts."""
    parts = record.get("busy") or record["budget"]
    return trained_seconds(parts)


def prover_shards(run: RunDirectory) -> list[ShardInfo]:
    """The committed shards of prover training. Raises UsageError if there are none."""
    state = FileStateStore(run.state).load().state
    infos = [ShardInfo.from_plain(plain) for plain in (state or {"shards": []})["shards"]]
    found = [info for info in infos if info.label.startswith(f"{PHASE}-")]
    if not found:
        raise UsageError(
            f"The run {run.name!r} has no committed step of prover training, so there is nothing to replay.",
            "Replay a run that has reached its prover phase, such as one of: pvg train modchain",
        )
    return found


def _spread(places: list[Place], most: int) -> list[Place]:
    """At most `most` of them at even distances, including the first and the last."""
    if len(places) <= most:
        return places
    return [places[i] for i in np.linspace(0, len(places) - 1, most).round().astype(int)]


def rewards_of(run: RunDirectory, batch: RecordedBatch) -> np.ndarray[Any, np.dtype[np.float32]]:
    """float32 [N]. Raises StateError if a rollout was stored without a reward."""
    rewards = [r.reward for r in batch.rollouts]
    if any(reward is None for reward in rewards):
        raise StateError(
            f"The run {run.name!r} has rollouts without a reward in batch {batch.place}.",
            "Replay a run of this version of pvg.",
        )
    return np.array(rewards, dtype=np.float32)


# --- fixed inputs -----------------------------------------------------------------------------------------------------


def check_work(experiment: Experiment, replay: RunDirectory | None, rollouts: int) -> None:
    """The checks that need nothing opened. Raises ConfigurationError if `rollouts` is not a multiple of the group size,
    UsageError if the run has nothing to replay."""
    size = experiment.rollout.group_size
    if replay is not None:
        prover_shards(replay)
    elif rollouts % size:
        raise ConfigurationError(
            f"workload.rollouts = {rollouts} is not a multiple of rollout.group_size = {size}.",
            f"Set it to {max(1, rollouts // size) * size}.",
        )


def fixed_orders(experiment: Experiment, task: Task, render: Render, rollouts: int, seed: int) -> list[GroupOrder]:
    """Groups of the experiment's size with `rollouts` rollouts in all, on the prover's problems, with the game's role
    shares.

    Raises ConfigurationError for a task without such problems.
    """
    size = experiment.rollout.group_size
    groups = rollouts // size
    pool = problems_of_half(task, "prover")
    if not pool:
        raise ConfigurationError(
            "The task has no training problems for the prover.", "Raise task.problems or task.limit."
        )
    chosen = draw_cyclic(len(pool), 0, groups, seed_for(seed, "bench", "problems"))
    roles = assign_roles(groups, experiment.game.sneaky_share, generator_for(seed, "bench", "roles"))
    return [
        GroupOrder(pool[i], role, render(pool[i], role), group, size)
        for group, (i, role) in enumerate(zip(chosen, roles, strict=True))
    ]


def recorded_orders(batch: RecordedBatch, task: Task) -> list[GroupOrder]:
    """The groups that a recorded batch was sampled for: the same prompts, roles and sizes.

    Raises StateError if the task no longer has one of its problems.
    """
    problems = {problem.id: problem for problem in problems_of_half(task, "prover")}
    members: dict[int, list[Rollout]] = {}
    for rollout in batch.rollouts:
        members.setdefault(rollout.group, []).append(rollout)
    orders = []
    for group, rollouts in members.items():
        first = rollouts[0]
        if first.problem_id not in problems:
            raise StateError(
                f"The task no longer has problem {first.problem_id} of batch {batch.place}.",
                "Replay the run with its original data.",
            )
        orders.append(GroupOrder(problems[first.problem_id], first.role, first.prompt_ids, group, len(rollouts)))
    return orders


def drawn_rewards(rollouts: Sequence[Rollout], seed: int) -> Float32:
    """float32 [N], standard normal. The work of a step does not depend on the values, if each group has a signal."""
    return generator_for(seed, "bench", "rewards").standard_normal(len(rollouts)).astype(np.float32)


def policy_batch(rollouts: Sequence[Rollout], rewards_N: Float32, loss: str) -> PolicyBatch:
    """The batch as the game builds it (pvg.game.on_policy), with the sampler's log-probs and without a reference."""
    group_ids_N = np.array([r.group for r in rollouts], dtype=np.int32)
    role_ids_N = np.array([r.role.number for r in rollouts], dtype=np.int8)
    if loss == "spo":  # without tracked values
        tokens_N = np.array([len(r.completion_ids) for r in rollouts])
        advantages_N = tracked_advantages(rewards_N, np.zeros(len(rollouts)), tokens_N, role_ids_N)
    elif loss == "rae":
        advantages_N = baseline_advantages(rewards_N, np.zeros(len(rollouts)), role_ids_N)
    else:
        advantages_N = advantages(loss, rewards_N, group_ids_N, role_ids_N, credit=policy_loss(loss).credit)
    return PolicyBatch(
        sequences=[np.concatenate([r.prompt_ids, r.completion_ids]) for r in rollouts],
        prompt_lengths=np.array([len(r.prompt_ids) for r in rollouts], dtype=np.int32),
        sampled_logprobs=[r.logprobs for r in rollouts],
        reference_logprobs=None,
        advantages_N=advantages_N,
        role_ids_N=role_ids_N,
        group_ids_N=group_ids_N,
        versions_N=np.array([r.version for r in rollouts], dtype=np.int32),
    )


def digest_of(rows: Iterable[Int32]) -> str:
    """A short checksum of rows of token ids. Equal counts alone do not mean that two reports did the same work."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(len(row).to_bytes(8) + row.tobytes())
    return digest.hexdigest()[:12]


def model_facts(model: LanguageModel) -> dict[str, Any]:
    return {"model": model.name, "parameters": model.num_parameters}
