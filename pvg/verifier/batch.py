"""What a verifier step learns from: distinct solutions, and pairs of row numbers into them. numpy only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pvg.records import Float32, Int32


@dataclass(slots=True)
class VerifierBatch:
    """N distinct solutions in M pairs, each of one correct and one incorrect solution of a problem.

    `sequences[n]` int32 [L] is the verifier's input, whose solution begins at `prompt_lengths_N[n]`; `pairs_M2[m]` is
    (correct row, incorrect row); `references_N` float32 is VerifierModel.reference of the rows, None where the head
    needs none or shall compute it; `sources_M` int16 numbers each pair's source (a mixture's, an environment's).

    `shares_M` float32: how much a pair counts beside the others (above 0, of any scale); None: all alike.
    `pair_weights_M` and `row_weights_N` float32 make the loss a plain sum over pairs and rows; an objective's `prepare`
    fills them. Where pairs are trained on with other weights than they are counted with (pvg/verifier/robust.py),
    `loss_weights_M` multiply their losses and `slope_weights_M` their slopes. `step` is the one the batch is drawn for.

    Raises ValueError when the shapes do not fit, and for a pair whose sides have one label: a row that stands on both
    sides of pairs has no label at all.
    """

    sequences: Sequence[Int32]
    prompt_lengths_N: Int32
    pairs_M2: Int32
    references_N: Float32 | None
    sources_M: NDArray[np.int16]
    shares_M: Float32 | None = None
    pair_weights_M: Float32 | None = None
    row_weights_N: Float32 | None = None
    loss_weights_M: Float32 | None = None
    slope_weights_M: Float32 | None = None
    step: int = 0

    def __post_init__(self) -> None:
        rows, pairs = len(self.sequences), len(self.pairs_M2)
        expected = {
            "prompt_lengths_N": (self.prompt_lengths_N, (rows,)),
            "pairs_M2": (self.pairs_M2, (pairs, 2)),
            "references_N": (self.references_N, (rows,)),
            "sources_M": (self.sources_M, (pairs,)),
            "shares_M": (self.shares_M, (pairs,)),
            "pair_weights_M": (self.pair_weights_M, (pairs,)),
            "row_weights_N": (self.row_weights_N, (rows,)),
            "loss_weights_M": (self.loss_weights_M, (pairs,)),
            "slope_weights_M": (self.slope_weights_M, (pairs,)),
        }
        for name, (array, shape) in expected.items():
            if array is not None and array.shape != shape:
                raise ValueError(f"{name} has shape {array.shape}, not {shape}")
        if pairs and not (self.pairs_M2.min() >= 0 and self.pairs_M2.max() < rows):
            raise ValueError(f"pairs_M2 names rows outside 0..{rows - 1}")
        both = np.intersect1d(self.pairs_M2[:, 0], self.pairs_M2[:, 1])
        if both.size:
            raise ValueError(f"row {both[0]} is both correct and incorrect: a pair of one label carries no gradient")

    def __len__(self) -> int:
        """Pairs."""
        return len(self.pairs_M2)

    @property
    def lengths_N(self) -> NDArray[np.int64]:
        """Tokens of each row."""
        return np.fromiter((len(row) for row in self.sequences), dtype=np.int64, count=len(self.sequences))

    def with_weights(self, pair_weights_M: Float32, row_weights_N: Float32) -> VerifierBatch:
        return replace(self, pair_weights_M=pair_weights_M, row_weights_N=row_weights_N)

    def select(self, pairs: NDArray[np.int64]) -> VerifierBatch:
        """These pairs, in this order, with the rows they need, each once."""
        rows, numbers = np.unique(self.pairs_M2[pairs], return_inverse=True)

        def chosen(array: Float32 | None, places: NDArray[np.signedinteger[Any]]) -> Float32 | None:
            return None if array is None else array[places]

        return VerifierBatch(
            sequences=[self.sequences[row] for row in rows],
            prompt_lengths_N=self.prompt_lengths_N[rows],
            pairs_M2=numbers.reshape(-1, 2).astype(np.int32),
            references_N=chosen(self.references_N, rows),
            sources_M=self.sources_M[pairs],
            shares_M=chosen(self.shares_M, pairs),
            pair_weights_M=chosen(self.pair_weights_M, pairs),
            row_weights_N=chosen(self.row_weights_N, rows),
            loss_weights_M=chosen(self.loss_weights_M, pairs),
            slope_weights_M=chosen(self.slope_weights_M, pairs),
            step=self.step,
        )
