"""Preference pairs as views: two row numbers of one problem, drawn on demand and never stored.

Invariants: memory grows with the rows (a few bytes each), not with the pairs that they could form. A draw depends only
on the seed, the step and n, so a resumed run needs no stream position.

Shape suffixes: R rows of a view, C cells (the rows of one source, problem and label), B problems that can be paired,
M pairs, N single rows.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pvg.errors import ConfigurationError, StateError
from pvg.records import Float32, Int32
from pvg.store.samples import MappedSolutions, SolutionRow
from pvg.store.shards import RolloutShards, ShardInfo

Int64 = NDArray[np.int64]
Int16 = NDArray[np.int16]
Bool = NDArray[np.bool_]

# Part of the random seeds, so that pairs, single rows and problems of one step are drawn independently.
PAIR_DRAWS, SINGLE_DRAWS, PROBLEM_DRAWS = 0, 1, 2


class MissingPairsError(StateError):
    """The stored rollouts cannot form a pair (or a balanced batch). The message has the counts of each kind."""


@dataclass(frozen=True, slots=True)
class Pairs:
    """M pairs: row numbers of the view, and the source of both rows as an index into `PairView.sources`. `shares_M`:
    the weight of each pair relative to the others; None: equal weights."""

    correct_rows_M: Int64
    incorrect_rows_M: Int64
    sources_M: Int16
    shares_M: Float32 | None = None


@dataclass(frozen=True, slots=True)
class Singles:
    """N single rows, alternately correct and incorrect; sources as in Pairs."""

    rows_N: Int64
    correct_N: Bool
    sources_N: Int16


class PairView:
    """The labelled rows of some shards, memory-mapped and verified against their checksums.

    Row numbers count the rows of `infos` and then of `more`, in their order, before any filter. So they mean the same
    under every filter. `keep` selects problems by id. Arrays over the R selected rows: `rows_R` int64 row numbers,
    `correct_R` bool, `problems_R` int32 and `sources_R` int16 indices into `problem_ids` and `sources`. Raises
    DamagedFileError.
    """

    def __init__(
        self,
        shards: RolloutShards,
        infos: Sequence[ShardInfo],
        *,
        keep: Callable[[str], bool] = lambda _: True,
        more: Sequence[MappedSolutions] = (),
    ) -> None:
        self._shards: list[MappedSolutions] = [*(shards.solutions(info) for info in infos), *more]
        batches = [shard.batch for shard in self._shards]
        self._starts = np.cumsum([0, *(batch.num_rows for batch in batches)], dtype=np.int64)
        problems_R, self.problem_ids = _shared_codes(batches, "problem_id")
        sources_R, self.sources = _shared_codes(batches, "source")
        kept_R = np.array([keep(name) for name in self.problem_ids], np.bool_)[problems_R]
        self.rows_R = np.flatnonzero(kept_R).astype(np.int64)
        self.problems_R, self.sources_R = problems_R[kept_R], sources_R[kept_R].astype(np.int16)
        self.correct_R = _flags(batches, "correct")[kept_R]

    def rows(self, indices: Int64, *, alone: bool = False) -> list[SolutionRow]:
        """The solutions with these row numbers, in this order, read from the memory map. `alone`: as they were before
        others spoke. Raises IndexError for a number without a row."""
        wanted = np.asarray(indices, np.int64)
        if wanted.size and not (wanted.min() >= 0 and wanted.max() < self._starts[-1]):
            raise IndexError(f"Row numbers run from 0 to {self._starts[-1] - 1}.")
        shard_of = np.searchsorted(self._starts, wanted, side="right") - 1
        places = (wanted - self._starts[shard_of]).tolist()
        read = MappedSolutions.opening if alone else MappedSolutions.row
        return [read(self._shards[shard], place) for shard, place in zip(shard_of.tolist(), places, strict=True)]

    def close(self) -> None:
        """Release the memory maps: `rows` then has no rows, but the arrays stay."""
        self._shards, self._starts = [], np.zeros(1, np.int64)


class PairStream:
    """Draws rows of a view by source weight.

    `weights_by_source` need not sum to 1; sources without a weight are never drawn. A source without a problem that has
    both kinds cannot form pairs. It is left out, `excluded` has its counts by name, and the other weights are scaled
    up. `excluded_singles` has the same for `balanced_singles`, which needs both kinds, but not of one problem. `alone`:
    see `PairView.rows`. Raises ConfigurationError for a weight that is negative or not a number, MissingPairsError if
    no source can give anything.
    """

    def __init__(self, view: PairView, weights_by_source: Mapping[str, float], seed: int, alone: bool = False) -> None:
        for name, weight in weights_by_source.items():
            if not (math.isfinite(weight) and weight >= 0):
                raise ConfigurationError(f"The weight of source {name!r} is {weight}; it must be 0 or more.")
        weighted = {name: weight for name, weight in weights_by_source.items() if weight > 0}
        self._view, self._alone = view, alone
        self._seed = seed
        self._cells = _Cells.of(view)
        self._counts = {name: _counts(view, name) for name in weighted}
        pairable = dict(zip(view.sources, np.diff(self._cells.pair_ranges_S).tolist(), strict=True))
        self._pair_weights_S = _weights(view.sources, {k: v for k, v in weighted.items() if pairable.get(k, 0)})
        self._single_weights_S = _weights(view.sources, {k: v for k, v in weighted.items() if min(self._counts[k]) > 0})
        self.excluded = self._left_out(view.sources, self._pair_weights_S)
        self.excluded_singles = self._left_out(view.sources, self._single_weights_S)
        if not self._single_weights_S.any():
            raise self._missing("no source has both kinds")

    @property
    def pairs_available(self) -> int:
        """The number of different pairs that the weighted sources can form."""
        cells = self._cells
        drawn_B = self._pair_weights_S[cells.pair_sources_B] > 0
        products_B = cells.sizes_C[cells.pair_cells_B2[:, 0]] * cells.sizes_C[cells.pair_cells_B2[:, 1]]
        return int(products_B[drawn_B].sum())

    def draw(self, step: int, n: int) -> Pairs:
        """n pairs: a source by weight, a problem of it that has both kinds, one row of each kind, each uniformly.

        Raises MissingPairsError if no source has a problem with both kinds.
        """
        if not self._pair_weights_S.any():
            raise self._missing("no problem has both kinds from one source")
        generator, cells = self._generator(step, PAIR_DRAWS), self._cells
        sources_M = _choose(generator, self._pair_weights_S, n)
        first_M, end_M = cells.pair_ranges_S[sources_M], cells.pair_ranges_S[sources_M + 1]
        cells_M2 = cells.pair_cells_B2[generator.integers(first_M, end_M)]
        correct_M, incorrect_M = (cells.draw_rows(generator, cells_M2[:, kind]) for kind in (0, 1))
        return Pairs(correct_M, incorrect_M, sources_M.astype(np.int16))

    def problems_for(self, pairs: int, solutions: int) -> int:
        """The number of problems that `draw_problems` needs for `pairs` pairs on average, given `solutions`."""
        cells, weights_S = self._cells, self._pair_weights_S
        taken_B2 = _taken(cells.sizes_C[cells.pair_cells_B2], solutions)
        sums_S = np.bincount(cells.pair_sources_B, weights=taken_B2.prod(axis=1), minlength=len(weights_S))
        mean = float((weights_S * sums_S / np.maximum(np.diff(cells.pair_ranges_S), 1)).sum())
        return max(1, round(pairs / mean)) if mean else 1

    def draw_problems(self, step: int, problems: int, solutions: int) -> Pairs:
        """All pairs of each of `problems` problems, with at most `solutions` solutions of each problem.

        A problem is as likely as in `draw`, but repeats only when its source has no other left. The number of solutions
        of each kind gives the most pairs; they are drawn uniformly. The pairs of each problem have the same total
        weight. So a mean over these pairs has the same expectation as over those of `draw`. Raises MissingPairsError in
        the same cases.
        """
        if not self._pair_weights_S.any():
            raise self._missing("no problem has both kinds from one source")
        generator, cells = self._generator(step, PROBLEM_DRAWS), self._cells
        counts_S = np.bincount(_choose(generator, self._pair_weights_S, problems), minlength=len(self._pair_weights_S))
        firsts, sizes = cells.pair_ranges_S[:-1].tolist(), np.diff(cells.pair_ranges_S).tolist()
        drawn = [
            first + _distinct(generator, size, count)
            for first, size, count in zip(firsts, sizes, counts_S.tolist(), strict=True)
        ]
        problems_K = np.concatenate(drawn)
        cells_K2 = cells.pair_cells_B2[problems_K]
        taken_K2 = _taken(cells.sizes_C[cells_K2], solutions)
        rows = cells.draw_subsets(generator, cells_K2.reshape(-1), taken_K2.reshape(-1))
        starts_K2 = (np.cumsum(taken_K2) - taken_K2.reshape(-1)).reshape(-1, 2)
        pairs_K = taken_K2.prod(axis=1)
        problem_M = np.repeat(np.arange(len(problems_K)), pairs_K)
        number_M = np.arange(len(problem_M)) - np.repeat(np.cumsum(pairs_K) - pairs_K, pairs_K)
        correct_M, incorrect_M = np.divmod(number_M, taken_K2[problem_M, 1])
        return Pairs(
            rows[starts_K2[problem_M, 0] + correct_M],
            rows[starts_K2[problem_M, 1] + incorrect_M],
            cells.pair_sources_B[problems_K[problem_M]].astype(np.int16),
            (1.0 / pairs_K[problem_M]).astype(np.float32),
        )

    def rows(self, indices: Int64) -> list[SolutionRow]:
        """The solutions with these row numbers of the view, in this order."""
        return self._view.rows(indices, alone=self._alone)

    def balanced_singles(self, step: int, n: int) -> Singles:
        """n single rows (n even), half of them correct: a source by weight, a problem of it with that kind, a row."""
        if n % 2:
            raise ValueError(f"A balanced batch needs as many correct as incorrect rows, but {n} is odd.")
        generator, cells = self._generator(step, SINGLE_DRAWS), self._cells
        correct_N = np.arange(n) % 2 == 0
        sources_N = _choose(generator, self._single_weights_S, n)
        place_N = 2 * sources_N + np.where(correct_N, 0, 1)
        cells_N = generator.integers(cells.ranges_K[place_N], cells.ranges_K[place_N + 1])
        return Singles(cells.draw_rows(generator, cells_N), correct_N, sources_N.astype(np.int16))

    def _generator(self, step: int, kind: int) -> np.random.Generator:
        return np.random.Generator(np.random.PCG64(np.random.SeedSequence((self._seed, kind, step))))

    def _left_out(self, sources: Sequence[str], weights_S: NDArray[np.float64]) -> dict[str, str]:
        """Source name -> its counts, for sources that have a weight but cannot be drawn."""
        drawn = {name for name, weight in zip(sources, weights_S, strict=True) if weight > 0}
        return {
            name: f"{correct} correct and {incorrect} incorrect solutions"
            for name, (correct, incorrect) in self._counts.items()
            if name not in drawn
        }

    def _missing(self, reason: str) -> MissingPairsError:
        counts = "; ".join(f"{name}: {yes} correct, {no} incorrect" for name, (yes, no) in self._counts.items())
        return MissingPairsError(
            f"The verifier has nothing to compare: {reason} ({counts or 'no source has a weight'}).",
            "Mint more solutions per problem (game.mint_samples, game.mint_problems), change the task's difficulty, or "
            "show the prover some solutions first ([warmup]).",
        )


def is_held_out(problem_id: str, share: float) -> bool:
    """Whether a problem belongs to the held-out `share` (0 to 1). Decided by hash, so equal in every round and run."""
    digest = hashlib.sha256(f"held-out:{problem_id}".encode()).digest()
    return int.from_bytes(digest[:8]) < share * 2**64


@dataclass(frozen=True, slots=True)
class _Cells:
    """Rows sorted into cells (source, kind, problem; kind 0 is correct), and the problems that can be paired.

    `rows_R` has the view's row numbers in cell order; cell c has `sizes_C[c]` of them from `starts_C[c]` on. The cells
    of source s and kind k are `ranges_K[2s + k]` to `ranges_K[2s + k + 1]`. `pair_cells_B2` has the two cells (correct,
    incorrect) of each problem that can be paired; those of source s = `pair_sources_B` are `pair_ranges_S[s]` to
    `pair_ranges_S[s + 1]`.
    """

    rows_R: Int64
    starts_C: Int64
    sizes_C: Int64
    ranges_K: Int64
    pair_cells_B2: Int64
    pair_sources_B: Int64
    pair_ranges_S: Int64

    @classmethod
    def of(cls, view: PairView) -> _Cells:
        problems, sources = max(1, len(view.problem_ids)), len(view.sources)
        kinds_R = np.where(view.correct_R, 0, 1)
        keys_R = (view.sources_R.astype(np.int64) * 2 + kinds_R) * problems + view.problems_R
        order_R = np.argsort(keys_R, kind="stable")
        keys_C, starts_C, sizes_C = np.unique(keys_R[order_R], return_index=True, return_counts=True)
        places_C, problems_C = np.divmod(keys_C, problems)
        sources_C, kinds_C = np.divmod(places_C, 2)
        ranges_K = np.searchsorted(places_C, np.arange(2 * sources + 1))
        of_kind = [np.flatnonzero(kinds_C == kind) for kind in (0, 1)]
        correct, incorrect = (sources_C[cells] * problems + problems_C[cells] for cells in of_kind)
        both_B, *at = np.intersect1d(correct, incorrect, assume_unique=True, return_indices=True)
        pair_sources_B = both_B // problems
        return cls(
            rows_R=view.rows_R[order_R],
            starts_C=starts_C,
            sizes_C=sizes_C,
            ranges_K=ranges_K,
            pair_cells_B2=np.stack([of_kind[0][at[0]], of_kind[1][at[1]]], axis=1),
            pair_sources_B=pair_sources_B,
            pair_ranges_S=np.searchsorted(pair_sources_B, np.arange(sources + 1)),
        )

    def draw_rows(self, generator: np.random.Generator, cells_M: Int64) -> Int64:
        """One row of each of these cells, uniformly."""
        rows_M: Int64 = self.rows_R[self.starts_C[cells_M] + generator.integers(0, self.sizes_C[cells_M])]
        return rows_M

    def draw_subsets(self, generator: np.random.Generator, cells_K: Int64, counts_K: Int64) -> Int64:
        """`counts_K[k]` different rows of cell `cells_K[k]`, uniformly, concatenated."""
        sizes_K = self.sizes_C[cells_K]
        place_T = np.repeat(np.arange(len(cells_K)), sizes_K)
        rank_T = np.arange(len(place_T)) - np.repeat(np.cumsum(sizes_K) - sizes_K, sizes_K)
        # Each cell's rows in random order; the first ones are taken.
        order_T = np.lexsort((generator.random(len(place_T)), place_T))
        numbers_T = (self.starts_C[cells_K][place_T] + rank_T)[order_T]
        rows: Int64 = self.rows_R[numbers_T[rank_T < counts_K[place_T]]]
        return rows


def _choose(generator: np.random.Generator, weights_S: NDArray[np.float64], n: int) -> Int64:
    """n indices with probabilities `weights_S` (which sum to 1)."""
    bounds_S = np.cumsum(weights_S)
    # The last bound may round to slightly less or more than 1; scaling by it keeps every draw in range.
    found_M: Int64 = np.searchsorted(bounds_S, generator.random(n) * bounds_S[-1], side="right")
    return found_M


def _distinct(generator: np.random.Generator, n: int, count: int) -> Int64:
    """`count` of the numbers below n; the frequencies of any two differ by at most one."""
    rest = generator.choice(n, count % n, replace=False) if count else np.empty(0, np.int64)
    return np.concatenate([np.tile(np.arange(n), count // n if count else 0), rest])


def _taken(sizes_B2: Int64, solutions: int) -> Int64:
    """How many solutions of each kind to take from problems with these (correct, incorrect) counts, at most `solutions`
    in all. This gives the most pairs: half and half, or all of the rarer kind and the rest of the other."""
    rarer_B = np.minimum(sizes_B2.min(axis=1), solutions // 2)
    other_B = np.minimum(sizes_B2.max(axis=1), solutions - rarer_B)
    correct_is_rarer_B = sizes_B2[:, 0] <= sizes_B2[:, 1]
    found_B2: Int64 = np.where(
        correct_is_rarer_B[:, None], np.stack([rarer_B, other_B], axis=1), np.stack([other_B, rarer_B], axis=1)
    )
    return found_B2


def _weights(sources: Sequence[str], weights: Mapping[str, float]) -> NDArray[np.float64]:
    """Probabilities by source index; all 0 without any weight."""
    weights_S = np.array([weights.get(name, 0.0) for name in sources], np.float64)
    return weights_S / weights_S.sum() if weights_S.any() else weights_S


def _counts(view: PairView, source: str) -> tuple[int, int]:
    if source not in view.sources:
        return 0, 0
    of_source_R = view.sources_R == view.sources.index(source)
    correct = int(np.count_nonzero(view.correct_R & of_source_R))
    return correct, int(np.count_nonzero(of_source_R)) - correct


def _shared_codes(batches: Sequence[pa.RecordBatch], name: str) -> tuple[Int32, tuple[str, ...]]:
    """A column of shared strings over all shards: int32 index per row, and the strings in order of appearance."""
    codes: dict[str, int] = {}
    parts = [np.empty(0, np.int32)]
    for batch in batches:
        column = batch.column(name)
        of_shard = np.array([codes.setdefault(word, len(codes)) for word in column.dictionary.to_pylist()], np.int32)
        parts.append(of_shard[column.indices.to_numpy()])
    return np.concatenate(parts), tuple(codes)


def _flags(batches: Sequence[pa.RecordBatch], name: str) -> Bool:
    return np.concatenate(
        [np.empty(0, np.bool_), *(batch.column(name).to_numpy(zero_copy_only=False) for batch in batches)]
    )
