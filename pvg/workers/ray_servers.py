"""Runs the prover's vLLM servers on the nodes of a Ray cluster.

For each server, Ray starts an actor (`ServerAgent`) on a node with `cluster.gpus_per_worker` free GPUs. The server is
its child. Rollouts and weights go over HTTP, as to servers that you start. The fleet retries requests, and brings a new
server to the newest weights before its first request. A server that ends is replaced, and so are its actor and its
node. It loads the model on the node, from the folder or the hub that the experiment names.

Invariant: a server ends with its actor (pvg.servers.supervisor), and Ray ends the actor with the driver.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from pvg.config.experiment import Experiment
from pvg.config.load import build_experiment
from pvg.config.operation import Weights
from pvg.errors import ConfigurationError, MissingRequirementError, PvgError, ServerUnavailableError, counted, shortened
from pvg.servers.command import LOOPBACK, Interpreter, find_interpreter, model_folder, server_spec
from pvg.servers.control import KEY_VARIABLE, control_key
from pvg.servers.fleet import Server
from pvg.servers.process import LogTail, ServerFailedError, VllmServer, free_port
from pvg.servers.served_model import ServedModel
from pvg.store.atomic import make_directory
from pvg.telemetry.events import Events
from pvg.workers.ray_cluster import PROBE_S, ClusterFullError, RayActor, RayClient, cause_of, hello, unfit_node

AWAY_S = 60.0  # after which a server that does not answer is replaced; a short break of the network ends sooner
MOST_FAILURES = 3  # starts in a row that fail
PAUSE_S = 2.0  # after the first of them
STOP_S = 30.0  # for the servers to end at the end of a run
LOOK_S = 1.0  # between two looks into the server's log
MOST_LINES = 20  # of the log, at a time
LONGEST_LINE = 500
NEEDS_FOLDER = ("filesystem", "lora")  # transports through `weights.root`
THREADS = "OMP_NUM_THREADS"


@dataclass(eq=False)
class _Place:
    """One server. `actor`: once it runs. `server`: once it is ready."""

    number: int
    actor: RayActor | None = None
    server: Server | None = None
    starting: bool = False
    away_since: float | None = None

    @property
    def names(self) -> dict[str, Any]:
        url = {} if self.server is None else {"server": self.server.url}
        return {"number": self.number, "node": self.actor.found["node"] if self.actor else "?", **url}


class RayServers(RayClient):
    """`close` it, or `end` it if it was not started."""

    def __init__(self, experiment: Experiment, events: Events | None = None) -> None:
        cluster = experiment.server_cluster
        assert cluster is not None
        self._count = self._kept = cluster.workers or 1
        super().__init__(self._count, cluster.address, events)
        self._experiment = experiment
        self._needs = {"num_cpus": 1, "num_gpus": cluster.gpus_per_worker}
        self._root = experiment.weights.root.absolute()
        self._mark = f"cluster-{secrets.token_hex(8)}.mark"
        self._places: set[_Place] = set()
        self._supervising: asyncio.Task[None] | None = None

    async def start(self, served: ServedModel) -> None:
        """Start the servers, and wait until one of them is ready. The others join `served` later. Raises why that is
        impossible."""
        self._served = served
        self._first: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        await self.connection()
        self._order = await asyncio.to_thread(self._prepare)
        why = f"pvg starts {counted(self._count, 'vLLM server')} on the Ray cluster, which may take minutes"
        self.events.event("workers", event="servers", why=why)
        self._supervising = asyncio.create_task(self._supervise())
        await self._first

    async def close(self) -> None:
        if self._supervising is not None:
            self._supervising.cancel()
            await asyncio.gather(self._supervising, return_exceptions=True)
        stopping = [place.actor.handle.stop.remote() for place in self._places if place.actor is not None]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                await asyncio.gather(*stopping, return_exceptions=True)  # an actor may have ended
        (self._root / self._mark).unlink(missing_ok=True)
        await asyncio.get_running_loop().run_in_executor(None, self.end)

    def _prepare(self) -> ServerOrder:
        make_directory(self._root)
        (self._root / self._mark).touch()
        plain = self._experiment.plain()
        return ServerOrder(
            experiment={**plain, "weights": {**plain["weights"], "root": str(self._root)}},
            folder=os.getcwd(),
            driver=str(self.ray.util.get_node_ip_address()),
            key=control_key(self._root),
            mark=self._mark,
            gpus=self._needs["num_gpus"],
            threads=os.environ.get(THREADS),
        )

    # --- servers ------------------------------------------------------------------------------------------------------

    async def _supervise(self) -> None:
        """Keep all servers running. End the run after a defect, if the head is lost, or without any server."""
        try:
            async with asyncio.TaskGroup() as group:
                for work in (self.watch(), *map(self._keep, range(self._count))):
                    group.create_task(work)
        except* Exception as errors:  # noqa: BLE001 - the run ends with it
            if self._first.done():
                self._served.fleet.fail(errors.exceptions[0])
            else:
                self._first.set_exception(errors.exceptions[0])

    async def _keep(self, number: int) -> None:
        """Keep one server running. Raises why that is impossible, if no other one is kept or is up so far."""
        failed = 0
        while True:
            place = _Place(number)
            self._places.add(place)
            try:
                await self._follow(place)
            except PvgError as ended:
                error = ended
            self._places.discard(place)
            failed = failed + 1 if place.server is None else 0
            lines = error.lines if isinstance(error, ServerFailedError) else []
            why = error.message.rstrip(".")
            for line in lines:
                self.events.event("workers", event="server printed", **place.names, text=shortened(line, LONGEST_LINE))
            self.events.event("workers", event="server lost", **place.names, why=why)
            if place.server is not None:
                await self._served.remove(place.server.url, drain_s=0.0)
            if place.actor is not None:
                place.actor.end()
            full = isinstance(error, ClusterFullError)  # a cluster that has had room may have some later
            again = isinstance(error, ServerUnavailableError) or (full and self._first.done())
            hopeless = bool(failed and lines) and not self._first.done()  # the others would fail as well
            if not again or hopeless or failed == MOST_FAILURES:
                kind = ServerUnavailableError if again else MissingRequirementError
                where = "the cluster" if place.actor is None else f"node {place.names['node']}"
                self._kept -= 1
                if not self._kept or not self._first.done():
                    raise kind(f"No vLLM server runs on {where}: {why}.", error.remedy)
                why = f"No vLLM server runs on {where}: {why}. pvg continues with {counted(self._kept, 'server')}"
                self.events.event("workers", event="server given up", why=why)
                return
            await asyncio.sleep(PAUSE_S * failed)

    async def _follow(self, place: _Place) -> NoReturn:
        """Start a server, and take its news until it ends, or does not answer. Raises why: ServerUnavailableError if
        another attempt may help, or ClusterFullError."""
        async with self.room("a vLLM server", self._needs, "Use fewer servers (-s cluster.workers=N)"):
            actor = await self.started(ServerAgent, self._order, self._needs, RayActor)
        if not actor.found:
            raise ServerUnavailableError(cause_of(actor.error))
        place.actor = actor
        self._set_starting(place, True)
        self.events.event("workers", event="server starting", **place.names, agent=actor.found["pid"])
        coming = asyncio.create_task(actor.next())
        try:
            while True:
                await asyncio.wait([coming], timeout=PROBE_S)
                if coming.done():
                    if (news := coming.result()) is None:
                        cause = getattr(actor.error, "cause", None)  # the actor raised it
                        own = cause if isinstance(cause, PvgError) else unfit_node(actor.error)
                        raise own or ServerUnavailableError(cause_of(actor.error))
                    self._take(place, news)
                    coming = asyncio.create_task(actor.next())
                if place.server is not None and place.server.state == "up":
                    self._set_starting(place, False)
                if self._is_lost(place):
                    raise ServerUnavailableError(f"The server has not answered for {AWAY_S:g} s")
        finally:
            coming.cancel()
            self._set_starting(place, False)

    def _take(self, place: _Place, news: dict[str, Any]) -> None:
        if news.pop("news") == "ready":
            place.server = self._served.add(news.pop("url"))
            self.events.event("workers", event="server started", **place.names, **news)
            if not self._first.done():
                self._first.set_result(None)
        else:
            for line in news["lines"]:
                self.events.event("workers", event="server printed", **place.names, text=line)

    def _set_starting(self, place: _Place, starting: bool) -> None:
        self._served.fleet.starting += starting - place.starting  # then requests wait longer for a server
        place.starting = starting

    def _is_lost(self, place: _Place) -> bool:
        """Whether the fleet has not reached a server for AWAY_S: its node or its engine hangs."""
        now, away = asyncio.get_running_loop().time(), place.server is not None and place.server.state == "away"
        place.away_since = (place.away_since or now) if away else None
        return place.away_since is not None and now - place.away_since > AWAY_S


# --- on a node --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ServerOrder:
    """What a server is started with. `experiment`: plain data, with an absolute `weights.root`. `folder`, `driver`: the
    driver's working folder, which the node may have too, and its address. `mark`: a file that the driver has made in
    `weights.root`. `threads`: the driver's OMP_NUM_THREADS; Ray sets it to 1 in its processes."""

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
        self._serving: asyncio.Task[None]

    async def serve(self) -> AsyncIterator[dict[str, Any]]:
        """Run a server until it ends, which raises why, or until `stop`. Says `hello`, and then what happens: {"news":
        "ready" | "errors", ...}."""
        found = hello()
        self._serving = asyncio.create_task(self._serve(found["address"]))
        self._serving.add_done_callback(lambda _: self._news.put_nowait({}))
        yield found
        while news := await self._news.get():
            yield news
        if not self._serving.cancelled():
            self._serving.result()

    async def stop(self) -> None:
        """Call it after `serve` has said `hello`."""
        self._serving.cancel()
        await asyncio.wait([self._serving])

    async def _serve(self, address: str) -> None:
        order = self._order
        with contextlib.suppress(OSError):
            os.chdir(order.folder)
        experiment = build_experiment(dict(order.experiment))
        check_folder(experiment.weights, order.mark)
        os.environ[KEY_VARIABLE] = order.key
        interpreter = await asyncio.to_thread(find_interpreter)
        check_device(interpreter, order.gpus)
        folder = await asyncio.to_thread(model_folder, experiment, "prover")
        host = address_for(address, order.driver)
        port = free_port(host)
        log = experiment.weights.root / "logs" / f"prover-{host}-{port}.log"
        spec = server_spec(experiment, "prover", interpreter, folder, log=log, port=port, host=host)
        errors = LogTail(spec.log)
        # Ray has set the number of threads. And vLLM needs no part of this process's membership in the cluster.
        environment = {k: v for k, v in spec.environment.items() if not k.startswith("RAY_") and k != THREADS}
        environment |= {THREADS: order.threads} if order.threads is not None else {}
        async with VllmServer.start(replace(spec, environment=environment)) as server:
            ready = {"url": server.url, "boot": server.boot, "pid": server.pid, "log": str(spec.log)}
            self._news.put_nowait({"news": "ready", **ready})
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_S):
                        await server.ended()  # raises why
                if lines := [shortened(line, LONGEST_LINE) for line in errors.new_errors()[:MOST_LINES]]:
                    self._news.put_nowait({"news": "errors", "lines": lines})


def check_folder(weights: Weights, mark: str) -> None:
    if weights.transport.kind in NEEDS_FOLDER and not (weights.root / mark).exists():
        raise MissingRequirementError(
            f"The folder {weights.root} is not the driver's, but weights.transport = {weights.transport.kind!r} sends "
            "weights through it.",
            "Set weights.root to a folder that all nodes share. Only 'nccl', which is experimental, needs none",
        )


def check_device(interpreter: Interpreter, gpus: int) -> None:
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
