"""All stored solutions of a run: filtered, searched, sorted, and read page by page.

    index = RolloutIndex(run)
    index.extend(state["shards"])
    while index.read_more(seconds=2.0): ...
    places = index.find(RolloutQuery(role="sneaky", text="7+5"))
    index.rows(places[:50]), index.rollout(places[0])

The index holds about 45 bytes per solution. Texts stay in the shards, which are memory-mapped.

Invariants: a shard is verified once before anything of it is used. Nothing is written or locked.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pvg.records import Rollout
from pvg.store.atomic import DamagedFileError
from pvg.store.run_directory import RunDirectory
from pvg.store.samples import SampleColumns
from pvg.store.shards import RolloutShards, ShardInfo

Places = NDArray[np.int64]  # numbers of solutions, in the order of their commits

OPEN_SHARDS = 32  # mapped at once; each takes a file descriptor
KEPT_RESULTS = 8  # of the last queries, for their further pages
MOST_MATES = 64

RolloutGrade = Literal["correct", "wrong", "malformed", "flaw"]
RolloutOrder = Literal["newest", "oldest", "highest", "lowest", "longest", "shortest"]
ROLES = ("helpful", "sneaky")
# What the form calls the fields of a query whose names are other words.
FIELD_LABELS = {"first_step": "step from", "last_step": "step to", "lowest": "score from", "highest": "score to"}


@dataclass(frozen=True, slots=True)
class RolloutQuery:
    """Which solutions, in which order. Empty or None: all.

    `text`: a part of the solution or of the problem, in any case. `grade`: "flaw" is a wrong sneaky solution that is
    well formed (and proven, if its task requires that); "wrong" is any wrong solution that is well formed. `first_step`
    to `last_step` and `lowest` to `highest` (score) include their ends; solutions without a score are in no range.
    """

    text: str = ""
    role: str = ""
    grade: str = ""
    round: int | None = None
    phase: str = ""
    first_step: int | None = None
    last_step: int | None = None
    lowest: float | None = None
    highest: float | None = None
    order: str = "newest"

    @classmethod
    def of(cls, fields: Mapping[str, str]) -> tuple[RolloutQuery, list[str]]:
        """From the fields of a form, and sentences about those that cannot be used."""
        values: dict[str, Any] = {}
        problems: list[str] = []
        choices = {"role": ROLES, "grade": get_args(RolloutGrade), "order": get_args(RolloutOrder)}
        for name in cls.__dataclass_fields__:
            given = fields.get(name, "")
            if not given.strip():
                continue
            try:
                values[name] = _parsed(name, given, choices)
            except ValueError:
                problems.append(f"{FIELD_LABELS.get(name, name)}: {given[:40]!r} cannot be used, so it is left out.")
        return cls(**values), problems

    def fields(self) -> dict[str, str]:
        """The form's fields that differ from the defaults."""
        default = RolloutQuery()
        names = self.__dataclass_fields__
        return {name: str(getattr(self, name)) for name in names if getattr(self, name) != getattr(default, name)}


def _parsed(name: str, given: str, choices: Mapping[str, Sequence[str]]) -> str | int | float:
    if name in choices:
        if given not in choices[name]:
            raise ValueError(given)
        return given
    if name in ("round", "first_step", "last_step"):
        found = int(given)
        if not -(2**62) < found < 2**62:
            raise ValueError(given)
        return found
    if name in ("lowest", "highest"):
        value = float(given)
        if np.isnan(value):
            raise ValueError(given)
        return value
    return given.encode("utf-8", "replace").decode()  # without lone surrogates, which no shard contains


@dataclass(frozen=True, slots=True)
class RolloutRow:
    """A solution in a list. `address`: round, label of its shard, and row."""

    address: tuple[int, str, int]
    role: str
    correct: bool
    well_formed: bool
    flaw: bool
    phase: str
    step: int
    score: float | None
    tokens: int
    problem: str
    answer: str | None
    text: str

    @property
    def grade(self) -> RolloutGrade:
        return grade_word(correct=self.correct, well_formed=self.well_formed, flaw=self.flaw)


