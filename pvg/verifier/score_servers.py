"""Score servers: several vLLM servers with one model, which compute values of solutions.

`pvg.servers.fleet` decides which servers are up and which one gets the next request.

Invariant 2 on servers: an answer counts only if its server had the requested weights. A reply that names its weights is
trusted. In addition, after all answers have arrived, the client asks each server for its boot id and label. A server
never returns to an earlier boot id or label, so a server that still has both had them all the time. Answers of other
servers are requested again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pvg.config.sections import Serving
from pvg.errors import ConfigurationError, ServerUnavailableError
from pvg.records import Float32
from pvg.servers.control import ControlClient, ServerInfo, check_shape
from pvg.servers.fleet import Fleet, Server, StaleWeights
from pvg.servers.pool import HttpPool, RefusedRequest, ReplyTimeout, ServerFault, pause_before_retry
from pvg.telemetry.events import Events
from pvg.verifier.backend import ScoreInput
from pvg.verifier.served_heads import ServedHead

T = TypeVar("T")

CONCURRENCY = 256  # requests in flight: more than vLLM decodes at once, so that its queue is never empty
REPLY_S = 600.0  # timeout of a single lost reply; a server that is down is detected much earlier


@dataclass(frozen=True, slots=True)
class ServerScores:
    """For each input: its float32 values and the time its request was sent (perf_counter). And the number of
    requests."""

    values: list[Float32]
    began: list[float]
    requests: int


@dataclass(frozen=True, slots=True)
class _Answer:
    values: list[Float32]
    began: float
    server: Server
    boot: str
    label: str


class ScoreServers:
    """The servers in the setting `setting`. The caller owns `pool`, whose limits must cover CONCURRENCY.

    `catch_up` prepares a server that is up, or raises. After `fleet.arrived` the server gets requests.
    """

    def __init__(
        self,
        head: ServedHead,
        controls: Sequence[ControlClient],
        pool: HttpPool,
        section: Serving,
        events: Events,
        *,
        setting: str,
        catch_up: Callable[[Server], Awaitable[None]],
    ) -> None:
        self.head = head
        self.fleet = Fleet(controls, section, events, check=self._check, catch_up=catch_up)
        self._pool = pool
        self._section = section
        self._events = events
        self._setting = setting
        self._room = asyncio.Semaphore(CONCURRENCY)
        self._shape = ""  # the verifier's, once known

    @property
    def controls(self) -> list[ControlClient]:
        return [server.control for server in self.fleet.servers]

    async def look(self) -> None:
        """Ask the servers for their state. Raises ServerUnavailableError if none answers, ConfigurationError or
        MissingRequirementError if one cannot serve this verifier."""
        await self._explained(self.fleet.look())

    async def open(self, shape: str) -> None:
        """`look`, then keep watching the servers. Their model must have the verifier's `shape`."""
        self._shape = shape
        await self._explained(self.fleet.open())

    async def until_one_is_up(self) -> None:
        """Wait for a server. Raises ServerUnavailableError after `serving.unavailable_s`."""
        await self._acquire(avoid=None)

    async def ask(self, inputs: Sequence[ScoreInput]) -> ServerScores:
        """The model's values for `inputs`. Raises ServerUnavailableError if no server is up for `serving.unavailable_s`
        or if a request fails repeatedly; ConfigurationError if servers refuse a request."""
        self._check_lengths(inputs)
        size = self.head.inputs_per_request
        missing = [list(range(at, min(at + size, len(inputs)))) for at in range(0, len(inputs), size)]
        values: dict[int, Float32] = {}
        began: dict[int, float] = {}
        requests = 0
        for attempt in range(1, self._section.retries + 2):
            answers = await together([self._answer([inputs[row] for row in rows]) for rows in missing])
            requests += len(answers)
            changed = await self._changed(answers)
            again = []
            for rows, answer in zip(missing, answers, strict=True):
                if (answer.server.url, answer.boot, answer.label) in changed:
                    again.append(rows)
                    continue
                for row, value in zip(rows, answer.values, strict=True):
                    values[row], began[row] = value, answer.began
            if not again:
                numbers = range(len(inputs))
                return ServerScores([values[n] for n in numbers], [began[n] for n in numbers], requests)
            missing = again
            await pause_before_retry(attempt, jitter=0.5)
        raise self.gave_up(f"Servers were replaced {self._section.retries + 1} times while they scored")

    async def ask_one(self, server: Server, inputs: Sequence[ScoreInput], label: str) -> list[Float32]:
        """One server's values for a few inputs. Raises the last ServerFault after `serving.retries`. Does not retry a
        server that sends no reply, because the next publication waits for this call."""
        for attempt in range(1, self._section.retries + 1):
            try:
                return await self._exchange(server, inputs, label)
            except ReplyTimeout:
                raise
            except ServerFault:
                await pause_before_retry(attempt, jitter=0.5)
        return await self._exchange(server, inputs, label)

    async def _exchange(self, server: Server, inputs: Sequence[ScoreInput], label: str) -> list[Float32]:
        """One request. Raises a ServerFault, StaleWeights if the reply's weights are not `label`, or ConfigurationError
        if the request can never succeed."""
        url = server.url + self.head.route
        try:
            reply = await self._pool.request("POST", url, self.head.body(inputs, label), timeout_s=REPLY_S)
        except RefusedRequest as refusal:
            if refusal.status >= 500:
                raise
            raise ConfigurationError(
                f"{server.url} refuses to score rollout {inputs[0].rollout_id}: {refusal.message}.",
                "Check that it serves the verifier's model, with a context that is long enough.",
            ) from None
        reading = self.head.read(reply.json(), inputs, url)
        if reading.label is not None and reading.label != label:
            raise StaleWeights(server.url, f"its log-probs come from weights {reading.label!r}, not from {label!r}")
        return reading.values

    async def _answer(self, inputs: Sequence[ScoreInput]) -> _Answer:
        """One request, retried on other servers until one answers."""
        async with self._room:
            last: Server | None = None
            failed: ServerFault | None = None
            for attempt in range(1, self._section.retries + 2):
                server = await self._acquire(avoid=last)
                assert server.info is not None
                boot, label, began = server.info.boot, server.label, time.perf_counter()
                try:
                    values = await server.attempt(self._exchange(server, inputs, label))
                    return _Answer(values, began, server, boot, label)
                except ServerFault as fault:
                    last, failed = server, fault
                self.fleet.report(server, failed)
                self._events.event(
                    "score",
                    event="retry",
                    rollout=inputs[0].rollout_id,
                    server=server.url,
                    attempt=attempt,
                    why=str(failed),
                )
                await pause_before_retry(attempt, jitter=int.from_bytes(inputs[0].digest[:2]) / 2**16)
        raise self.gave_up(f"Rollout {inputs[0].rollout_id} could not be scored in {attempt} attempts ({failed})")

    async def _acquire(self, avoid: Server | None) -> Server:
        return await self._explained(self.fleet.acquire(avoid=avoid))

    async def _explained(self, work: Awaitable[T]) -> T:
        """Replace the remedy of a ServerUnavailableError by that for these servers."""
        try:
            return await work
        except ServerUnavailableError as error:
            raise ServerUnavailableError(error.message, self._remedy()) from None

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
            self.fleet.report(server, fault)
            changed.add(key)
        return changed

    def _check(self, info: ServerInfo) -> None:
        if info.runner != self.head.runner:
            raise ConfigurationError(
                f"{info.url} is a server of the kind {info.runner!r}, but {self._setting} needs {self.head.runner!r}.",
                self._remedy(),
            )
        check_shape(info, self._shape, "models.verifier")

    def _check_lengths(self, inputs: Sequence[ScoreInput]) -> None:
        longest = max(inputs, key=lambda entry: len(entry.ids))
        needed = len(longest.ids) + self.head.extra_tokens
        for server in self.fleet.servers:
            if server.info is not None and server.info.max_model_len < needed:
                raise ConfigurationError(
                    f"Rollout {longest.rollout_id} needs {needed} tokens to be scored, but {server.url} accepts "
                    f"at most {server.info.max_model_len}.",
                    "Start it with a larger serving.max_model_len, or lower rollout.max_tokens.",
                )

    def gave_up(self, what: str) -> ServerUnavailableError:
        """An error that names the servers."""
        urls = ", ".join(server.url for server in self.fleet.servers)
        return ServerUnavailableError(f"{what}; the servers: {urls}.", self._remedy())

    def _remedy(self) -> str:
        purpose = self._setting.rpartition(".")[2].removesuffix("_servers")
        return f"Start one with `pvg serve EXPERIMENT --for {purpose}`, and add its URL to {self._setting}."


async def together(works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """All results in order. The first failure cancels the others, and is raised after they have ended."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        if any(not task.done() for task in tasks):  # nothing to wait for otherwise
            for task in tasks:
                if not task.cancelling():  # a second cancellation would interrupt the task's clean-up
                    task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
