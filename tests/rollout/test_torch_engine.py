"""The engine around the decoding: batching, the event loop, cancelling, closing, errors, new weights.

Tests that hold a batch at one of its steps go through the module; test_continuous_batching has their lean siblings.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tiny_policies import Gate, generate, prompts, requests, tiny_llama, tiny_model, with_engine

from pvg.errors import ConfigurationError, StateError
from pvg.records import VersionSpan
from pvg.rollout.engine import Sampling
from pvg.rollout.torch_engine import TorchEngine
from pvg.servers.publishing import WeightUpdate


class ModuleGate(Gate):
    """At the module's `step`-th forward pass."""

    def __init__(self, module: torch.nn.Module, step: int = 3) -> None:
        super().__init__()
        self._step = step
        module.register_forward_pre_hook(self._hook, with_kwargs=True)

    def _hook(self, _module: torch.nn.Module, _args: object, kwargs: dict[str, torch.Tensor]) -> None:
        self.rows.append(len(kwargs["input_ids"]))
        if len(self.rows) == self._step:
            self.hold()


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_concurrent_calls_are_decoded_together_and_no_more_than_max_rows() -> None:
    async def use(engine: TorchEngine) -> None:
        wanted = requests(prompts(40), Sampling(6, ()))
        completions = await asyncio.gather(*map(engine.generate, wanted))
        assert [completion.request_id for completion in completions] == [request.id for request in wanted]
        assert (engine.stats.batches, engine.stats.rows) == (3, 40)
        assert engine.stats.mean_batch == pytest.approx(40 / 3)
        assert engine.stats.tokens == 240
        assert engine.stats.seconds > 0

    with_engine(use, max_rows=16)


@pytest.mark.parametrize("lean", [True, False])
def test_a_resting_engine_has_no_weights_until_newer_ones_come(monkeypatch: pytest.MonkeyPatch, lean: bool) -> None:
    model, newer = tiny_model(), tiny_model(seed=1)
    wanted = requests(prompts(8), Sampling(6, ()))

    def held() -> int:
        return sum(weight.untyped_storage().nbytes() for weight in model.weights().values())

    async def use(engine: TorchEngine) -> None:
        async def sampled() -> list[list[int]]:
            return [found.token_ids.tolist() for found in await asyncio.gather(*map(engine.generate, wanted))]

        before = await sampled()
        await engine.rest(replaced=True)
        assert held(), "small weights stay"
        monkeypatch.setattr("pvg.rollout.torch_engine.KEPT_BYTES", 0)
        await engine.rest()
        assert await sampled() == before
        task = asyncio.create_task(sampled())
        await turns(3)
        await engine.rest(replaced=True)
        assert await task == before, "rows that run keep their weights"
        for version in (1, 2):
            await engine.rest(replaced=True)
            await engine.rest(replaced=True)
            assert not held()
            with pytest.raises(StateError, match="before the weights"):
                await engine.generate(wanted[0])
            await engine.load_weights(WeightUpdate(version, newer.weights()))
            assert await sampled() == [c.token_ids.tolist() for c in by_newer]

    by_newer = generate(wanted, model=tiny_model(seed=1), lean=lean)
    with_engine(use, model=model, lean=lean)


def test_closing_refuses_waiting_and_running_requests_and_frees_the_model() -> None:
    model = tiny_model()
    gate = ModuleGate(model.module)
    freed = tiny_model()

    async def use(engine: TorchEngine) -> None:
        wanted = requests(prompts(6), Sampling(80, ()))
        tasks = [asyncio.create_task(engine.generate(request)) for request in wanted]  # 4 run, 2 wait
        await gate.reached()
        closing = asyncio.create_task(engine.close())
        await turns()
        gate.open()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(outcome, StateError)
            assert "closed" in outcome.message
        await closing
        assert model.closed
        with pytest.raises(StateError, match="closed"):
            await engine.generate(wanted[0])
        with pytest.raises(StateError, match="closed"):
            await engine.load_weights(WeightUpdate(1, freed.weights()))
        await engine.close()

    with_engine(use, lean=False, model=model, max_rows=4)
    assert len(gate.rows) <= 4  # the batch stopped at the step after the gate