def grade_word(*, correct: bool, well_formed: bool, flaw: bool) -> RolloutGrade:
    """The narrowest grade that fits."""
    if not well_formed:
        return "malformed"
    return "correct" if correct else "flaw" if flaw else "wrong"


@dataclass(frozen=True, slots=True)
class _Columns:
    """N solutions. `shard_N` and `row_N` say where each is stored."""

    shard_N: NDArray[np.int32]
    row_N: NDArray[np.int32]
    helpful_N: NDArray[np.bool_]
    correct_N: NDArray[np.bool_]
    formed_N: NDArray[np.bool_]
    flaw_N: NDArray[np.bool_]
    round_N: NDArray[np.int32]
    phase_N: NDArray[np.int16]
    step_N: NDArray[np.int64]
    tokens_N: NDArray[np.int32]
    score_N: NDArray[np.float64]

    @classmethod
    def joined(cls, parts: Sequence[_Columns]) -> _Columns:
        names = cls.__dataclass_fields__
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


class _OnceVerified(RolloutShards):
    """Verifies each shard when it is first mapped. A shard never changes afterwards."""

    def __init__(self, run: RunDirectory) -> None:
        super().__init__(run.path)
        self._verified: set[str] = set()

    def verify(self, info: ShardInfo) -> None:
        if info.checksum not in self._verified:
            super().verify(info)
            self._verified.add(info.checksum)


