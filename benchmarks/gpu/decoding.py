"""The torch engine on one device: tokens per second, share of the memory bandwidth, MFU, peak memory.

The model has the shape of Qwen2.5-1.5B, random weights in bfloat16, and samples whole completions. A decoding step must
read all weights and all cached keys and values once: the figure "memory bandwidth" is these bytes per second over the
measured rate of a large copy.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch

from benchmarks.gpu.parity import decoded, opened, requests_of
from benchmarks.gpu.results import Results
from benchmarks.gpu.sizes import Sizes, random_model
from benchmarks.gpu.steps import profile
from pvg.bench.workloads.trainer import ModelSize, matmul_gflops, wait_for
from pvg.models.language_model import LanguageModel
from pvg.rollout.engine import GenerationRequest
from pvg.rollout.lean import LeanDecoder
from pvg.rollout.torch_engine import TorchEngine

COPIED_BYTES = {"cuda": 4 << 30, "cpu": 64 << 20}
BFLOAT16_BYTES = 2
WARM_UPS = 2  # libraries choose their kernels; then every shape of a step is recorded
MODULE_TOKENS = 32  # the model's own forward pass is slow, and its rate hardly depends on the length


def measure(results: Results, sizes: Sizes, device: torch.device) -> None:
    bandwidth, rate = copy_rate(device), matmul_gflops("bfloat16", str(device)) * 1e9
    results.figure("bandwidth of a large copy", bandwidth / 1e9, "GB/s")
    with random_model(sizes.whole, device, torch.bfloat16) as model:
        decoder, most, kinds = LeanDecoder.over(model.module), max(sizes.decoded_rows), (device.type == "cuda", False)
        for rows in sizes.decoded_rows:
            requests = requests_of(sizes, sizes.whole.vocabulary, rows)
            for graphs in dict.fromkeys(kinds):
                name = f"{rows} rows, {'with' if graphs else 'without'} CUDA graphs"
                whole = rows == most and graphs == kinds[0]
                measure_rows(results, name, decoder, model, requests, graphs, (bandwidth, rate), whole=whole)
        engine(results, sizes, model, most, lean=True)
        engine(results, sizes, model, min(sizes.decoded_rows), lean=False)


def copy_rate(device: torch.device) -> float:
    """Bytes read and written per second."""
    source = torch.zeros(COPIED_BYTES[device.type] // 4, device=device)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(5):
        wait_for(str(device))
        began = time.perf_counter()
        target.copy_(source)
        wait_for(str(device))
        best = min(best, time.perf_counter() - began)
    return 2 * source.nbytes / best


def measure_rows(
    results: Results,
    name: str,
    decoder: LeanDecoder,
    model: LanguageModel,
    requests: list[GenerationRequest],
    graphs: bool,
    limits: tuple[float, float],
    *,
    whole: bool,
) -> None:
    """`limits`: bytes and operations per second. `whole`: with a goal, and a profiler's table."""
    device = model.device
    rows = opened(decoder, len(requests), graphs=graphs)
    for _ in range(WARM_UPS):
        decoded(rows, requests)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    wait_for(str(device))
    began = time.perf_counter()
    found = decoded(rows, requests)
    seconds = time.perf_counter() - began
    tokens = sum(len(row.token_ids) for row in found)
    results.figure(f"{name}: sampled", tokens / seconds, "tokens/s")
    # Half of the rows join after the first turn.
    steps = max(len(row.token_ids) for row in found)
    config = model.module.config
    kv_bytes = BFLOAT16_BYTES * 2 * config.num_hidden_layers * config.num_key_value_heads
    kv_bytes *= config.hidden_size // config.num_attention_heads
    attended = sum(
        len(row.token_ids) * (len(request.prompt_ids) + len(row.token_ids) / 2)
        for request, row in zip(requests, found, strict=True)
    )
    needed = steps * BFLOAT16_BYTES * model.num_parameters + kv_bytes * attended
    results.figure(f"{name}: memory bandwidth", needed / seconds / limits[0], "of the copy's", goal=">= 0.6" * whole)
    flops = ModelSize.of(model).forward(float(tokens), float(tokens), attended)
    results.figure(f"{name}: MFU", flops / seconds / limits[1], "of the measured rate")
    if graphs and device.type == "cuda":
        results.figure(f"{name}: graphs", rows.graphs.recorded, "")
    if device.type == "cuda":
        results.figure(f"{name}: peak memory", torch.cuda.max_memory_allocated(device) / 1e9, "GB")
    if whole:
        profile(results, f"decoding of {len(requests)} rows", lambda: decoded(rows, requests), device)


def engine(results: Results, sizes: Sizes, model: LanguageModel, rows: int, *, lean: bool) -> None:
    """The whole engine, with twice as many requests as rows, so that rows join."""

    async def play() -> float:
        with ThreadPoolExecutor(1) as executor:
            own = TorchEngine(
                model.copy(), max_rows=rows, max_in_flight=4 * rows, executor=executor, lean=lean, continuous=True
            )
            try:
                wanted = requests_of(sizes, sizes.whole.vocabulary, 2 * rows)
                if not lean:
                    wanted = [_shortened(request) for request in wanted]
                await asyncio.gather(*map(own.generate, wanted[:rows]))
                began = time.perf_counter()
                found = await asyncio.gather(*map(own.generate, wanted))
                seconds = time.perf_counter() - began
                assert own.decoding == ("lean" if lean else "module")
                return sum(len(one.token_ids) for one in found) / seconds
            finally:
                await own.close()

    kind = "lean decoding" if lean else "the model's own forward pass"
    results.figure(f"engine, {rows} rows, {kind}", asyncio.run(play()), "tokens/s")


def _shortened(request: GenerationRequest) -> GenerationRequest:
    fewer = min(MODULE_TOKENS, request.sampling.max_tokens)
    return replace(request, sampling=replace(request.sampling, max_tokens=fewer))
