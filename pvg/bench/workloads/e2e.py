"""Whole steps of the game: sample, grade, score, reward, credit, reference, train, publish.

The game's prover phase (pvg.game.prover_phase) plays the steps against the untrained verifier, with threshold 0. Every
sample is the first steps of a fresh phase: weights, optimizer, caches and seeds are reset, so each sample does the same
work, up to floating-point ties. Nothing is committed; a game does that every `store.commit_every` steps.

The measures begin when the start weights have reached the engine, as the steps of a game do. Resetting is the part
`reset` of the budget and is included in `wall_s`.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pvg.bench.runner import RESET
from pvg.bench.workloads import BenchMetric, BenchSettings, Workload, workload_settings
from pvg.config.base import Count, Section
from pvg.config.experiment import Experiment
from pvg.errors import ConfigurationError
from pvg.game.ledger import Ledger
from pvg.game.players import Players
from pvg.game.prompt_checks import check_prompts_fit
from pvg.game.prover_phase import open_prover_phase
from pvg.game.roles import prompt_builder
from pvg.game.run import session_of
from pvg.game.session import Session
from pvg.game.states import Phase
from pvg.game.verifier_phase import FixedVerifier
from pvg.models.heads import VerifierModel
from pvg.models.language_model import LanguageModel
from pvg.models.sources import open_learner
from pvg.records import Rollout
from pvg.store.run_directory import RunDirectory
from pvg.tasks import open_task
from pvg.tasks.task import Task
from pvg.telemetry.events import PhaseInfo, Progress, SilentObserver
from pvg.telemetry.spans import Tracer, span

THRESHOLD = 0.0
# Those of a step's metrics that show how the work was done; averaged over the steps of the last sample.
SHOWN = (
    "completion_tokens",
    "truncated",
    "malformed",
    "engine_batch",
    "prefix_share",
    "padding",
    "cache_hit_rate",
    "zero_signal",
    "staleness",
)


class EndToEndSettings(Section):
    """The `[workload]` table: optimizer steps per sample."""

    steps: Count = 1


def make(settings: BenchSettings) -> Workload:
    workload = workload_settings(EndToEndSettings, settings)
    check(settings.experiment, workload.steps)
    return EndToEnd(settings.experiment, workload.steps, settings.executor)


def check(experiment: Experiment, steps: int) -> None:
    """Raises ConfigurationError if samples of `steps` optimizer steps would not all train on the same whole batches."""
    if steps % experiment.training.minibatches:
        raise ConfigurationError(
            f"workload.steps = {steps} ends within a batch of training.minibatches = "
            f"{experiment.training.minibatches} steps, so rollouts would be sampled but not trained on.",
            f"Set workload.steps to a multiple of {experiment.training.minibatches}.",
        )
    if experiment.game.stop != "steps":
        raise ConfigurationError(
            f"game.stop = {experiment.game.stop!r} may end a sample early.", "Set game.stop = 'steps' for a benchmark."
        )


class ScratchLedger(Ledger):
    """Counts the rollouts and their tokens but keeps none, so that memory does not grow from sample to sample."""

    completion_tokens = 0
    rollouts = 0

    def keep(self, rollouts: Sequence[Rollout]) -> None:
        self.rollouts += len(rollouts)
        self.completion_tokens += sum(len(rollout.completion_ids) for rollout in rollouts)


@dataclass
class BenchSession(Session):
    """Commits nothing; records when its first step began."""

    ledger: ScratchLedger
    began: float = 0.0

    def due(self, step: int, total: int) -> bool:
        return False

    def first_step(self) -> None:
        super().first_step()
        self.began = time.perf_counter()


@dataclass
class StepWatcher(SilentObserver):
    steps: list[Mapping[str, float]] = field(default_factory=list)

    def progressed(self, progress: Progress) -> None:
        self.steps.append(progress.metrics)


class EndToEnd:
    """See the module. One sample is `steps` optimizer steps from the start."""

    measures: Mapping[str, BenchMetric] = {
        "step_s": BenchMetric("s", "lower"),  # of an optimizer step, from its prompts to its published weights
        "steps_per_hour": BenchMetric("steps/h", "higher"),
        "tokens_per_s": BenchMetric("tokens/s", "higher"),  # of completions
        "rollouts_per_s": BenchMetric("rollouts/s", "higher"),
    }

    def __init__(self, experiment: Experiment, steps: int, executor: Executor | None = None) -> None:
        self._experiment, self._steps_of_sample, self._executor = experiment, steps, executor
        self._stack = AsyncExitStack()
        self._steps: list[Mapping[str, float]] = []  # metrics of the steps of the newest sample

    async def open(self) -> None:
        async with AsyncExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pvg-bench-")))
            self._session = open_bench_session(self._experiment, folder, stack, self._executor)
            players = self._session.players
            await players.ready()
            stack.enter_context(players.divided_workers())
            self._learner: LanguageModel = stack.enter_context(open_learner(players, round_=0))
            self._verifier: VerifierModel = players.open_verifier()
            stack.callback(self._verifier.close)
            self._stack = stack.pop_all()

    def work(self) -> dict[str, Any]:
        experiment, players = self._experiment, self._session.players
        rollout, training, game = experiment.rollout, experiment.training, experiment.game
        return {
            "prover": players.base.name,
            "prover_parameters": players.base.num_parameters,
            "verifier": experiment.models.verifier.source,
            "verifier_head": experiment.verifier.head.kind,
            "task": experiment.task.model_dump(mode="json", exclude_none=True),
            "steps": self._steps_of_sample,
            "groups": training.groups,
            "group_size": rollout.group_size,
            "minibatches": training.minibatches,
            "max_tokens": rollout.max_tokens,
            "temperature": rollout.temperature,
            "top_p": 1.0,  # fixed: so that `pvg compare` takes reports of versions with this setting
            "top_k": 0,
            "prompts": experiment.prompts.kind,
            "sneaky_share": game.sneaky_share,
            "reward": game.reward.kind,
            "loss": training.loss.kind,
            "kl": training.kl.coefficient,
            "seed": experiment.seed,
        }

    async def sample(self, index: int) -> dict[str, float]:
        session, steps = self._session, self._steps_of_sample
        players, session.observer = session.players, (watcher := StepWatcher())
        with span(RESET):
            await players.compute(lambda: self._learner.load_weights(players.base.weights()))
            info = PhaseInfo(0, 1, Phase.TRAIN_PROVER.value, "steps", steps)
            phase = open_prover_phase(session, info, self._verifier, FixedVerifier(THRESHOLD), self._learner)
            phase.version = players.engine.version  # play() publishes the start weights as the version after it
            session.ledger.completion_tokens = session.ledger.rollouts = 0
        await phase.play()
        seconds = time.perf_counter() - session.began
        self._steps = watcher.steps
        return {
            "step_s": seconds / steps,
            "steps_per_hour": 3600 * steps / seconds,
            "tokens_per_s": session.ledger.completion_tokens / seconds,
            "rollouts_per_s": session.ledger.rollouts / seconds,
        }

    def derived(self) -> dict[str, float]:
        """Means over the steps of the last sample; pvg/telemetry/catalogue.toml has their names. (The runner adds the
        shares of the budget.)"""
        found = {}
        for name in SHOWN:
            values = [step[name] for step in self._steps if name in step]
            if values:
                found[name] = sum(values) / len(values)
        return found

    async def close(self) -> None:
        await self._stack.aclose()


def open_bench_session(
    experiment: Experiment,
    folder: Path,
    stack: AsyncExitStack,
    executor: Executor | None = None,
    task: Task | None = None,
) -> BenchSession:
    """As pvg.game.run.open_session, but under the tracer of the benchmark. The session's tracer drives no task. `task`:
    in place of the experiment's."""
    task = task or open_task(experiment.task)
    ledger = ScratchLedger(RunDirectory.create(folder, "e2e", experiment), experiment, "bench")
    stack.callback(ledger.close)
    players = Players(experiment, task, ledger.log, executor)
    stack.push_async_callback(players.close)
    prompts = prompt_builder(experiment.prompts, experiment.game.protocol, players.base.tokenizer, task)
    parts = (players, prompts, SilentObserver(), asyncio.Event(), Tracer())
    session = session_of(experiment, task, ledger, *parts, BenchSession)
    check_prompts_fit(
        experiment.token_limits(), session.prompts, session.halves(), session.test_problems(), players.base.max_length
    )
    return session
