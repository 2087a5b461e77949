"""`plan_of`: the whole plan of an experiment: its step, other numbers of workers, what to change, and memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from pvg.config.experiment import Experiment
from pvg.config.load import changed
from pvg.config.rollout import TorchSampling
from pvg.errors import counted
from pvg.planning.bounds import StepBounds, bounds_of
from pvg.planning.inputs import INPUTS, Inputs, lost_to_trainer_failures, not_modelled, warm_start, world_of
from pvg.planning.measured import RunFigures
from pvg.planning.memory import MemoryPlan, memory_of
from pvg.planning.shapes import ModelShape
from pvg.planning.simulation import Outcome, simulate
from pvg.planning.world import AheadLimits, World
from pvg.reporting.formats import sample_seconds

WAITS = 0.1  # share of the time from which waiting for rollouts is worth a change
BALANCED = 0.05  # waiting at which more workers gain nothing worth their price
DROPS = 0.1
WORTH = 0.05  # share of a batch's time that a change must save
IDLE_ENGINE = 0.5  # share of rows that decode, below which fewer workers do
MOST_WORKERS = 4096
MOST_TABLE_ROWS = 9
GB = 1e9


@dataclass(frozen=True, slots=True)
class PlannedWorkers:
    """The outcome with another number of workers. `concurrency`: requests in flight, as many as they decode."""

    workers: int
    concurrency: int
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class ExperimentPlan:
    """`gpu_gb`: memory to compare `memory` with; None: no GPU. `wanted`: the number of workers that would balance
    training, if that is not the given one. `trainer_loss`: share of the time that failures of the trainer cost."""

    experiment: Experiment
    inputs: Inputs
    world: World
    outcome: Outcome
    bounds: StepBounds
    measured: RunFigures | None
    table: list[PlannedWorkers]
    advice: list[str]
    notes: list[str]
    memory: list[MemoryPlan]
    memory_advice: list[str]
    gpu_gb: float | None
    trainer_loss: float

    @property
    def step_s(self) -> float:
        """Seconds of an optimizer step."""
        return self.outcome.batch_s / self.experiment.training.minibatches

    def plain(self) -> dict[str, Any]:
        """As JSON-compatible data."""
        values = {
            name: {"value": found.value, "unit": INPUTS[name][0], "source": found.source}
            for name, found in self.inputs.values.items()
        }
        outcome = {**asdict(self.outcome), "step_s": self.step_s, "idle": self.outcome.idle}
        return {
            "experiment": self.experiment.name,
            "workers": self.world.workers,
            "slots": self.world.slots,
            "concurrency": self.world.concurrency,
            "inputs": values,
            "planned": outcome,
            "measured": None if self.measured is None else asdict(self.measured),
            "bounds": {**_finite(asdict(self.bounds)), "limit": self.bounds.limit},
            "trainer_failures": self.trainer_loss,
            "by_workers": [
                {
                    "workers": row.workers,
                    "concurrency": row.concurrency,
                    "step_s": row.outcome.batch_s / self.experiment.training.minibatches,
                    "idle": row.outcome.idle,
                    "waiting": row.outcome.waiting,
                    "dropped": row.outcome.dropped,
                    "staleness": row.outcome.staleness,
                    "tokens_per_s": row.outcome.tokens_per_s,
                    "engine_busy": row.outcome.engine_busy,
                }
                for row in self.table
            ],
            "memory": [
                {"stage": m.stage, "place": m.place, "parts": m.parts, "total": m.total, "fits": self.fits(m)}
                for m in self.memory
            ],
            "gpu_gb": self.gpu_gb,
            "advice": self.advice + self.memory_advice,
            "notes": self.notes,
        }

    def fits(self, plan: MemoryPlan) -> bool | None:
        """Whether a stage fits into its GPU; None without a GPU."""
        return None if self.gpu_gb is None else plan.total <= self.available_gb(plan) * GB

    def available_gb(self, plan: MemoryPlan) -> float:
        """What a stage may take of the GPU. A server takes only its share (serving.gpu_memory_utilization)."""
        share = self.experiment.serving.gpu_memory_utilization if plan.place == "server" else 1.0
        return (self.gpu_gb or math.inf) * share


def plan_of(
    experiment: Experiment,
    inputs: Inputs,
    prover: ModelShape,
    verifier: ModelShape,
    *,
    workers: int | None = None,
    gpu_gb: float | None = None,
    measured: RunFigures | None = None,
    seed: int = 0,
) -> ExperimentPlan:
    """`workers`: instead of the experiment's own. `gpu_gb`: memory of the GPU; None: no GPU."""
    world = world_of(experiment, inputs, workers=workers)
    outcome, bounds = simulate(world, seed=seed), bounds_of(world)
    memory = memory_of(
        experiment,
        prover,
        verifier,
        prompt_tokens=math.ceil(inputs["prompt_tokens"]),
        slots=world.slots,
        gpu_bytes=None if gpu_gb is None else gpu_gb * 1e9,
    )
    in_process = isinstance(experiment.rollout.engine, TorchSampling)
    # store.commit_every counts optimizer steps, and a commit waits for the end of a batch.
    batches = math.ceil(experiment.store.commit_every / experiment.training.minibatches)
    found = ExperimentPlan(
        experiment,
        inputs,
        world,
        outcome,
        bounds,
        measured,
        [] if in_process else _table(world, bounds, seed),
        [] if in_process else list(_advice(experiment, world, outcome, seed)),
        [f"{note}." for note in (*warm_start(experiment, inputs), *not_modelled(experiment))],
        list(memory),
        [],
        gpu_gb,
        lost_to_trainer_failures(inputs, outcome.batch_s, batches),
    )
    return replace(found, memory_advice=list(_memory_advice(found)))


