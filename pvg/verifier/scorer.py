"""The scorer: rollouts to scores; computes each distinct solution once.

Concurrent calls share a queue, batches, and solutions in computation. A thread prepares the verifier's input.

Invariant 2: a returned score comes only from the scorer's current version. The cache's key includes the version. When
the version changes, the scorer discards work in flight, because its weights are unknown, and callers that wait for it
start again. With torch on a CPU in float32, a score's bits do not depend on its batch (see
`pvg.models.packing.pad_batch`)."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pvg.errors import Closing, ConfigurationError, MissingRequirementError, StateError, TrainingDivergedError, counted
from pvg.models.compute import autocast
from pvg.models.heads import GenerativeHead, VerifierEnsemble, VerifierModel
from pvg.models.language_model import UNLIMITED
from pvg.models.packing import WIDTH, PaddedBatch, batches, pad_batch, pad_right, padded_width, row_batches
from pvg.records import Float32, Int32, Scorable
from pvg.rollout.engine import GenerationRequest, Sampling
from pvg.rollout.gathering import request_seed
from pvg.rollout.torch_engine import TorchEngine
from pvg.telemetry.spans import run_in, span, submit_in
from pvg.telemetry.waits import run_to_end
from pvg.verifier.data import Style, VerifierTemplate, log_odds, read_verdict


class Scorer(Protocol):
    """Scores solutions, with one version of a verifier at a time."""

    @property
    def version(self) -> str:
        """Identifies the weights behind the scores."""

    async def score(self, rollouts: Sequence[Scorable]) -> Float32:
        """float32 [n], logits: the verifier's confidence that each rollout is correct."""


# A verifier that scores: one model, or an ensemble.
ScoringModel = VerifierModel | VerifierEnsemble

DIGEST_BYTES = 16


class ScoreKey(NamedTuple):
    """Everything that a score depends on (invariant 2): the verifier's version, the template, the tokens."""

    version: str
    template: str
    tokens: bytes


def digest_of(ids: Int32, prompt_length: int) -> bytes:
    """16 bytes that identify token ids int32 [L] and the start of the solution in them."""
    digest = hashlib.blake2b(np.ascontiguousarray(ids, dtype="<i4").tobytes(), digest_size=DIGEST_BYTES)
    digest.update(prompt_length.to_bytes(8, "little"))
    return digest.digest()


class ScoreCache:
    """The `capacity` most recently used scores. Counts hits, misses and evictions. One thread may call `entries` while
    another gets and puts."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._scores: OrderedDict[ScoreKey, float] = OrderedDict()
        self._changing = threading.Lock()  # a commit reads the entries in a thread
        self.hits = 0
        self.misses = 0
        self.evictions = 0

    def __len__(self) -> int:
        return len(self._scores)

    def get(self, key: ScoreKey) -> float | None:
        score = self._scores.get(key)
        if score is None:
            self.misses += 1
            return None
        self.hits += 1
        with self._changing:
            self._scores.move_to_end(key)
        return score

    def put(self, key: ScoreKey, score: float) -> None:
        with self._changing:
            self._scores[key] = score
            self._scores.move_to_end(key)
            if len(self._scores) > self._capacity:
                self._scores.popitem(last=False)
                self.evictions += 1

    def clear(self) -> None:
        """Remove all scores; the counters stay."""
        self._scores.clear()

    def entries(self) -> tuple[NDArray[np.uint8], NDArray[np.float64]]:
        """Input for `restore`: the tokens' digests uint8 [n, 16] and the scores float64 [n], oldest first.

        Requires that all entries have one version and one template, as in a scorer.
        """
        with self._changing:
            kept = list(self._scores.items())
        digests_N = np.frombuffer(b"".join(key.tokens for key, _ in kept), dtype=np.uint8)
        return digests_N.reshape(-1, DIGEST_BYTES), np.fromiter((score for _, score in kept), np.float64, len(kept))

    def restore(self, version: str, template: str, digests: NDArray[np.uint8], scores: NDArray[np.float64]) -> None:
        """Replace the contents by `entries` of another cache, the newest ones if not all fit; the counters stay."""
        keys = (ScoreKey(version, template, digest.tobytes()) for digest in digests[-self._capacity :])
        self._scores = OrderedDict(zip(keys, scores[-self._capacity :].tolist(), strict=True))


@dataclass(frozen=True, slots=True, eq=False)
class ScoreInput:
    """A solution in the verifier's input format: `ids` int32 [L], the solution starts at `prompt_length`; `digest`
    identifies them; `rollout_id` is for messages."""

    ids: Int32
    prompt_length: int
    digest: bytes
    rollout_id: str


@dataclass(frozen=True, slots=True)
class ScoredBatch:
    """The result of a batch: scores float32 [n], and its number of forward passes or server requests."""

    scores: Float32
    passes: int = 1


class ScoreBackend(Protocol):
    """Computes the scores of one verifier. `references`: values of solutions that do not depend on its version."""

    references: ScoreCache

    def batches(self, inputs: Sequence[ScoreInput]) -> list[NDArray[np.int64]]:
        """Splits the inputs: the row numbers of each batch for `submit`, in order."""

    def weights_changed(self) -> None:
        """Tells the backend that the verifier's weights have changed."""

    def submit(self, inputs: Sequence[ScoreInput]) -> asyncio.Future[ScoredBatch]:
        """Start a batch. The caller waits for it before the next one. If the future is a Task, the caller may cancel
        it; it then ends when nothing uses the model any more."""


