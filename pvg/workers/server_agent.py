"""What runs on a node of a cluster for one vLLM server: a Ray actor that has the server as its child.

The server loads the model on the node, from the folder or the hub that the experiment names. Its weights come later, by
the transport of the experiment. Ray passes the order and the news between its own processes; it transports no weights.

Invariant: the server ends with the actor (pvg.servers.supervisor), and Ray ends the actor with the driver.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pvg.config.load import build_experiment
from pvg.config.operation import Weights
from pvg.errors import ConfigurationError, MissingRequirementError, shortened
from pvg.servers.command import LOOPBACK, Interpreter, find_interpreter, model_folder, server_spec
from pvg.servers.control import KEY_VARIABLE
from pvg.servers.process import LogTail, VllmServer, free_port
from pvg.workers.ray_cluster import hello

LOOK_S = 1.0  # between two looks into the server's log
MOST_LINES = 20  # of the log, at a time
LONGEST_LINE = 500
NEEDS_FOLDER = ("filesystem", "lora")  # transports through `weights.root`
THREADS = "OMP_NUM_THREADS"


@dataclass(frozen=True)
class ServerOrder:
    """What a server is started with. `experiment`: plain data, with an absolute `weights.root`. `folder`: the driver's
    working folder, which the node may have too. `driver`: its address in the cluster. `mark`: a file that the driver
    has made in `weights.root`. `threads`: the driver's OMP_NUM_THREADS; Ray sets it to 1 in its processes."""

    experiment: Mapping[str, Any]
    folder: str
    driver: str
    key: str = field(repr=False)
    mark: str
    gpus: int
    threads: str | None


class ServerAgent:
    """Runs one server: `serve` ends with it."""

    def __init__(self, order: ServerOrder) -> None:
        self._order = order
        self._news: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._serving: asyncio.Task[None] | None = None

    async def serve(self) -> AsyncIterator[dict[str, Any]]:
        """Run a server until it ends, which raises why, or until `stop`. Meanwhile says what happens: {"news": "hello"
        | "ready" | "errors", ...}."""
        self._serving = asyncio.create_task(self._serve(self._order))
        self._serving.add_done_callback(lambda _: self._news.put_nowait({}))
        while news := await self._news.get():
            yield news
        if not self._serving.cancelled():
            self._serving.result()

    async def stop(self) -> None:
        """End the server and all of its processes."""
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.wait([self._serving])

    async def _serve(self, order: ServerOrder) -> None:
        with contextlib.suppress(OSError):
            os.chdir(order.folder)
        found = hello()
        self._tell("hello", **found)
        experiment = build_experiment(dict(order.experiment))
        check_folder(experiment.weights, order.mark)
        os.environ[KEY_VARIABLE] = order.key
        interpreter = await asyncio.to_thread(find_interpreter)
        check_device(interpreter, order.gpus)
        folder = await asyncio.to_thread(model_folder, experiment, "prover")
        host = address_for(found["address"], order.driver)
        port = free_port(host)
        log = experiment.weights.root / "logs" / f"prover-{host}-{port}.log"
        spec = server_spec(experiment, "prover", interpreter, folder, log=log, port=port, host=host)
        errors = LogTail(spec.log)
        # Ray has set the number of threads. And vLLM needs no part of this process's membership in the cluster.
        environment = {k: v for k, v in spec.environment.items() if not k.startswith("RAY_") and k != THREADS}
        environment |= {THREADS: order.threads} if order.threads is not None else {}
        async with VllmServer.start(replace(spec, environment=environment)) as server:
            self._tell("ready", url=server.url, boot=server.boot, pid=server.pid, log=str(spec.log))
            ended = asyncio.ensure_future(server.ended())
            try:
                while not ended.done():
                    await asyncio.wait([ended], timeout=LOOK_S)
                    if lines := errors.new_errors():
                        self._tell("errors", lines=[shortened(line, LONGEST_LINE) for line in lines[:MOST_LINES]])
                await ended
            finally:
                ended.cancel()

    def _tell(self, news: str, **fields: Any) -> None:
        self._news.put_nowait({"news": news, **fields})


def check_folder(weights: Weights, mark: str) -> None:
    """Raises MissingRequirementError if this node does not have the driver's `weights.root`, but the transport needs
    it."""
    if weights.transport.kind in NEEDS_FOLDER and not (weights.root / mark).exists():
        raise MissingRequirementError(
            f"The folder {weights.root} is not the driver's, but weights.transport = {weights.transport.kind!r} sends "
            "weights through it.",
            "Set weights.root to a folder that all nodes share. Only 'nccl', which is experimental, needs none",
        )


def check_device(interpreter: Interpreter, gpus: int) -> None:
    """Raises ConfigurationError if the node's vLLM does not compute on what Ray has reserved for it."""
    if (interpreter.device == "gpu") != (gpus > 0):
        needed = "0" if interpreter.device == "cpu" else "1 or more"
        raise ConfigurationError(
            f"{interpreter.python} has vLLM for the {interpreter.device.upper()}, but cluster.gpus_per_worker = "
            f"{gpus}.",
            f"Set cluster.gpus_per_worker to {needed}, or install the other build of vLLM on the node",
        )


def address_for(node: str, driver: str) -> str:
    """Where a server on `node` listens: no other machine reaches it if it runs on the driver's."""
    return LOOPBACK if node == driver else node
