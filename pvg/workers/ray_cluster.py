"""Connects this process to a Ray cluster: one that pvg starts on this machine, or one that runs already.

Ray runs code that its processes send each other, so anyone who reaches a cluster can run anything on its nodes. pvg
uses only clusters with token authentication, and those that it starts listen on 127.0.0.1 alone.

Only the modules ray_* and the agents on the nodes import Ray, and only when they are called.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import os
import secrets
import socket
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

import psutil

import pvg
from pvg.errors import MissingRequirementError, UsageError, WorkerLostError, one_line, shortened
from pvg.inputs import has_place
from pvg.installation import install_extra
from pvg.telemetry.device import processor
from pvg.telemetry.events import Events, SilentEvents, patience
from pvg.telemetry.waits import finished, in_daemon, usable_cores

LONGEST_LINE = 300
REACH_S = 10.0  # to connect to the head's port
ASK_S = 0.5  # between two questions whether there is room
ROOM_S = 300.0  # how long a run waits for a cluster with room, at its start and after a loss
CALL_S = 120.0  # for an answer of Ray; most requests between its processes end after 60 s
LEAVE_S = 30.0  # Ray's own shutdown waits without a limit for a head that hangs
MODE = "RAY_AUTH_MODE"
TOKEN, TOKEN_FILE = "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
# Ray's name for: nodes use 127.0.0.1. Otherwise Ray replaces a loopback address by the machine's own.
LOOPBACK_ONLY = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
LOOPBACK = ("127.0.0.1", "localhost")
VISIBLE = "CUDA_VISIBLE_DEVICES"
GPU_S = 10.0  # for Ray to reserve a GPU on this machine
PROBE_S = 2.0  # between two probes of the head, and for its answer
HEAD_MISSED = 7  # at most 28 s; 60 s after the head has ended, Ray ends this process with exit code 1

T = TypeVar("T")


@dataclass(frozen=True)
class RayConnection:
    """This process as part of a cluster. `host`: the address of this machine in it. `session`: Ray's folder of a
    cluster that pvg has started."""

    ray: Any
    host: str
    session: str | None = None

    def node_name(self, id_: str) -> str:
        """A node's name; with a part of its id if others have the same name."""
        names = {node["NodeID"]: node["NodeName"] for node in self.ray.nodes()}
        own = names.get(id_, id_)
        return f"{own}/{id_[:6]}" if list(names.values()).count(own) > 1 else str(own)

    def cause(self, error: BaseException | None) -> str:
        """Why an actor has ended, from the error of its call."""
        if isinstance(error, self.ray.exceptions.ActorUnavailableError):
            return "Ray cannot reach it"
        found = _cause(error).strip() if error is not None and str(error).strip() else "it has ended"
        found = found.partition(". Some common causes include")[0]  # a list of guesses follows
        _, died, detail = found.partition("Worker exit detail: ")
        return f"its process has died ({detail})" if died else found

    def close(self) -> None:
        """Leave the cluster; one that pvg has started ends."""
        self.ray.shutdown()
        if self.session is not None:
            end_session(self.session)


def end_session(folder: str) -> None:
    """Kill the processes of a Ray session that are left. If a head is killed, an agent tries to reach it for another
    minute."""
    for process in psutil.process_iter(["cmdline"]):
        with contextlib.suppress(psutil.Error):
            if _is_of_session(process, process.info["cmdline"] or [""], folder):
                process.kill()


def _is_of_session(process: psutil.Process, command: list[str], folder: str) -> bool:
    """Agents replace their command line by a name, but their output goes to files of the session."""
    if {f"--session-dir={folder}", f"--session_dir={folder}"} & set(command):
        return True
    named = command[0].startswith("ray::")
    return named and any(file.path.startswith(f"{folder}/") for file in process.open_files())


