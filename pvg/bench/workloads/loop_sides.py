"""The two sides of the loop workload's switches: how chunks are joined, how records are written, who is looked after.

The naive sides are what research code does: correct, and quadratic, on the event loop, or for nothing. The fast sides
are the product's where it has them (the shards, their thread, grading). `JoinOnce` and the glance of `Aged` stand for a
pattern that the product follows in other forms: pvg.rollout.vllm.wire.Stretch keeps the tokens of a stream in lists to
its end, without turns and with the experts in one piece, and pvg.rollout.pipeline compares ages where a version is
published. Their rungs say so.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from pvg.records import Float32, Int32, Rollout, RoutedExperts
from pvg.store.atomic import write_atomic


class Pieces(NamedTuple):
    """A stretch of a completion: token ids int32 [n], log-probs float32 [n], and the experts of as many tokens as were
    computed for it [m, layers, k]; or the whole of it."""

    token_ids: Int32
    logprobs: Float32
    experts: RoutedExperts

    @property
    def nbytes(self) -> int:
        return self.token_ids.nbytes + self.logprobs.nbytes + self.experts.nbytes


def concatenated(pieces: Sequence[Pieces]) -> Pieces:
    """One behind the other, copied."""
    return Pieces(
        np.concatenate([piece.token_ids for piece in pieces]),
        np.concatenate([piece.logprobs for piece in pieces]),
        np.concatenate([piece.experts for piece in pieces]),
    )


class Join(Protocol):
    """Puts the chunks of one completion together. `copied`: the bytes it has copied so far."""

    copied: int

    def add(self, chunk: Pieces) -> None: ...

    def next_turn(self) -> None:
        """The conversation goes on: the next request begins with all tokens so far."""
        ...

    def result(self) -> Pieces: ...


class JoinOnce:
    """Keeps the chunks of all turns and copies each of them once, at the end."""

    def __init__(self) -> None:
        self.copied = 0
        self._chunks: list[Pieces] = []

    def add(self, chunk: Pieces) -> None:
        self._chunks.append(chunk)

    def next_turn(self) -> None: ...

    def result(self) -> Pieces:
        joined = concatenated(self._chunks)
        self.copied += joined.nbytes
        return joined


class JoinEachTime:
    """Appends every chunk to a new copy of all that came before it, and makes every turn's request of another copy:
    quadratic in the number of chunks, and of turns."""

    def __init__(self) -> None:
        self.copied = 0
        self._so_far: Pieces | None = None

    def add(self, chunk: Pieces) -> None:
        self._keep(concatenated([chunk] if self._so_far is None else [self._so_far, chunk]))

    def next_turn(self) -> None:
        if self._so_far is not None:
            self._keep(concatenated([self._so_far]))

    def _keep(self, copy: Pieces) -> None:
        self._so_far = copy
        self.copied += copy.nbytes

    def result(self) -> Pieces:
        if self._so_far is None:
            raise ValueError("nothing was added")
        return self._so_far


# `workload.join`.
JOINS: dict[str, Callable[[], Join]] = {"once": JoinOnce, "quadratic": JoinEachTime}


class InFlight(Protocol):
    """Requests under way and the version of the weights that each began with."""

    in_flight: dict[str, int]

    @property
    def version(self) -> int: ...


class Aged:
    """Drops requests that are more than `budget` versions behind: looked after `hz` times a second. Here none ever is,
    for no weights are loaded; the question is what looking costs.

    `always`: a task for each request in flight, as if each had to be asked; else it is found out first, in one glance
    for all of them, that there is nothing to do.
    """

    def __init__(self, engine: InFlight, hz: float, *, always: bool, budget: int = 0) -> None:
        self._engine = engine
        self._hz = hz
        self._always = always
        self._budget = budget
        self._lock = asyncio.Lock()
        self.tasks = 0  # that were made
        self.dropped: list[str] = []

    async def look_after(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(1.0 / self._hz)
            await self.look()

    async def look(self) -> None:
        engine = self._engine
        oldest = min(engine.in_flight.values(), default=engine.version)
        if not self._always and engine.version - oldest <= self._budget:
            return
        self.tasks += len(engine.in_flight)
        await asyncio.gather(*(self._drop_if_old(request) for request in list(engine.in_flight)))

    async def _drop_if_old(self, request: str) -> None:
        async with self._lock:
            began = self._engine.in_flight.get(request, self._engine.version)
            if self._engine.version - began > self._budget:
                self.dropped.append(request)


class OnTheLoop(Executor):
    """Runs what it is given at once, where it is given: on the event loop."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(fn(*args, **kwargs))
        return done


def write_json(path: Path, rollouts: Sequence[Rollout]) -> None:
    """All records as one JSON text, numbers one by one: the naive encoding. As durable as a shard."""
    records = [
        {
            **asdict(rollout),
            "prompt_ids": rollout.prompt_ids.tolist(),
            "completion_ids": rollout.completion_ids.tolist(),
            "logprobs": rollout.logprobs.tolist(),
            **_plain_experts(rollout.routed_experts),
        }
        for rollout in rollouts
    ]
    write_atomic(path, json.dumps(records).encode())


def _plain_experts(experts: RoutedExperts | None) -> dict[str, Any]:
    """Flat: a list for each token and layer would be 16 million objects for the garbage collector."""
    if experts is None:
        return {"routed_experts": None}
    return {"routed_experts": experts.reshape(-1).tolist(), "routed_shape": experts.shape}