def test_an_error_in_decoding_reaches_every_caller_of_the_batch_and_the_engine_goes_on() -> None:
    model = tiny_model()
    failing = True

    def fail(_module: torch.nn.Module, _args: object) -> None:
        if failing:
            raise RuntimeError("the device is on fire")

    model.module.register_forward_pre_hook(fail)

    async def use(engine: TorchEngine) -> None:
        nonlocal failing
        wanted = requests(prompts(5), Sampling(4, ()))
        outcomes = await asyncio.gather(*map(engine.generate, wanted), return_exceptions=True)
        assert [str(outcome) for outcome in outcomes] == ["the device is on fire"] * 5
        failing = False
        assert len(await asyncio.gather(*map(engine.generate, wanted))) == 5
        assert engine.stats.batches == 1

    with_engine(use, model=model)


def test_new_weights_change_what_is_sampled_and_the_version() -> None:
    newer = tiny_model(seed=5)
    wanted = requests(prompts(6), Sampling(12, ()))
    expected = generate(wanted, model=tiny_model(seed=5))

    async def use(engine: TorchEngine) -> None:
        before = await asyncio.gather(*map(engine.generate, wanted))
        timing = await engine.load_weights(WeightUpdate(3, newer.weights()))
        after = await asyncio.gather(*map(engine.generate, wanted))
        assert timing.version == engine.version == 3
        assert 0 < timing.rpc_ms <= timing.wall_ms
        for old, new, same in zip(before, after, expected, strict=True):
            assert (old.spans, new.spans) == ((VersionSpan(0, 0),), (VersionSpan(0, 3),))
            assert old.token_ids.tolist() != new.token_ids.tolist()
            assert new.logprobs.tobytes() == same.logprobs.tobytes()
        with torch.no_grad():  # the engine keeps a copy: training on does not reach it
            for tensor in newer.weights().values():
                tensor.zero_()
        again = await asyncio.gather(*map(engine.generate, wanted))
        assert again[0].logprobs.tobytes() == after[0].logprobs.tobytes()

    with_engine(use)


def test_weights_that_do_not_fit_or_go_back_are_refused_and_the_old_ones_stay() -> None:
    wanted = requests(prompts(3), Sampling(8, ()))
    expected = generate(wanted)

    async def use(engine: TorchEngine) -> None:
        weights = tiny_model(seed=5).weights()
        name = next(iter(weights))
        with pytest.raises(ConfigurationError, match="missing"):
            await engine.load_weights(WeightUpdate(1, {name: weights[name]}))
        with pytest.raises(ConfigurationError, match="unheard"):
            await engine.load_weights(WeightUpdate(1, {**weights, "unheard_of": weights[name]}))
        with pytest.raises(StateError, match=r"version 0 .* version 0"):
            await engine.load_weights(WeightUpdate(0, weights))
        assert engine.version == 0
        for completion, same in zip(await asyncio.gather(*map(engine.generate, wanted)), expected, strict=True):
            assert completion.logprobs.tobytes() == same.logprobs.tobytes()

    with_engine(use)


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        (Sampling(0, ()), "max_tokens is 0"),
        (Sampling(4, (), temperature=0.0), "temperature is 0.0"),
        (Sampling(4, (), temperature=float("nan")), "temperature is nan"),
        (Sampling(93, ()), "4 tokens plus 93 new ones is 97 tokens, more than the model's 96"),
    ],
)
def test_requests_that_cannot_be_served_are_refused_before_sampling(sampling: Sampling, message: str) -> None:
    async def use(engine: TorchEngine) -> None:
        request = requests(prompts(1, 4, 4), sampling)[0]
        with pytest.raises(ConfigurationError, match=message):
            await engine.generate(request)
        assert engine.stats.rows == 0

    with_engine(use)


def test_a_model_that_keeps_something_else_than_keys_and_values_is_refused() -> None:
    module = tiny_llama()
    module.config.layer_types = ["linear_attention", "full_attention"]
    with ThreadPoolExecutor(1) as executor, pytest.raises(ConfigurationError, match="linear_attention"):
        TorchEngine(tiny_model(module=module), max_rows=1, max_in_flight=1, executor=executor)
