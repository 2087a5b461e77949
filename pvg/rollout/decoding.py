"""Decodes a batch of requests through the model's forward pass: one prefill, then one pass per token.

`decode` works for every architecture. pvg.rollout.lean_rows is faster, but supports only Llama-like models.

The prefill computes each distinct prompt once, without its last token, which is the input of the first decoding step.
Prompts are aligned at their right ends, so each step appends one column to the cache. Finished rows leave the batch.
Decoding runs no Python per row.

Invariants: a row gets the same result as if decoded alone, up to rounding, which may swap two tokens with almost equal
probability. Columns before a row's first token hold zeros and are masked, so they cannot affect its result.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from pvg.errors import ConfigurationError, TrainingDivergedError
from pvg.models.compute import explained, product_tolerance
from pvg.models.packing import pad_right, token_budget_batches
from pvg.models.shared_prompts import longest_tried
from pvg.records import FinishReason, Float32, Int32, RoutedExperts
from pvg.rollout.engine import GenerationRequest, Sampling
from pvg.rollout.sampler import RowSettings, draw, uniform_numbers
from pvg.telemetry.spans import span

if TYPE_CHECKING:
    from pvg.models.routing import ExpertRecorder


class RoomyLayer(DynamicLayer):  # type: ignore[misc]  # transformers is untyped here
    """One layer's keys and values [rows, heads, columns, width], with room for `capacity` columns, so that a step
    appends one without copying the others."""

    def __init__(self, keys: Tensor, values: Tensor, capacity: int) -> None:
        super().__init__()
        self.is_initialized = True
        room = (0, 0, 0, capacity - keys.shape[2])
        self._buffers = [nn.functional.pad(states, room) for states in (keys, values)]
        self._show(keys.shape[2])

    def update(self, key_states: Tensor, value_states: Tensor, *_args: object, **_kw: object) -> tuple[Tensor, Tensor]:
        columns = self.keys.shape[2]
        for buffer, new in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, columns : columns + 1] = new
        self._show(columns + 1)
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        self._buffers = [buffer[indices] for buffer in self._buffers]
        self._show(self.keys.shape[2])

    def _show(self, columns: int) -> None:
        self.keys, self.values = (buffer[:, :, :columns] for buffer in self._buffers)


class RowExperts:
    """Collects the experts that a mixture-of-experts model chose for each token of `rows` requests. Call it after every
    forward pass. `steps` is the most sampled tokens of any request."""

    def __init__(self, module: nn.Module, recorder: ExpertRecorder, rows: int, steps: int) -> None:
        from pvg.models.routing import number_of_experts, routers_of

        experts = max(map(number_of_experts, routers_of(module)))
        # torch cannot index-assign uint16. So int16 holds their bits, and `_read` views them as uint16.
        self._dtype = torch.uint8 if experts <= 256 else torch.int16
        self._recorder = recorder
        self._prefix: list[RoutedExperts | None] = [None] * rows
        self._shape = (rows, steps)
        self._steps_NTMK: Tensor | None = None  # on the model's device; allocated at the first step

    def prefilled(self, rows_of: Sequence[Sequence[int]], lengths_B: NDArray[np.int64]) -> None:
        """The last pass computed prompt b, padded on the right, for the rows `rows_of[b]`."""
        experts_TMK = _read(self._recorder.take().to(self._dtype))
        experts_BLMK = experts_TMK.reshape(len(rows_of), -1, *experts_TMK.shape[1:])
        for prompt, rows in enumerate(rows_of):
            for row in rows:
                self._prefix[row] = experts_BLMK[prompt, : lengths_B[prompt]]

    def stepped(self, request_R: Tensor, step: int) -> None:
        """The last pass computed one input token for each row of `request_R`; sampled token number `step` came from
        it."""
        experts_RMK = self._recorder.take().to(self._dtype)
        if self._steps_NTMK is None:
            shape = (*self._shape, *experts_RMK.shape[1:])
            self._steps_NTMK = torch.zeros(shape, dtype=self._dtype, device=experts_RMK.device)
        self._steps_NTMK[request_R, step] = experts_RMK

    def results(self, lengths: Sequence[int]) -> list[RoutedExperts]:
        """For each row [P + C - 1, layers, k], where C is its entry in `lengths`. Each row is copied once."""
        assert self._steps_NTMK is not None
        steps_NTMK = _read(self._steps_NTMK)
        found = []
        for row, length in enumerate(lengths):
            prefix, sampled = self._prefix[row], steps_NTMK[row, :length]
            found.append(sampled.copy() if prefix is None else np.concatenate([prefix, sampled]))
        return found


def _read(experts: Tensor) -> RoutedExperts:
    found = experts.cpu().numpy()
    return found.view(np.uint16) if found.dtype == np.int16 else found


# --- interface of the torch engine -----------------------------------------------------------------------------------
# Prompt tokens in one forward pass: enough to fill a device, few enough that activations stay smaller than the KV
# cache.
PREFILL_TOKENS = 16_384
# Drop finished rows when they are this share: copying the others costs about as much as one step that reads them.
COMPACT_SHARE = 1 / 8
NO_STOP = -1
# On a GPU, look for finished rows after this many steps.
LOOK_EVERY = 8
# The largest difference of two correct computations, relative to the largest logit: in float32, and in 16 bits.
ALIKE, ALIKE_16_BITS = 1e-3, 2e-2
REMEDY = "Choose another model, or sample on vLLM servers."


@dataclass(frozen=True, slots=True)
class DecodedRow:
    """One row's result: `token_ids` int32 [C] including the stop token, and `logprobs` float32 [C] in nats. Both
    include the tokens that the request began with."""

    token_ids: Int32
    logprobs: Float32
    finish_reason: FinishReason
    routed_experts: RoutedExperts | None = None


@dataclass(frozen=True, slots=True)
class DecodingJob:
    """A request to decode. `ticket` identifies it while it runs."""

    ticket: int
    request: GenerationRequest


@dataclass(frozen=True, slots=True)
class TurnResult:
    """Result of one call of `RunningRows.turn`: finished rows by ticket, decoding steps, and live rows summed over the
    steps."""

    finished: list[tuple[int, DecodedRow]]
    steps: int
    live_rows: int


class RunningRows(Protocol):
    """The rows that an engine is decoding. Only one thread at a time may use it. Discard it after an exception."""

    joins: bool = False  # `turn` accepts jobs while rows run, not only when all rows have finished
    refusal: str = ""  # why torch does not record steps on the GPU

    def turn(self, jobs: Sequence[DecodingJob], dropped_N: NDArray[np.bool_]) -> TurnResult:
        """Admit `jobs` and decode until at least one row finishes or a bounded number of steps is done.

        Another thread may set entries of `dropped_N` (by ticket) meanwhile. Such a row finishes at the next step with
        the tokens that it has, and its log-probs are not checked. Raises TrainingDivergedError if the model's logits
        are not finite.
        """


class ModuleRows(RunningRows):
    """`RunningRows` that decodes whole batches with `decode`, for every architecture."""

    def __init__(self, module: nn.Module, device: torch.device, *, routed_experts: bool = False) -> None:
        self._module = module
        self._device = device
        self._routed_experts = routed_experts

    def turn(self, jobs: Sequence[DecodingJob], dropped_N: NDArray[np.bool_]) -> TurnResult:
        assert [job.ticket for job in jobs] == list(range(len(jobs)))  # ticket = row number
        dropped_N = dropped_N[: len(jobs)]
        requests = [job.request for job in jobs]
        results = decode(self._module, requests, dropped_N, self._device, self._routed_experts)
        lengths = [len(found.token_ids) - job.request.tokens_resumed for job, found in zip(jobs, results, strict=True)]
        return TurnResult(
            [(job.ticket, result) for job, result in zip(jobs, results, strict=True)], max(lengths), sum(lengths)
        )


@torch.inference_mode()
def decode(
    module: nn.Module,
    requests: Sequence[GenerationRequest],
    dropped_N: NDArray[np.bool_],
    device: torch.device,
    routed_experts: bool = False,
) -> list[DecodedRow]:
    """Sample all requests in one batch. The results are in the order of the requests. Spans: prefill, decode.

    `dropped_N`: another thread may set entries while this runs; such a row ends at the next step with the tokens it
    has. `routed_experts`: results carry the experts of all tokens as computed now, including the tokens a request
    begins with.

    Raises TrainingDivergedError if the model's logits are not finite, and ConfigurationError if `routed_experts` is set
    for a model without experts.
    """
    recording: AbstractContextManager[ExpertRecorder | None] = nullcontext()
    if routed_experts:
        from pvg.models.routing import recorded_experts

        recording = recorded_experts(module)
    with recording as recorder:
        steps = max(request.sampling.max_tokens - request.tokens_resumed for request in requests)
        experts = None if recorder is None else RowExperts(module, recorder, len(requests), steps)
        with span("prefill", device=True):
            batch = _Batch(module, requests, device, experts)
        with span("decode", device=True):
            results = batch.decoded(steps, dropped_N)
    if experts is None:
        return results
    sampled = [len(result.token_ids) - r.tokens_resumed for result, r in zip(results, requests, strict=True)]
    return [replace(result, routed_experts=own) for result, own in zip(results, experts.results(sampled), strict=True)]


class _Batch:
    """N requests that are decoded together. `rows_R`: the numbers of those that run, in the order of the cache's rows.
    Those that have ended may be among them; what these sample is discarded. `limits_N`: the tokens of each result, at
    most. The extra last column of a completion takes the samples of ended requests."""

    def __init__(
        self, module: nn.Module, requests: Sequence[GenerationRequest], device: torch.device, experts: RowExperts | None
    ) -> None:
        def whole(numbers: Sequence[int]) -> Tensor:
            return torch.tensor(numbers, device=device)

        self._module, self._requests, self._device, self._experts = module, requests, device, experts
        known = [request.known_ids for request in requests]
        samplings = [request.sampling for request in requests]
        self._limits_N = np.asarray([sampling.max_tokens for sampling in samplings], dtype=np.int64)
        self._width = width = int(self._limits_N.max())
        self._rows_R = torch.arange(len(requests), device=device)
        self._settings = RowSettings.of(samplings, device)  # of rows_R
        self._first_N = whole([request.tokens_resumed for request in requests])
        self._limit_N = whole([sampling.max_tokens for sampling in samplings])
        self._token_N = whole([int(ids[-1]) for ids in known])
        self._position_N = whole([len(ids) - 1 for ids in known])
        self._done_N = torch.zeros(len(requests), dtype=torch.bool, device=device)
        self._stop_NS = torch.from_numpy(stop_numbers(samplings)).to(device)
        self._uniform_NT = torch.from_numpy(uniform_numbers(requests, width + 1)).to(device)
        self._tokens_NT = torch.zeros(len(requests), width + 1, dtype=torch.int64, device=device)
        self._logprobs_NT = torch.zeros(len(requests), width + 1, dtype=torch.float32, device=device)
        for row, request in enumerate(requests):
            if (begun := request.resumed_from) is not None:
                self._tokens_NT[row, : request.tokens_resumed] = torch.from_numpy(begun.token_ids).to(device)
                self._logprobs_NT[row, : request.tokens_resumed] = torch.from_numpy(begun.logprobs).to(device)
        start = max(map(len, known)) - 1
        self._visible_NT: Tensor | None = None  # None: no row has padding, so no mask is needed
        if any(len(ids) - 1 != start for ids in known):
            columns_T = torch.arange(start + width, device=device)
            self._visible_NT = columns_T >= start - self._position_N[:, None]
        self._cache = _prefilled(module, [ids[:-1] for ids in known], start + width, device, experts)

    def decoded(self, steps: int, dropped_N: NDArray[np.bool_]) -> list[DecodedRow]:
        for step in range(steps):
            self._step(step)
            if dropped_N.any():
                now_N = dropped_N.copy()
                so_far_N = np.asarray([request.tokens_resumed + step + 1 for request in self._requests])
                self._limits_N[now_N] = np.minimum(self._limits_N, so_far_N)[now_N]
                self._done_N |= torch.from_numpy(now_N).to(self._device)
            if self._device.type != "cpu" and (step + 1) % LOOK_EVERY:
                continue  # reading from a GPU waits for it
            live_K = torch.nonzero(~self._done_N[self._rows_R])[:, 0]
            if not len(live_K):
                break
            if len(self._rows_R) - len(live_K) >= max(1, COMPACT_SHARE * len(self._rows_R)):
                self._rows_R, self._settings = self._rows_R[live_K], self._settings.select(live_K)
                self._cache.batch_select_indices(live_K)
        return self._results(dropped_N)

    def _step(self, step: int) -> None:
        """Sample one token for each row."""
        rows_R = self._rows_R
        logits_RV = self.next_logits()
        if self._experts is not None:
            self._experts.stepped(rows_R, step)
        column_R = (self._first_N[rows_R] + step).clamp(max=self._width)
        token_R, logprobs_R = draw(logits_RV, self._settings, self._uniform_NT[rows_R, column_R])
        self._tokens_NT[rows_R, column_R] = self._token_N[rows_R] = token_R
        self._logprobs_NT[rows_R, column_R] = logprobs_R
        self._position_N += ~self._done_N  # an ended row must not exceed the model's context
        stopped_R = (token_R[:, None] == self._stop_NS[rows_R]).any(dim=1)
        self._done_N[rows_R] |= stopped_R | (self._limit_N[rows_R] <= column_R + 1)

    def next_logits(self) -> Tensor:
        """One forward pass: logits_RV for the token after each row's newest."""
        rows_R, end = self._rows_R, self._cache.get_seq_length() + 1
        output = self._module(
            input_ids=self._token_N[rows_R, None],
            attention_mask=None if self._visible_NT is None else self._visible_NT[rows_R, :end],
            position_ids=self._position_N[rows_R, None],
            past_key_values=self._cache,
            use_cache=True,
        )
        logits_RV: Tensor = output.logits[:, -1]
        return logits_RV

    def _results(self, dropped_N: NDArray[np.bool_]) -> list[DecodedRow]:
        """Cut each row at its first stop token or its limit."""
        tokens_NT, logprobs_NT = self._tokens_NT.cpu().numpy(), self._logprobs_NT.cpu().numpy()
        results = []
        for row, request in enumerate(self._requests):
            limit = int(self._limits_N[row])
            stops = np.flatnonzero(np.isin(tokens_NT[row, :limit], request.sampling.stop_ids))
            length = int(stops[0]) + 1 if stops.size else limit
            tokens, logprobs = tokens_NT[row, :length], logprobs_NT[row, :length]
            results.append(finished_row(request, tokens, logprobs, bool(stops.size), bool(dropped_N[row])))
        return results


