"""Score servers: several vLLM servers with one model, which compute values of solutions.

`ServedModel` (pvg.servers.served_model) chooses the servers, repeats failed requests and delivers weights.
`ScoreServers` builds requests, reads replies, and proves weights by the values of a few fixed solutions.

Invariant 2 on servers: an answer counts only if its server had the requested weights. A reply that names its weights is
trusted. In addition, after all answers have arrived, the client asks each server for its boot id and label. A server
never returns to an earlier boot id or label, so a server that still has both had them all the time. Answers of other
servers are requested again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from pvg.errors import ConfigurationError, ServerUnavailableError, TrainingDivergedError, WeightsNotArrivedError
from pvg.models.heads import VerifierModel
from pvg.records import Float32
from pvg.servers.control import ServerInfo
from pvg.servers.fleet import Server, StaleWeights
from pvg.servers.pool import ServerFault, pause_before_retry, together
from pvg.servers.publishing import SyncTiming, WeightLabel, WeightUpdate
from pvg.servers.served_model import Prove, RequestFailed, ServedModel
from pvg.telemetry.spans import submit_in
from pvg.verifier.backend import ScoreInput
from pvg.verifier.served_heads import ServedHead, ServedImplicit

T = TypeVar("T")

CONCURRENCY = 256  # requests in flight: more than vLLM decodes at once, so that its queue is never empty
REPLY_S = 600.0  # timeout of a single lost reply; a server that is down is detected much earlier
# Allowed difference of a logit, or of one token's log-prob, from torch. With float32 on both sides it is about 1e-5.
TOLERANCE_FLOAT32 = 1e-2
TOLERANCE_REDUCED = 0.5  # bfloat16 has 8 bits of precision


@dataclass(frozen=True, slots=True)
class ServerScores:
    """For each input its float32 values, and the number of requests."""

    values: list[Float32]
    requests: int


@dataclass(frozen=True, slots=True)
class _Answer:
    values: list[Float32]
    server: Server
    boot: str
    label: str


class ScoreServers:
    """The servers of `served`, whose connections must cover CONCURRENCY. `canary`: the solutions that prove weights;
    set it before weights arrive. `tolerance`: None uses the one of the server's dtype."""

    def __init__(self, served: ServedModel, head: ServedHead, executor: Executor, tolerance: float | None) -> None:
        self.served = served
        self.canary: tuple[ScoreInput, ...] = ()
        self._head = head
        self._executor = executor
        self._tolerance = tolerance
        self._room = asyncio.Semaphore(CONCURRENCY)

    async def open(self, shape: str) -> None:
        """Check the servers, whose model must have the verifier's `shape`, and watch them from now on."""
        self.served.needs = replace(self.served.needs, shape=shape)
        await self.served.fleet.open()

    # --- scores ------------------------------------------------------------------------------------------------------

    async def ask(self, inputs: Sequence[ScoreInput]) -> ServerScores:
        """The model's values for `inputs`. Raises ServerUnavailableError if no server is up for `serving.unavailable_s`
        or if a request fails repeatedly; ConfigurationError if servers refuse a request."""
        self._check_lengths(inputs)
        size, attempts = self._head.inputs_per_request, self.served.connections.serving.retries + 1
        missing = [list(range(at, min(at + size, len(inputs)))) for at in range(0, len(inputs), size)]
        values: dict[int, Float32] = {}
        requests = 0
        for attempt in range(1, attempts + 1):
            answers = await together([self._answer([inputs[row] for row in rows]) for rows in missing])
            requests += len(answers)
            changed = await self._changed(answers)
            again = []
            for rows, answer in zip(missing, answers, strict=True):
                if (answer.server.url, answer.boot, answer.label) in changed:
                    again.append(rows)
                    continue
                for row, value in zip(rows, answer.values, strict=True):
                    values[row] = value
            if not again:
                return ServerScores([values[row] for row in range(len(inputs))], requests)
            missing = again
            await pause_before_retry(attempt, jitter=0.5)
        raise self._gave_up(f"Servers were replaced {attempts} times while they scored")

    async def _answer(self, inputs: Sequence[ScoreInput]) -> _Answer:
        """One request, repeated on other servers until one answers."""
        name = inputs[0].rollout_id
        async with self._room:
            try:
                return await self.served.request(
                    partial(self._attempt, inputs),
                    what=f"to score rollout {name}",
                    jitter=int.from_bytes(inputs[0].digest[:2]) / 2**16,
                    tag="score",
                    rollout=name,
                )
            except RequestFailed as failed:
                raise self._gave_up(
                    f"Rollout {name} could not be scored in {failed.attempts} attempts ({failed.fault})"
                ) from None

    async def _attempt(self, inputs: Sequence[ScoreInput], server: Server, label: str) -> _Answer:
        assert server.info is not None
        boot = server.info.boot
        return _Answer(await self._exchange(server, inputs, label), server, boot, label)

    async def _exchange(self, server: Server, inputs: Sequence[ScoreInput], label: str) -> list[Float32]:
        """One request. Raises a ServerFault, or StaleWeights if the reply's weights are not `label`."""
        url, pool = server.url + self._head.route, self.served.connections.requests
        reply = await pool.request("POST", url, self._head.body(inputs, label), timeout_s=REPLY_S)
        reading = self._head.read(reply.json(), inputs, url)
        if reading.label is not None and reading.label != label:
            raise StaleWeights(server.url, f"its log-probs come from weights {reading.label!r}, not from {label!r}")
        return reading.values

    async def _changed(self, answers: Sequence[_Answer]) -> set[tuple[str, str, str]]:
        """Those (url, boot, label) of the answers that no longer hold for their server."""
        servers = {(answer.server.url, answer.boot, answer.label): answer.server for answer in answers}
        found = await asyncio.gather(*(server.control.info() for server in servers.values()), return_exceptions=True)
        changed = set()
        for (key, server), outcome in zip(servers.items(), found, strict=True):
            if isinstance(outcome, BaseException) and not isinstance(outcome, ServerFault):
                raise outcome
            if isinstance(outcome, ServerInfo) and (outcome.url, outcome.boot, outcome.label) == key:
                continue
            fault = outcome if isinstance(outcome, ServerFault) else StaleWeights(server.url, "was started again")
            self.served.fleet.report(server, fault)
            changed.add(key)
        return changed

    def _check_lengths(self, inputs: Sequence[ScoreInput]) -> None:
        longest = max(inputs, key=lambda entry: len(entry.ids))
        needed = len(longest.ids) + self._head.extra_tokens
        for server in self.served.fleet.servers:
            if server.info is not None and server.info.max_model_len < needed:
                raise ConfigurationError(
                    f"Rollout {longest.rollout_id} needs {needed} tokens to be scored, but {server.url} accepts "
                    f"at most {server.info.max_model_len}.",
                    "Start it with a larger serving.max_model_len, or lower rollout.max_tokens.",
                )

    def _gave_up(self, what: str) -> ServerUnavailableError:
        urls = ", ".join(server.url for server in self.served.fleet.servers)
        return ServerUnavailableError(f"{what}; the servers: {urls}.", self.served.needs.remedy)

    # --- weights -----------------------------------------------------------------------------------------------------

    async def publish(self, update: WeightUpdate, model: VerifierModel) -> SyncTiming:
        """Send the weights of `model` to the servers, and prove their arrival: see ServedModel.publish. Also raises
        TrainingDivergedError if the weights give scores that are not finite."""
        return await self.served.publish(update, partial(self._expect, model))

    async def keep_start(self, model: VerifierModel) -> None:
        """Use servers with the untrained start of `model`: see ServedModel.keep_start."""
        assert isinstance(self._head, ServedImplicit)
        expected = await in_thread(self._executor, self._head.expected_of_start, model, self.canary)
        await self.served.keep_start(partial(self._prove, expected, None))

    async def _expect(self, model: VerifierModel, update: WeightUpdate, label: WeightLabel) -> Prove:
        expected = await in_thread(self._executor, self._head.expected, model, self.canary)
        if not all(np.isfinite(values).all() for values in expected):
            raise TrainingDivergedError(
                f"The scores of version {label.version} of the verifier are not finite.",
                "Its weights have diverged: lower verifier.learning_rate. All commits are intact.",
            )
        return partial(self._prove, expected, label)

    async def _prove(self, expected: Sequence[Float32], label: WeightLabel | None, server: Server) -> dict[str, float]:
        """Prove that a server has the weights of `label` (None: the untrained start), by its label and by its values
        for the canary's solutions. Returns the largest gap. Raises WeightsNotArrivedError."""
        server.info = info = await server.control.info()
        what = "the untrained start" if label is None else f"version {label.version}"
        if label is not None and info.label != str(label):
            raise WeightsNotArrivedError(
                f"{server.url} was sent {what} of the verifier, but reports {info.label!r} instead of {str(label)!r}.",
                f"If another run publishes to it, give each run its own {self.served.needs.setting}.",
            )
        if not self.canary:
            return {}
        found: list[Float32] = []
        for entry in self.canary:
            found += await self._exchange(server, [entry], info.label)
        gap = max(float(np.abs(a - b).max(initial=0.0)) for a, b in zip(expected, found, strict=True))
        exact = info.dtype.removeprefix("torch.") == "float32"
        tolerance = self._tolerance or (TOLERANCE_FLOAT32 if exact else TOLERANCE_REDUCED)
        if not gap <= tolerance:  # also true for NaN
            raise WeightsNotArrivedError(
                f"{server.url} does not have {what} of the verifier: its values for fixed solutions differ from "
                f"torch's by up to {gap:.3g} (tolerance {tolerance:g}).",
                "Restart it with the experiment's verifier. If it already has it, raise weights.canary_tolerance.",
            )
        return {"gap": gap}


async def in_thread(executor: Executor, work: Callable[..., T], *arguments: Any) -> T:
    """Like `run_in`, but a cancelled caller still waits for the thread, because it may close the thread's model
    next."""
    running = submit_in(executor, work, *arguments)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        if not running.cancelled():
            running.exception()  # marks it as retrieved
        raise
