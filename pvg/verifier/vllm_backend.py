"""`VllmBackend`: scores from vLLM servers, for `verifier.engine = "vllm"`.

    serving = VerifierServing(experiment, executor, events, run="modchain")      # one for all scorers of a run
    scorer = VerifierScorer(verifier, ..., backend=VllmBackend(serving, verifier, template.key, references))
    scores = await scorer.score(rollouts)
    await serving.close()

A verifier's weights are published when the first score of one of its versions is asked for, and their arrival is proven
on every server. Versions are told apart by their digest: a second scorer of the same weights publishes nothing.

Invariant 2: servers hold one verifier at a time, and whoever scores with it has them alone until the scores are in.
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
Claim = tuple[object, int]  # a scorer's backend, and how often its weights changed

CANARY_INPUTS = 2  # the first solutions that are scored: text like what is to come, as noise would not be
# How far a logit, or the log-prob of one token, may be from torch's. Both sides in float32 differ by about 1e-5.
TOLERANCE_FLOAT32 = 1e-2
TOLERANCE_REDUCED = 0.5  # bfloat16 keeps 8 bits


@dataclass(frozen=True, slots=True)
class _Version:
    """A verifier's weights at one moment."""

    digest: str
    bias: float
    tensors: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class _Published:
    """The newest version that was sent, and what servers have to say under it of the canary's inputs."""

    label: WeightLabel
    trace: str
    expected: list[Float32]


