"""Whole models through files: what is written, what servers are asked, and what happens after faults."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from fake_vllm import FakeVllm, with_servers
from safetensors import safe_open
from safetensors.torch import load_file

from pvg.config.operation import Weights
from pvg.errors import MissingRequirementError
from pvg.servers import transports as delivering
from pvg.servers.control import ControlClient, DeliveryTiming
from pvg.servers.pool import ConnectionBroken, RefusedRequest, ReplyTimeout, ServerUnreachable
from pvg.servers.publishing import PublishingSession, WeightLabel, WeightUpdate
from pvg.servers.transports import UNKNOWN_PART, Transport
from pvg.servers.transports.files import write_tensors
from pvg.servers.transports.opening import open_transport

SESSION = PublishingSession(1000, "aaaaaaaa")
LABEL = WeightLabel(SESSION, 1)
NAME = "run/v000001-aaaaaaaa"
WEIGHTS = "/pvg/weights"


def transport(root: Path, dtype: str = "float32") -> Transport:
    return open_transport(Weights(root=root), "run", None, dtype, SESSION)


def update(version: int = 1, value: float = 1.0) -> WeightUpdate:
    return WeightUpdate(version, {"w": torch.full((4,), value)})


# --- the file --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_read_is_what_was_given_in_the_servers_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    tensors = {
        "odd": torch.tensor([1, 2, 3], dtype=torch.int8),
        "whole": base,
        "transposed": base.T,
        "row": base[1],
        "scalar": torch.tensor(0.1),
        "empty": torch.empty(0, 5),
        "flag": torch.tensor([True, False, True]),
        "parameter": torch.nn.Parameter(torch.randn(3, generator=torch.Generator().manual_seed(0))),
        "counts": torch.tensor([2**40]),
        "half": torch.tensor([0.1], dtype=torch.float16),
        "model.layers.0.ünicode": torch.ones(2, 2),
    }
    size = write_tensors(tmp_path / "f", tensors, dtype)
    assert size == (tmp_path / "f").stat().st_size
    found = load_file(tmp_path / "f")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        wanted = tensor.detach().to(dtype) if tensor.is_floating_point() else tensor
        assert found[name].dtype == wanted.dtype, name
        assert torch.equal(found[name], wanted), name
    with safe_open(tmp_path / "f", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_a_tied_weight_is_written_once_under_its_first_name(tmp_path: Path) -> None:
    embedding = torch.randn(100, 8)
    tied = {"embed.weight": embedding, "head.weight": embedding, "equal": embedding.clone()}
    write_tensors(tmp_path / "f", tied, torch.float32)
    assert load_file(tmp_path / "f").keys() == {"embed.weight", "equal"}


# --- staging ---------------------------------------------------------------------------------------------------------


def test_the_tensors_may_change_as_soon_as_it_is_staged(tmp_path: Path) -> None:
    async def play() -> None:
        sent = transport(tmp_path)
        weights = {"w": torch.ones(4)}
        await sent.stage(WeightUpdate(1, weights), LABEL)
        weights["w"].zero_()
        assert torch.equal(load_file(tmp_path / NAME / "model.safetensors")["w"], torch.ones(4))
        await sent.close()
        assert not (tmp_path / NAME).exists()

    asyncio.run(play())


def test_old_versions_go_but_for_those_in_use(tmp_path: Path) -> None:
    async def play() -> None:
        sent = transport(tmp_path)
        for version in range(1, 6):
            await sent.stage(update(version), WeightLabel(SESSION, version))
            await sent.retire([], [WeightLabel(SESSION, 2), WeightLabel(PublishingSession(1, "bb"), 3)])
        there = {path.name for path in (tmp_path / "run").iterdir() if path.is_dir()}
        assert there == {"v000002-aaaaaaaa", "v000004-aaaaaaaa", "v000005-aaaaaaaa"}

    asyncio.run(play())


# --- sending ---------------------------------------------------------------------------------------------------------


def send(tmp_path: Path, count: int, plan, check, timeout_s: float = 5.0) -> None:
    """Stage one version, send it to `count` servers after `plan(servers)`, then `check(servers, outcomes)`."""

    async def play(servers: list[FakeVllm], controls: list[ControlClient]) -> None:
        sent = transport(tmp_path)
        await sent.stage(update(), LABEL)
        plan(servers)
        check(servers, await sent.send(controls, LABEL, "trace-1"))
        await sent.close()

    with_servers(count, play, tmp_path, timeout_s)


def test_all_servers_are_told_at_once_and_answer_for_themselves(tmp_path: Path) -> None:
    def check(servers: list[FakeVllm], outcomes: Sequence[object]) -> None:
        for server, outcome in zip(servers, outcomes, strict=True):
            assert isinstance(outcome, DeliveryTiming)
            assert (outcome.url, outcome.label, outcome.rpc_ms) == (server.url, LABEL, 1.5)
            assert outcome.parts.keys() == {"pause_ms", "load_ms", "resume_ms"}
            assert outcome.received_ns > 0
            assert server.asked == [(WEIGHTS, {"name": NAME, "label": str(LABEL)})]

    send(tmp_path, 3, lambda servers: None, check)


# Faults of the first server's calls by route; the outcome's class, whether its times are known, and the routes asked.
INFO = "/pvg/info"
FAULTS: dict[str, tuple[dict[str, list[str]], type, bool, list[str]]] = {
    "arrived, reply lost": ({WEIGHTS: ["reset_after"]}, DeliveryTiming, False, [WEIGHTS, INFO]),
    "arrived, reply is garbage": ({WEIGHTS: ["garbage_after"]}, DeliveryTiming, False, [WEIGHTS, INFO]),
    "arrived, reply too late": ({WEIGHTS: ["hang_after"]}, DeliveryTiming, False, [WEIGHTS, INFO]),
    "not arrived": ({WEIGHTS: ["reset"]}, DeliveryTiming, True, [WEIGHTS, INFO, WEIGHTS]),
    "not arrived twice": ({WEIGHTS: ["reset"] * 2}, ConnectionBroken, True, [WEIGHTS, INFO, WEIGHTS, INFO]),
    "second reply lost": ({WEIGHTS: ["reset", "reset_after"]}, DeliveryTiming, False, [WEIGHTS, INFO] * 2),
    # aiohttp itself repeats a GET
    "cannot be asked": ({WEIGHTS: ["hang_after"], INFO: ["reset"] * 2}, ReplyTimeout, True, [WEIGHTS, INFO, INFO]),
    "refused": ({WEIGHTS: ["refuse"]}, RefusedRequest, True, [WEIGHTS]),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", FAULTS)
def test_a_fault_is_found_out_and_hinders_no_other_server(tmp_path: Path, what: str) -> None:
    faults, kind, known, paths = FAULTS[what]

    def plan(servers: list[FakeVllm]) -> None:
        for path, planned in faults.items():
            servers[0].plan(path, *planned)

    def check(servers: list[FakeVllm], outcomes: Sequence[object]) -> None:
        first, other = outcomes
        assert isinstance(first, kind)
        assert isinstance(other, DeliveryTiming)
        assert servers[0].paths == paths
        if isinstance(first, DeliveryTiming):
            assert (first.parts == {UNKNOWN_PART: first.wall_ms}) is not known

    send(tmp_path, 2, plan, check, timeout_s=0.5)


def test_a_server_that_is_gone_is_tried_twice_and_the_others_get_theirs(tmp_path: Path) -> None:
    async def play(servers: list[FakeVllm], controls: list[ControlClient]) -> None:
        sent = transport(tmp_path)
        await sent.stage(update(), LABEL)
        await servers[0].__aexit__()
        outcomes = await sent.send(controls, LABEL, "")
        assert isinstance(outcomes[0], ServerUnreachable)
        assert isinstance(outcomes[1], DeliveryTiming)
        (late,) = await sent.send(controls[1:], LABEL, "")  # a server that has it already gets no second request
        assert isinstance(late, DeliveryTiming)

    with_servers(2, play, tmp_path)


def test_a_server_that_hangs_does_not_hold_the_others_for_a_calls_time_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play(servers: list[FakeVllm], controls: list[ControlClient]) -> None:
        sent = transport(tmp_path)
        await sent.stage(update(), LABEL)
        servers[0].plan("/pvg/weights", "hang_after")
        outcomes = await sent.send(controls, LABEL, "")
        assert isinstance(outcomes[0], ReplyTimeout)
        assert "the other servers took the weights" in str(outcomes[0])
        assert isinstance(outcomes[1], DeliveryTiming)

    monkeypatch.setattr(delivering, "LATE_S", 0.1)
    with_servers(2, play, tmp_path, timeout_s=50.0)


def test_a_defect_is_no_outcome(tmp_path: Path) -> None:
    class Defective(ControlClient):
        async def load_weights(self, *_: object, **__: object) -> DeliveryTiming:
            raise TypeError("a defect")

    async def play(servers: list[FakeVllm], controls: list[ControlClient]) -> None:
        sent = transport(tmp_path)
        await sent.stage(update(), LABEL)
        broken = Defective(servers[0].url, controls[0]._pool, timeout_s=1.0, probe_timeout_s=1.0)
        with pytest.raises(TypeError, match="a defect"):
            await sent.send([broken, controls[1]], LABEL, "")
        assert servers[1].label == str(LABEL)  # the others were awaited

    with_servers(2, play, tmp_path)


# --- opening ---------------------------------------------------------------------------------------------------------


def test_what_needs_a_gpu_says_so(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU: `CUDA_VISIBLE_DEVICES= make test`")
    with pytest.raises(MissingRequirementError, match="CUDA") as caught:
        open_transport(Weights(root=tmp_path, transport="nccl"), "run", None, "float32", SESSION)
    assert "filesystem" in caught.value.remedy