def resized(world: World, workers: int) -> World:
    """The world with another number of workers, and as many requests in flight as these decode."""
    return replace(world, workers=workers, concurrency=workers * world.slots)


def _table(world: World, bounds: StepBounds, seed: int) -> list[PlannedWorkers]:
    """1, 2, 4 ... workers, until more cannot help, and the given number."""
    enough = math.ceil(world.room / world.slots)  # all rollouts that may be in flight have a row
    last = max(world.workers, min(2 * enough, MOST_WORKERS))
    numbers = {2**power for power in range(13) if 2**power <= 2 * last}
    numbers = set(sorted(numbers)[:MOST_TABLE_ROWS]) | {world.workers}
    rows = []
    for number in sorted(numbers):
        other = resized(world, number)
        rows.append(PlannedWorkers(number, other.rows, simulate(other, seed=seed)))
    return rows


def _loads(experiment: Experiment, key: str, value: Any) -> bool:
    """Whether the experiment can have this value, and has another one now."""
    other = changed(experiment, {key: value})
    return other is not None and other != experiment


def _advice(experiment: Experiment, world: World, outcome: Outcome, seed: int) -> Iterator[str]:
    """What to change: only settings that load together with the others."""

    def tried(other: World) -> Outcome:
        return simulate(other, seed=seed)

    def gain(found: Outcome) -> str:
        return f"{sample_seconds(found.batch_s)} per batch instead of {sample_seconds(outcome.batch_s)}"

    rows = world.workers * world.slots
    if world.concurrency < min(rows, world.room):
        most = min(rows, world.room)
        found = tried(replace(world, concurrency=most))
        if found.batch_s < (1 - WORTH) * outcome.batch_s and _loads(experiment, "rollout.concurrency", most):
            yield f"The workers decode {rows:,} rows: set rollout.concurrency = {most}. {gain(found)}."
    elif world.concurrency > rows and world.ahead is not None and outcome.dropped > DROPS:
        found = tried(replace(world, concurrency=rows))
        yield (
            f"Requests wait in the servers and become stale: set rollout.concurrency = {rows}. It drops "
            f"{100 * found.dropped:.0f} % instead of {100 * outcome.dropped:.0f} %."
        )
    if outcome.waiting > WAITS:
        waits = f"The trainer waits {100 * outcome.waiting:.0f} % of the time for rollouts"
        if world.ahead is None and not _loads(experiment, "rollout.prefetch", "fresh"):
            yield f"{waits}. Other settings of this experiment exclude sampling ahead (rollout.prefetch)."
        elif world.ahead is None:
            found = tried(replace(world, ahead=AheadLimits()))
            yield f"{waits}. Sampling ahead (rollout.prefetch = 'fresh') would take {gain(found)}."
        else:
            yield f"{waits}{_balance(world, seed)}"
    elif world.workers > 1 and outcome.engine_busy < IDLE_ENGINE and outcome.waiting < BALANCED:
        fewer = _smallest(world, world.workers, seed)
        if fewer is not None and fewer < world.workers:
            busy = f"The workers decode {100 * outcome.engine_busy:.0f} % of their rows"
            yield f"{busy}: {counted(fewer, 'worker')} would do."
    if world.ahead is not None and outcome.dropped > DROPS:
        yield from _about_drops(world, outcome, tried)


