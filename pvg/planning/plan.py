"""`plan_of`: the whole plan of an experiment: bounds of its step, what to change, and memory."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from glob import glob
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from pvg.config.base import READER
from pvg.config.experiment import FITTED, Experiment
from pvg.config.game import CorrectnessReward
from pvg.config.load import changed, did_you_mean, nearest
from pvg.config.operation import LocalCluster, RayCluster, has_workers, processes_of, ranks_of, shards_of
from pvg.config.rollout import SamplingAhead, TorchSampling
from pvg.config.sections import value_of
from pvg.config.training import LogprobHead
from pvg.errors import ConfigurationError, UsageError, counted, in_percent
from pvg.hub import Say
from pvg.installation import native_bfloat16
from pvg.models import pick_device
from pvg.planning.memory import (
    ACTIVATIONS,
    ASLEEP_BYTES,
    BYTES,
    STAGES,
    MemoryPlan,
    ModelShape,
    host_bytes,
    memory_of,
    others_bytes,
    read_shape,
    reader_bytes,
    reference_asked,
    shares_gpu,
    shares_prompts,
    written_tokens,
)
from pvg.reporting.formats import compact, sample_seconds, short_seconds
from pvg.store.run_players import base_source
from pvg.telemetry.waits import usable_memory

QUANTILES = 2048  # lengths in the pool of a log-normal distribution


@dataclass(frozen=True, slots=True)
class BatchWork:
    """What one batch asks for. Times in seconds, lengths in tokens.

    `longest`: the expected length of the longest of the `rollouts`. `workers` processes or servers decode at most
    `slots` rollouts each, and `concurrency` requests are in flight at most. A decoding step takes `token_s` + `row_s` x
    rows. `request_s`: of a request besides its tokens. `ahead`: batches that sampling may be ahead; 0: in turns.
    `one_gpu`: trainer and server share it, so neither is faster beside the other. `samplers_score`: those that sample
    do the other work, in `other_s`.
    """

    rollouts: int
    mean_length: float
    longest: float
    workers: int
    slots: int
    concurrency: int
    token_s: float
    row_s: float
    request_s: float
    train_token_s: float
    other_s: float
    update_s: float
    read_s: float = 0.0
    ahead: int = 0
    one_gpu: bool = False
    samplers_score: bool = False

    @property
    def rows(self) -> int:
        """The most rollouts that are decoded at once."""
        return min(self.workers * self.slots, self.concurrency, self.rollouts * (1 + self.ahead))

    def decoding_s(self, rows: float) -> float:
        """Seconds of a decoding step of a worker with `rows` rows."""
        return self.token_s + self.row_s * rows


@dataclass(frozen=True, slots=True)
class StepBounds:
    """Seconds of a batch; the module says what each is. `balance`: workers, each with all its rows busy, at which
    sampling takes as long as training; infinite if the trainer takes no time."""

    trainer_s: float
    sampling_s: float
    longest_s: float
    overlap_s: float
    turns_s: float
    balance: float

    def least_s(self, ahead: int) -> float:
        return self.overlap_s if ahead else self.turns_s

    @property
    def limit(self) -> str:
        """Which of the two takes longer."""
        return "sampling" if self.sampling_s > self.trainer_s else "training"


def bounds_of(work: BatchWork) -> StepBounds:
    other_s = work.other_s if work.samplers_score else 0.0
    trainer_s = work.train_token_s * work.mean_length * work.rollouts
    trainer_s += work.other_s - other_s + work.read_s + work.update_s
    steps = work.rollouts * (work.mean_length + work.request_s / work.decoding_s(1))
    sampling_s = steps / work.rows * work.decoding_s(max(1.0, work.rows / work.workers)) + other_s
    # Its worker decodes its share of the other rollouts meanwhile.
    of_a_worker = max(1.0, work.rollouts * work.mean_length / work.workers)
    longest_s = work.longest * work.token_s + max(work.longest, of_a_worker) * work.row_s + work.request_s
    of_one_worker_s = steps * work.decoding_s(work.slots) / work.slots
    return StepBounds(
        trainer_s,
        sampling_s,
        longest_s,
        trainer_s + sampling_s if work.one_gpu else max(trainer_s, sampling_s),
        trainer_s + max(sampling_s, longest_s),
        of_one_worker_s / trainer_s if trainer_s else math.inf,
    )


def expected_longest(lengths: NDArray[np.int64], count: int) -> float:
    """The expected longest of `count` draws from the pool `lengths`."""
    values = np.sort(lengths)
    chances = (np.arange(1, len(values) + 1) / len(values)) ** count
    return float(values @ np.diff(chances, prepend=0.0))


def lognormal_lengths(mean: float, sigma: float, longest: int) -> NDArray[np.int64]:
    """A pool of lengths whose distribution is log-normal, cut off at `longest`. `sigma`: the standard deviation of the
    logarithm. `mean`: the mean after the cut.

    The pool has the quantiles (i + 1/2) / n of the distribution, so it has no sampling noise. Raises ConfigurationError
    for a mean that these lengths cannot have.
    """
    if not 1 <= mean <= longest:
        raise ConfigurationError(
            f"The mean length is {mean:g}, but must be between 1 and the longest, {longest}.",
            "Change mean_tokens, or rollout.max_tokens.",
        )
    if not 0 <= sigma <= 4:
        raise ConfigurationError(f"sigma is {sigma:g}, but must be between 0 and 4.")
    scores = ndtri((np.arange(QUANTILES) + 0.5) / QUANTILES)

    low, high = 0.0, math.log(longest) + 4 * sigma + 1  # of the median's logarithm
    for _ in range(60):
        middle = (low + high) / 2
        too_short = np.clip(np.exp(middle + sigma * scores), 1, longest).mean() < mean
        low, high = (middle, high) if too_short else (low, middle)
    return np.asarray(np.clip(np.rint(np.exp(low + sigma * scores)), 1, longest), dtype=np.int64)


# --- GPUs by their data sheets, and how well they are used -----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MachineSpeed:
    """`flops`: dense bfloat16 operations per second. `bytes_per_s`: memory bandwidth. `memory_gb`: 10^9 bytes; 0: not a
    GPU. `source`: where the figures come from."""

    flops: float
    bytes_per_s: float
    memory_gb: float
    source: str


TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
MACHINES: dict[str, MachineSpeed] = {name: MachineSpeed(*row) for name, row in TABLE["machines"].items()}

# Share of the bandwidth that decoding reaches: assumed; that of pvg's engine on a GPU: measured (docs/gpu.md).
DECODING_SHARE, OWN_DECODING_SHARE = 0.5, 0.26
# Share of the arithmetic rate that training reaches. Llama 3 reports 0.38 to 0.43 for pretraining (arXiv 2407.21783);
# batches of short rows reach less. Assumed.
TRAINING_SHARE = 0.3
# Tokens of an announced answer, which a reader reads after each prefix, or writes; and solutions that it continues at
# once (pvg.traces.measures). The former is assumed.
ANSWER_TOKENS, READ_TOGETHER = 8, 32
# Bytes per second of a weight update through a shared folder, written and read once. Assumed.
UPDATE_BYTES_PER_S = 1e9

# The inputs: name -> (unit, meaning).
INPUTS: dict[str, tuple[str, str]] = TABLE["inputs"]
MOST = 1e12
POSITIVE = frozenset({"mean_tokens", "prompt_tokens", "token_s"})


@dataclass(frozen=True, slots=True)
class PlanInput:
    value: float
    source: str


@dataclass(slots=True)
class Inputs:
    values: dict[str, PlanInput] = field(default_factory=dict)

    def __getitem__(self, name: str) -> float:
        return self.values[name].value

    def assign(self, assignments: Iterable[str]) -> None:
        """Set values from `NAME=VALUE`. Raises UsageError."""
        for assignment in assignments:
            name, separator, text = assignment.partition("=")
            if name not in INPUTS:
                hint = nearest(name, list(INPUTS))
                raise UsageError(
                    f"There is no input {name!r}." + (f" Did you mean {hint!r}?" if hint else ""),
                    f"Known: {', '.join(INPUTS)}.",
                )
            try:
                value = float(text) if separator else math.nan
            except ValueError:
                value = math.nan
            if not 0 <= value <= MOST or (value == 0 and name in POSITIVE):
                least = "above 0" if name in POSITIVE else "of at least 0"
                raise UsageError(
                    f"--input {assignment}: {name} must be a number {least}.", f"Example: --input {name}=1.5"
                )
            self.values[name] = PlanInput(value, "given")

    @classmethod
    def assumed(
        cls,
        experiment: Experiment,
        prover: ModelShape,
        verifier: ModelShape,
        machine: MachineSpeed,
        reader: ModelShape | None = None,
        *,
        gpus: int = 1,
    ) -> Inputs:
        """Estimates from the models' sizes and the machine's speed. `reader`: of the reward. `gpus`: of the plan."""
        rollout, training = experiment.rollout, experiment.training
        number = BYTES[experiment.sampling_dtype]
        mean, prompt = max(1.0, rollout.max_tokens / 2), max(1.0, min(256.0, rollout.max_tokens))
        served = not isinstance(rollout.engine, TorchSampling)
        parts = experiment.serving.tensor_parallel if served else 1  # of the weights and of the keys, on a GPU each
        share = DECODING_SHARE if served or not machine.memory_gb else OWN_DECODING_SHARE
        per_s = parts * machine.bytes_per_s * share
        apart = prover.adapter_parameters(training.adapters.rank) if experiment.samples_on_base else 0
        # A multiply and an add per weight: forward 2, backward 4 (2 if frozen), recomputed activations 2, reference 2.
        trainers, referees, scorers = dividing_gpus(experiment)
        operations = (6.0 - 2.0 * (training.adapters.rank > 0) + 2.0 * training.gradient_checkpointing) / trainers
        operations += 2.0 * (training.penalised and not reference_asked(experiment, gpus)) / referees
        flops = machine.flops * TRAINING_SHARE
        shared = shares_prompts(experiment, prover, math.ceil(prompt) + rollout.max_tokens)
        tokens = 1 + prompt / mean / (rollout.group_size if shared else 1)
        rollouts, scores = experiment.rollouts_per_batch, 0.0
        if experiment.verifier.engine == "torch":
            heard = mean * tokens if shared and experiment.models.compute_dtype == "bfloat16" else mean + prompt
            head = experiment.verifier.head
            passes = 1 + (isinstance(head, LogprobHead) and head.reference > 0)
            scores = rollouts * passes * 2.0 * verifier.parameters * heard / flops / scorers
        read, reward = 0.0, experiment.game.reward
        if reader is not None and isinstance(reward, CorrectnessReward):
            # All helpful solutions, correct and different: SR reads each and writes an answer, CIR reads all prefixes.
            texts = rollouts * (1.0 - experiment.game.sneaky_share)
            each = mean * (reward.sr > 0) + (prompt + mean * (1 + ANSWER_TOKENS)) * (reward.cir > 0)
            writing = ANSWER_TOKENS * math.ceil(texts / READ_TOGETHER) * (reward.sr > 0)
            streamed = reader.parameters * reader_bytes(experiment) / (machine.bytes_per_s * DECODING_SHARE)
            read = texts * 2.0 * reader.parameters * each / flops + writing * streamed
        lora = experiment.weights.transport.kind == "lora"
        rank, divided_work = training.adapters.rank, scorers > 1
        trained = 4 * (prover.adapter_parameters(rank) if rank else prover.parameters)
        sampled = trained if rank and (lora or divided_work) else prover.parameters * number
        # Written and read once. Workers get what samples and what is in training, and send their gradients.
        sent = sampled + trained * (1 + trainers) if divided_work else 2 * sampled
        update = 0.5 + sent / UPDATE_BYTES_PER_S if served or divided_work else 0.0
        place = f"estimate: {compact(prover.parameters)} parameters, {machine.source}"
        divided = place if trainers == 1 else f"{place}, {trainers} GPUs without their exchange"
        on_worker = place if parts == 1 else f"{place}, {parts} GPUs without their exchange"
        row_s, with_rows = prover.kv_bytes(number) * (prompt + mean / 2) / per_s, on_worker
        if reference_asked(experiment, gpus):  # a server reads each solution again, and no other meanwhile
            row_s += 2.0 * prover.parameters * (1.0 + prompt / mean) / (parts * flops)
            with_rows += ", with the reference's log-probs"
        found = {
            "mean_tokens": (mean, "assumed: half of rollout.max_tokens"),
            "sigma": (0.6, "assumed"),
            "prompt_tokens": (prompt, "assumed"),
            "token_s": ((prover.parameters + apart) * number / per_s, on_worker),
            "row_s": (row_s, with_rows),
            "request_s": (2.0 * prover.parameters * prompt / (parts * flops), on_worker),
            "train_token_s": (operations * prover.parameters * tokens / flops, divided),
            "other_s": (scores, f"estimate: {compact(verifier.parameters)} parameters, {machine.source}"),
            "read_s": (read, f"estimate: {compact(reader.parameters)} parameters" if reader else "no reader"),
            "update_s": (update, "estimate: 1 GB/s"),
        }
        return cls({name: PlanInput(value, source) for name, (value, source) in found.items()})


def dividing_gpus(experiment: Experiment) -> tuple[int, int, int]:
    """How many GPUs divide the gradients of a step, its reference log-probs, and its scores."""
    cluster = experiment.cluster
    if not experiment.models.on_gpu:  # the cores of a machine are divided already
        return 1, 1, 1
    if experiment.server_cluster is None and isinstance(cluster, LocalCluster | RayCluster) and has_workers(cluster):
        workers = processes_of(cluster, shards_of(cluster) or 1)[1]
        trainers = cluster.trainers or workers
        return trainers, trainers, workers - (cluster.trainers or 0)
    return ranks_of(cluster) or 1, 1, 1


def workers_of(experiment: Experiment) -> tuple[int, int]:
    """(workers, rows that each decodes at once) of the experiment's own configuration."""
    engine, servers = experiment.rollout.engine, experiment.server_cluster
    if not isinstance(engine, TorchSampling):
        count = len(experiment.serving.servers) if servers is None else servers.workers or 1
        return count, experiment.serving.max_num_seqs
    cluster = experiment.cluster
    if not isinstance(cluster, LocalCluster | RayCluster):
        return 1, engine.max_rows
    _, most = processes_of(cluster, shards_of(cluster) or 1)
    return max(1, most - (cluster.trainers or 0)), engine.max_rows


