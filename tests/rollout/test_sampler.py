"""The distribution that is sampled from, and sampling from it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tiny_policies import naive_kept

from pvg.rollout import sampler
from pvg.rollout.engine import GenerationRequest, Sampling
from pvg.rollout.sampler import RowSettings, cut, draw, uniform_numbers

CPU = torch.device("cpu")


def rows(*settings_: tuple[float, int, float]) -> RowSettings:
    return RowSettings.of([Sampling(1, (), temperature, top_p, top_k) for temperature, top_k, top_p in settings_], CPU)


def distribution(logits: torch.Tensor, how: RowSettings) -> torch.Tensor:
    return torch.log_softmax(cut(logits.float(), how), dim=-1)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_cuts_agree_with_a_naive_reference_row_by_row(data: st.DataObject) -> None:
    # Eighths make ties common.
    width = data.draw(st.integers(1, 12))
    count = data.draw(st.integers(1, 4))
    logits = data.draw(
        st.lists(
            st.lists(st.integers(-40, 40).map(lambda n: n / 8), min_size=width, max_size=width),
            min_size=count,
            max_size=count,
        )
    )
    cuts = data.draw(
        st.lists(
            st.tuples(st.integers(0, 14), st.one_of(st.just(1.0), st.floats(0.01, 0.999))),
            min_size=count,
            max_size=count,
        )
    )
    for row, (top_k, top_p) in zip(logits, cuts, strict=True):
        # A sum that meets top_p to the last bit may fall on either side.
        assume(naive_kept(row, top_k, top_p - 1e-5) == naive_kept(row, top_k, min(1.0, top_p + 1e-5)) or top_p == 1.0)
    logprobs = distribution(torch.tensor(logits), rows(*((1.0, top_k, top_p) for top_k, top_p in cuts)))
    for found, row, (top_k, top_p) in zip(logprobs, logits, cuts, strict=True):
        kept = np.asarray(naive_kept(row, top_k, top_p))
        assert torch.isfinite(found).tolist() == kept.tolist()
        weights = np.exp(np.asarray(row)) * kept
        np.testing.assert_allclose(found.exp().numpy(), weights / weights.sum(), atol=1e-6)


@pytest.mark.parametrize("candidates", [1, 3, 1000])
def test_a_nucleus_wider_than_the_candidates_is_still_exact(candidates: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "NUCLEUS_CANDIDATES", candidates)
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(3))
    cuts = [(0, 0.9), (0, 1.0), (12, 0.8), (2, 1.0), (0, 0.3)]
    logprobs = distribution(logits, rows(*((1.0, top_k, top_p) for top_k, top_p in cuts)))
    for found, row, (top_k, top_p) in zip(logprobs, logits, cuts, strict=True):
        assert torch.isfinite(found).tolist() == naive_kept(row.tolist(), top_k, top_p)


def test_temperatures_divide_each_row_and_come_before_the_cuts() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.2], [0.5, 0.3, 0.2], [0.5, 0.3, 0.2]]))
    found = distribution(logits, rows((1.0, 0, 1.0), (0.5, 0, 1.0), (0.5, 0, 0.7))).exp()
    squares = np.array([0.25, 0.09, 0.04])
    np.testing.assert_allclose(found[0], [0.5, 0.3, 0.2], atol=1e-6)
    np.testing.assert_allclose(found[1], squares / squares.sum(), atol=1e-6)
    # 0.25 / 0.38 = 0.66 < 0.7, so two tokens remain; untempered it would also be two, but with other weights.
    np.testing.assert_allclose(found[2], [0.25 / 0.34, 0.09 / 0.34, 0.0], atol=1e-6)


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-45])
def test_temperatures_near_zero_choose_greedily_and_stay_finite(temperature: float) -> None:
    logits = torch.tensor([[1.0, 80.0, 79.0, -1e30], [3.0, 3.0, -5.0, 2.0]])
    found = distribution(logits, rows((temperature, 0, 1.0), (temperature, 0, 1.0))).exp()
    np.testing.assert_allclose(found, [[0, 1, 0, 0], [0.5, 0.5, 0, 0]], atol=1e-6)


def test_numbers_at_the_ends_of_the_unit_interval_never_give_a_token_of_probability_zero() -> None:
    logits = torch.log(torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]])).expand(4, 5)
    numbers = torch.tensor([0.0, 0.2499, 0.2501, np.nextafter(1.0, 0.0)], dtype=torch.float64)
    tokens, _ = draw(logits, rows(*[(1.0, 0, 1.0)] * 4), numbers)
    assert tokens.tolist() == [1, 1, 3, 3]


@given(st.lists(st.integers(0, 2**128 - 1), min_size=1, max_size=40), st.integers(1, 70))
@settings(max_examples=60, deadline=None)
def test_the_numbers_of_many_requests_are_those_of_numpys_generator(seeds: list[int], count: int) -> None:
    requests = [GenerationRequest("r", np.ones(1, np.int32), Sampling(count, ()), seed) for seed in seeds]
    expected = np.stack([np.random.Generator(np.random.Philox(key=seed)).random(count) for seed in seeds])
    np.testing.assert_array_equal(uniform_numbers(requests, count), expected)


@pytest.mark.slow
@pytest.mark.parametrize("vocabulary", [7, 513, 1024, 2049])
@pytest.mark.parametrize("how", [(1.0, 0, 1.0), (0.7, 40, 1.0), (1.3, 0, 0.9)])
def test_drawing_by_blocks_takes_the_tokens_of_the_whole_sums(vocabulary: int, how: tuple[float, int, float]) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    logits = 3 * torch.randn(400, vocabulary, generator=generator)
    numbers = torch.rand(400, generator=generator, dtype=torch.float64)
    numbers[:2] = torch.tensor([0.0, np.nextafter(1.0, 0.0)])
    settings_ = rows(*[how] * 400)
    logprobs = distribution(logits, settings_)
    tokens, found = draw(logits, settings_, numbers)
    sums = logprobs.double().exp().cumsum(dim=-1)
    expected = torch.searchsorted(sums, numbers[:, None] * sums[:, -1:], right=True)[:, 0]
    same = tokens == expected
    assert same.float().mean() > 0.99  # a number at the very edge of two tokens may fall to either side
    torch.testing.assert_close(found, logprobs.gather(1, tokens[:, None])[:, 0], atol=1e-4, rtol=0)
    assert torch.isfinite(found).all()  # never a token that was cut


def test_drawing_follows_the_distribution_in_every_block() -> None:
    probabilities = torch.zeros(1200, dtype=torch.float64)
    places = [0, 255, 256, 700, 1023, 1024, 1199]
    probabilities[places] = torch.tensor([0.3, 0.1, 0.05, 0.25, 0.1, 0.15, 0.05], dtype=torch.float64)
    numbers = torch.linspace(0, 1, 2001, dtype=torch.float64)[:-1]
    tokens, _ = draw(probabilities.log().float().expand(2000, -1), rows(*[(1.0, 0, 1.0)] * 2000), numbers)
    counts = torch.bincount(tokens, minlength=1200)
    assert counts[places].tolist() == pytest.approx((2000 * probabilities[places]).tolist(), abs=1)
    assert int(counts.sum() - counts[places].sum()) == 0