def _prefilled(
    module: nn.Module, prefixes: Sequence[Int32], capacity: int, device: torch.device, experts: RowExperts | None
) -> Cache:
    """A cache for `capacity` columns, whose rows end with these prefixes. Each distinct one is computed once, padded on
    the right, where causal attention does not look."""
    start = max(map(len, prefixes))
    rows_of: dict[bytes, list[int]] = {}
    for row, prefix in enumerate(prefixes):
        if len(prefix):
            rows_of.setdefault(prefix.tobytes(), []).append(row)
    groups = list(rows_of.values())
    lengths_U = np.asarray([len(prefixes[rows[0]]) for rows in groups], dtype=np.int64)
    decoder = cast(Any, module).get_decoder()
    filled: list[tuple[Tensor, Tensor]] = []  # the keys and values of each layer
    for batch in token_budget_batches(lengths_U, max(PREFILL_TOKENS, start)):
        chosen = [groups[group] for group in batch]
        ids_BL, _ = pad_right([prefixes[rows[0]] for rows in chosen], 0, device)
        computed = DynamicCache()
        decoder(input_ids=ids_BL, past_key_values=computed, use_cache=True)
        if experts is not None:
            experts.prefilled(chosen, lengths_U[batch])
        pairs = [(row, prompt) for prompt, rows in enumerate(chosen) for row in rows]
        rows_F, prompts_F = torch.tensor(pairs, device=device).T
        lengths_F = torch.from_numpy(lengths_U[batch]).to(device)[prompts_F]
        column_FT = torch.arange(start, device=device) - (start - lengths_F)[:, None]  # of the prompt; below 0: padding
        for number, layer in enumerate(computed.layers):
            both = layer.keys, layer.values
            if number == len(filled):
                shapes = [(len(prefixes), states.shape[1], start, states.shape[3]) for states in both]
                filled.append((both[0].new_zeros(shapes[0]), both[1].new_zeros(shapes[1])))
            for target, states in zip(filled[number], both, strict=True):
                moved_FTHD = states[prompts_F[:, None], :, column_FT.clamp(min=0)]
                target[rows_F] = moved_FTHD.masked_fill(column_FT[:, :, None, None] < 0, 0).transpose(1, 2)
    # Without any prefix, the layers are not known yet.
    return Cache(layers=[RoomyLayer(*both, capacity) for both in filled]) if filled else DynamicCache()


