"""The vLLM servers of a benchmark: those that are there (`--server URL`), or one of its own (`--serve`).

    infos = await look(experiment)                  # are they there, and what are they?
    async with own_server(experiment) as served:    # the same experiment, with the server that was started for it
        ...

What is decided when a server starts cannot be swept over servers that run. With `--serve` it can: variants that agree
in all of it share a server, each of the others gets one started for it, and none is left when its samples are taken.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any

import orjson

from pvg.config.experiment import Experiment
from pvg.errors import ConfigurationError, ServerUnavailableError, UsageError
from pvg.servers.command import LOOPBACK, find_interpreter, server_spec
from pvg.servers.control import ControlClient, ServerInfo
from pvg.servers.keys import control_key
from pvg.servers.models import model_folder
from pvg.servers.pool import ConnectionLimits, HttpPool, ServerFault
from pvg.servers.process import VllmServer

# What `pvg serve` reads, and a running server cannot change.
FIXED_AT_START = frozenset(
    {
        "serving.python",
        "serving.max_num_seqs",
        "serving.gpu_memory_utilization",
        "serving.cpu_cache_gb",
        "serving.prefix_caching",
        "serving.max_model_len",
        "serving.tensor_parallel",
        "serving.eager",
        "serving.startup_s",
        "serving.extra_args",
        "models.prover.source",
        "models.prover.dtype",
        "rollout.dtype",
        "weights.root",
        "weights.transport",
        "training.lora_rank",
    }
)
# Of these, what a server tells of itself, under the same name.
TOLD = ("serving.max_num_seqs", "serving.prefix_caching", "serving.max_model_len")
# Of `ServerInfo`, what a report says of the servers; where they are and what they have now is of no use to it.
REPORTED = ("model", "dtype", "max_model_len", "max_num_seqs", "prefix_caching", "logprobs_mode", "max_lora_rank")

OnServer = Callable[[str], None]


def refuse_swept(keys: Iterable[str]) -> None:
    """Raises UsageError for a setting that a running server cannot change."""
    fixed = sorted(set(keys) & FIXED_AT_START)
    if fixed:
        raise UsageError(
            f"{fixed[0]} is fixed when a server starts: running servers have one value of it.",
            "Have the benchmark start a server for each: --serve instead of --server.",
        )


async def look(experiment: Experiment, given: Iterable[str] = ()) -> list[ServerInfo]:
    """What the servers of the experiment say of themselves. `given`: keys that the user has set, which must not be
    other than the servers'.

    Raises ServerUnavailableError for one that does not answer, MissingRequirementError for one without pvg's routes,
    ConfigurationError for another key or another value.
    """
    serving, weights = experiment.serving, experiment.weights
    limits, key = ConnectionLimits.derive(len(serving.servers)), control_key(weights.root)
    pool = HttpPool(limits, connect_timeout_s=serving.connect_timeout_s, key=key, fresh=True)
    controls = [
        ControlClient(url, pool, timeout_s=weights.timeout_s, probe_timeout_s=serving.probe_timeout_s)
        for url in serving.servers
    ]
    try:
        infos = list(await asyncio.gather(*(control.info() for control in controls)))
    except ServerFault as fault:
        raise ServerUnavailableError(
            f"No server answers: {fault}.", "Start one with `pvg serve EXPERIMENT`, or have one started: --serve."
        ) from None
    finally:
        await pool.close()
    for info in infos:
        _check_given(info, experiment, given)
    return infos


def _check_given(info: ServerInfo, experiment: Experiment, given: Iterable[str]) -> None:
    for key in sorted(set(given) & set(TOLD)):
        name = key.removeprefix("serving.")
        wanted, found = getattr(experiment.serving, name), getattr(info, name)
        if wanted is not None and wanted != found:
            raise ConfigurationError(
                f"{info.url} was started with {name} = {found}, and {key} is {wanted}.",
                "Leave it out, start the server with it, or have one started: --serve.",
            )


def told(infos: Sequence[ServerInfo]) -> dict[str, Any]:
    """For a report: how many servers there were, and what they were; where they differ, each in turn."""
    found: dict[str, Any] = {"count": len(infos)}
    for name in REPORTED:
        values = [asdict(info)[name] for info in infos]
        found[name] = values[0] if len(set(values)) == 1 else values
    return found


def versions(infos: Iterable[ServerInfo]) -> str | None:
    """Of vLLM; None without servers."""
    return ", ".join(sorted({info.vllm for info in infos})) or None


def start_settings(experiment: Experiment) -> bytes:
    """Equal for variants that can share a server (and the event loop that watches it)."""
    plain = experiment.plain()
    found = {key: _value(plain, key) for key in sorted(FIXED_AT_START | {"telemetry.event_loop"})}
    return orjson.dumps(found)


def _value(plain: Mapping[str, Any], key: str) -> Any:
    node: Any = plain
    for part in key.split("."):
        node = node.get(part) if isinstance(node, Mapping) else None
    return node


@asynccontextmanager
async def own_server(experiment: Experiment, on_server: OnServer | None = None) -> AsyncIterator[Experiment]:
    """Start a server for the experiment on a free port, and give the experiment that uses it; stop the server when the
    block is left. Raises what `find_interpreter`, `model_folder` and `VllmServer.start` raise."""
    tell = on_server or (lambda line: None)
    interpreter, port = find_interpreter(experiment.serving.python), _free_port()
    log = experiment.weights.root / "logs" / f"bench-{port}.log"
    spec = server_spec(experiment, "prover", interpreter, model_folder(experiment, "prover"), log=log, port=port)
    tell(f"starting a server (vLLM {interpreter.vllm}); its log: {log}")
    began = time.monotonic()
    async with VllmServer.start(spec) as server:
        tell(f"{server.url} is ready after {time.monotonic() - began:.0f} s")
        yield with_servers(experiment, (server.url,))


def with_servers(experiment: Experiment, urls: tuple[str, ...]) -> Experiment:
    serving = experiment.serving.model_copy(update={"servers": urls})
    return experiment.model_copy(update={"serving": serving})


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])
