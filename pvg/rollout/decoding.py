"""Decodes a batch of requests through the model's forward pass: one prefill, then one pass per token.

`decode` works for every architecture. pvg.rollout.lean_rows is faster, but supports only Llama-like models.

The prefill computes each distinct prompt once, without its last token, which is the input of the first decoding step.
Prompts are aligned at their right ends, so in each step every row writes the same column of the preallocated KV cache.
Finished rows leave the batch. Decoding runs no Python per row.

Invariants: a row gets the same result as if decoded alone, up to rounding, which may swap two tokens with almost equal
probability. Columns before a row's first token hold zeros and are masked, so they cannot affect its result.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin

from pvg.errors import ConfigurationError, TrainingDivergedError
from pvg.models.compute import product_tolerance
from pvg.models.packing import pad_right, token_budget_batches
from pvg.models.routing import ExpertRecorder, number_of_experts, recorded_experts, routers_of
from pvg.records import FinishReason, Float32, Int32, RoutedExperts
from pvg.rollout.engine import GenerationRequest, Sampling
from pvg.rollout.sampler import RowSettings, distribution, sample, uniform_numbers
from pvg.telemetry.spans import span


@dataclass(frozen=True, slots=True)
class PromptPlacement:
    """The first `length` tokens of prefill row `prompts_F[f]` become the prompt of cache row `rows_F[f]`."""

    rows_F: Tensor
    prompts_F: Tensor
    length: int


@dataclass(slots=True)
class CacheSlots:
    """State shared by all layers. `rows` are in use, `columns` are filled, and the first `start` columns hold
    prompts."""

    rows: int
    start: int
    capacity: int
    columns: int
    placements: Sequence[PromptPlacement] | None = None


class RowLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers is untyped here
    """One layer: keys and values [rows, heads, capacity, head width]."""

    def __init__(self, slots: CacheSlots) -> None:
        super().__init__()
        self._slots = slots

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values = (self._buffer(states) for states in (key_states, value_states))
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *_args: object, **_kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """In a prefill, copy the prompts to their rows and attend only to the prompts. Otherwise append one column."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        slots = self._slots
        if slots.placements is not None:
            for place in slots.placements:
                columns = slice(slots.start - place.length, slots.start)
                self.keys[place.rows_F, :, columns] = key_states[place.prompts_F, :, : place.length]
                self.values[place.rows_F, :, columns] = value_states[place.prompts_F, :, : place.length]
            return key_states, value_states
        end = slots.columns + key_states.shape[2]
        self.keys[: slots.rows, :, slots.columns : end] = key_states
        self.values[: slots.rows, :, slots.columns : end] = value_states
        return self.keys[: slots.rows, :, :end], self.values[: slots.rows, :, :end]

    def move(self, sources_M: Tensor, targets_M: Tensor) -> None:
        for buffer in (self.keys, self.values):
            filled = buffer[:, :, : self._slots.columns]
            filled[targets_M] = filled[sources_M]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return 0 if self._slots.placements is not None else self._slots.columns

    def get_max_length(self) -> int:
        return self._slots.capacity

    def _buffer(self, states: Tensor) -> Tensor:
        slots = self._slots
        buffer = states.new_empty(slots.rows, states.shape[1], slots.capacity, states.shape[3])
        # Masked columns are still multiplied: a NaN in uninitialized memory would survive a weight of 0.
        buffer[:, :, : slots.start] = 0
        return buffer


class RowCache(Cache):  # type: ignore[misc]
    """A transformers cache for `rows` rows whose prompts, without their last tokens, fit in `start` columns."""

    def __init__(self, rows: int, start: int, capacity: int) -> None:
        self.slots = CacheSlots(rows=rows, start=start, capacity=capacity, columns=start)
        super().__init__(layer_class_to_replicate=partial(RowLayer, self.slots))

    def advance(self) -> None:
        """Count the column that the last forward pass wrote."""
        self.slots.columns += 1

    def compact(self, sources_M: Tensor, targets_M: Tensor, rows: int) -> None:
        """Move row `sources_M[m]` to the place of row `targets_M[m]`, then keep only the first `rows` rows."""
        for layer in self.layers:
            layer.move(sources_M, targets_M)
        self.slots.rows = rows