class RayClient:
    """A connection that opens in the background. One thread makes all calls of Ray that block, and lives as long as
    Ray's processes, which end with it. Takes the arguments of `open_cluster`. `end` it. `events` gets notices, and what
    Ray would print."""

    def __init__(self, workers: int, address: str | None, events: Events | None = None) -> None:
        self.events = events or SilentEvents()
        self._where = address or LOOPBACK[0]
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        in_daemon(self._make_calls, "pvg-ray")  # a call that hangs must not keep this process from ending
        self._connected = self._submit(open_cluster, workers, address, self._log)
        self._ended = False

    async def connection(self) -> RayConnection:
        """Raises the errors of `open_cluster`, and WorkerLostError if the cluster is not open in ROOM_S."""
        try:
            async with patience(self.events, f"the Ray cluster at {self._where} to start", ROOM_S):
                return await asyncio.shield(asyncio.wrap_future(self._connected))
        except TimeoutError:
            raise head_lost(self._where) from None

    async def call(self, work: Callable[..., T], *arguments: object) -> T:
        """A call of Ray that blocks. Raises WorkerLostError if it has no answer in CALL_S, or Ray gives up earlier."""
        called = asyncio.wrap_future(self._submit(work, *arguments))
        try:
            async with patience(self.events, f"an answer of the Ray cluster at {self._where}", CALL_S):
                return await called
        except TimeoutError:  # also of Ray itself
            raise head_lost(self._where) from None

    async def reserve(self, bundle: Mapping[str, float], count: int, what: str, remedy: str) -> Any:
        """A placement group of `count` bundles, spread over the nodes. Raises MissingRequirementError, with `remedy`,
        if the cluster has no room for `what` in ROOM_S."""
        ray = (await self.connection()).ray
        group = await self.call(lambda: ray.util.placement_group([dict(bundle)] * count, strategy="SPREAD"))
        try:
            async with patience(self.events, f"room for {what} on the Ray cluster", ROOM_S):
                while True:
                    if await self.call(group.wait, 0.1):  # other calls wait meanwhile
                        return group
                    await asyncio.sleep(ASK_S)
        except BaseException as error:
            self.later(ray.util.remove_placement_group, group)
            if not isinstance(error, TimeoutError):
                raise
            free, all_ = await self.call(ray.available_resources), await self.call(ray.cluster_resources)
            found = ", ".join(f"{free.get(kind, 0):g} of {all_.get(kind, 0):g} {kind}s are free" for kind in bundle)
            what = f"The Ray cluster had no room for {what} in {ROOM_S:g} s ({found})."
            raise MissingRequirementError(what, f"{remedy}, or add a node: ray start --address HOST:PORT") from None

    async def start_actor(self, kind: type, argument: object, group: Any, index: int, **options: float) -> Any:
        """An actor `kind(argument)` in a bundle of a placement group, and Ray's stream of what its `serve` yields."""
        ray = (await self.connection()).ray

        def start() -> Any:
            from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

            where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
            chosen = {**options, "max_restarts": 0, "max_task_retries": 0, "scheduling_strategy": where}
            actor = ray.remote(kind).options(**chosen).remote(argument)
            return actor, actor.serve.options(num_returns="streaming").remote()

        return await self.call(start)

    async def watch(self) -> None:
        """Raises WorkerLostError when the cluster's head has ended, because Ray would soon end this process without a
        word. Counts probes, not seconds: this process may have been stopped too."""
        ray, missed = (await self.connection()).ray, 0
        head = str(await self.call(lambda: ray.get_runtime_context().gcs_address))
        while missed < HEAD_MISSED:
            await asyncio.sleep(PROBE_S)
            missed = 0 if await answers(head) else missed + 1
        raise head_lost(head)

    def own_gpu(self) -> int:
        """See `reserve_gpu`. Blocks no longer than `call`, and raises its error too."""
        reserved = self.call(lambda: reserve_gpu(self._connected.result().ray))
        return finished(in_daemon(lambda: asyncio.run(reserved), "pvg-gpu"))

    def later(self, work: Callable[..., object], *arguments: object) -> None:
        """As `call`, without waiting."""
        if not self._ended:
            self._submit(work, *arguments)

    def dismiss(self, actor: Any) -> None:
        """Kill an actor."""
        self.later(lambda: self._connected.result().ray.kill(actor))

    def end(self) -> None:
        """Leave the cluster; Ray ends this process's actors. Goes on without an answer after LEAVE_S. A second call
        does nothing."""
        if self._ended:
            return
        self._ended = True
        left = self._submit(self._leave)
        self._calls.put(None)
        wait([left], LEAVE_S)
        if not left.done() and self._connected.done() and (session := self._connected.result().session):
            end_session(session)

    def _log(self, line: str) -> None:
        """Ray calls this from a thread."""
        self.events.event("workers", event="ray", text=line)

    def _leave(self) -> None:
        if self._connected.exception() is None:
            self._connected.result().close()

    def _submit(self, work: Callable[..., T], *arguments: object) -> Future[T]:
        future: Future[T] = Future()
        self._calls.put((future, partial(work, *arguments)))
        return future

    def _make_calls(self) -> None:
        while (call := self._calls.get()) is not None:
            future, work = call
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001 - the caller gets it
                future.set_exception(error)