def _balance(world: World, seed: int) -> str:
    most = min(MOST_WORKERS, math.ceil(world.room / world.slots))
    number = _smallest(world, most, seed)
    if number is not None and number > world.workers:
        return f": {counted(number, 'worker')} would balance it."
    if number is None and world.workers < most:
        found = simulate(resized(world, most), seed=seed)
        return (
            f". {most} workers decode all rollouts that may be in flight, and it still waits "
            f"{100 * found.waiting:.0f} %: raise rollout.prefetch.batches too, or shorten the longest rollouts."
        )
    return ". More workers do not help: raise rollout.prefetch.batches, or shorten the longest rollouts."


def _smallest(world: World, most: int, seed: int) -> int | None:
    """The smallest number of workers, at most `most`, with which the trainer hardly waits; None if there is none."""

    def balanced(number: int) -> bool:
        return simulate(resized(world, number), seed=seed).waiting <= BALANCED

    if not balanced(most):
        return None
    low, high = 0, most
    while high - low > max(1, high // 50):
        middle = (low + high) // 2
        low, high = (low, middle) if balanced(middle) else (middle, high)
    return high


def _about_drops(world: World, outcome: Outcome, tried: Any) -> Iterator[str]:
    assert world.ahead is not None
    share = f"{100 * outcome.dropped:.0f} % of the rollouts are dropped as too stale"
    ways = []
    if world.ahead.prefer == "fresh":
        old = tried(replace(world, ahead=replace(world.ahead, prefer="old")))
        ways.append((old, "rollout.prefetch = 'old'"))
    more = tried(replace(world, ahead=replace(world.ahead, budget=world.ahead.budget + 1)))
    ways.append((more, f"rollout.prefetch.max_staleness = {world.ahead.budget + 1}"))
    said = [f"{way} drops {100 * found.dropped:.0f} % (staleness {found.staleness:.1f})" for found, way in ways]
    yield f"{share}: {', '.join(said)}."


def _memory_advice(plan: ExperimentPlan) -> Iterator[str]:
    training, verifier = plan.experiment.training, plan.experiment.verifier
    for stage in plan.memory:
        if plan.fits(stage) is not False:
            continue
        available = plan.available_gb(stage) * GB
        parts = sorted(stage.parts, key=lambda name: -stage.parts[name])
        over = (stage.total - available) / GB
        served = stage.place == "server"
        limit = "a server may take of its GPU (serving.gpu_memory_utilization)" if served else "the GPU has"
        says = f"'{stage.stage}' needs {over:.3g} GB more than {limit}; the largest part is {parts[0]}"
        if stage.stage == "sample":
            room = available - (stage.total - stage.parts["KV cache"])
            rows = int(room // stage.kv_row_bytes)
            key = "serving.max_num_seqs" if served else "rollout.engine.max_rows"
            if rows > 0:
                yield f"{says}. {rows} rows fit: set {key} = {rows}."
            elif served:
                yield f"{says}. Raise serving.tensor_parallel, or choose a smaller model (models.prover.source)."
            else:
                yield f"{says}. Choose smaller models (models.*.source)."
            continue
        section = "training" if stage.stage == "train the prover" else "verifier"
        remedies = []
        if parts[0].startswith("activations"):
            if section == "training" and _loads(plan.experiment, "training.gradient_checkpointing", True):
                remedies.append("training.gradient_checkpointing = true")
            tokens = training.micro_batch_tokens if section == "training" else verifier.micro_batch_tokens
            if _loads(plan.experiment, f"{section}.micro_batch_tokens", tokens // 2):
                remedies.append(f"a lower {section}.micro_batch_tokens")
        if _loads(plan.experiment, f"{section}.adapters", "lora"):
            remedies.append(f"{section}.adapters = 'lora'")
        yield f"{says}. Set {', or '.join(remedies) if remedies else 'smaller models (models.*.source)'}."


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    return {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in values.items()}
