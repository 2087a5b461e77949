"""One trainer for both players: take a batch, accumulate the gradients of its micro-batches, clip, step.

Invariants: a loss or gradient that is not finite raises before any weight changes; `state` and `load_state` resume bit
by bit; all computation runs in the executor's thread, never in the event loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Literal, Protocol, TypeVar, cast, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from pvg.errors import ConfigurationError, MissingRequirementError, StateError, TrainingDivergedError
from pvg.models.compute import KEPT_BYTES, autocast, return_freed_memory
from pvg.models.shared_prompts import same_attention
from pvg.telemetry.metrics import Metrics
from pvg.telemetry.spans import run_whole, span
from pvg.training.batch import BatchSource

# The optimizer: AdamW, learning-rate schedules as pure functions of the step, and mixed precision.


def learning_rate_factor(schedule: str, step: int, *, warmup: int, total_steps: int) -> float:
    """The factor of the learning rate in optimizer step `step` (from 0) of `total_steps`; `schedule`: "constant" or
    "linear".

    Warm-up steps have factors 1/warmup, 2/warmup, ... 1. Then a linear schedule falls from 1 towards 0 and reaches it
    one step after the last, so no step has a factor of 0. Later steps have factor 0.
    """
    if step < warmup:
        return (step + 1) / warmup
    return 1.0 if schedule == "constant" else 1.0 - min(1.0, (step - warmup) / max(1, total_steps - warmup))


MOMENTS = ("exp_avg", "exp_avg_sq", "step")  # AdamW's state per parameter


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """`warmup` and `total_steps` are in optimizer steps; `gradient_clip` is the largest global L2 norm.

    The defaults are those of all phases. A second beta of 0.95 and a clip at 1.0 are usual for language models.
    """

    learning_rate: float
    beta1: float = 0.9
    beta2: float = 0.95
    warmup: int = 0
    schedule: str = "constant"
    total_steps: int = 1
    gradient_clip: float = 1.0

    def rate(self, step: int) -> float:
        """The learning rate of optimizer step `step` (from 0)."""
        factor = learning_rate_factor(self.schedule, step, warmup=self.warmup, total_steps=self.total_steps)
        return self.learning_rate * factor


def trainable_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that require a gradient, by name; tied parameters once.

    Raises ConfigurationError if there are none, or if they are not float32, because AdamW's small updates would vanish
    in bfloat16 rounding.
    """
    found = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    if not found:
        raise ConfigurationError(f"{type(module).__name__} has no parameter to train.", "Unfreeze some of its weights.")
    for name, parameter in found.items():
        if parameter.dtype != torch.float32:
            raise ConfigurationError(
                f"Weights to train must be float32, but {name} is {str(parameter.dtype).removeprefix('torch.')}.",
                'Set models.dtype to "float32" and models.precision to "bfloat16".',
            )
    return found


def build_optimizer(parameters: Mapping[str, nn.Parameter], settings: OptimizerSettings) -> torch.optim.AdamW:
    """AdamW without weight decay: a phase has too few steps for it to matter.

    Fused: fast on the CPU, and elementwise, so the result does not depend on the number of threads.
    """
    betas = (settings.beta1, settings.beta2)
    return torch.optim.AdamW(parameters.values(), settings.learning_rate, betas, weight_decay=0.0, fused=True)


def optimizer_tensors(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """`<moment>.<parameter>` -> the optimizer's own tensor; no entry for a parameter that never had a gradient."""
    return {
        f"{moment}.{name}": cast(Tensor, optimizer.state[parameter][moment])
        for name, parameter in parameters.items()
        if parameter in optimizer.state
        for moment in MOMENTS
    }


def load_optimizer_tensors(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor]
) -> None:
    """The inverse of `optimizer_tensors`. The caller has checked names and shapes. `step` stays on AdamW's device; the
    moments move to their parameter's device."""
    optimizer.state.clear()
    for name, parameter in parameters.items():
        if f"step.{name}" in tensors:
            optimizer.state[parameter] = {
                moment: tensors[f"{moment}.{name}"].detach().to(parameter.device, copy=True) for moment in MOMENTS
            }


MODEL_PREFIX = "model."
OPTIMIZER_PREFIX = "optimizer."
# Remedies for a GPU out of memory, by the settings' section.
OUT_OF_MEMORY = {
    "training": "Lower training.micro_batch_tokens, or set "
    "training.gradient_checkpointing=true, and continue: pvg train --resume RUN -s training.micro_batch_tokens=N, or "
    "pvg evaluate RUN -s training.micro_batch_tokens=N",
    "verifier": "Lower verifier.micro_batch_tokens, and continue: "
    "pvg train --resume RUN -s verifier.micro_batch_tokens=N",
}

