"""vLLM's weight transfer as far as a CPU goes: the order of the calls, every server resumed, and what faults leave.

vLLM's trainer side is a stand-in that makes the calls that vLLM's makes, from threads as vLLM does; the servers are
real sockets. That vLLM has what is stood in for is tested in tests/integration.
"""

from __future__ import annotations

import asyncio
import base64
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from types import ModuleType
from typing import Any

import pytest
import torch
from fake_vllm import FakeVllm, with_servers

from pvg.errors import StateError
from pvg.servers.control import ControlClient, DeliveryTiming
from pvg.servers.pool import ConnectionBroken, RefusedRequest, ReplyTimeout
from pvg.servers.publishing import PublishingSession, WeightLabel, WeightUpdate
from pvg.servers.transports import transfer
from pvg.servers.transports.transfer import TransferTransport

SESSION = PublishingSession(1000, "aaaaaaaa")
INIT, START, UPDATE, FINISH = (
    "/init_weight_transfer_engine",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
)
ID = bytes(range(128))
WHOLE = ["/pause", START, UPDATE, FINISH, "/resume"]


def label(version: int = 1) -> WeightLabel:
    return WeightLabel(SESSION, version)


@dataclass
class Vllm:
    """What the stand-in was asked to do, and what it is to do wrong."""

    groups: list[tuple[int, int, int | None]] = field(default_factory=list)  # rank, world size, device
    sent: list[dict[str, torch.Tensor]] = field(default_factory=list)
    shut_down: int = 0
    sending_fails: BaseException | None = None
    never_ends: threading.Event | None = None


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Vllm:
    state = Vllm()

    class Engine:
        packed, packed_buffer_size_bytes, packed_num_buffers = True, 1024, 2

        def __init__(self, *, client: Any, source: Any) -> None:
            self.client, self.source = client, source

        def send_weights(self) -> None:
            meta = self.source.metadata()
            info = {
                "names": [m.name for m in meta],
                "dtype_names": [str(m.dtype).split(".")[-1] for m in meta],
                "shapes": [list(m.shape) for m in meta],
            }
            self.client.start_weight_update()
            with ThreadPoolExecutor(1) as executor:
                called = executor.submit(self.client.update_weights, info)
                state.sent.append({name: tensor.clone() for name, tensor in self.source})
                if state.never_ends is not None:
                    state.never_ends.wait()
                if state.sending_fails is not None:
                    raise state.sending_fails
                called.result()
            self.client.finish_weight_update()

        def shutdown(self) -> None:
            state.shut_down += 1

    @dataclass
    class InitInfo:
        rank_offset: int
        world_size: int
        nccl_unique_id_b64: str | None = None
        packed: bool = False
        packed_buffer_size_bytes: int = 0
        packed_num_buffers: int = 0

    def join(unique_id: bytes, rank: int, world_size: int, device: int | None) -> object:
        assert unique_id == ID
        state.groups.append((rank, world_size, device))
        return object()

    class Library:
        def ncclGetUniqueId(self) -> bytes:
            return ID

    contents = {
        "vllm": {},
        "vllm.distributed": {},
        "vllm.distributed.device_communicators": {},
        "vllm.distributed.device_communicators.pynccl_wrapper": {"NCCLLibrary": Library},
        "vllm.distributed.weight_transfer": {},
        "vllm.distributed.weight_transfer.nccl_engine": {"NCCLTrainerWeightTransferEngine": Engine},
        "vllm.distributed.weight_transfer.nccl_common": {
            "NCCLWeightTransferInitInfo": InitInfo,
            "uid_init_process_group": join,
            "worker_init_payload": asdict,
        },
    }
    for name, members in contents.items():
        module = ModuleType(name)
        module.__dict__.update(members)
        monkeypatch.setitem(sys.modules, name, module)
    return state


def opened(timeout_s: float = 5.0) -> TransferTransport:
    return TransferTransport(None, torch.device("cpu"), torch.bfloat16, timeout_s)


def update(version: int = 1) -> WeightUpdate:
    shared = torch.full((2, 3), 0.1 * version)
    return WeightUpdate(version, {"embed": shared, "steps": torch.tensor([7]), "head": shared})


async def stage_and_send(
    transport: TransferTransport, controls: Sequence[ControlClient], version: int = 1
) -> list[DeliveryTiming | BaseException]:
    await transport.stage(update(version), label(version))
    return await transport.send(controls, label(version), f"trace-{version}")


def after_init(server: FakeVllm) -> list[str]:
    return [path for path in server.paths if path not in ("/pvg/info", INIT)]