def overlaps(experiment: Experiment) -> bool:
    """Whether sampling overlaps with training under rollout.prefetch: on servers, or with workers that only train. The
    torch engine otherwise samples where the trainer computes."""
    cluster = experiment.cluster
    separate = isinstance(cluster, LocalCluster | RayCluster) and cluster.trainers is not None
    return separate or not isinstance(experiment.rollout.engine, TorchSampling)


def work_of(experiment: Experiment, inputs: Inputs, *, workers: int | None = None) -> BatchWork:
    """The work of a batch of the experiment. `workers`: instead of the experiment's own."""
    rollout = experiment.rollout
    configured, slots = workers_of(experiment)
    rollouts = experiment.rollouts_per_batch
    lengths = lognormal_lengths(inputs["mean_tokens"], inputs["sigma"], rollout.max_tokens)
    ahead = isinstance(rollout.prefetch, SamplingAhead) and overlaps(experiment)
    seconds: dict[str, Any] = {name: inputs[name] for name in INPUTS if name.endswith("_s")}
    return BatchWork(
        rollouts=rollouts,
        mean_length=float(lengths.mean()),
        longest=expected_longest(lengths, rollouts),
        workers=workers or configured,
        slots=slots,
        concurrency=rollout.concurrency,
        **seconds,
        ahead=rollout.prefetch.batches if ahead else 0,
        samplers_score=ahead and isinstance(rollout.engine, TorchSampling),
    )


