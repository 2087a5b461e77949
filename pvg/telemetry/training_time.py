"""The parts of a step's time that are the trainer's work. A run's `trainer_idle` is the share of all other time.

Only the `pipeline` profile can count this work at its synchronous cost, because it also plays the steps synchronously.
"""

from __future__ import annotations

from collections.abc import Mapping

# Parts of a budget. The reference's log-probs, and those computed again, are work that the trainer asked for.
TRAINING_PARTS = ("reference", "recompute", "pack", "forward_backward", "optimizer")


def trained_seconds(budget: Mapping[str, float]) -> float:
    """Seconds of a budget in which the trainer worked; parts that are not there count as none."""
    return sum(budget.get(part, 0.0) for part in TRAINING_PARTS)
