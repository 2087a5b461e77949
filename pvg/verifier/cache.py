"""The score cache: a bounded LRU cache of scores with counters."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pvg.records import Int32

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