def test_pause_start_update_finish_resume(vllm: Vllm) -> None:
    async def play(servers: list[FakeVllm], controls: list[ControlClient]) -> None:
        servers[0].options.world_size = 2
        transport = opened()
        assert not transport.adapters
        outcomes = await stage_and_send(transport, controls)
        for server, outcome in zip(servers, outcomes, strict=True):
            assert isinstance(outcome, DeliveryTiming)
            assert server.paths == ["/pvg/info", INIT, *WHOLE]
            bodies = dict(server.asked)
            assert bodies["/pause"] == {"mode": "keep"}
            assert bodies[UPDATE] == {
                "update_info": {
                    "names": ["embed", "steps"],
                    "dtype_names": ["bfloat16", "int64"],
                    "shapes": [[2, 3], [1]],
                }
            }
            assert bodies[FINISH] == {"weight_version": str(label())}
            assert server.label == str(label())
            assert not server.paused
            assert outcome.label == label()
            assert outcome.parts == {"pause_ms": 1.5, "load_ms": 4.5, "resume_ms": 1.5}
            assert outcome.rpc_ms == 7.5
            assert outcome.wall_ms >= 0
            assert outcome.received_ns > 0
        offsets = [dict(server.asked)[INIT]["init_info"]["rank_offset"] for server in servers]
        assert offsets == [1, 3]
        init = dict(servers[1].asked)[INIT]["init_info"]
        assert (init["world_size"], init["packed"]) == (4, True)
        assert base64.b64decode(init["nccl_unique_id_b64"]) == ID
        assert vllm.groups == [(0, 4, None)]
        (sent,) = vllm.sent
        assert torch.equal(sent["embed"], torch.full((2, 3), 0.1, dtype=torch.bfloat16))
        await transport.close()
        assert vllm.shut_down == 1
        assert servers[0].paths[-1] == "/shutdown_weight_transfer_engine"

    with_servers(2, play)


def test_a_group_lives_until_its_servers_change(vllm: Vllm) -> None:
    async def play(servers: list[FakeVllm], controls: list[ControlClient]) -> None:
        transport = opened()
        for version in (1, 2):
            await stage_and_send(transport, controls, version)
        assert len(vllm.groups) == 1
        await servers[1].restart()
        await stage_and_send(transport, controls, 3)
        assert len(vllm.groups) == 2
        assert vllm.shut_down == 1
        assert "/shutdown_weight_transfer_engine" in servers[0].paths
        await servers[0].restart()
        (late,) = await transport.send(controls[:1], label(3), "")  # what was staged last, to one that was away
        assert isinstance(late, DeliveryTiming)
        assert vllm.groups[2] == (0, 2, None)
        assert servers[0].label == str(label(3))
        await transport.close()

    with_servers(2, play)


def test_every_server_is_resumed_when_the_sending_fails(vllm: Vllm) -> None:
    async def play(servers: list[FakeVllm], controls: list[ControlClient]) -> None:
        transport = opened()
        vllm.sending_fails = RuntimeError("NCCL error: unhandled system error")
        with pytest.raises(RuntimeError, match="NCCL error"):
            await stage_and_send(transport, controls)
        for server in servers:
            assert after_init(server) == ["/pause", START, UPDATE, "/update_weight_version", "/resume"]
            assert server.label == f"broken:{label()}"
            assert not server.paused
        vllm.sending_fails = None
        outcomes = await stage_and_send(transport, controls, 2)  # a new group, and all is well
        assert all(isinstance(outcome, DeliveryTiming) for outcome in outcomes)
        assert len(vllm.groups) == 2

    with_servers(2, play)


@pytest.mark.parametrize("route", ["/pause", START, UPDATE, FINISH])
def test_one_servers_fault_is_its_own_outcome_and_all_are_resumed(vllm: Vllm, route: str, monkeypatch) -> None:
    monkeypatch.setattr(transfer, "GRACE_S", 0.2)

    async def play(servers: list[FakeVllm], controls: list[ControlClient]) -> None:
        servers[0].plan(route, "refuse")
        outcomes = await stage_and_send(opened(), controls)
        assert isinstance(outcomes[0], RefusedRequest)
        begun = route != "/pause"
        for server in servers:
            assert after_init(server)[-1] == "/resume"
            assert not server.paused
        if route == FINISH:
            assert isinstance(outcomes[1], DeliveryTiming)  # the other had finished
            assert servers[1].label == str(label())
        else:
            assert isinstance(outcomes[1], ConnectionBroken)
            assert servers[0].url in str(outcomes[1])
            assert servers[1].label == (f"broken:{label()}" if begun else "default")
        assert servers[0].label == (f"broken:{label()}" if begun else "default")

    with_servers(2, play)


@pytest.mark.slow
def test_a_collective_that_hangs_is_given_up_in_time(vllm: Vllm) -> None:
    vllm.never_ends = threading.Event()

    async def play(servers: list[FakeVllm], controls: list[ControlClient]) -> None:
        (outcome,) = await stage_and_send(opened(timeout_s=0.3), controls)
        assert isinstance(outcome, ReplyTimeout)
        assert after_init(servers[0]) == ["/pause", START, UPDATE, "/update_weight_version", "/resume"]
        assert vllm.never_ends is not None
        vllm.never_ends.set()  # its thread comes to life again, and can call nothing
        await asyncio.sleep(0.1)
        assert FINISH not in servers[0].paths
        assert servers[0].label == f"broken:{label()}"

    with_servers(1, play)


def test_the_weights_of_a_later_session_are_left_alone(vllm: Vllm) -> None:
    async def play(servers: list[FakeVllm], controls: list[ControlClient]) -> None:
        servers[0].label = str(WeightLabel(PublishingSession(2000, "bbbbbbbb"), 3))
        servers[1].label = f"broken:{WeightLabel(PublishingSession(500, 'cccccccc'), 9)}"
        outcomes = await stage_and_send(opened(), controls)
        assert isinstance(outcomes[0], StateError)
        assert isinstance(outcomes[1], DeliveryTiming)
        assert servers[0].paths == ["/pvg/info"]

    with_servers(2, play)
