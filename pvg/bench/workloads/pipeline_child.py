"""An engine in a separate process that computes nothing: it returns recorded completions after realistic delays.

    python -m pvg.bench.workloads.pipeline_child

Protocol: one JSON object per line on standard input and on standard output:

    {"completions": {KEY: [token_ids, logprobs, finish_reason], ...}}     the first line
    {"pace": seconds, "sigma": s, "longest": n, "draw": i}
                                                    the median delay; no request takes more than n times that
    {"ask": KEY, "id": ID}                          -> {"id", "tokens", "logprobs", "finish", "spans", "service_s"}
    {"cancel": ID}                                  no answer
    {"version": v}                                  -> {"version": v}: later tokens have this version

The delay of a request is log-normal and depends only on its key and the number of the draw. A weight update does not
interrupt requests. Tokens arrive at an even pace, each with the version current at that time. The process ends when its
input ends.
"""

from __future__ import annotations

import asyncio
import math
import random
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import orjson

LONGEST_LINE = 2**28


@dataclass(slots=True)
class PendingRequest:
    key: str
    began: float
    seconds: float
    versions: list[tuple[float, int]]  # (time, version current from then on)
    timer: asyncio.TimerHandle | None = field(default=None)


class EngineChild:
    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._completions: dict[str, tuple[list[int], list[float], str]] = {}
        self._running: dict[str, PendingRequest] = {}
        self._version = 0
        self._pace, self._sigma, self._longest, self._draw = 0.0, 0.0, 1, 0

    def take(self, message: dict[str, Any]) -> None:
        if "ask" in message:
            self._ask(message["ask"], message["id"])
        elif "cancel" in message:
            asked = self._running.pop(message["cancel"], None)
            if asked is not None and asked.timer is not None:
                asked.timer.cancel()
        elif "version" in message:
            self._version = message["version"]
            for asked in self._running.values():
                asked.versions.append((time.perf_counter(), self._version))
            self._send({"version": self._version})
        elif "pace" in message:
            self._pace, self._sigma = message["pace"], message["sigma"]
            self._longest, self._draw = message["longest"], message["draw"]
        else:
            self._completions = message["completions"]

    def _ask(self, key: str, id_: str) -> None:
        now = time.perf_counter()
        seconds = self._pace * drawn_time(f"{self._draw}/{key}", self._sigma, self._longest)
        asked = self._running[id_] = PendingRequest(key, now, seconds, [(now, self._version)])
        asked.timer = asyncio.get_running_loop().call_later(seconds, self._answer, id_)

    def _answer(self, id_: str) -> None:
        asked = self._running.pop(id_)
        tokens, logprobs, finish = self._completions[asked.key]
        took = max(time.perf_counter() - asked.began, 1e-9)
        spans: dict[int, int] = {}
        for since, version in asked.versions:
            start = min(len(tokens) - 1, int(len(tokens) * (since - asked.began) / took))
            spans[start] = version  # if two versions arrive with the same token, the newer one counts
        self._send(
            {
                "id": id_,
                "tokens": tokens,
                "logprobs": logprobs,
                "finish": finish,
                "spans": sorted(spans.items()),
                "service_s": took,
            }
        )

    def _send(self, message: dict[str, Any]) -> None:
        self._writer.write(orjson.dumps(message) + b"\n")


def drawn_time(key: str, sigma: float, longest: int) -> float:
    """The delay of a request in multiples of the median: log-normal, `sigma` the deviation of its logarithm."""
    return min(float(longest), math.exp(sigma * random.Random(key).gauss(0.0, 1.0)))


async def serve() -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=LONGEST_LINE)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, sys.stdout)
    child = EngineChild(asyncio.StreamWriter(transport, protocol, None, loop))
    while line := await reader.readline():
        child.take(orjson.loads(line))


if __name__ == "__main__":
    asyncio.run(serve())