def not_modelled(experiment: Experiment) -> list[str]:
    """Settings that change a step's time or its memory and are not part of the model: one sentence each."""
    ranks, protocol = ranks_of(experiment.cluster), experiment.game.protocol.kind
    on_gpu, workers = experiment.models.on_gpu, experiment.server_cluster is None and has_workers(experiment.cluster)
    recomputed = experiment.rollout.logprobs == "recomputed" or experiment.training.minibatches > 1
    there = {
        "copies": workers and not on_gpu,
        "cores": workers and not on_gpu,
        "exchange": ranks is not None and on_gpu,
        "driver": ranks is not None and on_gpu and recomputed,
        "ranks": ranks is not None and not on_gpu,
        "deadline": experiment.rollout.deadline.kind != "none",
        "dynamic": experiment.training.dynamic_sampling > 0,
        "prefetch": experiment.rollout.prefetch.kind != "none" and not overlaps(experiment),
        "simultaneous": experiment.game.schedule.kind == "simultaneous",
        "generative": experiment.verifier.verdict_tokens > 0,
        "protocol": protocol not in ("direct", "consultancy"),
        "play": experiment.task.kind == "play",
    }
    notes: dict[str, str] = TABLE["notes"]
    return [notes[name].format(ranks=ranks, protocol=protocol) for name, holds in there.items() if holds]


