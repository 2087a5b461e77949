"""The models of a run and their owner: the base prover, the engine that samples, and the verifier of the round.

One executor thread does all torch work of a run. So the event loop stays responsive, and two pools of compute threads
never compete for the same cores. Two other threads have no pool: one scores rollouts while the trainer works
(`Players.scoring`), the other does Python and numpy work on a whole batch (`off_loop`).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, TypeVar

import torch

from pvg.config import sections
from pvg.config.experiment import Experiment
from pvg.game.roles import prompt_renderer
from pvg.game.seeds import seed_for
from pvg.models import open_model, pick_device
from pvg.models.adapters import attach_adapters
from pvg.models.compute import ComputeExecutor, compute_executor, width_of
from pvg.models.heads import VerifierModel, build_verifier
from pvg.models.language_model import LanguageModel
from pvg.records import Int32, Role
from pvg.rollout import EngineSetup, open_engine
from pvg.rollout.dispatcher import Dispatcher
from pvg.rollout.engine import Engine, Sampling
from pvg.rollout.grading import grading_executor
from pvg.servers.publisher import Publisher
from pvg.servers.update import LowRankAdapter, SyncTiming
from pvg.tasks.task import ConcealsText, Task, problems_of_half
from pvg.telemetry.core_waits import usable_cores
from pvg.telemetry.events import Events, SilentEvents
from pvg.telemetry.spans import run_in
from pvg.verifier.cache import ScoreCache
from pvg.verifier.protocol import ScoringModel
from pvg.verifier.scorer import VerifierScorer
from pvg.verifier.template import VerifierTemplate
from pvg.verifier.vllm_backend import VerifierServing, VllmBackend

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")


class Players:
    """Opens the base prover and its engine; `close` frees both. `executor`: stays the caller's if given. `opener`
    creates the engine."""

    def __init__(
        self,
        experiment: Experiment,
        task: Task,
        events: Events | None = None,
        executor: Executor | None = None,
        run: str = "bench",
        opener: Callable[[EngineSetup], Engine] = open_engine,
    ) -> None:
        self.experiment = experiment
        self.task = task
        self.device = pick_device(experiment.models.device)
        self._owns_executor = executor is None
        self.executor: Executor = compute_executor(experiment.models.threads) if executor is None else executor
        self.base: LanguageModel = self.executor.submit(open_model, experiment.models.prover, self.device).result()
        if isinstance(self.executor, ComputeExecutor):
            self.executor.settle(width_of(self.base.module))
        self.threads: int = self.executor.submit(torch.get_num_threads).result()
        rollout, events = experiment.rollout, events or SilentEvents()
        self.verifier_serving: VerifierServing | None = None
        try:
            if experiment.verifier.engine == "vllm":
                self.verifier_serving = VerifierServing(experiment, self.executor, events, run)
            self.engine = opener(EngineSetup(experiment, self.base, self.executor, events, run, self._canary_prompts))
        except BaseException:  # no request has reached a server yet
            self._let_go()
            raise
        self.publisher = Publisher([self.engine], events=events)
        self.last_sync: SyncTiming | None = None  # of the latest update
        sampling = Sampling(
            max_tokens=rollout.max_tokens,
            stop_ids=(self.base.tokenizer.eos_id,),
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
        )
        self.scoring = self._scoring_executor()
        self.grading = grading_executor(rollout)
        self.batching: Executor = ThreadPoolExecutor(1, "pvg-batch")  # for `off_loop` and for the input of scorers
        self.dispatcher = Dispatcher(
            self.engine, task, self.base.tokenizer, sampling, rollout.concurrency, self.grading
        )

    def _scoring_executor(self) -> ThreadPoolExecutor | None:
        """A thread that scores prefetched rollouts while the trainer works on earlier ones. None without prefetch, with
        scores from servers, or if the compute threads occupy every core. Also None for a verifier on the base prover's
        weights: they share modules, and two threads cannot change the attention of these at the same time."""
        ahead = self.experiment.rollout.prefetch > 0 and self.verifier_serving is None
        if not ahead or self.verifier_is_on_base or self.threads >= usable_cores():
            return None
        return ThreadPoolExecutor(1, "pvg-score", initializer=torch.set_num_threads, initargs=(1,))

    @property
    def machine(self) -> str:
        """What the last bits of results depend on."""
        return f"torch {torch.__version__} on {self.device.type}, {self.threads} threads"

    async def ready(self, *, scoring: bool = True) -> None:
        """Wait until the engine can serve, and with `scoring` the verifier's servers too. An engine that does not know
        its weights gets the base prover's. This tests the whole path of a weight update before the game depends on it.

        Then freezes the objects in memory (`gc.freeze`). Otherwise the garbage collector scans a million objects of
        torch and transformers repeatedly, and each scan blocks the event loop for 0.1 to 0.5 s.
        """
        await self.engine.ready()
        if scoring and self.verifier_serving is not None:
            await self.verifier_serving.ready()
        if self.engine.version < 0:
            await self.publish(self.base.weights(), 0)
        gc.collect()
        gc.freeze()

    async def compute(self, work: Callable[[], T]) -> T:
        """Run torch work in the compute thread."""
        return await run_in(self.executor, work)

    async def off_loop(self, work: Callable[[], T]) -> T:
        """Run Python or numpy work on a whole batch in a thread. It must not use data that the event loop's tasks
        change meanwhile. Its time counts for the caller's span."""
        return await run_in(self.batching, work)

    async def publish(self, tensors: Mapping[str, Tensor], version: int, adapter: LowRankAdapter | None = None) -> None:
        """Send a policy to the engine: the whole model's tensors, and its adapter if it has one."""
        (self.last_sync,) = await self.publisher.publish(tensors, version, adapter)

    def open_verifier(self, round_: int = 0, member: int = 0, like: VerifierModel | None = None) -> VerifierModel:
        """A verifier at its initial weights; the caller closes it. `member`: its number in an ensemble, which varies
        the random part of these weights. `like`: another member, with which it shares frozen tensors. Raises what
        `attach_adapters` and `build_verifier` raise."""
        return open_verifier(self.experiment, self.device, self.base, round_, member, like)

    @property
    def verifier_is_on_base(self) -> bool:
        """Whether the verifier is adapters on the base prover's own weights."""
        return verifier_is_on_base(self.experiment)

    def template(self, verifier: ScoringModel) -> VerifierTemplate:
        return template_of(self.experiment, self.task, verifier)

    def scorer(self, verifier: ScoringModel, *, beside_trainer: bool = False) -> VerifierScorer:
        """A scorer with an empty cache; the caller still owns the verifier. `beside_trainer`: score in the thread
        `scoring`, if there is one. The caller must not change the verifier's weights while it scores."""
        section, template = self.experiment.verifier, self.template(verifier)
        backend = None
        if self.verifier_serving is not None:
            assert isinstance(verifier, VerifierModel), "pvg.config.rules refuses ensembles on servers"
            references = ScoreCache(section.cache_entries)
            backend = VllmBackend(self.verifier_serving, verifier, template.key, references)
        return VerifierScorer(
            verifier,
            template,
            verifier.version(),
            cache_entries=section.cache_entries,
            token_budget=section.score_tokens,
            executor=self.scoring if beside_trainer and self.scoring is not None else self.executor,
            prover_fingerprint=self.base.tokenizer.fingerprint,
            backend=backend,
            reading=self.batching,
        )

    def _canary_prompts(self) -> list[Int32]:
        """Prompts for the first problems of the prover's half, as in training."""
        render = prompt_renderer(self.experiment.rollout.prompts, self.base.tokenizer)
        problems = problems_of_half(self.task, "prover")[: self.experiment.weights.canary_prompts]
        return [render(problem, tuple(Role)[number % 2]) for number, problem in enumerate(problems)]

    async def close(self) -> None:
        gc.unfreeze()
        async with AsyncExitStack() as rest:  # closes all of them, even if one fails
            rest.callback(self._let_go)
            for executor in (self.batching, self.grading, self.scoring):
                if executor is not None:
                    rest.callback(executor.shutdown)
            rest.push_async_callback(self.engine.close)
            if self.verifier_serving is not None:
                await self.verifier_serving.close()

    def _let_go(self) -> None:
        self.base.close()
        if self._owns_executor:
            self.executor.shutdown(wait=True)


