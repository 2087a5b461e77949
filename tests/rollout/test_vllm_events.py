"""The event log of the vLLM engine, and the measured waits of weight updates: real sockets, the tests' own server."""

from __future__ import annotations

import asyncio
import shlex
from pathlib import Path

import numpy as np
import pytest
from vllm_drills import Drill, request, run, tensors, until

from pvg.servers.publishing import Publisher
from pvg.telemetry.events import EventLog

BUSY, QUIET = 16, 2  # requests in flight while weights are updated


def lines(path: Path, tag: str, event: str) -> list[dict[str, str]]:
    own = [line for line in path.read_text().splitlines() if line.startswith(f"[{tag}] ")]
    found = [dict(part.split("=", 1) for part in shlex.split(line)[1:]) for line in own]
    return [fields for fields in found if fields["event"] == event]


def test_a_stretch_of_requests_is_logged_as_a_batch_with_its_figures(tmp_path: Path) -> None:
    path = tmp_path / "events.log"

    async def use(d: Drill) -> None:
        log = d.events.log = EventLog(path)
        await d.publish(0)
        found = await d.ask_all([request(i) for i in range(8)])
        (start,), (done,) = lines(path, "gen", "batch.start"), lines(path, "gen", "batch.done")
        assert start["inflight"] == "8"
        assert done["inflight"] == "0"
        assert (done["batch"], done["completions"]) == ("0", "8")
        assert int(done["tokens"]) == sum(len(completion.token_ids) for completion in found)
        longest_ms = max(completion.timing.queued_s + completion.timing.service_s for completion in found) * 1e3
        assert float(done["dur_ms"]) * 1.00001 >= float(done["longest_ms"]) >= 0.99 * longest_ms
        assert 0 < float(done["rows"]) <= 8
        await d.ask(request(9))
        assert [line["batch"] for line in lines(path, "gen", "batch.done")] == ["0", "1"]
        assert d.engine.requests_in_flight == 0
        log.close()

    run(use, tmp_path)


def test_the_load_is_told_while_a_stretch_lasts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pvg.rollout.vllm_requests.LOAD_EVERY_S", 0.0)

    async def use(d: Drill) -> None:
        await d.publish(0)
        await d.ask_all([request(i) for i in range(4)])
        told = [fields["inflight"] for fields in d.events.named("load")]
        assert told == [3, 2, 1]

    run(use, tmp_path)


def test_the_wait_of_updates_behind_generation_is_measured(tmp_path: Path) -> None:
    """`weights.client = "shared"`, and fewer connections than requests: an update waits for one."""
    path = tmp_path / "events.log"

    async def use(d: Drill) -> None:
        log = d.events.log = EventLog(path)
        publisher = Publisher([d.engine], events=log)
        await publisher.publish(tensors(0), 0)
        for version in range(1, 25):
            load = BUSY if version % 2 else QUIET
            tasks = [asyncio.create_task(d.ask(request(i, 20, stops=False))) for i in range(load)]
            await until(lambda load=load: d.engine.requests_in_flight == load)
            await publisher.publish(tensors(version), version)
            await asyncio.gather(*tasks)
        log.close()

    run(use, tmp_path, servers=1, shared=True, concurrency=4, token_ms=1.0, probe_every_s=3600.0)
    sent = [int(fields["inflight"]) for fields in lines(path, "weights", "client.send")]
    assert sent == [0, *[BUSY, QUIET] * 12]
    done = [float(fields["queue_ms"]) for fields in lines(path, "weights", "client.done")]
    assert np.median(done[1::2]) > 2 * np.median(done[2::2])  # the busy ones, and the quiet ones
