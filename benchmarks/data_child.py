"""One loader of preference pairs in a separate process, so that its memory can be measured.

    python -m benchmarks.data_child < order.json

Reads one JSON object (see `LoadOrder`) from standard input and writes one JSON object per line: `started` after all
imports, `first_batch` after the first pairs, `done` after the last batch. Nothing is unpickled.

Two loaders: "stream" is pvg's (rows drawn from memory-mapped shards); "eager" is the usual alternative (all pairs as
text in one JSONL file, parsed into a list before the first batch).

Each line has four amounts of memory in bytes: `private` (RssAnon) belongs to this process alone, `mapped` (RssFile) are
pages of files, `resident_now` (VmRSS) is their sum, and `resident` (VmHWM) is the peak of the sum. Mapped pages belong
to the page cache: the kernel frees them if another process needs the memory. The parent watches the peak of `private`
(benchmarks.data).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypedDict

import numpy as np
from numpy.typing import NDArray

from pvg.store.journal import read_json_lines
from pvg.store.pairs import PairStream, PairView
from pvg.store.shards import RolloutShards, ShardInfo

TextPair = tuple[str, str, str]  # question, correct solution, incorrect solution


class LoadOrder(TypedDict):
    """What to load (`shards` relative to `directory` for the stream, `jsonl` for the eager loader), and how much to
    draw."""

    loader: str
    directory: str
    shards: list[dict[str, Any]]
    jsonl: str
    batches: int
    batch_pairs: int
    seed: int


class PairLoader(Protocol):
    def batch(self, step: int, size: int) -> Sequence[TextPair]: ...


class StreamLoader:
    """pvg's loader: draws pairs by number and reads their rows from the mapped shards."""

    def __init__(self, directory: Path, shards: Sequence[Mapping[str, Any]], seed: int) -> None:
        view = PairView(RolloutShards(directory), [ShardInfo.from_plain(plain) for plain in shards])
        self._stream = PairStream(view, dict.fromkeys(view.sources, 1.0), seed)

    def batch(self, step: int, size: int) -> list[TextPair]:
        pairs = self._stream.draw(step, size)
        rows = self._stream.rows(np.concatenate([pairs.correct_rows_M, pairs.incorrect_rows_M]))
        return [(right.question, right.text, wrong.text) for right, wrong in zip(rows[:size], rows[size:], strict=True)]


class EagerLoader:
    """All pairs in a list, in a shuffled order that repeats. It uses orjson too, so the parser makes no difference."""

    def __init__(self, path: Path, seed: int) -> None:
        self._pairs = [(line["prompt"], line["chosen"], line["rejected"]) for line in read_json_lines(path)]
        self._order_M: NDArray[np.int64] = np.random.default_rng(seed).permutation(len(self._pairs))

    def batch(self, step: int, size: int) -> list[TextPair]:
        places = np.arange(step * size, (step + 1) * size) % len(self._pairs)
        return [self._pairs[number] for number in self._order_M[places].tolist()]


def open_loader(order: LoadOrder) -> PairLoader:
    if order["loader"] == "eager":
        return EagerLoader(Path(order["jsonl"]), order["seed"])
    return StreamLoader(Path(order["directory"]), order["shards"], order["seed"])


def memory_of(process: int | str = "self") -> dict[str, int]:
    """The memory lines of /proc/PROCESS/status in bytes: VmHWM (peak), VmRSS, RssAnon (private), RssFile...

    Not getrusage: a child's peak there starts at its parent's. Raises FileNotFoundError if there is no such process. A
    process that has ended but was not waited for has no memory lines.
    """
    lines = Path(f"/proc/{process}/status").read_text(encoding="ascii", errors="replace").splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return {name: int(text.split()[0]) * 1024 for name, text in fields.items() if text.endswith(" kB")}


def load_and_draw(order: LoadOrder) -> None:
    """Load, draw, and report how long both took. `characters`: all that were read, equal for equal orders."""
    size = order["batch_pairs"]
    started = time.perf_counter()
    loader = open_loader(order)
    characters = _read(loader.batch(0, size))
    say("first_batch", first_batch_s=time.perf_counter() - started)
    started = time.perf_counter()
    for step in range(1, order["batches"] + 1):
        characters += _read(loader.batch(step, size))
    draw_s = time.perf_counter() - started
    # While the loader still exists, so that its memory counts.
    say("done", pairs_per_s=order["batches"] * size / draw_s, characters=characters)


def _read(batch: Sequence[TextPair]) -> int:
    return sum(len(text) for pair in batch for text in pair)


def say(event: str, **fields: float) -> None:
    memory = memory_of()
    amounts = {
        "private": memory["RssAnon"],
        "mapped": memory["RssFile"],
        "resident": memory["VmHWM"],
        "resident_now": memory["VmRSS"],
    }
    print(json.dumps({"event": event, **amounts, **fields}), flush=True)


if __name__ == "__main__":
    given: LoadOrder = json.load(sys.stdin)
    say("started")
    load_and_draw(given)
