"""Stub workers for `benchmarks.fleet`: many in one process, each with its own connection to the driver.

    python -m benchmarks.fleet_workers HOST:PORT SECONDS TOKEN,TOKEN,...

The process reads one line from stdin: the secret of the connections as hexadecimal digits. Each further line is the key
of an expected connection, and starts a stub worker. The process ends when stdin does.

A stub speaks the protocol of a worker (pvg.workers.process) and computes nothing. It completes the rows of a block with
the given tokens, in TURNS frames spread over SECONDS, as an engine with continuous batching does.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence

import numpy as np

from pvg.records import Timing, VersionSpan
from pvg.rollout.engine import Completion, GenerationRequest
from pvg.workers.frames import Frame, receive, send
from pvg.workers.links import connect
from pvg.workers.requests import completion_arrays, requests_of

TURNS = 16


class StubWorker:
    """Serves the driver at the other end of a stream. `number` decides when in each turn it answers, so that the stubs
    of one block do not all answer at the same time."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        seconds: float,
        token_ids: Sequence[int],
        number: int,
    ) -> None:
        self._reader, self._writer = reader, writer
        self._seconds = seconds
        self._token_ids = np.array(token_ids, np.int32)
        self._logprobs = np.full(len(token_ids), -0.5, np.float32)
        self._delay_s = number * 0.618 % 1.0 * seconds / TURNS
        self._version = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        while (frame := await receive(self._reader)) is not None:
            if frame.kind == "ping":
                send(self._writer, Frame("pong", {"ran_s": 0.0, "waited_s": 0.0}))
            elif frame.kind == "generate":
                task = asyncio.create_task(self._generate(frame))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            elif "id" in frame.fields:
                self._version = frame.fields.get("version", self._version)
                send(self._writer, Frame("done", {"id": frame.fields["id"], "rpc_ms": 0.0}))
        self._writer.close()

    async def _generate(self, frame: Frame) -> None:
        requests, began, number = requests_of(frame), time.perf_counter(), frame.fields["id"]
        await asyncio.sleep(self._delay_s)
        turns = min(TURNS, len(requests))
        for turn, rows in enumerate(np.array_split(np.arange(len(requests)), turns), start=1):
            await asyncio.sleep(max(0.0, began + self._delay_s + turn * self._seconds / turns - time.perf_counter()))
            found = {row: self._completion(requests[row], began) for row in rows.tolist()}
            fields, arrays = completion_arrays(found)
            fields["stats"] = [0, len(rows), len(rows) * len(self._token_ids), 0.0, 0, 0, 0, 0]
            send(self._writer, Frame("completed", {**fields, "id": number}, arrays))
        send(self._writer, Frame("done", {"id": number}))

    def _completion(self, request: GenerationRequest, began: float) -> Completion:
        timing = Timing(0.0, time.perf_counter() - began)
        spans = (VersionSpan(0, self._version),)
        return Completion(request.id, self._token_ids, self._logprobs, spans, "stop", timing, None)


async def _work(host: str, port: int, seconds: float, token_ids: Sequence[int]) -> None:
    loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    secret, serving = bytes.fromhex((await reader.readline()).decode()), set[asyncio.Task[None]]()
    while line := await reader.readline():
        connection = await asyncio.to_thread(connect, host, port, secret, int(line))
        streams = await asyncio.open_connection(sock=connection, limit=1 << 20)
        serving.add(asyncio.create_task(StubWorker(*streams, seconds, token_ids, len(serving)).serve()))
    for task in serving:
        task.cancel()


def main() -> None:
    address, seconds, tokens = sys.argv[1:]
    host, port = address.split(":")
    asyncio.run(_work(host, int(port), float(seconds), [int(word) for word in tokens.split(",")]))


if __name__ == "__main__":
    main()
