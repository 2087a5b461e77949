"""Scores from vLLM servers, for `verifier.engine = "vllm"`.

    serving = VerifierServing(experiment, executor, events, run="modchain")      # one for all scorers of a run
    scorer = VerifierScorer(verifier, ..., backend=VllmBackend(serving, verifier, template.key, references))
    scores = await scorer.score(rollouts)
    await serving.close()

The first request for a score of a new version publishes the verifier's weights and proves their arrival on every
server. A digest identifies a version, so a second scorer with the same weights publishes nothing.

Invariant 2: servers hold one verifier at a time, and a scorer has them exclusively until its scores have arrived.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pvg.config.experiment import Experiment
from pvg.errors import TrainingDivergedError, WeightsNotArrivedError
from pvg.models.heads import VerifierModel
from pvg.models.padding import batches, rectangle
from pvg.records import Float32
from pvg.servers.control import ControlClient, DeliveryTiming
from pvg.servers.fleet import Server
from pvg.servers.keys import control_key
from pvg.servers.labels import PublishingSession, WeightLabel
from pvg.servers.pool import ConnectionLimits, HttpPool, RefusedRequest, ServerFault
from pvg.servers.transports.files import FilesystemTransport
from pvg.servers.transports.transport import Transport
from pvg.servers.transports.versions import VersionFolders, torch_dtype
from pvg.servers.update import SyncTiming, WeightUpdate
from pvg.telemetry.events import Events
from pvg.telemetry.spans import span, submit_in
from pvg.verifier.backend import ScoredBatch, ScoreInput
from pvg.verifier.cache import ScoreCache, ScoreKey
from pvg.verifier.score_servers import CONCURRENCY, ScoreServers, ServerScores, together
from pvg.verifier.served_heads import ServedImplicit, served_head

T = TypeVar("T")
Claim = tuple[object, int]  # a scorer's backend, and the number of its weight changes

CANARY_INPUTS = 2  # the first solutions to score: real text, because random tokens would not be representative
# Allowed difference of a logit, or of one token's log-prob, from torch. With float32 on both sides it is about 1e-5.
TOLERANCE_FLOAT32 = 1e-2
TOLERANCE_REDUCED = 0.5  # bfloat16 has 8 bits of precision


@dataclass(frozen=True, slots=True)
class _Version:
    """The verifier's weights at one moment."""

    digest: str
    bias: float
    tensors: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class _Published:
    """The last published version, and its expected values for the canary inputs."""

    label: WeightLabel
    trace: str
    expected: list[Float32]


