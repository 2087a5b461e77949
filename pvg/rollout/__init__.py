"""Sampling solutions: the `Engine` protocol, its engines, and the dispatcher that turns orders into graded groups.

Importing this package loads no torch; opening the torch engine does.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from typing import TYPE_CHECKING

from pvg.rollout.dispatcher import Dispatcher, GroupOrder
from pvg.rollout.engine import Completion, Engine, GenerationRequest, Sampling
from pvg.serving.limits import ConnectionLimits

if TYPE_CHECKING:
    from pvg.experiment import Rollouts
    from pvg.models.language_model import LanguageModel
    from pvg.telemetry.events import Events

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


def open_engine(section: Rollouts, model: LanguageModel, executor: Executor, events: Events | None = None) -> Engine:
    """The engine that `section.engine` names; it owns `model` from here on. `executor` does its decoding, `events` gets
    its `[gen]` and `[weights]` lines."""
    return ENGINES[section.engine](section, model, executor, events)


def _open_torch(section: Rollouts, model: LanguageModel, executor: Executor, events: Events | None) -> Engine:
    from pvg.rollout.torch_engine import TorchEngine

    return TorchEngine(
        model,
        max_rows=section.max_rows,
        max_in_flight=section.concurrency,
        executor=executor,
        events=events,
        compaction=section.compaction,
        shared_prefill=section.shared_prefill,
    )


# `rollout.engine` in an experiment.
ENGINES: dict[str, Callable[[Rollouts, LanguageModel, Executor, Events | None], Engine]] = {"torch": _open_torch}
