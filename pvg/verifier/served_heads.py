"""Verifier heads on vLLM servers: the weights to publish, the request, and how to read the reply.

    scalar      /classify                  the logit w . h of the last token, in float32 without activation
    implicit    /inference/v1/generate     the log-prob of every token of the input

This module adds bias, beta and the comparison with the reference. Invariant: a reply that lacks a number raises
MalformedReply, and never becomes part of a score.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from pvg.config.verifier import LogprobHead, Verifier
from pvg.errors import ConfigurationError
from pvg.models.heads import ImplicitHead, ScalarHead, VerifierModel
from pvg.models.logprobs import completion_logprobs
from pvg.records import Float32
from pvg.rollout.vllm_wire import GENERATE, UNSAMPLABLE, prompt_scoring, read_prompt_logprobs
from pvg.servers.pool import MalformedReply
from pvg.servers.publishing import salt
from pvg.verifier.backend import ScoreInput

CLASSIFY = "/classify"
BACKBONE = "backbone."  # prefix of the backbone's names in VerifierModel.trainable_state
SCORE = "score.weight"  # name in a *ForSequenceClassification checkpoint


@dataclass(frozen=True, slots=True)
class ServedValues:
    """A server's reply: float32 values for each input, and the label of its weights if the route reports it."""

    values: list[Float32]
    label: str | None


class ServedHead(Protocol):
    """How servers compute one head. A request has at most `inputs_per_request` inputs, each with room for
    `extra_tokens` more tokens."""

    runner: Literal["generate", "pooling"]
    route: str
    inputs_per_request: int
    extra_tokens: int

    def tensors(self, model: VerifierModel) -> dict[str, Tensor]:
        """The weights for servers to compute this version of the verifier, by the names of their checkpoint."""
        ...

    def body(self, inputs: Sequence[ScoreInput], label: str) -> dict[str, Any]:
        """The request body, for a server whose weights have `label`."""
        ...

    def read(self, found: Any, inputs: Sequence[ScoreInput], url: str) -> ServedValues:
        """Parse a reply. Raises MalformedReply."""
        ...

    def expected(self, model: VerifierModel, inputs: Sequence[ScoreInput]) -> list[Float32]:
        """The values that a server with the model's weights returns, computed by torch in this thread."""
        ...

    def scores(self, values: Sequence[Float32], references_N: Float32, bias: float) -> Float32:
        """float32 [N]. The references are 0 for a head without one."""
        ...


class ServedScalar:
    """[X]ForSequenceClassification with one label: its score is a linear layer without bias."""

    runner: Literal["generate", "pooling"] = "pooling"
    route = CLASSIFY
    inputs_per_request = 16  # a request may have any number; small ones let several servers share the work
    extra_tokens = 0

    def tensors(self, model: VerifierModel) -> dict[str, Tensor]:
        assert isinstance(model, ScalarHead)
        tensors = _backbone(model.trainable_state())
        # The classifier's only head tensor is `score.weight`. A tied head is the embedding, which the backbone
        # contains; a separate frozen head is not in the trainable state.
        tensors[SCORE] = model.weight_D.detach()[None]
        return tensors

    def body(self, inputs: Sequence[ScoreInput], label: str) -> dict[str, Any]:
        return {
            "input": [entry.ids for entry in inputs],
            "use_activation": False,
            "add_special_tokens": False,
            "cache_salt": salt(label),
        }

    def read(self, found: Any, inputs: Sequence[ScoreInput], url: str) -> ServedValues:
        rows = found.get("data") if isinstance(found, dict) else None
        if not isinstance(rows, list) or len(rows) != len(inputs):
            raise MalformedReply(url, f"not {len(inputs)} scores")
        values: dict[int, Float32] = {}
        for row in rows:
            try:
                number, (logit,) = int(row["index"]), row["probs"]
                values[number] = np.array([float(logit)], dtype=np.float32)
            except (KeyError, TypeError, ValueError) as error:
                raise MalformedReply(url, f"a score that cannot be read: {error!r}") from None
        if values.keys() != set(range(len(inputs))):
            raise MalformedReply(url, "scores of other inputs than were sent")
        return ServedValues([values[number] for number in range(len(inputs))], None)

    def expected(self, model: VerifierModel, inputs: Sequence[ScoreInput]) -> list[Float32]:
        assert isinstance(model, ScalarHead)
        with torch.inference_mode():
            return [(model(*_row(entry, model.device)) - model.bias).cpu().numpy() for entry in inputs]

    def scores(self, values: Sequence[Float32], references_N: Float32, bias: float) -> Float32:
        return np.concatenate(values) + np.float32(bias)


