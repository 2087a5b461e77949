"""Learning-rate schedules: pure functions of the step, so that a resumed run needs no schedule state."""

from __future__ import annotations

import math
from collections.abc import Callable

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
