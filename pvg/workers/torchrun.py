"""Trainer ranks in processes that torchrun has started, on one machine or on several.

    launch = launched(os.environ)                       # None without torchrun
    exit_code = serve(launch, print)                    # every process but the first: a rank runs in it
    with driving(launch) as meeting:                    # the first process is the driver
        supply = TorchrunSupply(meeting, stop)          # (pvg.workers.torchrun_supply) one rank in each process

The processes meet in the store of torchrun, which runs on the driver's machine. There the driver leaves its address
and a secret. Then each process connects to the driver, and forks a rank when the driver asks for one. So a rank that
ends is replaced as elsewhere, and torchrun does not notice. A process that ends itself is replaced by torchrun only:
with --max-restarts it starts all processes again, and the driver resumes its run.

The store asks for no password, as those of all torch programs: it needs a private network.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import secrets
import signal
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import orjson

from pvg.config.experiment import Experiment
from pvg.config.operation import LocalCluster, ranks_of
from pvg.errors import EXIT_ENVIRONMENT, MissingRequirementError, StoppedAtStart, UsageError
from pvg.telemetry.waits import in_daemon
from pvg.workers.links import LOOPBACK
from pvg.workers.node_agent import DriverAddress, NodeAgent

STORE_S = 60.0  # to connect to the store of torchrun, and for each of its answers
JOIN_S = 120.0  # for all processes to import torch, for a driver to begin, and to connect to the driver
POLL_S = 0.2
END_S = 60.0  # after the connection to the driver has ended, to learn its exit code or of the next driver
FIRST_S = 3.0  # for the driver to end before this process, with an error
EXIT_LOST, EXIT_STOPPED = EXIT_ENVIRONMENT, 130
ANY_PORT = 9  # to find a route, nothing is sent
# The way out for a program that has inherited the variables of torchrun, such as one that a notebook starts.
ALONE = "start pvg without torchrun's variables: env -u TORCHELASTIC_RUN_ID pvg train ..."


T = TypeVar("T")


@dataclass(frozen=True)
class Launch:
    """What torchrun says of this process. `number`: its rank among all `processes`; `local`: among those on its
    machine. `host`, `port`: torchrun's store."""

    number: int
    processes: int
    local: int
    one_machine: bool
    host: str
    port: int


def launched(environment: Mapping[str, str]) -> Launch | None:
    """This process as one of several that torchrun has started; None for any other process. Children of such a process
    inherit its variables, so they are processes of torchrun too. Raises UsageError if the processes have no common
    store, or if a variable is missing or wrong."""
    if "TORCHELASTIC_RUN_ID" not in environment:
        return None
    try:
        launch = Launch(
            number=int(environment["RANK"]),
            processes=int(environment["WORLD_SIZE"]),
            local=int(environment["LOCAL_RANK"]),
            one_machine=environment["GROUP_WORLD_SIZE"] == "1",
            host=environment["MASTER_ADDR"],
            port=int(environment["MASTER_PORT"]),
        )
    except KeyError as error:
        raise UsageError(
            f"TORCHELASTIC_RUN_ID says that torchrun has started pvg, but its variable {error.args[0]} is not set.",
            f"To play alone, {ALONE}",
        ) from None
    except ValueError as error:
        raise UsageError(
            f"TORCHELASTIC_RUN_ID says that torchrun has started pvg, but one of its variables is no number: {error}.",
            f"To play alone, {ALONE}",
        ) from None
    if launch.processes == 1:
        return None
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        raise UsageError(
            "torchrun does not share its store with its processes, where pvg's processes meet.",
            f"Use --rdzv-backend c10d or static and leave out TORCH_DISABLE_SHARE_RDZV_TCP_STORE, or {ALONE}",
        )
    return launch


def refuse_other_counts(experiment: Experiment, launch: Launch) -> None:
    """Raises UsageError if the experiment does not have one trainer rank per process of torchrun."""
    cluster, ranks = experiment.cluster, ranks_of(experiment.cluster)
    started = f"torchrun has started {launch.processes} processes"
    wanted = f"-s cluster.kind=local -s cluster.trainer_ranks={launch.processes}"
    if ranks is None:
        raise UsageError(f"{started}, but the experiment has no trainer ranks.", f"Use {wanted}, or {ALONE}")
    if not isinstance(cluster, LocalCluster):
        raise UsageError(
            f"{started}, but cluster = {cluster.kind!r} starts its ranks itself.", f"Use {wanted}, or {ALONE}"
        )
    if ranks != launch.processes:
        raise UsageError(
            f"{started}, but cluster.trainer_ranks = {ranks}.",
            f"Use -s cluster.trainer_ranks={launch.processes}, or start {ranks} processes "
            f"(--nnodes times --nproc-per-node), or {ALONE}",
        )


