"""Requests in flight on servers: counting them, cutting them short, and continuing those that were cut.

To cut a request, the engine asks its server to abort it. The server then ends its reply with the tokens so far and the
labels of the weights that sampled them. Tokens without a label are discarded, and the completion continues from what it
had before.
"""

from __future__ import annotations

import asyncio
import base64
import io
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from pvg.errors import ConfigurationError, PvgError
from pvg.records import FinishReason, Float32, Int32, RoutedExperts, VersionSpan
from pvg.rollout.engine import EngineStats, GenerationRequest, PartialCompletion
from pvg.servers.control import ARRAYS
from pvg.servers.fleet import Server
from pvg.servers.pool import ConnectionBroken, MalformedReply, RefusedRequest, ServerFault

# Requests and replies of vLLM's token-level route: JSON to validated records and back.

GENERATE = "/inference/v1/generate"
SEED_BITS = (1 << 63) - 1  # vLLM's seeds are signed
UNSAMPLABLE = -9000.0  # vLLM writes -9999 for a log-prob of minus infinity or NaN
ROUNDING = 1e-3  # nats by which a log-prob may be above 0
UNREADABLE = (AttributeError, LookupError, OverflowError, TypeError, ValueError)  # from JSON of another form


@dataclass(frozen=True, slots=True)
class ServedCompletion:
    """A completion as the server reports it. `labels`: (index of the first token, weight label) of each span."""

    token_ids: Int32
    logprobs: Float32
    finish_reason: FinishReason | Literal["abort"]  # "abort" only if requested
    labels: tuple[tuple[int, str], ...]
    prompt_tokens: int
    cached_tokens: int
    routed_experts: RoutedExperts | None = None


def generation(request: GenerationRequest, *, salt: str, model: str | None, stream: bool) -> dict[str, Any]:
    """The request body. It asks for the log-probs of sampled tokens only."""
    sampling = request.sampling
    parameters: dict[str, Any] = {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": 1.0,  # the whole distribution, whatever the server's defaults are
        "top_k": 0,
        "stop_token_ids": list(sampling.stop_ids),
        "ignore_eos": True,  # only the request's own stop tokens count
        "logprobs": 0,
        "detokenize": False,
        "seed": request.seed & SEED_BITS,
        "extra_args": ARRAYS,
    }
    body: dict[str, Any] = {
        "request_id": request.id,
        "token_ids": request.prompt_ids,
        "sampling_params": parameters,
        "cache_salt": salt,
        "stream": stream,
    }
    if model is not None:
        body["model"] = model
    return body


def prompt_scoring(ids: Int32, *, salt: str, model: str | None) -> dict[str, Any]:
    """A body that asks for the log-probs of `ids` themselves. It samples one token, because vLLM requires that."""
    parameters: dict[str, Any] = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0, "detokenize": False}
    parameters["extra_args"] = ARRAYS
    body: dict[str, Any] = {"token_ids": ids, "sampling_params": parameters, "cache_salt": salt}
    if model is not None:
        body["model"] = model
    return body


def read_generated(found: Any, url: str, *, cut: bool = False) -> ServedCompletion:
    """A complete reply. Raises MalformedReply, or ConnectionBroken if the server aborted a request that was not
    `cut`."""
    choice = _only_choice(found, url)
    ids_C, logprobs_C = _array(choice.get("token_ids"), np.int32, url), _array(choice.get("logprobs"), np.float32, url)
    reason, (prompt, cached) = choice.get("finish_reason"), _usage(found, url)
    if reason == "abort" and not cut:
        raise ConnectionBroken(url, "the server aborted the request")
    if reason not in ("abort", "stop", "length"):
        raise MalformedReply(url, f"a completion that ended by {reason!r}")
    if len(ids_C) != len(logprobs_C) or not (len(ids_C) or reason == "abort"):
        raise MalformedReply(url, f"{len(ids_C)} tokens with {len(logprobs_C)} log-probs")
    if len(ids_C) and ids_C.min() < 0:
        raise MalformedReply(url, "invalid token ids")
    impossible = logprobs_C[~((logprobs_C >= UNSAMPLABLE) & (logprobs_C <= ROUNDING))]  # NaN too
    if len(impossible):
        raise MalformedReply(url, f"a sampled token with log-prob {impossible[0]:g}")
    experts = read_routed_experts(text, url) if (text := choice.get("routed_experts")) else None
    if experts is not None and len(experts) != (computed := prompt + len(ids_C) - 1):
        raise MalformedReply(url, f"experts of {len(experts)} tokens, where {computed} were computed")
    return ServedCompletion(
        token_ids=ids_C,
        logprobs=logprobs_C,
        finish_reason=reason,
        labels=_labels(choice, len(ids_C), url),
        prompt_tokens=prompt,
        cached_tokens=cached,
        routed_experts=experts,
    )