def open_verifier(
    experiment: Experiment,
    device: torch.device,
    base: LanguageModel | None,
    round_: int = 0,
    member: int = 0,
    like: VerifierModel | None = None,
) -> VerifierModel:
    """See `Players.open_verifier`. Without the `base` prover, a verifier that adapts it opens its own copy."""
    section, models, place = experiment.verifier, experiment.models, (round_, "verifier-start", member)
    seed = seed_for(experiment.seed, *place)
    if not section.lora_rank:
        model = open_model(models.verifier, device)
    elif base is not None and verifier_is_on_base(experiment):
        model = _with_adapters(section, base, seed)
    else:
        with open_model(models.verifier, device) if like is None else like.start_model() as start:
            model = _with_adapters(section, start, seed)
    # What a user's head draws must be the same whenever this run opens one: a version knows what is trained alone.
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed_for(experiment.seed, "verifier-head"))
        verifier = build_verifier(section, model)
    if like is not None:
        verifier.share_with(like)
    if member:  # the first one is what a verifier without an ensemble is
        verifier.start_elsewhere(seed)
    return verifier


def verifier_is_on_base(experiment: Experiment) -> bool:
    """See `Players.verifier_is_on_base`."""
    return bool(experiment.verifier.lora_rank) and experiment.models.verifier == experiment.models.prover


def _with_adapters(section: sections.Verifier, start: LanguageModel, seed: int) -> LanguageModel:
    return attach_adapters(start, section.lora_rank, section.lora_alpha, seed, shared=True, section="verifier")


def template_of(experiment: Experiment, task: Task, verifier: ScoringModel) -> VerifierTemplate:
    """What `verifier` reads of a solution of `task`."""
    shown = task.shown if isinstance(task, ConcealsText) else None
    return VerifierTemplate(verifier.tokenizer, experiment.rollout.prompts, verifier.reads, shown)