class RowExperts:
    """Collects the experts that a mixture-of-experts model chose for each token of `rows` requests. Call it after every
    forward pass. `steps` is the most sampled tokens of any request."""

    def __init__(self, module: nn.Module, recorder: ExpertRecorder, rows: int, steps: int) -> None:
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
# Compact when this share of the rows has finished: moving rows costs about as much as one step that reads them.
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

    @property
    def joins(self) -> bool:
        """True if `turn` accepts jobs while rows run. If False, it accepts them only when all rows have finished."""
        ...

    def turn(self, jobs: Sequence[DecodingJob], dropped_N: NDArray[np.bool_]) -> TurnResult:
        """Admit `jobs` and decode until at least one row finishes or a bounded number of steps is done.

        Another thread may set entries of `dropped_N` (by ticket) meanwhile. Such a row finishes at the next step with
        the tokens that it has, and its log-probs are not checked. Raises TrainingDivergedError if the model's logits
        are not finite.
        """
        ...


class ModuleRows:
    """`RunningRows` that decodes whole batches with `decode`, for every architecture."""

    def __init__(self, module: nn.Module, device: torch.device, *, routed_experts: bool = False) -> None:
        self._module = module
        self._device = device
        self._routed_experts = routed_experts

    @property
    def joins(self) -> bool:
        return False

    def turn(self, jobs: Sequence[DecodingJob], dropped_N: NDArray[np.bool_]) -> TurnResult:
        assert [job.ticket for job in jobs] == list(range(len(jobs)))  # ticket = row number
        dropped_N = dropped_N[: len(jobs)]
        requests = [job.request for job in jobs]
        results = decode(self._module, requests, dropped_N, self._device, self._routed_experts)
        lengths = [len(found.token_ids) - job.request.tokens_resumed for job, found in zip(jobs, results, strict=True)]
        return TurnResult(
            [(job.ticket, result) for job, result in zip(jobs, results, strict=True)], max(lengths), sum(lengths)
        )


@dataclass(slots=True)
class _Rows:
    """The live rows: request number, next input token, position, settings, stop tokens and limit of each. `first` is
    the number of tokens that the completion began with."""

    request_R: Tensor
    first_R: Tensor
    token_R: Tensor
    position_R: Tensor
    stop_RS: Tensor
    limit_R: Tensor
    done_R: Tensor
    settings: RowSettings
    visible_RT: Tensor | None  # None: no row has padding, so no mask is needed

    def select(self, rows_K: Tensor) -> None:
        self.request_R, self.token_R = self.request_R[rows_K], self.token_R[rows_K]
        self.first_R = self.first_R[rows_K]
        self.position_R, self.stop_RS = self.position_R[rows_K], self.stop_RS[rows_K]
        self.limit_R, self.done_R = self.limit_R[rows_K], self.done_R[rows_K]
        self.settings = self.settings.select(rows_K)
        if self.visible_RT is not None:
            self.visible_RT = self.visible_RT[rows_K]


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
    limits_N = np.asarray([request.sampling.max_tokens for request in requests], dtype=np.int64)
    first_N = np.asarray([request.tokens_resumed for request in requests], dtype=np.int64)
    with recorded_experts(module) if routed_experts else nullcontext() as recorder:
        steps = int((limits_N - first_N).max())
        experts = None if recorder is None else RowExperts(module, recorder, len(requests), steps)
        with span("prefill", device=True):
            cache, rows = _start(module, requests, limits_N, device, experts)
        with span("decode", device=True):
            sampled = _sample_to_the_end(module, requests, cache, rows, dropped_N, limits_N, experts)
            results = _results(requests, limits_N, dropped_N, *sampled)
    if experts is None:
        return results
    carried = experts.results([len(result.token_ids) - int(n) for result, n in zip(results, first_N, strict=True)])
    return [replace(result, routed_experts=own) for result, own in zip(results, carried, strict=True)]


