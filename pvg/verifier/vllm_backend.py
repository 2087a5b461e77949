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
from collections.abc import Sequence
from concurrent.futures import Executor
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pvg.config.experiment import Experiment
from pvg.models.heads import VerifierModel
from pvg.models.packing import batches, pad_batch
from pvg.records import Float32
from pvg.servers.command import Purpose
from pvg.servers.control import Connections
from pvg.servers.pool import connections_for, together
from pvg.servers.publishing import Publisher, PublishingSession, SyncTiming, WeightUpdate
from pvg.servers.served_model import ServedModel, ServerRequirements
from pvg.servers.transports.files import FilesystemTransport, VersionFolders
from pvg.telemetry.events import Events
from pvg.telemetry.spans import span
from pvg.verifier.backend import ScoreCache, ScoredBatch, ScoreInput, ScoreKey
from pvg.verifier.score_servers import CONCURRENCY, ScoreServers, ServedImplicit, ServerScores, in_thread, served_head

Claim = tuple[object, int]  # a scorer's backend, and the number of its weight changes

CANARY_INPUTS = 2  # the first solutions to score: real text, because random tokens would not be representative


@dataclass(frozen=True, slots=True)
class _Version:
    """The verifier's weights at one moment."""

    digest: str
    bias: float
    tensors: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class _Receiver:
    """The verifier's servers, for a publisher of the weights of `model`."""

    servers: ScoreServers
    model: VerifierModel
    requests_in_flight: int = 0  # a scorer publishes before it asks

    @property
    def version(self) -> int:
        return self.servers.served.version

    async def load_weights(self, update: WeightUpdate) -> SyncTiming:
        return await self.servers.publish(update, self.model)


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
        self._weights = experiment.weights
        self._events = events
        self._run = f"{run}-verifier"
        self._session = PublishingSession.begin()
        self._version = 0
        self._held: _Version | None = None
        self._holder: Claim | None = None
        urls = experiment.serving.verifier_servers
        references = experiment.serving.reference_servers if isinstance(self.head, ServedImplicit) else ()
        connections = connections_for(CONCURRENCY * (2 if references else 1))
        self.connections = Connections.open(experiment.serving, experiment.weights, connections)
        self.verifiers = self._servers("verifier", urls)
        self.references = self._servers("reference", references) if references else None

    def _servers(self, purpose: Purpose, urls: Sequence[str]) -> ScoreServers:
        needs = ServerRequirements(purpose, self.head.runner)
        served = ServedModel(needs, urls, self.connections, self._events, session=self._session)
        return ScoreServers(served, self.head, self.executor, self._weights.canary_tolerance)

    async def ready(self) -> None:
        """Check the servers before anything depends on them. Raises ServerUnavailableError if none answers,
        ConfigurationError or MissingRequirementError if one cannot serve this verifier."""
        for group in self._groups():
            await group.served.fleet.look()

    async def hold(self, model: VerifierModel, claim: Claim, inputs: Sequence[ScoreInput]) -> float:
        """Make all servers that are up hold the verifier's current weights; returns its bias. Requires `turn`. Equal
        claims mean equal weights; a new claim compares digests.

        Raises WeightsNotArrivedError, naming server and version; TrainingDivergedError if the weights give scores that
        are not finite; ServerUnavailableError if no server took them; and what the transport raises.
        """
        if self._held is None or self._holder != claim:
            version = await in_thread(self.executor, self._version_of, model)
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

    async def close(self) -> None:
        """Close servers, transport and connections. A second call does nothing."""
        async with AsyncExitStack() as rest:  # closes the rest even if one fails
            rest.push_async_callback(self.connections.close)
            for group in self._groups():
                rest.push_async_callback(group.served.close)

    def _groups(self) -> list[ScoreServers]:
        return [self.verifiers] if self.references is None else [self.verifiers, self.references]

    def _version_of(self, model: VerifierModel) -> _Version:
        """Runs in the executor, where no training happens meanwhile."""
        return _Version(model.version(), model.get_parameter("bias").item(), self.head.tensors(model))

    async def _open(self, model: VerifierModel, inputs: Sequence[ScoreInput]) -> None:
        """Open the servers, unless they are open."""
        if self.verifiers.served.transport is not None:
            return
        try:
            for group in self._groups():
                group.canary = tuple(inputs[:CANARY_INPUTS]) if self._weights.canary_prompts else ()
                await group.open(model.shape)
            if self.references is not None:
                await self.references.keep_start(model)
        except BaseException:
            for group in self._groups():
                await group.served.fleet.close()  # stop watching; the next call opens the servers again
            raise
        dtype = next(server.info.dtype for server in self.verifiers.served.fleet.servers if server.info is not None)
        folders = VersionFolders(Path(self._weights.root), self._run, self._session)
        self.verifiers.served.transport = FilesystemTransport(folders, self.executor, getattr(torch, dtype))

    async def _publish(self, model: VerifierModel, version: _Version) -> None:
        """Publish to all servers that are up; the fleet updates the others when they return."""
        self._held = None
        self._version += 1
        publisher = Publisher([_Receiver(self.verifiers, model)], events=self._events, of="verifier")
        (self.last_sync,) = await publisher.publish(version.tensors, self._version)


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
            with span("score_service"):
                found = await together([serving.verifiers.ask(inputs), self._references(inputs)])
            answers, (references_N, requests) = cast("tuple[ServerScores, tuple[Float32, int]]", tuple(found))
            scores_N = serving.head.scores(answers.values, references_N, bias)
        return ScoredBatch(scores_N, answers.requests + requests)

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
            found = await in_thread(self._serving.executor, self._references_here, missing)
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
                packed = pad_batch(
                    [inputs[row].ids for row in rows],
                    [inputs[row].prompt_length for row in rows],
                    model.tokenizer.pad_id,
                    model.device,
                    token_budget=budget,
                    max_length=model.max_length,
                )
                found[rows] = model.reference(*packed)[: len(rows)].cpu().numpy()
        return found
