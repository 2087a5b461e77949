"""The models of a run and their owner: the base prover, the engine that samples, and the verifier of the round.

One executor thread does all torch work of a run. So the event loop stays responsive, and two pools of compute threads
never compete for the same cores. Two other threads have no pool: one scores rollouts while the trainer works
(`Players.scoring`), the other does Python and numpy work on a whole batch (`off_loop`).
"""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import nn

from pvg.config.experiment import Experiment
from pvg.config.operation import LocalCluster, RayCluster, has_workers, ranks_of
from pvg.config.rollout import Rollouts
from pvg.config.training import Training
from pvg.errors import ConfigurationError, MissingRequirementError, counted
from pvg.game.roles import PromptSection, prompt_renderer
from pvg.game.states import Phase
from pvg.game.statistics import sync_metrics
from pvg.models import open_model, pick_device
from pvg.models.compute import ComputeExecutor, allow_tf32, compute_executor, width_of
from pvg.models.heads import GenerativeHead, VerifierModel
from pvg.models.language_model import LanguageModel, LowRankAdapter
from pvg.models.logprobs import refuse_without_head
from pvg.models.sources import Rounded, open_learner, open_verifier
from pvg.models.tokenizer import Tokenizer
from pvg.records import Int32, Role
from pvg.rollout import EngineSetup, open_engine
from pvg.rollout.dispatcher import Dispatcher
from pvg.rollout.engine import Engine, Sampling
from pvg.servers.publishing import Publisher
from pvg.store.pairs import PairStream
from pvg.tasks.task import ConcealsText, Task, problems_of_half
from pvg.telemetry.events import Events, SilentEvents
from pvg.telemetry.spans import run_in
from pvg.telemetry.waits import CalmCollector, finished, usable_cores
from pvg.training.batch import PolicyBatch
from pvg.training.trainer import OptimizerSettings, trainable_parameters
from pvg.verifier.data import Head, PairSource, VerifierBatch, VerifierTemplate
from pvg.verifier.scorer import CACHE_ENTRIES, ScoreBackend, ScoreCache, ScoringModel, VerifierScorer
from pvg.workers.ray_cluster import RayClient

if TYPE_CHECKING:
    from torch import Tensor

    from pvg.verifier.vllm_backend import VerifierServing
    from pvg.workers.models import ModelInWorkers
    from pvg.workers.pool import Supply, WorkerPool
    from pvg.workers.ranks import ModelInRanks, RankGroup
    from pvg.workers.ray_servers import RayServers

T = TypeVar("T")


def refuse_without_ranks(experiment: Experiment, ranks: RankGroup | None) -> None:
    """Raises ConfigurationError if the experiment has trainer ranks, and this process has none to train with."""
    if ranks is None and (count := ranks_of(experiment.cluster)) is not None:
        raise ConfigurationError(
            f"cluster.trainer_ranks = {count} needs {count} processes, which only pvg train and torchrun start.",
            "Leave out cluster.trainer_ranks.",
        )


