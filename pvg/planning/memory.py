"""How much memory an experiment needs: weights, gradients, optimizer, activations and KV cache, by stage.

    for plan in memory_of(experiment, prover, verifier, prompt_tokens=256, slots=256, gpu_bytes=None):
        plan.total, plan.parts

The peak of a training step is the larger of two moments: the start of the backward pass (all activations; no gradients
but the head's and those of earlier micro-batches) and its end (all gradients, one layer's activations). AdamW keeps two
float32 moments per trained parameter.

Activations are counted, not estimated: pvg's own passes run on models of the same configuration with one and with two
layers, whose tensors have a size and no memory (torch's fake tensors), and their live bytes are added up. So the counts
hold for every architecture, with and without adapters, in both precisions.
"""

from __future__ import annotations

import copy
import math
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast
from urllib.parse import urlsplit

import numpy as np

import pvg
from pvg.config.base import READER, is_hub_id, is_run_id, parse, parse_run_id
from pvg.config.experiment import Experiment
from pvg.config.operation import LocalCluster, has_workers, ranks_of
from pvg.config.rollout import Prompts, TorchSampling, WordedPrompts
from pvg.config.training import AnswerHead, LastTokenHead, OwnHead, VerdictHead
from pvg.errors import ConfigurationError, MissingRequirementError
from pvg.hub import Say, fetch_config
from pvg.inputs import expanded
from pvg.servers.command import is_loopback
from pvg.store.run_players import find_player

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

EMBEDDED = Path(pvg.__file__).parent / "models" / "embedded"


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a model, without its weights. `width`: of the hidden states. `keys`: columns of the projection of
    keys, or of values. `sides`: the sum of both sides of all linear layers but the head. `config`: of its text model;
    None: activations are not counted. `packed`: the most tokens of rows that can share prompts; 0: none can.
    `linear`: the weights of all linear layers but the head."""

    name: str
    layers: int
    width: int
    keys: int
    vocabulary: int
    parameters: int
    sides: int
    config: PreTrainedConfig | None = field(default=None, compare=False, repr=False)
    packed: int = sys.maxsize
    linear: int = 0

    def kv_bytes(self, number_bytes: int) -> int:
        """Bytes of the KV cache per token."""
        return 2 * self.layers * self.keys * number_bytes

    def streamed(self, layers: int) -> float:
        """Parameters of some layers, and of what is outside of the layers."""
        ends = self.vocabulary * self.width
        if self.config is not None and not self.config.tie_word_embeddings:
            ends *= 2
        return ends + layers * (self.parameters - ends) / self.layers

    def rounded(self, dtype: str, precision: str, *, head: bool = False) -> float:
        """Bytes of frozen weights after pvg.models.adapters.round_products."""
        products = self.linear
        if head and self.config is not None and not self.config.tie_word_embeddings:
            products += self.vocabulary * self.width
        return float(self.parameters * BYTES[dtype] - products * max(0, BYTES[dtype] - BYTES[precision]))

    def adapter_parameters(self, rank: int) -> int:
        """Parameters of low-rank adapters on all linear layers but the head."""
        return rank * self.sides


def read_shape(source: str, say: Say) -> ModelShape:
    """The shape of a model source (pvg.config.training.ModelSection). Downloads at most a config.json, after a line to
    `say`; nothing for the models in shapes.toml. Raises MissingRequirementError or ConfigurationError if there is none,
    or if transformers cannot read it."""
    kind, separator, rest = source.partition(":")
    if is_run_id(source):
        saved = find_player(parse_run_id(source))
        return replace(read_shape(saved.section.source, say), name=saved.name)
    if separator and kind == "gguf":
        from pvg.models.sources import gguf_file

        file = gguf_file(rest.replace("-", "_"))
        return shape_of(file.parent, file.stem, gguf_file=file.name)
    if is_hub_id(source):
        name = parse(source).repository
        if known := tomllib.loads(Path(__file__).with_name("shapes.toml").read_text(encoding="utf-8")).get(name):
            from transformers import AutoConfig

            return shape_from(AutoConfig.for_model(**known), name.rpartition("/")[2])
        folder = fetch_config(source, say).parent
    else:
        folder = EMBEDDED / rest if separator and kind == "embedded" else expanded(source, "models")
    if not folder.is_dir():
        from pvg.models.sources import located

        folder, _ = located(source)  # raises what opening the model would raise
    if not (folder / "config.json").is_file():
        raise MissingRequirementError(
            f"There is no config.json of the model {source!r}.",
            "Set models.prover.source and models.verifier.source to models or folders that have one.",
        )
    return shape_of(folder, folder.name)


def shape_of(folder: Path, name: str, **how: str) -> ModelShape:
    """The shape that a configuration in `folder` describes. `how`: arguments of transformers."""
    from transformers import AutoConfig

    from pvg.models.compute import explained

    remedy = "Correct its config.json, or name another model."
    with explained(f"transformers cannot read the configuration in {folder}", remedy):
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **how)
        return shape_from(config, name)


def shape_from(config: PreTrainedConfig, name: str) -> ModelShape:
    from pvg.models.adapters import linear_layers
    from pvg.models.shared_prompts import longest_by_structure

    module, text = _weightless(config), config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    return ModelShape(
        name,
        text.num_hidden_layers,
        text.hidden_size,
        heads * (getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads),
        text.vocab_size,
        sum(parameter.numel() for parameter in module.parameters()),
        sum(sum(layer.weight.shape) for layer in linear_layers(module).values()),
        text,
        longest_by_structure(module),
        sum(layer.weight.numel() for layer in linear_layers(module).values()),
    )


def _weightless(config: PreTrainedConfig, dtype: str = "float32") -> PreTrainedModel:
    """The model of a configuration, whose weights have no memory."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return cast("PreTrainedModel", AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval())