def reserve_gpu(ray: Any) -> int:
    """Reserve a GPU of this machine for this process, until it leaves the cluster. Returns its number among the GPUs
    that this process sees. Blocks. Raises MissingRequirementError if Ray has none."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    here = {"ray.io/node-id": ray.get_runtime_context().get_node_id()}
    group = ray.util.placement_group([{"GPU": 1}], bundle_label_selector=[here])
    if not group.wait(GPU_S):
        raise MissingRequirementError(
            "Ray has no free GPU on this machine, and the trainer needs one.",
            "Let Ray count this machine's GPUs (ray start --num-gpus=N) and leave one, or set models.device to cpu",
        )
    options = {"num_cpus": 0, "num_gpus": 1, "scheduling_strategy": PlacementGroupSchedulingStrategy(group)}
    (reserved,) = ray.get(ray.remote(_gpus).options(**options).remote(), timeout=CALL_S)
    visible = os.environ.get(VISIBLE)
    if visible is None:
        return int(reserved)
    if reserved not in visible.split(","):
        raise MissingRequirementError(
            f"Ray has reserved GPU {reserved} for this process, which {VISIBLE} = {visible!r} hides.",
            f"Set {VISIBLE} as it was when Ray was started on this machine",
        )
    return visible.split(",").index(reserved)


def _gpus() -> list[str]:
    """Ray's names of the GPUs of the task that calls this."""
    import ray

    return list(ray.get_runtime_context().get_accelerator_ids()["GPU"])


async def answers(address: str) -> bool:
    """Whether a program listens at HOST:PORT."""
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(PROBE_S):
            _, writer = await asyncio.open_connection(host, int(port))
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


def head_lost(address: str) -> WorkerLostError:
    return WorkerLostError(
        f"The head of the Ray cluster at {address} does not answer.",
        "Start the cluster again, unless pvg started it, and resume the run",
    )


def open_cluster(workers: int, address: str | None, log: Callable[[str], None]) -> RayConnection:
    """Connect to the cluster at `address` (HOST:PORT), or start one on this machine with room for `workers`. Takes
    seconds. The calling thread must live as long as the cluster: Ray's processes end with it. `log` gets the lines
    that Ray would print to stdout, in any thread.

    Raises MissingRequirementError if that fails, and UsageError for what is not an address.
    """
    return _start(workers, log) if address is None else _join(address, log)


def _start(workers: int, log: Callable[[str], None]) -> RayConnection:
    before = os.environ.get(TOKEN)
    # The token exists only in the environment of Ray's processes, so it is gone when they have ended.
    os.environ.update({**LOOPBACK_ONLY, MODE: "token", TOKEN: secrets.token_hex(32)})
    try:
        ray = _import(log)
        _init(ray, workers)
    finally:
        os.environ.pop(TOKEN)
        if before is not None:
            os.environ[TOKEN] = before
    session = importlib.import_module("ray._private.worker")._global_node.get_session_dir_path()
    connection = RayConnection(ray, ray.util.get_node_ip_address(), session)
    if connection.host not in LOOPBACK:
        connection.close()
        raise MissingRequirementError(
            f"Ray listens at {connection.host}, because this process imported it before pvg could configure it.",
            "Set RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0, or join a cluster that you start",
        )
    return connection


def _options(ray: Any) -> dict[str, Any]:
    """Arguments of every `ray.init`. As for a job of a client, Ray's workers then do not look for modules in the
    current folder of this process, where a file of the user may have the name of a module."""
    job = ray.job_config.JobConfig(_client_job=True)
    return {"log_to_driver": False, "configure_logging": False, "job_config": job}


def _init(ray: Any, workers: int) -> None:
    try:
        ray.init(
            "local",
            num_cpus=max(usable_cores(), workers),
            include_dashboard=False,
            **_options(ray),
            _node_name=socket.gethostname(),
            # Ray's workers have a lower priority than other programs by default.
            _system_config={"worker_niceness": 0, "prestart_worker_first_driver": False},
        )
    except Exception as error:
        raise MissingRequirementError(
            f"Ray could not start a cluster on this machine: {_cause(error)}.", "Use local workers: --cluster local"
        ) from error