def _sample_to_the_end(
    module: nn.Module,
    requests: Sequence[GenerationRequest],
    cache: RowCache,
    rows: _Rows,
    dropped_N: NDArray[np.bool_],
    limits_N: NDArray[np.int64],
    experts: RowExperts | None,
) -> tuple[NDArray[np.int64], Float32]:
    """tokens_NT and logprobs_NT by request. Values after a row's end are meaningless. For dropped rows, this lowers
    `limits_N` to the tokens they have."""
    device = rows.token_R.device
    first_N = np.asarray([request.tokens_resumed for request in requests], dtype=np.int64)
    width = int(limits_N.max())
    # The extra last column takes the samples of finished rows that are still in the batch.
    uniform_NT = torch.from_numpy(uniform_numbers(requests, width + 1)).to(device)
    tokens_NT = torch.zeros(len(requests), width + 1, dtype=torch.int64, device=device)
    logprobs_NT = torch.zeros(len(requests), width + 1, dtype=torch.float32, device=device)
    for row, request in enumerate(requests):
        if request.resumed_from is not None:
            tokens_NT[row, : first_N[row]] = torch.from_numpy(request.resumed_from.token_ids).to(device)
            logprobs_NT[row, : first_N[row]] = torch.from_numpy(request.resumed_from.logprobs).to(device)

    for step in range(int((limits_N - first_N).max())):
        logprobs_RV = distribution(_next_logits(module, rows, cache), rows.settings)
        if experts is not None:
            experts.stepped(rows.request_R, step)
        column_R = (rows.first_R + step).clamp(max=width)
        rows.token_R = sample(logprobs_RV, uniform_NT[rows.request_R, column_R])
        tokens_NT[rows.request_R, column_R] = rows.token_R
        logprobs_NT[rows.request_R, column_R] = logprobs_RV.gather(1, rows.token_R[:, None])[:, 0]
        rows.position_R = rows.position_R + ~rows.done_R  # a finished row must not exceed the model's context
        rows.done_R |= (rows.token_R[:, None] == rows.stop_RS).any(dim=1) | (rows.limit_R <= column_R + 1)
        if dropped_N.any():
            now_N = dropped_N.copy()
            limits_N[now_N] = np.minimum(limits_N, first_N + step + 1)[now_N]
            rows.done_R |= torch.from_numpy(now_N).to(device)[rows.request_R]
        if device.type != "cpu" and (step + 1) % LOOK_EVERY:
            continue  # reading from a GPU waits for it
        live = len(rows.done_R) - int(rows.done_R.sum())
        if live == 0:
            break
        if len(rows.done_R) - live >= max(1, COMPACT_SHARE * len(rows.done_R)):
            _compact(rows, cache, live)
    return tokens_NT.cpu().numpy(), logprobs_NT.cpu().numpy()


def _start(
    module: nn.Module,
    requests: Sequence[GenerationRequest],
    limits_N: NDArray[np.int64],
    device: torch.device,
    experts: RowExperts | None,
) -> tuple[RowCache, _Rows]:
    """The cache, filled with all known tokens but the last of each row. That one is the first input of decoding."""
    known_ids = [request.known_ids for request in requests]
    known_N = np.asarray([len(ids) - 1 for ids in known_ids], dtype=np.int64)
    first_N = np.asarray([request.tokens_resumed for request in requests], dtype=np.int64)
    start = int(known_N.max())
    capacity = start + int((limits_N - first_N).max())
    cache = RowCache(len(requests), start, capacity)
    if start:
        _prefill(module, cache, [ids[:-1] for ids in known_ids], device, experts)
    stops = [request.sampling.stop_ids for request in requests]
    stop_NS = np.full((len(requests), max(1, *map(len, stops))), NO_STOP, dtype=np.int64)
    for row, ids in enumerate(stops):
        stop_NS[row, : len(ids)] = ids
    known = torch.from_numpy(known_N).to(device)
    padded = bool((known_N != start).any())
    return cache, _Rows(
        request_R=torch.arange(len(requests), device=device),
        first_R=torch.from_numpy(first_N).to(device),
        token_R=torch.tensor([int(ids[-1]) for ids in known_ids], device=device),
        position_R=known,
        stop_RS=torch.from_numpy(stop_NS).to(device),
        limit_R=torch.from_numpy(limits_N.copy()).to(device),
        done_R=torch.zeros(len(requests), dtype=torch.bool, device=device),
        settings=RowSettings.of([request.sampling for request in requests], device),
        visible_RT=torch.arange(capacity, device=device) >= start - known[:, None] if padded else None,
    )


def _prefill(
    module: nn.Module,
    cache: RowCache,
    prefixes: Sequence[Int32],
    device: torch.device,
    experts: RowExperts | None,
) -> None:
    """Compute each distinct prefix once and copy it to its rows. Prefixes are padded on the right, where causal
    attention does not look."""
    rows_of: dict[bytes, list[int]] = {}
    for row, prefix in enumerate(prefixes):
        if len(prefix):
            rows_of.setdefault(prefix.tobytes(), []).append(row)
    groups = list(rows_of.values())
    lengths_U = np.asarray([len(prefixes[rows[0]]) for rows in groups])
    decoder = cast(Any, module).get_decoder()
    for batch in token_budget_batches(lengths_U, max(PREFILL_TOKENS, int(lengths_U.max()))):
        ids_BL, _ = pad_right([prefixes[groups[group][0]] for group in batch], 0, device)
        cache.slots.placements = _placements([groups[group] for group in batch], lengths_U[batch], device)
        decoder(input_ids=ids_BL, past_key_values=cache, use_cache=True)
        if experts is not None:
            experts.prefilled([groups[group] for group in batch], lengths_U[batch])
    cache.slots.placements = None


