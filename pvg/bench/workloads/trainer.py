"""The prover's trainer alone: optimizer steps on fixed rollouts, with everything that a step of the game computes.

One sample trains once on the batch with the experiment's loss, precision and micro-batches, including AdamW's step. It
also does the forward passes that the experiment requires: the KL's reference, and the recomputed log-probs of the
sampler if `rollout.logprobs` asks for them. The learning rate is 0: AdamW does the same work at any rate, and the
weights keep matching the batch, so every sample computes the same.

With another `workload.shape`, the batch is a group of 16 episodes of 8 turns with one prompt, of drawn tokens: `turns`
has a row for each turn, whose prompt is all that came before it; `forks` has a row for each episode, and the first four
turns were played once for all. With `alike = false` the rows have the same lengths but only their equal prompts in
common.

MFU relates the required floating-point operations to this machine's measured matmul rate (`matmul_gflops`). Forward and
backward require 6 N T + 6 H C + 12 l d S operations, and a reference's forward a third of that. N are the parameters of
the layers, T the non-padding tokens, H the parameters of the head (only the C completion tokens need it), l the layers,
d = heads x head size, and S the sum of the squared sequence lengths (PaLM, arXiv 2204.02311, appendix B, which counts
the head for all tokens). Repeated computation (recomputed log-probs, gradient checkpointing) and padding count as time,
not as work. A prompt counts for each of its rollouts even if it is computed once (training.shared_prompts). Frozen
weights need no gradient, so under adapters linear layers take two thirds. The hardware MFU relates what is computed
instead (`operations_of`): how well the machine is used, for whatever it is used.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from pvg.bench.workloads import BenchMetric, BenchSettings, Workload, workload_settings
from pvg.bench.workloads.rollout import check_work, digest_of, drawn_rewards, fixed_call, fixed_orders, model_facts
from pvg.config.base import Count, Section
from pvg.errors import ConfigurationError
from pvg.game.parts import BatchLogprobs
from pvg.game.players import Players
from pvg.game.rewards import credit_of
from pvg.game.roles import prompt_renderer
from pvg.models.logprobs import chunk_tokens, device_bytes
from pvg.models.packing import pack_rows
from pvg.models.sources import open_learner
from pvg.records import Int32
from pvg.tasks import open_task
from pvg.training.batch import MinibatchSource, PolicyBatch, batch_of, minibatches
from pvg.training.forward import ForwardSettings, forward_batches
from pvg.training.losses import PolicyObjective, policy_loss
from pvg.training.trainer import OptimizerSettings, StepReport, Trainer

if TYPE_CHECKING:
    from pvg.models.language_model import LanguageModel

MEASURES = {
    "tokens_per_s": BenchMetric("tokens/s", "higher"),  # prompts included, padding excluded
    "rollouts_per_s": BenchMetric("rollouts/s", "higher"),
    "step_s": BenchMetric("s", "lower"),  # with all its forward passes
}


class TrainerWorkloadSettings(Section):
    rollouts: Count = 256
    shape: Literal["rollouts", "turns", "forks"] = "rollouts"
    alike: bool = True
    seed: int = 0


def make(settings: BenchSettings) -> Workload:
    workload = workload_settings(TrainerWorkloadSettings, settings)
    check_work(settings.experiment, workload.rollouts)
    minibatches = settings.experiment.training.minibatches
    if workload.rollouts < minibatches:
        raise ConfigurationError(
            f"workload.rollouts = {workload.rollouts} cannot be divided into training.minibatches = {minibatches}.",
            "Raise the first or lower the second.",
        )
    return TrainerWorkload(settings, workload)


@dataclass(frozen=True)
class FixedSource:
    """A BatchSource that repeats one batch forever, each time with the log-probs that a step of the game computes
    (spans: reference, recompute)."""

    batch: PolicyBatch
    logprobs: BatchLogprobs

    async def next_batch(self) -> PolicyBatch:
        return await self.logprobs.add(self.batch)


class TrainerWorkload:
    measures: Mapping[str, BenchMetric] = MEASURES

    def __init__(self, settings: BenchSettings, workload: TrainerWorkloadSettings) -> None:
        self._experiment, self._workload, self._executor = settings.experiment, workload, settings.executor
        self._seconds: list[float] = []  # of the steps, one per sample
        self._reports: list[StepReport] = []  # of the last sample's steps

    async def open(self) -> None:
        async with AsyncExitStack() as stack:
            self._players = Players(self._experiment, open_task(self._experiment.task), executor=self._executor)
            stack.push_async_callback(self._players.close)
            await self._players.ready()
            self._batch = await self._sampled() if self._workload.shape == "rollouts" else self._drawn()
            learner = open_learner(self._players, round_=0)
            stack.callback(learner.close)
            await self._open_trainer(learner)
            precision, device = self._experiment.models.compute_dtype, str(self._players.device)
            self._matmul_gflops = await self._players.compute(partial(matmul_gflops, precision, device))
            self._stack = stack.pop_all()

    async def _sampled(self) -> PolicyBatch:
        players, workload = self._players, self._workload
        render = prompt_renderer(self._experiment.prompts, players.base.tokenizer)
        orders = fixed_orders(self._experiment, players.task, render, workload.rollouts, workload.seed)
        groups = await players.dispatcher.sample(orders, fixed_call(workload.seed))
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        loss, rewards_N = self._experiment.training.loss.kind, drawn_rewards(rollouts, workload.seed)
        advantages_N, _ = credit_of(loss, policy_loss(loss).credit).observe(rollouts, rewards_N)
        return batch_of(rollouts, advantages_N)

    def _drawn(self) -> PolicyBatch:
        """The batch of `workload.shape`. The sampler's log-probs are those of uniform draws."""
        vocabulary = self._players.base.module.get_input_embeddings().weight.shape[0]
        generator = np.random.default_rng(self._workload.seed)
        turn = min(LONGEST_TURN, self._players.base.max_length // (TURNS + 1))
        rows, starts = episode_rows(self._workload.shape, self._workload.alike, turn, vocabulary, generator)
        masks = [np.arange(len(row) - start) % turn < turn - turn // 4 for row, start in zip(rows, starts, strict=True)]
        none_N = np.zeros(len(rows), dtype=np.int32)
        return PolicyBatch(
            sequences=rows,
            prompt_lengths=np.array(starts, dtype=np.int32),
            sampled_logprobs=[np.full(mask.sum(), -np.log(vocabulary), dtype=np.float32) for mask in masks],
            reference_logprobs=None,
            advantages_N=generator.standard_normal(len(rows)).astype(np.float32),
            role_ids_N=none_N.astype(np.int8),
            group_ids_N=none_N,
            versions_N=none_N,
            sampled_masks=masks,
        )

    async def _open_trainer(self, learner: LanguageModel) -> None:
        training, players = self._experiment.training, self._players
        precision = self._experiment.models.compute_dtype
        objective = PolicyObjective(training, self._experiment.rollout, learner.tokenizer.pad_id, precision)
        self._kl = training.kl.coefficient if objective.needs_reference else 0.0
        recomputed = self._experiment.rollout.logprobs == "recomputed"
        logprobs = BatchLogprobs(players, objective, learner, recomputed=recomputed)
        learner.require_gradients()
        self._trainer = Trainer(
            learner.module,
            objective,
            OptimizerSettings(learning_rate=0.0),
            MinibatchSource(FixedSource(self._batch, logprobs), training.minibatches),
            executor=players.executor,
            precision=precision,
            gradient_checkpointing=training.gradient_checkpointing,
            waits_for="batches",  # the trainer never waits for rollouts
        )

    @property
    def _steps(self) -> int:
        return self._experiment.training.minibatches

    @property
    def _tokens(self) -> int:
        return int(self._batch.lengths_N.sum())

    def work(self) -> dict[str, Any]:
        """Mean lengths are rounded, because machines may sample different tokens if two are almost tied."""
        batch, rollouts = self._batch, len(self._batch)
        prompts = int(batch.prompt_lengths.sum())
        found = {
            **model_facts(self._players.base),
            "task": self._experiment.task.kind,
            "loss": self._experiment.training.loss.kind,
            "kl": self._kl,
            "optimizer_steps": self._steps,
            "rollouts": rollouts,
            "mean_prompt_tokens": round(prompts / rollouts, 1),
            "mean_completion_tokens": round((self._tokens - prompts) / rollouts, 1),
            "prompts": shape
            if (shape := self._workload.shape) != "rollouts"  # drawn; with less in common they are others
            else digest_of(ids[:length] for ids, length in zip(batch.sequences, batch.prompt_lengths, strict=True)),
            "seed": self._workload.seed,
        }
        if rank := self._experiment.training.adapters.rank:
            found["lora_rank"] = rank
        return found

    async def sample(self, index: int) -> dict[str, float]:
        started = time.perf_counter()
        self._reports = [await self._step() for _ in range(self._steps)]
        if self._players.device.type == "cuda":  # the last step's kernels may still run
            await self._players.compute(partial(wait_for, str(self._players.device)))
        seconds = time.perf_counter() - started
        self._seconds.append(seconds)
        return {
            "tokens_per_s": self._tokens / seconds,
            "rollouts_per_s": len(self._batch) / seconds,
            "step_s": seconds / self._steps,
        }

    async def _step(self) -> StepReport:
        report = await self._trainer.step()
        assert report is not None, "the source never ends"
        return report

    def derived(self) -> dict[str, float]:
        """Of one sample: tokens, floating-point operations, and the padded share of the micro-batches' positions. Also
        the operations per second at the median sample, the machine's matmul rate, and both MFUs."""
        counted, seconds = self._operations(), statistics.median(self._seconds)
        gflops = counted.useful / seconds / 1e9
        padded = [report.metrics["padding"] for report in self._reports if "padding" in report.metrics]
        return {
            "tokens": float(self._tokens),
            "flops": counted.useful,
            "padding": float(np.mean(padded)) if padded else 0.0,
            "gflops": gflops,
            "matmul_gflops": self._matmul_gflops,
            "mfu": gflops / self._matmul_gflops,
            "hardware_mfu": counted.hardware / seconds / 1e9 / self._matmul_gflops,
        }

    def _operations(self) -> Operations:
        """Of one sample."""
        training, rollout, base = self._experiment.training, self._experiment.rollout, self._players.base
        settings = ForwardSettings.of(training, rollout.temperature, base.tokenizer.pad_id)
        found = [
            operations_of(
                ModelSize.of(base),
                part,
                settings,
                frozen=training.adapters.rank > 0,
                checkpointed=training.gradient_checkpointing,
                scored=self._kl > 0.0,
                again=rollout.logprobs == "recomputed",
            )
            for part in minibatches(self._batch, training.minibatches)
        ]
        return Operations(sum(part.useful for part in found), sum(part.hardware for part in found))

    async def close(self) -> None:
        await self._stack.aclose()


EPISODES, TURNS, FORK = 16, 8, 4
LONGEST_TURN = 64


def episode_rows(
    shape: str, alike: bool, turn: int, vocabulary: int, generator: np.random.Generator
) -> tuple[list[Int32], list[int]]:
    """Rows and prompt lengths of EPISODES episodes of one prompt (see the module). Prompt and turns have `turn` tokens,
    of which the last quarter is observed, and missing in the last turn of a row."""
    rows, starts, forks = list[Int32](), list[int](), shape == "forks"
    prompt = generator.integers(0, vocabulary, turn)
    played = generator.integers(0, vocabulary, (EPISODES, TURNS * turn))
    if forks and alike:
        played[:, : FORK * turn] = played[0, : FORK * turn]
    for tokens in played:
        for number in range(TURNS - 1 if forks else 0, TURNS):
            before = np.append(prompt, tokens[: number * turn])
            if number and not (alike or forks):
                before = generator.integers(0, vocabulary, len(before))
            own = tokens[number * turn : (number + 1) * turn - turn // 4]
            rows.append(np.append(before, own).astype(np.int32))
            starts.append(turn if forks else len(before))
    return rows, starts


# --- floating-point operations ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Counts of parameters: of the layers (`body`) and of the `head`. `attention`: layers x heads x head size. `chunk`:
    the most tokens whose logits exist at once."""

    body: int
    head: int
    attention: int
    chunk: int

    @classmethod
    def of(cls, model: LanguageModel) -> ModelSize:
        head = model.module.get_output_embeddings().weight
        table = model.module.get_input_embeddings().weight
        config = model.module.config.get_text_config()
        heads = config.num_attention_heads
        width = int(heads * (getattr(config, "head_dim", None) or config.hidden_size // heads))
        # A lookup in the embedding table costs nothing. If head and table are tied, count the parameters once.
        body = model.num_parameters - head.numel() - (0 if table is head else table.numel())
        chunk = chunk_tokens(len(head), device_bytes(model.device))
        return cls(body, head.numel(), int(config.num_hidden_layers) * width, chunk)

    def forward(self, tokens: float, predicted: float, attended: float) -> float:
        """Operations of one forward pass, 2 N T + 2 H C + 4 l d S: `tokens` T without padding, `predicted` C of them
        with logits, `attended` S pairs of a token and a token that it attends to. A backward pass takes twice that."""
        return 2.0 * self.body * tokens + 2.0 * self.head * predicted + 4.0 * self.attention * attended


@dataclass(frozen=True, slots=True)
class Operations:
    """Floating-point operations of an optimizer step. `useful`: each row forward and backward by itself, with its
    prompt. `hardware`: what is computed."""

    useful: float
    hardware: float


def operations_of(
    size: ModelSize,
    batch: PolicyBatch,
    settings: ForwardSettings,
    *,
    frozen: bool = False,
    checkpointed: bool = False,
    scored: bool = False,
    again: bool = False,
) -> Operations:
    """The operations of a step on the whole batch. `frozen`: linear layers need no gradient of their weights, so they
    take two passes, not three; adapters themselves are not counted. `scored`: a reference's pass. `again`: the same for
    log-probs of the sampler, which is not useful.

    Computed is what rows of a micro-batch have in common once; padding; all layers again if `checkpointed`; and the
    head again where there are several chunks of logits. A token attends to all of its row, also to later tokens.
    """
    passes, lengths_N = 2.0 if frozen else 3.0, batch.lengths_N.astype(np.float64)
    linear = size.forward(lengths_N.sum(), float(batch.completion_lengths_N.sum()), 0.0)
    attention = size.forward(0.0, 0.0, np.square(lengths_N).sum())
    useful, hardware, forwards = (passes + scored) * linear + (3.0 + scored) * attention, 0.0, scored + again
    for rows in forward_batches(batch, np.arange(len(batch)), settings):
        part = batch.select(rows)
        longest, predicted = float(part.lengths_N.max()), float(part.completion_lengths_N.sum())
        tokens, attended = len(rows) * longest, len(rows) * longest**2
        if settings.shared_prompts:
            packed = pack_rows(part.sequences, part.prompt_lengths, "cpu", prompts_alone=settings.router_replay)
            trie, predicted = packed.trie, float(len(packed.targets_M))
            tokens, attended = float(trie.lengths_S.sum()), float(trie.lengths_S @ (trie.starts_S + trie.lengths_S))
        hardware += (passes + forwards + checkpointed) * size.forward(tokens, 0.0, 0.0)
        hardware += (passes + forwards + (predicted > size.chunk)) * size.forward(0.0, predicted, 0.0)
        hardware += (3.0 + forwards + checkpointed) * size.forward(0.0, 0.0, attended)
    return Operations(float(useful), hardware)


Dtype = Literal["float32", "bfloat16"]

# Square matrices: large enough to reach the plateau, small enough for well under a second on a slow machine.
CPU_SIZE, GPU_SIZE = 1024, 8192
TRIES = 20
LIMIT_S = 0.6  # for all tries together


def matmul_gflops(dtype: Dtype = "float32", device: str = "cpu") -> float:
    """The best rate of a square matrix product in 10^9 floating-point operations per second (2 n^3 per product).

    Uses torch's current number of threads; takes about 0.6 s. Takes the best try, not the median: other work on the
    machine can only slow a product down.
    """
    size = CPU_SIZE if device == "cpu" else GPU_SIZE
    generator = torch.Generator().manual_seed(0)
    kind = getattr(torch, dtype)
    left_NN = torch.randn(size, size, generator=generator).to(device, kind)
    right_NN = torch.randn(size, size, generator=generator).to(device, kind)
    out_NN = torch.empty(size, size, device=device, dtype=kind)
    torch.mm(left_NN, right_NN, out=out_NN)  # the first product also starts threads, loads kernels and fills caches
    best, began = float("inf"), time.perf_counter()
    for _ in range(TRIES):
        wait_for(device)
        start = time.perf_counter()
        torch.mm(left_NN, right_NN, out=out_NN)
        wait_for(device)
        best = min(best, time.perf_counter() - start)
        if time.perf_counter() - began > LIMIT_S:
            break
    return 2 * size**3 / best / 1e9


def wait_for(device: str) -> None:
    """Block until the device has finished its queued work."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
