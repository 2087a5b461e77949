"""Compares pvg's fast code with the models' own code on one device, in float32 and in bfloat16.

Checks: sampled log-probs of lean decoding; CUDA graphs; log-probs and gradients of packed rows with fused layers;
variable-length attention; logits in chunks.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.results import Results
from benchmarks.gpu.sizes import Sizes, random_model, random_rows
from pvg.models.adapters import attach_adapters
from pvg.models.compute import allow_tf32, autocast
from pvg.models.language_model import LanguageModel
from pvg.models.logprobs import (
    DEFAULT_LOGITS_CHUNK,
    LogitTransform,
    chunk_tokens,
    completion_logprobs,
    shared_prompt_logprobs,
    token_logprobs,
)
from pvg.models.packing import pack_rows, packed_attention, pad_right, varlen_attention, why_not_varlen
from pvg.rollout.decoding import DecodedRow, DecodingJob
from pvg.rollout.device_rows import DeviceRows
from pvg.rollout.engine import GenerationRequest, Sampling
from pvg.rollout.lean import LeanDecoder
from pvg.training.losses import k3

# In float32: means of log-probs in nats, and gradients relative to the expected norm.
LOGPROB_LIMIT, GRADIENT_LIMIT = 1e-4, 1e-3
# In bfloat16, the error of the fast code relative to the error of the model's own code. Both are measured against
# float32, and both depend on the model, so that no fixed limit would suit all.
RELATIVE_LIMIT = 1.5


def measure(results: Results, sizes: Sizes, device: torch.device) -> None:
    allow_tf32(device, "float32")
    check_decoding(results, sizes, device)
    check_training(results, sizes, device)
    check_attention(results, sizes, device)
    check_chunks(results, sizes, device)
    measure_ratios(results, sizes, device)


def requests_of(sizes: Sizes, vocabulary: int, rows: int | None = None) -> list[GenerationRequest]:
    """Groups with one prompt each. Nothing but the limit ends a row, and the limits differ."""
    random = np.random.default_rng(0)
    prompts = [random.integers(2, vocabulary, sizes.prompt - number).astype(np.int32) for number in range(sizes.groups)]
    limits = random.integers(max(1, sizes.tokens // 2), sizes.tokens + 1, rows or sizes.rows)
    return [
        GenerationRequest(f"r{row}", prompts[row % sizes.groups], Sampling(int(limit), (), temperature=1.0), seed=row)
        for row, limit in enumerate(limits)
    ]


def opened(decoder: LeanDecoder, rows: int, *, graphs: bool = True) -> DeviceRows:
    found = DeviceRows(decoder, rows, continuous=True)
    if not graphs:
        found.graphs.refusal = "not wanted"
    return found


def decoded(rows: DeviceRows, requests: list[GenerationRequest]) -> list[DecodedRow]:
    """The results in the order of the requests. Half of them join while the others run."""
    dropped_N = np.zeros(len(requests), dtype=bool)
    jobs = [DecodingJob(number, request) for number, request in enumerate(requests)]
    found = dict(rows.turn(jobs[: len(jobs) // 2], dropped_N).finished)
    found |= dict(rows.turn(jobs[len(jobs) // 2 :], dropped_N).finished)
    while len(found) < len(requests):
        found |= dict(rows.turn([], dropped_N).finished)
    return [found[number] for number in range(len(requests))]


def check_decoding(results: Results, sizes: Sizes, device: torch.device) -> None:
    with random_model(sizes.shallow, device, torch.bfloat16) as half, half.copy(torch.float32) as exact:
        requests = requests_of(sizes, sizes.shallow.vocabulary)
        for model in (exact, half):
            name = str(model.dtype).removeprefix("torch.")
            decoder = LeanDecoder.over(model.module)
            rows = opened(decoder, len(requests))
            found = decoded(rows, requests)
            truth = _by_forward(exact, requests, found)
            gap = float(np.abs(_sampled(found) - truth).mean())
            if model is exact:
                results.check(f"lean decoding, {name}: mean difference of log-probs, nats", gap, LOGPROB_LIMIT)
            else:
                own = float(np.abs(_by_forward(half, requests, found) - truth).mean())
                results.figure(f"lean decoding, {name}: mean error of log-probs", gap, "nats")
                results.check(f"lean decoding, {name}: error relative to the model's own", gap / own, RELATIVE_LIMIT)
            _check_graphs(results, name, decoder, requests, found, rows)


def _check_graphs(
    results: Results,
    name: str,
    decoder: LeanDecoder,
    requests: list[GenerationRequest],
    found: list[DecodedRow],
    rows: DeviceRows,
) -> None:
    if decoder.device.type == "cuda":
        results.check(f"CUDA graphs, {name}: steps that torch did not record", float(bool(rows.graphs.refusal)), 0)
        results.figure(f"CUDA graphs, {name}: recorded", rows.graphs.recorded, "graphs")
        if rows.graphs.refusal:
            results.note(f"CUDA graphs were refused: {rows.graphs.refusal}")
    plain = decoded(opened(decoder, len(requests), graphs=False), requests)
    other = [not np.array_equal(a.token_ids, b.token_ids) for a, b in zip(found, plain, strict=True)]
    results.check(f"CUDA graphs, {name}: share of rows with other tokens than without", float(np.mean(other)), 0.0)


def _sampled(found: list[DecodedRow]) -> np.ndarray[Any, Any]:
    return np.concatenate([row.logprobs for row in found])


@torch.no_grad()
def _by_forward(
    model: LanguageModel, requests: list[GenerationRequest], found: list[DecodedRow]
) -> np.ndarray[Any, Any]:
    """The log-probs of the sampled tokens by the model's own forward pass, one row at a time."""
    logprobs = list[np.ndarray[Any, Any]]()
    for request, row in zip(requests, found, strict=True):
        ids_BL, lengths_B = pad_right([np.concatenate([request.prompt_ids, row.token_ids])], 0, model.device)
        start_B = torch.tensor([len(request.prompt_ids)], device=model.device)
        logprobs_BL = completion_logprobs(model.module, ids_BL, lengths_B, start_B)
        logprobs.append(logprobs_BL[0, len(request.prompt_ids) :].cpu().numpy())
    return np.concatenate(logprobs)


