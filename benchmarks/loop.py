"""`loop`: event-loop lag of the orchestrator with many rollouts and large payloads.

    pvg bench --profile benchmarks/loop.toml
    # also with a verifier of another vocabulary:
    pvg bench --profile benchmarks/loop.toml --sweep workload.retokenize=false,true

One sample is a batch of the game without its models. The game's own code (pvg.game.round) takes rollouts from an
engine that streams recorded completions in chunks, with the experts that a mixture-of-experts model would have chosen
for every token. The code grades them, makes the verifier's input, computes rewards and credit, and records them. Then
the ledger commits them to a run directory. A monitor ticks at 100 Hz; the lag of a tick is the time that any other work
on the loop would have waited.

No model computes anything: there is no sampling, no reference and no training, and scores are available at once. Every
completion is stretched to the length of a reasoning model's output. The delays are the same in every sample.

`memory_over_payload` is the growth of this process's peak memory over a sample, in multiples of the batch's ids,
log-probs and experts. benchmarks/loop-large.toml measures it with the experts of a large model (384 bytes per token).

`derived` shows where pvg itself stalls the loop: `rollout_stall_ms` while rollouts arrive, `batch_stall_ms` while pvg
scores, rewards and records them, `commit_stall_ms` during the commit.
"""

from __future__ import annotations

import asyncio
import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from pvg.bench.workloads import BenchMetric, BenchSettings, Workload, workload_settings
from pvg.bench.workloads.rollout import check_work, digest_of, model_facts
from pvg.config.base import Count, Positive, Section
from pvg.config.experiment import Experiment
from pvg.config.training import Kl
from pvg.game.ledger import Ledger
from pvg.game.orders import prover_orders
from pvg.game.parts import BatchLogprobs
from pvg.game.players import Players
from pvg.game.prover_phase import open_batches
from pvg.game.roles import prompt_builder
from pvg.game.round import GameBatches
from pvg.game.run import session_of
from pvg.game.session import Session
from pvg.game.states import Phase
from pvg.game.verifier_phase import FixedVerifier
from pvg.models.tokenizer import Tokenizer
from pvg.records import FinishReason, Float32, Group, Int32, Rollout, RoutedExperts, VersionSpan
from pvg.rollout.dispatcher import Dispatcher, GroupOrder, SampleCall
from pvg.rollout.engine import Completion, Engine, EngineStats, GenerationRequest, Sampling
from pvg.servers.publishing import SyncTiming, WeightUpdate
from pvg.store.run_directory import RunDirectory
from pvg.tasks import open_task
from pvg.telemetry.events import PhaseInfo, SilentObserver
from pvg.telemetry.spans import Tracer, span
from pvg.telemetry.waits import LagWindow, LoopLagMonitor
from pvg.training.losses import PolicyObjective
from pvg.verifier.scorer import ScoreCache, ScoredBatch, ScoreInput, VerifierScorer

MB = 1e6
ID_AND_LOGPROB = 8  # bytes of a token
THRESHOLD = 0.0

MEASURES: dict[str, BenchMetric] = {
    "lag_p50_ms": BenchMetric("ms", "lower", "lag of the event loop at the monitor's ticks: median"),
    "lag_p99_ms": BenchMetric("ms", "lower", "the same: 99th percentile"),
    "lag_max_ms": BenchMetric("ms", "lower", "the same: the longest stall"),
    "rollouts_per_s": BenchMetric(
        "rollouts/s", "higher", "rollouts received, graded, rewarded, recorded and committed per second"
    ),
    "batch_s": BenchMetric(
        "s", "lower", "from the last graded rollout to the batch: scoring, rewards, credit, records"
    ),
    "write_s": BenchMetric("s", "lower", "encoding the rollouts' records and committing them"),
    "bytes_written_mb": BenchMetric("MB", "lower", "size of the records on disk"),
}
MEMORY_MEASURE = BenchMetric("1", "lower", "growth of the peak memory over a sample, in multiples of the payload")
STATUS, PEAK_RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")  # of Linux
HAS_PEAK = PEAK_RESET.exists()


class LoopSettings(Section):
    """The `[workload]` table. A rollout has about `tokens` tokens with `expert_layers` x `experts_per_token` expert
    numbers each, and arrives in chunks of `chunk` within `seconds`. `retokenize`: the verifier has another vocabulary,
    so solutions are tokenized again."""

    rollouts: Count = 256
    tokens: Count = 16_384
    chunk: Count = 64
    seconds: Positive = 1.0
    retokenize: bool = False
    expert_layers: Annotated[int, Field(ge=0)] = 4
    experts_per_token: Annotated[int, Field(ge=0)] = 2
    lag_hz: Annotated[float, Field(gt=0, le=1000)] = 100.0


