"""Connects this process to a Ray cluster: one that pvg starts on this machine, or one that runs already.

Ray runs code that its processes send each other, so anyone who reaches a cluster can run anything on its nodes. pvg
uses only clusters with token authentication, and those that it starts listen on 127.0.0.1 alone.

Only the modules ray_* and the agents on the nodes import Ray, and only when they are called.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future, wait
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from typing import Any, TypeVar

import pvg
from pvg.errors import MissingRequirementError, UsageError, WorkerLostError, counted, one_line, shortened
from pvg.inputs import has_place
from pvg.installation import install_extra
from pvg.telemetry.device import processor
from pvg.telemetry.events import Events, SilentEvents, patience
from pvg.telemetry.waits import finished, fulfil, in_daemon, usable_cores

LONGEST_LINE = 300
REACH_S = 10.0  # to connect to the head's port
ROOM_S = 300.0  # how long a run waits for a cluster with room, at its start and after a loss
CALL_S = 120.0  # for an answer of Ray; most requests between its processes end after 60 s
LEAVE_S = 30.0  # Ray's own shutdown waits without a limit for a head that hangs
MODE = "RAY_AUTH_MODE"
TOKEN = "RAY_AUTH_TOKEN"
# Ray's name for: nodes use 127.0.0.1. Otherwise Ray replaces a loopback address by the machine's own.
LOOPBACK_ONLY = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
LOOPBACK = ("127.0.0.1", "localhost")
VISIBLE = "CUDA_VISIBLE_DEVICES"
GPU_S = 10.0  # for Ray to reserve a GPU on this machine
PROBE_S = 2.0  # between two probes of the head, and a part of the wait for its answer
HEAD_MISSED = 14  # such waits
INSTALL = "Install pvg on all nodes, with the same version and the extra cluster"
RESOURCES = {"num_cpus": "CPU", "num_gpus": "GPU"}

T = TypeVar("T")
ActorT = TypeVar("ActorT", bound="RayActor")


class ClusterFullError(MissingRequirementError):
    """No node has had room for long, but one may have later."""


class RayClient:
    """A connection that opens in the background, with the arguments of `open_cluster`. `end` it. One thread makes all
    calls of Ray that block, and lives as long as Ray's processes, which end with it. `events` gets notices."""

    def __init__(self, workers: int, address: str | None, events: Events | None = None) -> None:
        self.events = events or SilentEvents()
        self._where = address or LOOPBACK[0]
        self._calls = asyncio.new_event_loop()
        in_daemon(self._calls.run_forever, "pvg-ray")  # a call that hangs must not keep this process from ending
        self._connected = self._submit(
            open_cluster, workers, address, lambda line: self.events.event("workers", event="ray", text=line)
        )
        self._ended = False

    @property
    def ray(self) -> Any:
        """The module ray, after `connection`."""
        return self._connected.result()

    async def connection(self) -> Any:
        """The module ray. Raises WorkerLostError if the cluster is not open in ROOM_S."""
        return await self._within(ROOM_S, self._connected, "the start")

    async def call(self, work: Callable[..., T], *arguments: object) -> T:
        """A call of Ray that blocks. Raises WorkerLostError if it has no answer in CALL_S, or Ray gives up earlier."""
        return await self._within(CALL_S, self._submit(work, *arguments), "an answer")

    async def _within(self, limit_s: float, answer: Future[T], what: str) -> T:
        try:
            async with patience(self.events, f"{what} of the Ray cluster at {self._where}", limit_s):
                return await asyncio.shield(asyncio.wrap_future(answer))
        except TimeoutError:  # also of Ray itself
            raise self._lost() from None

    @asynccontextmanager
    async def room(self, what: str, needs: Mapping[str, int], remedy: str) -> AsyncIterator[None]:
        """Limits the block, which starts `what` on a node with what it `needs`, to ROOM_S. Raises ClusterFullError."""
        ray = await self.connection()
        try:
            async with patience(self.events, f"room for {what} on the Ray cluster", ROOM_S):
                yield
        except TimeoutError:
            free, all_ = await self.call(ray.available_resources), await self.call(ray.cluster_resources)
            kinds = {RESOURCES[name]: number for name, number in needs.items() if number}
            found = ", ".join(f"{free.get(kind, 0):g} of {all_.get(kind, 0):g} {kind}s are free" for kind in kinds)
            parts = " and ".join(counted(number, kind) for kind, number in kinds.items())
            raise ClusterFullError(
                f"The Ray cluster had no node for {what} with {parts} in {ROOM_S:g} s ({found}).",
                f"{remedy}, or add a node: ray start --address HOST:PORT",
            ) from None

    async def started(self, kind: type, argument: object, needs: Mapping[str, int], member: type[ActorT]) -> ActorT:
        """An actor `kind(argument)`, once it runs on a node with what it `needs` (num_cpus, num_gpus); it may have
        ended since. Actors spread over the nodes. Raises MissingRequirementError for a node where pvg cannot work."""
        ray = await self.connection()

        def start() -> ActorT:
            handle = ray.remote(kind).options(scheduling_strategy="SPREAD", **needs).remote(argument)
            return member(self, handle, handle.serve.options(num_returns="streaming").remote())

        def end(started: Future[ActorT]) -> None:
            if started.exception() is None:
                started.result().end()

        starting = self._submit(start)
        try:
            actor = await self._within(CALL_S, starting, "an answer")
            if (found := await actor.next()) is not None:
                refuse_other_versions(found)
                actor.found = found
            elif (error := unfit_node(actor.error)) is not None:
                raise error
        except BaseException:
            starting.add_done_callback(end)  # it may start after its caller has left
            raise
        return actor

    async def watch(self) -> None:
        """Raises WorkerLostError when the cluster's head has ended or hangs: 60 s after its end, Ray would end this
        process without a word. Counts waits, not seconds: this process may have been stopped too."""
        while True:
            await asyncio.sleep(PROBE_S)
            if not self._connected.done():  # the others wait for it
                continue
            answer, missed = asyncio.wrap_future(in_daemon(self.ray.nodes, "pvg-ray-probe")), 0
            while not (await asyncio.wait([answer], timeout=PROBE_S))[0]:
                missed += 1
                if missed == HEAD_MISSED:
                    raise self._lost()
            if answer.exception() is not None:
                raise self._lost()

    def _lost(self) -> WorkerLostError:
        return WorkerLostError(
            f"The head of the Ray cluster at {self._where} does not answer.",
            "Start the cluster again, unless pvg started it, and resume the run",
        )

    def own_gpu(self) -> int:
        """Reserve a GPU of this machine for this process, until it leaves the cluster. Returns its number among those
        that this process sees. Blocks no longer than `call`."""
        call = self.call(lambda: _reserved_gpu(self.ray))
        reserved = finished(in_daemon(lambda: asyncio.run(call), "pvg-gpu"))
        visible = os.environ.get(VISIBLE)
        if visible is not None and reserved not in visible.split(","):
            raise MissingRequirementError(
                f"Ray has reserved GPU {reserved} for this process, which {VISIBLE} = {visible!r} hides.",
                f"Set {VISIBLE} as it was when Ray was started on this machine",
            )
        return int(reserved) if visible is None else visible.split(",").index(reserved)

    def kill(self, actor: Any) -> None:
        if not self._ended:
            self._submit(lambda: self.ray.kill(actor))

    def end(self) -> None:
        """Leave the cluster, which ends this process's actors, and the cluster if pvg has started it. Goes on after
        LEAVE_S. A second call does nothing."""
        if self._ended:
            return
        self._ended = True
        left = self._submit(lambda: self._connected.result().shutdown())
        self._calls.call_soon_threadsafe(self._calls.stop)
        wait([left], LEAVE_S)
        if not left.done() and self._connected.done():  # Ray would wait again at the end of this process
            kill_own_head()

    def _submit(self, work: Callable[..., T], *arguments: object) -> Future[T]:
        future: Future[T] = Future()
        self._calls.call_soon_threadsafe(fulfil, future, partial(work, *arguments))
        return future


