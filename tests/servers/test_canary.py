"""The canary: what it lets pass, what it stops, and that it says what the trainer's own weights say."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from pvg.errors import TrainingDivergedError, WeightsNotArrivedError
from pvg.models.compute import LiveBytes
from pvg.models.embedded_training import modchain_tokenizer
from pvg.models.language_model import LanguageModel, StreamedModel
from pvg.models.tokenizer import Tokenizer
from pvg.records import Float32, Int32
from pvg.rollout.vllm_engine import Canary, reference_logprobs

SEQUENCES = [np.array([3, 4, 5, 6], dtype=np.int32), np.array([7, 8], dtype=np.int32)]
SERVER = "http://server"


def model(tied: bool = True, seed: int = 0, layers: int = 1) -> LanguageModel:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=20,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=layers,
        num_attention_heads=2,
        max_position_embeddings=32,
        initializer_range=0.3,
        tie_word_embeddings=tied,
    )
    return LanguageModel(LlamaForCausalLM(config), Tokenizer(modchain_tokenizer(), "tiny"), "tiny")


def streamed(base: LanguageModel) -> StreamedModel:
    return StreamedModel(base, torch.device("cpu"))


def canary(
    values: Sequence[Sequence[float]] | Sequence[np.ndarray], tolerance: float = 0.1, length: int = 5
) -> tuple[Canary, ThreadPoolExecutor]:
    """A canary whose trainer says `values[k]` (of its one sequence of `length` tokens) at the k-th version."""
    answers = iter(values)

    def reference(_: Mapping[str, Tensor], sequences: Sequence[Int32]) -> list[Float32]:
        assert len(sequences) == 1
        return [np.array(next(answers), dtype=np.float32)]

    executor = ThreadPoolExecutor(1)
    return Canary(lambda: [np.arange(length, dtype=np.int32)], reference, executor, tolerance), executor


@pytest.mark.parametrize("tied", [True, False])
def test_the_reference_is_the_model_under_the_given_tensors_and_leaves_its_own_alone(tied: bool) -> None:
    base, other = model(tied), model(tied, seed=1)
    before = base.fingerprint()
    found = reference_logprobs(streamed(base), "float32", other.weights(), SEQUENCES)
    assert base.fingerprint() == before
    for sequence, logprobs in zip(SEQUENCES, found, strict=True):
        ids = torch.from_numpy(sequence.astype(np.int64))
        with torch.no_grad():
            expected = other.module(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)[range(len(ids) - 1), ids[1:]]
        np.testing.assert_allclose(logprobs, expected.numpy(), atol=1e-5)
        assert logprobs.dtype == np.float32


def test_the_reference_rounds_the_weights_as_the_servers_do() -> None:
    base = model()
    rounded = {name: tensor.to(torch.bfloat16).float() for name, tensor in base.weights().items()}
    streams = streamed(base)
    served = reference_logprobs(streams, "bfloat16", base.weights(), SEQUENCES)
    for logprobs, expected in zip(served, reference_logprobs(streams, "float32", rounded, SEQUENCES), strict=True):
        np.testing.assert_array_equal(logprobs, expected)
    assert any(
        np.abs(a - b).max() > 1e-4
        for a, b in zip(served, reference_logprobs(streams, "float32", base.weights(), SEQUENCES), strict=True)
    )


@pytest.mark.parametrize("adapters", [False, True])
def test_the_reference_has_one_layer_of_the_weights_in_memory(adapters: bool) -> None:
    """Also of weights with adapters, which are merged then. The numbers are those of the whole model."""
    base = model(tied=False, layers=24)
    policy: LanguageModel = base
    if adapters:
        pytest.importorskip("peft", reason="needs peft: pip install '.[lora]'")
        from pvg.models.adapters import attach_adapters

        policy = attach_adapters(base, 2, 4.0, 0)
        with torch.no_grad():
            for name, weight in policy.module.named_parameters():
                if "lora_B" in name:
                    weight.copy_(0.1 * torch.sin(torch.arange(weight.numel()).reshape(weight.shape)))
    streams, sequences = streamed(base), [np.arange(9, dtype=np.int32), np.arange(3, dtype=np.int32)]
    reference_logprobs(streams, "bfloat16", base.weights(), sequences)  # checks, once
    weights, whole = policy.weights(), sum(weight.nbytes for weight in base.weights().values())
    with LiveBytes(base.module) as live:
        found = reference_logprobs(streams, "bfloat16", weights, sequences)
    assert live.peak < whole / 3
    rounded = policy.copy()
    rounded.load_weights({name: weight.to(torch.bfloat16).float() for name, weight in policy.weights().items()})
    for sequence, logprobs in zip(sequences, found, strict=True):
        ids = torch.from_numpy(sequence.astype(np.int64))
        with torch.no_grad():
            expected = rounded.module(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)[range(len(ids) - 1), ids[1:]]
        np.testing.assert_allclose(logprobs, expected.numpy(), atol=1e-5)


def test_the_gap_is_the_largest_and_beyond_the_tolerance_the_error_names_server_and_version() -> None:
    canary_, executor = canary([[-1.0, -2.0, -3.0, -4.0]])
    with executor:
        expected = asyncio.run(canary_.expect({}, 7))
        near = [np.array([-1.0, -2.05, -3.0, -3.98], dtype=np.float32)]
        assert canary_.check(SERVER, expected, near) == pytest.approx(0.05, abs=1e-6)
        far = [np.array([-1.0, -2.0, -3.2, -4.0], dtype=np.float32)]
        with pytest.raises(WeightsNotArrivedError, match=rf"{SERVER} does not have version 7 .* 0\.2 nats"):
            canary_.check(SERVER, expected, far)
        with pytest.raises(WeightsNotArrivedError):
            canary_.check(SERVER, expected, [np.full(4, np.nan, dtype=np.float32)])


def test_a_server_that_missed_a_step_smaller_than_the_tolerance_is_found_out() -> None:
    old, new = [-1.0, -2.0, -3.0, -4.0], [-1.02, -2.02, -2.98, -4.02]
    canary_, executor = canary([old, new])
    with executor:
        asyncio.run(canary_.expect({}, 1))
        expected = asyncio.run(canary_.expect({}, 2))
    assert expected.moved == pytest.approx(0.02, abs=1e-6)
    noise = np.array([1e-3, -1e-3, 1e-3, -1e-3], dtype=np.float32)
    arrived = [np.array(new, dtype=np.float32) + noise]
    assert canary_.check(SERVER, expected, arrived) < 0.1
    stale = [np.array(old, dtype=np.float32) + noise]
    with pytest.raises(WeightsNotArrivedError, match=r"has version 1 of the weights, or one near it, instead of 2"):
        canary_.check(SERVER, expected, stale)


def test_weights_that_give_no_number_are_not_blamed_on_a_server() -> None:
    canary_, executor = canary([[float("nan")] * 4])
    with executor, pytest.raises(TrainingDivergedError, match=r"Version 3 .* not finite"):
        asyncio.run(canary_.expect({}, 3))


@pytest.mark.slow
def test_a_server_that_never_loads_is_found_out_however_small_the_steps_are() -> None:
    """Each step is a tenth of the noise, and most versions are no longer remembered."""
    generator = np.random.default_rng(0)
    start, noise = -np.arange(1.0, 65.0), 1e-2
    step = noise / 10 * generator.choice([-1.0, 1.0], 64)
    canary_, executor = canary([start + step * version for version in range(60)], tolerance=1.0, length=65)
    with executor:
        for version in range(60):
            expected = asyncio.run(canary_.expect({}, version))
            assert len(expected.earlier) <= 16
            assert not version or expected.earlier[0][0] == 0
            arrived = [(start + step * version + noise * generator.standard_normal(64)).astype(np.float32)]
            canary_.check(SERVER, expected, arrived)  # a good server is never blamed
        never = [(start + noise * generator.standard_normal(64)).astype(np.float32)]
        with pytest.raises(WeightsNotArrivedError, match="instead of 59"):
            canary_.check(SERVER, expected, never)