def warm_start(experiment: Experiment, inputs: Inputs) -> list[str]:
    """One sentence about the time before the first step; none without a warm start."""
    section = experiment.warmup
    if section.path is None:
        return []
    seconds = section.steps * section.batch * inputs["mean_tokens"] * inputs["train_token_s"]
    return [
        f"the warm start comes before the first step, and no time above includes it: {counted(section.steps, 'step')} "
        f"of {counted(section.batch, 'solution')}, about {short_seconds(seconds)} if a solution has mean_tokens"
    ]


WAITS = 0.1  # share of the time from which waiting for rollouts is worth a change
WORTH = 0.05  # share of a batch's time that a change must save
GB = 1e9


@dataclass(frozen=True, slots=True)
class ExperimentPlan:
    """`bounds`: of a batch, which has `training.minibatches` optimizer steps. `memory_gb`: of each GPU, or of the
    machine, to compare `memory` with; None: unknown. `gpus`: their number; 0: a CPU. On a single GPU, trainer and a
    server on the same machine share its memory. `run_s`: about the seconds of the whole game, without a warm start."""

    experiment: Experiment
    inputs: Inputs
    work: BatchWork
    bounds: StepBounds
    advice: list[str]
    notes: list[str]
    memory: list[MemoryPlan]
    memory_advice: list[str]
    memory_gb: float | None
    gpus: int
    run_s: float

    @property
    def step_s(self) -> float:
        """The least seconds of an optimizer step."""
        return self.bounds.least_s(self.work.ahead) / self.experiment.training.minibatches

    def plain(self) -> dict[str, Any]:
        """As JSON-compatible data."""
        values = {
            name: {"value": found.value, "unit": INPUTS[name][0], "source": found.source}
            for name, found in self.inputs.values.items()
        }
        return {
            "experiment": self.experiment.name,
            "workers": self.work.workers,
            "slots": self.work.slots,
            "concurrency": self.work.concurrency,
            "inputs": values,
            "step_s": self.step_s,
            "bounds": {**_finite(asdict(self.bounds)), "limit": self.bounds.limit},
            "memory": [
                {"stage": m.stage, "place": m.place, "parts": m.parts, "total": m.total, "fits": self.fits(m)}
                for m in self.memory
            ],
            "memory_gb": self.memory_gb,
            "gpus": self.gpus,
            "run_s": self.run_s,
            "advice": self.advice + self.memory_advice,
            "notes": self.notes,
        }

    def fits(self, plan: MemoryPlan) -> bool | None:
        """Whether a stage fits into the memory; None if that is unknown."""
        return None if self.memory_gb is None else plan.total <= self.available_gb(plan) * GB

    @property
    def in_turns(self) -> bool:
        """Whether the server on the trainer's GPU sleeps while the trainer works, so that the larger of both counts."""
        return shares_gpu(self.experiment, self.gpus) and self.experiment.servers_rest

    def available_gb(self, plan: MemoryPlan) -> float:
        """What a stage may take of its GPU. A server takes only its share (serving.gpu_memory_utilization), and on the
        trainer's GPU leaves the rest to it. If it sleeps, the trainer has nearly everything while it works, and
        keeps its weights and optimizer beside the server that samples."""
        memory_gb, share = self.memory_gb or math.inf, self.experiment.serving.gpu_memory_utilization
        if plan.place == "server":
            beside = next(stage.between_steps for stage in self.memory if stage.positions) if self.in_turns else 0.0
            return min(memory_gb * share, memory_gb - beside / GB)
        if self.in_turns:
            return memory_gb - ASLEEP_BYTES / GB
        return memory_gb * (1.0 - share) if shares_gpu(self.experiment, self.gpus) else memory_gb


