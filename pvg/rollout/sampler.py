"""From logits to tokens: temperature, and one uniform random number per token.

`draw` materializes the probabilities of the vocabulary, and searches their sums block by block: cumulative sums of all
tokens would need more memory traffic.

Invariants: the log-probs, in float32, belong to exactly the distribution that is sampled from. A row's result depends
only on its own logits, settings and numbers.

The random numbers of a request are those of numpy's Philox generator with its seed as the key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pvg.rollout.engine import GenerationRequest, Sampling

# `draw` sums probabilities over blocks of this many tokens, then within one block.
BLOCK = 256


@dataclass(frozen=True, slots=True)
class RowSettings:
    """The settings of R rows: `temperature_R1` float32. `tempered` covers all rows of the original batch: without it
    the division can be skipped."""

    temperature_R1: Tensor
    tempered: bool

    @classmethod
    def of(cls, samplings: Sequence[Sampling], device: torch.device) -> RowSettings:
        # A device may round subnormal numbers to 0, and 0 / 0 is undefined.
        temperature_R = np.maximum([s.temperature for s in samplings], np.finfo(np.float32).tiny)
        return cls(
            temperature_R1=torch.tensor(temperature_R, dtype=torch.float32, device=device)[:, None],
            tempered=bool((temperature_R != 1.0).any()),
        )

    def select(self, rows_K: Tensor) -> RowSettings:
        return RowSettings(self.temperature_R1[rows_K], self.tempered)


def uniform_numbers(requests: Sequence[GenerationRequest], count: int) -> NDArray[np.float64]:
    """numbers_NT in [0, 1), T = `count`: number t of request n comes from a Philox generator whose key is the request's
    seed, in [0, 2^128)."""
    numbers_NT = np.empty((len(requests), count))
    bits = np.random.Philox(key=0)  # one generator for all: making one takes longer than its numbers
    generator, start = np.random.Generator(bits), bits.state
    for row, request in enumerate(requests):
        start["state"]["key"][:] = request.seed & (1 << 64) - 1, request.seed >> 64
        bits.state = start
        generator.random(out=numbers_NT[row])
    return numbers_NT


def tempered(logits_RV: Tensor, settings: RowSettings) -> Tensor:
    """The logits divided by their temperatures.

    The row's largest logit is subtracted before the division by the temperature. So as the temperature nears 0,
    quotients tend to -inf, never to inf - inf, and sampling becomes greedy (tokens that tie for the maximum share
    equally).
    """
    if settings.tempered:
        logits_RV = logits_RV.float()
        logits_RV = (logits_RV - logits_RV.amax(dim=-1, keepdim=True)) / settings.temperature_R1
    return logits_RV


def draw(logits_RV: Tensor, settings: RowSettings, uniform_R: Tensor) -> tuple[Tensor, Tensor]:
    """tokens_R int64 by inversion, and their logprobs_R float32: the first token whose cumulative probability exceeds
    the row's number, `uniform_R` float64 in [0, 1). Never a token of probability 0. Rows of NaN give an arbitrary valid
    token."""
    probabilities_RV = torch.softmax(tempered(logits_RV, settings), dim=-1, dtype=torch.float32)
    vocabulary = probabilities_RV.shape[-1]
    if vocabulary <= 2 * BLOCK:
        tokens_R1, _, _ = _inverted(probabilities_RV, uniform_R[:, None])
    else:
        tokens_R1 = _block_by_block(probabilities_RV, uniform_R[:, None])
    tokens_R1 = tokens_R1.clamp(max=vocabulary - 1)
    return tokens_R1[:, 0], probabilities_RV.gather(1, tokens_R1)[:, 0].log()


def _block_by_block(probabilities_RV: Tensor, uniform_R1: Tensor) -> Tensor:
    vocabulary = probabilities_RV.shape[-1]
    whole = vocabulary // BLOCK * BLOCK
    blocks_RB = probabilities_RV[:, :whole].view(len(probabilities_RV), -1, BLOCK).sum(dim=-1)
    if whole < vocabulary:
        blocks_RB = torch.cat([blocks_RB, probabilities_RV[:, whole:].sum(dim=-1, keepdim=True)], dim=-1)
    block_R1, target_R1, cumulative_RB = _inverted(blocks_RB, uniform_R1)
    block_R1 = block_R1.clamp(max=blocks_RB.shape[-1] - 1)
    # The position of the number inside its block is again uniform, and selects the token.
    own_R1 = blocks_RB.gather(1, block_R1).double()
    within_R1 = ((target_R1 - (cumulative_RB.gather(1, block_R1) - own_R1)) / own_R1).clamp_(0.0, 1.0)
    places_RX = block_R1 * BLOCK + torch.arange(BLOCK, device=block_R1.device)
    inside_RX = probabilities_RV.gather(1, places_RX.clamp(max=vocabulary - 1))
    inside_RX = inside_RX.masked_fill_(places_RX >= vocabulary, 0.0)
    token_R1, _, _ = _inverted(inside_RX, within_R1)
    return places_RX[:, :1] + token_R1


def _inverted(weights_RN: Tensor, uniform_R1: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """index_R1: the first index whose cumulative weight (float64) exceeds target_R1, the number scaled by the total;
    also returns target_R1 and the cumulative weights. Never returns an index of weight 0."""
    cumulative_RN = weights_RN.cumsum(dim=-1, dtype=torch.float64)
    total_R1 = cumulative_RN[:, -1:]
    target_R1 = torch.minimum(uniform_R1 * total_R1, torch.nextafter(total_R1, torch.zeros_like(total_R1)))
    return torch.searchsorted(cumulative_RN, target_R1, right=True), target_R1, cumulative_RN
