"""How much memory an experiment needs: weights, gradients, optimizer, activations and KV cache, by stage.

    for plan in memory_of(experiment, prover, verifier, prompt_tokens=256, slots=256, gpu_bytes=None):
        plan.total, plan.parts

The peak of a training step is the larger of two moments: the start of the backward pass (all activations, no gradients
but the head's) and its end (all gradients, one layer's activations). AdamW keeps two float32 moments per trained
parameter.

Activations per position of a layer, as autograd saves them with pvg's layers (pvg.models.shared_prompts), D the width,
Q the columns of the queries, I those of the MLP: two norms 4 D, attention 5 Q (queries; keys and values repeated for
all heads; the mixed values twice), MLP 4 I. In bfloat16 these take 2 bytes each, and float32 parts of norms and
rotations add 3.6 D x 4 bytes. Without fused layers a layer saves 2 D more. tests/planning compares the sums with what
autograd saves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any, Literal

import orjson
from safetensors import SafetensorError, safe_open

import pvg
from pvg.config.base import is_hub_id, is_run_id, parse_run_id
from pvg.config.experiment import Experiment
from pvg.config.rollout import TorchSampling
from pvg.errors import ConfigurationError, MissingRequirementError, user_paths
from pvg.hub import Say, fetch_config
from pvg.inputs import expanded
from pvg.store.run_players import find_player

# `ModelShape`: the sizes of a model, read from its config.json, without its weights and without torch.


EMBEDDED = Path(pvg.__file__).parent / "models" / "embedded"
# Decoders with three MLP matrices and two norms per layer: (biases of queries, keys and values; norms of queries and
# keys).
FAMILIES = {"llama": (False, False), "mistral": (False, False), "qwen2": (True, False), "qwen3": (False, True)}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """`width`: of the hidden states. `queries` and `keys`: columns of the projections of queries, and of keys or
    values. `counted`: how `parameters` were found."""

    name: str
    layers: int
    width: int
    inner: int
    queries: int
    keys: int
    vocabulary: int
    parameters: int
    counted: str

    def kv_bytes(self, number_bytes: int) -> int:
        """Bytes of the KV cache per token."""
        return 2 * self.layers * self.keys * number_bytes

    def adapter_parameters(self, rank: int) -> int:
        """Parameters of low-rank adapters on all linear layers but the head."""
        attention = 2 * (self.width + self.queries) + 2 * (self.width + self.keys)
        return self.layers * rank * (attention + 3 * (self.width + self.inner))


def read_shape(source: str, say: Say) -> ModelShape:
    """The shape of a model source (pvg.config.training.ModelSection). Downloads at most a config.json, after a line to
    `say`. Raises MissingRequirementError or ConfigurationError if there is none, or if it lacks a size."""
    kind, separator, rest = source.partition(":")
    if is_run_id(source):
        saved = find_player(parse_run_id(source))
        return replace(read_shape(saved.section.source, say), name=saved.name)
    if is_hub_id(source):
        return _of_folder(fetch_config(source, say).parent, source)
    if separator and kind == "embedded":
        return _of_folder(EMBEDDED / rest, source)
    if separator and kind == "gguf":
        return _of_gguf(rest)
    return _of_folder(expanded(source, "models"), source)


def _of_folder(folder: Path, source: str) -> ModelShape:
    path = folder / "config.json"
    if not path.is_file():
        raise MissingRequirementError(
            f"There is no config.json of the model {source!r}.",
            "Set models.prover.source and models.verifier.source to models or folders that have one.",
        )
    with user_paths():
        text = path.read_bytes()
    try:
        config = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise ConfigurationError(f"{path} is not JSON: {error}.") from None
    if not isinstance(config, dict):
        raise ConfigurationError(f"{path} is not a table of settings.")
    return shape_of(config, path)


def shape_of(config: Mapping[str, Any], path: Path) -> ModelShape:
    """The shape that a config.json at `path` describes."""

    def size(*names: str) -> int:
        for name in names:
            value = config.get(name)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
        raise ConfigurationError(f"{path} has no {names[0]}, which the planner needs.", "Name another model.")

    width, heads = size("hidden_size", "n_embd"), size("num_attention_heads", "n_head")
    layers = size("num_hidden_layers", "n_layer")
    head = size("head_dim") if isinstance(config.get("head_dim"), int) else width // heads
    key_heads = size("num_key_value_heads") if config.get("num_key_value_heads") else heads
    inner = size("intermediate_size", "n_inner") if config.get("intermediate_size") else 4 * width
    tied = bool(config.get("tie_word_embeddings", config.get("model_type") not in FAMILIES))
    queries, keys, vocabulary = heads * head, key_heads * head, size("vocab_size")
    family = str(config.get("model_type"))
    found = _in_weights(path.parent)
    if found is not None:
        parameters, counted = found, "its weights file"
    elif family in FAMILIES:
        biases, norms = FAMILIES[family]
        layer = 2 * width * (queries + keys) + 3 * width * inner + 2 * width
        layer += biases * (queries + 2 * keys) + norms * 2 * head
        parameters = layers * layer + (1 if tied else 2) * vocabulary * width + width
        counted = "its sizes"
    else:
        parameters, counted = _by_torch(path.parent), "transformers"
    return ModelShape(path.parent.name, layers, width, inner, queries, keys, vocabulary, parameters, counted)


def _in_weights(folder: Path) -> int | None:
    """Parameters in the headers of the safetensors files; None without files."""
    files = sorted(folder.glob("model*.safetensors"))
    index = folder / "model.safetensors.index.json"
    if not files or (
        index.is_file() and len(files) < len(set(orjson.loads(index.read_bytes())["weight_map"].values()))
    ):
        return None
    return sum(_in_file(file) for file in files)


def _in_file(file: Path) -> int:
    try:
        with safe_open(file, framework="numpy") as tensors:
            return sum(prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118
    except SafetensorError:
        raise ConfigurationError(f"{file} is not a whole safetensors file.", "Download or save it again.") from None


def _by_torch(folder: Path) -> int:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        with torch.device("meta"):
            module = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{folder} cannot be opened: {str(error).splitlines()[0]}") from error
    return sum(parameter.numel() for parameter in module.parameters())


def _of_gguf(package: str) -> ModelShape:
    """The shape in the metadata of a GGUF file. Its reader loads torch, as opening the model does."""
    from pvg.models.sources import gguf_file

    file = gguf_file(package.replace("-", "_"))
    from gguf import GGUFReader

    reader = GGUFReader(file)
    family = str(reader.fields["general.architecture"].contents())

    def field(name: str, otherwise: int | None = None) -> int:
        found = reader.fields.get(f"{family}.{name}")
        if found is None and otherwise is not None:
            return otherwise
        if found is None:
            raise ConfigurationError(f"{file} has no {family}.{name}, which the planner needs.", "Name another model.")
        return int(found.contents())

    width, heads = field("embedding_length"), field("attention.head_count")
    head = field("attention.key_length", width // heads)
    tensors = {tensor.name: [int(side) for side in tensor.shape] for tensor in reader.tensors}
    return ModelShape(
        file.stem,
        field("block_count"),
        width,
        field("feed_forward_length"),
        heads * head,
        field("attention.head_count_kv", heads) * head,
        prod(tensors["token_embd.weight"]) // width,
        sum(prod(shape) for shape in tensors.values()),
        "its GGUF file",
    )


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
    base = prover.parameters * BYTES[models.dtype]
    sampling = BYTES[models.sampling_dtype]
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
        experiment.models.dtype,
        experiment.models.compute_dtype,
        training.gradient_checkpointing,
    )


def _verifier(experiment: Experiment, shape: ModelShape) -> ModelInTraining:
    section = experiment.verifier
    trained = shape.adapter_parameters(section.adapters.rank) if section.adapters.rank else shape.parameters
    rank = bool(section.adapters.rank)
    models = experiment.models
    return ModelInTraining(shape, trained, rank, models.dtype, models.compute_dtype, fused=False)


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
