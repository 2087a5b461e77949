"""The vLLM servers of a benchmark: running ones (`--server URL`), or one that pvg starts (`--serve`).

    infos = await look(experiment)                  # do the servers answer, and with which settings do they run?
    async with own_server(experiment) as served:    # the same experiment, on a server that was started for it
        ...

Settings that are fixed when a server starts cannot be swept over running servers. With `--serve` they can: variants
with the same start settings share a server, and pvg starts one for each of the others. pvg stops each server after its
samples.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any

import orjson

from pvg.config.experiment import TABLES, Experiment
from pvg.errors import ConfigurationError, ServerUnavailableError, UsageError
from pvg.servers.command import LOOPBACK, find_interpreter, model_folder, server_spec
from pvg.servers.control import ControlClient, ServerInfo, control_key
from pvg.servers.pool import HttpPool, ServerFault
from pvg.servers.process import VllmServer, free_port

# Settings that `pvg serve` reads and a running server cannot change.
FIXED_AT_START = frozenset(
    {
        "serving.max_num_seqs",
        "serving.gpu_memory_utilization",
        "serving.tensor_parallel",
        "serving.extra_args",
        "models.prover.source",
        "models.prover.dtype",
        "rollout.dtype",
        "weights.root",
        "weights.transport.kind",
        "training.adapters.kind",
        "training.adapters.rank",
    }
)
# Those of them that a server reports, under the same name.
COMPARED = ("serving.max_num_seqs",)
# Fields of `ServerInfo` that a report contains.
REPORTED = ("model", "dtype", "max_model_len", "max_num_seqs", "prefix_caching", "logprobs_mode", "max_lora_rank")

OnServer = Callable[[str], None]


def refuse_swept(keys: Iterable[str]) -> None:
    """Raises UsageError for a setting that running servers cannot change."""
    fixed = sorted({f"{key}.kind" if key in TABLES else key for key in keys} & FIXED_AT_START)
    if fixed:
        raise UsageError(
            f"{fixed[0]} is fixed when a server starts, so it cannot be swept over running servers.",
            "Use --serve instead of --server: the benchmark then starts a server for each value.",
        )


async def look(experiment: Experiment, given: Iterable[str] = ()) -> list[ServerInfo]:
    """The descriptions of the experiment's servers. `given`: keys that the user has set; they must match the servers.

    Raises ServerUnavailableError for a server that does not answer, MissingRequirementError for one without pvg's
    routes, ConfigurationError for a wrong key or a value that does not match.
    """
    serving, weights = experiment.serving, experiment.weights
    pool = HttpPool(len(serving.servers), key=control_key(weights.root), fresh=True)
    controls = [
        ControlClient(url, pool, timeout_s=weights.timeout_s, probe_timeout_s=serving.probe_timeout_s)
        for url in serving.servers
    ]
    try:
        infos = list(await asyncio.gather(*(control.info() for control in controls)))
    except ServerFault as fault:
        raise ServerUnavailableError(
            f"No server answers: {fault}.", "Start one with `pvg serve EXPERIMENT`, or use --serve."
        ) from None
    finally:
        await pool.close()
    for info in infos:
        _check_given(info, experiment, given)
    return infos


def _check_given(info: ServerInfo, experiment: Experiment, given: Iterable[str]) -> None:
    for key in sorted(set(given) & set(COMPARED)):
        name = key.removeprefix("serving.")
        wanted, found = getattr(experiment.serving, name), getattr(info, name)
        if wanted is not None and wanted != found:
            raise ConfigurationError(
                f"{info.url} was started with {name} = {found}, but {key} is {wanted}.",
                "Drop the setting, restart the server with it, or use --serve.",
            )


def described(infos: Sequence[ServerInfo]) -> dict[str, Any]:
    """For a report: the number of servers and their fields; a field that differs has one value per server."""
    found: dict[str, Any] = {"count": len(infos)}
    for name in REPORTED:
        values = [asdict(info)[name] for info in infos]
        found[name] = values[0] if len(set(values)) == 1 else values
    return found


def versions(infos: Iterable[ServerInfo]) -> str | None:
    """The servers' vLLM versions; None without servers."""
    return ", ".join(sorted({info.vllm for info in infos})) or None


def start_settings(experiment: Experiment) -> bytes:
    """Equal for variants that can share a server (and the event loop that supervises it)."""
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
    """Start a server for the experiment on a free port and yield the experiment that uses it; stop the server at the
    end. Raises the errors of `find_interpreter`, `model_folder` and `VllmServer.start`."""
    tell = on_server or (lambda line: None)
    interpreter, port = find_interpreter(), free_port(LOOPBACK)
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
