"""The memory table: parameters of known models, and what autograd saves for a layer."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
)

from pvg.config.experiment import FITTED
from pvg.config.load import build_experiment, find_experiment, fitted_as, load_experiment
from pvg.config.rollout import Rollouts
from pvg.config.training import Training
from pvg.models import logprobs
from pvg.models.adapters import attach_adapters
from pvg.models.compute import LiveBytes, autocast
from pvg.models.heads import build_verifier
from pvg.models.language_model import LanguageModel
from pvg.models.packing import attention_as_on_a_gpu
from pvg.planning import plan as planning
from pvg.planning.memory import (
    ACTIVATIONS,
    CASTS,
    GRADIENTS,
    ModelInTraining,
    ModelShape,
    Pass,
    _weightless,
    activations_of,
    memory_of,
    read_shape,
    shape_from,
    shape_of,
    shares_prompts,
    training_parts,
)
from pvg.planning.plan import MACHINES, Inputs, fitted_here, plan_here, plan_of
from pvg.training.batch import PolicyBatch
from pvg.training.forward import fitted
from pvg.training.losses import PolicyObjective
from pvg.training.trainer import checkpoint_layers
from pvg.verifier.data import VerifierBatch
from pvg.verifier.losses import PairObjective

ROOT = Path(__file__).parent.parent.parent
QWEN_7B = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}
LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}


class SavedTensors:
    """Measures the bytes of the distinct storages that a forward pass saves for the backward pass."""

    def __init__(self, module: nn.Module) -> None:
        self._held = {tensor.untyped_storage().data_ptr() for tensor in (*module.parameters(), *module.buffers())}
        self.bytes_taken = 0

    @contextmanager
    def forward(self) -> Iterator[None]:
        # Keep the storages until the pass ends: a freed storage's address could be reused.
        storages: dict[int, torch.UntypedStorage] = {}

        def save(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.layout == torch.strided and (address := tensor.untyped_storage().data_ptr()) not in self._held:
                storages[address] = tensor.untyped_storage()
            return tensor.detach()

        with saved_tensors_hooks(save, lambda tensor: tensor):
            yield
        self.bytes_taken = sum(storage.nbytes() for storage in storages.values())


def shape(config: dict[str, Any], folder: Path) -> ModelShape:
    (folder / "config.json").write_text(json.dumps(config))
    return shape_of(folder, "model")


@pytest.mark.parametrize(
    ("config", "parameters"),
    # The numbers that the models' pages give, counted by transformers.
    [(QWEN_7B, 7_615_616_512), (LLAMA_8B, 8_030_261_248)],
)
def test_parameters_follow_from_the_sizes(config: dict[str, Any], parameters: int, tmp_path: Path) -> None:
    found = shape(config, tmp_path)
    assert found.parameters == parameters
    if config is LLAMA_8B:
        assert found.kv_bytes(2) == 2 * 32 * 8 * 128 * 2  # 128 KiB per token
        # Per layer, rank 2: q and o 4096 -> 4096, k and v 4096 -> 1024, three MLP matrices 4096 <-> 14336.
        assert found.adapter_parameters(2) == 32 * 2 * (2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 14336))


def test_gradients_of_earlier_micro_batches_stay_and_a_resting_engine_has_no_weights(tmp_path: Path) -> None:
    found = shape(QWEN_7B, tmp_path)

    def parts(**settings: Any) -> list[dict[str, float]]:
        data = {"name": "full", "models": {"precision": "bfloat16"}, **settings}
        lengths = {"prompt_tokens": 64, "slots": 64}
        return [p.parts for p in memory_of(build_experiment(data), found, found, **lengths, gpu_bytes=None)]

    gradients, sampler = "gradients, at the peak", "weights of the sampler"
    several = parts()[0]
    whole = parts(training={"micro_batch_tokens": 10**6})[0]  # one micro-batch, at whose start only the head has one
    assert several[gradients] == 4 * found.parameters > whole[gradients]
    exact = parts(models={"precision": "float32"})[0]  # there the head's is computed before it is added to the others
    assert exact[gradients] == 4 * (found.parameters + found.vocabulary * found.width)
    assert sampler not in several
    assert sampler in parts(rollout={"prefetch": "fresh"})[0]
    assert [sampler in stage for stage in parts()] == [False, False, True]
    assert all(sampler in stage for stage in parts(cluster={"kind": "local", "workers": 2}))  # theirs never rests


def test_samples_of_a_mint_and_long_examples_take_memory_too(tmp_path: Path) -> None:
    found, text = shape(QWEN_7B, tmp_path), "word " * 200
    examples = [{"question": text, "helpful": text, "sneaky": text}]
    data = {"name": "few", "prompts": {"kind": "chat", "examples": examples}, "training": {"groups": 2}}
    experiment = build_experiment(data)
    assert experiment.rollouts_per_batch < 256 <= experiment.arithmetic().mint_rollouts_per_round
    plan = plan_of(experiment, Inputs.assumed(experiment, found, found, MACHINES["cpu"]), found, found, gpus=0)
    sampling = plan.memory[2]
    assert sampling.rows == 256
    assert sampling.kv_row_bytes > (3 * 200 + experiment.rollout.max_tokens) * found.kv_bytes(4)


@pytest.mark.parametrize("rank", [0, 16])
def test_the_driver_of_local_workers_has_what_is_trained_once_more_on_their_first_gpu(
    rank: int, tmp_path: Path
) -> None:
    """Under Ray it has a GPU without a worker."""
    found, totals = shape(QWEN_7B, tmp_path), {}
    for kind in ("local", "ray"):
        data = {"models": {"device": "cuda"}, "training": {"adapters": {"rank": rank}}}
        chosen = build_experiment({**data, "cluster": {"kind": kind, "workers": 4}})
        lengths = {"prompt_tokens": 64, "slots": 64}
        plans = memory_of(chosen, found, found, **lengths, gpu_bytes=80e9)
        totals[kind] = [sum(plan.parts.values()) for plan in plans]
    trained = found.adapter_parameters(rank) if rank else found.parameters
    more = [local - ray - (600 << 20) for local, ray in zip(totals["local"], totals["ray"], strict=True)]
    assert more == pytest.approx([8.0 * trained, 8.0 * found.parameters, 8.0 * trained])


def test_an_embedded_model_is_counted_from_its_weights() -> None:
    weights = ROOT / "pvg" / "models" / "embedded" / "modchain-prover" / "model.safetensors"
    with safe_open(weights, framework="numpy") as tensors:
        count = sum(tensors.get_tensor(name).size for name in tensors.keys())  # noqa: SIM118
    assert read_shape("embedded:modchain-prover", print).parameters == count


def test_full_training_of_8b_takes_four_numbers_per_weight(tmp_path: Path) -> None:
    found = shape(LLAMA_8B, tmp_path)
    parts = training_parts(ModelInTraining(found, 0, "float32", "float32"), 16, 8, 8)
    assert parts["trained weights"] + parts["gradients, at the peak"] + parts["optimizer"] == 16 * found.parameters


def test_ranks_divide_what_is_trained_and_gather_a_layer_at_a_time(tmp_path: Path) -> None:
    found = shape(LLAMA_8B, tmp_path)
    models = {"device": "cuda", "precision": "bfloat16"}
    training = {"gradient_checkpointing": True, "micro_batch_tokens": 4096}
    parts = []
    for ranks in (1, 8):
        cluster = {"kind": "local", "trainer_ranks": ranks} if ranks > 1 else {"kind": "none"}
        experiment = build_experiment({"models": models, "training": training, "cluster": cluster})
        plans = list(memory_of(experiment, found, found, prompt_tokens=256, slots=64, gpu_bytes=80e9))
        parts.append(next(plan.parts for plan in plans if plan.stage == "train the prover"))
    one, eight = parts
    for name in ("trained weights", "optimizer"):
        assert eight[name] == one[name] / 8
    # Each rank computes that of the whole head, besides its part of those of earlier micro-batches.
    head = 4 * found.vocabulary * found.width
    assert eight[GRADIENTS] == 4 * found.parameters / 8 + head
    assert one[GRADIENTS] == 4 * found.parameters
    # The reference of the KL penalty: its layers and its head, which is no embedding, are in bfloat16.
    products = found.linear + found.vocabulary * found.width
    assert eight["base prover"] == one["base prover"] == 4 * found.parameters - 2 * products
    assert found.linear == pytest.approx(found.parameters - 2 * found.vocabulary * found.width, rel=1e-3)
    ends = 2 * found.vocabulary * found.width
    layer = (found.parameters - ends) / found.layers
    assert eight["gathered weights"] == 2 * (ends + 2 * layer)  # bfloat16

    # With few positions, the most is taken when FSDP2 copies gradients in bfloat16 to float32 and divides them: those
    # of embedding and head at the end, when no weights are gathered; with few words, those of a layer.
    ranked = partial(ModelInTraining, rank=0, dtype="float32", precision="bfloat16", checkpointing=True, gpus=8)
    last = training_parts(ranked(found, fused=False), 16, 8, 8, 80e9)
    assert last[ACTIVATIONS] == 0
    assert last[GRADIENTS] + last["gathered weights"] == 4 * found.parameters / 8 + 6 * ends
    few = shape({**LLAMA_8B, "vocab_size": 128}, tmp_path)
    ends = 2 * 128 * few.width
    layer = (few.parameters - ends) / few.layers
    gradients = training_parts(ranked(few, fused=False), 16, 8, 8, 80e9)[GRADIENTS]
    assert gradients == 4 * few.parameters / 8 + 6 * layer + 2 * 128 * few.width  # that of the head waits for its turn


def test_stages_of_an_experiment() -> None:
    experiment = load_experiment(find_experiment("modchain"))
    prover = read_shape("embedded:modchain-prover", print)
    plans = list(memory_of(experiment, prover, prover, prompt_tokens=16, slots=256, gpu_bytes=None))
    assert [plan.stage for plan in plans] == ["train the prover", "train the verifier", "sample"]
    assert all(plan.place == "trainer" for plan in plans)
    cache = plans[2].parts["KV cache"]
    assert cache == 256 * (16 + experiment.rollout.max_tokens) * prover.kv_bytes(4)
    assert all(plan.parts["copy for commits"] == 12 * prover.parameters for plan in plans)


def test_the_reader_of_a_reward_is_in_memory_while_the_prover_learns() -> None:
    reward = {"kind": "correctness", "sr": 1.0, "reader": "embedded:modchain-verifier-small"}
    plan = plan_here(build_experiment({"game": {"reward": reward, "sneaky_share": 0.0}}), print)
    size = 4 * read_shape("embedded:modchain-verifier-small", print).parameters
    assert [stage.parts.get("reader of the reward") for stage in plan.memory] == [size, None, size]
    assert plan.inputs["read_s"] > 0
    assert not any("reader" in note for note in plan.notes)


def test_the_copy_for_commits_of_a_gpu_is_in_the_memory_of_the_host(tmp_path: Path) -> None:
    found, assumed = shape(QWEN_7B, tmp_path), MACHINES["h100"]
    for rank, notes in ((0, 1), (16, 0)):
        settings = {"training": {"adapters": {"rank": rank}}, "verifier": {"adapters": {"rank": rank}}}
        experiment = build_experiment({"name": "large", "models": {"device": "cuda"}, **(settings if rank else {})})
        plan = plan_of(experiment, Inputs.assumed(experiment, found, found, assumed), found, found, memory_gb=80)
        assert all("copy for commits" not in stage.parts for stage in plan.memory)
        assert sum(f"a copy of {12 * found.parameters / 1e9:.3g} GB" in note for note in plan.notes) == notes


@pytest.mark.slow
@pytest.mark.parametrize("adapters", [0, 16])
def test_full_training_of_7b_fits_four_gpus(adapters: int, tmp_path: Path) -> None:
    """With a KL penalty, beside a verifier of 1.5B with all weights, or beside one with adapters on the base, which
    takes smaller micro-batches."""
    small = {"hidden_size": 1536, "intermediate_size": 8960, "num_attention_heads": 12, "num_key_value_heads": 2}
    prover = verifier = shape(QWEN_7B, tmp_path)
    if not adapters:
        verifier = shape({**QWEN_7B, **small, "tie_word_embeddings": True}, tmp_path)
    data = {
        "name": "seven",
        "models": {
            "prover": {"source": "hf:a/7b"},
            "verifier": {"source": "hf:a/7b" if adapters else "hf:a/small"},
            "device": "cuda",
            "precision": "bfloat16",
        },
        "training": {"gradient_checkpointing": True, "micro_batch_tokens": 8192 if adapters else 16384},
        "verifier": {"head": "scalar", "adapters": {"rank": adapters}},
        "rollout": {"engine": "vllm", "max_tokens": 1024},
        "serving": {"servers": ["http://10.0.0.9:8000"]},
        "cluster": {"kind": "local", "workers": 0, "trainer_ranks": 4},
        "prompts": "chat",
    }
    experiment = build_experiment(data)
    inputs = Inputs.assumed(experiment, prover, verifier, MACHINES["h100"])
    plan = plan_of(experiment, inputs, prover, verifier, memory_gb=80, gpus=4)
    assert [plan.fits(stage) for stage in plan.memory] == [True, True, True]
    training, scoring, _ = plan.memory
    products = prover.linear + prover.vocabulary * prover.width
    bases = [4 * prover.parameters] * 2 if adapters else [4 * prover.parameters - 2 * products, 0]
    assert [training.parts["base prover"], scoring.parts["base prover"]] == bases
    # Between two steps, the canary has the embedding, the head, one layer and some logits on the GPU.
    of_steps = sum(training.parts[part] for part in (ACTIVATIONS, GRADIENTS, CASTS))
    assert 0 < training.canary < min(of_steps, 8e9)
    assert training.between_steps == training.total - of_steps + training.canary


@pytest.mark.slow
def test_adapters_on_the_base_share_its_weights(tmp_path: Path) -> None:
    found = shape(QWEN_7B, tmp_path)
    model = {"source": "hf:a/b"}
    lora = {"rank": 16}
    data = {
        "name": "shared",
        "models": {"prover": model, "verifier": model},
        "verifier": {"head": "yes_token", "adapters": lora},
        "training": {"adapters": lora},
        "rollout": {"engine": "vllm"},
    }
    lengths: dict[str, Any] = {"prompt_tokens": 256, "slots": 64, "gpu_bytes": 80e9}
    plans = list(memory_of(build_experiment(data), found, found, **lengths))
    assert plans[0].parts["base prover"] == 4 * found.parameters
    assert plans[0].parts["verifier"] == 4 * found.adapter_parameters(16)
    assert plans[1].parts["verifier's initial weights"] == 0
    warm = memory_of(build_experiment(data | {"warmup": {"path": "rows.jsonl"}}), found, found, **lengths)
    assert [plan.parts.get("verifier's initial weights") for plan in warm] == [None, 4 * found.parameters, None]
    assert (plans[2].place, plans[2].rows) == ("server", 64)


@pytest.mark.parametrize("engine", ["torch", "vllm"])
def test_advice_for_sampling_is_about_the_place_where_it_runs(engine: str, tmp_path: Path) -> None:
    found = shape(QWEN_7B, tmp_path)
    experiment = build_experiment({"name": "large", "rollout": {"engine": engine}})
    plan = plan_of(experiment, Inputs.assumed(experiment, found, found, MACHINES["h100"]), found, found, memory_gb=24)
    (advice,) = [line for line in plan.memory_advice if line.startswith("'sample' needs")]
    if engine == "vllm":
        assert "than a server may take of its GPU (serving.gpu_memory_utilization)" in advice
        assert "serving.tensor_parallel" in advice
    else:
        assert "than the GPU has" in advice
        assert "serving." not in advice


def _batch(rows: int, length: int, vocabulary: int, prompt: int = 16) -> PolicyBatch:
    rng = np.random.default_rng(0)
    logprobs = [np.full(length - prompt, -8.0, np.float32)] * rows
    return PolicyBatch(
        sequences=[
            np.append(np.arange(prompt), rng.integers(3, vocabulary, length - prompt)).astype(np.int32)
            for _ in range(rows)
        ],
        prompt_lengths=np.full(rows, prompt, np.int32),
        sampled_logprobs=logprobs,
        reference_logprobs=logprobs,
        advantages_N=rng.normal(size=rows).astype(np.float32),
        role_ids_N=np.zeros(rows, np.int8),
        group_ids_N=np.arange(rows, dtype=np.int32),
        versions_N=np.zeros(rows, np.int32),
    )


SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 160}
FAMILIES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "mistral": (partial(MistralConfig, sliding_window=32), MistralForCausalLM),  # rows are longer: no shared prompts
}


def open_tiny(family: str, layers: int, rank: int, dtype: str = "float32") -> tuple[Any, Any]:
    """A configuration, and its model with random weights of `dtype`, or float32 adapters on them, to train."""
    made, opened = FAMILIES[family]
    config = made(**SIZES, head_dim=16, num_hidden_layers=layers, vocab_size=50, eos_token_id=1, pad_token_id=0)
    module = opened(config).to(getattr(torch, dtype)).requires_grad_(True)
    if rank:
        pytest.importorskip("peft", reason="needs peft: pip install '.[lora]'")
        module = attach_adapters(LanguageModel(module, cast(Any, None), "tiny"), rank, 1.0, 0).module
    return config, module


PLAYERS = {"prover": "", "verifier with log-probs": "implicit", "verifier with the last token": "scalar"}


def training_of(module: Any, head: str, rank: int, precision: str, lengths: tuple[int, int]) -> tuple[Any, Any, Any]:
    """What trains on a group of 8 rows that share a prompt, its objective, and its only micro-batch."""
    prompt, completion = lengths
    batch = _batch(8, sum(lengths), 50, prompt)
    if not head:
        section, _ = fitted(Training(), module, sum(lengths))
        objective: Any = PolicyObjective(section, Rollouts(max_tokens=completion), 0, precision)
    else:
        settings = build_experiment({"verifier": {"head": head, "adapters": {"rank": rank}}}).verifier
        module = build_verifier(settings, LanguageModel(module, cast(Any, None), "tiny"))
        objective = PairObjective(settings, 0, longest_packed=module.longest_packed)
        pairs_M2 = np.array([[row, 7 - row] for row in range(4)], np.int32)
        references_N = np.zeros(8, np.float32)  # which come with the pairs
        batch = VerifierBatch(batch.sequences, batch.prompt_lengths, pairs_M2, references_N)
    (part,) = objective.split(objective.prepare(batch))
    return module, objective, part


# Of the weights, of the passes, and adapters. Frozen weights in bfloat16 are those of GPUs.
KINDS = [("float32", precision, rank) for precision in ("float32", "bfloat16") for rank in (0, 4)]
KINDS += [("bfloat16", "bfloat16", 4)]


@pytest.mark.parametrize(("dtype", "precision", "rank"), KINDS)
@pytest.mark.parametrize(
    ("family", "player"), [*itertools.product(("llama", "qwen2", "qwen3"), PLAYERS), ("mistral", "prover")]
)
def test_what_autograd_saves_is_what_the_plan_counts(
    family: str, player: str, dtype: str, precision: str, rank: int, tmp_path: Path
) -> None:
    """Real tensors against those without memory, for the layers and for the rest."""
    lengths, saved = (16, 48), {}
    for layers in (2, 4):
        config, module = open_tiny(family, layers, rank, dtype)
        module, objective, part = training_of(module, PLAYERS[player], rank, precision, lengths)
        meter = SavedTensors(module)
        with autocast(precision, torch.device("cpu")), meter.forward():
            objective(module, part)
        saved[layers] = meter.bytes_taken
    config.save_pretrained(tmp_path)
    shape = shape_of(tmp_path, family)
    shared = shares_prompts(build_experiment({}), shape, sum(lengths))
    assert shared == (family != "mistral")
    last = PLAYERS[player] == "scalar"
    forward = Pass(dtype, precision, rank, prompt=16, completion=48, shared=shared, last=last)
    found, positions = activations_of(shape, forward), forward.positions
    of_layer = (saved[4] - saved[2]) / 2
    assert found.layer * positions + found.copies == pytest.approx(of_layer, rel=0.1)
    # The objective keeps some numbers per completion token more: of rows that share nothing, their places.
    rest = saved[2] - 2 * of_layer
    assert found.outside * positions == pytest.approx(rest, rel=0.1, abs=0 if shared else 0.1 * of_layer)
    of_plan = 28 * (found.layer * positions + found.copies) + found.outside * positions
    ratio = of_plan / (26 * of_layer + saved[2])
    print(f"\n{family}, {player}, {dtype}, rank {rank}, passes in {precision}: plan / counted = {ratio:.3f}")


@pytest.mark.parametrize(("dtype", "precision", "rank"), KINDS)
@pytest.mark.parametrize("player", ["prover", "verifier with the last token"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_peak_of_a_step_is_what_the_plan_counts(
    checkpointing: bool, player: str, dtype: str, precision: str, rank: int, tmp_path: Path
) -> None:
    """Of the live bytes of real tensors, with what the backward pass of a layer needs besides what was saved."""
    config, module = open_tiny("llama", 4 if PLAYERS[player] else 12, rank, dtype)  # with few, a short last layer shows
    module, objective, part = training_of(module, PLAYERS[player], rank, precision, (16, 48))
    if checkpointing:
        checkpoint_layers(module.eval())
    objective(module, part)  # checks, once
    with LiveBytes(module) as live:
        with autocast(precision, torch.device("cpu")):
            loss, _ = objective(module, part)
        loss.backward()  # type: ignore[no-untyped-call]
    config.save_pretrained(tmp_path)
    last = bool(PLAYERS[player])
    model = ModelInTraining(shape_of(tmp_path, "llama"), rank, dtype, precision, checkpointing, last=last)
    parts = training_parts(model, Pass("", "", prompt=16, completion=48, last=last).positions, 16, 48)
    counted = sum(parts[name] for name in (ACTIVATIONS, GRADIENTS, CASTS))
    assert counted == pytest.approx(live.peak, rel=0.1)


def test_layers_that_mix_tokens_outside_of_attention_share_no_prompts() -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2}
    assert shape_from(Qwen3NextConfig(**SIZES, num_hidden_layers=4, vocab_size=50, **experts), "hybrid").packed == 0


@pytest.mark.slow
def test_micro_batches_fit_a_laptop_unless_they_are_chosen(tmp_path: Path) -> None:
    """The shape of SmolLM2-135M with the default micro-batches: 16,384 positions would take more than 16 GB."""
    sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9}
    LlamaConfig(**sizes, num_key_value_heads=3, vocab_size=49152, tie_word_embeddings=True).save_pretrained(tmp_path)
    model = {"source": str(tmp_path)}
    models = {"prover": model, "verifier": model, "device": "cpu"}
    settings = {"rollout": {"max_tokens": 256}, "verifier": {"head": "scalar"}}  # as docs/tutorial.md
    experiment = build_experiment({"name": "own", "models": models, **settings})
    fitted, line = fitted_here(experiment, print)
    assert fitted.training.micro_batch_tokens == 1024
    halves = experiment.model_copy(update={"models": experiment.models.model_copy(update={"precision": "bfloat16"})})
    assert fitted_here(halves, print)[0].training.micro_batch_tokens == 1536, "a group of eight solutions"
    assert (
        max(stage.total for stage in plan_here(fitted, print).memory)
        < 6e9
        < plan_here(experiment, print).memory[0].total
    )
    assert "micro_batch_tokens" in line
    kept, _ = fitted_here(experiment, print, chosen=FITTED, force=True)
    assert kept == experiment
    assert fitted_as(fitted, experiment, ()) == fitted
    assert fitted_as(fitted, experiment, ("training.micro_batch_tokens",)).training == experiment.training
    assert fitted_as(experiment, fitted, ()) == fitted


@pytest.mark.slow
def test_micro_batches_are_sized_by_the_free_memory_of_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The share of a server on the trainer's GPU is not free while it runs, but it sleeps while players train."""
    sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9}
    LlamaConfig(**sizes, num_key_value_heads=3, vocab_size=49152, tie_word_embeddings=True).save_pretrained(tmp_path)
    model, whole, found = {"source": str(tmp_path)}, 80 * 10**9, SimpleNamespace(name="NVIDIA H100")
    found.total_memory = whole
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    devices = ["/dev/nvidia0"]
    monkeypatch.setattr(planning, "glob", lambda pattern: devices)

    def tokens(free: int, **settings: Any) -> int:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, whole))
        models = {"prover": model, "verifier": model, "device": "cuda"}
        experiment = build_experiment({"name": "own", "models": models, "verifier": {"head": "scalar"}, **settings})
        return fitted_here(experiment, print)[0].training.micro_batch_tokens

    assert tokens(whole) == 16_384
    assert 1024 <= tokens(8 * 10**9) < tokens(10 * 10**9) < 16_384
    served = {"rollout": {"engine": "vllm"}, "serving": {"gpu_memory_utilization": 0.8}}
    assert tokens(whole // 5, **served) == tokens(whole, **served)
    assert tokens(whole // 10, **served) <= tokens(whole, **served)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 7 * whole // 8)  # pvg's own, of an earlier game
    assert tokens(whole // 8) == 16_384
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)

    # Sampling ahead, a server on the trainer's GPU takes its share all the time. One on another GPU takes nothing.
    ahead = {"rollout": {"engine": "vllm", "prefetch": "fresh"}}
    assert tokens(whole, **ahead) < 16_384
    for servers in (["http://10.0.0.2:8000"], ["http://127.0.0.1:8000", "http://127.0.0.1:8001"]):
        assert tokens(whole, **ahead, serving={"servers": servers}) == 16_384
    devices.append("/dev/nvidia1")  # CUDA_VISIBLE_DEVICES leaves one to the trainer
    assert tokens(whole, **ahead) == 16_384


@pytest.mark.slow
@pytest.mark.parametrize("memory_gb", [24, 80])
def test_the_shipped_experiment_for_a_gpu_fits_it_by_the_plan(memory_gb: int, tmp_path: Path) -> None:
    qwen = {"hidden_size": 1536, "intermediate_size": 8960, "num_attention_heads": 12, "num_key_value_heads": 2}
    found = shape({**QWEN_7B, **qwen, "vocab_size": 151936, "tie_word_embeddings": True}, tmp_path)
    assert found.parameters == 1_543_714_304  # Qwen2.5-1.5B
    experiment = load_experiment(find_experiment("qwen-gsm8k-lora"), ["models.device=cuda"])
    inputs = Inputs.assumed(experiment, found, found, MACHINES["h100"])
    made = plan_of(experiment, inputs, found, found, memory_gb=memory_gb)
    assert [made.fits(stage) for stage in made.memory] == [True, True, True]

    # The server sleeps while the trainer works: the larger of both counts, and their sum if they work side by side.
    told = ["models.device=cuda", "serving.gpu_memory_utilization=0.8"]
    larger_share, ahead = (
        replace(made, experiment=load_experiment(find_experiment("qwen-gsm8k-lora"), [*told, *more]), memory_gb=24)
        for more in ([], ["rollout.prefetch=fresh"])
    )
    assert [larger_share.fits(stage) for stage in made.memory] == [True, True, True]
    assert [ahead.fits(stage) for stage in made.memory] == [False, False, True]
    # What the trainer keeps while the server samples is not the server's.
    assert replace(larger_share, memory_gb=13).fits(made.memory[2]) is False
    assert replace(ahead, memory_gb=13).fits(made.memory[2]) is True


@pytest.mark.slow
def test_eight_gpus_divide_the_planned_step_of_long_solutions(tmp_path: Path) -> None:
    qwen = {"hidden_size": 1536, "intermediate_size": 8960, "num_attention_heads": 12, "num_key_value_heads": 2}
    found = shape({**QWEN_7B, **qwen, "vocab_size": 151936, "tie_word_embeddings": True}, tmp_path)
    told = ["models.device=cuda", "rollout.max_tokens=4096"]
    workers = ["rollout.engine=torch", "weights.transport=filesystem", "cluster.kind=local", "cluster.workers=8"]
    ahead = ["rollout.prefetch=fresh", "cluster.trainers=3", "rollout.concurrency=512"]
    plans = []
    for gpus, more in ((1, []), (8, [*workers, *ahead])):
        experiment = load_experiment(find_experiment("qwen-gsm8k-lora"), [*told, *more])
        inputs = Inputs.assumed(experiment, found, found, MACHINES["h100"])
        plans.append(plan_of(experiment, inputs, found, found, memory_gb=80, gpus=gpus))
    one, eight = plans
    assert 4 * eight.step_s < one.step_s
    assert [eight.fits(stage) for stage in eight.memory] == [True, True, True]
    # The engine shares the base's weights and has a copy of the adapters.
    weights = {name: size for name, size in eight.memory[2].parts.items() if "base" in name or "sampler" in name}
    assert weights == {"base prover": 2 * found.parameters, "adapters of the sampler": 2 * found.adapter_parameters(16)}


QWEN3 = {"model_type": "qwen3", "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8}
QWEN3 |= {"head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "memory_gb", "more"),
    [
        ("qwen3-critic", 80, []),
        ("qwen3-critic", 24, ["serving.gpu_memory_utilization=0.7", "serving.max_num_seqs=88"]),
        ("qwen3-reasoning-verifier", 80, []),
        ("qwen3-reasoning-verifier", 24, []),
    ],
)
def test_the_shipped_experiments_of_two_models_fit_the_gpus_that_they_name(
    name: str, memory_gb: int, more: list[str], tmp_path: Path
) -> None:
    prover = shape({**QWEN3, "hidden_size": 2048, "intermediate_size": 6144}, tmp_path)
    verifier = shape({**QWEN3, "hidden_size": 1024, "intermediate_size": 3072}, tmp_path)
    assert (prover.parameters, verifier.parameters) == (1_720_574_976, 596_049_920)  # Qwen3-1.7B and Qwen3-0.6B
    experiment = load_experiment(find_experiment(name), ["models.device=cuda", *more])
    inputs = Inputs.assumed(experiment, prover, verifier, MACHINES["l40s"])
    made = plan_of(experiment, inputs, prover, verifier, memory_gb=memory_gb)
    assert [made.fits(stage) for stage in made.memory] == [True, True, True]


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "rank", "most"), [("bfloat16", 16, 4.0), ("float32", 0, 9.9)])
def test_a_long_row_with_a_large_vocabulary_takes_less_than_trl(
    dtype: str, rank: int, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights and the peak of scoring and training one row of 8,192 tokens, in the sizes of gemma-3-1b (`peer` in
    benchmarks/gpu), with the chunks of a GPU with 80 GB. TRL 1.15 publishes 10.3 GiB."""
    pytest.importorskip("peft", reason="needs peft: pip install '.[lora]'")
    monkeypatch.setattr(logprobs, "device_bytes", lambda device: 80_000_000_000)
    sizes = {"hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26, "vocab_size": 262_144}
    config = Qwen2Config(**sizes, num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True)
    module = _weightless(config, dtype)
    if rank:
        module = attach_adapters(LanguageModel(module, cast(Any, None), "wide"), rank, 1.0, 0).module
    row, start, cpu = [(np.arange(8192) % 1000).astype(np.int32)], np.array([2]), torch.device("cpu")
    with FakeTensorMode(allow_non_fake_inputs=True):
        module.to_empty(device="cpu").tie_weights()
        logprobs.trust(module)
        checkpoint_layers(module.eval())
        with attention_as_on_a_gpu(), LiveBytes(module) as live:
            with torch.no_grad(), autocast("bfloat16", cpu):
                logprobs.shared_prompt_logprobs(module, row, start)
            with autocast("bfloat16", cpu):
                found_BL = logprobs.shared_prompt_logprobs(module, row, start)
            found_BL.sum().backward()  # type: ignore[no-untyped-call]
        weights = sum(weight.nbytes for weight in module.parameters())
    assert weights + live.peak < most * 2**30