KNOWN_LAYERS = frozenset({"full_attention", "sliding_attention"})


def check_layers(module: nn.Module) -> None:
    """Raises ConfigurationError for a model with layers that need more state than keys and values."""
    config = cast(Any, module).config.get_text_config()
    if unknown := sorted(set(getattr(config, "layer_types", None) or ()) - KNOWN_LAYERS):
        raise ConfigurationError(
            f"The torch engine cannot sample from {type(module).__name__}: it has {unknown[0]} layers.",
            "Choose a model with attention layers only.",
        )


def check_decoding(module: nn.Module, device: torch.device, longest: int = 0) -> None:
    """Raises ConfigurationError if this engine cannot decode with the model, or if the model computes other logits for
    a prompt when a longer prompt is in the same batch: some models ignore `position_ids`, and some look ahead. Models
    in 16 bits are not checked, because rounding may give them other logits. `longest`: see
    pvg.models.shared_prompts.longest_tried."""
    check_layers(module)
    model, name = cast(Any, module), type(module).__name__
    weight = model.get_output_embeddings().weight
    if weight.dtype != torch.float32:
        return
    ids_P = np.arange(longest_tried(module, longest), dtype=np.int32) % weight.shape[0]
    requests = [GenerationRequest(f"check {n}", ids_P[:n], Sampling(1, ()), seed=0) for n in (2, len(ids_P))]
    tolerance = product_tolerance(weight, ALIKE, ALIKE_16_BITS, model.config.get_text_config().num_hidden_layers)
    with torch.inference_mode(), explained(f"pvg's torch engine cannot sample with {name}", REMEDY):
        found_RV = _Batch(module, requests, device, None).next_logits()
        ids_1P = torch.from_numpy(ids_P).to(device).long()[None]
        # Logits of the last token alone: those of a long row in a large vocabulary may not fit into memory.
        asked = {"use_cache": False, "logits_to_keep": 1}
        alone_V = [model(input_ids=ids_1P[:, : len(r.prompt_ids)], **asked).logits[0, -1] for r in requests]
    # Not for NaN: decoding itself refuses a model whose logits are not finite.
    if any(bool((f - a).abs().max() > tolerance * a.abs().max()) for f, a in zip(found_RV, alone_V, strict=True)):
        raise ConfigurationError(
            f"{name} computes other logits for a prompt when a longer prompt is in the same batch.", REMEDY
        )


def stop_numbers(samplings: Sequence[Sampling], width: int = 1) -> NDArray[np.int64]:
    """stop_NS: the stop tokens of each request, and NO_STOP up to the longest of these lists, or up to `width`."""
    stop_NS = np.full((len(samplings), max(width, *(len(s.stop_ids) for s in samplings))), NO_STOP, dtype=np.int64)
    for row, sampling in enumerate(samplings):
        stop_NS[row, : len(sampling.stop_ids)] = sampling.stop_ids
    return stop_NS


def finished_row(
    request: GenerationRequest, tokens: NDArray[np.int64], logprobs: Float32, stopped: bool, dropped: bool
) -> DecodedRow:
    """A copy of a row's result. Raises TrainingDivergedError if its log-probs are not finite, unless it was dropped."""
    if not dropped and not np.isfinite(logprobs).all():
        raise diverged(request)
    return DecodedRow(tokens.astype(np.int32), logprobs.copy(), "stop" if stopped else "length")


def diverged(request: GenerationRequest) -> TrainingDivergedError:
    return TrainingDivergedError(
        f"The policy's logits are not finite (request {request.id!r}).",
        "The weights have diverged: resume from the last commit with a lower learning rate.",
    )
