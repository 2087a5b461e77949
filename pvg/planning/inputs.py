"""What a prediction depends on besides the experiment: estimated, assumed, or given by the user.

    inputs = Inputs.assumed(experiment, prover, verifier, MACHINES["h100"])
    inputs.assign(["token_s=0.02"])           # from the user
    work = work_of(experiment, inputs, workers=8)

Each value has a source, which the report shows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from pvg.config.experiment import Experiment
from pvg.config.load import nearest
from pvg.config.operation import LocalCluster, RayCluster, has_workers, processes_of, ranks_of, shards_of
from pvg.config.rollout import SamplingAhead, TorchSampling
from pvg.config.training import DemonstrationWarmup
from pvg.errors import UsageError, counted
from pvg.planning.bounds import BatchWork, expected_longest, lognormal_lengths
from pvg.planning.memory import BYTES
from pvg.planning.shapes import ModelShape
from pvg.reporting.formats import compact, short_seconds

# --- GPUs by their data sheets, and how well they are used -----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MachineSpeed:
    """`flops`: dense bfloat16 operations per second. `bytes_per_s`: memory bandwidth. `memory_gb`: 10^9 bytes; 0: not a
    GPU. `source`: where the figures come from."""

    flops: float
    bytes_per_s: float
    memory_gb: float
    source: str


# The dense bfloat16 rate, the memory bandwidth and the memory of NVIDIA's data sheets (SXM where there are several).
MACHINES: dict[str, MachineSpeed] = {
    "h100": MachineSpeed(989e12, 3.35e12, 80.0, "data sheet"),
    "h200": MachineSpeed(989e12, 4.8e12, 141.0, "data sheet"),
    "a100": MachineSpeed(312e12, 2.04e12, 80.0, "data sheet"),
    "h20": MachineSpeed(148e12, 4.0e12, 96.0, "data sheet"),
    "l40s": MachineSpeed(362e12, 0.864e12, 48.0, "data sheet"),
    # Two cores: 195 GFLOP/s of float32 matrix products, measured; the bandwidth is that of one memory channel.
    "cpu": MachineSpeed(195e9, 20e9, 0.0, "two cores"),
}

# Share of the bandwidth that a decoding step reaches. Assumed.
DECODING_SHARE = 0.5
# Share of the arithmetic rate that training reaches. Llama 3 reports 0.38 to 0.43 for pretraining (arXiv 2407.21783);
# batches of short rows reach less. Assumed.
TRAINING_SHARE = 0.3
# Bytes per second of a weight update through a shared folder, written and read once. Assumed.
UPDATE_BYTES_PER_S = 1e9

# --- the inputs -------------------------------------------------------------------------------------------------------

# Name -> (unit, meaning).
INPUTS: dict[str, tuple[str, str]] = {
    "mean_tokens": ("tokens", "mean length of a completion"),
    "sigma": ("", "standard deviation of the logarithm of the length (log-normal, cut at rollout.max_tokens)"),
    "prompt_tokens": ("tokens", "length of a prompt"),
    "token_s": ("s", "decoding step of a worker, without the part that grows with its rows"),
    "row_s": ("s", "what each row adds to a decoding step"),
    "request_s": ("s", "time of a request besides its tokens: the prompt, and the way"),
    "train_token_s": ("s", "training per completion token, with the reference's log-probs"),
    "other_s": ("s", "other work of the trainer per batch: scores, credit, records"),
    "update_s": ("s", "weight update: the trainer waits"),
}
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
    def assumed(cls, experiment: Experiment, prover: ModelShape, verifier: ModelShape, machine: MachineSpeed) -> Inputs:
        """Estimates from the models' sizes and the machine's speed."""
        rollout, training = experiment.rollout, experiment.training
        number = BYTES[experiment.models.prover.dtype if rollout.dtype == "model" else rollout.dtype]
        mean, prompt = max(1.0, rollout.max_tokens / 2), max(1.0, min(256.0, rollout.max_tokens))
        served = not isinstance(rollout.engine, TorchSampling)
        gpus = experiment.serving.tensor_parallel if served else 1  # each has a part of the weights and of the keys
        per_s = gpus * machine.bytes_per_s * DECODING_SHARE
        # A multiply and an add per weight: forward 2, backward 4, recomputed activations 2, the reference 2.
        operations = 6.0 + 2.0 * training.gradient_checkpointing + 2.0 * (training.kl.kind != "none")
        flops = machine.flops * TRAINING_SHARE
        tokens = 1 + prompt / mean / (rollout.group_size if training.shared_prompts else 1)
        rollouts = training.groups * rollout.group_size
        scores = 0.0
        if experiment.verifier.engine == "torch":
            scores = rollouts * 2.0 * verifier.parameters * (prompt + mean) / flops
        lora = experiment.weights.transport.kind == "lora"
        sent = (prover.adapter_parameters(training.adapters.rank) * 4 if lora else prover.parameters * number) * 2
        update = 0.5 + sent / UPDATE_BYTES_PER_S if served else 0.0
        place = f"estimate: {compact(prover.parameters)} parameters, {machine.source}"
        on_worker = place if gpus == 1 else f"{place}, {gpus} GPUs without their exchange"
        found = {
            "mean_tokens": (mean, "assumed: half of rollout.max_tokens"),
            "sigma": (0.6, "assumed"),
            "prompt_tokens": (prompt, "assumed"),
            "token_s": (prover.parameters * number / per_s, on_worker),
            "row_s": (prover.kv_bytes(number) * (prompt + mean / 2) / per_s, on_worker),
            "request_s": (2.0 * prover.parameters * prompt / (gpus * flops), on_worker),
            "train_token_s": (operations * prover.parameters * tokens / flops, place),
            "other_s": (scores, f"estimate: {compact(verifier.parameters)} parameters, {machine.source}"),
            "update_s": (update, "estimate: 1 GB/s"),
        }
        return cls({name: PlanInput(value, source) for name, (value, source) in found.items()})


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
    rollout, training = experiment.rollout, experiment.training
    configured, slots = workers_of(experiment)
    rollouts = training.groups * rollout.group_size
    lengths = lognormal_lengths(inputs["mean_tokens"], inputs["sigma"], rollout.max_tokens)
    ahead = isinstance(rollout.prefetch, SamplingAhead) and overlaps(experiment)
    return BatchWork(
        rollouts=rollouts,
        mean_length=float(lengths.mean()),
        longest=expected_longest(lengths, rollouts),
        workers=workers or configured,
        slots=slots,
        concurrency=rollout.concurrency,
        token_s=inputs["token_s"],
        row_s=inputs["row_s"],
        request_s=inputs["request_s"],
        train_token_s=inputs["train_token_s"],
        other_s=inputs["other_s"],
        update_s=inputs["update_s"],
        ahead=rollout.prefetch.batches if ahead else 0,
    )


def not_modelled(experiment: Experiment) -> list[str]:
    """Settings that change a step's time or its memory and are not part of the model: one sentence each."""
    found, ranks = [], ranks_of(experiment.cluster)
    if experiment.server_cluster is None and has_workers(experiment.cluster):
        found.append(
            "workers of the cluster also train, and have copies of the models: the memory, and an estimated "
            "train_token_s, are those of one process"
        )
    if ranks is not None:
        found.append(
            f"cluster.trainer_ranks = {ranks} is not modelled: the trainer's memory, and an estimated "
            f"train_token_s, are those of one process. A rank keeps 1/{ranks} of the trained weights, gradients and "
            "optimizer, and has all weights of a layer for a moment"
        )
    if experiment.rollout.deadline.kind != "none":
        found.append("rollout.deadline is not modelled: the plan waits for all rollouts of a batch")
    if experiment.training.dynamic_sampling:
        found.append("training.dynamic_sampling is not modelled: resampled groups take longer than planned")
    if experiment.rollout.prefetch.kind != "none" and not overlaps(experiment):
        found.append("rollout.prefetch overlaps nothing with rollout.engine = 'torch', so the plan has none")
    if experiment.game.schedule.kind == "simultaneous":
        found.append("game.schedule = 'simultaneous' is not modelled: the verifier's updates take longer than planned")
    if experiment.game.protocol.kind != "direct":
        found.append(
            f"game.protocol = {experiment.game.protocol.kind!r} is not modelled: a rollout is one request here"
        )
    return found


def warm_start(experiment: Experiment, inputs: Inputs) -> list[str]:
    """One sentence about the time before the first step; none without a warm start."""
    section = experiment.warmup
    if not isinstance(section, DemonstrationWarmup):
        return []
    seconds = section.steps * section.batch * inputs["mean_tokens"] * inputs["train_token_s"]
    return [
        f"the warm start comes before the first step, and no time above includes it: {counted(section.steps, 'step')} "
        f"of {counted(section.batch, 'solution')}, about {short_seconds(seconds)} if a solution has mean_tokens"
    ]
