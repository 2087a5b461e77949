"""The precision of computations: that of training and of scoring, TF32, and how much rounding is no error.

with autocast(section.precision, device):        # training
with scoring_autocast(section.precision, device):
"""

from __future__ import annotations

import math
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from pvg.errors import ConfigurationError

# See `rounding_tolerance`.
SHALLOW, LARGEST_TOLERANCE = 4, 0.25
# TF32 keeps 10 bits of a number after the point, bfloat16 keeps 7.
TF32_ERROR = 2.0**-3


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """The context of a forward pass: bfloat16 autocast, or nothing for "float32". Weights stay float32.

    Autocast is per thread: enter it in the thread that computes.
    """
    if precision == "float32":
        return nullcontext()
    if precision == "bfloat16":
        return torch.autocast(device.type, dtype=torch.bfloat16)
    raise ConfigurationError(f"There is no precision {precision!r}.", "Known: float32, bfloat16.")


def rounding_tolerance(shallow: float, layers: int) -> float:
    """The largest relative difference of two correct ways to compute a model in 16 bits. `shallow`: for SHALLOW layers.

    Each layer adds its own rounding, so the difference grows with the root of their number. With random weights, 28
    layers differ by up to 0.08, and a wrong position or mask makes a difference of at least 0.35.
    """
    return min(LARGEST_TOLERANCE, shallow * math.sqrt(max(1.0, layers / SHALLOW)))


def product_tolerance(weight: Tensor, exact: float, reduced: float, layers: int = SHALLOW) -> float:
    """The largest relative difference of two correct ways to compute products with `weight` here: `exact` if they are
    computed in float32. `reduced` is for 16 bits and SHALLOW layers (see `rounding_tolerance`), and TF32 has an eighth
    of its error."""
    kind = weight.device.type
    if weight.dtype != torch.float32 or torch.is_autocast_enabled(kind):
        return rounding_tolerance(reduced, layers)
    if kind == "cuda" and torch.get_float32_matmul_precision() != "highest":
        return max(exact, TF32_ERROR * rounding_tolerance(reduced, layers))
    return exact


def scoring_autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """The context in which a verifier scores. On a CPU scores are always in the weights' own precision, so that a
    row's score does not depend on its batch. On a GPU float32 products would take about ten times as long as the
    training's, so scores use the precision of the training."""
    return nullcontext() if device.type == "cpu" else autocast(precision, device)


def allow_tf32(device: torch.device, precisions: Collection[str]) -> bool:
    """Let float32 matrix products on a GPU round their inputs to TF32 (10 bits instead of 23), if all of an
    experiment's `precisions` are bfloat16 (7 bits) anyway. Then sampling, scoring and the reference take a fraction of
    the time. Returns whether they do. On a CPU, and with a precision of float32, products stay exact."""
    allowed = device.type == "cuda" and set(precisions) == {"bfloat16"}
    if device.type == "cuda":
        # The setting of all backends: after `torch.backends.cuda.matmul.fp32_precision = "tf32"` alone, torch refuses
        # to tell the older settings, which other libraries read.
        torch.set_float32_matmul_precision("high" if allowed else "highest")
    return allowed