class ServedImplicit:
    """[X]ForCausalLM: uses the log-probs of the solution's tokens."""

    runner: Literal["generate", "pooling"] = "generate"
    route = GENERATE
    inputs_per_request = 1
    extra_tokens = 1  # vLLM requires at least one sampled token

    def __init__(self, beta: float) -> None:
        self._beta = np.float32(beta)

    def tensors(self, model: VerifierModel) -> dict[str, Tensor]:
        return _backbone(model.trainable_state())

    def body(self, inputs: Sequence[ScoreInput], label: str) -> dict[str, Any]:
        (entry,) = inputs
        return prompt_scoring(entry.ids, salt=salt(label), model=None)

    def read(self, found: Any, inputs: Sequence[ScoreInput], url: str) -> ServedValues:
        (entry,) = inputs
        logprobs, label = read_prompt_logprobs(found, entry.ids, url)
        solution = logprobs[entry.prompt_length - 1 :]
        return ServedValues([np.where(solution <= UNSAMPLABLE, np.float32(-np.inf), solution)], label)

    def expected(self, model: VerifierModel, inputs: Sequence[ScoreInput]) -> list[Float32]:
        assert isinstance(model, ImplicitHead)
        assert model.backbone is not None
        return [_solution_logprobs(model.backbone, model.device, entry) for entry in inputs]

    def expected_of_start(self, model: VerifierModel, inputs: Sequence[ScoreInput]) -> list[Float32]:
        """Like `expected`, for a server with the verifier's untrained start."""
        assert isinstance(model, ImplicitHead)
        return [_solution_logprobs(model.start, model.device, entry) for entry in inputs]

    def sums(self, values: Sequence[Float32]) -> Float32:
        """float32 [N], summed in float64."""
        return np.array([value.sum(dtype=np.float64) for value in values], dtype=np.float32)

    def scores(self, values: Sequence[Float32], references_N: Float32, bias: float) -> Float32:
        return self._beta * (self.sums(values) - references_N) + np.float32(bias)


def _implicit(section: Verifier) -> ServedImplicit:
    assert isinstance(section.head, LogprobHead)
    return ServedImplicit(section.head.beta)


SERVED_HEADS: dict[str, Callable[[Verifier], ServedScalar | ServedImplicit]] = {
    "scalar": lambda section: ServedScalar(),
    "implicit": _implicit,
}


def served_head(section: Verifier) -> ServedScalar | ServedImplicit:
    """The served form of the verifier's head. Raises ConfigurationError if servers cannot compute the head."""
    if section.head.kind not in SERVED_HEADS:
        raise ConfigurationError(
            f"verifier.head = {section.head.kind!r} runs only with torch; vLLM does not support it.",
            "Set verifier.engine to 'torch', or verifier.head to 'implicit' or 'scalar'.",
        )
    return SERVED_HEADS[section.head.kind](section)


def _backbone(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(BACKBONE): tensor for name, tensor in state.items() if name.startswith(BACKBONE)}


def _solution_logprobs(module: nn.Module, device: torch.device, entry: ScoreInput) -> Float32:
    with torch.inference_mode():
        logprobs_1L = completion_logprobs(module, *_row(entry, device))
    found: Float32 = logprobs_1L[0, entry.prompt_length :].cpu().numpy()
    return found


def _row(entry: ScoreInput, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    ids_1L = torch.from_numpy(entry.ids.astype(np.int64)).to(device)[None]
    lengths_1 = torch.tensor([len(entry.ids)], device=device)
    return ids_1L, lengths_1, torch.tensor([entry.prompt_length], device=device)
