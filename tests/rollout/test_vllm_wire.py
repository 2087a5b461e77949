"""Replies of vLLM that are not what they should be: each is a MalformedReply, so the request is sent again."""

from __future__ import annotations

import base64
import copy
from typing import Any

import numpy as np
import pytest

from pvg.rollout.vllm_requests import read_generated, read_prompt_logprobs
from pvg.servers.pool import MalformedReply

URL = "http://server"


def packed(dtype: str, *values: float) -> str:
    return base64.b64encode(np.array(values, dtype)).decode()


def logprobs(*values: float) -> str:
    return packed("<f4", *values)


GOOD = {
    "choices": [
        {
            "token_ids": packed("<i4", 5, 6),
            "logprobs": logprobs(-1.0, 1e-6),
            "finish_reason": "stop",
            "weight_versions": [{"start": 0, "version": "a"}, {"start": 1, "version": "b"}],
        }
    ],
    "usage": {"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 1}},
}


def changed(place: str, value: Any) -> Any:
    reply = copy.deepcopy(GOOD)
    (reply["choices"][0] if place in GOOD["choices"][0] else reply)[place] = value  # type: ignore[index]
    return reply


def test_a_log_prob_may_be_above_0_by_rounding() -> None:
    found = read_generated(GOOD, URL)
    assert found.labels == ((0, "a"), (1, "b"))
    assert (found.prompt_tokens, found.cached_tokens) == (3, 1)
    assert found.token_ids.tolist() == [5, 6]
    assert found.logprobs[1] > 0


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("token_ids", 7),
        ("token_ids", [5, 6]),
        ("token_ids", packed("<i4", 5, -1)),
        ("token_ids", packed("<i4", 5)),
        ("token_ids", packed("<i4", 5, 6)[:-2]),
        ("logprobs", None),
        ("logprobs", {"content": [{"logprob": -1.0}, {"logprob": 0.0}]}),
        ("logprobs", logprobs(-1.0, 5.0)),
        ("logprobs", logprobs(-1.0, float("nan"))),
        ("logprobs", logprobs(-1.0, -9999.0)),
        ("finish_reason", None),
        ("finish_reason", ["stop"]),
        ("weight_versions", 5),
        ("weight_versions", [{"start": 0, "version": "a"}, {"start": -1, "version": "b"}]),
        ("weight_versions", [{"start": float("inf"), "version": "a"}]),
        ("usage", None),
        ("usage", {"prompt_tokens": None}),
        ("usage", {"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": "x"}}),
    ],
)
def test_a_completion_of_another_form_is_malformed(place: str, value: Any) -> None:
    with pytest.raises(MalformedReply):
        read_generated(changed(place, value), URL)


def test_versions_after_the_last_token_and_before_the_first_of_another_do_not_count() -> None:
    versions = [{"start": 0, "version": "a"}, {"start": 0, "version": "b"}, {"start": 2, "version": "c"}]
    assert read_generated(changed("weight_versions", versions), URL).labels == ((0, "b"),)


@pytest.mark.parametrize("found", [[], 5, None, {"choices": []}, {"choices": [5]}, {"error": {"message": "no"}}])
def test_a_reply_of_another_form_is_malformed(found: Any) -> None:
    with pytest.raises(MalformedReply):
        read_generated(found, URL)


@pytest.mark.parametrize("versions", [["x"], 5, {"a": 1}])
def test_scores_of_a_prompt_with_versions_of_another_form_are_malformed(versions: Any) -> None:
    reply = {"prompt_logprobs": logprobs(-1.0), "choices": [{"weight_versions": versions}]}
    with pytest.raises(MalformedReply):
        read_prompt_logprobs(reply, np.array([1, 2], np.int32), URL)
    with pytest.raises(MalformedReply, match="1 log-probs of a prompt of 3 tokens"):
        read_prompt_logprobs(reply, np.array([1, 2, 3], np.int32), URL)