class VerifierServing:
    """The servers of `serving.verifier_servers` and `serving.reference_servers`, opened when they are first needed;
    `close` lets go of all of it. Belongs to one event loop. `run` names the folder of the published weights."""

    def __init__(self, experiment: Experiment, executor: Executor, events: Events, run: str) -> None:
        """Raises ConfigurationError for a head that no server computes."""
        self.turn = asyncio.Lock()  # held by whoever scores
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
        """(for scores, for control); with `weights.client = "shared"` they are the same."""
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
        """Ask the servers how they are, before anything depends on them. Raises ServerUnavailableError when none
        answers, ConfigurationError or MissingRequirementError for one that cannot serve this verifier."""
        for group in (self.verifiers, self.references):
            if group is not None:
                await group.look()

    # --- which version the servers have ------------------------------------------------------------------------------

    async def hold(self, model: VerifierModel, claim: Claim, inputs: Sequence[ScoreInput]) -> float:
        """Have all servers that live hold the verifier's present weights; returns its bias. Only with `turn`. Claims
        are equal where the weights are known to be the same; with a new one they are looked at.

        Raises WeightsNotArrivedError naming server and version, TrainingDivergedError for weights that give no number,
        ServerUnavailableError when no server took them, and what the transport raises.
        """
        if self._held is None or self._holder != claim:
            version = await _in_thread(self.executor, self._version_of, model)
            if self._held is None or self._held.digest != version.digest:
                with span("sync"):
                    await self._open(model, inputs)
                    await self._publish(model, version)
            # Without the tensors, which are the model's own: it could not be freed when its owner closes it.
            self._held, self._holder = replace(version, tensors={}), claim
        return self._held.bias

    def forget(self) -> None:
        """The next `hold` publishes, whatever the servers have: nobody knows what that is."""
        self._held = None

    def _version_of(self, model: VerifierModel) -> _Version:
        """In the executor, where nobody trains meanwhile."""
        return _Version(model.version(), model.get_parameter("bias").item(), self.head.tensors(model))

    async def _open(self, model: VerifierModel, inputs: Sequence[ScoreInput]) -> None:
        if self._transport is not None:
            return
        try:
            await self._open_groups(model, inputs)
        except BaseException:
            await self._close_groups()  # nobody shall watch servers that are opened again the next time
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
        """To all servers that live; those that are away get it when they are back."""
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
                await self.verifiers.until_one_is_up()  # the fleet catches it up
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
        """Stage, send and prove; what arrived is added to `deliveries`. Returns the largest gap, None where no server
        is there. Raises WeightsNotArrivedError when those that are there refuse."""
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
                "Look at the server's log, then continue with --resume.",
            )
        return None

    def _present(self) -> Transport:
        assert self._transport is not None
        return self._transport

    async def _catch_up(self, server: Server) -> None:
        """A verifier server is back: send it the newest version. Called by the fleet, which holds `updating`."""
        if self._transport is None or self._published is None:
            if server.state == "away":
                server.state = "stale"  # it answers; it gets its weights with everybody else
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
        """The largest gap of `servers`. Those that do not answer are lost; None when all are."""
        outcomes = await together([_or_fault(prove(server)) for server in servers])
        for server, outcome in zip(servers, outcomes, strict=True):
            if isinstance(outcome, ServerFault):
                group.fleet.lose(server, outcome)
        return max((outcome for outcome in outcomes if not isinstance(outcome, ServerFault)), default=None)

    async def _prove(self, server: Server) -> float:
        """That a server has what was published last: by its label, and by what it says of the canary's inputs. It may
        then be asked. Returns the largest gap."""
        published = self._published
        assert published is not None
        server.info = await server.control.info()
        version = published.label.version
        if server.info.label != str(published.label):
            raise WeightsNotArrivedError(
                f"{server.url} was sent version {version} of the verifier and says that it has "
                f"{server.info.label!r} instead of {str(published.label)!r}.",
                "Does another run publish to it? Give each its own serving.verifier_servers.",
            )
        gap = await self._gap(self.verifiers, server, server.info.label, published.expected, f"version {version}")
        self._events.event(
            "weights", event="canary", trace=published.trace, version=version, server=server.url, gap=gap, of="verifier"
        )
        self.verifiers.fleet.arrived(server, server.info.label)
        return gap

    async def _catch_up_reference(self, server: Server) -> None:
        """A reference server is back, perhaps as another model. Called by the fleet, which holds `updating`."""
        await self._prove_start(server)

    async def _prove_start(self, server: Server) -> float:
        """That a reference server has the verifier's untrained start. Returns the largest gap."""
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
        """The largest difference between what a server says of the canary's inputs and what it should say. Raises
        WeightsNotArrivedError when it is too large."""
        if not self._canary:
            return 0.0
        found: list[Float32] = []
        for entry in self._canary:
            found += await group.ask_one(server, [entry], label)
        gap = max(float(np.abs(a - b).max(initial=0.0)) for a, b in zip(expected, found, strict=True))
        assert server.info is not None
        exact = server.info.dtype.removeprefix("torch.") == "float32"
        tolerance = self._weights.canary_tolerance or (TOLERANCE_FLOAT32 if exact else TOLERANCE_REDUCED)
        if not gap <= tolerance:  # also where the server says NaN
            raise WeightsNotArrivedError(
                f"{server.url} does not have {what} of the verifier: what it says of fixed solutions differs from "
                f"torch by up to {gap:.3g} (tolerance {tolerance:g}).",
                "Restart it on the experiment's verifier; if it is the right one, see weights.canary_tolerance.",
            )
        return gap

    async def close(self) -> None:
        """Closing twice does nothing."""
        async with AsyncExitStack() as rest:  # each of it, also where something of it fails
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
    """Scores of `model`, which it borrows like `serving`, by servers that hold its weights; without reference servers
    the implicit head's references are computed here, in the executor."""

    def __init__(
        self, serving: VerifierServing, model: VerifierModel, template_key: str, references: ScoreCache
    ) -> None:
        self.references = references
        self._serving = serving
        self._model = model
        self._template_key = template_key
        self._generation = 0  # counts changes of the weights

    def batches(self, lengths: Sequence[int]) -> list[NDArray[np.int64]]:
        """All of them: servers batch by themselves."""
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
                if generation != self._generation:  # they changed while they were read
                    serving.forget()
            started = time.perf_counter()
            with span("score_service"):
                found = await together([serving.verifiers.ask(inputs), self._references(inputs)])
            answers, (references_N, requests) = cast("tuple[ServerScores, tuple[Float32, int]]", tuple(found))
            scores_N = serving.head.scores(answers.values, references_N, bias)
            seconds = time.perf_counter() - started
        return ScoredBatch(scores_N, answers.began, seconds, answers.requests + requests)

    async def _references(self, inputs: Sequence[ScoreInput]) -> tuple[Float32, int]:
        """The head's references float32 [N], those that are not known computed now, and how many requests that took."""
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
        """In the executor's thread. float32 [N]."""
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
    """As `run_in`; but who is cancelled still waits for the thread, which has a model that may then be closed."""
    running = submit_in(executor, work, *arguments)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        if not running.cancelled():
            running.exception()  # seen
        raise


async def _or_fault(proof: Awaitable[float]) -> float | ServerFault:
    try:
        return await proof
    except ServerFault as fault:
        return fault


def _check_finite(expected: Sequence[Float32], version: int) -> None:
    if not all(np.isfinite(values).all() for values in expected):
        raise TrainingDivergedError(
            f"Version {version} of the verifier gives scores that are no numbers.",
            "Its weights have diverged: lower verifier.learning_rate. What was committed before is intact.",
        )