def plan_of(
    experiment: Experiment,
    inputs: Inputs,
    prover: ModelShape,
    verifier: ModelShape,
    reader: ModelShape | None = None,
    *,
    workers: int | None = None,
    memory_gb: float | None = None,
    gpus: int = 1,
) -> ExperimentPlan:
    """`workers`: instead of the experiment's own. `reader`: of the reward. `memory_gb`, `gpus`: see ExperimentPlan."""
    in_process = isinstance(experiment.rollout.engine, TorchSampling)
    work = work_of(experiment, inputs, workers=workers)
    work = replace(work, one_gpu=work.workers == 1 and shares_gpu(experiment, gpus))
    prompt = max(math.ceil(inputs["prompt_tokens"]), written_tokens(experiment.prompts))
    gpu_bytes = memory_gb * GB if memory_gb and gpus else None
    sizes: dict[str, Any] = {"prompt_tokens": prompt, "slots": work.slots, "gpus": gpus, "reader": reader}
    memory = memory_of(experiment, prover, verifier, gpu_bytes=gpu_bytes, **sizes)
    bounds = bounds_of(work)
    notes = [*warm_start(experiment, inputs), *not_modelled(experiment)]
    if gpus and (host_gb := host_bytes(experiment, prover, verifier) / GB) >= 1:
        notes.append(f"commits keep a copy of {host_gb:.3g} GB in the memory of the host, which no stage includes")
    found = ExperimentPlan(
        experiment,
        inputs,
        work,
        bounds,
        [] if in_process else list(_advice(experiment, work)),
        [f"{note}." for note in notes],
        list(memory),
        [],
        memory_gb,
        gpus,
        _run_s(experiment, work, bounds, verifier.parameters / prover.parameters),
    )
    return replace(found, memory_advice=list(_memory_advice(found)))