def _array(text: Any, dtype: type[np.generic], url: str) -> Any:
    """The one-dimensional array that the server wrote as little-endian bytes in base64."""
    try:
        return np.frombuffer(base64.b64decode(text, validate=True), np.dtype(dtype).newbyteorder("<")).astype(dtype)
    except UNREADABLE as error:
        raise MalformedReply(url, f"an array that cannot be read: {error!r}") from None


def _labels(choice: dict[str, Any], tokens: int, url: str) -> tuple[tuple[int, str], ...]:
    """(Index of the first token, label of the weights) of each span."""
    try:
        spans = [(int(span["start"]), str(span["version"])) for span in choice.get("weight_versions") or []]
    except UNREADABLE as error:
        raise MalformedReply(url, f"versions that cannot be read: {error!r}") from None
    # An update after the last token may leave a label for the next one, and two updates before a token two labels.
    labels = dict(span for span in spans if span[0] < tokens)
    starts = list(labels)
    if tokens and (not starts or starts[0] != 0):
        raise MalformedReply(url, "a completion without the versions of its weights (vLLM below 0.32?)")
    if starts != sorted(starts):
        raise MalformedReply(url, f"{tokens} tokens with versions that start at {starts}")
    return tuple(labels.items())


def read_routed_experts(text: str, url: str) -> RoutedExperts:
    """Decode the experts [tokens, layers, experts per token] of prompt and completion: vLLM sends an .npy file in
    base64. The result is a view of the decoded bytes."""
    try:
        data = base64.b64decode(text, validate=True)
        file = io.BytesIO(data)
        if np.lib.format.read_magic(file) != (1, 0):
            raise ValueError("an .npy file of another version")
        shape, by_column, dtype = np.lib.format.read_array_header_1_0(file)
        found: RoutedExperts = np.frombuffer(data, dtype, offset=file.tell()).reshape(shape)
    except (ValueError, TypeError) as error:
        raise MalformedReply(url, f"routed experts that cannot be read: {error}") from None
    if dtype not in (np.uint8, np.uint16) or len(shape) != 3 or by_column:
        raise MalformedReply(url, f"routed experts of {dtype} and the shape {shape}")
    return found


def read_prompt_logprobs(found: Any, ids: Int32, url: str) -> tuple[Float32, str]:
    """(Log-probs float32 [L - 1] of ids[1:] in nats, label of the weights that computed them)."""
    values: Float32 = _array(found.get("prompt_logprobs") if isinstance(found, dict) else None, np.float32, url)
    if len(values) != len(ids) - 1:
        raise MalformedReply(url, f"{len(values)} log-probs of a prompt of {len(ids)} tokens")
    try:
        spans = _only_choice(found, url).get("weight_versions") or [{}]
        return values, str(spans[0].get("version", ""))
    except UNREADABLE as error:
        raise MalformedReply(url, f"versions that cannot be read: {error!r}") from None


def _only_choice(found: Any, url: str) -> dict[str, Any]:
    choices: Sequence[Any] = found.get("choices") if isinstance(found, dict) else None  # type: ignore[assignment]
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise MalformedReply(url, "not exactly one choice")
    return choices[0]


def _usage(found: Any, url: str) -> tuple[int, int]:
    """(Prompt tokens, those of them that came from the prefix cache)."""
    try:
        usage = found["usage"]
        return int(usage["prompt_tokens"]), int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
    except UNREADABLE as error:
        raise MalformedReply(url, f"usage that cannot be read: {error!r}") from None


class RequestCounter:
    """Counts requests in flight and tokens. `capacity`: requests that can be in flight."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.in_flight = 0
        self._stats = EngineStats()
        self._since = 0.0  # when `_stats` was last brought up to date

    @property
    def stats(self) -> EngineStats:
        """`rows` / `batches` is the time-weighted mean number of requests in flight while there was any."""
        self._count_time()
        return self._stats

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count a request while it is in flight."""
        self._count_time()
        self.in_flight += 1
        try:
            yield
        finally:
            self._count_time()
            self.in_flight -= 1

    def add_tokens(self, generated: ServedCompletion) -> None:
        prompt = generated.prompt_tokens
        self._stats = self._stats.plus(
            EngineStats(
                tokens=len(generated.token_ids),
                prompt_tokens=prompt,
                prompt_tokens_computed=prompt - generated.cached_tokens,
            )
        )

    def _count_time(self) -> None:
        """Add the time with requests in flight to the statistics, as batches (seconds) and rows (requests times
        seconds)."""
        now = time.perf_counter()
        if self.in_flight:
            passed = now - self._since
            times = EngineStats(batches=passed, rows=passed * self.in_flight, seconds=passed)
            self._stats = self._stats.plus(times)
        self._since = now