def _join(address: str, log: Callable[[str], None]) -> RayConnection:
    host, port = _host_and_port(address)
    _require_token(address)
    try:
        socket.create_connection((host, port), timeout=REACH_S).close()
    except OSError as error:
        raise MissingRequirementError(
            f"No Ray cluster answers at {address}: {error.strerror or error}.",
            "Start its head: RAY_AUTH_MODE=token ray start --head (it prints the address)",
        ) from None
    if host in LOOPBACK:
        os.environ.update(LOOPBACK_ONLY)
    ray = _import(log)
    try:
        ray.init(address, **_options(ray))
    except Exception as error:
        raise _refusal(ray, address, error) from error
    return RayConnection(ray, ray.util.get_node_ip_address())


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not port.isdecimal() or set(host) & set("/?#@") or not has_place(f"//{address}"):
        what = f"{shortened(address)!r} is no address of a Ray cluster."
        raise UsageError(what, "Give HOST:PORT, such as 10.0.0.1:6379")
    return host, int(port)


def _require_token(address: str) -> None:
    """Raises MissingRequirementError if this process has no token."""
    if os.environ.get(MODE, "token").lower() != "token":
        raise MissingRequirementError(
            f"{MODE} is {os.environ[MODE]!r}, and pvg joins only clusters with token authentication.",
            f"Start the cluster with {MODE}=token, and set it here too",
        )
    os.environ[MODE] = "token"
    if TOKEN in os.environ or TOKEN_FILE in os.environ or (Path.home() / ".ray" / "auth_token").is_file():
        return
    raise MissingRequirementError(
        f"There is no token for the Ray cluster at {address}.",
        "Make one on its head (ray get-auth-token --generate), and copy ~/.ray/auth_token from there to this machine",
    )


def _refusal(ray: Any, address: str, error: Exception) -> MissingRequirementError:
    """Why the cluster at `address` cannot be joined."""
    text = f"{error} {error.__cause__ or ''}"
    if isinstance(error, ray.exceptions.AuthenticationError) or "uthenticat" in text:
        return MissingRequirementError(
            f"The Ray cluster at {address} does not accept the token.",
            "Copy ~/.ray/auth_token from its head to this machine, or set RAY_AUTH_TOKEN_PATH",
        )
    if "node_ip_address" in text or "o node" in text:
        return MissingRequirementError(
            f"This machine is not a node of the Ray cluster at {address}: {_cause(error)}.",
            f"Join it first: RAY_AUTH_MODE=token ray start --address {address}",
        )
    return MissingRequirementError(f"The Ray cluster at {address} cannot be joined: {_cause(error)}.")


def _cause(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[-1].rstrip(".") if lines else type(error).__name__


def _import(log: Callable[[str], None]) -> Any:
    if sys.platform == "win32":
        raise MissingRequirementError("Ray workers need Linux or macOS.")
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


def versions() -> dict[str, str]:
    """What must agree on all nodes for the same bits, and Ray's authentication."""
    return {
        "pvg": pvg.__version__,
        "torch": metadata.version("torch"),
        "processor": processor(),
        "auth": os.environ.get("RAY_AUTH_MODE", ""),
    }


def ray_node() -> str:
    """Ray's id of this node."""
    import ray

    return str(ray.get_runtime_context().get_node_id())


def refuse_other_versions(name: str, found: Mapping[str, str]) -> None:
    """Raises MissingRequirementError for a node whose results would differ, or on which anyone can run code. `found`:
    its `versions`."""
    for package, own in (("pvg", pvg.__version__), ("torch", metadata.version("torch"))):
        if found[package] != own:
            raise MissingRequirementError(
                f"Node {name} has {package} {found[package]}, and this process has {own}.",
                "Install the same versions on all nodes",
            )
    if found["auth"].lower() != "token":
        raise MissingRequirementError(
            f"Node {name} does not require a token, so anyone who reaches it can run code there.",
            "Start all nodes with token authentication: RAY_AUTH_MODE=token ray start ...",
        )


def note_other_processor(name: str, found: Mapping[str, str], events: Events) -> None:
    if found["processor"] != processor():
        why = f"Node {name} has another processor than this machine, so the last bits of results may differ"
        events.event("workers", event="node differs", node=name, why=why)
