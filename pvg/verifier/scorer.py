"""`VerifierScorer`: rollouts to scores, each distinct solution computed once.

    scorer = VerifierScorer(verifier, template, verifier.version(), cache_entries=100_000, token_budget=16_384,
                            executor=executor, prover_fingerprint=prover.tokenizer.fingerprint)
    scores = await scorer.score(rollouts)

Concurrent calls share one queue, and so share batches; requests for a solution in computation wait for it. A thread
makes the verifier's input: 256 solutions of 16,384 tokens take 50 ms, and seconds if their text is tokenized again for
a verifier with another vocabulary.

Invariant 2: a score is returned only if nothing but the scorer's present version had a part in it. The cache's key
holds the version; and when it changes, whatever is under way is forgotten and whoever waits for it starts again,
because nobody can know which weights that computation saw. Computed by torch, a score is the same bits whatever it is
batched with (see `rectangle`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pvg.errors import ConfigurationError, StateError, TrainingDivergedError
from pvg.models.padding import WIDTH, padded_width
from pvg.records import Float32, Int32, Scorable
from pvg.telemetry.event_loop import run_to_end
from pvg.telemetry.spans import run_in, span
from pvg.verifier.backend import ScoreBackend, ScoredBatch, ScoreInput, TorchBackend
from pvg.verifier.cache import ScoreCache, ScoreKey, digest_of
from pvg.verifier.protocol import Scorer, ScoringModel
from pvg.verifier.template import VerifierTemplate


@dataclass(frozen=True, slots=True)
class ScorerStats:
    """Counts since the scorer was made. Every solution asked for is a hit (cached), shared (being computed for someone
    else, or earlier in the same call) or a miss (computed). `queue_s` sums the seconds that each computed solution
    waited for its forward pass, `service_s` the seconds of the forward passes. With servers, `forward_passes` counts
    the requests, and a solution waits until its request is sent."""

    hits: int
    misses: int
    evictions: int
    shared: int
    forward_passes: int
    queue_s: float
    service_s: float


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    """A solution to be computed, and the future that everybody who wants it waits for."""

    input: ScoreInput
    key: ScoreKey
    future: asyncio.Future[float]
    submitted: float


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


class VerifierScorer(Scorer):
    """Scores with one verifier, which it borrows. All methods belong to one event loop's thread.

    `prover_fingerprint` is the fingerprint of the tokenizer that sampled the rollouts: where it is the verifier's own,
    token ids are reused; without it solutions are encoded from their text. `backend` computes the scores of `model`,
    and has its own executor and references; without one this process does. `reading` makes the verifier's
    input of rollouts; with one thread, concurrent calls keep their order. None: the event loop's default executor.
    """

    def __init__(
        self,
        model: ScoringModel,
        template: VerifierTemplate,
        version: str,
        *,
        cache_entries: int,
        token_budget: int,
        executor: Executor,
        prover_fingerprint: str | None = None,
        backend: ScoreBackend | None = None,
        reading: Executor | None = None,
        threshold: float | None = None,
        owned: AbstractContextManager[object] | None = None,
    ) -> None:
        """`threshold`: the verifier accepts a solution whose score reaches it; None where it is not known. `owned`:
        what `close` closes, such as the model."""
        self._model = model
        self._template = template
        self._version = version
        self._token_budget = token_budget
        self._prover_fingerprint = prover_fingerprint
        self._reading = reading
        self._cache = ScoreCache(cache_entries)
        self._backend: ScoreBackend = backend or TorchBackend(
            model, template.key, ScoreCache(cache_entries), token_budget=token_budget, executor=executor
        )
        self._references = self._backend.references
        self._epoch = 0  # counts changes of the version: an old version may come back
        self._under_way: dict[ScoreKey, _Job] = {}
        self._queue: list[_Job] = []
        self._worker: asyncio.Task[None] | None = None
        self._batch: asyncio.Future[ScoredBatch] | None = None  # what the worker waits for
        self._shared = self._forward_passes = 0
        self._queue_s = self._service_s = 0.0
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

    def __enter__(self) -> VerifierScorer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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
            queue_s=self._queue_s,
            service_s=self._service_s,
        )

    def set_version(self, version: str) -> None:
        """The verifier's weights have changed and are now `version`. Call it right after changing them, before
        anything else can await a score."""
        if version == self._version:
            return
        self._version = version
        self._epoch += 1
        self._backend.weights_changed()
        self._cache.clear()  # scores of the old version: right under their key, but of no use any more
        self._forget()

    async def drop(self) -> None:
        """Forget what waits, cancel requests to servers, and await what is being computed: whoever asked has left, and
        the model may be closed."""
        self._forget()
        # Servers may be gone for minutes. Of work in a thread, cancelling would only lose sight.
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
        """The cached scores, and whose they are, as tensors named "scores.*" for a checkpoint: without them a resumed
        run would compute again what the uninterrupted run has cached. Only between calls of `score`."""
        state = {"scores.owner": torch.from_numpy(self._owner())}
        for name, cache in (("scores.", self._cache), ("scores.reference_", self._references)):
            digests, values = cache.entries()
            state[f"{name}digests"] = torch.from_numpy(digests.copy())
            state[f"{name}values"] = torch.from_numpy(values)
        return state

    def load_cache_state(self, state: Mapping[str, Tensor]) -> None:
        """Take up a `cache_state`. Raises StateError when its scores are of another version or template."""
        if not np.array_equal(state["scores.owner"].numpy(), self._owner()):
            raise StateError(
                "The checkpoint's scores come from another verifier than the one that is open.",
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
        """float32 [n], logits, all of `version` as it is on return.

        Raises TrainingDivergedError naming the rollout whose score is not finite, ConfigurationError for a solution
        longer than the verifier or the token budget allows, and whatever a forward pass raised.
        """
        inputs = await run_in(self._reading, self._inputs, rollouts)
        while True:
            epoch = self._epoch
            with span("score_queue"):  # around the look-ups too: what they start then counts as work for this wait
                found = [self._find(input_) for input_ in inputs]
                waiting = {entry for entry in found if isinstance(entry, asyncio.Future)}
                if waiting:
                    await asyncio.wait(waiting)  # unlike awaiting them, this does not cancel them when we are cancelled
            if epoch == self._epoch:
                scores = [entry.result() if isinstance(entry, asyncio.Future) else entry for entry in found]
                return np.asarray(scores, dtype=np.float32)

    def _inputs(self, rollouts: Sequence[Scorable]) -> list[ScoreInput]:
        """Runs in the reading thread. It uses nothing that depends on the version."""
        return [self._input(rollout) for rollout in rollouts]

    def _input(self, rollout: Scorable) -> ScoreInput:
        ids, prompt_length = self._template.tokens(
            rollout.question, rollout.text, rollout.completion_ids, self._prover_fingerprint
        )
        context = self._model.max_length
        if len(ids) > context or padded_width(len(ids), context) > self._token_budget:
            raise ConfigurationError(
                f"Rollout {rollout.id} takes {len(ids)} tokens to verify: more than the verifier's context "
                f"of {context}, or than verifier.score_tokens = {self._token_budget} in blocks of {WIDTH}.",
                "Shorten the completions (rollout.max_tokens), raise verifier.score_tokens, or change the verifier.",
            )
        return ScoreInput(ids, prompt_length, digest_of(ids, prompt_length), rollout.id)

    def _find(self, input_: ScoreInput) -> float | asyncio.Future[float]:
        """The score, or the future of whoever computes it."""
        key = ScoreKey(self._version, self._template.key, input_.digest)
        job = self._under_way.get(key)
        if job is not None:
            self._shared += 1
            return job.future
        score = self._cache.get(key)
        if score is not None:
            return score
        loop = asyncio.get_running_loop()
        job = _Job(input_, key, loop.create_future(), time.perf_counter())
        self._under_way[key] = job
        self._queue.append(job)
        if self._worker is None:
            self._worker = loop.create_task(self._work())
        return job.future

    async def _work(self) -> None:
        """Batch by batch until the queue is empty. What arrives during a batch is part of the next ones."""
        try:
            while self._queue:
                jobs, self._queue = self._queue, []
                for rows in self._backend.batches([len(job.input.ids) for job in jobs]):
                    # Jobs that a change of version has cancelled need no forward pass.
                    wanted = [jobs[row] for row in rows if not jobs[row].future.done()]
                    if wanted:
                        await self._compute(wanted)
        except BaseException as error:
            for job in list(self._under_way.values()):  # nobody may be left waiting for a worker that is gone
                self._fail(job, error)
            self._queue.clear()
            raise
        finally:
            self._worker = None

    async def _compute(self, jobs: list[_Job]) -> None:
        work = self._batch = self._backend.submit([job.input for job in jobs])
        try:
            await asyncio.wait([work])  # not awaited: its failure belongs to those who wait for the scores
        finally:
            self._batch = None
        error = asyncio.CancelledError() if work.cancelled() else work.exception()
        if error is None:
            done = work.result()
            self._forward_passes += done.passes
            self._service_s += done.seconds
            self._queue_s += sum(began - job.submitted for began, job in zip(done.began, jobs, strict=True))
        for number, job in enumerate(jobs):
            if job.future.done():
                continue  # the version changed meanwhile: what was computed is nobody's score
            if error is not None:
                self._fail(job, error)
            elif not np.isfinite(done.scores[number]):
                self._fail(job, _not_finite(job, float(done.scores[number])))
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
            job.future.exception()  # seen: if everybody who waited was cancelled, there is nobody left to tell


def _not_finite(job: _Job, score: float) -> TrainingDivergedError:
    return TrainingDivergedError(
        f"The verifier's score of rollout {job.input.rollout_id} is {score}.",
        "Its weights have diverged: lower verifier.learning_rate. What was committed before is intact.",
    )