# --- cutting ---------------------------------------------------------------------------------------------------------

# The server ignores an abort for a request that has not reached it yet, so the abort is repeated.
AGAIN_S = 0.1


@dataclass(slots=True, eq=False)
class InFlightRequest:
    """A request in flight. `server`: where it currently runs. `failure`: why it cannot be cut."""

    request: GenerationRequest
    server: Server | None = None
    cut: bool = False
    failure: PvgError | None = None
    ended: bool = False


class InFlightRequests:
    """The requests that can be cut short, by id."""

    def __init__(self) -> None:
        self._requests: dict[str, InFlightRequest] = {}
        self._aborting: set[asyncio.Task[None]] = set()

    @contextmanager
    def track(self, request: GenerationRequest) -> Iterator[InFlightRequest]:
        """The request can be cut while this context is open."""
        tracked = self._requests[request.id] = InFlightRequest(request)
        try:
            yield tracked
        finally:
            tracked.ended = True
            del self._requests[request.id]

    def cut(self, request_ids: Collection[str]) -> None:
        """Cut these requests. Ignores unknown ids."""
        found = [tracked for name in request_ids if (tracked := self._requests.get(name))]
        for tracked in found:
            tracked.cut = True
        if found:
            task = asyncio.create_task(_abort_until_ended(found))
            self._aborting.add(task)
            task.add_done_callback(self._aborting.discard)

    async def close(self) -> None:
        for task in self._aborting:
            task.cancel()
        await asyncio.gather(*self._aborting, return_exceptions=True)


async def _abort_until_ended(cut: Sequence[InFlightRequest]) -> None:
    """Tell the servers to abort these requests, until all of them have ended. A server that is slow to answer does not
    delay the others."""
    telling: dict[Server, asyncio.Task[None]] = {}
    async with asyncio.TaskGroup() as aborts:
        while cut := [tracked for tracked in cut if not tracked.ended and tracked.failure is None]:
            by_server: dict[Server, list[InFlightRequest]] = {}
            for tracked in cut:
                if tracked.server is not None:
                    by_server.setdefault(tracked.server, []).append(tracked)
            for server, running in by_server.items():
                if server not in telling or telling[server].done():
                    telling[server] = aborts.create_task(_abort(server, running))
            await asyncio.sleep(AGAIN_S)


async def _abort(server: Server, running: Sequence[InFlightRequest]) -> None:
    try:
        await server.control.abort([tracked.request.id for tracked in running])
    except (ServerFault, PvgError) as fault:
        if isinstance(fault, RefusedRequest) and fault.final:
            failure = ConfigurationError(
                f"{server.url} cannot cut requests short: {fault.message}.", "Set rollout.deadline to 'cut'."
            )
            for tracked in running:
                tracked.failure = failure
        # For other faults, the fleet's health checks end the requests of a failed server. Until then the abort repeats.


# --- continuing ------------------------------------------------------------------------------------------------------


def joined(request: GenerationRequest, new: PartialCompletion | None) -> PartialCompletion | None:
    """The tokens of `request.resumed_from` and the `new` ones as one completion; None without any."""
    before = request.resumed_from
    if before is None or new is None:
        return new or before
    first = len(before.token_ids)
    spans = [VersionSpan(span.start + first, span.version) for span in new.spans]
    if spans[0].version == before.spans[-1].version:
        spans = spans[1:]
    return PartialCompletion(
        np.concatenate([before.token_ids, new.token_ids]),
        np.concatenate([before.logprobs, new.logprobs]),
        (*before.spans, *spans),
        request.timing(new.timing.queued_s, new.timing.service_s),
    )


def remainder(request: GenerationRequest) -> GenerationRequest:
    """`request` as a server sees it: a longer prompt, fewer tokens and a new seed. A server seeds its random generator
    for each request, and the old seed would repeat the random numbers of the first tokens. A continued completion
    therefore equals an uncut one in distribution, not token by token."""
    first = request.tokens_resumed
    if not first:
        return request
    sampling = replace(request.sampling, max_tokens=request.sampling.max_tokens - first)
    seed = int(np.random.SeedSequence((request.seed, first)).generate_state(1, np.uint64)[0])
    return replace(request, prompt_ids=request.known_ids, sampling=sampling, seed=seed, resumed_from=None)