@dataclass(frozen=True, slots=True)
class Activations:
    """What a step holds besides weights, in bytes. After the forward pass, for the backward pass: `layer`, per position
    of a layer; `outside`, per position, outside of the layers; `copies`, per layer, whatever the number of positions:
    weights that were cast to the precision of the pass. `passing`: what the backward pass of a layer holds besides, per
    position. If the last layer computes a few tokens alone, `outside` is less by what it saves, below 0."""

    layer: float
    outside: float
    copies: float
    passing: float


# Rows of equal length with one prompt: as many as a group usually has.
GROUP = 8


@dataclass(frozen=True, slots=True)
class Pass:
    """A forward pass of groups of GROUP rows with one prompt. `rank`: of adapters, 0 without. `fused`: pvg's own code
    of a layer. `on_gpu`: with the attention that a GPU has in 16 bits. Lengths in tokens. `shared`: the prompt is
    computed once; otherwise each row is computed whole, by the model's own code. `last`: a verifier's head needs the
    last hidden states alone, and no log-probs."""

    dtype: str
    precision: str
    rank: int = 0
    fused: bool = True
    on_gpu: bool = False
    prompt: int = 64
    completion: int = 192
    shared: bool = True
    last: bool = False

    @property
    def positions(self) -> int:
        """Positions of a group: with a shared prompt, without the rows' last tokens if these predict nothing."""
        whole = GROUP * (self.prompt + self.completion)
        return self.prompt + GROUP * (self.completion - 1 + self.last) if self.shared else whole


