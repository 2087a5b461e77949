"""How a step's cost grows with one setting: whole steps of the game with known work, and fitted exponents.

    pvg bench --profile benchmarks/scaling-rollouts.toml      # and scaling-length, scaling-model
    python -m benchmarks.pages.make_benchmarks            # fits the exponents

A step is that of the e2e workload, with two differences. Every completion has rollout.max_tokens tokens, whatever is
sampled. Prover and verifier are Llama models of the same size with random weights: a step's cost does not depend on
what they have learnt. To keep gradients above 0, the verifier's weights are shifted from their start, and the profiles
reward a malformed solution by its score (random tokens are always malformed).

The measures are the seconds of each part of a step and the process's peak memory. `rest` is everything outside the
named parts (credit, packing, records, unaccounted time). `derived` has the work of each part, which follows from the
sizes alone:

- floating-point operations of prefill, decode, score, reference and forward_backward (`ModelSize`). Prompts count
  once per group. A backward pass counts as two forward passes, a score of the implicit head as two. In decode, a token
  attends to those before it; elsewhere to all of its row, as in the trainer workload;
- numbers read by decode, in addition to its operations: in each step all weights once for all rows, and for each row
  all earlier keys and values, each for a single token. Long rows are bound by memory, not arithmetic;
- parameters for optimizer and sync;
- completion tokens for dispatch (calling the engine, grading) and rest, which touch every rollout and every token.
"""

from __future__ import annotations

import math
import tempfile
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Executor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import numpy as np
import psutil
import torch

from benchmarks.random_llama import HEAD, random_llama
from pvg.bench.profile import BenchSettings, workload_settings
from pvg.bench.workloads import BenchMetric, Workload, e2e
from pvg.bench.workloads.rollout import dispatcher
from pvg.bench.workloads.trainer import ModelSize
from pvg.config.base import Count
from pvg.config.experiment import Experiment
from pvg.config.load import build_experiment
from pvg.errors import ConfigurationError
from pvg.models.compute import compute_executor
from pvg.models.heads import VerifierModel
from pvg.telemetry.observer import Progress
from pvg.telemetry.spans import Tracer, run_in, span

EVERY_S = 0.01  # one look takes some 20 microseconds; peaks shorter than this may be missed


class PeakMemory:
    """A context manager for the peak of the process's resident memory, freed memory that the allocator keeps included.

    A thread looks every EVERY_S, and also at the beginning and the end. Result: `megabytes`."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._ended = threading.Event()
        self._most = 0

    @property
    def megabytes(self) -> float:
        return self._most / 1e6

    def __enter__(self) -> PeakMemory:
        self._look()
        self._thread = threading.Thread(target=self._watch, name="pvg-memory", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        self._look()

    def _watch(self) -> None:
        while not self._ended.wait(EVERY_S):
            self._look()

    def _look(self) -> None:
        self._most = max(self._most, self._process.memory_info().rss)


# --- the workload -----------------------------------------------------------------------------------------------------
# The parts of a step, each with the spans whose seconds it sums.
PARTS: Mapping[str, tuple[str, ...]] = {
    "prefill": ("prefill",),
    "decode": ("decode",),
    "dispatch": ("rollout", "grade", "wait_for_rollouts"),
    "score": ("score", "score_queue", "score_service"),
    "reference": ("reference",),
    "forward_backward": ("forward_backward",),
    "optimizer": ("optimizer",),
    "sync": ("sync",),
}
REST = "rest"
COMPUTED = ("prefill", "decode", "score", "reference", "forward_backward")  # parts whose work is counted in operations

MEASURES: Mapping[str, BenchMetric] = {
    "step_s": BenchMetric("s", "lower", "wall time of one optimizer step, from its prompts to its published weights"),
    **{f"{part}_s": BenchMetric("s", "lower", f"its part: {', '.join(spans)}") for part, spans in PARTS.items()},
    f"{REST}_s": BenchMetric("s", "lower", "its part: everything else"),
    "peak_memory_mb": BenchMetric("MB", "lower", "peak resident memory of the process during the step"),
}


class ScalingSettings(e2e.EndToEndSettings):
    """The `[workload]` table. `axis`: the figure of `derived` that the variants enlarge. The models have `layers`
    layers of `width`, a multiple of 32, and a context of `context` tokens; `seed` is that of their weights."""

    axis: Literal["rollouts", "completion_tokens", "prover_parameters"]
    width: Count = 128
    layers: Count = 3
    context: Count = 1024
    seed: int = 0


def make(settings: BenchSettings) -> Workload:
    workload, experiment = workload_settings(ScalingSettings, settings), settings.experiment
    if workload.width % HEAD:
        raise ConfigurationError(f"workload.width = {workload.width} is not a multiple of {HEAD}, the width of a head.")
    if experiment.task.kind != "modchain":
        raise ConfigurationError(
            f"The scaling workload's models know only modchain's alphabet, not that of task.kind = "
            f"{experiment.task.kind!r}.",
            "Use an experiment whose task.kind is 'modchain'.",
        )
    return Scaling(experiment, workload, settings.executor)


@dataclass
class BudgetWatcher(e2e.StepWatcher):
    """Also keeps each step's seconds by part."""

    budgets: list[Mapping[str, float]] = field(default_factory=list)

    def progressed(self, progress: Progress) -> None:
        super().progressed(progress)
        self.budgets.append(progress.budget)