def make(settings: BenchSettings) -> Workload:
    """Raises ConfigurationError if the rollouts are not whole groups."""
    workload, profile = workload_settings(LoopSettings, settings), settings.profile
    check_work(settings.experiment, workload.rollouts)
    return LoopWorkload(settings.experiment, workload, profile.warmup + profile.repeats, settings.executor)


def reset_peak() -> None:
    PEAK_RESET.write_text("5")


def resident_bytes(name: Literal["VmRSS", "VmHWM"]) -> int:
    """This process's resident memory: now, or its peak since PEAK_RESET was written."""
    (kilobytes,) = [line.split()[1] for line in STATUS.read_text().splitlines() if line.startswith(f"{name}:")]
    return int(kilobytes) * 1024


# --- in place of the models -------------------------------------------------------------------------------------------

STEP_ENDS = (";", "\n")  # a step of a solution ends with one of these
EXPERT_ROWS = 4096  # tokens after which the experts repeat
GOLDEN = (5**0.5 - 1) / 2  # its multiples modulo 1 spread the rollouts' durations evenly over an interval


class RecordedScoringModel:
    """A verifier for contexts of up to `max_length` tokens, without a model. `RecordedScores` provides its scores."""

    reads: Literal["scalar", "implicit", "yes_token"] = "scalar"

    def __init__(self, tokenizer: Tokenizer, max_length: int) -> None:
        self.tokenizer = tokenizer
        self.max_length = max_length


class RecordedScores:
    """A ScoreBackend that returns every score at once: a number in [-1, 1) derived from the solution's digest."""

    def __init__(self) -> None:
        self.references = ScoreCache(1)

    def batches(self, lengths: Sequence[int]) -> list[NDArray[np.int64]]:
        return [np.arange(len(lengths))]

    def weights_changed(self) -> None: ...

    def submit(self, inputs: Sequence[ScoreInput]) -> asyncio.Future[ScoredBatch]:
        numbers = np.array([int.from_bytes(entry.digest[:4], "little") for entry in inputs])
        done: asyncio.Future[ScoredBatch] = asyncio.get_running_loop().create_future()
        done.set_result(ScoredBatch((numbers / 2**31 - 1).astype(np.float32)))
        return done


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one request: token ids int32 [C], log-probs float32 [C], and the seconds in which the tokens arrive
    at an even pace. `experts` makes those of prompt and completion when the last token is there."""

    token_ids: Int32
    logprobs: Float32
    finish_reason: FinishReason
    seconds: float
    experts: Callable[[], RoutedExperts]


class StandInEngine(Engine):
    """Gives to each request what `answer` has for it, in chunks of `chunk` tokens. It accepts any weights, which
    interrupt nothing: a completion has the version of its start."""

    def __init__(self, max_in_flight: int, answer: Callable[[GenerationRequest], Answer], chunk: int) -> None:
        self._max_in_flight, self._answer, self._chunk = max_in_flight, answer, chunk
        self._version = 0
        self._stats = EngineStats()

    @property
    def version(self) -> int:
        return self._version

    @property
    def stats(self) -> EngineStats:
        return self._stats

    @property
    def max_in_flight(self) -> int:
        return self._max_in_flight

    async def generate(self, request: GenerationRequest) -> Completion:
        found, version, began = self._answer(request), self.version, time.perf_counter()
        tokens = len(found.token_ids)
        chunks = -(-tokens // self._chunk)
        for number in range(1, chunks + 1):
            # Relative to the start, so that a busy loop delays one chunk and not all later ones.
            due = began + found.seconds * number / chunks
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
        seconds = max(time.perf_counter() - began, 1e-9)
        prompt = len(request.prompt_ids)
        self._stats = self._stats.plus(EngineStats(1, 1, tokens, seconds, prompt, prompt))
        return Completion(
            request_id=request.id,
            token_ids=found.token_ids,
            logprobs=found.logprobs,
            spans=(VersionSpan(0, version),),
            finish_reason=found.finish_reason,
            timing=request.timing(0.0, seconds),
            routed_experts=found.experts(),
        )

    async def load_weights(self, update: WeightUpdate) -> SyncTiming:
        self._version = update.version
        return SyncTiming(update.version, wall_ms=0.0, rpc_ms=0.0)

    async def close(self) -> None: ...


def some_experts(layers: int, k: int) -> RoutedExperts:
    return np.random.default_rng(0).integers(0, 256, (EXPERT_ROWS, layers, k), dtype=np.uint8)


def recorded(
    rollout: Rollout, number: int, tokenizer: Tokenizer, tokens: int, seconds: float, experts: RoutedExperts
) -> Answer:
    """A rollout stretched to almost `tokens` tokens in whole steps, which arrive within half to all of `seconds`.
    `number` selects its duration and its experts. They repeat `experts` [E, layers, k] from that row on: so what is
    served is not in memory before."""
    ids, logprobs = rollout.completion_ids, rollout.logprobs
    step = first_step(ids, tokenizer)
    repeats = max(0, tokens - len(ids)) // max(1, step)
    rows = len(rollout.prompt_ids) + repeats * step + len(ids) - 1
    return Answer(
        token_ids=np.concatenate([np.tile(ids[:step], repeats), ids]),
        logprobs=np.concatenate([np.tile(logprobs[:step], repeats), logprobs]),
        finish_reason=rollout.finish_reason,
        seconds=seconds * (0.5 + 0.5 * (number * GOLDEN % 1)),
        experts=lambda: experts[(np.arange(rows) + number) % len(experts)],
    )


def first_step(ids: Int32, tokenizer: Tokenizer) -> int:
    """The number of tokens of a solution's first step. Repeating it keeps the solution well-formed if steps may repeat.
    If no step ends, all tokens but the last."""
    for end in range(1, len(ids)):
        if tokenizer.decode(ids[:end]).endswith(STEP_ENDS):
            return end
    return max(1, len(ids) - 1)


# --- the workload -----------------------------------------------------------------------------------------------------


class WatchedDispatcher(Dispatcher):
    """Measures the loop's lag while it samples (`during`) and afterwards (`after`)."""

    hz = 100.0
    sampled = 0.0  # when sampling ended

    async def sample(self, orders: Sequence[GroupOrder], call: SampleCall) -> list[Group]:
        self.after = LoopLagMonitor(self.hz)
        async with LoopLagMonitor(self.hz) as self.during:
            groups = await super().sample(orders, call)
        self.sampled = time.perf_counter()
        self.after.start()
        return groups


