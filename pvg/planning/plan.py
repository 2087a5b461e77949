"""`plan_of`: the whole plan of an experiment: bounds of its step, what to change, and memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from pvg.config.experiment import Experiment
from pvg.config.load import changed
from pvg.config.rollout import TorchSampling
from pvg.errors import counted
from pvg.planning.bounds import BatchWork, StepBounds, bounds_of
from pvg.planning.inputs import INPUTS, Inputs, not_modelled, warm_start, work_of
from pvg.planning.memory import MemoryPlan, memory_of
from pvg.planning.shapes import ModelShape
from pvg.reporting.formats import sample_seconds

WAITS = 0.1  # share of the time from which waiting for rollouts is worth a change
WORTH = 0.05  # share of a batch's time that a change must save
GB = 1e9


@dataclass(frozen=True, slots=True)
class ExperimentPlan:
    """`bounds`: of a batch, which has `training.minibatches` optimizer steps. `gpu_gb`: memory to compare `memory`
    with; None: no GPU."""

    experiment: Experiment
    inputs: Inputs
    work: BatchWork
    bounds: StepBounds
    advice: list[str]
    notes: list[str]
    memory: list[MemoryPlan]
    memory_advice: list[str]
    gpu_gb: float | None

    @property
    def step_s(self) -> float:
        """The least seconds of an optimizer step."""
        least_s = self.bounds.overlap_s if self.work.ahead else self.bounds.turns_s
        return least_s / self.experiment.training.minibatches

    def plain(self) -> dict[str, Any]:
        """As JSON-compatible data."""
        values = {
            name: {"value": found.value, "unit": INPUTS[name][0], "source": found.source}
            for name, found in self.inputs.values.items()
        }
        return {
            "experiment": self.experiment.name,
            "workers": self.work.workers,
            "slots": self.work.slots,
            "concurrency": self.work.concurrency,
            "inputs": values,
            "step_s": self.step_s,
            "bounds": {**_finite(asdict(self.bounds)), "limit": self.bounds.limit},
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
) -> ExperimentPlan:
    """`workers`: instead of the experiment's own. `gpu_gb`: memory of the GPU; None: no GPU."""
    work = work_of(experiment, inputs, workers=workers)
    memory = memory_of(
        experiment,
        prover,
        verifier,
        prompt_tokens=math.ceil(inputs["prompt_tokens"]),
        slots=work.slots,
        gpu_bytes=None if gpu_gb is None else gpu_gb * GB,
    )
    in_process = isinstance(experiment.rollout.engine, TorchSampling)
    found = ExperimentPlan(
        experiment,
        inputs,
        work,
        bounds_of(work),
        [] if in_process else list(_advice(experiment, work)),
        [f"{note}." for note in (*warm_start(experiment, inputs), *not_modelled(experiment))],
        list(memory),
        [],
        gpu_gb,
    )
    return replace(found, memory_advice=list(_memory_advice(found)))


def _loads(experiment: Experiment, key: str, value: Any) -> bool:
    """Whether the experiment can have this value, and has another one now."""
    other = changed(experiment, {key: value})
    return other is not None and other != experiment


def _advice(experiment: Experiment, work: BatchWork) -> Iterator[str]:
    """What to change: only settings that load together with the others."""
    bounds = bounds_of(work)
    least_s = bounds.overlap_s if work.ahead else bounds.turns_s
    most = min(work.workers * work.slots, work.rollouts * (1 + work.ahead))
    if work.concurrency < most:
        wider = bounds_of(replace(work, concurrency=most))
        found_s = wider.overlap_s if work.ahead else wider.turns_s
        if found_s < (1 - WORTH) * least_s and _loads(experiment, "rollout.concurrency", most):
            yield (
                f"The workers decode {work.workers * work.slots:,} rows: set rollout.concurrency = {most}. A batch "
                f"takes at least {sample_seconds(found_s)} instead of {sample_seconds(least_s)}."
            )
    waiting = 1 - bounds.trainer_s / least_s
    if waiting <= WAITS:
        return
    waits = f"The trainer waits at least {100 * waiting:.0f} % of the time for rollouts"
    enough = math.ceil(work.rollouts * (1 + work.ahead) / work.slots)  # every rollout in flight has a row
    if work.ahead and work.workers < enough:
        number = min(math.ceil(bounds.balance), enough) if math.isfinite(bounds.balance) else enough
        yield f"{waits}: {counted(number, 'worker')} would balance it at best."
    elif work.ahead:
        yield f"{waits}. More workers do not help: raise rollout.prefetch.batches, or shorten the longest rollouts."
    elif _loads(experiment, "rollout.prefetch", "fresh"):
        yield f"{waits}. With sampling ahead (rollout.prefetch = 'fresh') a batch takes at least " + (
            f"{sample_seconds(bounds.overlap_s)} instead of {sample_seconds(least_s)}."
        )
    else:
        yield f"{waits}. Other settings of this experiment exclude sampling ahead (rollout.prefetch)."


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