@dataclass
class RolloutIndex:
    """The solutions of a run's commits. Use it from one thread at a time."""

    run: RunDirectory
    phases: list[str] = field(default_factory=list)  # in the order of their first solution
    problems: list[str] = field(default_factory=list)  # damaged shards

    def __post_init__(self) -> None:
        self.shards: RolloutShards = _OnceVerified(self.run)
        self._infos: list[ShardInfo] = []
        self._parts: list[_Columns] = []
        self._open: OrderedDict[str, pa.RecordBatch] = OrderedDict()
        self._results: OrderedDict[RolloutQuery, Places] = OrderedDict()
        self._joined: _Columns | None = None

    def extend(self, shards: Sequence[Mapping[str, Any]]) -> None:
        """Name the shards of the last commit. After a resume from an earlier commit, the index begins anew."""
        infos = [ShardInfo.from_plain(plain) for plain in shards]
        read = [info.checksum for info in self._infos[: len(self._parts)]]
        if [info.checksum for info in infos[: len(read)]] != read:
            self._parts.clear()
            self.problems.clear()
            self._forget()
        self._infos = infos

    def read_more(self, seconds: float) -> int:
        """Read the columns of shards that are not in the index yet, for about so long. Returns how many are left."""
        until = time.monotonic() + seconds
        while len(self._parts) < len(self._infos):
            number = len(self._parts)
            try:
                self._parts.append(self._columns(number))
            except DamagedFileError as error:
                self.problems.append(str(error))
                self._parts.append(_none())
            self._forget()
            if time.monotonic() > until:
                break
        return len(self._infos) - len(self._parts)

    def __len__(self) -> int:
        return sum(len(part.row_N) for part in self._parts)

    @property
    def rounds(self) -> list[int]:
        return sorted({info.round for info in self._infos})

    # --- finding ---------------------------------------------------------------------------------------------------

    def find(self, query: RolloutQuery) -> Places:
        """The places of all solutions that fit, in the order of the query."""
        if query in self._results:
            self._results.move_to_end(query)
            return self._results[query]
        columns = self._all()
        places = np.flatnonzero(self._fitting(columns, query))
        if query.text:
            places = self._containing(columns, places, query.text)
        places = _sorted(columns, places, query.order)
        self._results[query] = places
        if len(self._results) > KEPT_RESULTS:
            self._results.popitem(last=False)
        return places

    def _fitting(self, columns: _Columns, query: RolloutQuery) -> NDArray[np.bool_]:
        fits_N = np.ones(len(columns.row_N), dtype=bool)
        if query.role:
            fits_N &= columns.helpful_N == (query.role == "helpful")
        if query.grade == "flaw":
            fits_N &= columns.flaw_N
        elif query.grade == "malformed":
            fits_N &= ~columns.formed_N
        elif query.grade:
            fits_N &= columns.formed_N & (columns.correct_N == (query.grade == "correct"))
        if query.phase:
            number = self.phases.index(query.phase) if query.phase in self.phases else -1
            fits_N &= columns.phase_N == number
        for column_N, low, high in (
            (columns.round_N, query.round, query.round),
            (columns.step_N, query.first_step, query.last_step),
            (columns.score_N, query.lowest, query.highest),
        ):
            if low is not None:
                fits_N &= column_N >= low  # False for a missing score, which is NaN
            if high is not None:
                fits_N &= column_N <= high
        return fits_N

    def _containing(self, columns: _Columns, places: Places, text: str) -> Places:
        """The places whose solution or problem contains `text`."""
        hits_N = np.zeros(len(columns.row_N), dtype=bool)
        hits_N[places] = True
        for number, of_shard in self._by_shard(columns, places):
            batch = self._batch(number)
            found_R = _contains(batch.column("text"), text)
            questions = batch.column("question")
            found_R |= _contains(questions.dictionary, text)[questions.indices.to_numpy()]
            hits_N[of_shard] = found_R[columns.row_N[of_shard]]
        return np.flatnonzero(hits_N)

    def _by_shard(self, columns: _Columns, places: Places) -> Iterator[tuple[int, Places]]:
        for number in np.unique(columns.shard_N[places]):
            yield int(number), places[columns.shard_N[places] == number]

    # --- reading ---------------------------------------------------------------------------------------------------

    def rows(self, places: Places, longest: int) -> list[RolloutRow]:
        """For a list: at most `longest` characters of each text."""
        return [self._row(int(place), longest) for place in places]

    def _row(self, place: int, longest: int) -> RolloutRow:
        columns = self._all()
        number, row = int(columns.shard_N[place]), int(columns.row_N[place])
        batch, info, score = self._batch(number), self._infos[number], float(columns.score_N[place])
        return RolloutRow(
            address=(info.round, info.label, row),
            role="helpful" if columns.helpful_N[place] else "sneaky",
            correct=bool(columns.correct_N[place]),
            well_formed=bool(columns.formed_N[place]),
            flaw=bool(columns.flaw_N[place]),
            phase=self.phases[columns.phase_N[place]],
            step=int(columns.step_N[place]),
            score=None if np.isnan(score) else score,
            tokens=int(columns.tokens_N[place]),
            problem=_shortened(batch.column("question")[row].as_py(), longest),
            answer=_shortened(batch.column("answer")[row].as_py(), longest),
            text=_shortened(batch.column("text")[row].as_py(), longest) or "",
        )

    def place_of(self, round_: int, label: str, row: int) -> int | None:
        """The place of the solution at an address; None if there is none."""
        start = 0
        for info, part in zip(self._infos, self._parts, strict=False):
            if (info.round, info.label) == (round_, label):
                return start + row if 0 <= row < len(part.row_N) else None
            start += len(part.row_N)
        return None

    def rollout(self, place: int) -> Rollout:
        """The solution with everything that is stored of it."""
        columns = self._all()
        return self.shards.read_rows(self._infos[int(columns.shard_N[place])], [int(columns.row_N[place])])[0]

    def mates(self, place: int) -> tuple[Places, Places]:
        """The other solutions of the same problem in the same round: those of its group, and the rest; at most
        MOST_MATES of both together."""
        columns = self._all()
        shard, row = int(columns.shard_N[place]), int(columns.row_N[place])
        batch = self._batch(shard)
        problem = batch.column("problem_id")[row].as_py()
        group: list[int] = []
        others: list[int] = []
        starts = np.cumsum([0, *(len(part.row_N) for part in self._parts)])
        for number, part in enumerate(self._parts):
            if self._infos[number].round != self._infos[shard].round or not len(part.row_N):
                continue
            there = self._batch(number)
            rows = _rows_with(there.column("problem_id"), problem)
            for found in rows.tolist():
                at = int(starts[number]) + found
                same = number == shard and all(
                    there.column(name)[found].as_py() == batch.column(name)[row].as_py()
                    for name in ("role", "step", "group", "source")
                )
                if at != place:
                    (group if same else others).append(at)
        found_N = np.array([*group, *others][:MOST_MATES], dtype=np.int64)
        return found_N[: len(group)], found_N[len(group) :]

    # --- shards ----------------------------------------------------------------------------------------------------

    def _columns(self, number: int) -> _Columns:
        info, batch = self._infos[number], self._batch(number)
        samples = SampleColumns.of_batch(batch)
        phase = info.label.rsplit("-", 1)[0]
        if phase not in self.phases:
            self.phases.append(phase)
        count = batch.num_rows
        return _Columns(
            shard_N=np.full(count, number, np.int32),
            row_N=np.arange(count, dtype=np.int32),
            helpful_N=samples.helpful_N,
            correct_N=samples.correct_N,
            formed_N=samples.well_formed_N,
            flaw_N=samples.flaws_N,
            round_N=np.full(count, info.round, np.int32),
            phase_N=np.full(count, self.phases.index(phase), np.int16),
            step_N=batch.column("step").to_numpy().astype(np.int64),
            tokens_N=samples.tokens_N.astype(np.int32),
            score_N=batch.column("score").to_numpy(zero_copy_only=False).astype(np.float64),
        )

    def _batch(self, number: int) -> pa.RecordBatch:
        info = self._infos[number]
        if info.checksum not in self._open:
            self._open[info.checksum] = self.shards.map(info)
            if len(self._open) > OPEN_SHARDS:
                self._open.popitem(last=False)
        self._open.move_to_end(info.checksum)
        return self._open[info.checksum]

    def _all(self) -> _Columns:
        if self._joined is None:
            self._joined = _Columns.joined([_none(), *self._parts])
        return self._joined

    def _forget(self) -> None:
        self._joined = None
        self._results.clear()