# --- the store --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class News:
    """What a process learns from the driver: where to connect, with which key; and the driver's exit code. `begun`:
    whether there is a driver for this process."""

    begun: bool = False
    driver: DriverAddress | None = None
    key: int = 0
    exit_code: int | None = None


class Meeting:
    """Notes in the store of torchrun, which keeps them if torchrun starts the processes again. So the notes of a driver
    begin with its name, except the run's folder. All methods block. Raises MissingRequirementError if the store
    cannot be reached.

    A process that torchrun has started again finds the notes of the last driver until the next one begins. It must not
    end with that driver's exit code. So it ignores a driver that failed before its first look, and one that has invited
    an earlier process with its number. (TORCHELASTIC_RESTART_COUNT cannot tell: it differs between machines.)
    """

    def __init__(self, launch: Launch) -> None:
        from torch.distributed import DistError, PrefixStore, TCPStore  # type: ignore[attr-defined]

        self.launch = launch
        self._lost = DistError
        self._driver = ""
        self._itself = secrets.token_hex(8)  # no other process has this name
        self._guests: list[str] = []  # the names of the other processes, in their order
        self._looked = False
        self._failed_before = ""  # the driver that failed before this process looked
        _route(launch.host)  # torch would try for a minute to reach a name that this machine does not know
        with self._reaching():
            where, patience = (launch.host, launch.port), timedelta(seconds=STORE_S)
            store = self._asked(lambda: TCPStore(*where, is_master=False, timeout=patience), 2 * STORE_S)
        self._store = PrefixStore("pvg", store)

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        try:
            yield
        except (self._lost, TimeoutError) as error:
            why = str(error).splitlines()[0] if str(error) else f"no reply in {STORE_S:g} s, so torchrun may hang"
            raise MissingRequirementError(
                f"torchrun's store at {self.launch.host}:{self.launch.port} does not answer: {why}",
                f"See the output of torchrun on the first machine. If it has ended, {ALONE}",
            ) from None

    def _asked(self, call: Callable[[], T], limit_s: float) -> T:
        """The result of a call of the store, which has no limit: it waits for ever if torchrun is stopped."""
        return in_daemon(call, "pvg-store").result(limit_s)

    def _note(self, key: str) -> Any:
        """The value of a note; None if it is not there."""

        def read() -> Any:
            return orjson.loads(self._store.get(key)) if self._store.check([key]) else None

        with self._reaching():
            return self._asked(read, STORE_S)

    def _leave(self, key: str, value: Any) -> None:
        """Write a note. It is in the store when this returns: `set` does not wait for the store, but the answer to
        `check` comes after it on the same connection."""

        def write() -> None:
            self._store.set(key, orjson.dumps(value).decode())
            self._store.check([key])

        with self._reaching():
            self._asked(write, STORE_S)

    # The driver's side.

    def begin(self, name: str) -> None:
        """Tell all processes that a driver has begun. `name`: which no earlier driver had."""
        self._driver = name
        self._leave("driver", name)

    @property
    def run(self) -> str | None:
        """The folder of the run that an earlier driver began before torchrun started all processes again; None if
        there is none, or if it made no commit and was deleted."""
        found: str | None = self._note("run")
        return found if found is not None and Path(found).is_dir() else None

    @run.setter
    def run(self, folder: str) -> None:
        self._leave("run", folder)

    def others(self) -> list[dict[str, Any]]:
        """What the other processes have said of themselves, in their order. Waits for them, and raises
        MissingRequirementError if one does not come."""
        found = []
        for number in range(1, self.launch.processes):
            key = f"{self._driver}/process/{number}"
            came = partial(self._store.wait, [key], timedelta(seconds=JOIN_S))
            try:
                self._asked(came, JOIN_S + STORE_S)
            except (self._lost, TimeoutError):
                raise MissingRequirementError(
                    f"Process {number} of torchrun has not reached its store in {JOIN_S:g} s.",
                    f"Start pvg train in all processes of torchrun and see their output, or {ALONE}",
                ) from None
            found.append(self._note(key))
        self._guests = [other["name"] for other in found]
        return found

    def invite(self, driver: DriverAddress, keys: Sequence[int]) -> None:
        """Tell each process of `others` where to connect, with which key: the first is the driver's own."""
        where = {"host": driver.host, "port": driver.port, "secret": driver.secret.hex(), "folder": driver.folder}
        guests = dict(zip(self._guests, keys[1:], strict=True))
        self._leave(f"{self._driver}/invitation", {"driver": where, "keys": guests})

    def end(self, exit_code: int) -> None:
        with contextlib.suppress(MissingRequirementError):  # torchrun has ended, so no process waits for this
            self._leave(f"{self._driver}/end", exit_code)

    # The side of the other processes.

    def news(self) -> News:
        """What the newest driver has told. Tells it where this process is."""
        name, first_look = self._note("driver"), not self._looked
        self._looked = True
        if name is None:
            return News()
        if name != self._driver:
            self._driver = name
            self._introduce()
        code: int | None = self._note(f"{name}/end")
        if code == 0:  # no other driver follows
            return News(exit_code=code)
        if first_look and code is not None:
            self._failed_before = name
        invitation = self._note(f"{name}/invitation")
        if name == self._failed_before or (invitation is not None and self._itself not in invitation["keys"]):
            return News()
        if invitation is None or code is not None:
            return News(begun=True, exit_code=code)
        where = invitation["driver"]
        driver = DriverAddress(where["host"], where["port"], bytes.fromhex(where["secret"]), where["folder"])
        return News(begun=True, driver=driver, key=invitation["keys"][self._itself])

    def _introduce(self) -> None:
        """Tell the driver who and where this process is."""
        note = {
            "name": self._itself,
            "address": _route(self.launch.host),
            "local": self.launch.local,
            "machine": socket.gethostname(),
        }
        self._leave(f"{self._driver}/process/{self.launch.number}", note)