BatchT = TypeVar("BatchT")


class Objective(Protocol[BatchT]):
    """A loss that is a plain sum over micro-batches; `prepare` computes what depends on the whole batch."""

    def prepare(self, batch: BatchT) -> BatchT: ...

    def split(self, batch: BatchT) -> list[BatchT]: ...

    def __call__(self, module: nn.Module, micro_batch: BatchT) -> tuple[Tensor, Metrics]: ...


@runtime_checkable
class SurveysBatch(Protocol[BatchT]):
    """An objective whose micro-batches need outputs of others: `survey` computes these, without a gradient."""

    def survey(self, module: nn.Module, micro_batches: Sequence[BatchT]) -> list[BatchT]: ...


@runtime_checkable
class AdaptsCoefficients(Protocol):
    """An objective with adaptive coefficients. Its state is JSON data, {} if none adapts."""

    def adapt(self, metrics: Mapping[str, float]) -> dict[str, float]: ...

    def state(self) -> dict[str, Any]: ...

    def load_state(self, state: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True, slots=True)
class PartGradient:
    """The sum over some micro-batches: `gradient` float32 [parameters], the trained parameters one after the other, or
    None if others keep it; the loss of each micro-batch, and metrics."""

    gradient: Tensor | None
    losses: list[float]
    metrics: Metrics


class GradientWorkers(Protocol[BatchT]):
    """Other processes that compute the gradients of a trainer's module, each for one shard of a batch. `gradients`
    blocks, and gets the micro-batches of each shard."""

    def shards(self, batch: BatchT) -> list[BatchT]: ...

    def weights_changed(self) -> None: ...

    def gradients(self, parts: Sequence[Sequence[BatchT]], state: Mapping[str, Any]) -> list[PartGradient]: ...