def _run_s(experiment: Experiment, work: BatchWork, bounds: StepBounds, verifier_share: float) -> float:
    """Seconds of all rounds: mint, the judge of the first one, verifier phase, prover phase, and the round's test.
    `verifier_share`: the verifier's parameters by the prover's."""
    game, training = experiment.game, experiment.training
    sample_s = bounds.sampling_s / work.rollouts
    batches = game.rounds * math.ceil(training.steps / training.minibatches)
    sampled = 2 * game.rounds * game.test.problems * game.test.samples  # both roles
    sequences = 2 * experiment.verifier.pairs * experiment.judge_steps
    for round_ in range(game.rounds):
        sampled += game.problems_of_mint(round_) * game.mint_samples
        sequences += 2 * experiment.verifier.pairs * experiment.verifier_phase_steps(round_)
    verifier_s = sequences * work.mean_length * work.train_token_s * verifier_share
    return batches * bounds.least_s(work.ahead) + sampled * sample_s + verifier_s


# --- the machine on which pvg runs ------------------------------------------------------------------------------------


def machine_here(experiment: Experiment) -> tuple[str, float, int]:
    """The name of the nearest machine in MACHINES, and the memory in GB and the number of GPUs of this machine (0: the
    experiment computes on the CPU). A GPU that is not in the list counts as an L40S."""
    if not experiment.models.on_gpu:
        fast = "-bfloat16" if experiment.models.compute_dtype == "bfloat16" and native_bfloat16() else ""
        return f"cpu{fast}", usable_memory()[0] / GB, 0
    import torch

    found = torch.cuda.get_device_properties(pick_device(experiment.models.device))
    name = next((name for name in MACHINES if name.upper() in found.name.upper()), "l40s")
    count = max(torch.cuda.device_count(), len(glob("/dev/nvidia[0-9]*")))  # CUDA_VISIBLE_DEVICES may hide some
    return name, found.total_memory / GB, count


def plan_here(
    experiment: Experiment,
    say: Say,
    *,
    gpu: str | None = None,
    given: Sequence[str] = (),
    workers: int | None = None,
    memory_gb: float | None = None,
    gpus: int | None = None,
) -> ExperimentPlan:
    """The plan on this machine, or on one GPU of MACHINES. `given`: inputs as `NAME=VALUE`. Raises UsageError, and the
    errors of `read_shape`."""
    if gpu is not None and experiment.models.device == "auto":  # what "auto" will be there, not here
        models = experiment.models.model_copy(update={"device": "cuda" if machine_named(gpu).memory_gb else "cpu"})
        experiment = experiment.model_copy(update={"models": models})
    players, named = (experiment.models.prover, experiment.models.verifier), experiment.sources().get(READER)
    prover, verifier = (read_shape(base_source(player.source), say) for player in players)
    reader = read_shape(base_source(named), say) if named else None
    name, own_gb, count = gpu or "cpu", machine_named(gpu or "cpu").memory_gb, 1
    if not own_gb:
        name, own_gb, count = machine_here(experiment)
    gpus, memory_gb = gpus or count, memory_gb or own_gb
    inputs = Inputs.assumed(experiment, prover, verifier, MACHINES[name], reader, gpus=gpus)
    inputs.assign(given)
    return plan_of(experiment, inputs, prover, verifier, reader, workers=workers, memory_gb=memory_gb, gpus=gpus)


