"""Learning-rate schedules: pure functions of the step, so that a resumed run needs no schedule state."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from pvg.errors import ConfigurationError


def _constant(progress: float) -> float:
    return 1.0


def _linear(progress: float) -> float:
    return 1.0 - progress


def _cosine(progress: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * progress))


# From progress after the warm-up (0 at its end, 1 after the last step) to a factor of the learning rate.
SCHEDULES: dict[str, Callable[[float], float]] = {"constant": _constant, "linear": _linear, "cosine": _cosine}


def learning_rate_factor(schedule: str, step: int, *, warmup: int, total_steps: int) -> float:
    """The factor for optimizer step number `step` (from 0) of `total_steps`.

    The warm-up's `warmup` steps take 1/warmup, 2/warmup, ... 1; then the schedule falls from 1 towards 0, which it
    would reach one step after the last, so that no step is wasted at 0. Later steps keep the factor 0
    (constant: 1).
    """
    if schedule not in SCHEDULES:
        raise ConfigurationError(f"There is no schedule {schedule!r}.", f"Known: {', '.join(SCHEDULES)}.")
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, total_steps - warmup)
    return SCHEDULES[schedule](min(1.0, progress))


# Mixed precision: weights stay float32, matrix products run in bfloat16.


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """The context a forward pass runs in: bfloat16 autocast, or nothing for "float32".

    Autocast belongs to a thread: enter it in the thread that computes.
    """
    if precision == "float32":
        return nullcontext()
    if precision == "bfloat16":
        return torch.autocast(device.type, dtype=torch.bfloat16)
    raise ConfigurationError(f"There is no precision {precision!r}.", "Known: float32, bfloat16.")


# AdamW with its schedule, and its state as plain named tensors.

MOMENTS = ("exp_avg", "exp_avg_sq", "step")  # what AdamW keeps for each parameter


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """`warmup` and `total_steps` count optimizer steps; `gradient_clip` is the largest global L2 norm."""

    learning_rate: float
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    warmup: int = 0
    schedule: str = "constant"
    total_steps: int = 1
    gradient_clip: float = 1.0

    def rate(self, step: int) -> float:
        """The learning rate of optimizer step number `step`, from 0."""
        factor = learning_rate_factor(self.schedule, step, warmup=self.warmup, total_steps=self.total_steps)
        return self.learning_rate * factor


def trainable_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that require a gradient, by name; tied ones once.

    Raises ConfigurationError when there are none, or when they are not float32: AdamW's small updates would vanish in
    the rounding of bfloat16 weights.
    """
    found = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    if not found:
        raise ConfigurationError(f"{type(module).__name__} has no parameter to train.", "Unfreeze some of its weights.")
    for name, parameter in found.items():
        if parameter.dtype != torch.float32:
            raise ConfigurationError(
                f"Weights to train must be float32, but {name} is {str(parameter.dtype).removeprefix('torch.')}.",
                'Set the model\'s dtype = "float32" and precision = "bfloat16".',
            )
    return found


def build_optimizer(parameters: Mapping[str, nn.Parameter], settings: OptimizerSettings) -> torch.optim.AdamW:
    """AdamW; matrices decay, vectors (norms, biases) do not.

    Fused: on the CPU five times faster than foreach (0.5 against 6 ms for 30 matrices of 128 x 128), and elementwise,
    so its result does not depend on the number of threads.
    """
    matrices = [parameter for parameter in parameters.values() if parameter.ndim >= 2]
    vectors = [parameter for parameter in parameters.values() if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        fused=True,
    )


def optimizer_tensors(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """`<moment>.<parameter>` -> the optimizer's own tensor; a parameter that never had a gradient has none."""
    return {
        f"{moment}.{name}": cast(Tensor, optimizer.state[parameter][moment])
        for name, parameter in parameters.items()
        if parameter in optimizer.state
        for moment in MOMENTS
    }


def load_optimizer_tensors(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor]
) -> None:
    """The inverse of `optimizer_tensors`, whose names and shapes the caller has checked. `step` stays where AdamW
    keeps it; the moments go to their parameter's device."""
    optimizer.state.clear()
    for name, parameter in parameters.items():
        if f"step.{name}" in tensors:
            optimizer.state[parameter] = {
                moment: tensors[f"{moment}.{name}"].detach().to(parameter.device, copy=True) for moment in MOMENTS
            }