class VerifierServing:
    """The servers of `serving.verifier_servers` and `serving.reference_servers`, opened on first use; `close` releases
    everything. Use it from one event loop. `run`: names the folder of published weights."""

    def __init__(self, experiment: Experiment, executor: Executor, events: Events, run: str) -> None:
        """Raises ConfigurationError for a head that servers cannot compute."""
        self.turn = asyncio.Lock()  # held while a scorer uses the servers
        self.executor = executor
        self.token_budget = experiment.verifier.score_tokens
        self.head = served_head(experiment.verifier)
        self.last_sync: SyncTiming | None = None
        self._serving, self._weights = experiment.serving, experiment.weights
        self._events = events
        self._run = f"{run}-verifier"
        self._session = PublishingSession.begin()
        self._version = 0
        self._held: _Version | None = None
        self._holder: Claim | None = None
        self._published: _Published | None = None
        self._canary: tuple[ScoreInput, ...] = ()
        self._expected_of_start: list[Float32] = []
        self._transport: Transport | None = None
        urls = experiment.serving.verifier_servers
        references = experiment.serving.reference_servers if isinstance(self.head, ServedImplicit) else ()
        self._pools = self._open_pools(len(urls) + len(references), groups=2 if references else 1)
        self.verifiers = self._group(urls, "serving.verifier_servers")
        self.references = self._group(references, "serving.reference_servers") if references else None

    def _open_pools(self, hosts: int, groups: int) -> tuple[HttpPool, HttpPool]:
        """(pool for scores, pool for control); one pool for both with `weights.client = "shared"`."""
        key = control_key(Path(self._weights.root))
        limits = ConnectionLimits.derive(CONCURRENCY * groups, hosts=hosts)
        limits.assert_covers(CONCURRENCY * groups)
        timeout_s = self._serving.connect_timeout_s
        pool = HttpPool(limits, connect_timeout_s=timeout_s, key=key)
        if self._weights.client == "shared":
            return pool, pool
        return pool, HttpPool(ConnectionLimits.derive(1, hosts), connect_timeout_s=timeout_s, key=key, fresh=True)

    def _group(self, urls: Sequence[str], setting: str) -> ScoreServers:
        pool, control_pool = self._pools
        controls = [
            ControlClient(
                url,
                control_pool,
                timeout_s=self._weights.timeout_s,
                probe_timeout_s=self._serving.probe_timeout_s,
            )
            for url in urls
        ]
        catch_up = self._catch_up if setting == "serving.verifier_servers" else self._catch_up_reference
        return ScoreServers(self.head, controls, pool, self._serving, self._events, setting=setting, catch_up=catch_up)

    async def ready(self) -> None:
        """Check the servers before anything depends on them. Raises ServerUnavailableError if none answers,
        ConfigurationError or MissingRequirementError if one cannot serve this verifier."""
        for group in (self.verifiers, self.references):
            if group is not None:
                await group.look()

    # --- which version the servers have ------------------------------------------------------------------------------

    async def hold(self, model: VerifierModel, claim: Claim, inputs: Sequence[ScoreInput]) -> float:
        """Make all servers that are up hold the verifier's current weights; returns its bias. Requires `turn`. Equal
        claims mean equal weights; a new claim compares digests.

        Raises WeightsNotArrivedError, naming server and version; TrainingDivergedError if the weights give scores that
        are not finite; ServerUnavailableError if no server took them; and what the transport raises.
        """
        if self._held is None or self._holder != claim:
            version = await _in_thread(self.executor, self._version_of, model)
            if self._held is None or self._held.digest != version.digest:
                with span("sync"):
                    await self._open(model, inputs)
                    await self._publish(model, version)
            # Keeps no tensors: they are the model's own, and a reference would keep them in memory after it is closed.
            self._held, self._holder = replace(version, tensors={}), claim
        return self._held.bias

    def forget(self) -> None:
        """Make the next `hold` publish, because the servers' weights are unknown."""
        self._held = None

    def _version_of(self, model: VerifierModel) -> _Version:
        """Runs in the executor, where no training happens meanwhile."""
        return _Version(model.version(), model.get_parameter("bias").item(), self.head.tensors(model))

    async def _open(self, model: VerifierModel, inputs: Sequence[ScoreInput]) -> None:
        if self._transport is not None:
            return
        try:
            await self._open_groups(model, inputs)
        except BaseException:
            await self._close_groups()  # stop watching; the next call opens the servers again
            raise
        dtype = next(server.info.dtype for server in self.verifiers.fleet.servers if server.info is not None)
        folders = VersionFolders(Path(self._weights.root), self._run, self._session)
        self._transport = FilesystemTransport(folders, self.executor, torch_dtype(dtype), self._weights.keep)

    async def _open_groups(self, model: VerifierModel, inputs: Sequence[ScoreInput]) -> None:
        if self._weights.canary_prompts:
            self._canary = tuple(inputs[:CANARY_INPUTS])
        await self.verifiers.open(model.shape)
        if self.references is not None:
            assert isinstance(self.head, ServedImplicit)
            self._expected_of_start = await _in_thread(self.executor, self.head.expected_of_start, model, self._canary)
            await self.references.open(model.shape)
            async with self.references.fleet.updating:
                await self._proven(self.references, self.references.fleet.alive, self._prove_start)
            await self.references.until_one_is_up()

    async def _publish(self, model: VerifierModel, version: _Version) -> None:
        """Publish to all servers that are up; the fleet updates the others when they return."""
        self._held = None
        self._version += 1
        label, trace = WeightLabel(self._session, self._version), uuid.uuid4().hex[:16]
        fleet, started = self.verifiers.fleet, time.perf_counter()
        place = {"trace": trace, "version": self._version, "engines": len(fleet.servers), "of": "verifier"}
        deliveries: list[DeliveryTiming] = []
        self._events.event("weights", event="client.send", **place)
        try:
            async with fleet.updating:
                gap = await self._deliver(model, version, label, trace, deliveries)
            if gap is None:
                await self.verifiers.until_one_is_up()  # the fleet sends it the weights
        finally:
            all_ms = (time.perf_counter() - started) * 1e3
            slowest = max(deliveries, key=lambda delivery: delivery.wall_ms, default=None)
            wall_ms, rpc_ms = (slowest.wall_ms, slowest.rpc_ms) if slowest else (all_ms, 0.0)
            times = {"wall_ms": wall_ms, "rpc_ms": rpc_ms, "queue_ms": wall_ms - rpc_ms, "all_ms": all_ms}
            failed = len(fleet.servers) - len(deliveries)
            self._events.event("weights", event="client.done", **place, failed=failed, **times)
        await self._present().retire(self.verifiers.controls, [label])
        parts = dict(slowest.parts) if slowest else {}
        self.last_sync = SyncTiming(self._version, wall_ms, rpc_ms, parts, gap if self._canary else None)

    async def _deliver(
        self, model: VerifierModel, version: _Version, label: WeightLabel, trace: str, deliveries: list[DeliveryTiming]
    ) -> float | None:
        """Stage, send and prove; adds successful deliveries to `deliveries`. Returns the largest gap, None if no server
        is up. Raises WeightsNotArrivedError if all servers refuse."""
        transport, fleet = self._present(), self.verifiers.fleet
        await transport.stage(WeightUpdate(label.version, version.tensors, trace), label)
        expected = await _in_thread(self.executor, self.head.expected, model, self._canary)
        _check_finite(expected, label.version)
        self._published = _Published(label, trace, expected)
        servers, arrived = fleet.alive, []
        outcomes = await fleet.deliver(servers, transport, label, trace)
        for server, outcome in zip(servers, outcomes, strict=True):
            if isinstance(outcome, DeliveryTiming):
                arrived.append(server)
                deliveries.append(outcome)
            else:
                fleet.lose(server, outcome)
        if arrived:
            return await self._proven(self.verifiers, arrived, self._prove)
        if any(isinstance(outcome, RefusedRequest) for outcome in outcomes):
            raise WeightsNotArrivedError(
                f"No server took version {label.version} of the verifier: {'; '.join(map(str, outcomes))}.",
                "Read the servers' logs, then continue with --resume.",
            )
        return None

    def _present(self) -> Transport:
        assert self._transport is not None
        return self._transport

    async def _catch_up(self, server: Server) -> None:
        """Send the newest version to a verifier server that has returned. The fleet calls this and holds `updating`."""
        if self._transport is None or self._published is None:
            if server.state == "away":
                server.state = "stale"  # it answers, and gets its weights with the next publication
            return
        published = self._published
        fleet = self.verifiers.fleet
        (outcome,) = await fleet.deliver([server], self._transport, published.label, published.trace)
        if not isinstance(outcome, DeliveryTiming):
            raise outcome
        await self._prove(server)

    # --- proof of arrival --------------------------------------------------------------------------------------------

    async def _proven(
        self, group: ScoreServers, servers: Sequence[Server], prove: Callable[[Server], Awaitable[float]]
    ) -> float | None:
        """The largest gap of `servers`; None if none answers. Marks servers that do not answer as lost."""
        outcomes = await together([_or_fault(prove(server)) for server in servers])
        for server, outcome in zip(servers, outcomes, strict=True):
            if isinstance(outcome, ServerFault):
                group.fleet.lose(server, outcome)
        return max((outcome for outcome in outcomes if not isinstance(outcome, ServerFault)), default=None)

    async def _prove(self, server: Server) -> float:
        """Prove that a server has the last published version, by its label and by its values for the canary inputs.
        Then allow requests to it. Returns the largest gap."""
        published = self._published
        assert published is not None
        server.info = await server.control.info()
        version = published.label.version
        if server.info.label != str(published.label):
            raise WeightsNotArrivedError(
                f"{server.url} was sent version {version} of the verifier, but reports {server.info.label!r} "
                f"instead of {str(published.label)!r}.",
                "If another run publishes to it, give each run its own serving.verifier_servers.",
            )
        gap = await self._gap(self.verifiers, server, server.info.label, published.expected, f"version {version}")
        self._events.event(
            "weights", event="canary", trace=published.trace, version=version, server=server.url, gap=gap, of="verifier"
        )
        self.verifiers.fleet.arrived(server, server.info.label)
        return gap

    async def _catch_up_reference(self, server: Server) -> None:
        """Check a reference server that has returned, maybe with another model. The fleet holds `updating`."""
        await self._prove_start(server)

    async def _prove_start(self, server: Server) -> float:
        """Prove that a reference server has the verifier's untrained start. Returns the largest gap."""
        assert self.references is not None
        server.info = await server.control.info()
        gap = await self._gap(
            self.references, server, server.info.label, self._expected_of_start, "the untrained start"
        )
        self._events.event("weights", event="canary", server=server.url, gap=gap, of="reference")
        self.references.fleet.arrived(server, server.info.label)
        return gap

    async def _gap(
        self, group: ScoreServers, server: Server, label: str, expected: Sequence[Float32], what: str
    ) -> float:
        """The largest difference between a server's values for the canary inputs and the expected ones. Raises
        WeightsNotArrivedError if it exceeds the tolerance."""
        if not self._canary:
            return 0.0
        found: list[Float32] = []
        for entry in self._canary:
            found += await group.ask_one(server, [entry], label)
        gap = max(float(np.abs(a - b).max(initial=0.0)) for a, b in zip(expected, found, strict=True))
        assert server.info is not None
        exact = server.info.dtype.removeprefix("torch.") == "float32"
        tolerance = self._weights.canary_tolerance or (TOLERANCE_FLOAT32 if exact else TOLERANCE_REDUCED)
        if not gap <= tolerance:  # also true for NaN
            raise WeightsNotArrivedError(
                f"{server.url} does not have {what} of the verifier: its values for fixed solutions differ from "
                f"torch's by up to {gap:.3g} (tolerance {tolerance:g}).",
                "Restart it with the experiment's verifier. If it already has it, raise weights.canary_tolerance.",
            )
        return gap

    async def close(self) -> None:
        """Close pools, transport and groups. A second call does nothing."""
        async with AsyncExitStack() as rest:  # closes the rest even if one fails
            for pool in self._pools:
                rest.push_async_callback(pool.close)
            if self._transport is not None:
                rest.push_async_callback(self._transport.close)
            await self._close_groups()

    async def _close_groups(self) -> None:
        for group in (self.verifiers, self.references):
            if group is not None:
                await group.fleet.close()