def check_training(results: Results, sizes: Sizes, device: torch.device) -> None:
    """Packed rows with fused layers, against padded rows through the model's own layers."""
    sequences, prompt_lengths = random_rows(sizes, sizes.shallow.vocabulary)
    with random_model(sizes.shallow, device, torch.float32) as model:
        module = model.module.requires_grad_(True)
        truth = _by_the_model(model, sequences, prompt_lengths, "float32")
        own = _by_the_model(model, sequences, prompt_lengths, "bfloat16")
        for precision in ("float32", "bfloat16"):
            with autocast(precision, device):
                found_BL = shared_prompt_logprobs(module, sequences, prompt_lengths)
            found = found_BL.detach(), _gradient(module, found_BL)
            names = ("mean error of log-probs", "error of the gradient")
            for name, gap, expected, limit in zip(
                names, _errors(found, truth), _errors(own, truth), (LOGPROB_LIMIT, GRADIENT_LIMIT), strict=True
            ):
                if precision == "float32":
                    results.check(f"packed rows, {precision}: {name}", gap, limit)
                else:
                    results.figure(f"packed rows, {precision}: {name}", gap, "")
                    results.check(f"packed rows, {precision}: {name}, relative", gap / expected, RELATIVE_LIMIT)


def _errors(found: tuple[Tensor, Tensor], truth: tuple[Tensor, Tensor]) -> tuple[float, float]:
    """Of the log-probs, in nats, and of the gradient, relative to its norm."""
    logprobs_BL, gradient = truth
    mean = (found[0] - logprobs_BL).abs()[logprobs_BL != 0].mean()
    return float(mean), float((found[1] - gradient).norm() / gradient.norm())


def _by_the_model(
    model: LanguageModel, sequences: list[Any], prompt_lengths: Any, precision: str
) -> tuple[Tensor, Tensor]:
    ids_BL, lengths_B = pad_right(sequences, 0, model.device)
    starts_B = torch.from_numpy(prompt_lengths.astype(np.int64)).to(model.device)
    with autocast(precision, model.device):
        logprobs_BL = completion_logprobs(model.module, ids_BL, lengths_B, starts_B)
    return logprobs_BL.detach(), _gradient(model.module, logprobs_BL)


def _gradient(module: torch.nn.Module, logprobs_BL: Tensor) -> Tensor:
    module.zero_grad(set_to_none=True)
    weights_BL = torch.linspace(-1.0, 1.0, logprobs_BL.numel(), device=logprobs_BL.device).view_as(logprobs_BL)
    (weights_BL * logprobs_BL).sum().backward()  # type: ignore[no-untyped-call]
    return torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])