@lru_cache(maxsize=256)
def activations_of(shape: ModelShape, forward: Pass) -> Activations:
    """Raises ConfigurationError for a model that needs numbers to compute, such as those that choose experts."""
    if _has_experts(shape.config) and forward.dtype == "float32":
        # torch knows the sizes of products of experts only for weights in bfloat16.
        halves = activations_of(shape, replace(forward, dtype="bfloat16", precision="bfloat16"))
        factor = 2 if forward.precision == "float32" else 1
        sizes = (halves.layer, halves.outside, halves.copies, halves.passing)
        return Activations(*(factor * size for size in sizes))
    (one, _), (two, least), (one_twice, _), (two_twice, most) = (
        _live_bytes(shape, layers, groups, forward) for groups in (1, 2) for layers in (1, 2)
    )
    of_layer = (two_twice - one_twice) - (two - one)
    outside = (one_twice - one) - of_layer
    passing = most - least + (of_layer + outside if outside < 0 else 0)
    count = forward.positions
    return Activations(of_layer / count, outside / count, (two - one) - of_layer, passing / count)


def _live_bytes(shape: ModelShape, layers: int, groups: int, forward: Pass) -> tuple[int, int]:
    """Bytes that the log-probs of `groups` groups keep for the backward pass, without the weights; and the most that
    the backward pass of the layers needs besides."""
    import torch
    from torch._subclasses import FakeTensorMode

    from pvg.models.adapters import attach_adapters
    from pvg.models.compute import LiveBytes, autocast, explained
    from pvg.models.language_model import LanguageModel
    from pvg.models.logprobs import LogitTransform, chunk_tokens, predicting, token_logprobs, trust
    from pvg.models.packing import attention_as_on_a_gpu, pack_rows, pad_right
    from pvg.models.shared_prompts import hidden_of_ends

    # Prompts and completions begin differently, so that rows of a group have only their prompt in common.
    prompts = [np.arange(forward.prompt, dtype=np.int32) + group for group in range(groups)]
    rows = [
        np.concatenate([prompt, np.arange(forward.completion + forward.last, dtype=np.int32) + row]).astype(np.int32)
        for prompt in prompts
        for row in range(GROUP)
    ]
    starts = np.full(len(rows), forward.prompt, dtype=np.int32)
    with explained(f"The memory of {shape.name} cannot be planned", ""):
        module = _weightless(_with_layers(shape.config, layers), forward.dtype)
        if forward.rank:
            module = attach_adapters(LanguageModel(module, cast(Any, None), shape.name), forward.rank, 1.0, 0).module
        with FakeTensorMode(allow_non_fake_inputs=True):
            module.to_empty(device="cpu").tie_weights()
            trust(module)
            for weight in filter(lambda weight: weight.requires_grad, module.parameters()):  # counted elsewhere
                weight.register_post_accumulate_grad_hook(lambda weight: setattr(weight, "grad", None))
            attention = attention_as_on_a_gpu() if forward.on_gpu else nullcontext()
            head, chunk = module.get_output_embeddings(), chunk_tokens(shape.vocabulary, 0)
            with attention, LiveBytes(module) as live:
                with autocast(forward.precision, torch.device("cpu")):
                    if forward.shared:
                        packed = pack_rows(rows, starts, "cpu")
                        targets_N = packed.targets_M
                        if forward.last:
                            hidden_ND = hidden_of_ends(module, packed, shorter=not forward.on_gpu)
                        else:
                            hidden_ND = predicting(module, packed, forward.fused)
                    else:  # as completion_logprobs, whose number of tokens depends on numbers
                        ids_BL, _ = pad_right(rows, 0)
                        with _one_sequence_per_row():
                            hidden_ND = module.get_decoder()(input_ids=ids_BL, use_cache=False).last_hidden_state
                        own = slice(-2, -1) if forward.last else slice(forward.prompt - 1, -1)
                        hidden_ND = hidden_ND[:, own].flatten(0, 1).clone()
                        targets_N = ids_BL[:, forward.prompt :].flatten()
                    kept = hidden_ND.float()
                    if not forward.last:
                        kept = token_logprobs(hidden_ND, head.weight, head.bias, targets_N, LogitTransform(), chunk)
                saved = live.now
                del kept
                live.peak = before = live.now
                hidden_ND.sum().backward()  # type: ignore[no-untyped-call]
    return saved, live.peak - before