@dataclass(eq=False)
class RayActor:
    """An actor of Ray, and Ray's stream of what its `serve` yields: first `hello`, which `found` holds."""

    client: RayClient
    handle: Any
    stream: Any
    found: Mapping[str, Any] = field(default_factory=dict)
    error: BaseException | None = None  # Ray's, why it has ended
    ended: bool = False

    async def next(self) -> Any:
        """What `serve` yields next; None once the actor has ended."""
        try:
            return await (await anext(self.stream))
        except StopAsyncIteration:
            return None
        except self.client.ray.exceptions.RayError as error:
            self.error = error
            return None

    def end(self) -> None:
        """Kill it, without waiting for it. A second call does nothing."""
        if not self.ended:
            self.ended = True
            self.client.kill(self.handle)


def kill_own_head() -> None:
    """Kill the processes of a cluster that this process has started."""
    node = importlib.import_module("ray._private.worker")._global_node
    if node is not None:
        node.kill_all_processes(check_alive=False)


def _reserved_gpu(ray: Any) -> str:
    """Ray's name of a GPU of this machine that it keeps for this process."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    here = {"ray.io/node-id": ray.get_runtime_context().get_node_id()}
    group = ray.util.placement_group([{"GPU": 1}], bundle_label_selector=[here])
    if not group.wait(GPU_S):
        raise MissingRequirementError(
            "Ray has no free GPU on this machine, and the trainer needs one.",
            "Let Ray count this machine's GPUs (ray start --num-gpus=N) and leave one, or set models.device to cpu",
        )
    options = {"num_cpus": 0, "num_gpus": 1, "scheduling_strategy": PlacementGroupSchedulingStrategy(group)}
    seen = ray.remote(lambda: ray.get_runtime_context().get_accelerator_ids()["GPU"])
    return str(*ray.get(seen.options(**options).remote(), timeout=CALL_S))


def open_cluster(workers: int, address: str | None, log: Callable[[str], None]) -> Any:
    """Connect to the cluster at `address` (HOST:PORT), or start one on this machine with room for `workers`. The
    calling thread must live as long as the cluster. `log` gets what Ray would print to stdout, in any thread. Returns
    the module ray. Raises MissingRequirementError if that fails, and UsageError for what is not an address."""
    if address is not None:
        _prepare_to_join(address)
        remedy = "Copy ~/.ray/auth_token from its head to this machine, and make the machine a node:"
        remedy += f" RAY_AUTH_MODE=token ray start --address {address}"
        return _connected(log, f"This machine cannot join the Ray cluster at {address}", remedy, address)
    before = {TOKEN: os.environ[TOKEN]} if TOKEN in os.environ else {}
    # The token exists only in the environment of Ray's processes, so it is gone when they have ended.
    os.environ.update({**LOOPBACK_ONLY, MODE: "token", TOKEN: secrets.token_hex(32)})
    try:
        ray = _connected(
            log,
            "Ray could not start a cluster on this machine",
            "Use local workers: --cluster local",
            "local",
            num_cpus=max(usable_cores(), workers),
            include_dashboard=False,
            _node_name=socket.gethostname(),
            # Ray's workers have a lower priority than other programs by default.
            _system_config={"worker_niceness": 0, "prestart_worker_first_driver": False},
        )
    finally:
        del os.environ[TOKEN]
        os.environ.update(before)
    if (host := ray.util.get_node_ip_address()) not in LOOPBACK:
        ray.shutdown()
        raise MissingRequirementError(
            f"Ray listens at {host}, because this process imported it before pvg could configure it.",
            "Set RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0, or join a cluster that you start",
        )
    return ray


def _prepare_to_join(address: str) -> None:
    host, _, port = address.rpartition(":")
    if not port.isdecimal() or set(host) & set("/?#@") or not has_place(f"//{address}"):
        what = f"{shortened(address)!r} is no address of a Ray cluster."
        raise UsageError(what, "Give HOST:PORT, such as 10.0.0.1:6379")
    if os.environ.get(MODE, "token").lower() != "token":
        raise MissingRequirementError(
            f"{MODE} is {os.environ[MODE]!r}, and pvg joins only clusters with token authentication.",
            f"Start the cluster with {MODE}=token, and set it here too",
        )
    os.environ[MODE] = "token"
    try:
        socket.create_connection((host, int(port)), timeout=REACH_S).close()
    except OSError as error:
        raise MissingRequirementError(
            f"No Ray cluster answers at {address}: {error.strerror or error}.",
            "Start its head: RAY_AUTH_MODE=token ray start --head (it prints the address)",
        ) from None
    if host in LOOPBACK:
        os.environ.update(LOOPBACK_ONLY)


def _connected(log: Callable[[str], None], what: str, remedy: str, where: str, **options: object) -> Any:
    ray = _import(log)
    # As for a job of a client, Ray's workers then do not look for modules in the current folder of this process, where
    # a file of the user may have the name of a module.
    job = ray.job_config.JobConfig(_client_job=True)
    try:
        ray.init(where, log_to_driver=False, configure_logging=False, job_config=job, **options)
    except Exception as error:
        raise MissingRequirementError(f"{what}: {shortened(_cause(error), LONGEST_LINE)}.", remedy) from error
    return ray


def _cause(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[-1].rstrip(".") if lines else type(error).__name__


def _import(log: Callable[[str], None]) -> Any:
    # Ray's own handler of SIGTERM would abort this process 3 s after the signal, which asks a run to commit and stop.
    os.environ.setdefault("RAY_DISABLE_FAILURE_SIGNAL_HANDLER", "1")
    try:
        import ray
        import ray._private.worker as printing
        import ray.exceptions
        import ray.util
    except ModuleNotFoundError as error:
        raise MissingRequirementError(
            f"Ray is not installed ({error}).", f"Install it: {install_extra('cluster')}"
        ) from None

    def say(data: dict[str, Any], *_: object, **__: object) -> None:
        for text in data["lines"]:
            log(shortened(one_line(text), LONGEST_LINE))

    # Ray has no option for this. stdout may hold a JSON document, and the display is on stderr.
    printing.print_worker_logs = say
    logging.getLogger("ray").setLevel(logging.ERROR)
    forget_token()
    return ray


def forget_token() -> None:
    """Make Ray read the token again, because an earlier cluster of this process had another one."""
    importlib.import_module("ray._raylet").AuthenticationTokenLoader.instance().reset_cache()


# --- nodes ------------------------------------------------------------------------------------------------------------


def hello() -> dict[str, Any]:
    """What an actor says first: where it runs, what must agree on all nodes for the same bits, Ray's authentication,
    and the GPUs that CUDA finds: those that Ray has reserved for it."""
    import ray

    own = ray.get_runtime_context().get_node_id()
    node = next(node for node in ray.nodes() if node["NodeID"] == own)
    return {
        "node": node["NodeName"],
        "address": node["NodeManagerAddress"],
        "pid": os.getpid(),
        "pvg": pvg.__version__,
        "torch": metadata.version("torch"),
        "processor": processor(),
        "auth": os.environ.get(MODE, ""),
        "gpus": os.environ.get(VISIBLE, ""),
    }


def cause_of(error: BaseException | None) -> str:
    """Why an actor has ended, from Ray's error of its call."""
    if error is None:
        return "it has ended"
    if type(error).__name__ == "ActorUnavailableError":
        return "Ray cannot reach it"
    found = _cause(error).partition(". Some common causes include")[0]  # a list of guesses follows
    _, died, detail = found.partition("Worker exit detail: ")
    return f"its process has died ({detail})" if died else found


def unfit_node(error: BaseException | None) -> MissingRequirementError | None:
    """The error for a node on which pvg cannot work; None for an actor that has died, which another may replace."""
    text = str(error)  # RayTaskError: the actor raised it
    if hasattr(error, "as_instanceof_cause") or "ModuleNotFoundError" in text or "ImportError" in text:
        return MissingRequirementError(f"A node of the Ray cluster cannot run pvg: {cause_of(error)}.", INSTALL)
    return None


def refuse_other_versions(found: Mapping[str, Any]) -> None:
    """Raises MissingRequirementError for a node whose results would differ, or on which anyone can run code."""
    for package, own in (("pvg", pvg.__version__), ("torch", metadata.version("torch"))):
        if found[package] != own:
            raise MissingRequirementError(
                f"Node {found['node']} has {package} {found[package]}, and this process has {own}.",
                "Install the same versions on all nodes",
            )
    if found["auth"].lower() != "token":
        raise MissingRequirementError(
            f"Node {found['node']} does not require a token, so anyone who reaches it can run code there.",
            "Start all nodes with token authentication: RAY_AUTH_MODE=token ray start ...",
        )
