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
import base64
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from pvg.errors import MissingRequirementError, PvgError, StateError
from pvg.servers.control import RECEIVED_HEADER, WORK_HEADER, ControlClient, DeliveryTiming, ServerInfo, header_number
from pvg.servers.pool import ConnectionBroken, Reply, ReplyTimeout, ServerFault
from pvg.servers.publishing import BROKEN, WeightLabel, WeightUpdate
from pvg.servers.transports.files import untied, wire_dtype
from pvg.telemetry.spans import run_in
from pvg.telemetry.waits import in_daemon

if TYPE_CHECKING:
    from concurrent.futures import Executor

    import torch
    from torch import Tensor


# What vLLM's weight transfer needs on the trainer's side: the weights, a client of the servers, and a mechanism.


class TrainerEngine(Protocol):
    """The methods of vLLM's TrainerWeightTransferEngine that pvg uses. Both block."""

    def send_weights(self) -> None: ...

    def shutdown(self) -> None: ...


class ParameterMeta(NamedTuple):
    """Has the fields of vLLM's ParamMeta."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class TransferSource:
    """A WeightSource for vLLM's trainer side: a copy of the weights in the servers' dtype, tied ones once.

    The copy lets the trainer continue, and serves servers that return late. It takes that much GPU memory.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device = device
        self._dtype = dtype
        self._tensors: dict[str, Tensor] = {}

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors.clear()  # first, so that there are never two copies
        for name in untied(tensors):
            tensor = tensors[name]
            copy = tensor.detach().to(self.device, wire_dtype(tensor, self._dtype), copy=True)
            self._tensors[name] = copy.contiguous()
        if self.device.type == "cuda":
            import torch

            torch.cuda.synchronize(self.device)  # vLLM reads the copy from other streams, which do not wait

    def clear(self) -> None:
        self._tensors.clear()

    def metadata(self) -> list[ParameterMeta]:
        return [ParameterMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self._tensors.items()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._tensors.items()


def open_nccl(client: GroupClient, source: TransferSource) -> TrainerEngine:
    """Form the group of the trainer (rank 0) and the client's servers, for broadcasts of dense weights. Blocks until
    all have joined.

    Every rank needs its own GPU. vLLM's trainer_init lets the ranks find each other through a TCP store whose contents
    the workers unpickle. Instead the trainer creates the group's id and sends it with the control calls.
    """
    try:
        from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary
        from vllm.distributed.weight_transfer.nccl_common import (
            NCCLWeightTransferInitInfo,
            uid_init_process_group,
            worker_init_payload,
        )
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerWeightTransferEngine
    except ImportError as error:
        raise MissingRequirementError(
            f"This vLLM has no weight transfer by a shared id: {error}.",
            "Install vLLM 0.32 or newer in the trainer's environment, or set weights.transport = 'filesystem'.",
        ) from None
    engine = NCCLTrainerWeightTransferEngine(client=client, source=source)
    unique_id = bytes(NCCLLibrary().ncclGetUniqueId())
    workers = NCCLWeightTransferInitInfo(
        rank_offset=1,  # of the first server; the client sets each server's own
        world_size=client.ranks,
        nccl_unique_id_b64=base64.b64encode(unique_id).decode("ascii"),
        packed=engine.packed,
        packed_buffer_size_bytes=engine.packed_buffer_size_bytes,
        packed_num_buffers=engine.packed_num_buffers,
    )
    # All ranks must enter at the same time: the workers wait for the trainer during this call.
    caller = ThreadPoolExecutor(1, "pvg-nccl-init")
    try:
        called = caller.submit(client.init_weight_transfer_engine, worker_init_payload(workers))
        engine.model_update_group = uid_init_process_group(unique_id, 0, client.ranks, source.device.index)
        called.result()
    finally:
        caller.shutdown(wait=False)
    opened: TrainerEngine = engine
    return opened


# --- the client of a group of servers --------------------------------------------------------------------------------

Call = Callable[[ControlClient], Awaitable[Reply]]


class GroupClient:
    """`servers` with their numbers of workers. The methods of vLLM's protocol raise the first fault of any server."""

    def __init__(self, servers: Sequence[tuple[ControlClient, int]], loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._first_rank: dict[ControlClient, int] = {}  # of each server's workers
        self.ranks = 1
        for control, workers in servers:
            self._first_rank[control] = self.ranks
            self.ranks += workers
        self.begin("", "")

    def begin(self, label: str, trace: str) -> None:
        self._label, self._trace = label, trace
        self._parts: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))  # ms of work, by url
        self._wall_ms: dict[str, float] = defaultdict(float)
        self._received_ns: dict[str, int] = {}
        self._started: set[ControlClient] = set()
        self._finished: set[ControlClient] = set()
        self._ended = False
        self.faults: dict[str, ServerFault | PvgError] = {}  # each server's first fault, by url
        self.failed = asyncio.Event()  # set with the first fault

    # --- vLLM's VLLMWeightSyncClient: blocking, called from vLLM's threads --------------------------------------------

    def init_weight_transfer_engine(self, init_info: Mapping[str, Any]) -> None:
        """`init_info` is for the first server. Each server gets its own rank_offset."""

        def call(control: ControlClient) -> Awaitable[Reply]:
            body = {"init_info": {**init_info, "rank_offset": self._first_rank[control]}}
            return control.call("/init_weight_transfer_engine", body, self._trace)

        self._block(self._each("init_ms", call))

    def start_weight_update(self) -> None:
        self._started.update(self._first_rank)
        self._block(self._each("load_ms", self._posting("/start_weight_update")))

    def update_weights(self, update_info: Mapping[str, Any]) -> None:
        self._block(self._each("load_ms", self._posting("/update_weights", {"update_info": update_info})))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Ignores vLLM's `weight_version` and uses the label of the update."""
        post = self._posting("/finish_weight_update", {"weight_version": self._label})

        async def finish(control: ControlClient) -> Reply:
            reply = await post(control)
            self._finished.add(control)
            return reply

        self._block(self._each("load_ms", finish))

    def _block(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result()

    # --- in the event loop --------------------------------------------------------------------------------------------

    async def pause(self) -> None:
        await self._each("pause_ms", lambda control: control.pause(self._trace))

    async def resume(self) -> None:
        """Resume every server, even if others fail. Faults appear in the outcomes."""
        await self._each("resume_ms", lambda control: control.resume(self._trace), must=True)

    def end(self) -> None:
        """Give up the update: a vLLM thread that continues later can make no more calls."""
        self._ended = True

    async def mark_broken(self, prefix: str) -> None:
        """Give up the update, and put `prefix` before the label of servers that began it and did not finish."""
        self.end()
        mark = self._posting("/update_weight_version", {"new_version": prefix + self._label})
        await self._each("mark_ms", mark, among=self._started - self._finished, must=True)

    async def shutdown(self) -> None:
        """Make the servers leave the group. One that does not answer has already left it, or leaves when the next group
        forms."""
        await self._each("shutdown_ms", self._posting("/shutdown_weight_transfer_engine"), must=True)

    def outcomes(self, label: WeightLabel, *, timed_out: str = "") -> dict[str, DeliveryTiming | BaseException]:
        """By url: a delivery if the update finished, otherwise the server's fault or the one that stopped the group."""
        return {control.url: self._outcome(control, label, timed_out) for control in self._first_rank}

    def _outcome(self, control: ControlClient, label: WeightLabel, timed_out: str) -> DeliveryTiming | BaseException:
        url = control.url
        if fault := self.faults.get(url):
            return fault
        if control not in self._finished and self.faults:
            return ConnectionBroken(url, f"given up, because {next(iter(self.faults))} failed")
        if control not in self._finished:
            return ReplyTimeout(url, timed_out)
        parts = dict(self._parts[url])
        return DeliveryTiming(url, label, self._wall_ms[url], sum(parts.values()), self._received_ns[url], parts)

    def _posting(self, path: str, body: Mapping[str, Any] | None = None) -> Call:
        return lambda control: control.call(path, body, self._trace)

    async def _each(
        self, part: str, call: Call, *, among: Collection[ControlClient] | None = None, must: bool = False
    ) -> None:
        """Run `call` for all servers concurrently (or those `among`) and record the results. Raises the first fault,
        unless `must` is set: then faults are only recorded."""
        if self._ended and not must:
            raise ReplyTimeout(next(iter(self._first_rank)).url, "the update was given up")
        controls = [control for control in self._first_rank if among is None or control in among]
        outcomes = await asyncio.gather(*(self._timed(part, c, call) for c in controls), return_exceptions=True)
        for fault in outcomes:
            if fault is not None and not (must and isinstance(fault, (ServerFault, PvgError))):
                raise fault

    async def _timed(self, part: str, control: ControlClient, call: Call) -> None:
        url, sent = control.url, time.perf_counter()
        try:
            reply = await call(control)
            work_ms, received_ns = header_number(reply, WORK_HEADER), header_number(reply, RECEIVED_HEADER)
        except (ServerFault, PvgError) as fault:
            self.faults.setdefault(url, fault)
            self.failed.set()
            raise
        self._parts[url][part] += work_ms
        self._wall_ms[url] += (time.perf_counter() - sent) * 1e3
        self._received_ns.setdefault(url, int(received_ns))


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

    def __init__(self, executor: Executor | None, device: torch.device, dtype: torch.dtype, timeout_s: float) -> None:
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
                engine = await self._watched(client, partial(open_nccl, client, self._source))
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
            # The engine's own shutdown may wait for a worker that is gone.
            left = asyncio.ensure_future(asyncio.gather(group.client.shutdown(), _in_daemon(group.engine.shutdown)))
            left.add_done_callback(_retrieve)
            await asyncio.wait([left], timeout=self._timeout_s)

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
    return asyncio.wrap_future(in_daemon(work, "pvg-transfer"))


def _retrieve(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()
