"""Log-probs of completion tokens, without the [tokens, vocabulary] matrix of a whole batch.

The output head is applied only to hidden states that predict completion tokens, one chunk at a time. The gradient is in
closed form, d log p(t) / d logits = onehot(t) - p, so the backward pass needs only the
logits. A single chunk is kept for it; several are recomputed.

Invariant: the logits equal those of the model's own forward, including what a model does after the head (a soft cap, a
scale). A model whose logits cannot be reproduced is refused, never scored wrongly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from pvg.errors import ConfigurationError
from pvg.models.compute import explained, product, product_tolerance, projected_alike
from pvg.models.packing import PackedRows, pack_rows
from pvg.models.shared_prompts import packed_hidden, trust_packing
from pvg.records import Int32


@dataclass(frozen=True, slots=True)
class LogitTransform:
    """Maps the head's output x to logits: cap tanh(factor x / cap) / temperature; without tanh if cap is None."""

    factor: float = 1.0
    cap: float | None = None
    temperature: float = 1.0

    def __call__(self, logits: Tensor) -> Tensor:
        """Elementwise, in float32. May overwrite `logits`."""
        scale = self.factor if self.cap is not None else self.factor / self.temperature
        if scale != 1.0:
            logits = logits.mul_(scale)
        if self.cap is not None:
            logits = logits.div_(self.cap).tanh_().mul_(self.cap / self.temperature)
        return logits

    def backward(self, grad: Tensor, logits: Tensor) -> Tensor:
        """The gradient by the head's output, given the gradient by the finished `logits`. May overwrite `grad`."""
        if self.cap is not None:
            slope = (logits * (self.temperature / self.cap)).square_().neg_().add_(1.0)
            grad = grad.mul_(slope)
        scale = self.factor / self.temperature
        return grad.mul_(scale) if scale != 1.0 else grad


