"""Weights from the trainer's GPU to the servers' GPUs by vLLM's weight transfer (`nccl`).

Experimental: no GPU has run this. Not run: collectives and any transfer of tensor bytes. Run: everything
here with a test server and a stand-in for vLLM's trainer side (tests/servers/test_transport_transfer.py). On a CPU,
vLLM 0.32 has the names and signatures, and its server accepts the calls
(tests/integration/test_transfer_against_vllm.py).

One update, over the control client of every server:

    pause  start_weight_update  update_weights  finish_weight_update(label)  resume

vLLM's trainer side makes the three calls in the middle from a thread. Whatever happens to them, every server is
resumed. A server that an update reached only in part is first labelled `broken:<label>`, because it has neither
version. It may need a restart: vLLM cannot cancel an update that has begun.

Trainer and servers form a group. It is formed again if the set of servers changes, one of them restarts (new `boot`),
or an update fails. So a server that returns late catches up in a separate group.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from pvg.errors import PvgError, StateError
from pvg.servers.control import ControlClient, DeliveryTiming, ServerInfo
from pvg.servers.pool import ServerFault
from pvg.servers.publishing import BROKEN, WeightLabel, WeightUpdate
from pvg.servers.transports.gpu import GroupClient, TrainerEngine, TransferBackend, TransferSource
from pvg.telemetry.spans import run_in

if TYPE_CHECKING:
    from concurrent.futures import Executor

    import torch

T = TypeVar("T")

GRACE_S = 5.0  # for the other servers to finish after one has failed


@dataclass(frozen=True, slots=True)
class TransferGroup:
    client: GroupClient
    engine: TrainerEngine
    members: tuple[tuple[str, str], ...]  # url and boot


class TransferTransport:
    """`timeout_s` limits the forming of a group, and each transfer. A collective whose peer is gone waits forever. Its
    thread is then abandoned, and the run should end, because its GPU may stay busy."""

    adapters = False

    def __init__(
        self,
        backend: TransferBackend,
        executor: Executor | None,
        device: torch.device,
        dtype: torch.dtype,
        timeout_s: float,
    ) -> None:
        self._backend = backend
        self._executor = executor
        self._source = TransferSource(device, dtype)
        self._timeout_s = timeout_s
        self._group: TransferGroup | None = None
        self._staged: WeightLabel | None = None
        self._one_at_a_time = asyncio.Lock()

    def model_of(self, label: WeightLabel) -> None:
        """None: a server has one model."""

    async def stage(self, update: WeightUpdate, label: WeightLabel) -> None:
        """Copy the weights on the trainer's GPU in the servers' dtype. The tensors may change afterwards."""
        async with self._one_at_a_time:
            await run_in(self._executor, self._source.take, update.tensors)
            self._staged = label

    async def send(
        self, servers: Sequence[ControlClient], label: WeightLabel, trace: str
    ) -> list[DeliveryTiming | BaseException]:
        async with self._one_at_a_time:
            if label != self._staged:
                raise ValueError(f"{label} is not what was staged last ({self._staged}).")
            found = await asyncio.gather(*(self._ask(server, label) for server in servers))
            asked = {server.url: info for server, info in zip(servers, found, strict=True)}
            infos = {url: info for url, info in asked.items() if isinstance(info, ServerInfo)}
            outcomes: dict[str, DeliveryTiming | BaseException] = {
                url: error for url, error in asked.items() if not isinstance(error, ServerInfo)
            }
            if infos:
                members = [server for server in servers if server.url in infos]
                outcomes |= await self._transfer(members, infos, label, trace)
            return [outcomes[server.url] for server in servers]

    async def retire(self, servers: Sequence[ControlClient], in_use: Sequence[WeightLabel]) -> None:
        """Does nothing: only the newest version is kept."""

    async def close(self) -> None:
        async with self._one_at_a_time:
            await self._disband()
            self._source.clear()

    async def _ask(self, server: ControlClient, label: WeightLabel) -> ServerInfo | BaseException:
        """The server's status, or why it gets no weights: vLLM's transfer routes do not check sessions or versions."""
        try:
            info = await server.info()
        except (ServerFault, PvgError) as error:
            return error
        there = WeightLabel.parse(info.label.removeprefix(BROKEN))
        if there is None or there.session == label.session or there.session.began_ns < label.session.began_ns:
            return info
        return StateError(
            f"{server.url} has weights of another trainer, which started later ({there.session}).",
            "Stop one of the two, or give them separate servers.",
        )

    async def _transfer(
        self, servers: Sequence[ControlClient], infos: Mapping[str, ServerInfo], label: WeightLabel, trace: str
    ) -> dict[str, DeliveryTiming | BaseException]:
        """One outcome per server. Raises other errors than server faults and user errors, after resuming the
        servers."""
        members = tuple((server.url, infos[server.url].boot) for server in servers)
        if self._group is None or self._group.members != members:
            await self._disband()
            loop = asyncio.get_running_loop()
            client = GroupClient([(s, infos[s.url].world_size) for s in servers], loop)
            try:
                engine = await self._watched(client, partial(self._backend.open, client, self._source))
            except _GivenUp as given_up:
                return client.outcomes(label, timed_out=str(given_up))
            self._group = TransferGroup(client, engine, members)
        return await self._update(self._group, label, trace)

    async def _update(
        self, group: TransferGroup, label: WeightLabel, trace: str
    ) -> dict[str, DeliveryTiming | BaseException]:
        client, timed_out = group.client, ""
        client.begin(str(label), trace)
        try:
            await client.pause()
            await self._watched(client, group.engine.send_weights)
        except BaseException as error:
            self._group = None  # vLLM cannot use a group again after a failure
            await client.mark_broken(BROKEN)
            if not isinstance(error, (_GivenUp, ServerFault, PvgError)):
                raise
            timed_out = str(error)
        finally:
            await client.resume()
        return client.outcomes(label, timed_out=timed_out)

    async def _disband(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            await asyncio.gather(group.client.shutdown(), _in_daemon(group.engine.shutdown))

    async def _watched(self, client: GroupClient, work: Callable[[], T]) -> T:
        """Run `work` in a thread. Raises _GivenUp if a server fails or the time is up. The rest of the group may then
        wait forever in a collective, which cannot be interrupted."""

        def on_the_device() -> T:
            with _current(self._source.device):
                return work()

        working: asyncio.Future[Any] = _in_daemon(on_the_device)
        failing = asyncio.ensure_future(client.failed.wait())
        try:
            await asyncio.wait({working, failing}, timeout=self._timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if failing.done():
                await asyncio.wait({working}, timeout=GRACE_S)
        finally:
            failing.cancel()
            if not working.done():
                client.end()
        if working.done() and not client.faults:
            found: T = working.result()
            return found
        working.add_done_callback(_retrieve)  # a later error only follows from the reported fault
        raise _GivenUp(f"the transfer did not end within {self._timeout_s:g} s")


class _GivenUp(Exception):
    """A group operation that will not finish."""


def _current(device: torch.device) -> AbstractContextManager[None]:
    """Set the current GPU, which is per thread."""
    import torch

    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _in_daemon(work: Callable[[], T]) -> asyncio.Future[T]:
    """Run `work` in a daemon thread, which the end of the process does not wait for."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def set_outcome(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        try:
            outcome: tuple[T | None, BaseException | None] = (work(), None)
        except BaseException as error:  # noqa: BLE001 (it is raised in the event loop)
            outcome = (None, error)
        if not loop.is_closed():
            loop.call_soon_threadsafe(set_outcome, *outcome)

    threading.Thread(target=run, name="pvg-transfer", daemon=True).start()
    return future


def _retrieve(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()