class Players:
    """Opens the base prover and its engine; `close` frees both. `executor`: stays the caller's if given. `supply`
    starts the workers; None: they start only now. `ranks`: the processes that train the prover with this one."""

    def __init__(
        self,
        experiment: Experiment,
        task: Task,
        events: Events | None = None,
        executor: Executor | None = None,
        run: str = "bench",
        supply: Supply | None = None,
        ranks: RankGroup | None = None,
    ) -> None:
        self._experiment = experiment
        self.seed, self.adapters = experiment.seed, experiment.training.adapters
        self.task, self.rollout, self.models = task, experiment.rollout, experiment.models
        self.device = pick_device(experiment.models.device)
        allow_tf32(self.device, self.models.compute_dtype)
        self.servers: RayServers | None = None
        if experiment.server_cluster:
            from pvg.workers.ray_servers import RayServers

            self.servers = RayServers(experiment, events)
        self._supply = supply
        self.workers = self._worker_pool(events)
        self._ranks, self._events = ranks, events or SilentEvents()
        self._owns_executor = executor is None
        self.executor: Executor = compute_executor(experiment.models.threads) if executor is None else executor
        try:
            reserving = self.servers or self._supply
            if self.device.type == "cuda" and isinstance(reserving, RayClient):
                self.device = torch.device("cuda", reserving.own_gpu())
            self._check_ranks()
            self.base: LanguageModel = finished(
                self.executor.submit(open_model, self.models.prover, self.device, self.models.dtype)
            )
        except BaseException:
            self._end_supplies()
            raise
        if isinstance(self.executor, ComputeExecutor):
            self.executor.settle(width_of(self.base.module))
        self.threads: int = finished(self.executor.submit(torch.get_num_threads))
        rollout, events = self.rollout, events or SilentEvents()
        self.verifier_serving: VerifierServing | None = None
        try:
            refuse_without_head(self.base.module)
            if experiment.verifier.engine == "vllm":
                from pvg.verifier.vllm_backend import VerifierServing

                self.verifier_serving = VerifierServing(experiment, self.executor, events, run)
            if self.workers is not None:
                from pvg.workers.engine import WorkerEngine

                self.engine: Engine = WorkerEngine(self.workers)
            else:
                servers = partial(self._engine_on_servers, events, run)
                replayed = experiment.training.router_replay
                sampled = open_learner(self, 0) if experiment.samples_on_base else self.base
                setup = EngineSetup(
                    rollout, sampled, self.executor, events, replayed, servers, experiment.sampling_dtype
                )
                self.engine = open_engine(setup)
        except BaseException:  # no request has reached a server yet
            self._close_base()
            self._end_supplies()
            raise
        self.publisher = Publisher(self.engine, events=events)
        self._collector: CalmCollector | None = None
        sampling = Sampling(
            max_tokens=rollout.max_tokens, stop_ids=self.base.tokenizer.end_ids, temperature=rollout.temperature
        )
        self.scoring = self._scoring_executor()
        self.grading = ThreadPoolExecutor(1, "pvg-grade")
        self.batching: Executor = ThreadPoolExecutor(1, "pvg-batch")  # for `off_loop` and for the input of scorers
        # Workers get all requests of a call at once: which of them wait must not depend on the workers' speed.
        concurrency = rollout.concurrency if self.workers is None else self.engine.max_in_flight
        self.dispatcher = Dispatcher(self.engine, task, self.base.tokenizer, sampling, concurrency, self.grading)

    def _worker_pool(self, events: Events | None) -> WorkerPool | None:
        """The workers that sample, score and train; None if this process does."""
        cluster = self._experiment.cluster
        if not isinstance(cluster, LocalCluster | RayCluster) or not has_workers(cluster):
            return None
        if self._experiment.server_cluster is not None:
            return None
        if self.device.type not in ("cpu", "cuda"):
            raise ConfigurationError(
                f"Workers of cluster = {cluster.kind!r} cannot compute on {self.device.type}, which models.device = "
                f"{self.models.device!r} is here.",
                "Set models.device to cpu, or cluster to none.",
            )
        from pvg.workers.choice import open_supply
        from pvg.workers.models import ScoringSlots
        from pvg.workers.pool import WorkerPool

        self._supply = self._supply or open_supply(self._experiment)
        assert self._supply is not None
        workers = WorkerPool(self._experiment, self._supply, events, self.device.type)
        self._slots = ScoringSlots(workers)
        if self.device.type == "cuda" and events is not None:
            events.event("workers", event="experimental", why="No run has used workers on GPUs yet")
        return workers

    def _engine_on_servers(self, events: Events, run: str) -> Engine:
        from pvg.rollout.vllm_engine import open_vllm_engine

        return open_vllm_engine(self._experiment, self.base, self.executor, events, run, self._canary_prompts)

    def _check_ranks(self) -> None:
        count = ranks_of(self._experiment.cluster)
        if count is None or self._ranks is None:
            return
        if self.device.type not in ("cpu", "cuda"):
            raise ConfigurationError(
                f"cluster.trainer_ranks = {count} computes on CPUs or NVIDIA GPUs, but models.device = 'auto' is "
                f"{self.device.type} here.",
                "Set models.device to cpu.",
            )
        if self.device.type == "cuda" and self._ranks.launch.here > torch.cuda.device_count():
            raise MissingRequirementError(
                f"cluster.trainer_ranks = {count} needs a GPU per rank, but torch sees {torch.cuda.device_count()}.",
                "Set fewer ranks, or models.device to cpu.",
            )
        if self._ranks.launch.lost:
            self._events.event("workers", event="rank lost", why=self._ranks.launch.lost)
        elif self.device.type == "cuda":
            self._events.event("workers", event="experimental", why="No run has used trainer ranks on GPUs yet")

    def _end_supplies(self) -> None:
        """End what starts other processes, none of which has begun to work."""
        if (started := self.servers or self._supply) is not None:
            started.end()

    def _scoring_executor(self) -> ThreadPoolExecutor | None:
        """A thread that scores prefetched rollouts while the trainer works on earlier ones. None without prefetch, with
        scores from servers, or if the compute threads occupy every core. Also None for a verifier on the base prover's
        weights: they share modules, and two threads cannot change the attention of these at the same time."""
        ahead = (
            self._experiment.rollout.prefetch.kind != "none" and self.verifier_serving is None and self.workers is None
        )
        if not ahead or self._experiment.verifier_is_on_base or self.threads >= usable_cores():
            return None
        return ThreadPoolExecutor(1, "pvg-score", initializer=torch.set_num_threads, initargs=(1,))

    @property
    def machine(self) -> str:
        """What the last bits of results depend on."""
        cluster, workers = self._experiment.cluster, ""
        if self.workers is not None:
            workers = f", {counted(self.workers.count, 'worker')}"
        if isinstance(cluster, LocalCluster | RayCluster) and cluster.trainers is not None:
            workers += f", {counted(cluster.trainers, 'trainer')}"
        if (ranks := ranks_of(cluster)) is not None:
            workers += f", {counted(ranks, 'trainer rank')}"
        threads = counted(self.threads, "thread")
        return f"torch {torch.__version__} on {self.device.type}, {threads}{workers}"

    async def ready(self, *, scoring: bool = True, longest: int = 0) -> None:
        """Wait until the engine can serve, and with `scoring` the verifier's servers too. An engine that does not know
        its weights gets the base prover's. This tests the whole path of a weight update before the game depends on it.
        `longest`: see Engine.ready.

        Then keeps the garbage collector from stopping the event loop (`CalmCollector`).
        """
        if self.workers is not None:
            await self.workers.start()
        if self.servers is not None:
            from pvg.rollout.vllm_engine import VllmEngine

            assert isinstance(self.engine, VllmEngine)
            await self.servers.start(self.engine.served)
        await self.engine.ready(longest)
        if scoring and self.verifier_serving is not None:
            await self.verifier_serving.ready()
        if self.engine.version < 0:
            await self.publish(self.base.weights(), 0)
        self._close_collector()
        self._collector = CalmCollector()

    async def compute(self, work: Callable[[], T]) -> T:
        """Run torch work in the compute thread."""
        return await run_in(self.executor, work)

    async def off_loop(self, work: Callable[[], T]) -> T:
        """Run Python or numpy work on a whole batch in a thread. It must not use data that tasks of the event loop
        change at the same time. Its time counts for the caller's span."""
        return await run_in(self.batching, work)

    async def publish(
        self, tensors: Mapping[str, Tensor], version: int, adapter: LowRankAdapter | None = None
    ) -> dict[str, float]:
        """Send a policy to the engine: the whole model's tensors, and its adapter if it has one. Returns metrics."""
        in_flight = self.engine.requests_in_flight
        timing = await self.publisher.publish(tensors, version, adapter)
        return sync_metrics(timing, in_flight)

    @asynccontextmanager
    async def base_policy(self) -> AsyncIterator[Dispatcher]:
        """The base prover, which samples on a torch engine of its own."""
        rollout, sampling, dtype = self._experiment.rollout, self.dispatcher.sampling, self._experiment.sampling_dtype
        await self.compute(partial(self.base.move, self.device))
        engine = open_engine(EngineSetup(rollout, self.base, self.executor, SilentEvents(), dtype=dtype))
        try:
            yield Dispatcher(engine, self.task, self.base.tokenizer, sampling, rollout.concurrency)
        finally:
            await engine.close()

    @asynccontextmanager
    async def of_verifier(self, verifier: GenerativeHead, task: Task, rollout: Rollouts) -> AsyncIterator[Players]:
        """Players of the same run with another policy: the verifier, which writes verdicts. It has its own torch
        engine for sampling, and `task` grades its verdicts. All other parts are shared. The caller owns the
        verifier."""
        found, policy = copy.copy(self), verifier.policy
        # Rounding would remove small updates of adapters from merged weights.
        dtype = None if self._experiment.verifier.adapters.rank else self._experiment.sampling_dtype
        found.base, found.task, found.rollout = policy, task, rollout
        found.engine = open_engine(EngineSetup(rollout, policy, self.executor, SilentEvents(), dtype=dtype))
        found.publisher = Publisher(found.engine, of="verifier")
        sampling = Sampling(rollout.max_tokens, policy.tokenizer.end_ids, rollout.temperature)
        found.dispatcher = Dispatcher(found.engine, task, policy.tokenizer, sampling, rollout.concurrency, self.grading)
        try:
            yield found
        finally:
            await found.engine.close()

    @property
    def learner_device(self) -> torch.device:
        """Where a prover whose weights all train has them. The GPUs of ranks have only parts of them."""
        return self.device if ranks_of(self._experiment.cluster) is None else torch.device("cpu")

    async def place_base(self, phase: Phase) -> None:
        """Keep the base prover's weights on the CPU in a phase in which no adapters of this process are on them."""
        needed = self._experiment.verifier_is_on_base or self._experiment.samples_on_base
        needed |= phase is Phase.TRAIN_PROVER and self.adapters.rank > 0
        here = needed and self.workers is None
        await self.compute(partial(self.base.move, self.device if here else torch.device("cpu")))
        await self.compute(self.base.rest)

    def open_verifier(self, round_: int = 0, member: int = 0, like: VerifierModel | None = None) -> VerifierModel:
        """A verifier at its initial weights; the caller closes it. `member`: its number in an ensemble, which varies
        the random part of these weights. `like`: another member, with which it shares frozen tensors. Raises what
        `attach_adapters` and `build_verifier` raise."""
        section, models = self._experiment.verifier, self._experiment.models
        # The proof that servers have the initial weights computes them in their own precision.
        rounded: Rounded = "reference" if self.verifier_serving is None else "none"
        return open_verifier(section, models, self.seed, self.device, self.base, round_, member, like, rounded)

    def open_frozen_verifier(self, like: VerifierModel | None = None) -> VerifierModel:
        """One for a prover phase: on the CPU if workers or servers compute its scores, and this process nothing."""
        elsewhere, experiment = self.workers is not None or self.verifier_serving is not None, self._experiment
        trains, section = experiment.game.schedule.kind == "simultaneous", experiment.verifier
        device = torch.device("cpu") if elsewhere and not trains else self.device
        rounded: Rounded = "none" if elsewhere else "reference" if trains else "all"
        return open_verifier(section, self.models, self.seed, device, self.base, like=like, rounded=rounded)

    def divided_workers(self) -> AbstractContextManager[None]:
        """Divides the duties of the workers (`cluster.trainers`): for a phase in which the prover trains on rollouts
        sampled ahead. Open the phase and its models inside."""
        return nullcontext() if self.workers is None else self.workers.divided()

    def prover_workers(
        self, training: Training, rollout: Rollouts, learner: nn.Module
    ) -> ModelInWorkers[PolicyBatch] | None:
        """Computes the gradients of `learner` in the workers; None without workers, or if ranks train it. The sections
        say its loss. The caller closes it."""
        if self.workers is None or ranks_of(self._experiment.cluster) is not None:
            return None
        from pvg.workers.models import ModelInWorkers, policy_fields, policy_shards

        fields, parameters = policy_fields(training, rollout), trainable_parameters(learner)
        return ModelInWorkers(self.workers, fields, parameters, policy_shards)

    def prover_ranks(
        self, training: Training, rollout: Rollouts, learner: nn.Module, optimizer: OptimizerSettings
    ) -> ModelInRanks | None:
        """Trains `learner` in the ranks; None without ranks. The caller closes it."""
        refuse_without_ranks(self._experiment, self._ranks)
        if ranks_of(self._experiment.cluster) is None or self._ranks is None:
            return None
        from pvg.workers.ranks import ModelInRanks, rank_fields

        fields = rank_fields(training, rollout, self.models, optimizer, self.device)
        return ModelInRanks(self._ranks, self.executor, fields, trainable_parameters(learner), self._events)

    def verifier_workers(self, verifier: VerifierModel) -> ModelInWorkers[VerifierBatch] | None:
        """As `prover_workers`, for a verifier in training."""
        if self.workers is None:
            return None
        from pvg.workers.models import ModelInWorkers, pair_shards

        return ModelInWorkers(self.workers, {"what": "pairs"}, trainable_parameters(verifier), pair_shards)

    def template(self, verifier: ScoringModel) -> VerifierTemplate:
        return template_of(self._experiment.prompts, self.task, verifier)

    def pair_source(self, stream: PairStream, verifier: VerifierModel, start_step: int, steps: int = 0) -> PairSource:
        """The batches of `stream` for the training of `verifier`, from step `start_step` on. The caller closes it.
        While workers compute a gradient, this process makes the next batch, if its number is below `steps`."""
        return PairSource(
            stream,
            self.template(verifier),
            verifier,
            self._experiment.verifier,
            executor=self.executor if self.workers is None else self.batching,
            start_step=start_step,
            source_fingerprint=self.base.tokenizer.fingerprint,
            precision=self.models.compute_dtype,
            ahead=0 if self.workers is None else steps,
        )

    def scorer(self, verifier: ScoringModel, *, beside_trainer: bool = False) -> VerifierScorer:
        """A scorer with an empty cache; the caller still owns the verifier. `beside_trainer`: score in the thread
        `scoring`, if there is one. The caller must not change the verifier's weights while it scores."""
        section, template = self._experiment.verifier, self.template(verifier)
        backend: ScoreBackend | None = None
        if self.verifier_serving is not None:
            from pvg.verifier.vllm_backend import VllmBackend

            assert isinstance(verifier, VerifierModel), "pvg.config.rules refuses ensembles on servers"
            references = ScoreCache(CACHE_ENTRIES)
            backend = VllmBackend(self.verifier_serving, verifier, template.key, references)
        elif self.workers is not None:
            from pvg.workers.models import WorkerBackend

            backend = WorkerBackend(self._slots, verifier, section.micro_batch_tokens)
        return VerifierScorer(
            verifier,
            template,
            verifier.version(),
            token_budget=section.micro_batch_tokens,
            precision=self.models.compute_dtype,
            executor=self.scoring if beside_trainer and self.scoring is not None else self.executor,
            prover_fingerprint=self.base.tokenizer.fingerprint,
            backend=backend,
            reading=self.batching,
            max_rows=self.rollout.chunk,
        )

    def _canary_prompts(self) -> list[Int32]:
        """Prompts for the first problems of the prover's half, as in training."""
        render = prompt_renderer(self._experiment.prompts, self.base.tokenizer)
        problems = problems_of_half(self.task, "prover")[: self._experiment.weights.canary_prompts]
        return [render(problem, tuple(Role)[number % 2]) for number, problem in enumerate(problems)]

    def _close_collector(self) -> None:
        if self._collector is not None:
            self._collector.close()
            self._collector = None

    async def close(self) -> None:
        self._close_collector()
        async with AsyncExitStack() as rest:  # closes all of them, even if one fails
            rest.callback(self._close_base)
            for executor in (self.batching, self.grading, self.scoring):
                if executor is not None:
                    rest.callback(executor.shutdown)
            if self.workers is not None:
                rest.push_async_callback(self.workers.close)
            if self.servers is not None:
                rest.push_async_callback(self.servers.close)
            rest.push_async_callback(self.engine.close)
            if self.verifier_serving is not None:
                await self.verifier_serving.close()

    def _close_base(self) -> None:
        self.base.close()
        if self._owns_executor:
            self.executor.shutdown(wait=True)


def template_of(prompts: PromptSection, task: Task, verifier: ScoringModel) -> VerifierTemplate:
    """What `verifier` reads of a solution of `task`."""
    return verifier_template(prompts, task, verifier.tokenizer, verifier.reads)


def verifier_template(prompts: PromptSection, task: Task, tokenizer: Tokenizer, reads: Head) -> VerifierTemplate:
    """What a verifier with this tokenizer reads of a solution of `task`. `reads`: the built-in head whose input it
    takes."""
    shown = task.shown if isinstance(task, ConcealsText) else None
    return VerifierTemplate(tokenizer, prompts.kind, reads, shown)