class TorchBackend:
    """Runs forward passes of `model` in the executor's thread. The caller owns the model. `precision`: of the passes.
    In bfloat16 they compute rows without padding, and what these have in common once, as training does; a score then
    depends on its batch, by its rounding."""

    def __init__(
        self,
        model: ScoringModel,
        template_key: str,
        references: ScoreCache,
        *,
        token_budget: int,
        executor: Executor,
        precision: str = "float32",
    ) -> None:
        self.references = references  # used only by the forward pass, of which there is one at a time
        self._model = model
        self._template_key = template_key
        self._token_budget = token_budget
        self._executor = executor
        self._precision = precision
        with autocast(precision, model.device):
            self._longest_packed = model.longest_packed if precision == "bfloat16" else 0

    def batches(self, inputs: Sequence[ScoreInput]) -> list[NDArray[np.int64]]:
        rows, starts = [entry.ids for entry in inputs], [entry.prompt_length for entry in inputs]
        if self._packs(rows):
            return row_batches(rows, np.array(starts), self._token_budget)
        return batches(list(map(len, rows)), self._token_budget, self._model.max_length)

    def _packs(self, rows: Sequence[Int32]) -> bool:
        return max(map(len, rows), default=0) <= self._longest_packed

    def weights_changed(self) -> None:
        """Does nothing: the forward passes use the model itself."""

    def submit(self, inputs: Sequence[ScoreInput]) -> asyncio.Future[ScoredBatch]:
        return submit_in(self._executor, self.forward, inputs)

    def forward(self, inputs: Sequence[ScoreInput]) -> ScoredBatch:
        """One pass. Call it in the executor's thread."""
        rows, starts = [entry.ids for entry in inputs], [entry.prompt_length for entry in inputs]
        pad_id, device, packed = self._model.tokenizer.pad_id, self._model.device, self._packs(rows)
        sizes = {"token_budget": self._token_budget, "max_length": self._model.max_length}
        with torch.inference_mode(), span("score_service", device=True), autocast(self._precision, device):
            if packed:
                batch = PaddedBatch(*pad_right(rows, pad_id), torch.tensor(starts))
            else:
                batch = pad_batch(rows, starts, pad_id, device, **sizes)
            scores_B = self._model(*batch, self._reference(inputs, batch, packed), packed=packed)
            scores: Float32 = scores_B[: len(inputs)].cpu().numpy()
        return ScoredBatch(scores)

    def _reference(self, inputs: Sequence[ScoreInput], batch: PaddedBatch, packed: bool) -> Tensor | None:
        """The head's references [B]. Computes none if all rows are in the cache; their version does not matter."""
        if not self._model.needs_reference:
            return None
        keys = [ScoreKey("", self._template_key, entry.digest) for entry in inputs]
        known = [self.references.get(key) for key in keys]
        if all(value is not None for value in known):
            repeated = known + known[:1] * (len(batch.lengths_B) - len(known))
            return torch.tensor(repeated, dtype=torch.float32, device=batch.ids_BL.device)
        reference = self._model.reference  # that of a head in a user's file may know no packed rows
        reference_B = reference(*batch, packed=True) if packed else reference(*batch)
        for key, value in zip(keys, reference_B.tolist(), strict=False):
            self.references.put(key, value)
        return reference_B


