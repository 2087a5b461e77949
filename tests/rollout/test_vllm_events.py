"""The event log of the vLLM engine: real sockets, the tests' own server."""

from __future__ import annotations

import asyncio
import shlex
from pathlib import Path

from vllm_drills import Drill, request, run, tensors, until

from pvg.servers.publishing import Publisher
from pvg.telemetry.events import EventLog

BUSY, QUIET = 16, 2  # requests in flight while weights are updated


def lines(path: Path, tag: str, event: str) -> list[dict[str, str]]:
    own = [line for line in path.read_text().splitlines() if line.startswith(f"[{tag}] ")]
    found = [dict(part.split("=", 1) for part in shlex.split(line)[1:]) for line in own]
    return [fields for fields in found if fields["event"] == event]


def test_updates_are_logged_with_the_requests_in_flight(tmp_path: Path) -> None:
    path = tmp_path / "events.log"

    async def use(d: Drill) -> None:
        log = d.events.log = EventLog(path)
        publisher = Publisher(d.engine, events=log)
        await publisher.publish(tensors(0), 0)
        for version in range(1, 5):
            load = BUSY if version % 2 else QUIET
            tasks = [asyncio.create_task(d.ask(request(i, 20, stops=False))) for i in range(load)]
            await until(lambda load=load: d.engine.requests_in_flight == load)
            await publisher.publish(tensors(version), version)
            await asyncio.gather(*tasks)
        log.close()

    run(use, tmp_path, servers=1, concurrency=4, token_ms=1.0, probe_every_s=3600.0)
    sent = [int(fields["inflight"]) for fields in lines(path, "weights", "client.send")]
    assert sent == [0, *[BUSY, QUIET] * 2]
    assert all(float(fields["queue_ms"]) >= 0.0 for fields in lines(path, "weights", "client.done"))
