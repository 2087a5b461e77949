"""Builds a `VllmEngine` from an experiment, with its connection pools, clients, transport and canary."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from pvg.config.experiment import Experiment
from pvg.records import Int32
from pvg.rollout.episodes import completion_room
from pvg.rollout.vllm.engine import ServerRequirements, VllmEngine
from pvg.servers.canary import TOLERANCE, Canary, ChecksumTest, greedy_sequences, reference_logprobs
from pvg.servers.control import ControlClient
from pvg.servers.keys import control_key
from pvg.servers.labels import PublishingSession
from pvg.servers.pool import ConnectionLimits, HttpPool
from pvg.servers.transports import open_transport
from pvg.telemetry.events import Events

if TYPE_CHECKING:
    from pvg.models.language_model import LanguageModel

CONTROL_CONNECTIONS = 8  # per server: one update, one probe and one checksum at a time, with some to spare


def open_vllm_engine(
    experiment: Experiment,
    base: LanguageModel,
    executor: Executor,
    events: Events,
    run: str,
    prompts: Callable[[], list[Int32]],
) -> VllmEngine:
    """Sends no request yet. Raises ConfigurationError if the connection limits do not cover the concurrency."""
    serving, weights, rollout = experiment.serving, experiment.weights, experiment.rollout
    dtype = str(base.dtype).removeprefix("torch.") if rollout.dtype == "model" else rollout.dtype
    key, hosts, session = control_key(weights.root), len(serving.servers), PublishingSession.begin()
    pool = HttpPool(_limits(experiment), connect_timeout_s=serving.connect_timeout_s, key=key)
    dedicated = weights.client == "dedicated"
    control_pool = pool
    if dedicated:
        limits = ConnectionLimits(CONTROL_CONNECTIONS * hosts, CONTROL_CONNECTIONS, hosts)
        control_pool = HttpPool(limits, connect_timeout_s=serving.connect_timeout_s, key=key, fresh=True)
    canary = None
    if weights.canary_prompts:
        canary = Canary(
            lambda: greedy_sequences(base, prompts()),
            partial(reference_logprobs, base, dtype),
            executor,
            weights.canary_tolerance or TOLERANCE[dtype],
        )
    return VllmEngine(
        serving,
        pool=pool,
        control_pool=control_pool,
        controls=[
            ControlClient(url, control_pool, timeout_s=weights.timeout_s, probe_timeout_s=serving.probe_timeout_s)
            for url in serving.servers
        ],
        transport=open_transport(weights, run, executor, dtype, session),
        session=session,
        needs=ServerRequirements(
            shape=base.shape,
            max_length=completion_room(experiment) + 1,
            processed_logprobs=rollout.temperature != 1.0 or rollout.top_p < 1.0 or rollout.top_k > 0,
            lora_rank=experiment.training.lora_rank if weights.transport == "lora" else 0,
            routed_experts=rollout.routed_experts,
        ),
        canary=canary,
        checksums=None
        if weights.checksums == "never" or weights.transport == "lora"
        else ChecksumTest(dtype, executor, always=weights.checksums == "always"),
        events=events,
        deadline_s=rollout.deadline_s,
    )


def _limits(experiment: Experiment) -> ConnectionLimits:
    """Limits of the generation pool. One server may get all requests if the others are down, and each server gets the
    canary's as well. With the shared client, updates and probes also use this pool but are not counted: they wait. The
    setting `weights.client = "dedicated"` avoids that."""
    serving, concurrency = experiment.serving, experiment.rollout.concurrency
    hosts = len(serving.servers)
    if serving.connections is None:
        limits = replace(ConnectionLimits.derive(concurrency + hosts * experiment.weights.canary_prompts), hosts=hosts)
    else:
        limits = ConnectionLimits(serving.connections, serving.connections, hosts)
    limits.assert_covers(concurrency)
    return limits
