"""`Canary`: a proof that a server has the published weights.

Trainer and server compute log-probs of the same fixed sequences. They compute differently, so the last digits differ.
Weights that did not arrive, or only in part, differ by more. Two rules:

- The largest gap is at most the tolerance.
- The server is not nearer to an earlier version than to the new one. A small optimizer step moves log-probs by less
  than the tolerance that bfloat16 needs, but a server that missed it agrees far better with the old weights. The first
  version is kept, and later ones more sparsely with age. So a server that never loads anything is detected once all
  steps together have moved the log-probs by a few times the noise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pvg.errors import TrainingDivergedError, WeightsNotArrivedError
from pvg.records import Float32, Int32
from pvg.telemetry.spans import run_in

if TYPE_CHECKING:
    from torch import Tensor

    from pvg.models.language_model import LanguageModel

# Measured with vLLM on a CPU: 1e-5 nats in float32; 0.3 in bfloat16 (SmolLM2-135M) for improbable tokens, because
# bfloat16 keeps 8 bits of logits that reach 30.
TOLERANCE = {"float32": 0.02, "bfloat16": 1.0}
NEARER = 4.0  # a server counts as stale if it is this many times nearer to an old version
NOISE = 1e-4  # mean difference in nats below which the second rule does not apply
NEW_TOKENS = 16  # greedy tokens after each prompt
EARLIER = 16  # number of remembered versions


@dataclass(frozen=True, slots=True)
class ExpectedLogprobs:
    """The trainer's log-probs of the sequences, float32 [L - 1] each in nats, and those of `earlier` versions, oldest
    first. `moved`: the largest change since the previous version."""

    version: int
    logprobs: tuple[Float32, ...]
    earlier: tuple[tuple[int, tuple[Float32, ...]], ...]
    moved: float


class Canary:
    """`sequences` int32 [L] each. `reference` computes the trainer's log-probs from tensors, in `executor`."""

    def __init__(
        self,
        sequences: Callable[[], Sequence[Int32]],
        reference: Callable[[Mapping[str, Tensor], Sequence[Int32]], list[Float32]],
        executor: Executor,
        tolerance: float,
    ) -> None:
        self._make = sequences
        self._reference = reference
        self._executor = executor
        self.tolerance = tolerance
        self.sequences: tuple[Int32, ...] = ()
        self._earlier: list[tuple[int, tuple[Float32, ...]]] = []

    async def expect(self, tensors: Mapping[str, Tensor], version: int) -> ExpectedLogprobs:
        """The log-probs that servers must have under `tensors`. Raises TrainingDivergedError if they are not finite."""
        if not self.sequences:
            self.sequences = tuple(await run_in(self._executor, self._make))
        found = tuple(await run_in(self._executor, self._reference, tensors, self.sequences))
        if not all(np.isfinite(logprobs).all() for logprobs in found):
            raise TrainingDivergedError(
                f"Version {version} of the weights gives log-probs that are not finite.",
                "Resume from the last commit with a lower learning rate.",
            )
        earlier = tuple(self._earlier)
        self._earlier = _thinned([*self._earlier, (version, found)])
        return ExpectedLogprobs(version, found, earlier, _largest(found, earlier[-1][1]) if earlier else 0.0)

    def check(self, server: str, expected: ExpectedLogprobs, found: Sequence[Float32]) -> float:
        """Returns the largest gap in nats. Raises WeightsNotArrivedError with the server and the version."""
        gap = _largest(expected.logprobs, found)
        if not gap <= self.tolerance:  # also true for NaN
            raise WeightsNotArrivedError(
                f"{server} does not have version {expected.version} of the weights: its log-probs differ from the "
                f"trainer's by up to {gap:.3g} nats (tolerance {self.tolerance:g}).",
                "Restart the server with the experiment's model. If the model is right, see weights.canary_tolerance.",
            )
        distance = _mean(expected.logprobs, found)
        for version, logprobs in expected.earlier:
            if distance > NOISE and NEARER * _mean(logprobs, found) < distance:
                raise WeightsNotArrivedError(
                    f"{server} has version {version} of the weights, or one near it, instead of {expected.version}: "
                    f"its log-probs are {distance:.2g} nats from the new ones, {_mean(logprobs, found):.2g} from it.",
                    "Restart the server, then continue with --resume.",
                )
        return gap


def _thinned(versions: list[tuple[int, tuple[Float32, ...]]]) -> list[tuple[int, tuple[Float32, ...]]]:
    """At most EARLIER versions: the first, the newest half, and every second one in between."""
    if len(versions) <= EARLIER:
        return versions
    half = EARLIER // 2
    return [versions[0], *versions[1:-half][1::2], *versions[-half:]]


def greedy_sequences(model: LanguageModel, prompts: Sequence[Int32]) -> list[Int32]:
    """Each prompt with up to NEW_TOKENS greedy tokens of the model, as far as its context allows."""
    import torch

    found = []
    with torch.inference_mode():
        for prompt in prompts:
            ids, cache = prompt.tolist(), None
            for _ in range(min(NEW_TOKENS, model.max_length - len(prompt) - 1)):
                fresh = ids if cache is None else ids[-1:]
                output = model.module(
                    input_ids=torch.tensor([fresh], device=model.device), past_key_values=cache, use_cache=True
                )
                cache = output.past_key_values
                ids.append(int(output.logits[0, -1].argmax()))
            found.append(np.asarray(ids, dtype=np.int32))
    return found


def reference_logprobs(
    model: LanguageModel, dtype: str, tensors: Mapping[str, Tensor], sequences: Sequence[Int32]
) -> list[Float32]:
    """Log-probs of ids[1:] of each sequence under `tensors`, float32 [L - 1] each. Uses the architecture of `model`,
    but neither uses nor changes its weights.

    Tensors are first rounded to the servers' `dtype`, so remaining differences come only from the computation.
    """
    import torch
    from torch.func import functional_call

    served = getattr(torch, dtype)
    placed = {name: tensor.to(served).to(model.device, model.dtype) for name, tensor in tensors.items()}
    found = []
    with torch.inference_mode():
        for sequence in sequences:
            ids_L = torch.from_numpy(sequence.astype(np.int64)).to(model.device)
            logits_LV = functional_call(model.module, placed, (), {"input_ids": ids_L[None]}).logits[0].float()
            chosen_L = logits_LV[:-1].log_softmax(-1).gather(1, ids_L[1:, None])[:, 0]
            found.append(chosen_L.cpu().numpy())
    return found


def _largest(a: Sequence[Float32], b: Sequence[Float32]) -> float:
    return max(float(np.abs(x - y).max()) for x, y in zip(a, b, strict=True))


def _mean(a: Sequence[Float32], b: Sequence[Float32]) -> float:
    return float(np.concatenate([np.abs(x - y) for x, y in zip(a, b, strict=True)]).mean())
