"""Log-probs of given tokens under an output head, with a gradient in closed form.

    d log p(t) / d logits = onehot(t) - p
    d H / d logits        = -p (log p + H),   H = -sum p log p the entropy of p

so that the backward pass needs the logits and nothing else. Up to a chunk of them is kept; where there are more, each
chunk is computed again. Softmax, gather and their gradients take one pass over the logits each, instead of autograd's
several.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import linear


@dataclass(frozen=True, slots=True)
class Finish:
    """What becomes of the head's output: logits = cap tanh(factor x / cap) / temperature, without the cap where that
    is None."""

    factor: float = 1.0
    cap: float | None = None
    temperature: float = 1.0

    def __call__(self, logits: Tensor) -> Tensor:
        """Elementwise, in float32; may write into `logits`."""
        scale = self.factor if self.cap is not None else self.factor / self.temperature
        if scale != 1.0:
            logits = logits.mul_(scale)
        if self.cap is not None:
            logits = logits.div_(self.cap).tanh_().mul_(self.cap / self.temperature)
        return logits

    def backward(self, grad: Tensor, logits: Tensor) -> Tensor:
        """The gradient of the head's output from that of the finished `logits`; may write into `grad`."""
        if self.cap is not None:
            slope = (logits * (self.temperature / self.cap)).square_().neg_().add_(1.0)
            grad = grad.mul_(slope)
        scale = self.factor / self.temperature
        return grad.mul_(scale) if scale != 1.0 else grad


def token_logprobs(
    hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, targets_N: Tensor, finish: Finish, chunk: int
) -> Tensor:
    """log p(targets_N), float32 [N], nats, of the softmax of the finished logits; `chunk` tokens' logits at a time.

    Under autocast the matrix products run in its dtype, forward and backward; the softmax is float32 always.
    """
    kind = hidden_ND.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight_VD.dtype
    with torch.autocast(kind, enabled=False):
        found, _ = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
            hidden_ND, weight_VD, bias_V, targets_N, finish, chunk, dtype, False
        )
        return cast(Tensor, found)


def token_logprobs_and_entropies(
    hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, targets_N: Tensor, finish: Finish, chunk: int
) -> tuple[Tensor, Tensor]:
    """The same log-probs, and the entropy of each of these softmaxes: float32 [N], nats. It costs one more pass over
    the logits forward, and one backward where it has a gradient."""
    kind = hidden_ND.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight_VD.dtype
    with torch.autocast(kind, enabled=False):
        found = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
            hidden_ND, weight_VD, bias_V, targets_N, finish, chunk, dtype, True
        )
        return cast(tuple[Tensor, Tensor], found)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        finish: Finish,
        chunk: int,
        dtype: torch.dtype,
        with_entropies: bool,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.finish, ctx.chunk, ctx.dtype = finish, chunk, dtype
        ctx.set_materialize_grads(False)  # None for what nothing was made of
        logprobs, sums, entropies, kept = [], [], [], None
        for hidden_CD, targets_C in zip(torch.split(hidden_ND, chunk), torch.split(targets_N, chunk), strict=True):
            logits_CV = _logits(hidden_CD, weight_VD, bias_V, finish, dtype)
            sums.append(logits_CV.logsumexp(dim=1))
            logprobs.append(logits_CV.gather(1, targets_C[:, None])[:, 0] - sums[-1])
            if with_entropies:
                entropies.append(_entropies(logits_CV - sums[-1][:, None]))
            if len(hidden_ND) <= chunk and any(ctx.needs_input_grad):
                kept = logits_CV
        entropies_N = torch.cat(entropies) if with_entropies else None
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V, targets_N, torch.cat(sums), entropies_N, kept)
        return torch.cat(logprobs), entropies_N

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor | None, slope_N: Tensor | None = None) -> tuple[Tensor | None, ...]:
        """`slope_N` is the gradient by the entropies."""
        hidden_ND, weight_VD, bias_V, targets_N, sums_N, entropies_N, kept = ctx.saved_tensors
        if grad_N is None:
            grad_N = torch.zeros_like(sums_N)
        finish, chunk, dtype = ctx.finish, ctx.chunk, ctx.dtype
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        grad_hidden = []
        grad_VD = torch.zeros(weight_VD.shape, dtype=torch.float32, device=weight_VD.device) if wants_weight else None
        grad_V = torch.zeros(weight_VD.shape[0], dtype=torch.float32, device=weight_VD.device) if wants_bias else None
        parts = (hidden_ND, targets_N, sums_N, grad_N)
        for number, (hidden_CD, targets_C, sums_C, grad_C) in enumerate(
            zip(*(torch.split(part, chunk) for part in parts), strict=True)
        ):
            logits_CV = _logits(hidden_CD, weight_VD, bias_V, finish, dtype) if kept is None else kept
            if slope_N is None:
                slope_CV = (logits_CV - sums_C[:, None]).exp_().mul_(-grad_C[:, None])
            else:
                places = slice(number * chunk, (number + 1) * chunk)
                slope_CV = _slope(logits_CV - sums_C[:, None], grad_C, slope_N[places], entropies_N[places])
            slope_CV.scatter_add_(1, targets_C[:, None], grad_C[:, None])
            slope_CV = finish.backward(slope_CV, logits_CV)
            if grad_V is not None:
                grad_V += slope_CV.sum(0)
            slope_CV = slope_CV.to(dtype)
            if wants_hidden:
                grad_hidden.append((slope_CV @ weight_VD.to(dtype)).to(hidden_ND.dtype))
            if grad_VD is not None:
                if dtype == torch.float32:
                    grad_VD.addmm_(slope_CV.T, hidden_CD.float())
                else:
                    grad_VD += slope_CV.T @ hidden_CD.to(dtype)
        return (
            torch.cat(grad_hidden) if wants_hidden else None,
            None if grad_VD is None else grad_VD.to(weight_VD.dtype),
            None if grad_V is None or bias_V is None else grad_V.to(bias_V.dtype),
            *[None] * 5,
        )


def _entropies(logprobs_CV: Tensor) -> Tensor:
    """-sum p log p [C]; may write into `logprobs_CV`. What has underflowed to p = 0 adds 0."""
    return cast(Tensor, torch.special.entr(logprobs_CV.exp_())).sum(dim=1)


def _slope(logprobs_CV: Tensor, grad_C: Tensor, slope_C: Tensor, entropies_C: Tensor) -> Tensor:
    """-p (g + s (log p + H)), of all tokens but for the target's onehot: g the gradient by the log-prob, s by H."""
    inner_CV = (logprobs_CV + entropies_C[:, None]).mul_(slope_C[:, None]).add_(grad_C[:, None])
    return inner_CV.mul_(logprobs_CV.exp_()).neg_()


def _logits(hidden_CD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, finish: Finish, dtype: torch.dtype) -> Tensor:
    bias = None if bias_V is None else bias_V.to(dtype)
    return finish(linear(hidden_CD.to(dtype), weight_VD.to(dtype), bias).float())