class VerdictBackend:
    """Samples the votes of a generative verifier (pvg.verifier.data.log_odds). `style`: of the verdicts. `max_rows`:
    verdicts that are decoded together.

    The random numbers of a vote depend only on the solution's tokens and the vote's number, so scores repeat."""

    def __init__(
        self, verifier: GenerativeHead, style: Style, *, token_budget: int, executor: Executor, max_rows: int
    ) -> None:
        self.references = ScoreCache(1)  # none
        self._verifier, self._style, self._executor = verifier, style, executor
        self._token_budget, self._max_rows = token_budget, max_rows
        self._engine: TorchEngine | None = None

    def batches(self, inputs: Sequence[ScoreInput]) -> list[NDArray[np.int64]]:
        return batches([len(entry.ids) for entry in inputs], self._token_budget, self._verifier.max_length)

    def weights_changed(self) -> None:
        self._engine = None

    def submit(self, inputs: Sequence[ScoreInput]) -> asyncio.Future[ScoredBatch]:
        return asyncio.ensure_future(self._sample(inputs))

    async def _sample(self, inputs: Sequence[ScoreInput]) -> ScoredBatch:
        if self._engine is None:
            self._engine = await run_in(self._executor, self._open)
        head, tokenizer, engine = self._verifier.head, self._verifier.tokenizer, self._engine
        sampling = Sampling(head.tokens, tokenizer.end_ids)
        requests = [
            GenerationRequest(f"{entry.rollout_id}, vote {vote}", entry.ids, sampling, _seed_of(entry, vote), group=row)
            for row, entry in enumerate(inputs)
            for vote in range(head.votes)
        ]
        with span("score_service"):
            completions = await asyncio.gather(*map(engine.generate, requests))
        votes = [read_verdict(tokenizer.decode(each.token_ids), self._style) for each in completions]
        scores = [log_odds(votes[first : first + head.votes]) for first in range(0, len(votes), head.votes)]
        return ScoredBatch(np.array(scores, dtype=np.float32))

    def _open(self) -> TorchEngine:
        model, most = self._verifier.policy.sampler(), self._max_rows
        on_cpu = model.device.type == "cpu"
        return TorchEngine(
            model, max_rows=most, max_in_flight=UNLIMITED, executor=self._executor, continuous=not on_cpu
        )


def _seed_of(entry: ScoreInput, vote: int) -> int:
    return request_seed(int.from_bytes(entry.digest[:8]), vote, 0)


CACHE_ENTRIES = 100_000  # scores in memory, so that a solution is scored once


@dataclass(frozen=True, slots=True)
class ScorerStats:
    """Counts since the scorer was created. A requested solution is a hit (cached), shared (in computation already, or
    repeated in the call) or a miss (computed). With servers, `forward_passes` counts requests."""

    hits: int
    misses: int
    evictions: int
    shared: int
    forward_passes: int


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    """A solution to compute, and the future for all who wait for it."""

    input: ScoreInput
    key: ScoreKey
    future: asyncio.Future[float]


class FinishedRun(Protocol):
    """A run that opens the scorers of its finished rounds: `pvg.Run`."""

    def open_scorer(self, round: int) -> VerifierScorer: ...


@dataclass(frozen=True, slots=True)
class TextSolution:
    """A solution that is known by its text alone: what `score_texts` scores."""

    id: str
    question: str
    text: str
    completion_ids: Int32 = field(default_factory=lambda: np.zeros(0, dtype=np.int32))


