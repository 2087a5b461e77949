"""`DeviceRows`, which decodes on a GPU, on a CPU: the tokens of `LeanRows`, and no reading between the steps of a turn.

tests/gpu/test_cuda_decoding.py runs it on a GPU."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from test_lean_decoding import KINDS, grouped, varied
from tiny_policies import SIZES, generate, prompts, requests, tiny_model, with_engine
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from pvg.errors import MissingRequirementError
from pvg.rollout import device_rows, torch_engine
from pvg.rollout.device_rows import TURN_STEPS, DeviceRows, StepGraphs
from pvg.rollout.engine import Completion, CutShort, GenerationRequest, Sampling
from pvg.rollout.lean import LeanCache, LeanDecoder
from pvg.rollout.torch_engine import TorchEngine
from pvg.telemetry.events import SilentEvents

pytestmark = pytest.mark.slow


@pytest.fixture(params=["sparse", "kernel"])
def on_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Completion]]:
    """As `generate`, but with `DeviceRows`. "kernel": with the attention of GPUs."""

    def run(wanted: list[GenerationRequest], **how: Any) -> list[Completion]:
        with monkeypatch.context() as patch:
            patch.setattr(torch_engine, "LeanRows", DeviceRows)
            if request.param == "kernel":
                begin = LeanDecoder.__init__

                def with_kernel(self: LeanDecoder, module: Any) -> None:
                    begin(self, module)
                    self._sparse = False

                patch.setattr(LeanDecoder, "__init__", with_kernel)
            return generate(wanted, **how)

    return run


def assert_same(found: list[Completion], expected: list[Completion]) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one.token_ids, other.token_ids)
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
        assert one.finish_reason == other.finish_reason


@pytest.mark.parametrize("build", KINDS)
def test_the_tokens_are_those_of_the_host_path(
    build: Callable[[], PreTrainedModel], on_device: Callable[..., list[Completion]]
) -> None:
    torch.manual_seed(0)
    module = build().eval()
    for wanted in (grouped(), varied()):
        expected = generate(wanted, model=tiny_model(module=module))
        assert_same(on_device(wanted, model=tiny_model(module=module)), expected)


def test_rows_join_and_long_requests_make_the_cache_wider_while_rows_run(
    on_device: Callable[..., list[Completion]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_rows, "COLUMN_STEP", 8)
    widened = 0
    make = LeanDecoder.new_cache

    def counted(self: LeanDecoder, rows: int, columns: int, old: LeanCache | None = None) -> LeanCache:
        nonlocal widened
        widened += old is not None
        return make(self, rows, columns, old)

    monkeypatch.setattr(LeanDecoder, "new_cache", counted)
    sizes = np.random.default_rng(0).integers(1, 41, 60).tolist()
    wanted = [
        GenerationRequest(f"r{i}", prompt, Sampling(size, (1,) if i % 2 else (1, 2, 3)), 100 + i)
        for i, (prompt, size) in enumerate(zip(prompts(60), sizes, strict=True))
    ]
    wanted.sort(key=lambda request: request.sampling.max_tokens)  # each newcomer may be the longest so far
    assert_same(on_device(wanted, max_rows=12), generate(wanted, max_rows=12))
    assert widened > 0


@pytest.mark.parametrize("change", [{"temperature": 0.3}, {"temperature": 1.7}])
def test_temperatures(change: dict[str, float], on_device: Callable[..., list[Completion]]) -> None:
    plain = varied()
    wanted = [
        replace(request, sampling=replace(request.sampling, **change)) if number % 3 else request
        for number, request in enumerate(plain)
    ]
    assert_same(on_device(wanted, max_rows=10), generate(wanted, max_rows=10))


def test_a_cut_row_continues_with_the_tokens_that_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_engine, "LeanRows", DeviceRows)
    (prompt,) = prompts(1, 5, 5)
    request = GenerationRequest("long", prompt, Sampling(60, ()), seed=9)

    async def use(engine: TorchEngine) -> Completion:
        task = asyncio.create_task(engine.generate(request))
        while not engine.stats.steps:  # noqa: ASYNC110 - the engine has no event for a finished turn
            await asyncio.sleep(0)
        engine.cut(["long"])
        with pytest.raises(CutShort) as cut:
            await task
        partial = cut.value.partial
        assert partial is not None
        assert 0 < len(partial.token_ids) < 60
        assert len(partial.token_ids) % TURN_STEPS == 0  # a row ends at the end of a turn
        return await engine.generate(replace(request, resumed_from=partial))

    whole = generate([request])[0]
    found = with_engine(use, max_rows=4)
    np.testing.assert_array_equal(found.token_ids, whole.token_ids)
    np.testing.assert_allclose(found.logprobs, whole.logprobs, atol=1e-5)


def test_too_little_memory_names_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> LeanCache:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(torch_engine, "LeanRows", DeviceRows)
    monkeypatch.setattr(LeanDecoder, "_compare", lambda *_: None)
    monkeypatch.setattr(LeanDecoder, "new_cache", full)
    with pytest.raises(MissingRequirementError, match="keys and values of 4 rows of 128 tokens") as error:
        generate(requests(prompts(3), Sampling(5, ())), max_rows=4)
    assert "Start a new run with a lower rollout.engine.max_rows" in str(error.value.remedy)


def test_a_step_reads_nothing_from_the_device() -> None:
    """Tensors on "meta" have no data, so that any reading of one raises."""
    with torch.device("meta"):
        module = LlamaForCausalLM(LlamaConfig(**{**SIZES, "vocab_size": 600})).eval()
    decoder = LeanDecoder(module)
    rows = DeviceRows(decoder, 16, continuous=True)
    rows._cache = decoder.new_cache(16, 128)
    rows._state = device_rows._State.empty(16, 32, 2, torch.device("meta"))
    for tempered in (False, True):
        rows._tempered = tempered
        rows._advance(8, 128)


class Recorder:
    """Takes the place of torch.cuda.CUDAGraph and torch.cuda.graph: remembers the step that was recorded."""

    def __init__(self, refuses: bool = False) -> None:
        self.refuses, self.replays, self.recording = refuses, 0, False

    def replay(self) -> None:
        self.replays += 1

    def pool(self) -> tuple[int, int]:
        return (1, 2)

    def graph(self, graph: Recorder, pool: object, stream: object, capture_error_mode: str) -> Recorder:
        assert capture_error_mode == "thread_local"
        return self

    def __enter__(self) -> None:
        if self.refuses:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        self.recording = True

    def __exit__(self, *_: object) -> None:
        self.recording = False


@pytest.mark.parametrize("refuses", [False, True])
def test_a_step_is_recorded_at_its_second_call(refuses: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, ran, recorded = Recorder(refuses), 0, 0

    def step() -> None:
        nonlocal ran, recorded
        ran, recorded = ran + (not recorder.recording), recorded + recorder.recording

    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: recorder)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: device)
    monkeypatch.setattr(torch.cuda, "graph", recorder.graph)
    graphs = StepGraphs(torch.device("cuda", 1))
    for _ in range(4):
        graphs.run("a", step)
    if refuses:
        assert (ran, recorded, recorder.replays) == (4, 0, 0)
        assert graphs.refusal == "operation not permitted when stream is capturing"
        return
    assert (ran, recorded, recorder.replays) == (1, 1, 3)
    graphs.clear()  # the memory is another one now
    graphs.run("a", step)
    assert (ran, recorded, recorder.replays) == (2, 1, 3)
    assert graphs.refusal == ""


def test_a_refused_graph_is_an_event_and_decoding_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[dict[str, Any]] = []

    class Recorded(SilentEvents):
        def event(self, tag: str, **fields: Any) -> None:
            events.append({"tag": tag, **fields})

    def refusing(self: StepGraphs, key: object, step: Callable[[], None]) -> None:
        self.refusal = "operation not permitted"
        step()

    wanted = grouped(groups=3)
    expected = generate(wanted)
    monkeypatch.setattr(torch_engine, "LeanRows", DeviceRows)
    monkeypatch.setattr(StepGraphs, "run", refusing)
    with ThreadPoolExecutor(1) as executor:

        async def play() -> list[Completion]:
            engine = TorchEngine(
                tiny_model(), max_rows=8, max_in_flight=100, executor=executor, events=Recorded(), continuous=True
            )
            found = await asyncio.gather(*map(engine.generate, wanted))
            await engine.close()
            return list(found)

        assert_same(asyncio.run(play()), expected)
    refused = [event for event in events if event.get("event") == "graphs.refused"]
    assert refused == [{"tag": "gen", "event": "graphs.refused", "reason": "operation not permitted"}]  # once