def _placements(groups: list[list[int]], lengths_B: NDArray[np.int64], device: torch.device) -> list[PromptPlacement]:
    """One placement per distinct length: which prompts of the prefill batch go to which rows."""
    found = []
    for length in np.unique(lengths_B):
        pairs = [(row, prompt) for prompt in np.flatnonzero(lengths_B == length) for row in groups[prompt]]
        rows_F, prompts_F = torch.tensor(pairs, device=device).T
        found.append(PromptPlacement(rows_F, prompts_F, int(length)))
    return found


def _next_logits(module: nn.Module, rows: _Rows, cache: RowCache) -> Tensor:
    """One forward pass: logits_RV for the token after each live row's newest."""
    end = cache.slots.columns + 1
    output = module(
        input_ids=rows.token_R[:, None],
        attention_mask=None if rows.visible_RT is None else rows.visible_RT[:, :end],
        position_ids=rows.position_R[:, None],
        past_key_values=cache,
        use_cache=True,
    )
    cache.advance()
    logits_RV: Tensor = output.logits[:, -1]
    return logits_RV


def check_decoding(module: nn.Module, device: torch.device) -> None:
    """Raises ConfigurationError if this engine cannot decode with the model, or if the model computes other logits for
    a prompt when a longer prompt is in the same batch: some models ignore `position_ids`, and some look ahead. Models
    in 16 bits are not checked, because rounding may give them other logits."""
    model, name = cast(Any, module), type(module).__name__
    weight = model.get_output_embeddings().weight
    if weight.dtype != torch.float32:
        return
    ids_P = np.arange(4, dtype=np.int32) % weight.shape[0]
    requests = [GenerationRequest(f"check {n}", ids_P[:n], Sampling(1, ()), seed=0) for n in (2, len(ids_P))]
    tolerance = product_tolerance(weight, ALIKE, ALIKE_16_BITS, model.config.get_text_config().num_hidden_layers)
    try:
        with torch.inference_mode():
            cache, rows = _start(module, requests, np.ones(2, dtype=np.int64), device, None)
            found_RV = _next_logits(module, rows, cache)
            ids_1P = torch.from_numpy(ids_P).to(device).long()[None]
            alone_V = [model(input_ids=ids_1P[:, : len(r.prompt_ids)], use_cache=False).logits[0, -1] for r in requests]
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:  # models raise errors of many types for a cache or an argument that they do not know
        raise ConfigurationError(f"pvg's torch engine cannot sample with {name}: {error}.", REMEDY) from error
    # Not for NaN: decoding itself refuses a model whose logits are not finite.
    if any(bool((f - a).abs().max() > tolerance * a.abs().max()) for f, a in zip(found_RV, alone_V, strict=True)):
        raise ConfigurationError(
            f"{name} computes other logits for a prompt when a longer prompt is in the same batch.", REMEDY
        )


def _compact(rows: _Rows, cache: RowCache, live: int) -> None:
    """Move live rows from the end into the places of finished ones, which copies as few rows as possible."""
    order_R = torch.arange(len(rows.done_R), device=rows.done_R.device)
    targets_M = order_R[:live][rows.done_R[:live]]
    sources_M = order_R[live:][~rows.done_R[live:]]
    cache.compact(sources_M, targets_M, live)
    kept_K = order_R[:live].clone()
    kept_K[targets_M] = sources_M
    rows.select(kept_K)


def _results(
    requests: Sequence[GenerationRequest],
    limits_N: NDArray[np.int64],
    dropped_N: NDArray[np.bool_],
    tokens_NT: NDArray[np.int64],
    logprobs_NT: Float32,
) -> list[DecodedRow]:
    """Cut each row at its first stop token or its limit. What a finished row sampled afterwards is discarded."""
    results = []
    for row, request in enumerate(requests):
        limit = int(limits_N[row])
        stops = np.flatnonzero(np.isin(tokens_NT[row, :limit], request.sampling.stop_ids))
        length = int(stops[0]) + 1 if stops.size else limit
        tokens, logprobs = tokens_NT[row, :length], logprobs_NT[row, :length]
        results.append(finished_row(request, tokens, logprobs, bool(stops.size), bool(dropped_N[row])))
    return results


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
