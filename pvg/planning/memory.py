"""How much memory an experiment needs: weights, gradients, optimizer, activations and KV cache, by stage.

    for plan in memory_of(experiment, prover, verifier, prompt_tokens=256, slots=256, gpu_bytes=None):
        plan.total, plan.parts

The peak of a training step is the larger of two moments: the start of the backward pass (all activations, no gradients
but the head's) and its end (all gradients, one layer's activations). AdamW keeps two float32 moments per trained
parameter.

Activations per position of a layer, as autograd saves them with pvg's layers (pvg.models.shared_prompts), D the width,
Q the columns of the queries, I those of the MLP: two norms 4 D, attention 5 Q (queries; keys and values repeated for
all heads; the mixed values twice), MLP 4 I. In bfloat16 these take 2 bytes each, and float32 parts of norms and
rotations add 3.6 D x 4 bytes. Without fused layers a layer saves 2 D more. tests/planning compares the sums with
measured peaks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from pvg.config.experiment import Experiment
from pvg.config.rollout import TorchSampling
from pvg.planning.shapes import ModelShape

FLOAT32 = 4
BYTES = {"float32": 4, "bfloat16": 2}
# As DEFAULT_LOGITS_CHUNK and GPU_LOGITS_SHARE of pvg.models.logprobs, which loads torch.
LOGITS_CHUNK, GPU_LOGITS_SHARE = 4_194_304, 1 / 128
LOGITS_COPIES = 3  # the chunk's logits, their probabilities, and the gradient
CONTEXT_BYTES = 600 << 20  # of a process on a GPU: assumed. A CUDA context takes 300 to 600 MiB.
Place = Literal["trainer", "server"]


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The peak of one stage. `parts`: bytes by what they are for. `place`: the process that takes them. In a stage that
    samples, `rows` rollouts have a KV cache of `kv_row_bytes` each."""

    stage: str
    place: Place
    parts: dict[str, float] = field(default_factory=dict)
    rows: int = 0
    kv_row_bytes: float = 0.0

    @property
    def total(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True)
class ModelInTraining:
    """A model in training. `trained`: parameters with a gradient. `dtype`: of the weights; `precision`: of the
    passes."""

    shape: ModelShape
    trained: int
    adapters: bool
    dtype: str
    precision: str
    checkpointing: bool = False
    fused: bool = True

    @property
    def half(self) -> bool:
        return "bfloat16" in (self.dtype, self.precision)


def layer_bytes(model: ModelInTraining) -> float:
    """Bytes that autograd saves per position of a layer."""
    shape = model.shape
    numbers = (4 if model.fused else 6) * shape.width + 5 * shape.queries + 4 * shape.inner
    if not model.half:
        return FLOAT32 * numbers
    return 2 * (numbers - 2 * shape.width) + FLOAT32 * 3.6 * shape.width


def training_parts(model: ModelInTraining, positions: int, gpu_bytes: float | None = None) -> dict[str, float]:
    """The peak of an optimizer step whose micro-batches have `positions` positions, without the frozen weights.
    `gpu_bytes`: the memory of the GPU, whose size sets the chunk of logits; None: a CPU."""
    shape = model.shape
    chunk = LOGITS_CHUNK if gpu_bytes is None else max(LOGITS_CHUNK, int(gpu_bytes * GPU_LOGITS_SHARE / FLOAT32))
    logits = min(chunk, positions * shape.vocabulary)
    number = 2 if model.half else FLOAT32
    layer = layer_bytes(model) * positions
    inputs = shape.layers * shape.width * number * positions if model.checkpointing else 0.0
    everything = inputs + layer if model.checkpointing else shape.layers * layer
    # After the last layer: its norm, and the states before the head.
    after = positions * 3 * shape.width * number + FLOAT32 * LOGITS_COPIES * logits
    head_gradient = 0.0 if model.adapters else FLOAT32 * shape.vocabulary * shape.width
    cast_weights = 2.0 * shape.parameters if model.precision == "bfloat16" and model.dtype == "float32" else 0.0
    gradients = FLOAT32 * model.trained
    start = everything + after + head_gradient
    end = layer + gradients
    return {
        "trained weights": float(FLOAT32 * model.trained),
        "gradients, at the peak": gradients if end >= start else head_gradient,
        "optimizer": 2.0 * FLOAT32 * model.trained,
        "bfloat16 copies of weights": cast_weights,
        "activations, at the peak": layer if end >= start else everything + after,
    }


