"""Sampling solutions: the `Engine` protocol, its engines, and the dispatcher that turns orders into graded groups.

Importing this package loads no torch; opening the torch engine does.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from typing import TYPE_CHECKING

from pvg.rollout.dispatcher import Dispatcher, GroupOrder
from pvg.rollout.engine import Completion, Engine, GenerationRequest, Sampling
from pvg.rollout.limits import ConnectionLimits

if TYPE_CHECKING:
    from pvg.experiment import Rollouts
    from pvg.models.language_model import LanguageModel

__all__ = [
    "ENGINES",
    "Completion",
    "ConnectionLimits",
    "Dispatcher",
    "Engine",
    "GenerationRequest",
    "GroupOrder",
    "Sampling",
    "open_engine",
]


def open_engine(section: Rollouts, model: LanguageModel, executor: Executor) -> Engine:
    """The engine that `section.engine` names; it owns `model` from here on. `executor` does its decoding."""
    return ENGINES[section.engine](section, model, executor)


def _open_torch(section: Rollouts, model: LanguageModel, executor: Executor) -> Engine:
    from pvg.rollout.torch_engine import TorchEngine

    return TorchEngine(model, max_rows=section.max_rows, max_in_flight=section.concurrency, executor=executor)


# `rollout.engine` in an experiment.
ENGINES: dict[str, Callable[[Rollouts, LanguageModel, Executor], Engine]] = {"torch": _open_torch}