@contextmanager
def driving(launch: Launch) -> Iterator[Meeting]:
    """The first process is the driver. At the end, the other processes get its exit code."""
    meeting = Meeting(launch)
    meeting.begin(secrets.token_hex(8))
    code = 1
    try:
        yield meeting
        code = 0
    except (Exception, StoppedAtStart) as error:
        code = getattr(error, "exit_code", code)  # of pvg's errors, and of the command line's
        raise
    finally:
        meeting.end(code)


# --- addresses --------------------------------------------------------------------------------------------------------


def driver_address(launch: Launch, others: Sequence[str]) -> str:
    """The address of this machine by which all processes reach it. `others`: the addresses of the others. On the
    machine of the store, its name may stand for a loopback address there, which other machines cannot reach."""
    if launch.one_machine:
        return LOOPBACK
    ways = [_route(launch.host), *(_route(other) for other in others if not _loops(other))]
    return next((way for way in ways if not _loops(way)), LOOPBACK)


def _route(host: str) -> str:
    """This machine's address in a connection to `host`. Sends nothing."""
    try:
        family, kind, _, _, place = socket.getaddrinfo(host, ANY_PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)
            return str(probe.getsockname()[0])
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise MissingRequirementError(
            f"This machine cannot reach {host}: {why}.",
            "Give torchrun addresses in place of names: --node-rank N --master-addr ADDRESS, or --local-addr ADDRESS",
        ) from None


def _loops(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


# --- a process in which a rank runs -----------------------------------------------------------------------------------


def serve(launch: Launch, say: Callable[[str], None]) -> int:
    """Let the driver run its rank in this process, until it ends. Returns the exit code: that of the driver, if it
    tells one. SIGINT and SIGTERM ask the driver to stop; a second one ends this process. Raises
    MissingRequirementError if the store cannot be reached, or if no driver begins."""
    try:
        return asyncio.run(_serve(Meeting(launch), say))
    except asyncio.CancelledError:
        return EXIT_STOPPED


async def _serve(meeting: Meeting, say: Callable[[str], None]) -> int:
    agent, task, number = NodeAgent(), asyncio.current_task(), meeting.launch.number
    assert task is not None

    def stop() -> None:
        if not agent.ask_to_stop():
            task.cancel()

    for which in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(which, stop)
    tried: set[DriverAddress] = set()  # torchrun may start the driver again, and not this process
    patience_s = JOIN_S
    while patience_s > 0:
        try:
            news = await asyncio.to_thread(meeting.news)
        except MissingRequirementError as error:
            if not tried:
                raise
            say(f"Process {number} of torchrun: {error.message}")
            # The first torchrun has ended, and its store with it, before this process could read the exit code.
            break
        if news.exit_code is not None:
            # torchrun shows the first process that fails, and ends the others: this should be the driver.
            await asyncio.sleep(FIRST_S if news.exit_code else 0.0)
            return news.exit_code
        if news.driver is not None and news.driver not in tried:
            say(f"Process {number} of torchrun: a trainer rank of the driver at {news.driver.host}.")
            tried.add(news.driver)
            patience_s = END_S
            try:
                await agent.serve(news.driver, news.key, node_name(number))
            except OSError as error:  # it may be an earlier driver's address
                say(f"Process {number} of torchrun: the driver at {news.driver.host} does not answer: {error}.")
        # A driver that has begun may first download models, so its invitation has no deadline.
        if not news.begun or news.driver in tried:
            patience_s -= POLL_S
        await asyncio.sleep(POLL_S)
    if not tried:
        raise MissingRequirementError(
            f"Process {number} of torchrun has found no driver in {JOIN_S:g} s: pvg train has not begun in process 0.",
            f"Start pvg train in all processes of torchrun, or {ALONE}",
        )
    say(f"Process {number} of torchrun: the driver has ended without an exit code.")
    return EXIT_LOST


def node_name(number: int) -> str:
    """The name of a process in errors and in the event log. Machines may have the same name."""
    return f"{socket.gethostname()}/{number}"
