"""The parts of prompts that are computed once, and that they change no completion."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_lean_decoding import KINDS
from tiny_policies import generate, tiny_model
from torch import Tensor
from transformers import PreTrainedModel

from pvg.rollout import lean_rows
from pvg.rollout.engine import GenerationRequest, Sampling
from pvg.rollout.lean import LeanDecoder
from pvg.rollout.lean_rows import LEAST_SHARED, MOST_SHARED, SharedPart, shared_parts


def tokens(*pieces: tuple[int, int]) -> np.ndarray[Any, np.dtype[np.int32]]:
    """`count` times `token`, piece by piece."""
    return np.concatenate([np.full(count, token, dtype=np.int32) for token, count in pieces])


def test_what_prompts_begin_with_is_a_part_of_the_first_level() -> None:
    rules, board = (7, 40), (300, 50)
    prompts = [tokens(rules, board, (1, 5)), tokens((9, 60)), tokens(rules, board, (2, 6)), tokens(rules, (3, 4))]
    assert shared_parts(prompts) == [
        [SharedPart((0, 2, 3), 0, 40), SharedPart((1,), 0, 60)],
        [SharedPart((0, 2), 40, 90), SharedPart((3,), 40, 44)],
        [SharedPart((0,), 90, 95), SharedPart((2,), 90, 96)],
    ]


def test_short_common_beginnings_are_left_as_they_are() -> None:
    prompts = [tokens((5, LEAST_SHARED - 1), (token, 3)) for token in (2, 1, 3)]
    assert shared_parts(prompts) == [[SharedPart((number,), 0, len(prompts[0])) for number in range(3)]]
    assert shared_parts([]) == [[]]


def test_a_prompt_that_is_the_beginning_of_others_has_no_part_of_its_own() -> None:
    prompts = [tokens((5, 40)), tokens((5, 40), (6, 2))]
    assert shared_parts(prompts) == [[SharedPart((0, 1), 0, 40)], [SharedPart((1,), 40, 42)]]


@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 2), st.sampled_from([1, 20, 32, 33, 70])), min_size=1, max_size=4),
        max_size=12,
    )
)
def test_the_parts_of_a_prompt_cover_each_token_once(pieces: list[list[tuple[int, int]]]) -> None:
    prompts = list({(ids := tokens(*each)).tobytes(): ids for each in pieces}.values())
    done = [0] * len(prompts)
    levels = shared_parts(prompts)
    assert len(levels) <= MOST_SHARED + 1
    for level in levels:
        assert level == sorted(level, key=lambda part: part.prompts[0])
        for part in level:
            assert part.end > part.start
            if len(part.prompts) > 1:
                assert part.length >= LEAST_SHARED
            for number in part.prompts:
                assert done[number] == part.start, "the tokens before a part belong to earlier levels"
                first = prompts[part.prompts[0]]
                assert np.array_equal(prompts[number][: part.end], first[: part.end])
                done[number] = part.end
    assert done == [len(prompt) for prompt in prompts]


def branching() -> list[GenerationRequest]:
    """Prompts of 9 to 29 tokens: common instructions, three positions, and two endings of each."""
    generator = np.random.default_rng(1)

    def drawn(count: int) -> list[int]:
        return generator.integers(3, 20, count).tolist()

    rules, found = drawn(8), [drawn(9)]
    for _ in range(3):
        position = drawn(12)
        found += [rules + position + drawn(1 + 8 * last) for last in range(2)]
    return [
        GenerationRequest(f"r{i}", np.asarray(ids, dtype=np.int32), Sampling(8, ()), seed=i)
        for i, ids in enumerate(found)
    ]


@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("build", KINDS)
def test_shared_parts_change_no_completion(
    build: Callable[[], PreTrainedModel], sparse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    module = build().eval()
    computed: list[int] = []
    begin, prefill = LeanDecoder.__init__, LeanDecoder.prefill

    def chosen(self: LeanDecoder, module: Any) -> None:
        begin(self, module)
        self._sparse = sparse

    def watched(self: LeanDecoder, ids_BL: Tensor, *arguments: Any) -> None:
        computed.append(ids_BL.numel())
        prefill(self, ids_BL, *arguments)

    monkeypatch.setattr(LeanDecoder, "__init__", chosen)
    monkeypatch.setattr(LeanDecoder, "prefill", watched)
    apart = generate(branching(), model=tiny_model(module=module))
    alone = sum(computed)
    computed.clear()
    monkeypatch.setattr(lean_rows, "LEAST_SHARED", 4)
    together = generate(branching(), model=tiny_model(module=module))
    assert sum(computed) < alone
    for one, other in zip(apart, together, strict=True):
        np.testing.assert_array_equal(one.token_ids, other.token_ids)
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)
