"""The random numbers of many requests at once: numpy's Philox 4x64-10, computed over arrays, bit for bit.

    numbers_NT = philox_numbers([7, 8], 48)    # row n: np.random.Generator(np.random.Philox(key=seeds[n])).random(48)

A counter-based generator has no state to step: number t of a row is a function of the row's key and of t, so all rows
are computed in the same few hundred array operations. At 256 rows they take a third of the time of a generator object
for each; for a dozen rows or fewer those are quicker.

Source: J. Salmon, M. Moraes, R. Dror, D. Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011); the constants
are those of Random123, and the order of the words that of numpy.random.Philox.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pvg.rollout.engine import GenerationRequest, Sampling

UInt64 = NDArray[np.uint64]

ROUNDS = 10
WORDS = 4  # of a block, each one number
LOW, HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
# Multipliers of words 0 and 2 of the counter, and what is added to the two words of the key in each round.
MULTIPLIER_21 = np.array([[[0xD2E7470EE14C6C93]], [[0xCA5A826395121157]]], dtype=np.uint64)
BUMP_211 = np.array([[[0x9E3779B97F4A7C15]], [[0xBB67AE8584CAA73B]]], dtype=np.uint64)


def philox_numbers(seeds: Sequence[int], count: int) -> NDArray[np.float64]:
    """numbers_NT in [0, 1), T = `count`: row n depends on `seeds[n]` (below 2^128, not negative) alone."""
    blocks = -(-count // WORDS)
    words = np.array([(seed & (1 << 64) - 1, seed >> 64) for seed in seeds], dtype=np.uint64)
    key_2N1 = words.T[:, :, None]
    # Counters are of four words; a generator begins at 1 in the first, and never fills it. In pairs: words 0 and 2
    # are multiplied, words 1 and 3 are mixed in.
    even_2NB = np.zeros((2, len(seeds), blocks), dtype=np.uint64)
    even_2NB[0] = np.arange(1, blocks + 1, dtype=np.uint64)
    odd_2NB = np.zeros_like(even_2NB)
    for round_ in range(ROUNDS):
        high_2NB, low_2NB = _product(MULTIPLIER_21, even_2NB)
        even_2NB = high_2NB[::-1] ^ odd_2NB ^ (key_2N1 + BUMP_211 * np.uint64(round_))
        odd_2NB = low_2NB[::-1]
    words_NB4 = np.stack([even_2NB[0], odd_2NB[0], even_2NB[1], odd_2NB[1]], axis=-1)
    numbers_NT = (words_NB4.reshape(len(seeds), -1)[:, :count] >> np.uint64(11)).astype(np.float64)
    numbers_NT *= 2.0**-53
    return numbers_NT


def _product(a: UInt64, b: UInt64) -> tuple[UInt64, UInt64]:
    """The upper and the lower 64 bits of a times b, by halves of 32 bits."""
    a_high, a_low, b_high, b_low = a >> HALF, a & LOW, b >> HALF, b & LOW
    upper = a_high * b_low + (a_low * b_low >> HALF)  # no sum here exceeds 64 bits
    middle = a_low * b_high + (upper & LOW)
    return a_high * b_high + (upper >> HALF) + (middle >> HALF), a * b


# From logits to tokens: temperature, then top-k, then top-p, and one uniform number per token.
#
# Invariants: the log-probs are those of exactly the distribution that is sampled from, renormalised after the cuts,
# in float32; a row's outcome depends on its own logits, settings and numbers only, never on the other rows.
#
# Two ways to the same tokens, up to rounding: `distribution` and `sample` write out the log-probs of the vocabulary
# and their cumulative sums; `draw` writes out the probabilities alone and looks for the token block by block.

# A nucleus nearly always lies within this many tokens; sorting a whole vocabulary costs more than the model does.
NUCLEUS_CANDIDATES = 256
# `draw` sums probabilities over blocks of this many tokens, and then within one block.
BLOCK = 256
# From here on, arrays of all rows are quicker than a generator object for each; the numbers are the same.
MANY_GENERATORS = 16


@dataclass(frozen=True, slots=True)
class RowSettings:
    """The settings of R rows: `temperature_R1` float32, `top_k_R` int64 (0: no cut), `top_p_R` float64 (1: no cut).

    The flags say what no row of the batch as first gathered needs, so that it is skipped.
    """

    temperature_R1: Tensor
    top_k_R: Tensor
    top_p_R: Tensor
    tempered: bool
    largest_k: int
    nucleus: bool

    @classmethod
    def of(cls, samplings: Sequence[Sampling], device: torch.device) -> RowSettings:
        # Below the smallest normal number a device may round to 0, and 0 / 0 has no meaning.
        temperature_R = np.maximum([s.temperature for s in samplings], np.finfo(np.float32).tiny)
        return cls(
            temperature_R1=torch.tensor(temperature_R, dtype=torch.float32, device=device)[:, None],
            top_k_R=torch.tensor([s.top_k for s in samplings], dtype=torch.int64, device=device),
            top_p_R=torch.tensor([s.top_p for s in samplings], dtype=torch.float64, device=device),
            tempered=bool((temperature_R != 1.0).any()),
            largest_k=max(s.top_k for s in samplings),
            nucleus=any(s.top_p < 1.0 for s in samplings),
        )

    def select(self, rows_K: Tensor) -> RowSettings:
        """The settings of rows `rows_K` int64, in that order."""
        return RowSettings(
            self.temperature_R1[rows_K],
            self.top_k_R[rows_K],
            self.top_p_R[rows_K],
            self.tempered,
            self.largest_k,
            self.nucleus,
        )


def uniform_numbers(requests: Sequence[GenerationRequest], count: int) -> NDArray[np.float64]:
    """numbers_NT in [0, 1): number t of request n comes from Philox, a counter-based generator keyed by its seed."""
    seeds = [request.seed for request in requests]
    if len(requests) >= MANY_GENERATORS:
        return philox_numbers(seeds, count)
    numbers_NT = np.empty((len(requests), count))
    for row, seed in enumerate(seeds):
        np.random.Generator(np.random.Philox(key=seed)).random(out=numbers_NT[row])
    return numbers_NT


def distribution(logits_RV: Tensor, settings: RowSettings) -> Tensor:
    """logprobs_RV float32 of the distribution to sample from; a token that was cut has -inf.

    The temperature divides logits from which the row's largest was taken first: as it nears 0 the quotients tend to
    -inf and never to inf - inf, so that the limit is greedy choice (tokens tied for first place share equally).
    """
    return torch.log_softmax(_cut(logits_RV.float(), settings), dim=-1)


def _cut(logits_RV: Tensor, settings: RowSettings) -> Tensor:
    """The logits at their temperatures; -inf for tokens that are cut."""
    if settings.tempered:
        logits_RV = logits_RV.float()
        logits_RV = (logits_RV - logits_RV.amax(dim=-1, keepdim=True)) / settings.temperature_R1
    if settings.largest_k > 0 or settings.nucleus:
        logits_RV = logits_RV.float()
        threshold_R1 = cut_threshold(logits_RV, settings)
        logits_RV = logits_RV.masked_fill(logits_RV < threshold_R1, -torch.inf)
    return logits_RV


def cut_threshold(logits_RV: Tensor, settings: RowSettings) -> Tensor:
    """threshold_R1: the smallest logit that survives top-k and then top-p (of what top-k left, renormalised).

    Top-k keeps the k largest; top-p keeps the fewest largest whose probabilities sum to top_p or more. Tokens whose
    logits equal the threshold are all kept, in either cut: no order among equals has to be invented.
    """
    vocabulary = logits_RV.shape[-1]
    width = min(vocabulary, max(settings.largest_k, NUCLEUS_CANDIDATES if settings.nucleus else 1))
    threshold_R1, complete = _threshold_among(logits_RV, settings, width)
    if not complete:
        threshold_R1, _ = _threshold_among(logits_RV, settings, vocabulary)
    return threshold_R1


def _threshold_among(logits_RV: Tensor, settings: RowSettings, width: int) -> tuple[Tensor, bool]:
    """The threshold as the `width` largest logits of each row show it, and whether they were enough to tell."""
    candidates_RW = logits_RV.topk(width, dim=-1).values
    k_R1 = settings.top_k_R.clamp(min=1, max=width)[:, None]
    top_k_R1 = candidates_RW.gather(1, k_R1 - 1).masked_fill(settings.top_k_R[:, None] == 0, -torch.inf)
    if not settings.nucleus:
        return top_k_R1, True

    kept_RV = logits_RV.masked_fill(logits_RV < top_k_R1, -torch.inf)
    total_R1 = kept_RV.logsumexp(dim=-1, keepdim=True).double()
    mass_RW = (candidates_RW.double() - total_R1).exp().masked_fill(candidates_RW < top_k_R1, 0.0)
    sums_RW = mass_RW.cumsum(dim=-1)
    uncut_R1 = settings.top_p_R[:, None] >= 1.0
    last_R1 = (sums_RW - mass_RW < settings.top_p_R[:, None]).sum(dim=-1, keepdim=True).clamp(min=1) - 1
    top_p_R1 = candidates_RW.gather(1, last_R1).masked_fill(uncut_R1, -torch.inf)
    enough_R1 = uncut_R1 | (sums_RW[:, -1:] >= settings.top_p_R[:, None]) | (candidates_RW[:, -1:] <= top_k_R1)
    return torch.maximum(top_k_R1, top_p_R1), width == logits_RV.shape[-1] or bool(enough_R1.all())


def sample(logprobs_RV: Tensor, uniform_R: Tensor) -> Tensor:
    """tokens_R int64 by inversion: the first token whose cumulative probability (float64) exceeds the row's number.

    `uniform_R` float64 in [0, 1). A token of probability 0 is never taken. Rows of NaN give an arbitrary valid token.
    """
    tokens_R1, _, _ = _inverted(logprobs_RV.exp(), uniform_R[:, None])
    return tokens_R1[:, 0].clamp(max=logprobs_RV.shape[-1] - 1)


def draw(logits_RV: Tensor, settings: RowSettings, uniform_R: Tensor) -> tuple[Tensor, Tensor]:
    """tokens_R int64 and their logprobs_R float32: what `sample` takes of `distribution`, in a fraction of the memory
    traffic of a large vocabulary."""
    probabilities_RV = torch.softmax(_cut(logits_RV, settings), dim=-1, dtype=torch.float32)
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
    # How far the number reaches into its block is a uniform number again, for looking inside.
    own_R1 = blocks_RB.gather(1, block_R1).double()
    within_R1 = ((target_R1 - (cumulative_RB.gather(1, block_R1) - own_R1)) / own_R1).clamp_(0.0, 1.0)
    places_RX = block_R1 * BLOCK + torch.arange(BLOCK, device=block_R1.device)
    inside_RX = probabilities_RV.gather(1, places_RX.clamp(max=vocabulary - 1))
    inside_RX = inside_RX.masked_fill_(places_RX >= vocabulary, 0.0)
    token_R1, _, _ = _inverted(inside_RX, within_R1)
    return places_RX[:, :1] + token_R1


def _inverted(weights_RN: Tensor, uniform_R1: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """index_R1, the first whose cumulative weight (float64) exceeds target_R1, the number's share of the total; and the
    cumulative weights. A weight of 0 is never found, whatever the number."""
    cumulative_RN = weights_RN.cumsum(dim=-1, dtype=torch.float64)
    total_R1 = cumulative_RN[:, -1:]
    target_R1 = torch.minimum(uniform_R1 * total_R1, torch.nextafter(total_R1, torch.zeros_like(total_R1)))
    return torch.searchsorted(cumulative_RN, target_R1, right=True), target_R1, cumulative_RN