def _none() -> _Columns:
    kinds = (np.int32, np.int32, *([np.bool_] * 4), np.int32, np.int16, np.int64, np.int32, np.float64)
    return _Columns(*(np.empty(0, kind) for kind in kinds))


def _contains(texts: pa.Array, part: str) -> NDArray[np.bool_]:
    found_N: NDArray[np.bool_] = pc.match_substring(texts, part, ignore_case=True).to_numpy(zero_copy_only=False)
    return found_N.astype(bool)


def _rows_with(column: pa.DictionaryArray, word: str) -> NDArray[np.int64]:
    number = pc.index(column.dictionary, pa.scalar(word, pa.string())).as_py()
    return np.flatnonzero(column.indices.to_numpy() == number) if number >= 0 else np.empty(0, np.int64)


def _sorted(columns: _Columns, places: Places, order: str) -> Places:
    """Equal solutions are in the order of their commits. Those without a score are last in an order by score."""
    if order == "newest":
        return places[::-1]
    if order in ("longest", "shortest"):
        keys_N = columns.tokens_N[places].astype(np.float64)
    elif order in ("highest", "lowest"):
        keys_N = columns.score_N[places]
    else:
        return places
    return places[np.argsort(-keys_N if order in ("longest", "highest") else keys_N, kind="stable")]


def _shortened(text: str | None, longest: int) -> Any:
    return text if text is None or len(text) <= longest else text[:longest] + "…"
