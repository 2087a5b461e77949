"""Scores from vLLM servers, for `verifier.engine = "vllm"`.

The first request for a score of a new version publishes the verifier's weights and proves their arrival on every
server. A digest identifies a version, so a second scorer with the same weights publishes nothing.

Invariant 2: servers hold one verifier at a time, and a scorer has them exclusively until its scores have arrived."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Executor
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from pvg.config.experiment import Experiment
from pvg.config.training import LogprobHead, Verifier
from pvg.errors import ConfigurationError, ServerUnavailableError, TrainingDivergedError, WeightsNotArrivedError
from pvg.models.heads import ImplicitHead, ScalarHead, VerifierModel
from pvg.models.logprobs import completion_logprobs
from pvg.records import Float32
from pvg.rollout.vllm_requests import GENERATE, UNSAMPLABLE, prompt_scoring, read_prompt_logprobs
from pvg.servers.command import Purpose
from pvg.servers.control import Connections, ServerInfo
from pvg.servers.fleet import Server, StaleWeights
from pvg.servers.pool import MalformedReply, ServerFault, pause_before_retry, together
from pvg.servers.publishing import Publisher, PublishingSession, SyncTiming, WeightLabel, WeightUpdate, salt
from pvg.servers.served_model import Prove, RequestFailed, ServedModel, ServerRequirements
from pvg.servers.transports.files import FilesystemTransport, VersionFolders
from pvg.telemetry.events import Events
from pvg.telemetry.spans import run_whole, span
from pvg.verifier.data import padded_batches
from pvg.verifier.scorer import ScoreCache, ScoredBatch, ScoreInput, ScoreKey

# Verifier heads on vLLM servers: the weights to publish, the request, and how to read the reply.

CLASSIFY = "/classify"
BACKBONE = "backbone."  # prefix of the backbone's names in VerifierModel.trainable_state
SCORE = "score.weight"  # name in a *ForSequenceClassification checkpoint


Values = tuple[list[Float32], str | None]  # of a reply: for each input, and the label of the weights if it has one


class ServedScalar:
    """How servers compute one head. `tensors`: a version's weights, by the names of the servers' checkpoint.
    `body` and `read`: of a request with up to `inputs_per_request` inputs, each with room for `extra_tokens` more.
    `expected`: the values that a server with the model's weights returns, computed by torch in this thread.

    Here: [X]ForSequenceClassification with one label: its score is a linear layer without bias."""

    runner: Literal["generate", "pooling"] = "pooling"
    route = CLASSIFY
    inputs_per_request = 16  # a request may have any number; small ones let several servers share the work
    extra_tokens = 0

    def tensors(self, model: VerifierModel) -> dict[str, Tensor]:
        assert isinstance(model, ScalarHead)
        tensors = _backbone(model.trainable_state())
        # The classifier's only head tensor is `score.weight`. A tied head is the embedding, which the backbone
        # contains; a separate frozen head is not in the trainable state.
        tensors[SCORE] = model.weight_D.detach()[None]
        return tensors

    def body(self, inputs: Sequence[ScoreInput], label: str) -> dict[str, Any]:
        return {
            "input": [entry.ids for entry in inputs],
            "use_activation": False,
            "add_special_tokens": False,
            "cache_salt": salt(label),
        }

    def read(self, found: Any, inputs: Sequence[ScoreInput], url: str) -> Values:
        rows = found.get("data") if isinstance(found, dict) else None
        if not isinstance(rows, list) or len(rows) != len(inputs):
            raise MalformedReply(url, f"not {len(inputs)} scores")
        values: dict[int, Float32] = {}
        for row in rows:
            try:
                number, (logit,) = int(row["index"]), row["probs"]
                values[number] = np.array([float(logit)], dtype=np.float32)
            except (KeyError, TypeError, ValueError) as error:
                raise MalformedReply(url, f"a score that cannot be read: {error!r}") from None
        if values.keys() != set(range(len(inputs))):
            raise MalformedReply(url, "scores of other inputs than were sent")
        return [values[number] for number in range(len(inputs))], None

    def expected(self, model: VerifierModel, inputs: Sequence[ScoreInput]) -> list[Float32]:
        assert isinstance(model, ScalarHead)
        with torch.inference_mode():
            return [(model(*_row(entry, model.device)) - model.bias).cpu().numpy() for entry in inputs]

    def scores(self, values: Sequence[Float32], references_N: Float32, bias: float) -> Float32:
        return np.concatenate(values) + np.float32(bias)


class ServedImplicit:
    """[X]ForCausalLM: uses the log-probs of the solution's tokens."""

    runner: Literal["generate", "pooling"] = "generate"
    route = GENERATE
    inputs_per_request = 1
    extra_tokens = 1  # vLLM requires at least one sampled token

    def __init__(self, beta: float, weight: float = 1.0) -> None:
        self._beta, self._weight = np.float32(beta), np.float32(weight)

    def tensors(self, model: VerifierModel) -> dict[str, Tensor]:
        return _backbone(model.trainable_state())

    def body(self, inputs: Sequence[ScoreInput], label: str) -> dict[str, Any]:
        (entry,) = inputs
        return prompt_scoring(entry.ids, salt=salt(label), model=None)

    def read(self, found: Any, inputs: Sequence[ScoreInput], url: str) -> Values:
        (entry,) = inputs
        logprobs, label = read_prompt_logprobs(found, entry.ids, url)
        solution = logprobs[entry.prompt_length - 1 :]
        return [np.where(solution <= UNSAMPLABLE, np.float32(-np.inf), solution)], label

    def expected(self, model: VerifierModel, inputs: Sequence[ScoreInput]) -> list[Float32]:
        assert isinstance(model, ImplicitHead)
        assert model.backbone is not None
        return [_solution_logprobs(model.backbone, model.device, entry) for entry in inputs]

    def expected_of_start(self, model: VerifierModel, inputs: Sequence[ScoreInput]) -> list[Float32]:
        """Like `expected`, for a server with the verifier's untrained start."""
        assert isinstance(model, ImplicitHead)
        return [_solution_logprobs(model.start, model.device, entry) for entry in inputs]

    def sums(self, values: Sequence[Float32]) -> Float32:
        """float32 [N], summed in float64."""
        return np.array([value.sum(dtype=np.float64) for value in values], dtype=np.float32)

    def scores(self, values: Sequence[Float32], references_N: Float32, bias: float) -> Float32:
        return self._beta * (self.sums(values) - self._weight * references_N) + np.float32(bias)


