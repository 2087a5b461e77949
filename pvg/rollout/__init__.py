"""Sampling solutions: the `Engine` protocol, its engines, and the dispatcher that samples and grades groups.

Importing this package does not load torch. Opening the torch engine does.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pvg.config.rollout import Rollouts, TorchSampling
from pvg.rollout.engine import Engine

if TYPE_CHECKING:
    from pvg.models.language_model import LanguageModel
    from pvg.telemetry.events import Events


@dataclass(frozen=True)
class EngineSetup:
    """What `open_engine` needs. `base` stays the caller's. An engine that needs its weights copies them, as `dtype`
    (None: as they are), or shares them and adds its adapters (`LanguageModel.sampler`). `routed_experts`: return the
    experts of each token. `on_servers`: opens the engine of vLLM servers."""

    rollout: Rollouts
    base: LanguageModel
    executor: Executor
    events: Events
    routed_experts: bool = False
    on_servers: Callable[[], Engine] | None = None
    dtype: str | None = None


def open_engine(setup: EngineSetup) -> Engine:
    """The engine that `rollout.engine` names. It sends no request yet: see `Engine.ready`."""
    return ENGINES[setup.rollout.engine.kind](setup)


def _open_torch(setup: EngineSetup) -> Engine:
    import torch

    from pvg.rollout.torch_engine import TorchEngine

    section = setup.rollout
    engine = section.engine
    assert isinstance(engine, TorchSampling)
    return TorchEngine(
        setup.base.sampler(None if setup.dtype is None else getattr(torch, setup.dtype)),
        max_rows=engine.max_rows,
        max_in_flight=section.concurrency,
        executor=setup.executor,
        events=setup.events,
        lean=engine.decoding == "lean",
        continuous=_is_continuous(section, on_cpu=setup.base.device.type == "cpu"),
        routed_experts=setup.routed_experts,
    )


def _is_continuous(section: Rollouts, *, on_cpu: bool) -> bool:
    """Whether rows join as others finish. Whole batches are faster on a CPU (docs/scaling.md), unless someone needs
    single rollouts early: a deadline, or a trainer that works beside the engine."""
    return not on_cpu or section.deadline.kind != "none" or section.prefetch.kind != "none"


def _open_on_servers(setup: EngineSetup) -> Engine:
    assert setup.on_servers is not None, "this process has no servers"
    return setup.on_servers()


# Kinds of the table `rollout.engine`.
ENGINES: dict[str, Callable[[EngineSetup], Engine]] = {"torch": _open_torch, "vllm": _open_on_servers}
