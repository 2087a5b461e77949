"""`VllmEngine`: an `Engine` over one or several vLLM servers.

    engine = open_vllm_engine(experiment, base, executor, events, run, prompts)
    await engine.ready()                    # are the servers up, and do they fit the experiment?
    await engine.load_weights(update)       # to all of them, with proof of arrival
    completion = await engine.generate(request)

Invariants:
- Every call of `generate` ends with one completion or the error that prevented it. A request is retried only after a
  server fault, and nothing of a failed attempt is delivered. So it is delivered at most once.
- Every token carries the version that sampled it, as the server reports it. A completion from weights that this engine
  did not publish, or from older ones than the server had, is discarded and requested again.
- A server's prefix cache entry serves only the version that computed it, because each version has its own salt.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from pvg.config.experiment import Experiment
from pvg.config.rollout import ServerSampling
from pvg.errors import ConfigurationError, RolloutFailedError, StateError, TrainingDivergedError, WeightsNotArrivedError
from pvg.records import Float32, Int32, Timing, VersionSpan
from pvg.rollout.engine import (
    Completion,
    CutShort,
    Engine,
    EngineStats,
    GenerationRequest,
    PartialCompletion,
    check_request,
)
from pvg.rollout.vllm_requests import (
    GENERATE,
    UNSAMPLABLE,
    InFlightRequest,
    InFlightRequests,
    RequestCounter,
    ServedCompletion,
    generation,
    joined,
    prompt_scoring,
    read_generated,
    read_prompt_logprobs,
    remainder,
)
from pvg.servers.control import Connections
from pvg.servers.fleet import Server, StaleWeights
from pvg.servers.pool import MalformedReply, together
from pvg.servers.publishing import PublishingSession, SyncTiming, WeightLabel, WeightUpdate, salt
from pvg.servers.served_model import UNPUBLISHED, Prove, RequestFailed, ServedModel, ServerRequirements, was_sent
from pvg.servers.transports.opening import open_transport
from pvg.telemetry.events import Events
from pvg.telemetry.spans import run_in, span

if TYPE_CHECKING:
    from torch import Tensor

    from pvg.models.language_model import LanguageModel, StreamedModel

T = TypeVar("T")

# `Canary`: a proof that a server has the published weights.


# Measured with vLLM on a CPU: 1e-5 nats in float32; 0.3 in bfloat16 (SmolLM2-135M) for improbable tokens, because
# bfloat16 keeps 8 bits of logits that reach 30.
TOLERANCE = {"float32": 0.02, "bfloat16": 1.0}
NEARER = 4.0  # a server counts as stale if it is this many times nearer to an old version
NOISE = 1e-4  # mean difference in nats below which the second rule does not apply
NEW_TOKENS = 16  # greedy tokens after each prompt
EARLIER = 16  # number of remembered versions


@dataclass(frozen=True, slots=True)
class ExpectedLogprobs:
    """The trainer's log-probs of the sequences, float32 [L - 1] each in nats, and those of `earlier` versions, oldest
    first. `moved`: the largest change since the previous version."""

    version: int
    logprobs: tuple[Float32, ...]
    earlier: tuple[tuple[int, tuple[Float32, ...]], ...]
    moved: float


class Canary:
    """Trainer and server compute log-probs of the same fixed sequences. Weights that did not arrive, or only in part,
    differ by more than the rounding. Two rules: the largest gap is at most `tolerance`; and the server is not nearer to
    an earlier version than to the new one, because a small step moves log-probs by less than bfloat16 needs.

    `sequences` int32 [L] each. `reference` computes the trainer's log-probs from tensors, in `executor`.
    """

    def __init__(
        self,
        sequences: Callable[[], Sequence[Int32]],
        reference: Callable[[Mapping[str, Tensor], Sequence[Int32]], list[Float32]],
        executor: Executor,
        tolerance: float,
    ) -> None:
        self._make = sequences
        self._reference = reference
        self._executor = executor
        self.tolerance = tolerance
        self.sequences: tuple[Int32, ...] = ()
        self._earlier: list[tuple[int, tuple[Float32, ...]]] = []

    async def expect(self, tensors: Mapping[str, Tensor], version: int) -> ExpectedLogprobs:
        """The log-probs that servers must have under `tensors`. Raises TrainingDivergedError if they are not finite."""
        if not self.sequences:
            self.sequences = tuple(await run_in(self._executor, self._make))
        found = tuple(await run_in(self._executor, self._reference, tensors, self.sequences))
        if not all(np.isfinite(logprobs).all() for logprobs in found):
            raise TrainingDivergedError(
                f"Version {version} of the weights gives log-probs that are not finite.",
                "Resume from the last commit with a lower learning rate.",
            )
        earlier = tuple(self._earlier)
        self._earlier = _thinned([*self._earlier, (version, found)])
        return ExpectedLogprobs(version, found, earlier, _largest(found, earlier[-1][1]) if earlier else 0.0)

    def check(self, server: str, expected: ExpectedLogprobs, found: Sequence[Float32]) -> float:
        """Returns the largest gap in nats. Raises WeightsNotArrivedError with the server and the version."""
        gap = _largest(expected.logprobs, found)
        if not gap <= self.tolerance:  # also true for NaN
            raise WeightsNotArrivedError(
                f"{server} does not have version {expected.version} of the weights: its log-probs differ from the "
                f"trainer's by up to {gap:.3g} nats (tolerance {self.tolerance:g}).",
                "Restart the server with the experiment's model. If the model is right, see weights.canary_tolerance.",
            )
        distance = _mean(expected.logprobs, found)
        for version, logprobs in expected.earlier:
            if distance > NOISE and NEARER * _mean(logprobs, found) < distance:
                raise WeightsNotArrivedError(
                    f"{server} has version {version} of the weights, or one near it, instead of {expected.version}: "
                    f"its log-probs are {distance:.2g} nats from the new ones, {_mean(logprobs, found):.2g} from it.",
                    "Restart the server, then continue with --resume.",
                )
        return gap


def _thinned(versions: list[tuple[int, tuple[Float32, ...]]]) -> list[tuple[int, tuple[Float32, ...]]]:
    """At most EARLIER versions: the first, the newest half, and every second one in between."""
    if len(versions) <= EARLIER:
        return versions
    half = EARLIER // 2
    return [versions[0], *versions[1:-half][1::2], *versions[-half:]]


def greedy_sequences(model: LanguageModel, prompts: Sequence[Int32]) -> list[Int32]:
    """Each prompt with up to NEW_TOKENS greedy tokens of the model, as far as its context allows."""
    import torch

    found = []
    with torch.inference_mode():
        for prompt in prompts:
            ids, cache = prompt.tolist(), None
            for _ in range(min(NEW_TOKENS, model.max_length - len(prompt) - 1)):
                fresh = ids if cache is None else ids[-1:]
                output = model.module(
                    input_ids=torch.tensor([fresh], device=model.device), past_key_values=cache, use_cache=True
                )
                cache = output.past_key_values
                ids.append(int(output.logits[0, -1].argmax()))
            found.append(np.asarray(ids, dtype=np.int32))
    return found


def reference_logprobs(
    model: StreamedModel, dtype: str, tensors: Mapping[str, Tensor], sequences: Sequence[Int32]
) -> list[Float32]:
    """Log-probs of ids[1:] of each sequence under `tensors`, float32 [L - 1] each.

    Tensors are first rounded to the servers' `dtype`, so remaining differences come only from the computation.
    """
    import torch

    from pvg.models.logprobs import completion_logprobs
    from pvg.models.packing import pad_right

    served = getattr(torch, dtype)
    ids_BL, lengths_B = pad_right(sequences, 0, model.device)
    with torch.inference_mode(), model.given(tensors, lambda t: t.to(served).to(model.device, model.dtype)) as module:
        logprobs_BL = completion_logprobs(module, ids_BL, lengths_B, torch.ones_like(lengths_B)).cpu().numpy()
    return [row_L[1 : len(sequence)] for row_L, sequence in zip(logprobs_BL, sequences, strict=True)]


def _largest(a: Sequence[Float32], b: Sequence[Float32]) -> float:
    return max(float(np.abs(x - y).max()) for x, y in zip(a, b, strict=True))


def _mean(a: Sequence[Float32], b: Sequence[Float32]) -> float:
    return float(np.concatenate([np.abs(x - y) for x, y in zip(a, b, strict=True)]).mean())


LONG_REPLY = 1 << 18  # bytes of routed experts that take some milliseconds to parse


def open_vllm_engine(
    experiment: Experiment,
    base: LanguageModel,
    executor: Executor,
    events: Events,
    run: str,
    prompts: Callable[[], list[Int32]],
) -> VllmEngine:
    """Sends no request yet. Servers that pvg starts on a cluster are added later (`engine.served.add`)."""
    from pvg.models.language_model import StreamedModel

    serving, weights, rollout = experiment.serving, experiment.weights, experiment.rollout
    assert isinstance(rollout.engine, ServerSampling)
    dtype = experiment.sampling_dtype
    hosts = len(serving.servers) if (cluster := experiment.server_cluster) is None else cluster.workers or 1
    requests = rollout.concurrency + hosts * weights.canary_prompts  # of rollouts, and of each server's canary
    connections = Connections.open(serving, weights, requests, "rollout.concurrency")
    session = PublishingSession.begin()
    canary = None
    if weights.canary_prompts:
        canary = Canary(
            lambda: greedy_sequences(base, prompts()),
            partial(reference_logprobs, StreamedModel(base, base.device), dtype),
            executor,
            weights.canary_tolerance or TOLERANCE[dtype],
        )
    served = ServedModel(
        ServerRequirements(
            purpose="prover",
            runner="generate",
            shape=base.shape,
            max_length=experiment.completion_room() + 1 + experiment.reference_served,
            processed_logprobs=rollout.temperature != 1.0,
            lora_rank=experiment.training.adapters.rank if weights.transport.kind == "lora" else 0,
            on_cluster=experiment.server_cluster is not None,
        ),
        () if experiment.server_cluster else serving.servers,
        connections,
        events,
        session=session,
        transport=open_transport(weights, run, executor, dtype, session, base.device),
    )
    shared = None
    if experiment.servers_rest and base.device.type == "cuda":
        import torch

        shared = SharedGpu(str(torch.cuda.get_device_properties(base.device).uuid), executor, torch.cuda.empty_cache)
    return VllmEngine(
        served,
        canary=canary,
        routed_experts=experiment.training.router_replay,
        deadline_s=rollout.engine.timeout_s,
        shared=shared,
        gives_reference=experiment.reference_served,
    )


@dataclass(frozen=True, slots=True)
class SharedGpu:
    """The trainer's GPU, on which servers may be as well. `free` returns memory that the trainer does not use; it runs
    in `executor`."""

    uuid: str
    executor: Executor
    free: Callable[[], None]


class VllmEngine(Engine):
    """Owns `served` and its connections. `routed_experts`: whether completions need the experts of their tokens.
    `deadline_s`: limit for one request including its retries; None: no limit. `shared`: the GPU whose servers `rest`.
    `gives_reference`: the servers hold the base model. They compute the reference's log-probs unless all are on that
    GPU. All methods belong to one event loop."""

    def __init__(
        self,
        served: ServedModel,
        *,
        canary: Canary | None,
        routed_experts: bool = False,
        deadline_s: float | None = None,
        shared: SharedGpu | None = None,
        gives_reference: bool = False,
    ) -> None:
        self.served = served
        self._gives_reference = gives_reference
        self._shared = shared
        self._section = served.connections.serving
        self._pool = served.connections.requests
        self._canary = canary
        self._routed_experts = routed_experts
        self._deadline_s = deadline_s
        self._update: asyncio.Task[SyncTiming] | None = None  # the newest
        self._in_flight = InFlightRequests()
        self._counter = RequestCounter(self._pool.connections)
        self._closed = False
        self._reading = ThreadPoolExecutor(1, "pvg-read")  # its thread starts at the first long reply

    @property
    def version(self) -> int:
        return self.served.version

    @property
    def requests_in_flight(self) -> int:
        return self._counter.in_flight

    @property
    def max_in_flight(self) -> int:
        return self._counter.capacity

    @property
    def stats(self) -> EngineStats:
        return self._counter.stats

    @property
    def gives_reference(self) -> bool:
        # On the trainer's GPU this saves nothing: a server reads each prompt again for each of its solutions.
        infos = [server.info for server in self.served.fleet.alive]
        beside = self._shared is not None and all(info is not None and info.gpus == self._shared.uuid for info in infos)
        return self._gives_reference and not (infos and beside)

    async def ready(self, longest: int = 0) -> None:
        """Check the servers. Raises ServerUnavailableError if none answers, ConfigurationError or
        MissingRequirementError if one cannot serve this experiment."""
        needs = self.served.needs
        most = max(needs.max_length, longest + self._gives_reference)  # vLLM wants room for a token after a reference
        self.served.needs = replace(needs, max_length=most)
        await self.served.fleet.open()

    async def close(self) -> None:
        """Stop the fleet, cancel a running update, and close connections and the transport. A second call does
        nothing."""
        if self._closed:
            return
        self._closed = True
        async with AsyncExitStack() as rest:  # runs every step even if one fails
            rest.callback(self._reading.shutdown, wait=False)
            rest.push_async_callback(self.served.connections.close)
            rest.push_async_callback(self._in_flight.close)
            rest.push_async_callback(self.served.close)
            if self._update is not None:
                self._update.cancel()
                await asyncio.gather(self._update, return_exceptions=True)  # its caller received the error

    # --- weights -----------------------------------------------------------------------------------------------------

    async def load_weights(self, update: WeightUpdate) -> SyncTiming:
        """Send new weights to all live servers and prove that they arrived: see ServedModel.publish. The update
        completes even if the caller is cancelled, unless the engine is closed."""
        if self._closed:
            raise StateError("The engine is closed.", "Open a new one to continue sampling.")
        await self._wake()
        expect = None if self._canary is None else partial(self._expect, self._canary)
        updating = self._update = asyncio.create_task(self.served.publish(update, expect))
        try:
            return await asyncio.shield(updating)
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if updating.cancelled() and caller is not None and not caller.cancelling():
                raise StateError("The engine was closed during an update of the weights.") from None
            raise

    async def rest(self, *, replaced: bool = False) -> None:
        if self._shared is None or self.requests_in_flight or self.version == UNPUBLISHED:
            return
        level = 2 if replaced and not self.served.adapters else 1  # adapters need the base again
        with span("sleep"):
            async with self.served.fleet.updating:
                if not self.requests_in_flight:
                    await self.served.fleet.sleep(self._shared.uuid, level)

    async def _wake(self) -> None:
        """End `rest`, or the one of a process that has ended. Many requests may wait for this."""
        fleet = self.served.fleet
        if fleet.resting or any(server.asleep for server in fleet.alive):
            with span("wake"):
                async with fleet.updating:
                    if self._shared is not None and fleet.resting:
                        await run_in(self._shared.executor, self._shared.free)
                    await fleet.wake()

    async def _expect(self, canary: Canary, update: WeightUpdate, label: WeightLabel) -> Prove:
        expected = await canary.expect(update.tensors, update.version)
        return partial(self._prove, canary, expected, str(label))

    async def _prove(self, canary: Canary, expected: ExpectedLogprobs, label: str, server: Server) -> dict[str, float]:
        found = await together([self._prompt_logprobs(server, ids, label) for ids in canary.sequences])
        return {"gap": canary.check(server.url, expected, found), "moved": expected.moved}

    async def _prompt_logprobs(self, server: Server, ids: Int32, label: str) -> Float32:
        url, body = server.url + GENERATE, prompt_scoring(ids, salt=salt(label), model=self.served.model_name(label))
        reply = await self._pool.request("POST", url, body, timeout_s=self._section.unavailable_s)
        return read_prompt_logprobs(reply.json(), ids, url)[0]

    # --- generation --------------------------------------------------------------------------------------------------

    async def generate(self, request: GenerationRequest) -> Completion:
        """Sample one completion on one of the servers. Cancelling the caller ends the request on its server too.

        Raises ConfigurationError for a request that no server can serve, RolloutFailedError after the deadline or the
        last retry, ServerUnavailableError when no server is up for `serving.unavailable_s`.
        """
        if self._closed:
            raise StateError("The engine is closed.", "Open a new one to continue sampling.")
        if self.version == UNPUBLISHED:
            raise StateError("The servers have no weights of this run yet.", "Publish a version before sampling.")
        check_request(request)
        async with self._admitted(request):
            with self._in_flight.track(request) as tracked:
                return await self._asked(request, partial(self._attempt, tracked, time.perf_counter()))

    async def with_reference(self, request: GenerationRequest, found: Completion) -> Completion:
        async with self._admitted(request):
            reference = await self._asked(request, partial(self._base_logprobs, request, found))
        return replace(found, reference_logprobs=reference)

    @asynccontextmanager
    async def _admitted(self, request: GenerationRequest) -> AsyncIterator[None]:
        """Count a request while it is in flight, on servers that are awake. Raises RolloutFailedError after the
        deadline."""
        try:
            with self._counter.counted():
                await self._wake()
                async with asyncio.timeout(self._deadline_s):
                    yield
        except TimeoutError:
            raise RolloutFailedError(
                f"Rollout {request.id} was not finished within rollout.engine.timeout_s = {self._deadline_s:g}.",
                "Raise rollout.engine.timeout_s, lower rollout.max_tokens, or add servers.",
            ) from None

    def cut(self, request_ids: Collection[str]) -> None:
        """End these requests on their servers, which return the tokens so far."""
        self._in_flight.cut(request_ids)

    async def _asked(self, request: GenerationRequest, send: Callable[[Server, str], Coroutine[Any, Any, T]]) -> T:
        """The result of `send`, after a server fault on another server."""
        try:
            return await self.served.request(
                send, what=f"request {request.id}", jitter=request.seed % 1024 / 1024, tag="gen", request=request.id
            )
        except RequestFailed as failed:
            raise RolloutFailedError(
                f"Rollout {request.id} failed {failed.attempts} times. The last error: {failed.fault}.",
                "Look at that server's log.",
            ) from None

    async def _attempt(self, tracked: InFlightRequest, called: float, server: Server, label: str) -> Completion:
        """One attempt. Raises CutShort if the request was cut in time."""
        request, sent, version = tracked.request, time.perf_counter(), self.version
        if tracked.cut:
            raise CutShort(request.resumed_from)
        tracked.server = server
        try:
            generated = await self._exchange(server, tracked, label)
        finally:
            tracked.server = None
        if tracked.failure is not None:
            raise tracked.failure
        spans = self._spans(server, generated, label, version)
        if self._routed_experts and generated.routed_experts is None:
            raise ConfigurationError(
                f"{server.url} does not report the experts of its tokens, which training.router_replay requires.",
                "Start it with `pvg serve` and this experiment's settings. Its model must be a mixture of experts.",
            )
        self._counter.add_tokens(generated)
        timing = Timing(queued_s=sent - called, service_s=time.perf_counter() - sent)
        sampled = (
            PartialCompletion(generated.token_ids, generated.logprobs, spans, timing)
            if len(generated.token_ids)
            else None
        )
        whole = joined(request, sampled)
        reason = generated.finish_reason
        if reason == "abort" and whole is not None:  # the abort may come after the last token
            last, sampling = int(whole.token_ids[-1]), request.sampling
            full = len(whole.token_ids) == sampling.max_tokens
            reason = "stop" if last in sampling.stop_ids else "length" if full else "abort"
        if reason == "abort" or whole is None:
            raise CutShort(whole)
        return Completion(
            request_id=request.id,
            token_ids=whole.token_ids,
            logprobs=whole.logprobs,
            spans=whole.spans,
            finish_reason=reason,
            timing=whole.timing,
            routed_experts=generated.routed_experts if self._routed_experts else None,
        )

    async def _base_logprobs(self, request: GenerationRequest, found: Completion, server: Server, _: str) -> Float32:
        """Log-probs of the completion under the model that the server was started with, float32 [C]."""
        url, ids = server.url + GENERATE, np.concatenate([request.prompt_ids, found.token_ids])
        body = prompt_scoring(ids, salt="reference", model=None)
        reply = await self._pool.request("POST", url, body, timeout_s=None)  # the deadline covers all attempts
        logprobs, label = read_prompt_logprobs(reply.json(), ids, url)
        if was_sent(label):
            raise StaleWeights(server.url, f"has no base model, but weights {label!r} of a trainer")
        if not (logprobs >= UNSAMPLABLE).all():  # also for NaN
            raise MalformedReply(url, f"a reference with log-prob {logprobs.min():g}")
        return logprobs[len(request.prompt_ids) - 1 :]

    async def _exchange(self, server: Server, tracked: InFlightRequest, label: str) -> ServedCompletion:
        request = remainder(tracked.request)
        url, streamed = server.url + GENERATE, request.on_tokens is not None
        # During an update it is unknown which weights will compute this prompt, so other requests must not reuse it.
        own = label if server.settled else f"{label}/{request.id}"
        model = self.served.model_name(label)
        body = generation(request, salt=salt(own), model=model, stream=streamed)
        if request.on_tokens is None:
            reply = await self._pool.request("POST", url, body, timeout_s=None)  # the deadline covers all attempts
            cut = tracked.cut
            return await self._read(len(reply.body), lambda: read_generated(reply.json(), url, cut=cut))
        event: Any = None
        async with self._pool.events(url, body, timeout_s=None) as events:
            async for event in events:  # the number of tokens so far; at the end the reply
                if isinstance(event, int):
                    request.on_tokens(event)
        size = LONG_REPLY if self._routed_experts else 0
        found = await self._read(size, partial(read_generated, event, url, cut=tracked.cut))
        request.on_tokens(len(found.token_ids))
        return found

    async def _read(self, size: int, read: Callable[[], ServedCompletion]) -> ServedCompletion:
        """Parse short replies directly and long ones in a thread, because they would block the event loop."""
        return read() if size < LONG_REPLY else await run_in(self._reading, read)

    def _spans(self, server: Server, generated: ServedCompletion, label: str, version: int) -> tuple[VersionSpan, ...]:
        """The version of each token. Raises StaleWeights if a token's weights are not the ones the server should
        have."""
        least = WeightLabel.parse(label)
        if self.served.adapters:
            for _, text in generated.labels:
                if was_sent(text):
                    raise StaleWeights(server.url, f"sampled from weights {text!r}, which another trainer sent")
            return (VersionSpan(0, least.version if least else version),)
        spans = []
        for start, text in generated.labels:
            found = WeightLabel.parse(text)
            if found is None or found.session != self.served.session or (least and found.version < least.version):
                raise StaleWeights(server.url, f"its tokens come from weights {text!r}, not from {label!r}")
            spans.append(VersionSpan(start, found.version))
        return tuple(spans)
