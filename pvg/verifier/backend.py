"""The parts of `VerifierScorer`: the `ScoreBackend` protocol below its queue, `TorchBackend`, and the score cache.

Invariant: a backend uses the weights that its verifier has when `submit` is called, or later ones. It cannot say which
ones, so the scorer discards work in flight when the weights change.

`Scorer` is the protocol that the game uses (rollouts in, scores out).
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pvg.models.compute import scoring_autocast
from pvg.models.packing import PaddedBatch, batches, pad_batch
from pvg.records import Float32, Int32, Scorable
from pvg.telemetry.spans import span, submit_in

if TYPE_CHECKING:
    from pvg.models.tokenizer import Tokenizer


class Scorer(Protocol):
    """Scores solutions, with one version of a verifier at a time."""

    @property
    def version(self) -> str:
        """Identifies the weights behind the scores."""
        ...

    async def score(self, rollouts: Sequence[Scorable]) -> Float32:
        """float32 [n], logits: the verifier's confidence that each rollout is correct."""
        ...


class ScoringModel(Protocol):
    """A verifier that can only score: one model (pvg.models.heads.VerifierModel documents the members) or an ensemble
    (pvg.models.ensembles.VerifierEnsemble)."""

    needs_reference: bool
    reads: Literal["scalar", "implicit", "yes_token"]

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def max_length(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def closed(self) -> bool: ...

    def __call__(
        self, input_ids_BL: Tensor, lengths_B: Tensor, prompt_lengths_B: Tensor, reference_B: Tensor | None = None
    ) -> Tensor: ...

    def reference(self, input_ids_BL: Tensor, lengths_B: Tensor, prompt_lengths_B: Tensor) -> Tensor: ...

    def version(self) -> str: ...

    def close(self) -> None: ...


DIGEST_BYTES = 16


class ScoreKey(NamedTuple):
    """Everything that a score depends on (invariant 2): the verifier's version, the template, the tokens."""

    version: str
    template: str
    tokens: bytes


def digest_of(ids: Int32, prompt_length: int) -> bytes:
    """16 bytes that identify token ids int32 [L] and the start of the solution in them."""
    digest = hashlib.blake2b(np.ascontiguousarray(ids, dtype="<i4").tobytes(), digest_size=DIGEST_BYTES)
    digest.update(prompt_length.to_bytes(8, "little"))
    return digest.digest()


class ScoreCache:
    """The `capacity` most recently used scores. Counts hits, misses and evictions. One thread may call `entries` while
    another gets and puts."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"a cache needs a capacity of at least 1, not {capacity}")
        self._capacity = capacity
        self._scores: OrderedDict[ScoreKey, float] = OrderedDict()
        self._changing = threading.Lock()  # a commit reads the entries in a thread
        self.hits = 0
        self.misses = 0
        self.evictions = 0

    def __len__(self) -> int:
        return len(self._scores)

    def get(self, key: ScoreKey) -> float | None:
        score = self._scores.get(key)
        if score is None:
            self.misses += 1
            return None
        self.hits += 1
        with self._changing:
            self._scores.move_to_end(key)
        return score

    def put(self, key: ScoreKey, score: float) -> None:
        with self._changing:
            self._scores[key] = score
            self._scores.move_to_end(key)
            if len(self._scores) > self._capacity:
                self._scores.popitem(last=False)
                self.evictions += 1

    def clear(self) -> None:
        """Remove all scores; the counters stay."""
        self._scores.clear()

    def entries(self) -> tuple[NDArray[np.uint8], NDArray[np.float64]]:
        """Input for `restore`: the tokens' digests uint8 [n, 16] and the scores float64 [n], oldest first.

        Requires that all entries have one version and one template, as in a scorer.
        """
        with self._changing:
            kept = list(self._scores.items())
        digests_N = np.frombuffer(b"".join(key.tokens for key, _ in kept), dtype=np.uint8)
        return digests_N.reshape(-1, DIGEST_BYTES), np.fromiter((score for _, score in kept), np.float64, len(kept))

    def restore(self, version: str, template: str, digests: NDArray[np.uint8], scores: NDArray[np.float64]) -> None:
        """Replace the contents by `entries` of another cache, the newest ones if not all fit; the counters stay."""
        keys = (ScoreKey(version, template, digest.tobytes()) for digest in digests[-self._capacity :])
        self._scores = OrderedDict(zip(keys, scores[-self._capacity :].tolist(), strict=True))


@dataclass(frozen=True, slots=True, eq=False)
class ScoreInput:
    """A solution in the verifier's input format: `ids` int32 [L], the solution starts at `prompt_length`; `digest`
    identifies them; `rollout_id` is for messages."""

    ids: Int32
    prompt_length: int
    digest: bytes
    rollout_id: str


@dataclass(frozen=True, slots=True)
class ScoredBatch:
    """The result of a batch: scores float32 [n], and its number of forward passes or server requests."""

    scores: Float32
    passes: int = 1


class ScoreBackend(Protocol):
    """Computes the scores of one verifier. `references`: values of solutions that do not depend on its version."""

    references: ScoreCache

    def batches(self, lengths: Sequence[int]) -> list[NDArray[np.int64]]:
        """Splits inputs of these lengths: the row numbers of each batch for `submit`, in order."""
        ...

    def weights_changed(self) -> None:
        """Tells the backend that the verifier's weights have changed."""
        ...

    def submit(self, inputs: Sequence[ScoreInput]) -> asyncio.Future[ScoredBatch]:
        """Start a batch. The caller waits for it before the next one. If the future is a Task, the caller may cancel
        it; it then ends when nothing uses the model any more."""
        ...


class TorchBackend:
    """Runs forward passes of `model` in the executor's thread. The caller owns the model. `precision`: of the passes
    on a GPU (pvg.models.compute.scoring_autocast)."""

    def __init__(
        self,
        model: ScoringModel,
        template_key: str,
        references: ScoreCache,
        *,
        token_budget: int,
        executor: Executor,
        precision: str = "float32",
    ) -> None:
        self.references = references  # used only by the forward pass, of which there is one at a time
        self._model = model
        self._template_key = template_key
        self._token_budget = token_budget
        self._executor = executor
        self._precision = precision

    def batches(self, lengths: Sequence[int]) -> list[NDArray[np.int64]]:
        return batches(lengths, self._token_budget, self._model.max_length)

    def weights_changed(self) -> None:
        """Does nothing: the forward passes use the model itself."""

    def submit(self, inputs: Sequence[ScoreInput]) -> asyncio.Future[ScoredBatch]:
        return submit_in(self._executor, self._forward, inputs)

    def _forward(self, inputs: Sequence[ScoreInput]) -> ScoredBatch:
        """Runs in the executor's thread."""
        precise = scoring_autocast(self._precision, self._model.device)
        with torch.inference_mode(), span("score_service", device=True), precise:
            packed = pad_batch(
                [entry.ids for entry in inputs],
                [entry.prompt_length for entry in inputs],
                self._model.tokenizer.pad_id,
                self._model.device,
                token_budget=self._token_budget,
                max_length=self._model.max_length,
            )
            scores_B = self._model(*packed, self._reference(inputs, packed))
            scores: Float32 = scores_B[: len(inputs)].cpu().numpy()
        return ScoredBatch(scores)

    def _reference(self, inputs: Sequence[ScoreInput], packed: PaddedBatch) -> Tensor | None:
        """The head's references [B]. Computes none if all rows are in the cache; their version does not matter."""
        if not self._model.needs_reference:
            return None
        keys = [ScoreKey("", self._template_key, entry.digest) for entry in inputs]
        known = [self.references.get(key) for key in keys]
        if all(value is not None for value in known):
            repeated = known + known[:1] * (len(packed.lengths_B) - len(known))
            return torch.tensor(repeated, dtype=torch.float32, device=packed.ids_BL.device)
        reference_B = self._model.reference(*packed)
        for key, value in zip(keys, reference_B.tolist(), strict=False):
            self.references.put(key, value)
        return reference_B
