"""Routed experts: from a server's reply to the trainer's batch, in the bytes they take and no more."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm_drills import Drill, as_vllm_writes, request, routed_experts, run

from pvg.errors import ConfigurationError
from pvg.rollout.vllm_requests import read_generated, read_routed_experts
from pvg.servers.pool import MalformedReply

SHAPES = [(5, 4, 2), (1, 1, 1), (70, 3, 8)]


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
@pytest.mark.parametrize("shape", SHAPES)
def test_they_are_read_as_vllm_writes_them_and_lie_in_the_decoded_bytes(shape: tuple[int, ...], dtype: Any) -> None:
    written = np.random.default_rng(0).integers(0, np.iinfo(dtype).max, shape).astype(dtype)
    found = read_routed_experts(as_vllm_writes(written), "http://s")
    assert found.tobytes() == written.tobytes()
    assert (found.dtype, found.shape) == (written.dtype, shape)
    assert not found.flags.owndata  # a view: nothing was copied after the decoding


@pytest.mark.parametrize(
    "text",
    [
        "not base64!",
        base64.b64encode(b"no array").decode(),
        base64.b64encode(base64.b64decode(as_vllm_writes(np.zeros((3, 2, 2), np.uint8)))[:-1]).decode(),
        as_vllm_writes(np.zeros((3, 2), np.uint8)),
        as_vllm_writes(np.zeros((3, 2, 2), np.int64)),
        as_vllm_writes(np.asfortranarray(np.zeros((3, 2, 2), np.uint8))),
    ],
    ids=["text", "bytes", "cut", "two dimensions", "int64", "columns first"],
)
def test_what_are_no_routed_experts_is_malformed(text: str) -> None:
    with pytest.raises(MalformedReply, match="routed experts"):
        read_routed_experts(text, "http://s")


def reply(experts: np.ndarray, tokens: int = 3, prompt: int = 4) -> dict[str, Any]:
    choice = {
        "token_ids": base64.b64encode(np.arange(tokens, dtype="<i4")).decode(),
        "logprobs": base64.b64encode(np.full(tokens, -1.0, "<f4")).decode(),
        "finish_reason": "length",
        "weight_versions": [{"start": 0, "version": "v"}],
        "routed_experts": as_vllm_writes(experts),
    }
    return {"choices": [choice], "usage": {"prompt_tokens": prompt}}


def test_of_every_token_but_the_last_or_malformed() -> None:
    generated = read_generated(reply(np.ones((6, 2, 2), np.uint8)), "http://s")
    assert generated.routed_experts is not None
    assert generated.routed_experts.shape == (6, 2, 2)
    for wrong in (5, 7):
        with pytest.raises(MalformedReply, match=f"experts of {wrong} tokens, where 6 were computed"):
            read_generated(reply(np.ones((wrong, 2, 2), np.uint8)), "http://s")


@pytest.mark.parametrize("streamed", [False, True])
def test_a_server_tells_them_with_each_completion(streamed: bool, tmp_path: Path) -> None:
    async def use(d: Drill) -> None:
        await d.publish(0)
        for number in range(4):
            told: list[int] = []
            asked = request(number, on_tokens=told.append if streamed else None)
            found = await d.ask(asked)
            expected = routed_experts([*asked.prompt_ids.tolist(), *found.token_ids.tolist()])
            assert found.routed_experts is not None
            assert found.routed_experts.tobytes() == expected.tobytes()
            assert found.routed_experts.shape == (len(asked.prompt_ids) + len(found.token_ids) - 1, 2, 2)

    run(use, tmp_path, routed_experts=True, wants_experts=True)


def test_a_server_that_does_not_tell_them_is_named_with_a_remedy(tmp_path: Path) -> None:
    async def use(d: Drill) -> None:
        await d.publish(0)
        with pytest.raises(ConfigurationError, match=r"does not report .* training\.router_replay") as caught:
            await d.engine.generate(request(0))
        assert "pvg serve" in str(caught.value.remedy)

    run(use, tmp_path, wants_experts=True)