class TrainerRanks(Protocol[BatchT]):
    """Other processes that divide a trainer's weights, gradients and moments among them. The trainer's module has a
    copy of the weights, which `update` keeps current. All calls block, except `load`."""

    @property
    def on_gpus(self) -> bool: ...

    def shards(self, batch: BatchT) -> list[BatchT]: ...

    def gradients(self, parts: Sequence[Sequence[BatchT]], state: Mapping[str, Any]) -> list[PartGradient]:
        """Compute the gradient of all micro-batches, and keep it."""

    def update(self, rate: float, clip: float) -> float:
        """Clip the gradient and step. Returns its norm before clipping; if this is not finite, nothing changes."""

    def moments(self) -> dict[str, Tensor]:
        """As pvg.training.trainer.optimizer_tensors, on the CPU, in new memory."""

    def load(self, moments: Mapping[str, Tensor]) -> None:
        """Continue from these moments and the module's weights."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """Optimizer step number `step` (from 0) and its metrics: those of the objective, micro_batches, grad_norm (before
    clipping), learning_rate. A batch without signal
    changes no weight and has the single metric `skipped`."""

    step: int
    metrics: dict[str, float]


class Trainer(Generic[BatchT]):
    """Trains the parameters of `module` that require a gradient. The caller opens and closes the module.

    The trainer puts the module into evaluation mode, because with dropout the trained policy would differ from the
    sampled one.

    `section`: the settings to name if a GPU runs out of memory. `workers`: compute the gradients. `ranks`: compute
    them, and keep the optimizer's state. At most one of both.
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
        workers: GradientWorkers[BatchT] | None = None,
        ranks: TrainerRanks[BatchT] | None = None,
    ) -> None:
        self.module = module.eval()
        self._objective = objective
        self._settings = optimizer
        self._source = source
        self._executor = executor
        self._precision = precision
        self._waits_for = waits_for
        self._section = section
        self._workers = workers
        self._ranks = ranks
        self._parameters = trainable_parameters(module)
        self._device = next(iter(self._parameters.values())).device
        self._optimizer = build_optimizer(self._parameters, optimizer) if ranks is None else None
        self._copies: dict[str, Tensor] = {}  # what `state` returns
        self._steps = 0
        autocast(precision, self._device)  # raises now, not in the first step, for an unknown precision
        if gradient_checkpointing:
            checkpoint_layers(module)

    @property
    def steps_done(self) -> int:
        return self._steps

    async def step(self) -> StepReport | None:
        """Train on the source's next batch; None if there is none. Spans: wait_for_<waits_for>, pack, forward_backward,
        optimizer.

        The state is always between steps, also when a caller is cancelled. Raises TrainingDivergedError, with unchanged
        weights, if the loss or the gradient is not finite.
        """
        # This span keeps the time that no inner span of the source or the step names. It includes the wait for the
        # executor, because prefetched rollouts may be using it.
        with span(f"wait_for_{self._waits_for}"):
            batch = await self._source.next_batch()
            if batch is None:
                return None
            return await run_whole(self._executor, self._train_on, batch)

    def _train_on(self, batch: BatchT) -> StepReport:
        try:
            with span("pack"):
                prepared, others = self._objective.prepare(batch), self._workers or self._ranks
                shards = [prepared] if others is None else others.shards(prepared)
                parts = [self._objective.split(shard) for shard in shards]  # the micro-batches of each shard
            with span("forward_backward", device=True):
                metrics = self._accumulate(parts)
            with span("optimizer", device=True):
                # A batch without signal (dapo drops such groups) changes nothing, not even through old momentum.
                metrics |= self._update() if any(parts) else {"skipped": 1.0}
            if isinstance(self._objective, AdaptsCoefficients):
                metrics |= self._objective.adapt(metrics)
        except torch.OutOfMemoryError:
            raise MissingRequirementError(
                f"The GPU has too little memory for a micro-batch of step {self._steps}.", OUT_OF_MEMORY[self._section]
            ) from None
        finally:
            self.module.zero_grad(set_to_none=True)  # frees the gradients' memory while the next batch is sampled
        report = StepReport(self._steps, metrics)
        self._steps += 1
        return report

    def _gradients(self, parts: Sequence[Sequence[BatchT]]) -> tuple[list[float], Metrics]:
        """Put the sum of the micro-batches' gradients into the parameters, or into those of the ranks. Returns their
        losses and metrics."""
        state = self._objective.state() if isinstance(self._objective, AdaptsCoefficients) else {}
        others = self._workers or self._ranks
        if others is None:
            micro_batches = [micro_batch for part in parts for micro_batch in part]
            return accumulate(self.module, self._objective, micro_batches, self._precision)
        found, metrics = others.gradients(parts, state), Metrics()
        for part in found:  # in the order of the shards, because the order of a sum changes its bits
            metrics.merge(part.metrics)
        if gradients := [part.gradient for part in found if part.gradient is not None]:
            total = gradients[0]
            for gradient in gradients[1:]:
                total += gradient
            sizes = [parameter.numel() for parameter in self._parameters.values()]
            for parameter, gradient in zip(self._parameters.values(), torch.split(total, sizes), strict=True):
                parameter.grad = gradient.view_as(parameter).to(parameter.device)
        return [loss for part in found for loss in part.losses], metrics

    def _accumulate(self, parts: list[list[BatchT]]) -> dict[str, float]:
        if not any(parts):
            return {}
        losses, metrics = self._gradients([part for part in parts if part])
        # Checked here, where no weight has changed yet.
        for number, value in enumerate(losses):
            if not math.isfinite(value):
                raise self._diverged(f"the loss of micro-batch {number} is {value}")
        return metrics.result()

    def _update(self) -> dict[str, float]:
        """Clip and step; checks the gradient's norm before any weight changes."""
        rate, clip = self._settings.rate(self._steps), self._settings.gradient_clip
        if self._ranks is not None:
            norm = self._ranks.update(rate, clip)
        else:
            norm = nn.utils.clip_grad_norm_(self._parameters.values(), clip).item()
        if not math.isfinite(norm):
            raise self._diverged(f"the gradient's norm is {norm}")
        if self._optimizer is not None:
            for group in self._optimizer.param_groups:
                group["lr"] = rate
            self._optimizer.step()
        self._tell_workers()
        return {"grad_norm": norm, "learning_rate": rate}

    def _tell_workers(self) -> None:
        if self._workers is not None:
            self._workers.weights_changed()

    def _diverged(self, what: str) -> TrainingDivergedError:
        return TrainingDivergedError(
            f"Training diverged at step {self._steps}: {what}.",
            "The weights are those before this step. Lower the learning rate, or check the batch's rewards.",
        )

    @property
    def copies_state(self) -> bool:
        """Whether the next step leaves what `state` returns as it is. Where CPUs train, a copy of more than KEPT_BYTES
        would cost more memory than its time is worth."""
        numbers = sum(parameter.numel() for parameter in self._parameters.values())
        on_gpu = self._device.type == "cuda" if self._ranks is None else self._ranks.on_gpus
        return on_gpu or 3 * torch.float32.itemsize * numbers <= KEPT_BYTES

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """On the CPU, ready for safetensors: the trained weights ("model.") and the optimizer's moments ("optimizer."),
        and the rest as JSON data. If `copies_state`, in memory that the next call may overwrite, but no step."""
        tensors: dict[str, Tensor] = {MODEL_PREFIX + name: weight for name, weight in self._parameters.items()}
        own = {} if self._optimizer is None else optimizer_tensors(self._optimizer, self._parameters)
        copied = {} if self._ranks is None else self._ranks.moments()
        tensors |= {OPTIMIZER_PREFIX + name: moment for name, moment in own.items()}
        on_gpu, copies = self._device.type == "cuda", self.copies_state
        if copies and not self._copies:
            return_freed_memory(sum(tensor.nbytes for tensor in tensors.values()))
        for name, tensor in tensors.items() if copies else ():
            if name not in self._copies:  # a GPU copies to pinned memory several times as fast
                self._copies[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=on_gpu)
            self._copies[name].copy_(tensor.detach(), non_blocking=True)
        if on_gpu:
            torch.cuda.synchronize(self._device)
        found = {name: self._copies[name] if copies else tensor.detach() for name, tensor in tensors.items()}
        found |= {OPTIMIZER_PREFIX + name: moment for name, moment in copied.items()}
        meta: dict[str, Any] = {"step": self._steps}
        if isinstance(self._objective, AdaptsCoefficients) and (adapted := self._objective.state()):
            meta["adapted"] = adapted
        return found, meta

    def load_state(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Continue from `state`. Raises StateError, before any change, if it belongs to another model."""
        self._check_state(tensors)
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(tensors[MODEL_PREFIX + name])
        moments = {
            name.removeprefix(OPTIMIZER_PREFIX): tensor
            for name, tensor in tensors.items()
            if name.startswith(OPTIMIZER_PREFIX)
        }
        if self._ranks is not None:
            self._ranks.load(moments)
        else:
            assert self._optimizer is not None
            load_optimizer_tensors(self._optimizer, self._parameters, moments)
        self._tell_workers()
        self._steps = int(meta["step"])
        if isinstance(self._objective, AdaptsCoefficients):
            self._objective.load_state(meta.get("adapted", {}))

    def _check_state(self, tensors: Mapping[str, Tensor]) -> None:
        wanted = {MODEL_PREFIX + name: parameter.shape for name, parameter in self._parameters.items()}
        for name, parameter in self._parameters.items():
            keys = [f"{OPTIMIZER_PREFIX}{moment}.{name}" for moment in MOMENTS]
            if any(key in tensors for key in keys):
                wanted |= dict(zip(keys, (parameter.shape, parameter.shape, torch.Size([])), strict=True))
        remedy = "Another model, or another version of it, wrote this state; resume with the experiment that wrote it."
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


def accumulate(
    module: nn.Module,
    objective: Callable[[nn.Module, BatchT], tuple[Tensor, Metrics]],
    micro_batches: Sequence[BatchT],
    precision: str,
) -> tuple[list[float], Metrics]:
    """Add the gradients of the micro-batches to the module's. Returns the loss of each, and their metrics, which are
    read together: one transfer per micro-batch would synchronize the device."""
    device = next(module.parameters()).device
    size = sum(weight.nbytes for weight in module.parameters()) if device.type == "cpu" else 0
    losses, metrics, whole = list[Tensor](), Metrics(), cast(object, objective)
    if isinstance(whole, SurveysBatch):
        with torch.no_grad(), autocast(precision, device):
            micro_batches = whole.survey(module, micro_batches)
    for micro_batch in micro_batches:
        return_freed_memory(size)  # what earlier passes have freed has other sizes
        with autocast(precision, device):
            loss, found = objective(module, micro_batch)
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.detach())
        metrics.merge(found)
        metrics.add_sum("micro_batches", 1)
    return_freed_memory(size)
    metrics.read()
    return torch.stack(losses).tolist() if losses else [], metrics


def checkpoint_layers(module: nn.Module) -> None:
    """Make the transformer layers of `module` recompute their activations in the backward pass.

    transformers requires training mode for this, so the layers themselves are put into training mode, but not their
    parts, which contain dropout. Raises ConfigurationError for a model whose layers do not support it, or apply dropout
    themselves.
    """
    layers = [layer for layer in module.modules() if isinstance(layer, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigurationError(
            f"{type(getattr(module, 'backbone', module)).__name__} has no layers that support gradient checkpointing.",
            "Set training.gradient_checkpointing = false.",
        )
    for layer in layers:
        rate = getattr(layer, "dropout", 0.0)
        if isinstance(rate, float) and rate > 0.0:
            raise ConfigurationError(
                f"{type(layer).__name__} applies dropout ({rate}) itself, which checkpointing would enable.",
                "Set the model's dropout to 0, or training.gradient_checkpointing = false.",
            )
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = partial(
            checkpoint, use_reentrant=False, context_fn=partial(same_attention, module)
        )
        layer.training = True