@contextmanager
def _one_sequence_per_row() -> Iterator[None]:
    """transformers does not ask position numbers, which tensors without memory do not have, whether a row holds several
    sequences. It would make a mask for them."""
    from transformers import masking_utils

    asks, masking_utils.find_packed_sequence_indices = masking_utils.find_packed_sequence_indices, lambda _: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = asks


def _with_layers(config: Any, layers: int) -> PreTrainedConfig:
    """The configuration with fewer layers. Lists with an entry per layer are cut. A rotary embedding whose angles
    depend on the longest row becomes one of the same size that needs no numbers."""
    shallow = copy.deepcopy(config)
    for name, value in vars(shallow).items():
        if isinstance(value, list) and len(value) == config.num_hidden_layers:
            setattr(shallow, name, value[:layers])
    shallow.num_hidden_layers = layers
    if (getattr(shallow, "rope_parameters", None) or {}).get("rope_type") in ("dynamic", "longrope"):
        shallow.rope_parameters = {**shallow.rope_parameters, "rope_type": "default"}
    if _has_experts(config):  # of the ways to compute them, the one whose sizes do not depend on numbers
        shallow._experts_implementation = "grouped_mm"
    return cast("PreTrainedConfig", shallow)


def _has_experts(config: Any) -> bool:
    return any(getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))