class VerifierScorer(Scorer, Closing):
    """Scores with one verifier, which the caller owns. Call all methods from one event loop's thread.

    `prover_fingerprint`: of the tokenizer that sampled the rollouts. If it equals the verifier's, token ids are reused;
    otherwise, and with None, solutions are encoded from their text. `backend`: computes the scores of `model` with its
    own executor and references; None: this process does. `reading`: prepares the verifier's input; with one thread,
    concurrent calls keep their order. None: the event loop's default executor. `precision`: models.compute_dtype, that
    of forward passes in this process.
    """

    def __init__(
        self,
        model: ScoringModel,
        template: VerifierTemplate,
        version: str,
        *,
        cache_entries: int = CACHE_ENTRIES,
        token_budget: int,
        executor: Executor,
        precision: str = "float32",
        prover_fingerprint: str | None = None,
        backend: ScoreBackend | None = None,
        reading: Executor | None = None,
        threshold: float | None = None,
        owned: AbstractContextManager[object] | None = None,
        max_rows: int = 256,
    ) -> None:
        """`max_rows`: verdicts of a generative verifier that are decoded together. `threshold`: the verifier accepts a
        solution whose score reaches it; None where it is not known. `owned`: what `close` closes, such as the model."""
        self._model, self._context = model, model.max_length
        self._template = template
        self._version = version
        self._token_budget = token_budget
        self._prover_fingerprint = prover_fingerprint
        self._reading = reading
        self._cache = ScoreCache(cache_entries)
        if backend is None and isinstance(model, GenerativeHead):
            backend = VerdictBackend(
                model, template.style, token_budget=token_budget, executor=executor, max_rows=max_rows
            )
        self._backend: ScoreBackend = backend or TorchBackend(
            model,
            template.key,
            ScoreCache(cache_entries),
            token_budget=token_budget,
            executor=executor,
            precision=precision,
        )
        self._references = self._backend.references
        self._epoch = 0  # counts version changes; a version string may return
        self._under_way: dict[ScoreKey, _Job] = {}
        self._queue: list[_Job] = []
        self._worker: asyncio.Task[None] | None = None
        self._batch: asyncio.Future[ScoredBatch] | None = None  # the batch in computation
        self._shared = self._forward_passes = 0
        self.threshold = threshold
        self._owned = owned

    @classmethod
    def load(cls, run: FinishedRun, round: int = -1) -> VerifierScorer:
        """The scorer of a finished round's verifier, computed by torch in this process. Rounds count from 0; -1 is the
        last. Leave it as a context manager, or `close` it, to free the model.

        Raises UsageError for a round that is not finished.
        """
        return run.open_scorer(round)

    def score_texts(self, problem: str, solutions: Sequence[str]) -> Float32:
        """float32 [n], logits: how sure the verifier is that each text solves `problem`. Raises what `score` raises."""
        texts = [TextSolution(f"text {number}", problem, text) for number, text in enumerate(solutions)]
        return run_to_end(lambda: self.score(texts))

    def close(self) -> None:
        """Close what the scorer owns. A scorer that `load` opened owns its model."""
        if self._owned is not None:
            owned, self._owned = self._owned, None
            owned.__exit__(None, None, None)

    @property
    def version(self) -> str:
        return self._version

    @property
    def stats(self) -> ScorerStats:
        return ScorerStats(
            hits=self._cache.hits,
            misses=self._cache.misses,
            evictions=self._cache.evictions,
            shared=self._shared,
            forward_passes=self._forward_passes,
        )

    def set_version(self, version: str) -> None:
        """Tell the scorer that the verifier's weights are now `version`. Call it right after the change, before
        anything else can await a score."""
        if version == self._version:
            return
        self._version = version
        self._epoch += 1
        self._backend.weights_changed()
        self._cache.clear()  # scores of the old version are correct but no longer needed
        self._forget()

    async def drop(self) -> None:
        """Discard waiting work, cancel server requests, and wait for the computation in progress. Afterwards the caller
        may close the model."""
        self._forget()
        # Servers may be unreachable for minutes, so cancel their requests. Work in a thread cannot be cancelled.
        if isinstance(self._batch, asyncio.Task) and not self._batch.cancelling():
            self._batch.cancel()
        if self._worker is not None:
            await asyncio.wait([self._worker])

    def _forget(self) -> None:
        for job in self._under_way.values():
            job.future.cancel()
        self._under_way.clear()
        self._queue.clear()

    def cache_state(self) -> dict[str, Tensor]:
        """The cached scores and their owner as tensors "scores.*" for a checkpoint, so that a resumed run computes the
        same scores as an uninterrupted one. Call it only between calls of `score`."""
        state = {"scores.owner": torch.from_numpy(self._owner())}
        for name, cache in (("scores.", self._cache), ("scores.reference_", self._references)):
            digests, values = cache.entries()
            state[f"{name}digests"] = torch.from_numpy(digests.copy())
            state[f"{name}values"] = torch.from_numpy(values)
        return state

    def load_cache_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore a `cache_state`. Raises StateError if its scores have another version or template."""
        if not np.array_equal(state["scores.owner"].numpy(), self._owner()):
            raise StateError(
                "The checkpoint's scores come from another verifier than the current one.",
                "Resume with the experiment and the version of pvg that wrote it.",
            )
        for name, cache, version in (
            ("scores.", self._cache, self._version),
            ("scores.reference_", self._references, ""),
        ):
            digests, values = state[f"{name}digests"].numpy(), state[f"{name}values"].numpy()
            cache.restore(version, self._template.key, digests, values)

    def _owner(self) -> NDArray[np.uint8]:
        return np.frombuffer(f"{self._version} {self._template.key}".encode(), dtype=np.uint8).copy()

    async def score(self, rollouts: Sequence[Scorable]) -> Float32:
        """float32 [n], logits, all of the `version` at return.

        Raises TrainingDivergedError, naming the rollout, if a score is not finite; ConfigurationError if a solution is
        too long for the verifier or the token budget; and what a forward pass raises.
        """
        # The reading thread prepares the input, which does not depend on the version.
        inputs = await run_in(self._reading, lambda: [self._input(rollout) for rollout in rollouts])
        while True:
            epoch = self._epoch
            with span("score_queue"):  # includes the look-ups, so that the work which they start counts for this wait
                found = [self._find(input_) for input_ in inputs]
                waiting = {entry for entry in found if isinstance(entry, asyncio.Future)}
                if waiting:
                    await asyncio.wait(waiting)  # unlike `await`, cancelling this call does not cancel the futures
            if epoch == self._epoch:
                scores = [entry.result() if isinstance(entry, asyncio.Future) else entry for entry in found]
                return np.asarray(scores, dtype=np.float32)

    def _input(self, rollout: Scorable) -> ScoreInput:
        ids, prompt_length = self._template.tokens(
            rollout.question, rollout.text, rollout.completion_ids, self._prover_fingerprint
        )
        if len(ids) > self._context or padded_width(len(ids), self._context) > self._token_budget:
            raise ConfigurationError(
                f"Rollout {rollout.id} needs {len(ids)} tokens to verify. This exceeds the verifier's context "
                f"of {self._context}, or verifier.micro_batch_tokens = {self._token_budget} in blocks of {WIDTH}.",
                "Lower rollout.max_tokens, raise verifier.micro_batch_tokens, or change the verifier.",
            )
        return ScoreInput(ids, prompt_length, digest_of(ids, prompt_length), rollout.id)

    def _find(self, input_: ScoreInput) -> float | asyncio.Future[float]:
        """The cached score, or the future of its computation."""
        key = ScoreKey(self._version, self._template.key, input_.digest)
        job = self._under_way.get(key)
        if job is not None:
            self._shared += 1
            return job.future
        score = self._cache.get(key)
        if score is not None:
            return score
        loop = asyncio.get_running_loop()
        job = _Job(input_, key, loop.create_future())
        self._under_way[key] = job
        self._queue.append(job)
        if self._worker is None:
            self._worker = loop.create_task(self._work())
        return job.future

    async def _work(self) -> None:
        """Compute batches until the queue is empty. Solutions that arrive during a batch join the next ones."""
        try:
            while self._queue:
                jobs, self._queue = self._queue, []
                for rows in self._backend.batches([job.input for job in jobs]):
                    # Skip jobs that a version change has cancelled.
                    wanted = [jobs[row] for row in rows if not jobs[row].future.done()]
                    if wanted:
                        await self._compute(wanted)
        except BaseException as error:
            for job in list(self._under_way.values()):  # nothing else would ever complete these futures
                self._fail(job, error)
            self._queue.clear()
            raise
        finally:
            self._worker = None

    async def _compute(self, jobs: list[_Job]) -> None:
        work = self._batch = self._backend.submit([job.input for job in jobs])
        try:
            await asyncio.wait([work])  # `await work` would raise here; the error belongs to the waiting callers
        finally:
            self._batch = None
        error = asyncio.CancelledError() if work.cancelled() else work.exception()
        if isinstance(error, torch.OutOfMemoryError):
            error = MissingRequirementError(
                f"The GPU has too little memory to score {counted(len(jobs), 'solution')} together.",
                "Continue with a lower verifier.micro_batch_tokens: pvg train --resume RUN (or pvg evaluate RUN) -s "
                "verifier.micro_batch_tokens=N",
            )
        if error is None:
            done = work.result()
            self._forward_passes += done.passes
        for number, job in enumerate(jobs):
            if job.future.done():
                continue  # the version has changed, so the score is not valid
            if error is not None:
                self._fail(job, error)
            elif not np.isfinite(done.scores[number]):
                wrong = f"The verifier's score of rollout {job.input.rollout_id} is {done.scores[number]}."
                remedy = "Its weights have diverged: lower verifier.learning_rate. All commits are intact."
                self._fail(job, TrainingDivergedError(wrong, remedy))
            else:
                score = float(done.scores[number])
                self._cache.put(job.key, score)
                job.future.set_result(score)
                del self._under_way[job.key]

    def _fail(self, job: _Job, error: BaseException) -> None:
        del self._under_way[job.key]
        if isinstance(error, asyncio.CancelledError):
            job.future.cancel()
        else:
            job.future.set_exception(error)
            job.future.exception()  # avoids asyncio's "never retrieved" log if all callers were cancelled
