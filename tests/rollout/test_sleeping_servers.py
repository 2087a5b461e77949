"""A server on the trainer's GPU sleeps while the trainer works, and every token afterwards is of known weights."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from vllm_drills import Drill, Heard, canary, check, engine_over, request, run, until

from pvg.errors import StateError
from pvg.records import VersionSpan
from pvg.rollout.vllm_engine import SharedGpu
from pvg.telemetry.spans import Tracer

pytestmark = pytest.mark.slow

GPU = "GPU-0123"


Use = Callable[[Drill, list[str]], Awaitable[None]]


def shared(use: Use, root: Path, *, gpu: str = GPU, **options: object) -> None:
    """`use(drill, freed)` with two servers that can sleep, by a trainer on `gpu`. `freed`: grows when the trainer frees
    its memory."""
    freed: list[str] = []
    with ThreadPoolExecutor(1) as executor:
        gpu_of_trainer = SharedGpu(gpu, executor, lambda: freed.append("freed"))
        run(lambda d: use(d, freed), root, gpus=GPU, shared=gpu_of_trainer, **options)


def asleep(d: Drill) -> list[bool]:
    return [server.asleep for server in d.servers]


def levels(d: Drill) -> list[int]:
    return [body["level"] for path, body in d.servers[0].asked if path == "/pvg/sleep"]


def test_servers_sleep_and_many_requests_wake_them_once(tmp_path: Path) -> None:
    async def use(d: Drill, freed: list[str]) -> None:
        await d.publish(0)
        await d.ask(request(1))
        await d.engine.rest()
        assert asleep(d) == [True, True]
        await asyncio.sleep(0.3)  # several probes: a server that sleeps is not away, and gets nothing
        assert len(d.up()) == 2
        assert asleep(d) == [True, True]
        assert not freed
        for completion in await d.ask_all([request(number) for number in range(2, 20)]):
            assert completion.spans == (VersionSpan(0, 0),)
        assert freed == ["freed"]
        assert [server.paths.count("/pvg/wake") for server in d.servers] == [1, 1]
        await d.engine.rest(replaced=True)
        await d.publish(1)
        assert (await d.ask(request(20))).spans == (VersionSpan(0, 1),)
        assert levels(d) == [1, 2]
        assert not d.events.named("server.away")

    shared(use, tmp_path)


def test_servers_of_adapters_keep_their_base(tmp_path: Path) -> None:
    lenient = canary()
    lenient.tolerance = 1e3  # the tests' own servers do not start with weights that the trainer has

    async def use(d: Drill, _: list[str]) -> None:
        await d.publish(0)
        await d.engine.rest(replaced=True)
        await d.publish(1)
        assert (await d.engine.generate(request(1))).spans == (VersionSpan(0, 1),)
        assert levels(d) == [1]

    shared(use, tmp_path, transport="lora", canary_=lenient, max_lora_rank=8)


def test_weights_that_were_dropped_come_back_although_none_were_published(tmp_path: Path) -> None:
    async def use(d: Drill, _: list[str]) -> None:
        await d.publish(0)
        await d.engine.rest(replaced=True)
        assert [server.label.split(":")[0] for server in d.servers] == ["broken", "broken"]
        await asyncio.sleep(0.2)
        assert asleep(d) == [True, True]
        assert (await d.ask(request(1))).spans == (VersionSpan(0, 0),)

    shared(use, tmp_path)


def test_no_server_sleeps_on_another_gpu_or_before_its_requests_have_ended(tmp_path: Path) -> None:
    async def elsewhere(d: Drill, _: list[str]) -> None:
        await d.publish(0)
        await d.engine.rest()
        assert asleep(d) == [False, False]
        await d.servers[0].restart()
        await until(lambda: d.servers[0].label == d.servers[1].label)  # it may catch up at any time

    async def busy(d: Drill, _: list[str]) -> None:
        await d.engine.rest()  # before the first weights
        await d.publish(0)
        asking = asyncio.create_task(d.ask(request(1, 50, stops=False)))
        await until(lambda: d.running() == 1)
        await d.engine.rest()
        assert asleep(d) == [False, False]
        await asking

    shared(elsewhere, tmp_path / "1", gpu="GPU-9")
    shared(busy, tmp_path / "2", token_ms=5.0)


def test_a_server_that_dies_asleep_comes_back_and_one_that_cannot_wake_is_given_up(tmp_path: Path) -> None:
    async def use(d: Drill, _: list[str]) -> None:
        await d.publish(0)
        await d.engine.rest()
        await d.servers[0].restart()
        await until(lambda: any(event["server"] == d.proxies[0].url for event in d.events.named("server.stale")))
        assert d.servers[0].label == "default"  # it gets no weights while the trainer has the GPU
        d.servers[1].plan("/pvg/wake", "refuse")
        for completion in await d.ask_all([request(number) for number in range(8)]):
            assert completion.spans == (VersionSpan(0, 0),)
        await until(lambda: len(d.up()) == 2 and asleep(d) == [False, False])
        assert [event["server"] for event in d.events.named("server.away")][-1] == d.proxies[1].url
        # `nccl` writes into the engine's memory, and does not wake the server itself.
        assert d.servers[1].paths.count("/pvg/wake") == 2

    shared(use, tmp_path)


def test_the_next_run_wakes_what_a_killed_one_left_asleep(tmp_path: Path) -> None:
    async def use(d: Drill, _: list[str]) -> None:
        await d.publish(0)
        await d.engine.rest(replaced=True)
        await d.engine.close()  # as when its process ends: the servers stay asleep
        assert asleep(d) == [True, True]
        again = engine_over([proxy.url for proxy in d.proxies], tmp_path, Heard())
        try:
            await again.ready()
            with pytest.raises(StateError):
                await again.generate(request(1))
            d.engine = again
            await d.publish(0)
            assert asleep(d) == [False, False]
            check(await again.generate(request(1)), request(1))
        finally:
            await again.close()

    shared(use, tmp_path)


def test_the_time_is_a_part_of_the_step(tmp_path: Path) -> None:
    async def use(d: Drill, _: list[str]) -> None:
        await d.publish(0)
        tracer = Tracer()
        with tracer.drive():
            await d.engine.rest()
            await d.ask(request(1))
            budget = tracer.close_step()
        assert {"sleep", "wake"} <= budget.exposed.keys()

    shared(use, tmp_path)


@pytest.mark.parametrize(("gpu", "gives"), [(GPU, False), ("GPU-9", True)])
def test_servers_compute_the_reference_only_on_other_gpus_than_the_trainers(
    gpu: str, gives: bool, tmp_path: Path
) -> None:
    async def use(d: Drill, _: list[str]) -> None:
        assert d.engine.gives_reference == gives
        await d.publish(0)
        await d.engine.rest()
        assert d.engine.gives_reference == gives

    shared(use, tmp_path, gpu=gpu, gives_reference=True)
