"""An engine in a process of its own that computes nothing: it has every completion beforehand, and hands each over
after as long as a server would have sampled it.

    python -m pvg.bench.workloads.pipeline_child

Reads one JSON object per line from standard input and writes one per line to standard output:

    {"completions": {KEY: [token_ids, logprobs, finish_reason], ...}}     first of all
    {"pace": seconds, "sigma": s, "longest": n, "draw": i}
                                                    half of the requests take longer than `seconds`, none n times that
    {"ask": KEY, "id": ID}                          -> {"id", "tokens", "logprobs", "finish", "spans", "service_s"}
    {"cancel": ID}                                  no answer
    {"version": v}                                  -> {"version": v}: tokens from here on are of that version

A request takes equally long whoever asks for it: its log-normal time follows from its key and the number of the draw
alone. Updates do not interrupt it; its tokens come at an even pace and have the version of their moment. The end of the
input ends it.
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
    versions: list[tuple[float, int]]  # since when, which
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
            self._say({"version": self._version})
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
            spans[start] = version  # of two versions that come with the same token, it has the newer
        self._say(
            {
                "id": id_,
                "tokens": tokens,
                "logprobs": logprobs,
                "finish": finish,
                "spans": sorted(spans.items()),
                "service_s": took,
            }
        )

    def _say(self, message: dict[str, Any]) -> None:
        self._writer.write(orjson.dumps(message) + b"\n")


def drawn_time(key: str, sigma: float, longest: int) -> float:
    """How many times the median a request takes: log-normal, `sigma` the deviation of its logarithm."""
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