class Scaling(e2e.EndToEnd):
    measures: Mapping[str, BenchMetric] = MEASURES

    def __init__(self, experiment: Experiment, workload: ScalingSettings, executor: Executor | None = None) -> None:
        super().__init__(experiment, workload, executor)
        self._scaling = workload

    async def open(self) -> None:
        workload = self._scaling
        with ExitStack() as stack:
            if self._executor is None:  # already here, because the models must be made in the compute thread too
                self._executor = stack.enter_context(compute_executor(self._experiment.models.threads))
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pvg-bench-")))
            sizes = {"width": workload.width, "layers": workload.layers, "context": workload.context}
            source = await run_in(self._executor, partial(random_llama, folder, **sizes, seed=workload.seed))
            self._experiment = with_models(self._experiment, source)
            await super().open()
            self._made = stack.pop_all()
        players = self._session.players
        await players.compute(lambda: shift_weights(self._verifier, workload.seed))
        players.dispatcher = dispatcher(players, players.engine, fixed_length=True)

    async def close(self) -> None:
        await super().close()
        self._made.close()

    def work(self) -> dict[str, Any]:
        """Without `axis`, which does not affect what is done."""
        name = self._session.players.base.name
        return super().work() | {"verifier": name, "fixed_length": True, "weights": self._scaling.seed}

    async def sample(self, index: int) -> dict[str, float]:
        session, steps = self._session, self._workload.steps
        session.tracer = tracer = Tracer()
        session.observer = watcher = BudgetWatcher()
        with span("reset"):
            phase = await self._fresh_phase()
        with span("step"), tracer.drive(), PeakMemory() as peak:  # its parts go to the session's tracer
            await phase.play()
            step_s = (time.perf_counter() - session.began) / steps
        self._steps = watcher.steps
        seconds = {
            part: sum(budget.get(name, 0.0) for budget in watcher.budgets for name in spans) / steps
            for part, spans in PARTS.items()
        }
        return {
            "step_s": step_s,
            **{f"{part}_s": amount for part, amount in seconds.items()},
            f"{REST}_s": step_s - sum(seconds.values()),
            "peak_memory_mb": peak.megabytes,
        }

    def derived(self) -> dict[str, float]:
        """The three axes, then the work of one step: `flops` in all, and the work of each part (see the module)."""
        experiment, ledger, base = self._experiment, self._session.ledger, self._session.players.base
        steps, completion = self._workload.steps, experiment.rollout.max_tokens
        rollouts, prompt = ledger.rollouts / steps, ledger.prompt_tokens / ledger.rollouts
        work = step_work(
            ModelSize.of(base),
            groups=experiment.training.groups,
            rollouts=rollouts,
            prompt=prompt,
            completion=completion,
            judged=self._judged_tokens(),
            judgements=1 + self._verifier.needs_reference,
            parameters=base.num_parameters,
        )
        return {
            **super().derived(),
            "rollouts": rollouts,
            "prover_parameters": float(base.num_parameters),
            "tokens": (ledger.prompt_tokens + ledger.completion_tokens) / steps,
            "flops": sum(work[part] for part in COMPUTED),
            **{f"work_{part}": amount for part, amount in work.items()},
            "reads_decode": decode_reads(
                ModelSize.of(base),
                steps=completion * math.ceil(rollouts / experiment.rollout.chunk),
                rollouts=rollouts,
                prompt=prompt,
                completion=completion,
                parameters=base.num_parameters,
            ),
        }

    def _judged_tokens(self) -> int:
        """The tokens of a solution for the verifier, with its question and the end token."""
        players, session = self._session.players, self._session
        completion = np.zeros(self._experiment.rollout.max_tokens, dtype=np.int32)
        question = session.problems("prover")[0].question
        ids, _ = players.template(self._verifier).tokens(question, "", completion, players.base.tokenizer.fingerprint)
        return len(ids)