ServedHead = ServedScalar | ServedImplicit


def served_head(section: Verifier) -> ServedHead:
    """The served form of the verifier's head. Raises ConfigurationError if servers cannot compute the head."""
    if isinstance(section.head, LogprobHead):
        return ServedImplicit(section.head.beta, section.head.reference)
    if section.head.kind == "scalar":
        return ServedScalar()
    raise ConfigurationError(
        f"verifier.head = {section.head.kind!r} runs only with torch; vLLM does not support it.",
        "Set verifier.engine to 'torch', or verifier.head to 'implicit' or 'scalar'.",
    )


def _backbone(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(BACKBONE): tensor for name, tensor in state.items() if name.startswith(BACKBONE)}


def _solution_logprobs(module: nn.Module, device: torch.device, entry: ScoreInput) -> Float32:
    with torch.inference_mode():
        logprobs_1L = completion_logprobs(module, *_row(entry, device))
    found: Float32 = logprobs_1L[0, entry.prompt_length :].cpu().numpy()
    return found


def _row(entry: ScoreInput, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    ids_1L = torch.from_numpy(entry.ids.astype(np.int64)).to(device)[None]
    lengths_1 = torch.tensor([len(entry.ids)], device=device)
    return ids_1L, lengths_1, torch.tensor([entry.prompt_length], device=device)


T = TypeVar("T")

CONCURRENCY = 256  # requests in flight: more than vLLM decodes at once, so that its queue is never empty
REPLY_S = 600.0  # timeout of a single lost reply; a server that is down is detected much earlier
# Allowed difference of a logit, or of one token's log-prob, from torch. With float32 on both sides it is about 1e-5.
TOLERANCE_FLOAT32 = 1e-2
TOLERANCE_REDUCED = 0.5  # bfloat16 has 8 bits of precision


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

    async def ask(self, inputs: Sequence[ScoreInput]) -> tuple[list[Float32], int]:
        """The model's values for each of the `inputs`, and the number of requests. Raises ServerUnavailableError if no
        server is up for `serving.unavailable_s` or if a request fails repeatedly; ConfigurationError if servers refuse
        a request."""
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
                return [values[row] for row in range(len(inputs))], requests
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
        values, found = self._head.read(reply.json(), inputs, url)
        if found is not None and found != label:
            raise StaleWeights(server.url, f"its log-probs come from weights {found!r}, not from {label!r}")
        return values

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
                    "Start it with a larger --max-model-len (serving.extra_args), or lower rollout.max_tokens.",
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
        expected = await run_whole(self._executor, self._head.expected_of_start, model, self.canary)
        await self.served.keep_start(partial(self._prove, expected, None))

    async def _expect(self, model: VerifierModel, update: WeightUpdate, label: WeightLabel) -> Prove:
        expected = await run_whole(self._executor, self._head.expected, model, self.canary)
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
        self.token_budget = experiment.verifier.micro_batch_tokens
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
        references = experiment.serving.reference_servers  # none for a head without a reference (pvg.config.rules)
        concurrency = CONCURRENCY * (2 if references else 1)
        self.connections = Connections.open(experiment.serving, experiment.weights, concurrency)
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
            version = await run_whole(self.executor, self._version_of, model)
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
        publisher = Publisher(_Receiver(self.verifiers, model), events=self._events, of="verifier")
        self.last_sync = await publisher.publish(version.tensors, self._version)


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

    def batches(self, inputs: Sequence[ScoreInput]) -> list[NDArray[np.int64]]:
        """One batch with all rows: servers form their own batches."""
        return [np.arange(len(inputs), dtype=np.int64)]

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
            (values, asked), (references_N, requests) = cast(
                "tuple[tuple[list[Float32], int], tuple[Float32, int]]", tuple(found)
            )
            scores_N = serving.head.scores(values, references_N, bias)
        return ScoredBatch(scores_N, asked + requests)

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
            found = await run_whole(self._serving.executor, self._references_here, missing)
        else:
            assert isinstance(self._serving.head, ServedImplicit)
            values, requests = await servers.ask(missing)
            found = self._serving.head.sums(values)
        for row, value in zip(unknown, found.tolist(), strict=True):
            known[row] = value
            if np.isfinite(value):
                self.references.put(keys[row], value)
        return np.array(known, dtype=np.float32), requests

    def _references_here(self, inputs: Sequence[ScoreInput]) -> Float32:
        """References float32 [N], in the executor's thread."""
        rows = [(entry.ids, entry.prompt_length) for entry in inputs]
        found: Float32 = np.empty(len(inputs), dtype=np.float32)
        with torch.inference_mode(), span("reference", device=True):
            for numbers, packed in padded_batches(self._model, rows, self._serving.token_budget):
                found[numbers] = self._model.reference(*packed)[: len(numbers)].cpu().numpy()
        return found
