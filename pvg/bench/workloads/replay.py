"""The parts of a recorded run that workloads replay: batches of prover training, and the trainer's time for each.

Reads only committed shards, and only those that contain a chosen batch. It changes nothing, so an active run can be
replayed too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pvg.errors import StateError, UsageError
from pvg.records import Rollout
from pvg.store import FileStateStore, RolloutShards, RunDirectory, ShardInfo, read_json_lines
from pvg.telemetry.spans import trained_seconds

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
        raise UsageError(f"The run {run.name!r} has no {run.metrics.name}, which has the times of its trainer.")
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