def memory_of(
    experiment: Experiment,
    prover: ModelShape,
    verifier: ModelShape,
    *,
    prompt_tokens: int,
    slots: int,
    gpu_bytes: float | None,
) -> Iterator[MemoryPlan]:
    """The stages of a round, each with its peak. `slots`: rollouts that a server decodes at once. `gpu_bytes`: the
    memory of the GPU; then the plan counts what a process on a GPU takes besides. None: a CPU."""
    models, rollout = experiment.models, experiment.rollout
    length = prompt_tokens + rollout.max_tokens
    base = prover.parameters * BYTES[models.prover.dtype]
    sampling = BYTES[models.prover.dtype if rollout.dtype == "model" else rollout.dtype]
    engine, copy = rollout.engine, {}
    if isinstance(engine, TorchSampling):
        copy = {"weights of the sampler": float(prover.parameters * sampling)}
    context = {"GPU context (assumed)": float(CONTEXT_BYTES)} if gpu_bytes is not None else {}
    frozen = {"base prover": float(base), **copy, **context}

    policy, scoring = _policy(experiment, prover), _verifier(experiment, verifier)
    verifier_bytes = _scoring_bytes(experiment, scoring)
    numbers = experiment.arithmetic()
    batch = numbers.rollouts_per_optimizer_step * length
    training = training_parts(policy, max(length, min(experiment.training.micro_batch_tokens, batch)), gpu_bytes)
    yield MemoryPlan("train the prover", "trainer", {**frozen, "verifier": verifier_bytes, **training})

    pairs = 2 * experiment.verifier.pairs * length
    own = training_parts(scoring, max(2 * length, min(experiment.verifier.micro_batch_tokens, pairs)), gpu_bytes)
    start = _frozen_verifier_bytes(experiment, scoring)
    yield MemoryPlan("train the verifier", "trainer", {**frozen, "verifier's initial weights": start, **own})

    kv_row = float(length * prover.kv_bytes(sampling))
    if isinstance(engine, TorchSampling):
        rows = min(engine.max_rows, experiment.training.groups * rollout.group_size)
        resident = {name: training[name] for name in ("trained weights", "optimizer")}
        parts = {**frozen, "verifier": verifier_bytes, **resident, "KV cache": rows * kv_row}
        yield MemoryPlan("sample", "trainer", parts, rows, kv_row)
    else:
        share = experiment.serving.tensor_parallel
        weights = prover.parameters * sampling / share
        parts = {"weights of the server": weights, **context, "KV cache": slots * kv_row / share}
        yield MemoryPlan("sample", "server", parts, slots, kv_row / share)


def _policy(experiment: Experiment, shape: ModelShape) -> ModelInTraining:
    training, adapters = experiment.training, experiment.training.adapters
    return ModelInTraining(
        shape,
        shape.adapter_parameters(adapters.rank) if adapters.rank else shape.parameters,
        bool(adapters.rank),
        experiment.models.prover.dtype,
        training.precision,
        training.gradient_checkpointing,
        training.fused_layers,
    )


def _verifier(experiment: Experiment, shape: ModelShape) -> ModelInTraining:
    section = experiment.verifier
    trained = shape.adapter_parameters(section.adapters.rank) if section.adapters.rank else shape.parameters
    rank = bool(section.adapters.rank)
    return ModelInTraining(shape, trained, rank, experiment.models.verifier.dtype, section.precision, fused=False)


def _on_base(experiment: Experiment) -> bool:
    """As pvg.models.sources.verifier_is_on_base."""
    return bool(experiment.verifier.adapters.rank) and experiment.models.verifier == experiment.models.prover


def _frozen_verifier_bytes(experiment: Experiment, verifier: ModelInTraining) -> float:
    """What training the verifier needs besides the trained weights: under adapters the frozen model, for the implicit
    head the initial weights, which give the reference."""
    weights = float(verifier.shape.parameters * BYTES[verifier.dtype])
    if verifier.adapters:
        return 0.0 if _on_base(experiment) else weights
    return weights if experiment.verifier.head.kind == "implicit" else 0.0


def _scoring_bytes(experiment: Experiment, verifier: ModelInTraining) -> float:
    """The frozen verifiers of a prover phase, with what their scores need."""
    own = float(FLOAT32 * verifier.trained if verifier.adapters else verifier.shape.parameters * BYTES[verifier.dtype])
    return experiment.verifier.ensemble.size * own + _frozen_verifier_bytes(experiment, verifier)
