"""Sampling solutions: the `Engine` protocol, its engines, and the dispatcher that samples and grades groups.

Importing this package does not load torch. Opening the torch engine does.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pvg.config.rollout import Rollouts, TorchSampling
from pvg.records import Int32
from pvg.rollout.dispatcher import Dispatcher, GroupOrder
from pvg.rollout.engine import Completion, Engine, GenerationRequest, Sampling

if TYPE_CHECKING:
    from pvg.config.experiment import Experiment
    from pvg.models.language_model import LanguageModel
    from pvg.telemetry.events import Events

__all__ = [
    "ENGINES",
    "Completion",
    "Dispatcher",
    "Engine",
    "EngineSetup",
    "GenerationRequest",
    "GroupOrder",
    "Sampling",
    "open_engine",
]


@dataclass(frozen=True)
class EngineSetup:
    """What `open_engine` needs. `base` stays the caller's: an engine that needs its weights copies them. `run` names
    the folder of published weights. `prompts` returns the canary's prompts."""

    experiment: Experiment
    base: LanguageModel
    executor: Executor
    events: Events
    run: str
    prompts: Callable[[], list[Int32]]


def open_engine(setting: EngineSetup) -> Engine:
    """The engine that `rollout.engine` names. It sends no request yet: see `Engine.ready`."""
    return ENGINES[setting.experiment.rollout.engine.kind](setting)


def _open_torch(setting: EngineSetup) -> Engine:
    import torch

    from pvg.rollout.torch_engine import TorchEngine

    section = setting.experiment.rollout
    engine = section.engine
    assert isinstance(engine, TorchSampling)
    return TorchEngine(
        setting.base.copy(None if section.dtype == "model" else getattr(torch, section.dtype)),
        max_rows=engine.max_rows,
        max_in_flight=section.concurrency,
        executor=setting.executor,
        events=setting.events,
        lean=engine.decoding == "lean",
        continuous=_is_continuous(section, engine, on_cpu=setting.base.device.type == "cpu"),
        routed_experts=setting.experiment.training.router_replay,
    )


def _is_continuous(section: Rollouts, engine: TorchSampling, *, on_cpu: bool) -> bool:
    """The choice of `rollout.engine.batching`. "auto": whole batches are faster on a CPU (docs/scaling.md), unless
    someone needs single rollouts early: a deadline, or a trainer that works beside the engine."""
    if engine.batching != "auto":
        return engine.batching == "continuous"
    return not on_cpu or section.deadline.kind != "none" or section.prefetch.kind != "none"


def _open_vllm(setting: EngineSetup) -> Engine:
    from pvg.rollout.vllm_engine import open_vllm_engine

    return open_vllm_engine(
        setting.experiment, setting.base, setting.executor, setting.events, setting.run, setting.prompts
    )


# Kinds of the table `rollout.engine`.
ENGINES: dict[str, Callable[[EngineSetup], Engine]] = {"torch": _open_torch, "vllm": _open_vllm}
