"""Runs the prover's vLLM servers on the nodes of a Ray cluster.

    servers = RayServers(experiment, events)    # connects to the cluster, and returns at once
    await servers.start(engine.served)          # the first server is ready; each joins the fleet when it is

For each server, Ray starts an actor (`ServerAgent`) on a node with `cluster.gpus_per_worker` free GPUs. The server is
its child. Rollouts and weights go between the driver and the servers over HTTP, as to servers that you start. The fleet
retries requests, and brings a new server to the newest weights before its first request.

A server that ends is replaced, and so are its actor and its node.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from typing import Any

from pvg.config.experiment import Experiment
from pvg.errors import MissingRequirementError, PvgError, ServerUnavailableError, counted, shortened
from pvg.servers.control import control_key
from pvg.servers.fleet import Server
from pvg.servers.process import ServerFailedError
from pvg.servers.served_model import ServedModel
from pvg.store.atomic import make_directory
from pvg.telemetry.events import Events, SilentEvents
from pvg.workers.ray_cluster import PROBE_S, ROOM_S, RayClient, cause_of, refuse_other_versions, unfit_node
from pvg.workers.server_agent import LONGEST_LINE, MOST_LINES, THREADS, ServerAgent, ServerOrder

AWAY_S = 60.0  # after which a server that does not answer is replaced; a short break of the network ends sooner
MOST_FAILURES = 3  # starts in a row that fail
PAUSE_S = 2.0  # after the first of them
STOP_S = 30.0  # for the servers to end at the end of a run


class _Place:
    """One server and its successors: a reservation of the cluster."""

    def __init__(self, number: int, actor: Any, news: Any) -> None:
        self.number = number
        self.actor = actor
        self.news = news  # Ray's, of `ServerAgent.serve`
        self.node: str | None = None  # its name, once the actor runs
        self.server: Server | None = None  # once it is ready
        self.starting = False
        self.away_since: float | None = None

    @property
    def names(self) -> dict[str, Any]:
        url = {} if self.server is None else {"server": self.server.url}
        return {"number": self.number, "node": self.node or "?", **url}


class RayServers:
    """A user of the cluster, through `client`. `close` it, or `end` it if it was not started."""

    def __init__(self, experiment: Experiment, events: Events | None = None) -> None:
        cluster = experiment.server_cluster
        assert cluster is not None
        self._experiment = experiment
        self._events = events or SilentEvents()
        self._count = cluster.workers or 1
        self._needs = {"num_cpus": 1, "num_gpus": cluster.gpus_per_worker}
        self._root = experiment.weights.root.absolute()
        self._mark = f"cluster-{secrets.token_hex(8)}.mark"
        self.client = RayClient(self._count, cluster.address, self._events)
        self._places: set[_Place] = set()
        self._supervising: asyncio.Task[None] | None = None

    async def start(self, served: ServedModel) -> None:
        """Start the servers, and wait until one of them is ready. The others join `served` later.

        Raises MissingRequirementError if the cluster has no room or a node cannot serve, ServerUnavailableError if a
        server does not start.
        """
        self._served = served
        self._first: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._ray = await self.client.connection()
        self._order = await asyncio.to_thread(self._prepare)
        what = "starts a vLLM server" if self._count == 1 else f"starts {self._count} vLLM servers"
        self._events.event("workers", event="servers", why=f"pvg {what} on the Ray cluster, which may take minutes")
        self._supervising = asyncio.create_task(self._supervise())
        await self._first

    async def close(self) -> None:
        """End all servers, and leave the cluster. A second call does nothing."""
        if self._supervising is not None:
            self._supervising.cancel()
            await asyncio.gather(self._supervising, return_exceptions=True)
        if places := [place for place in self._places if place.starting or place.server is not None]:
            stopping = [asyncio.ensure_future(place.actor.stop.remote()) for place in places]
            _, late = await asyncio.wait(stopping, timeout=STOP_S)
            for one in late:
                one.cancel()
            await asyncio.gather(*stopping, return_exceptions=True)  # an actor may have ended
        self._places.clear()
        (self._root / self._mark).unlink(missing_ok=True)
        await asyncio.get_running_loop().run_in_executor(None, self.end)

    def end(self) -> None:
        """Leave the cluster: Ray ends the actors, and so the servers."""
        self.client.end()

    # --- the cluster --------------------------------------------------------------------------------------------------

    def _prepare(self) -> ServerOrder:
        """What all servers are started with. The mark shows the nodes whether they have the same folder."""
        make_directory(self._root)
        (self._root / self._mark).touch()
        plain = self._experiment.plain()
        return ServerOrder(
            experiment={**plain, "weights": {**plain["weights"], "root": str(self._root)}},
            folder=os.getcwd(),
            driver=str(self._ray.util.get_node_ip_address()),
            key=control_key(self._root),
            mark=self._mark,
            gpus=self._needs["num_gpus"],
            threads=os.environ.get(THREADS),
        )

    # --- servers ------------------------------------------------------------------------------------------------------

    async def _supervise(self) -> None:
        """Keep all servers running. End the run after a defect, if the cluster's head is lost, or when pvg keeps no
        server running any more."""
        keeping = {asyncio.create_task(self._keep(number)) for number in range(self._count)}
        watching = asyncio.create_task(self.client.watch())
        try:
            while True:
                ended, _ = await asyncio.wait({watching, *keeping}, return_when=asyncio.FIRST_COMPLETED)
                keeping -= ended
                for task in ended:
                    error = task.exception()
                    assert error is not None, "it goes on until it raises"
                    if task is watching or not isinstance(error, PvgError) or not keeping or not self._first.done():
                        if self._first.done():
                            self._served.fleet.fail(error)
                        else:
                            self._first.set_exception(error)
                        return
                    why = f"{error.message} pvg continues with {counted(len(keeping), 'server')}"
                    self._events.event("workers", event="server given up", why=why)
        finally:
            for task in (watching, *keeping):
                task.cancel()
            await asyncio.gather(watching, *keeping, return_exceptions=True)

    async def _keep(self, number: int) -> None:
        """Keep one server running. Raises why that is impossible."""
        failed = 0
        while True:
            place = _Place(number, *await self.client.start_actor(ServerAgent, self._order, **self._needs))
            self._places.add(place)
            error = await self._follow(place)
            self._places.discard(place)
            failed = failed + 1 if place.server is None else 0
            lines = error.lines[-MOST_LINES:] if isinstance(error, ServerFailedError) else []
            why = error.message.rstrip(".")
            for line in lines:
                self._events.event("workers", event="server printed", **place.names, text=shortened(line, LONGEST_LINE))
            self._events.event("workers", event="server lost", **place.names, why=why)
            await self._drop(place)
            again = isinstance(error, ServerUnavailableError)
            hopeless = bool(failed and lines) and not self._first.done()  # the others would fail as well
            if not again or hopeless or failed == MOST_FAILURES:
                kind = ServerUnavailableError if again else MissingRequirementError
                where = "the cluster" if place.node is None else f"node {place.node}"
                raise kind(f"No vLLM server runs on {where}: {why}.", error.remedy)
            await asyncio.sleep(PAUSE_S * failed)

    async def _follow(self, place: _Place) -> PvgError:
        """Take the news of a server until it ends, or does not answer. Returns why: a ServerUnavailableError if another
        attempt may help."""
        coming = asyncio.create_task(_next(place.news))
        until = asyncio.get_running_loop().time() + ROOM_S
        try:
            while True:
                await asyncio.wait([coming], timeout=PROBE_S)
                if coming.done():
                    await self._take(place, coming.result())
                    coming = asyncio.create_task(_next(place.news))
                if place.server is not None and place.server.state == "up":
                    self._set_starting(place, False)
                if place.node is None and asyncio.get_running_loop().time() > until:
                    remedy = "Use fewer servers (-s cluster.workers=N)"
                    error = await self.client.no_room("a vLLM server", self._needs, remedy)
                    return ServerUnavailableError(error.message, error.remedy) if self._first.done() else error
                if self._is_lost(place):
                    return ServerUnavailableError(f"The server has not answered for {AWAY_S:g} s")
        except PvgError as error:
            return error
        except self._ray.exceptions.RayError as error:
            if isinstance(cause := getattr(error, "cause", None), PvgError):  # the actor raised it
                return cause
            return unfit_node(error) or ServerUnavailableError(cause_of(error))
        finally:
            coming.cancel()

    async def _take(self, place: _Place, news: dict[str, Any]) -> None:
        match news.pop("news"):
            case "hello":
                place.node = str(news["node"])
                refuse_other_versions(news)
                self._set_starting(place, True)
                self._events.event("workers", event="server starting", **place.names, agent=news["pid"])
            case "ready":
                place.server = self._served.add(news.pop("url"))
                self._events.event("workers", event="server started", **place.names, **news)
                if not self._first.done():
                    self._first.set_result(None)
            case "errors":
                for line in news["lines"]:
                    self._events.event("workers", event="server printed", **place.names, text=line)

    def _set_starting(self, place: _Place, starting: bool) -> None:
        """Requests wait longer for a server while one is starting."""
        self._served.fleet.starting += starting - place.starting
        place.starting = starting

    def _is_lost(self, place: _Place) -> bool:
        """Whether the fleet has not reached a server for AWAY_S: its node or its engine hangs."""
        if place.server is None or place.server.state != "away":
            place.away_since = None
            return False
        now = asyncio.get_running_loop().time()
        place.away_since = now if place.away_since is None else place.away_since
        return now - place.away_since > AWAY_S

    async def _drop(self, place: _Place) -> None:
        self._set_starting(place, False)
        if place.server is not None:
            await self._served.remove(place.server.url, drain_s=0.0)
        self.client.dismiss(place.actor)


async def _next(news: Any) -> dict[str, Any]:
    found: dict[str, Any] = await (await anext(news))
    return found