def token_logprobs(
    hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, targets_N: Tensor, finish: LogitTransform, chunk: int
) -> Tensor:
    """log p(targets_N), float32 [N] in nats, under the softmax of the finished logits, computed for `chunk` tokens at a
    time.

    Under autocast the matrix products use its dtype, forward and backward. The softmax is always float32.
    """
    kind = hidden_ND.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight_VD.dtype
    with torch.autocast(kind, enabled=False):
        found = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
            hidden_ND, weight_VD, bias_V, targets_N, finish, chunk, dtype
        )
        return cast(Tensor, found)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        finish: LogitTransform,
        chunk: int,
        dtype: torch.dtype,
    ) -> Tensor:
        ctx.finish, ctx.chunk, ctx.dtype = finish, chunk, dtype
        logprobs, sums, kept = [], [], None
        head = _cast_head(weight_VD, bias_V, dtype)
        for hidden_CD, targets_C in zip(torch.split(hidden_ND, chunk), torch.split(targets_N, chunk), strict=True):
            logits_CV = _head_logits(hidden_CD, *head, finish)
            sums.append(logits_CV.logsumexp(dim=1))
            logprobs.append(logits_CV.gather(1, targets_C[:, None])[:, 0] - sums[-1])
            if len(hidden_ND) <= chunk and any(ctx.needs_input_grad):
                kept = logits_CV
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V, targets_N, torch.cat(sums), kept)
        return torch.cat(logprobs)

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor | None, ...]:
        hidden_ND, weight_VD, bias_V, targets_N, sums_N, kept = ctx.saved_tensors
        finish, chunk, dtype = ctx.finish, ctx.chunk, ctx.dtype
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        grad_hidden = []
        # Of float32 weights in 16 bits, it goes onto the gradient of earlier micro-batches. Like slopes in the place of
        # logits, this saves memory when most of it is taken.
        casts = wants_weight and weight_VD.is_leaf and dtype != weight_VD.dtype == torch.float32
        grad_VD = weight_VD.grad if casts else None
        adds = grad_VD is not None
        if wants_weight and not adds:
            grad_VD = torch.zeros_like(weight_VD, dtype=torch.float32)
        grad_V = torch.zeros(weight_VD.shape[0], dtype=torch.float32, device=weight_VD.device) if wants_bias else None
        head = cast_VD, _ = _cast_head(weight_VD, bias_V, dtype)
        parts = (hidden_ND, targets_N, sums_N, grad_N)
        for hidden_CD, targets_C, sums_C, grad_C in zip(*(torch.split(part, chunk) for part in parts), strict=True):
            logits_CV = _head_logits(hidden_CD, *head, finish) if kept is None else kept
            less = logits_CV.sub_ if kept is None and finish.cap is None else logits_CV.sub
            slope_CV = less(sums_C[:, None]).exp_().mul_(-grad_C[:, None])
            slope_CV.scatter_add_(1, targets_C[:, None], grad_C[:, None])
            slope_CV = finish.backward(slope_CV, logits_CV)
            if grad_V is not None:
                grad_V += slope_CV.sum(0)
            slope_CV = slope_CV.to(dtype)
            if wants_hidden:
                grad_hidden.append(product(slope_CV, cast_VD).to(hidden_ND.dtype))
            if grad_VD is not None:
                if dtype == torch.float32:
                    grad_VD.addmm_(slope_CV.T, hidden_CD.float())
                else:
                    cast_CD = hidden_CD.to(dtype)
                    rows = -(-PRODUCT_NUMBERS // cast_CD.shape[1]) if grad_VD.device.type == "cpu" else len(grad_VD)
                    blocks = zip(torch.split(grad_VD, rows), torch.split(slope_CV, rows, dim=1), strict=True)
                    for part_WD, slope_CW in blocks:
                        part_WD.add_(slope_CW.T @ cast_CD)
        return (
            torch.cat(grad_hidden) if wants_hidden else None,
            None if adds or grad_VD is None else grad_VD.to(weight_VD.dtype),
            None if grad_V is None or bias_V is None else grad_V.to(bias_V.dtype),
            *[None] * 4,
        )


def _cast_head(weight_VD: Tensor, bias_V: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """The head in the dtype of the products. Cast once per pass: the matrix may be a gigabyte."""
    return weight_VD.to(dtype), None if bias_V is None else bias_V.to(dtype)


def _head_logits(hidden_CD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, finish: LogitTransform) -> Tensor:
    return finish(projected_alike(hidden_CD.to(weight_VD.dtype), weight_VD, bias_V).float())


# --- of a whole model ------------------------------------------------------------------------------------------------

# On a CPU. 4M float32 logits are 16 MB: 32 tokens of a 131k vocabulary, or a whole micro-batch of a character
# tokenizer.
DEFAULT_LOGITS_CHUNK = 4_194_304
# In 16 bits, the head's gradient there adds up products of so many numbers, and not one as large as the head.
PRODUCT_NUMBERS = 1 << 22
# On a GPU one chunk takes this share of the whole memory, so the products are large enough for it: on one with 80 GB,
# 1,024 tokens of a 152k vocabulary. About four such chunks exist at once. The free memory would be another choice, but
# it differs between a run and its resumed second half, and the chunk changes the last bits of a gradient.
GPU_LOGITS_SHARE = 1 / 128
# Matrix products on a GPU are fastest for whole tiles.
GPU_TILE = 128
FLOAT32_BYTES = 4
# Largest difference from the model's own logits, relative to the largest one, for each kind of rounding.
_TOLERANCE_FLOAT32 = 1e-4
_TOLERANCE_BFLOAT16 = 2e-2
# Set on a module that passed `check_logits`, so that it is checked only once.
_CHECKED = "_pvg_logits_checked"
_WITHOUT_HEAD = "_pvg_without_head"


def completion_logprobs(
    module: nn.Module,
    input_ids_BL: Tensor,
    lengths_B: Tensor,
    prompt_lengths_B: Tensor,
    *,
    temperature: float = 1.0,
    logits_chunk: int | None = None,
) -> Tensor:
    """logprobs_BL float32, nats: [b, t] = log p(token t | tokens < t) if prompt_lengths[b] <= t < lengths[b], else 0.

    `module` is any transformers *ForCausalLM. `input_ids_BL` int64 is padded on the right, where a causal model does
    not look, so no mask is needed. p is the softmax of logits / temperature. Differentiable. At most `logits_chunk`
    logits exist at a time (None: as many as suit the device).

    Raises ConfigurationError if the model's logits cannot be reproduced,
    and ValueError for inconsistent lengths.
    """
    check_logits(module)
    model = cast(Any, module)
    hidden_BLD = model.get_decoder()(input_ids=input_ids_BL, use_cache=False).last_hidden_state

    positions_L = torch.arange(input_ids_BL.shape[1], device=input_ids_BL.device)
    wanted_BL = (positions_L >= prompt_lengths_B[:, None]) & (positions_L < lengths_B[:, None])
    rows_N, columns_N = wanted_BL.nonzero(as_tuple=True)
    hidden_ND = hidden_BLD[rows_N, columns_N - 1]
    targets_N = input_ids_BL[rows_N, columns_N]

    logprobs_N = _chunked_logprobs(module, hidden_ND, targets_N, temperature, logits_chunk)
    return _laid_out(logprobs_N, rows_N, columns_N, input_ids_BL.shape)


def shared_prompt_logprobs(
    module: nn.Module,
    sequences: Sequence[Int32],
    prompt_lengths: NDArray[Any],
    *,
    temperature: float = 1.0,
    logits_chunk: int | None = None,
    fused_layers: bool = True,
    prompts_alone: bool = False,
) -> Tensor:
    """The result of `completion_logprobs` on the padded rows, with what they have in common computed once.
    Differentiable. `prompts_alone`: no row shares tokens after its prompt.

    Also raises ConfigurationError for a model that cannot share prompts (pvg.models.shared_prompts).
    """
    check_logits(module)
    device = next(module.parameters()).device
    packed = pack_rows(sequences, prompt_lengths, device, prompts_alone=prompts_alone)
    hidden_MD = predicting(module, packed, fused_layers)
    logprobs_M = _chunked_logprobs(module, hidden_MD, packed.targets_M, temperature, logits_chunk)
    places = (packed.rows_W, packed.columns_W)
    return _laid_out(logprobs_M, *places, (len(sequences), packed.longest), packed.picks_W)


def predicting(module: nn.Module, packed: PackedRows, fused_layers: bool) -> Tensor:
    """The hidden states [M, D] of the predictions of packed rows."""
    hidden_TD = packed_hidden(module, packed, fused_layers)
    after_TD = hidden_TD[len(hidden_TD) - packed.tail :]
    return torch.cat([hidden_TD.index_select(0, packed.sources_A), after_TD])


def _laid_out(
    logprobs_M: Tensor, rows_W: Tensor, columns_W: Tensor, shape: Sequence[int], picks_W: Tensor | None = None
) -> Tensor:
    """logprobs_BL, 0 elsewhere. `picks_W`: which of the M values each of the W positions has; None: one each. The
    gradients of a value that several have are summed."""
    empty_BL = torch.zeros(tuple(shape), dtype=torch.float32, device=logprobs_M.device)
    logprobs_W = logprobs_M if picks_W is None else logprobs_M.index_select(0, picks_W)
    return empty_BL.index_put((rows_W, columns_W), logprobs_W)


def mark_without_head(module: nn.Module, why: str) -> None:
    """Note that the output head of `module` has random weights. `why`: a sentence for `refuse_without_head`."""
    module.__dict__[_WITHOUT_HEAD] = why


def refuse_without_head(module: nn.Module) -> None:
    """Raises ConfigurationError for a module that was marked: its logits are random."""
    if why := module.__dict__.get(_WITHOUT_HEAD):
        raise ConfigurationError(
            why,
            "Use a folder with the whole language model. Only a verifier may lack this head, with "
            "verifier.head = 'scalar'.",
        )


def trust(module: nn.Module) -> None:
    """Skip the checks of a module whose tensors have no values (pvg.planning.memory)."""
    module.__dict__[_CHECKED] = True
    trust_packing(module)


def check_logits(module: nn.Module) -> None:
    """Check once per `module` that its decoder and head, as used here, give its own logits.

    Raises ConfigurationError with the model class if they do not, and for a module without weights of its head.
    """
    if module.__dict__.get(_CHECKED):
        return
    refuse_without_head(module)
    model = cast(Any, module)
    head = model.get_output_embeddings()
    name = type(module).__name__
    if head is None or model.config.is_encoder_decoder:
        raise ConfigurationError(
            f"{name} is not a causal language model with an output head.", "Choose a *ForCausalLM model."
        )
    modes = [(part, part.training) for part in module.modules()]
    module.eval()  # with dropout the two forward passes would differ
    with torch.no_grad(), explained(f"{name} gives no logits", "Choose another model."):
        ids_12 = torch.arange(2, device=head.weight.device)[None] % head.weight.shape[0]
        expected_V = model(input_ids=ids_12, use_cache=False).logits[0, -1].float()
        hidden_12D = getattr(model.get_decoder()(input_ids=ids_12, use_cache=False), "last_hidden_state", None)
        found_V = expected_V[:0] if hidden_12D is None else finish_logits(module, head(hidden_12D[0, -1:]).float())[0]
    for part, training in modes:
        part.training = training
    tolerance = product_tolerance(head.weight, _TOLERANCE_FLOAT32, _TOLERANCE_BFLOAT16)
    same_shape = found_V.shape == expected_V.shape
    if not same_shape or not bool((found_V - expected_V).abs().max() <= tolerance * expected_V.abs().max()):
        raise ConfigurationError(
            f"{name} changes its logits after the output head in a way pvg does not know. Log-probs would be wrong.",
            "Choose another model, or add this one to pvg.models.logprobs.",
        )
    module.__dict__[_CHECKED] = True


def _chunked_logprobs(
    module: nn.Module, hidden_ND: Tensor, targets_N: Tensor, temperature: float, logits_chunk: int | None
) -> Tensor:
    """Log-probs [N]."""
    head = cast(Any, module).get_output_embeddings()
    tokens = chunk_tokens(head.weight.shape[0], device_bytes(head.weight.device), logits_chunk)
    finish = replace(_finish_of(module), temperature=temperature)
    return token_logprobs(hidden_ND, head.weight, head.bias, targets_N, finish, tokens)


def chunk_tokens(vocabulary: int, gpu_bytes: int, logits_chunk: int | None = None) -> int:
    """The tokens of a chunk. `gpu_bytes`: the memory of the GPU that computes; 0 for a CPU. `logits_chunk` overrides
    both."""
    if logits_chunk is None and gpu_bytes:
        tokens = int(gpu_bytes * GPU_LOGITS_SHARE) // (FLOAT32_BYTES * vocabulary)
        tokens = max(tokens, DEFAULT_LOGITS_CHUNK // vocabulary)
        return max(1, tokens // GPU_TILE * GPU_TILE or tokens)
    return max(1, (logits_chunk or DEFAULT_LOGITS_CHUNK) // vocabulary)


def device_bytes(device: torch.device) -> int:
    """The memory of a GPU; 0 for a CPU."""
    return int(torch.cuda.get_device_properties(device).total_memory) if device.type == "cuda" else 0


def finish_logits(module: nn.Module, logits: Tensor) -> Tensor:
    """Apply what some model families do to each float32 logit after the head, elementwise. Most models do nothing."""
    finish = _finish_of(module)
    if finish.factor != 1.0:
        logits = logits * finish.factor
    return logits if finish.cap is None else torch.tanh(logits / finish.cap) * finish.cap


def _finish_of(module: nn.Module) -> LogitTransform:
    settings, factor = cast(Any, module).config.get_text_config(), 1.0
    if scale := getattr(settings, "logit_scale", None):  # Cohere
        factor *= scale
    if scale := getattr(settings, "logits_scaling", None):  # Granite divides, HyperCLOVA X multiplies
        factor = factor * scale if settings.model_type == "hyperclovax" else factor / scale
    if multiplier := getattr(settings, "lm_head_multiplier", None):  # Falcon H1
        factor *= multiplier
    cap = getattr(settings, "final_logit_softcapping", None)  # Gemma 2 and later
    return LogitTransform(factor, cap or None)