def machine_named(name: str) -> MachineSpeed:
    """Raises UsageError for a name that is not in MACHINES."""
    if name not in MACHINES:
        raise UsageError(
            f"There is no GPU {name!r} in the planner's list.{did_you_mean(name, list(MACHINES))}",
            f"Known: {', '.join(MACHINES)}. For another one, give the nearest and set its times with --input.",
        )
    return MACHINES[name]


# What pvg gives by itself to the activations of a micro-batch, and to the KV cache. SmolLM2-135M then trains on 1,024
# tokens at a time in float32, where 1,536 were 7 % faster, and on 1,536 in bfloat16: a group of eight solutions of 146
# tokens. With 1,024, it would compute a quarter more positions. That of the cache is chosen for laptops, not measured.
CPU_SHARES_GB = {ACTIVATIONS: 0.65, "KV cache": 2.0}
GPU_SHARE = 0.8  # of what is free of a GPU, for all that the plan counts


def fitted_here(
    experiment: Experiment, say: Say, *, chosen: Collection[str] = (), force: bool = False
) -> tuple[Experiment, str]:
    """The experiment with micro-batches and rows that suit this machine's memory, except for the `chosen` settings, and
    one line about its time and memory. Nothing changes for embedded models, which fit nearly anywhere.

    Raises ConfigurationError if a stage needs more memory than this machine has, unless `force`.
    """
    try:
        plan = plan_here(experiment, say)
    except ConfigurationError as error:  # what is wrong with a model is said where it is opened
        return experiment, f"The plan of memory is missing: {error.message}"
    if experiment.models.embedded:
        return experiment, " ".join([says(plan), *plan.memory_advice])
    smaller: dict[str, Any] = {}
    for stage in plan.memory:
        key = dict(zip(STAGES, FITTED, strict=True))[stage.stage]
        part = ACTIVATIONS if stage.positions else "KV cache"
        if key in chosen or stage.place == "server" or not stage.parts[part]:  # then fewer tokens would save nothing
            continue
        fixed_gb = (stage.total - stage.parts[part]) / GB
        spare_gb = min(CPU_SHARES_GB[part], (usable_memory()[1] / GB - fixed_gb) / 2)
        if plan.gpus:
            spare_gb = GPU_SHARE * (plan.available_gb(stage) - others_bytes(experiment, plan.gpus) / GB) - fixed_gb
        row = math.ceil(plan.inputs["prompt_tokens"]) + experiment.rollout.max_tokens
        # Prompts may be longer than assumed, so there is room for some rows.
        unit, least = (1, 16) if stage.rows else (256, max(1024, 2 * row))
        amount = max(int((stage.rows or stage.positions) * spare_gb * GB / stage.parts[part]) // unit * unit, least)
        if amount < min(stage.rows or stage.positions, value_of(experiment, key)):
            smaller[key] = amount
    line = ""
    if smaller and (other := changed(experiment, smaller)) is not None:
        experiment, plan = other, plan_here(other, say)
        line = f"So that they fit into the memory: {', '.join(f'{key} = {n}' for key, n in smaller.items())}. "
    if plan.memory_advice and not force:
        raise ConfigurationError(plan.memory_advice[0], "Details: pvg plan. To play anyway, add --force.")
    return experiment, line + says(plan)


def says(plan: ExperimentPlan) -> str:
    """One line: the time of the game and its peak of memory."""
    peak = max(plan.memory, key=lambda stage: stage.total / plan.available_gb(stage))
    of = f" of {plan.available_gb(peak):.3g}" if plan.memory_gb else ""
    time = f"{'at least' if plan.notes else 'about'} {short_seconds(plan.run_s)}"  # the notes say what it leaves out
    return f"By the plan, the game takes {time} and {peak.total / GB:.2g}{of} GB of memory."


def _loads(experiment: Experiment, key: str, value: Any) -> bool:
    """Whether the experiment can have this value, and has another one now."""
    return changed(experiment, {key: value}) not in (None, experiment)


def _advice(experiment: Experiment, work: BatchWork) -> Iterator[str]:
    """What to change: only settings that load together with the others."""
    bounds = bounds_of(work)
    least_s = bounds.least_s(work.ahead)
    most = min(work.workers * work.slots, work.rollouts * (1 + work.ahead))
    if work.concurrency < most:
        found_s = bounds_of(replace(work, concurrency=most)).least_s(work.ahead)
        if found_s < (1 - WORTH) * least_s and _loads(experiment, "rollout.concurrency", most):
            yield (
                f"The workers decode {work.workers * work.slots:,} rows: set rollout.concurrency = {most}. A batch "
                f"takes at least {sample_seconds(found_s)} instead of {sample_seconds(least_s)}."
            )
    waiting = 1 - bounds.trainer_s / least_s
    if waiting <= WAITS or (work.one_gpu and bounds.overlap_s > (1 - WORTH) * least_s):
        return
    enough = math.ceil(work.rollouts * (1 + work.ahead) / work.slots)  # every rollout in flight has a row
    if work.ahead and work.workers < enough:
        number = min(math.ceil(bounds.balance), enough) if math.isfinite(bounds.balance) else enough
        says = f"{counted(number, 'worker')} would balance it at best"
    elif work.ahead:
        says = "More workers do not help: raise rollout.prefetch.batches, or shorten the longest rollouts"
    elif _loads(experiment, "rollout.prefetch", "fresh"):
        says = (
            "With sampling ahead (rollout.prefetch = 'fresh') a batch takes at least "
            f"{sample_seconds(bounds.overlap_s)} instead of {sample_seconds(least_s)}, but is sampled with older "
            "weights, which changes what is learned"
        )
    else:
        says = "Other settings of this experiment exclude sampling ahead (rollout.prefetch)"
    yield f"The trainer waits at least {in_percent(waiting)} of the time for rollouts. {says}."


def _memory_advice(plan: ExperimentPlan) -> Iterator[str]:
    for stage in plan.memory:
        if plan.fits(stage) is not False:
            continue
        available, served = plan.available_gb(stage) * GB, stage.place == "server"
        largest = max(stage.parts, key=stage.parts.__getitem__)
        shared = available < (plan.memory_gb or 0.0) * GB
        limit = "the GPU has" if plan.gpus else "the machine has"
        if served or shared:
            limit = "a server may take of its GPU" if served else "the server leaves of the GPU"
            limit += " (serving.gpu_memory_utilization)"
        if stage.stage == "sample":
            rows = int((available - (stage.total - stage.parts["KV cache"])) // stage.kv_row_bytes)
            key = "serving.max_num_seqs" if served else "rollout.engine.max_rows"
            remedies = [f"{key} = {rows}"] * (rows > 0) or ["a higher serving.tensor_parallel"] * served
        else:
            remedies = list(_training_remedies(plan.experiment, stage.stage, largest))
        yield (
            f"'{stage.stage}' needs {(stage.total - available) / GB:.3g} GB more than {limit}; the largest part is "
            f"{largest}. Set {', or '.join([*remedies, 'a smaller model (models.*.source)'])}."
        )


def _training_remedies(experiment: Experiment, stage: str, largest: str) -> Iterator[str]:
    section = "training" if stage == "train the prover" else "verifier"
    if largest.startswith("activations"):
        if section == "training" and _loads(experiment, "training.gradient_checkpointing", True):
            yield "training.gradient_checkpointing = true"
        tokens = (experiment.training if section == "training" else experiment.verifier).micro_batch_tokens
        if _loads(experiment, f"{section}.micro_batch_tokens", tokens // 2):
            yield f"a lower {section}.micro_batch_tokens"
    if not getattr(experiment, section).adapters.rank and _loads(experiment, f"{section}.adapters.rank", 16):
        yield f"{section}.adapters.rank = 16"


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    return {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in values.items()}