class LoopWorkload:
    """`samples`: how many will be taken. Everything that they write is kept until the workload is closed."""

    def __init__(
        self, experiment: Experiment, settings: LoopSettings, samples: int, executor: Executor | None = None
    ) -> None:
        self._experiment = _of_one_batch(experiment, settings.rollouts)
        self._executor = executor
        self._settings = settings
        self._samples = samples
        self._stalls: list[dict[str, float]] = []  # of each sample: the longest of each part, in ms
        self._before = 0  # resident bytes when opened
        self.measures: Mapping[str, BenchMetric] = MEASURES
        if HAS_PEAK:
            self.measures = {**MEASURES, "memory_over_payload": MEMORY_MEASURE}

    async def open(self) -> None:
        """Record the completions with the experiment's prover."""
        async with AsyncExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pvg-bench-loop-")))
            experiment = self._experiment
            task = open_task(experiment.task)
            players = Players(experiment, task, executor=self._executor)
            stack.push_async_callback(players.close)
            self._run = RunDirectory.create(folder, "loop", experiment)
            self._ledger = Ledger(self._run, experiment, "bench")
            stack.callback(self._ledger.close)
            await self._ledger.commit(replace(self._ledger.state, phase=Phase.TRAIN_PROVER))
            prompts = prompt_builder(experiment.prompts, experiment.game.protocol, players.base.tokenizer, task)
            parts = (players, prompts, SilentObserver(), asyncio.Event(), Tracer())
            self._session = session_of(experiment, task, self._ledger, *parts, Session)
            await players.ready()
            await self._record()
            # As in the game (pvg.game.players): otherwise the collector scans a million objects of torch again and
            # again, 0.2 s each time.
            gc.collect()
            gc.freeze()
            if HAS_PEAK:
                self._before = resident_bytes("VmRSS")
            self._stack = stack.pop_all()

    async def _record(self) -> None:
        """Sample the batch once with the prover; later the recorded engine serves it."""
        settings, players, task = self._settings, self._session.players, self._session.task
        tokenizer, rollout = players.base.tokenizer, self._experiment.rollout
        orders = prover_orders(self._session)
        self._orders: list[GroupOrder] = orders.batch(0)
        groups = await orders.sample(self._orders, 0)
        await players.engine.close()
        rollouts = [one for group in groups for one in group.rollouts]
        experts = some_experts(settings.expert_layers, settings.experts_per_token)
        stretch = partial(recorded, tokens=settings.tokens, seconds=settings.seconds, experts=experts)
        answers = {one.id: stretch(one, number, tokenizer) for number, one in enumerate(rollouts)}
        self._tokens = sum(len(answer.token_ids) for answer in answers.values())
        players.engine = StandInEngine(rollout.concurrency, lambda asked: answers[asked.id], settings.chunk)
        sampling = Sampling(settings.tokens, (tokenizer.eos_id,))
        self._dispatcher = players.dispatcher = WatchedDispatcher(
            players.engine, task, tokenizer, sampling, rollout.concurrency, players.grading
        )
        self._dispatcher.hz = settings.lag_hz

    def work(self) -> dict[str, Any]:
        settings = self._settings
        return {
            **model_facts(self._session.players.base),
            "task": self._experiment.task.kind,
            "rollouts": settings.rollouts,
            "groups": len(self._orders),
            "prompts": digest_of(order.prompt_ids for order in self._orders),
            "tokens_per_rollout": settings.tokens,
            "chunk": settings.chunk,
            "seconds": settings.seconds,
            "retokenize": settings.retokenize,
            "expert_bytes_per_token": settings.expert_layers * settings.experts_per_token,
            "loss": self._experiment.training.loss.kind,
            "reward": self._experiment.game.reward.kind,
            "seed": self._experiment.seed,
        }

    async def sample(self, index: int) -> dict[str, float]:
        source, watched = self._source(), self._dispatcher
        if HAS_PEAK:
            reset_peak()
        started = time.perf_counter()
        async with LoopLagMonitor(self._settings.lag_hz) as whole:
            batch = await source.next_batch()
            await watched.after.stop()
            batch_s = time.perf_counter() - watched.sampled
            info = PhaseInfo(0, 1, Phase.TRAIN_PROVER.value, "steps", self._samples)
            self._session.report_step(info, index + 1, source.metrics)
            wrote = time.perf_counter()
            with span("checkpoint"):
                async with LoopLagMonitor(self._settings.lag_hz) as committing:
                    await self._ledger.commit(replace(self._ledger.state, step=index + 1))
            write_s = time.perf_counter() - wrote
        wall_s = time.perf_counter() - started
        parts = {"rollout": watched.during, "batch": watched.after, "commit": committing}
        self._stalls.append({part: _longest_ms(monitor.take()) for part, monitor in parts.items()})
        lag = whole.take()
        return {
            "lag_p50_ms": lag.p50_s * 1e3 if lag else 0.0,
            "lag_p99_ms": lag.p99_s * 1e3 if lag else 0.0,
            "lag_max_ms": _longest_ms(lag),
            "rollouts_per_s": len(batch) / wall_s,
            "batch_s": batch_s,
            "write_s": write_s,
            "bytes_written_mb": int(self._ledger.state.shards[-1]["bytes"]) / MB,
            **self._memory(),
        }

    def _memory(self) -> dict[str, float]:
        if not HAS_PEAK:
            return {}
        settings = self._settings
        payload = self._tokens * (ID_AND_LOGPROB + settings.expert_layers * settings.experts_per_token)
        return {"memory_over_payload": (resident_bytes("VmHWM") - self._before) / payload}

    def _source(self) -> GameBatches:
        """A fresh source for each sample: the same batch with an empty score cache."""
        session, players = self._session, self._session.players
        tokenizer, context = players.base.tokenizer, 2 * self._settings.tokens + 1024
        judge: Any = RecordedScoringModel(tokenizer, context)
        scorer = VerifierScorer(
            judge,
            players.template(judge),
            "recorded",
            token_budget=context,
            executor=players.executor,
            prover_fingerprint=None if self._settings.retokenize else tokenizer.fingerprint,
            backend=RecordedScores(),
            reading=players.batching,
        )
        objective = PolicyObjective(self._experiment.training, self._experiment.rollout, tokenizer.pad_id)
        return open_batches(
            session, scorer, FixedVerifier(THRESHOLD), objective, BatchLogprobs(players, objective, players.base)
        )

    def derived(self) -> dict[str, float]:
        """Medians over the samples of the longest stall of each part. (The loop handles several rollouts that arrive
        together in one turn.) The mean tokens of a rollout."""
        medians = {part: statistics.median(stalls[part] for stalls in self._stalls) for part in self._stalls[0]}
        stalls = {f"{part}_stall_ms": value for part, value in medians.items()}
        return stalls | {"mean_tokens": self._tokens / self._settings.rollouts}

    async def close(self) -> None:
        await self._stack.aclose()


def _of_one_batch(experiment: Experiment, rollouts: int) -> Experiment:
    """Batches of `rollouts` rollouts, and a loss without KL, because nothing here computes log-probs."""
    groups = rollouts // experiment.rollout.group_size
    training = experiment.training.model_copy(update={"groups": groups, "kl": Kl(coefficient=0.0)})
    return experiment.model_copy(update={"training": training})


def _longest_ms(window: LagWindow | None) -> float:
    return window.max_s * 1e3 if window is not None else 0.0