def check_attention(results: Results, sizes: Sizes, device: torch.device) -> None:
    """Variable-length attention in bfloat16, against masks in float32."""
    shape = sizes.shallow
    size = shape.width // shape.heads
    sequences, prompt_lengths = random_rows(sizes, shape.vocabulary)
    packed = pack_rows(sequences, prompt_lengths, device)
    tokens = packed.ids_1T.shape[1]
    torch.manual_seed(0)
    inputs = [
        torch.randn(tokens, heads * size, device=device).bfloat16()
        for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
    ]
    if reason := why_not_varlen(inputs[0], shape.heads):
        results.note(f"Variable-length attention was not checked: {reason}.")
        return

    def computed(half: bool) -> list[Tensor]:
        leaves = [(flat if half else flat.float()).detach().requires_grad_(True) for flat in inputs]
        query_TE, key_TE, value_TE = leaves
        if half:
            mixed_TE = varlen_attention(query_TE, key_TE, value_TE, shape.heads, None, packed.sequences)
        else:
            mixed_TE = packed_attention(query_TE, key_TE, value_TE, shape.heads, None, packed)
        mixed_TE.float().square().sum().backward()  # type: ignore[no-untyped-call]
        return [mixed_TE.detach().float(), *[cast(Tensor, leaf.grad).float() for leaf in leaves]]

    for name, found, expected in zip(("values", "dq", "dk", "dv"), computed(True), computed(False), strict=True):
        gap = float((found - expected).norm() / expected.norm())
        results.check(f"variable-length attention, bfloat16: difference of {name}", gap, 2e-2)


def check_chunks(results: Results, sizes: Sizes, device: torch.device) -> None:
    """The chunk of this device against the one of a CPU: the same log-probs and gradients."""
    vocabulary, width = sizes.shallow.vocabulary, sizes.shallow.width
    gpu_bytes = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0
    chunks = chunk_tokens(vocabulary, gpu_bytes), max(1, min(DEFAULT_LOGITS_CHUNK // vocabulary, sizes.tokens // 2))
    results.figure("tokens in a chunk of logits", chunks[0], "tokens")
    torch.manual_seed(0)
    hidden_ND = torch.randn(sizes.rows * sizes.tokens // 8, width, device=device)
    weight_VD = torch.randn(vocabulary, width, device=device) / width**0.5
    targets_N = torch.randint(vocabulary, (len(hidden_ND),), device=device)
    for precision, limit in (("float32", 1e-4), ("bfloat16", 2e-2)):
        found = []
        for tokens in chunks:
            leaves = [hidden_ND.clone().requires_grad_(True), weight_VD.clone().requires_grad_(True)]
            with autocast(precision, device):
                logprobs_N = token_logprobs(leaves[0], leaves[1], None, targets_N, LogitTransform(), tokens)
            logprobs_N.square().sum().backward()  # type: ignore[no-untyped-call]
            found.append([logprobs_N.detach(), *[cast(Tensor, leaf.grad) for leaf in leaves]])
        for name, one, other in zip(("log-probs", "hidden gradient", "weight gradient"), *found, strict=True):
            results.check(
                f"logits in chunks, {precision}: difference of {name}",
                float((one - other).norm() / other.norm()),
                limit,
            )


def measure_ratios(results: Results, sizes: Sizes, device: torch.device) -> None:
    """How far the trainer's log-probs are from those of the sampler: the mean of k3, and the largest ratio."""
    requests = requests_of(sizes, sizes.whole.vocabulary)

    def compared(name: str, sampler: LanguageModel, module: Any, precision: str) -> None:
        found = decoded(opened(LeanDecoder.over(sampler.module), len(requests)), requests)
        rows = [np.concatenate([one.prompt_ids, row.token_ids]) for one, row in zip(requests, found, strict=True)]
        starts = np.array([len(request.prompt_ids) for request in requests], dtype=np.int32)
        with torch.no_grad(), autocast(precision, device):
            logprobs_BL = shared_prompt_logprobs(module, rows, starts).cpu()
        trained = torch.cat([logprobs_BL[n, start : len(rows[n])] for n, start in enumerate(starts.tolist())])
        sampled = torch.from_numpy(_sampled(found))
        results.figure(f"trainer and sampler, {name}: k3", float(k3(sampled, trained).mean()), "nats")
        ratio = float((trained - sampled).abs().max().exp())
        results.figure(f"trainer and sampler, {name}: largest ratio", ratio, "")

    with random_model(sizes.whole, device, torch.float32) as exact, exact.copy(torch.bfloat16) as half:
        compared("float32", exact, exact.module, "float32")
        allow_tf32(device, "bfloat16")
        compared("TF32", exact, exact.module, "float32")
        compared("bfloat16", half, exact.module, "bfloat16")
        with attach_adapters(half, 16, 16.0, seed=0) as learner:
            torch.manual_seed(0)
            for name, weight in learner.module.named_parameters():
                if "lora_B" in name:
                    torch.nn.init.normal_(weight, std=2e-4)  # as after ten steps at a learning rate of 2e-5
            for name, sampler in (("merged into", learner.copy()), ("beside", learner.sampler())):
                with sampler:
                    compared(f"adapters {name} bfloat16", sampler, learner.module, "bfloat16")
