"""The distribution that is sampled from, and sampling from it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pvg.rollout.engine import GenerationRequest, Sampling
from pvg.rollout.sampler import RowSettings, draw, tempered, uniform_numbers

CPU = torch.device("cpu")


def rows(*temperatures: float) -> RowSettings:
    return RowSettings.of([Sampling(1, (), temperature) for temperature in temperatures], CPU)


def distribution(logits: torch.Tensor, how: RowSettings) -> torch.Tensor:
    return torch.log_softmax(tempered(logits.float(), how), dim=-1)


def test_temperatures_divide_each_row() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.2], [0.5, 0.3, 0.2]]))
    found = distribution(logits, rows(1.0, 0.5)).exp()
    squares = np.array([0.25, 0.09, 0.04])
    np.testing.assert_allclose(found[0], [0.5, 0.3, 0.2], atol=1e-6)
    np.testing.assert_allclose(found[1], squares / squares.sum(), atol=1e-6)


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-45])
def test_temperatures_near_zero_choose_greedily_and_stay_finite(temperature: float) -> None:
    logits = torch.tensor([[1.0, 80.0, 79.0, -1e30], [3.0, 3.0, -5.0, 2.0]])
    found = distribution(logits, rows(temperature, temperature)).exp()
    np.testing.assert_allclose(found, [[0, 1, 0, 0], [0.5, 0.5, 0, 0]], atol=1e-6)


def test_numbers_at_the_ends_of_the_unit_interval_never_give_a_token_of_probability_zero() -> None:
    logits = torch.log(torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]])).expand(4, 5)
    numbers = torch.tensor([0.0, 0.2499, 0.2501, np.nextafter(1.0, 0.0)], dtype=torch.float64)
    tokens, _ = draw(logits, rows(*[1.0] * 4), numbers)
    assert tokens.tolist() == [1, 1, 3, 3]


@given(st.lists(st.integers(0, 2**128 - 1), min_size=1, max_size=40), st.integers(1, 70))
@settings(max_examples=60, deadline=None)
def test_the_numbers_of_many_requests_are_those_of_numpys_generator(seeds: list[int], count: int) -> None:
    requests = [GenerationRequest("r", np.ones(1, np.int32), Sampling(count, ()), seed) for seed in seeds]
    expected = np.stack([np.random.Generator(np.random.Philox(key=seed)).random(count) for seed in seeds])
    np.testing.assert_array_equal(uniform_numbers(requests, count), expected)


@pytest.mark.slow
@pytest.mark.parametrize("vocabulary", [7, 513, 1024, 2049])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_drawing_by_blocks_takes_the_tokens_of_the_whole_sums(vocabulary: int, temperature: float) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    logits = 3 * torch.randn(400, vocabulary, generator=generator)
    numbers = torch.rand(400, generator=generator, dtype=torch.float64)
    numbers[:2] = torch.tensor([0.0, np.nextafter(1.0, 0.0)])
    settings_ = rows(*[temperature] * 400)
    logprobs = distribution(logits, settings_)
    tokens, found = draw(logits, settings_, numbers)
    sums = logprobs.double().exp().cumsum(dim=-1)
    expected = torch.searchsorted(sums, numbers[:, None] * sums[:, -1:], right=True)[:, 0]
    same = tokens == expected
    assert same.float().mean() > 0.99  # a number at the very edge of two tokens may fall to either side
    torch.testing.assert_close(found, logprobs.gather(1, tokens[:, None])[:, 0], atol=1e-4, rtol=0)
    assert torch.isfinite(found).all()


def test_drawing_follows_the_distribution_in_every_block() -> None:
    probabilities = torch.zeros(1200, dtype=torch.float64)
    places = [0, 255, 256, 700, 1023, 1024, 1199]
    probabilities[places] = torch.tensor([0.3, 0.1, 0.05, 0.25, 0.1, 0.15, 0.05], dtype=torch.float64)
    numbers = torch.linspace(0, 1, 2001, dtype=torch.float64)[:-1]
    tokens, _ = draw(probabilities.log().float().expand(2000, -1), rows(*[1.0] * 2000), numbers)
    counts = torch.bincount(tokens, minlength=1200)
    assert counts[places].tolist() == pytest.approx((2000 * probabilities[places]).tolist(), abs=1)
    assert int(counts.sum() - counts[places].sum()) == 0