FLOAT32 = 4
BYTES = {"float32": 4, "bfloat16": 2}
LOGITS_COPIES = 3  # the chunk's logits, their probabilities, and the gradient
VLLM_CHUNK = 1024  # tokens of a prompt whose logits vLLM computes at once, for their log-probs
CONTEXT_BYTES = 600 << 20  # of a process on a GPU: assumed. A CUDA context takes 300 to 600 MiB.
LIBRARY_BYTES = 450 << 20  # of a process on a CPU with torch and transformers; measured
ASLEEP_BYTES = 2 << 30  # of a vLLM server that sleeps: its context and what its kernels keep. Assumed.
Place = Literal["trainer", "server"]
ACTIVATIONS, GRADIENTS, CASTS = (
    "activations, at the peak",
    "gradients, at the peak",
    "weights in the precision of passes",
)
STAGES = ("train the prover", "train the verifier", "sample")


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The peak of one stage. `parts`: bytes by what they are for. `place`: the process that takes them. In a stage that
    trains, a micro-batch has `positions`. In a stage that samples, `rows` rollouts have a KV cache of `kv_row_bytes`
    each. `canary`: bytes of the proof that published weights have arrived, which take less than a step."""

    stage: str
    place: Place
    parts: dict[str, float] = field(default_factory=dict)
    positions: int = 0
    rows: int = 0
    kv_row_bytes: float = 0.0
    canary: float = 0.0

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def between_steps(self) -> float:
        """What a stage that trains takes while its next batch is sampled and its weights are published."""
        return self.total - sum(self.parts[part] for part in (ACTIVATIONS, GRADIENTS, CASTS)) + self.canary


@dataclass(frozen=True, slots=True)
class ModelInTraining:
    """A model in training. `rank`: of its adapters; 0: all weights are trained. `dtype`: of the weights; `precision`:
    of the passes. `gpus`: those that divide its weights, gradients and moments (trainer ranks). `fused`, `shared`
    and `last`: as in Pass."""

    shape: ModelShape
    rank: int
    dtype: str
    precision: str
    checkpointing: bool = False
    gpus: int = 1
    fused: bool = True
    shared: bool = True
    last: bool = False

    @property
    def gathered(self) -> float:
        """The most bytes of weights that one of several GPUs has gathered: two layers, and what is outside of them."""
        return self.shape.streamed(2) * BYTES[self.precision] if self.gpus > 1 else 0.0

    @property
    def trained(self) -> int:
        """Parameters with a gradient."""
        return self.shape.adapter_parameters(self.rank) if self.rank else self.shape.parameters

    def copy(self, most: float = math.inf) -> dict[str, float]:
        """The copy of weights and moments, in the memory of the host, that is written while the next steps run. None
        with more than `most` bytes (Trainer.state)."""
        size = 3.0 * FLOAT32 * self.trained
        return {"copy for commits": size} if size <= most else {}


def training_parts(
    model: ModelInTraining,
    positions: int,
    prompt: int,
    completion: int,
    gpu_bytes: float | None = None,
    *,
    accumulates: bool = False,
) -> dict[str, float]:
    """The peak of an optimizer step whose micro-batches have `positions` positions, without the frozen weights. Rows
    have `prompt` and `completion` tokens. `gpu_bytes`: the memory of the GPU, whose size sets the chunk of logits;
    None: a CPU. `accumulates`: a step has several micro-batches, and the gradients of the first ones stay."""
    from pvg.models.logprobs import chunk_tokens

    shape = model.shape
    chunk = shape.vocabulary * chunk_tokens(shape.vocabulary, int(gpu_bytes or 0))
    on_gpu = gpu_bytes is not None and "bfloat16" in (model.dtype, model.precision)
    lengths = max(1, prompt), max(2, completion)
    forward = Pass(model.dtype, model.precision, model.rank, model.fused, on_gpu, *lengths, model.shared, model.last)
    found = activations_of(shape, forward)
    layer, passing = found.layer * positions, found.passing * positions
    inputs = shape.width * BYTES[model.dtype] * positions
    constant = found.copies * (1 if model.checkpointing else shape.layers) if model.gpus == 1 else 0.0
    casts = model.precision != model.dtype  # ranks gather weights in the precision, so _TokenLogprobs casts none
    everything = shape.layers * inputs + layer if model.checkpointing else shape.layers * layer
    everything += 0.0 if casts else constant
    head, number = 0 if model.rank else shape.vocabulary * shape.width, BYTES[model.precision]
    logits = FLOAT32 * min(chunk, positions * shape.vocabulary)
    # On a GPU, the products that are added to the head's gradient are as large as it, beside logits and their slope.
    of_head = 0.0 if model.last else max(LOGITS_COPIES * logits, 1.5 * logits + on_gpu * number * head)
    gone = 0.0 if found.outside >= 0 or model.checkpointing else layer  # a short last layer, before the next one passes
    least = max(found.outside * positions + of_head, passing - gone)
    gradients, of_layer, of_ends = FLOAT32 * model.trained / model.gpus, 0.0, 0.0
    if model.gpus > 1 and not model.rank:  # whole, in the precision, until FSDP2 copies it to float32 and divides it
        ends = shape.streamed(0)
        of_layer = number * head + (number + FLOAT32) * (shape.streamed(1) - ends)
        of_ends = (number + FLOAT32) * ends - model.gathered  # when no weights are gathered any more
    frozen = shape.parameters * BYTES[model.dtype] / model.gpus if model.rank and model.gpus > 1 else 0.0
    early = accumulates * gradients + FLOAT32 * head * (not (accumulates and casts and model.gpus == 1))
    start, end = (everything + least, early), (layer + passing, gradients + of_layer)
    activations, held = max(start, end, (0.0, gradients + of_ends), key=sum)
    return {
        "trained weights": FLOAT32 * model.trained / model.gpus,
        GRADIENTS: held,
        "optimizer": 2.0 * FLOAT32 * model.trained / model.gpus,
        **({"weights below adapters": frozen} if frozen else {}),
        **({"gathered weights": model.gathered} if model.gathered else {}),
        CASTS: constant if casts else 0.0,
        ACTIVATIONS: activations,
    }


CHARACTERS_PER_TOKEN, TOKENS_AROUND = 3, 6  # of a text, and of the marks around a message in a chat: assumed


def written_tokens(prompts: Prompts) -> int:
    """About the tokens of a prompt in words: instructions, examples, and a question as long as theirs."""
    if not isinstance(prompts, WordedPrompts):
        return 0
    examples = [text for each in prompts.examples or () for text in (each.question, each.helpful)]
    texts = [prompts.helpful or "", *examples, max(examples[::2], key=len, default=""), ""]
    return sum(TOKENS_AROUND + len(text) // CHARACTERS_PER_TOKEN for text in texts)


def memory_of(
    experiment: Experiment,
    prover: ModelShape,
    verifier: ModelShape,
    *,
    prompt_tokens: int,
    slots: int,
    gpu_bytes: float | None,
    reader: ModelShape | None = None,
    gpus: int = 1,
) -> Iterator[MemoryPlan]:
    """The stages of a round, each with its peak. `slots`: rollouts that a server decodes at once. `gpu_bytes`: the
    memory of the GPU; then the plan counts what a process on a GPU takes besides. None: a CPU. `reader`: of the
    reward. `gpus`: of the plan (ExperimentPlan)."""
    from pvg.models.compute import KEPT_BYTES  # here, because it imports torch

    models, rollout = experiment.models, experiment.rollout
    length = prompt_tokens + rollout.max_tokens
    base = prover.parameters * BYTES[models.dtype]
    sampling = BYTES[experiment.sampling_dtype]
    engine, copy = rollout.engine, {}
    if isinstance(engine, TorchSampling):
        copy = {"weights of the sampler": float(prover.parameters * sampling)}
    if experiment.samples_on_base:
        copy = {
            "adapters of the sampler": float(prover.adapter_parameters(experiment.training.adapters.rank) * sampling)
        }
    on_cpu = gpu_bytes is None
    context = {"Python and libraries": float(LIBRARY_BYTES)} if on_cpu else {"GPU context (assumed)": CONTEXT_BYTES}
    # On a GPU, a process without workers has the base only below adapters (Players.place_base). KL: BatchLogprobs.
    always = on_cpu or has_workers(experiment.cluster) or experiment.verifier_is_on_base or experiment.samples_on_base
    copied = prover.rounded(models.dtype, models.compute_dtype, head=True)
    copied *= experiment.training.penalised
    frozen = {"base prover": float(base if always or experiment.training.adapters.rank else copied), **context}
    reading = {"reader of the reward": float(reader.parameters * reader_bytes(experiment))} if reader else {}
    # While players train, a large engine in this process rests (TorchEngine.rest), unless it samples before it gets new
    # weights.
    rests = on_cpu and not has_workers(experiment.cluster) and sum(copy.values()) > KEPT_BYTES
    samples_on = not rests or rollout.prefetch.kind != "none" or experiment.training.dynamic_sampling

    policy, scoring = _policy(experiment, prover, length), _verifier(experiment, verifier, length)
    if gpu_bytes is not None:  # the ranks of CPUs share a machine, whose memory they do not divide
        policy = replace(policy, gpus=ranks_of(experiment.cluster) or 1)
    verifier_bytes = _scoring_bytes(experiment, scoring)
    if not on_cpu and experiment.verifier.engine == "vllm" and experiment.game.schedule.kind != "simultaneous":
        verifier_bytes = 0.0
    numbers = experiment.arithmetic()
    batch = numbers.rollouts_per_optimizer_step * length
    lengths = (prompt_tokens, rollout.max_tokens)
    positions = max(length, min(experiment.training.micro_batch_tokens, batch))
    training = training_parts(policy, positions, *lengths, gpu_bytes, accumulates=positions < batch)
    held = {
        **frozen,
        **(copy if samples_on else {}),
        "verifier": verifier_bytes,
        **reading,
        **(policy.copy(KEPT_BYTES) if on_cpu else {}),
    }
    canary = 0.0  # pvg.rollout.vllm_engine.reference_logprobs
    if not isinstance(engine, TorchSampling) and (prompts := experiment.weights.canary_prompts):
        logits = FLOAT32 * LOGITS_COPIES * prompts * prompt_tokens * prover.vocabulary
        canary = prover.streamed(1) * BYTES[models.dtype] + logits
    held |= {} if on_cpu else _driver_bytes(experiment, policy)
    yield MemoryPlan("train the prover", "trainer", {**held, **training}, positions, canary=canary)

    pairs = 2 * experiment.verifier.pairs * length
    positions = max(length, min(experiment.verifier.micro_batch_tokens, pairs))
    own = training_parts(scoring, positions, *lengths, gpu_bytes, accumulates=positions < pairs)
    start = {"verifier's initial weights": _frozen_verifier_bytes(experiment, scoring)}
    held = {**frozen, **({} if rests else copy), **start, "base prover": float(base) if always else 0.0}
    held |= scoring.copy(KEPT_BYTES) if on_cpu else _driver_bytes(experiment, scoring)
    yield MemoryPlan("train the verifier", "trainer", {**held, **own}, positions)

    kv_row = float(length * prover.kv_bytes(sampling))
    if isinstance(engine, TorchSampling):
        tested = 2 * experiment.game.test.problems * experiment.game.test.samples  # both roles
        rows = min(engine.max_rows, max(numbers.rollouts_per_batch, numbers.mint_rollouts_per_round, tested))
        resident = {name: training[name] for name in ("trained weights", "optimizer")}
        resident |= policy.copy(KEPT_BYTES) if on_cpu else _driver_bytes(experiment, policy)
        parts = {**frozen, **copy, "verifier": verifier_bytes, **reading, **resident, "KV cache": rows * kv_row}
        yield MemoryPlan("sample", "trainer", parts, 0, rows, kv_row)
    else:
        share = experiment.serving.tensor_parallel
        weights = prover.parameters * sampling / share
        parts = {"weights of the server": weights, **context, "KV cache": slots * kv_row / share}
        if reference_asked(experiment, gpus):
            parts["logits of the reference"] = float(FLOAT32 * min(length, VLLM_CHUNK) * prover.vocabulary)
        yield MemoryPlan("sample", "server", parts, 0, slots, kv_row / share)


def shares_gpu(experiment: Experiment, gpus: int) -> bool:
    """Whether the prover's only server is on the trainer's GPU: both are on this machine, which has one (`gpus`)."""
    servers = experiment.serving.servers
    near = experiment.server_cluster is None and len(servers) == 1 and is_loopback(urlsplit(servers[0]).hostname or "")
    return gpus == 1 and near and not isinstance(experiment.rollout.engine, TorchSampling)


def reference_asked(experiment: Experiment, gpus: int) -> bool:
    """Whether servers compute the reference's log-probs. One that rests on the trainer's GPU would compute them there
    too, and read each prompt again for each of its solutions (VllmEngine.gives_reference)."""
    return experiment.reference_served and not (shares_gpu(experiment, gpus) and experiment.servers_rest)


def _driver_bytes(experiment: Experiment, model: ModelInTraining) -> dict[str, float]:
    """What the driver of local workers has besides the first of them, on the GPU that they share: a context, and the
    weights in training with their gradient. The optimizer's moments are only the driver's."""
    if not isinstance(experiment.cluster, LocalCluster) or not has_workers(experiment.cluster) or model.gpus > 1:
        return {}
    return {"driver beside a worker": 2.0 * FLOAT32 * model.trained + CONTEXT_BYTES}


def reader_bytes(experiment: Experiment) -> int:
    """Bytes of a number of the reward's reader (pvg.traces.readers)."""
    exact = experiment.sources().get(READER, "").startswith("embedded:") or not experiment.models.on_gpu
    return BYTES["float32" if exact else "bfloat16"]


