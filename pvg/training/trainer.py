"""One trainer for both players: take a batch, accumulate its micro-batches' gradients, clip, step.

    trainer = Trainer(module, objective, settings, source, executor=executor, precision="float32")
    while report := await trainer.step():
        ...

Invariants: a loss or gradient that is not finite raises before any weight changes; `state` and `load_state` resume bit
by bit; what is computed runs in the executor's thread, never in the event loop.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Literal, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from pvg.errors import ConfigurationError, MissingRequirementError, StateError, TrainingDivergedError
from pvg.models.shared_prompts import same_attention
from pvg.telemetry.events import Events, SilentEvents
from pvg.telemetry.metrics import Metrics
from pvg.telemetry.spans import span, submit_in
from pvg.training.batch import BatchSource
from pvg.training.memory import MemoryMeter, MicroBatchMemory, MicroBatchSize, UnmeasuredMemory
from pvg.training.optimizer import (
    MOMENTS,
    OptimizerSettings,
    autocast,
    build_optimizer,
    load_optimizer_tensors,
    optimizer_tensors,
    trainable_parameters,
)

__all__ = ["Objective", "OptimizerSettings", "StepReport", "Trainer", "checkpoint_layers"]

STATE_FORMAT = 1
MODEL_PREFIX = "model."
OPTIMIZER_PREFIX = "optimizer."
# What to do when a GPU's memory ran out, by the section of the settings.
OUT_OF_MEMORY = {
    "training": "Set training.micro_batch_memory_mb, lower training.micro_batch_tokens, or set "
    "training.gradient_checkpointing = true.",
    "verifier": "Lower verifier.micro_batch_tokens.",
}

BatchT = TypeVar("BatchT")


class Objective(Protocol[BatchT]):
    """A loss that is a plain sum over micro-batches: whatever it needs of the whole batch, `prepare` works out."""

    def prepare(self, batch: BatchT) -> BatchT: ...

    def split(self, batch: BatchT) -> list[BatchT]: ...

    def __call__(self, module: nn.Module, micro_batch: BatchT) -> tuple[Tensor, Metrics]: ...


@runtime_checkable
class SurveysBatch(Protocol[BatchT]):
    """An objective whose micro-batches' weights depend on what the module says of the whole batch: it looks at all of
    them before the pass with a gradient, without one, and hands them back weighted. It has a state, as JSON data."""

    def survey(self, module: nn.Module, micro_batches: list[BatchT]) -> tuple[list[BatchT], Metrics]: ...

    def state(self) -> dict[str, Any]: ...

    def load_state(self, state: Mapping[str, Any]) -> None: ...


@runtime_checkable
class AdaptsCoefficients(Protocol):
    """An objective whose coefficients may follow what the steps measure. Its state is JSON data, {} while none does."""

    def adapt(self, metrics: Mapping[str, float]) -> dict[str, float]: ...

    def state(self) -> dict[str, Any]: ...

    def load_state(self, state: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True, slots=True)
class StepReport:
    """Optimizer step number `step` (from 0) and its metrics: the objective's, micro_batches, grad_norm before clipping,
    learning_rate; with a memory also micro_batch_budget and bytes_per_token. A batch that held nothing to learn from
    moved no weight and has the one metric `skipped`."""

    step: int
    metrics: dict[str, float]


class Trainer(Generic[BatchT]):
    """Trains the parameters of `module` that require a gradient. It borrows the module: whoever opened it closes it.

    The module is put in evaluation mode: dropout would make the trained policy another one than the sampled one.

    `memory` is the objective's, which splits batches by it: the trainer tells it what micro-batches take, and keeps it
    in its state. `section` names the settings that are to be changed when a GPU's memory runs out.
    """

    def __init__(
        self,
        module: nn.Module,
        objective: Objective[BatchT],
        optimizer: OptimizerSettings,
        source: BatchSource[BatchT],
        *,
        executor: Executor,
        precision: str = "float32",
        gradient_checkpointing: bool = False,
        waits_for: str = "rollouts",
        section: Literal["training", "verifier"] = "training",
        memory: MicroBatchMemory[BatchT] | None = None,
        events: Events | None = None,
    ) -> None:
        self.module = module.eval()
        self._objective = objective
        self._settings = optimizer
        self._source = source
        self._executor = executor
        self._precision = precision
        self._waits_for = waits_for
        self._section = section
        self._memory = memory
        self._events = events or SilentEvents()
        self._told_of_memory = False
        self._parameters = trainable_parameters(module)
        self._device = next(iter(self._parameters.values())).device
        self._optimizer = build_optimizer(self._parameters, optimizer)
        self._steps = 0
        autocast(precision, self._device)  # refuses an unknown precision now rather than in the first step
        if gradient_checkpointing:
            checkpoint_layers(module)

    @property
    def steps_done(self) -> int:
        return self._steps

    async def step(self) -> StepReport | None:
        """Train on the source's next batch; None when the source has no more. Spans: wait_for_<waits_for>, pack,
        forward_backward, optimizer.

        Cancelling waits for the step that is running in the executor, so that the state is always between steps.
        Raises TrainingDivergedError, with the weights as they were, when the loss or the gradient is not finite.
        """
        # What is left of it: a source's work has names of its own, and so has the step's. Waiting for the executor,
        # where rollouts that are sampled ahead use it too, is waiting for rollouts.
        with span(f"wait_for_{self._waits_for}"):
            batch = await self._source.next_batch()
            if batch is None:
                return None
            running = submit_in(self._executor, self._train_on, batch)
            try:
                return await asyncio.shield(running)
            except asyncio.CancelledError:
                await asyncio.wait([running])
                raise

    def _train_on(self, batch: BatchT) -> StepReport:
        found: dict[str, float] = {}
        try:
            with span("pack"):
                prepared = self._objective.prepare(batch)
                micro_batches = self._objective.split(prepared)
            if self._memory is not None and not self._memory.known and micro_batches:
                with span("forward_backward", device=True):
                    self._probe(micro_batches, self._memory)
                with span("pack"):
                    micro_batches = self._objective.split(prepared)
            if isinstance(self._objective, SurveysBatch):
                with span("survey", device=True), autocast(self._precision, self._device):
                    micro_batches, surveyed = self._objective.survey(self.module, micro_batches)
                found = surveyed.result()
            with span("forward_backward", device=True):
                metrics = found | self._accumulate(micro_batches)
            with span("optimizer", device=True):
                # A batch without any signal (dapo drops such groups) moves nothing: not even old momentum may act.
                metrics |= self._update() if micro_batches else {"skipped": 1.0}
            if isinstance(self._objective, AdaptsCoefficients):
                metrics |= self._objective.adapt(metrics)
        except torch.OutOfMemoryError:
            raise MissingRequirementError(
                f"The GPU has too little memory for a micro-batch of step {self._steps}.", OUT_OF_MEMORY[self._section]
            ) from None
        finally:
            self._optimizer.zero_grad(set_to_none=True)  # gradients need no memory while the next batch is sampled
        report = StepReport(self._steps, metrics)
        self._steps += 1
        return report

    def _probe(self, micro_batches: list[BatchT], memory: MicroBatchMemory[BatchT]) -> None:
        """Before anything is known, the longest row goes through forward and backward alone, and its gradient away:
        one row more in a phase, instead of a first micro-batch that may not fit."""
        hardest = max(micro_batches, key=lambda micro_batch: memory.size(micro_batch).longest)
        meter = memory.meter(hardest, self.module, self._device)
        self._pass(hardest, meter)
        memory.learn([(memory.size(hardest), meter.bytes_taken)])
        self._optimizer.zero_grad(set_to_none=True)

    def _pass(self, micro_batch: BatchT, meter: MemoryMeter) -> tuple[Tensor, Metrics]:
        """The micro-batch's loss and metrics; its gradient is added to the others'."""
        with autocast(self._precision, self._device), meter.forward():
            loss, found = self._objective(self.module, micro_batch)
        with meter.backward():
            loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach(), found

    def _accumulate(self, micro_batches: list[BatchT]) -> dict[str, float]:
        metrics, losses = Metrics(), []
        memory, taken = self._memory, list[tuple[MicroBatchSize, int]]()
        for micro_batch in micro_batches:
            meter = UnmeasuredMemory() if memory is None else memory.meter(micro_batch, self.module, self._device)
            loss, found = self._pass(micro_batch, meter)
            losses.append(loss)
            metrics.merge(found)
            metrics.add_sum("micro_batches", 1)
            if memory is not None:
                taken.append((memory.size(micro_batch), meter.bytes_taken))
        # All of them at once: no weight has changed yet, and each look would have waited for the device.
        for number, value in enumerate(torch.stack(losses).tolist() if losses else []):
            if not math.isfinite(value):
                raise self._diverged(f"the loss of micro-batch {number} is {value}")
        learned = {} if memory is None or not taken else self._learn(memory, taken)
        return metrics.result() | learned

    def _learn(self, memory: MicroBatchMemory[BatchT], taken: list[tuple[MicroBatchSize, int]]) -> dict[str, float]:
        longest = max(size.longest for size, _ in taken)
        if not memory.fits(longest) and not self._told_of_memory:
            self._told_of_memory = True
            needed = longest * memory.bytes_per_token(longest)
            self._events.event(
                "memory",
                event="row.over_limit",
                step=self._steps,
                tokens=longest,
                bytes=needed,
                limit=memory.limit_bytes,
            )
        budget = memory.budget(longest)
        return {"micro_batch_budget": float(budget), "bytes_per_token": memory.learn(taken)}

    def _update(self) -> dict[str, float]:
        """Clip and step; the gradient's norm is looked at before any weight changes."""
        norm = nn.utils.clip_grad_norm_(self._parameters.values(), self._settings.gradient_clip).item()
        if not math.isfinite(norm):
            raise self._diverged(f"the gradient's norm is {norm}")
        rate = self._settings.rate(self._steps)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        return {"grad_norm": norm, "learning_rate": rate}

    def _diverged(self, what: str) -> TrainingDivergedError:
        return TrainingDivergedError(
            f"Training diverged at step {self._steps}: {what}.",
            "The weights are those of the step before. Lower the learning rate, or look at the batch's rewards.",
        )

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """A copy, on the CPU, of the trained weights ("model.") and the optimizer's moments ("optimizer."), and the
        rest as JSON data. Ready for safetensors."""
        tensors: dict[str, Tensor] = {MODEL_PREFIX + name: weight for name, weight in self._parameters.items()}
        for name, moment in optimizer_tensors(self._optimizer, self._parameters).items():
            tensors[OPTIMIZER_PREFIX + name] = moment
        copies = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
        meta: dict[str, Any] = {"format": STATE_FORMAT, "step": self._steps}
        if self._memory is not None:
            meta["memory"] = self._memory.state()
        if isinstance(self._objective, AdaptsCoefficients) and (adapted := self._objective.state()):
            meta["adapted"] = adapted
        if isinstance(self._objective, SurveysBatch):
            meta["objective"] = self._objective.state()
        return copies, meta

    def load_state(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Continue where `state` was taken. Raises StateError, changing nothing, when it is not of this model."""
        if meta.get("format") != STATE_FORMAT:
            raise StateError(f"The trainer's state has format {meta.get('format')}, this version reads {STATE_FORMAT}.")
        self._check_state(tensors)
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(tensors[MODEL_PREFIX + name])
        moments = {
            name.removeprefix(OPTIMIZER_PREFIX): tensor
            for name, tensor in tensors.items()
            if name.startswith(OPTIMIZER_PREFIX)
        }
        load_optimizer_tensors(self._optimizer, self._parameters, moments)
        self._steps = int(meta["step"])
        if self._memory is not None:
            self._memory.load_state(meta.get("memory", {}))
        if isinstance(self._objective, AdaptsCoefficients):
            self._objective.load_state(meta.get("adapted", {}))
        if isinstance(self._objective, SurveysBatch):
            self._objective.load_state(meta["objective"])

    def _check_state(self, tensors: Mapping[str, Tensor]) -> None:
        wanted = {MODEL_PREFIX + name: parameter.shape for name, parameter in self._parameters.items()}
        for name, parameter in self._parameters.items():
            keys = [f"{OPTIMIZER_PREFIX}{moment}.{name}" for moment in MOMENTS]
            if any(key in tensors for key in keys):
                wanted |= dict(zip(keys, (parameter.shape, parameter.shape, torch.Size([])), strict=True))
        remedy = "It was written by another model or another version of it; resume with the experiment that wrote it."
        for name in wanted.keys() ^ tensors.keys():
            side = "lacks" if name in wanted else "has an unknown"
            raise StateError(f"The trainer's state {side} tensor {name}.", remedy)
        for name, shape in wanted.items():
            found = tensors[name]
            if found.shape != shape or found.dtype != torch.float32:
                raise StateError(
                    f"{name} of the trainer's state is {tuple(found.shape)} {found.dtype}, not {tuple(shape)} float32.",
                    remedy,
                )


def checkpoint_layers(module: nn.Module) -> None:
    """Make the transformer layers of `module` recompute their activations in the backward pass.

    transformers ties this to training mode, so the layers themselves (not the parts inside them, where dropout
    lives) are put in training mode. Raises ConfigurationError for a model whose layers cannot do it, or whose layers
    apply dropout with their own hands.
    """
    layers = [layer for layer in module.modules() if isinstance(layer, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigurationError(
            f"{type(module).__name__} has no layers that can be checkpointed.",
            "Set training.gradient_checkpointing = false.",
        )
    for layer in layers:
        rate = getattr(layer, "dropout", 0.0)
        if isinstance(rate, float) and rate > 0.0:
            raise ConfigurationError(
                f"{type(layer).__name__} applies dropout ({rate}) itself, which checkpointing would switch on.",
                "Set the model's dropout to 0, or training.gradient_checkpointing = false.",
            )
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = partial(
            checkpoint, use_reentrant=False, context_fn=partial(same_attention, module)
        )
        layer.training = True