def step_work(
    size: ModelSize,
    *,
    groups: int,
    rollouts: float,
    prompt: float,
    completion: int,
    judged: int,
    judgements: int,
    parameters: int,
) -> dict[str, float]:
    """The work of each part of a step, in the units of the module's docstring.

    `groups` prompts of `prompt` tokens; `rollouts` completions of `completion` tokens; the verifier reads `judged`
    tokens of each, `judgements` times. The prefill leaves a prompt's last token to the first decoding step.
    """
    tokens = rollouts * completion
    trained = size.forward(
        groups * prompt + rollouts * (completion - 1),
        tokens,
        groups * prompt**2 + tokens * (prompt + completion),
    )
    scored = size.forward(rollouts * judged, rollouts * completion, rollouts * judged**2)
    return {
        "prefill": size.forward(groups * (prompt - 1), 0.0, groups * (prompt - 1) ** 2),
        "decode": size.forward(tokens, tokens, looked_at(rollouts, prompt, completion)),
        "dispatch": tokens,
        "score": judgements * scored,
        "reference": trained,
        "forward_backward": 3 * trained,
        "optimizer": float(parameters),
        "sync": float(parameters),
        REST: tokens,
    }


def decode_reads(
    size: ModelSize, *, steps: int, rollouts: float, prompt: float, completion: int, parameters: int
) -> float:
    """Numbers that `steps` decoding steps read: the weights, and each row's keys and values."""
    return float(steps * parameters) + 2.0 * size.attention * looked_at(rollouts, prompt, completion)


def looked_at(rollouts: float, prompt: float, completion: int) -> float:
    """Tokens that the rows attend to in all decoding steps, including the token of the step."""
    return rollouts * (completion * prompt + completion * (completion - 1) / 2)


def with_models(experiment: Experiment, source: str) -> Experiment:
    plain = experiment.plain()
    models = {
        **plain["models"],
        **{player: {**plain["models"][player], "source": source} for player in ("prover", "verifier")},
    }
    return build_experiment({**plain, "models": models})


def shift_weights(verifier: VerifierModel, seed: int) -> None:
    """Move every weight slightly at random: the untrained implicit head scores all solutions 0."""
    generator = torch.Generator().manual_seed(seed)
    verifier.load_trainable_state(
        {
            name: weight + 0.01 * torch.randn(weight.shape, generator=generator).to(weight)
            for name, weight in verifier.trainable_state().items()
        }
    )