def host_bytes(experiment: Experiment, prover: ModelShape, verifier: ModelShape) -> float:
    """What the process of a GPU keeps in the memory of the host: the larger copy for commits."""
    length = experiment.rollout.max_tokens
    players = _policy(experiment, prover, length), _verifier(experiment, verifier, length)
    return max(value for player in players for value in player.copy().values())


def others_bytes(experiment: Experiment, gpus: int) -> float:
    """What other processes take of this machine's GPU now. What this one takes, and the share of a server on a single
    GPU, are the plan's own."""
    import torch

    from pvg.models import pick_device

    device = pick_device(experiment.models.device)
    free, whole = torch.cuda.mem_get_info(device)
    own = CONTEXT_BYTES + torch.cuda.memory_reserved(device)
    served = shares_gpu(experiment, gpus) * experiment.serving.gpu_memory_utilization * whole
    return max(0.0, whole - free - own - served)


def _policy(experiment: Experiment, shape: ModelShape, length: int) -> ModelInTraining:
    training, models = experiment.training, experiment.models
    return ModelInTraining(
        shape,
        training.adapters.rank,
        models.dtype,
        models.compute_dtype,
        training.gradient_checkpointing,
        fused=ranks_of(experiment.cluster) is None,
        shared=shares_prompts(experiment, shape, length),
    )


