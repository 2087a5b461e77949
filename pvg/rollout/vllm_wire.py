"""Requests and replies of vLLM's token-level route: JSON to validated records and back.

    POST /inference/v1/generate   {"token_ids": [...], "sampling_params": {...}, "cache_salt": "...", "stream": false}

Invariants: a reply that lacks a token, a log-prob or a weight label raises MalformedReply; it never becomes a partial
completion. Unlabelled tokens of a cut request are discarded, and the completion continues from what it had before.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from pvg.records import FinishReason, Float32, Int32, RoutedExperts
from pvg.rollout.engine import GenerationRequest
from pvg.servers.pool import ConnectionBroken, MalformedReply

GENERATE = "/inference/v1/generate"
SEED_BITS = (1 << 63) - 1  # vLLM's seeds are signed
UNSAMPLABLE = -9000.0  # vLLM writes -9999 for a log-prob of minus infinity or NaN
ROUNDING = 1e-3  # nats by which a log-prob may be above 0
UNREADABLE = (AttributeError, LookupError, OverflowError, TypeError, ValueError)  # from JSON of another form


@dataclass(frozen=True, slots=True)
class ServedCompletion:
    """A completion as the server reports it. `labels`: (index of the first token, weight label) of each span."""

    token_ids: Int32
    logprobs: Float32
    finish_reason: FinishReason | Literal["abort"]  # "abort" only if requested
    labels: tuple[tuple[int, str], ...]
    prompt_tokens: int
    cached_tokens: int
    routed_experts: RoutedExperts | None = None


def generation(request: GenerationRequest, *, salt: str, model: str | None, stream: bool) -> dict[str, Any]:
    """The request body. It asks for the log-probs of sampled tokens only."""
    sampling = request.sampling
    parameters: dict[str, Any] = {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "stop_token_ids": list(sampling.stop_ids),
        "ignore_eos": True,  # only the request's own stop tokens count
        "logprobs": 0,
        "detokenize": False,
        "seed": request.seed & SEED_BITS,
    }
    body: dict[str, Any] = {
        "request_id": request.id,
        "token_ids": request.prompt_ids,
        "sampling_params": parameters,
        "cache_salt": salt,
        "stream": stream,
    }
    if stream:
        body["stream_options"] = {"include_usage": True}
    if model is not None:
        body["model"] = model
    return body


def prompt_scoring(ids: Int32, *, salt: str, model: str | None) -> dict[str, Any]:
    """A body that asks for the log-probs of `ids` themselves. It samples one token, because vLLM requires that."""
    parameters = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0, "detokenize": False}
    body: dict[str, Any] = {"token_ids": ids, "sampling_params": parameters, "cache_salt": salt}
    if model is not None:
        body["model"] = model
    return body


def read_generated(found: Any, url: str, *, cut: bool = False) -> ServedCompletion:
    """A complete reply. Raises MalformedReply, or ConnectionBroken if the server aborted a request that was not
    `cut`."""
    choice = _only_choice(found, url)
    stretch = StreamedCompletion(url)
    stretch.take(choice)
    return stretch.finish(_usage(found, url), cut=cut)


@dataclass(slots=True)
class StreamedCompletion:
    """A completion that arrives in pieces."""

    url: str
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    labels: list[tuple[int, str]] = field(default_factory=list)
    usage: tuple[int, int] | None = None
    experts: str | None = None  # encoded; sent once, at the end

    def feed(self, event: Any) -> int:
        """Add the next event of a stream. Returns the number of tokens so far."""
        if isinstance(event, dict) and event.get("error"):
            raise ConnectionBroken(self.url, f"the server gave up: {str(event['error'])[:200]}")
        if isinstance(event, dict) and event.get("usage"):
            self.usage = _usage(event, self.url)
        if isinstance(event, dict) and event.get("choices") == []:
            return len(self.token_ids)
        self.take(_only_choice(event, self.url))
        return len(self.token_ids)

    def take(self, choice: dict[str, Any]) -> None:
        try:
            ids = list(choice.get("token_ids") or [])
            content = (choice.get("logprobs") or {}).get("content") or []
            found = [float(entry["logprob"]) for entry in content]
            labels = [(int(span["start"]), str(span["version"])) for span in choice.get("weight_versions") or []]
        except UNREADABLE as error:
            raise MalformedReply(self.url, f"a choice that cannot be read: {error!r}") from None
        if len(found) != len(ids):
            raise MalformedReply(self.url, f"{len(ids)} tokens with {len(found)} log-probs")
        if not all(type(token) is int and 0 <= token < 2**31 for token in ids):  # `true` is an int too
            raise MalformedReply(self.url, "invalid token ids")
        for logprob in found:
            if not UNSAMPLABLE <= logprob <= ROUNDING:  # also true for NaN
                raise MalformedReply(self.url, f"a sampled token with log-prob {logprob:g}")
        self.token_ids += ids
        self.logprobs += found
        self.labels += labels
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        self.experts = choice.get("routed_experts") or self.experts

    def finish(self, usage: tuple[int, int] | None = None, *, cut: bool = False) -> ServedCompletion:
        usage = usage or self.usage
        aborted = self.finish_reason == "abort"
        if aborted and not cut:
            raise ConnectionBroken(self.url, "the server aborted the request")
        if not aborted and self.finish_reason not in ("stop", "length"):
            raise MalformedReply(self.url, f"a completion that ended by {self.finish_reason!r}")
        if usage is None or not (self.token_ids or aborted):
            raise MalformedReply(self.url, "a completion without tokens" if usage else "a completion without usage")
        # An update after the last token may leave a label for the next one, and two updates before a token two labels.
        labels = dict(label for label in self.labels if label[0] < len(self.token_ids))
        starts = list(labels)
        if self.token_ids and (not starts or starts[0] != 0):
            raise MalformedReply(self.url, "a completion without the versions of its weights (vLLM below 0.32?)")
        if starts != sorted(starts):
            raise MalformedReply(self.url, f"{len(self.token_ids)} tokens with versions that start at {starts}")
        return ServedCompletion(
            token_ids=np.asarray(self.token_ids, dtype=np.int32),
            logprobs=np.asarray(self.logprobs, dtype=np.float32),
            finish_reason="abort" if aborted else "stop" if self.finish_reason == "stop" else "length",
            labels=tuple(labels.items()),
            prompt_tokens=usage[0],
            cached_tokens=usage[1],
            routed_experts=self._routed_experts(usage[0] + len(self.token_ids) - 1),
        )

    def _routed_experts(self, tokens: int) -> RoutedExperts | None:
        if self.experts is None:
            return None
        found = read_routed_experts(self.experts, self.url)
        if len(found) != tokens:
            raise MalformedReply(self.url, f"experts of {len(found)} tokens, where {tokens} were computed")
        return found


def read_routed_experts(text: str, url: str) -> RoutedExperts:
    """Decode the experts [tokens, layers, experts per token] of prompt and completion: vLLM sends an .npy file in
    base64. The result is a view of the decoded bytes."""
    try:
        data = base64.b64decode(text, validate=True)
        file = io.BytesIO(data)
        if np.lib.format.read_magic(file) != (1, 0):
            raise ValueError("an .npy file of another version")
        shape, by_column, dtype = np.lib.format.read_array_header_1_0(file)
        found: RoutedExperts = np.frombuffer(data, dtype, offset=file.tell()).reshape(shape)
    except (ValueError, TypeError) as error:
        raise MalformedReply(url, f"routed experts that cannot be read: {error}") from None
    if dtype not in (np.uint8, np.uint16) or len(shape) != 3 or by_column:
        raise MalformedReply(url, f"routed experts of {dtype} and the shape {shape}")
    return found


def read_prompt_logprobs(found: Any, ids: Int32, url: str) -> tuple[Float32, str]:
    """(Log-probs float32 [L - 1] of ids[1:] in nats, label of the weights that computed them)."""
    rows = found.get("prompt_logprobs") if isinstance(found, dict) else None
    if not isinstance(rows, list) or len(rows) != len(ids):
        raise MalformedReply(url, "no log-probs of the prompt")
    try:
        values = [float(row[str(token)]["logprob"]) for row, token in zip(rows[1:], ids[1:].tolist(), strict=True)]
        spans = _only_choice(found, url).get("weight_versions") or [{}]
        label = str(spans[0].get("version", ""))
    except UNREADABLE as error:
        raise MalformedReply(url, f"log-probs of the prompt that cannot be read: {error!r}") from None
    return np.asarray(values, dtype=np.float32), label


def _only_choice(found: Any, url: str) -> dict[str, Any]:
    choices: Sequence[Any] = found.get("choices") if isinstance(found, dict) else None  # type: ignore[assignment]
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise MalformedReply(url, "not exactly one choice")
    return choices[0]


def _usage(found: Any, url: str) -> tuple[int, int]:
    """(Prompt tokens, those of them that came from the prefix cache)."""
    try:
        usage = found["usage"]
        return int(usage["prompt_tokens"]), int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
    except UNREADABLE as error:
        raise MalformedReply(url, f"usage that cannot be read: {error!r}") from None
