"""The slow sides of the loop workload's switches: records as JSON text, and work on the event loop.

Research code often does this: it is correct, but it blocks all other work of the loop. The fast sides are pvg's own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pvg.game.ledger import Checkpoint, Ledger
from pvg.game.states import GameState
from pvg.records import Rollout, RoutedExperts
from pvg.store.atomic import write_atomic


class OnTheLoop(Executor):
    """Runs each call at once in the calling thread: on the event loop."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except BaseException as error:  # noqa: BLE001 - the future carries it to the caller, as in any executor
            done.set_exception(error)
        return done


class JsonLedger(Ledger):
    """Writes rollouts as one JSON text, on the loop, instead of as a shard. `written`: the file of the newest
    commit."""

    written: Path | None = None
    _kept: Sequence[Rollout] = ()

    def keep(self, rollouts: Sequence[Rollout]) -> None:
        self._kept = (*self._kept, *rollouts)

    async def commit(
        self,
        state: GameState,
        checkpoint: Checkpoint | None = None,
        *,
        finished: Mapping[str, float | None] | None = None,
    ) -> None:
        if self._kept:
            self.written = self.directory.path / f"rollouts-{state.step:05d}.json"
            write_json(self.written, self._kept)
            self._kept = ()
        await super().commit(state, checkpoint, finished=finished)


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