def _verifier(experiment: Experiment, shape: ModelShape, length: int) -> ModelInTraining:
    last = isinstance(experiment.verifier.head, LastTokenHead | AnswerHead)
    return replace(_policy(experiment, shape, length), rank=experiment.verifier.adapters.rank, fused=True, last=last)


def shares_prompts(experiment: Experiment, shape: ModelShape, length: int) -> bool:
    """Whether training computes the prompt of rows of `length` tokens once. The start of a game checks it by numbers
    (pvg.training.forward.fitted)."""
    return experiment.training.shared_prompts and length <= shape.packed and _packs(shape)


@lru_cache(maxsize=256)
def _packs(shape: ModelShape) -> bool:
    """Whether the model's code computes packed rows without an error."""
    try:
        return shape.config is None or bool(_live_bytes(shape, 1, 1, Pass("bfloat16", "bfloat16", fused=False)))
    except ConfigurationError:
        return False


def _frozen_verifier_bytes(experiment: Experiment, verifier: ModelInTraining) -> float:
    """What training the verifier needs besides the trained weights: under adapters the frozen model, for the implicit
    head the initial weights, which give the reference, and for a generative one the weights that sample."""
    weights, head = float(verifier.shape.parameters * BYTES[verifier.dtype]), experiment.verifier.head
    sampler = weights if head.kind == "generative" else 0.0
    if verifier.rank and verifier.dtype == "bfloat16":  # it shares them (AdaptedModel.sampler)
        sampler = 0.0
    if verifier.rank:
        return sampler + (0.0 if experiment.verifier_is_on_base else weights)
    if experiment.verifier.engine == "torch":
        weights = verifier.shape.rounded(verifier.dtype, verifier.precision, head=True)
    return weights if getattr(head, "reference", 0.0) else sampler


def _scoring_bytes(experiment: Experiment, verifier: ModelInTraining) -> float:
    """The frozen verifiers of a prover phase, with what their scores need."""
    own = float(FLOAT32 * verifier.trained if verifier.rank else verifier.shape.parameters * BYTES[verifier.dtype])
    elsewhere = has_workers(experiment.cluster) or experiment.verifier.engine != "torch"
    trains = experiment.game.schedule.kind == "simultaneous"
    if not (verifier.rank or elsewhere or trains or isinstance(experiment.verifier.head, OwnHead | VerdictHead)):
        own = verifier.shape.rounded(verifier.dtype, verifier.precision)
    return experiment.verifier.ensemble.size * own + _frozen_verifier_bytes(experiment, verifier)