class VllmBackend:
    """Scores of `model` by servers with its weights. The caller owns `model` and `serving`. Without reference servers,
    the executor of this process computes the implicit head's references."""

    def __init__(
        self, serving: VerifierServing, model: VerifierModel, template_key: str, references: ScoreCache
    ) -> None:
        self.references = references
        self._serving = serving
        self._model = model
        self._template_key = template_key
        self._generation = 0  # counts weight changes

    def batches(self, lengths: Sequence[int]) -> list[NDArray[np.int64]]:
        """One batch with all rows: servers form their own batches."""
        return [np.arange(len(lengths), dtype=np.int64)]

    def weights_changed(self) -> None:
        self._generation += 1

    def submit(self, inputs: Sequence[ScoreInput]) -> asyncio.Future[ScoredBatch]:
        return asyncio.ensure_future(self._compute(inputs))

    async def _compute(self, inputs: Sequence[ScoreInput]) -> ScoredBatch:
        serving = self._serving
        async with serving.turn:
            generation = self._generation
            try:
                bias = await serving.hold(self._model, (self, generation), inputs)
            finally:
                if generation != self._generation:  # the weights changed while they were read
                    serving.forget()
            started = time.perf_counter()
            with span("score_service"):
                found = await together([serving.verifiers.ask(inputs), self._references(inputs)])
            answers, (references_N, requests) = cast("tuple[ServerScores, tuple[Float32, int]]", tuple(found))
            scores_N = serving.head.scores(answers.values, references_N, bias)
            seconds = time.perf_counter() - started
        return ScoredBatch(scores_N, answers.began, seconds, answers.requests + requests)

    async def _references(self, inputs: Sequence[ScoreInput]) -> tuple[Float32, int]:
        """The head's references float32 [N] and the number of requests; computes only unknown references."""
        if not self._model.needs_reference:
            return np.zeros(len(inputs), dtype=np.float32), 0
        keys = [ScoreKey("", self._template_key, entry.digest) for entry in inputs]
        known = [self.references.get(key) for key in keys]
        unknown = [row for row, value in enumerate(known) if value is None]
        missing, requests = [inputs[row] for row in unknown], 0
        servers = self._serving.references
        if not missing:
            found = np.empty(0, dtype=np.float32)
        elif servers is None:
            found = await _in_thread(self._serving.executor, self._references_here, missing)
        else:
            assert isinstance(self._serving.head, ServedImplicit)
            answers = await servers.ask(missing)
            found, requests = self._serving.head.sums(answers.values), answers.requests
        for row, value in zip(unknown, found.tolist(), strict=True):
            known[row] = value
            if np.isfinite(value):
                self.references.put(keys[row], value)
        return np.array(known, dtype=np.float32), requests

    def _references_here(self, inputs: Sequence[ScoreInput]) -> Float32:
        """References float32 [N], in the executor's thread."""
        model, budget = self._model, self._serving.token_budget
        found: Float32 = np.empty(len(inputs), dtype=np.float32)
        with torch.inference_mode(), span("reference", device=True):
            for rows in batches([len(entry.ids) for entry in inputs], budget, model.max_length):
                packed = rectangle(
                    [inputs[row].ids for row in rows],
                    [inputs[row].prompt_length for row in rows],
                    model.tokenizer.pad_id,
                    model.device,
                    token_budget=budget,
                    max_length=model.max_length,
                )
                found[rows] = model.reference(*packed)[: len(rows)].cpu().numpy()
        return found


async def _in_thread(executor: Executor, work: Callable[..., T], *arguments: Any) -> T:
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


async def _or_fault(proof: Awaitable[float]) -> float | ServerFault:
    try:
        return await proof
    except ServerFault as fault:
        return fault


def _check_finite(expected: Sequence[Float32], version: int) -> None:
    if not all(np.isfinite(values).all() for values in expected):
        raise TrainingDivergedError(
            f"The scores of version {version} of the verifier are not finite.",
            "Its weights have diverged: lower verifier.learning_rate. All commits are intact.",
        )
