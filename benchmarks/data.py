"""`data`: the rollout store and the pair stream at growing numbers of pairs; shows that memory stays flat.

    pvg bench --profile benchmarks/data.toml
    pvg bench --profile benchmarks/data.toml -s workload.loader=eager -s 'workload.pairs=[5000,50000]'

The workload writes rollouts through pvg.store.shards to a temporary folder. For each size a fresh process opens them,
reads a first batch and draws more (benchmarks.data_child), so no size affects another's memory. With
`workload.loader = "eager"`, the slow side, the process parses every pair from one JSONL file into a list. With
`workload.loader = "game"` (profile `data-game`) it runs the game's own code: the end of the mint and the whole verifier
phase (benchmarks.data_game lists the details).

The memory measure is the loader's private memory. The derived `resident_mb` also counts the shards' pages in the page
cache, which the kernel frees if another process needs the memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import psutil
from pydantic import Field, model_validator

from benchmarks import data_game
from benchmarks.data_child import LoadOrder, memory_of
from benchmarks.data_store import StoreShape, check_free_space, write_pairs, write_store
from pvg.bench.profile import BenchSettings, workload_settings
from pvg.bench.workloads import BenchMetric, Workload
from pvg.config.base import Count, Section
from pvg.config.experiment import Experiment
from pvg.errors import MissingRequirementError
from pvg.store.shards import ShardInfo
from pvg.telemetry.spans import span

MB = 1e6
WATCH_EVERY_S = 0.005  # between two looks at the child's memory; shorter peaks may be missed
EAGER_OVERHEAD = 1.5  # memory of the eager loader divided by the size of its file, rounded up
CHILD, GAME_CHILD = "benchmarks.data_child", "benchmarks.data_game"
FEWER = "Ask for fewer pairs (-s 'workload.pairs=[5000,50000]')"


class DataWorkloadSettings(Section):
    pairs: Annotated[tuple[Count, ...], Field(strict=False, min_length=1)] = (5_000, 50_000, 500_000)
    loader: Literal["stream", "eager", "game"] = "stream"
    batches: Count = 200  # drawn and timed after the first
    batch_pairs: Count = 64
    steps: Count = 10  # loader "game": training steps of the verifier, of batch_pairs pairs each
    solutions: Annotated[int, Field(ge=2)] = 8  # per problem, half of them correct: 16 pairs
    tokens: Annotated[int, Field(ge=16)] = 450  # mean of a solution; 1800 characters

    @model_validator(mode="after")
    def _can_work(self) -> DataWorkloadSettings:
        if self.solutions % 2:
            raise ValueError(f"workload.solutions = {self.solutions} must be even: half of them are correct")
        if list(self.pairs) != sorted(set(self.pairs)):
            raise ValueError("workload.pairs must be in increasing order, without repetition")
        return self


def make(settings: BenchSettings) -> Workload:
    return DataWorkload(workload_settings(DataWorkloadSettings, settings), settings.experiment)


class DataWorkload:
    def __init__(self, settings: DataWorkloadSettings, experiment: Experiment) -> None:
        self._settings = settings
        self._experiment = experiment
        self._seed = experiment.seed
        self._game = settings.loader == "game"
        self._shape = StoreShape(settings.solutions, settings.tokens, self._seed)
        if self._game:
            self._shape = replace(self._shape, ids=data_game.IDS, alphabet=data_game.ALPHABET)
        self._by_size = GAME_MEASURES if self._game else MEASURES
        self._stack = contextlib.ExitStack()
        self._directory = Path()
        self._shards: dict[int, list[ShardInfo]] = {}
        self._bytes: dict[int, int] = {}
        self._memory: dict[str, list[float]] = {}
        self.measures: Mapping[str, BenchMetric] = {
            "peak_memory_mb": BenchMetric("MB", "lower", "peak_memory_mb of the size that takes most"),
            **{f"{name}_{label(size)}": measure for size in settings.pairs for name, measure in self._by_size.items()},
        }

    async def open(self) -> None:
        """Write the data. Raises MissingRequirementError before writing if disk or memory is too small."""
        if not _knows_memory():
            raise MissingRequirementError("The data benchmark reads memory figures from /proc.", "Run it on Linux.")
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="pvg-bench-data-"))
            for _ in self._write(Path(folder)):
                await asyncio.sleep(0)  # so that Ctrl-C can end it
            self._stack = stack.pop_all()

    def _write(self, folder: Path) -> Iterator[None]:
        settings, shape = self._settings, self._shape
        self._directory = folder
        elsewhere = f"{FEWER}, or set TMPDIR to a folder on another disk."
        if settings.loader != "eager":
            check_free_space(folder, shape.stored_bytes(settings.pairs[-1]), elsewhere)
            self._shards = {size: [] for size in settings.pairs}
            for smallest, info in write_store(folder, shape, settings.pairs):
                for size in settings.pairs[settings.pairs.index(smallest) :]:
                    self._shards[size].append(info)
                yield
            self._bytes = {size: sum(info.bytes for info in infos) for size, infos in self._shards.items()}
        else:
            self._check_memory(shape.jsonl_bytes(settings.pairs[-1]))
            check_free_space(folder, sum(map(shape.jsonl_bytes, settings.pairs)), elsewhere)
            for size in settings.pairs:
                for written in write_pairs(self._jsonl(size), shape, size):
                    self._bytes[size] = written
                    yield

    def work(self) -> dict[str, Any]:
        settings = self._settings
        drawn = {"verifier_steps": settings.steps} if self._game else {"batches": settings.batches + 1}
        return {
            "pairs": [self._shape.pairs_formed(size) for size in settings.pairs],
            "rollouts": [self._shape.problems_for(size) * settings.solutions for size in settings.pairs],
            "solutions_per_problem": settings.solutions,
            "mean_tokens": settings.tokens,
            **drawn,
            "batch_pairs": settings.batch_pairs,
            "seed": self._seed,
        }

    async def sample(self, index: int) -> dict[str, float]:
        measured: dict[str, float] = {}
        for size in self._settings.pairs:
            found = await (self._play(size) if self._game else load_in_child(self._order(size)))
            name = label(size)
            measured |= {f"{metric}_{name}": found[metric] for metric in self._by_size}
            for kind in () if self._game else ("resident_mb", "mapped_mb"):
                self._memory.setdefault(f"{kind}_{name}", []).append(found[kind])
            self._memory.setdefault(name, []).append(found["peak_memory_mb"])
        peaks = [measured[f"peak_memory_mb_{label(size)}"] for size in self._settings.pairs]
        return {"peak_memory_mb": max(peaks), **measured}

    def derived(self) -> dict[str, float]:
        """Per size: MB on disk, and memory with mapped pages. Over the sizes: memory per additional pair."""
        medians = {name: statistics.median(values) for name, values in self._memory.items()}
        sizes = self._settings.pairs
        found = {f"file_mb_{label(size)}": self._bytes[size] / MB for size in sizes}
        found |= {name: value for name, value in medians.items() if "_mb_" in name}
        if len(sizes) > 1 and medians:
            smallest, largest = medians[label(sizes[0])], medians[label(sizes[-1])]
            further = self._shape.pairs_formed(sizes[-1]) - self._shape.pairs_formed(sizes[0])
            found["memory_bytes_per_pair"] = (largest - smallest) * MB / further
        return found

    async def close(self) -> None:
        self._stack.close()

    async def _play(self, size: int) -> dict[str, float]:
        """Play the game's phases on the rollouts of this size, in a run that is removed afterwards."""
        settings, store = self._settings, self._directory
        with tempfile.TemporaryDirectory(prefix="run-", dir=store) as folder:
            run = data_game.make_run(
                Path(folder),
                self._experiment,
                store,
                self._shards[size],
                self._shape,
                settings.steps,
                settings.batch_pairs,
            )
            return await play_in_child(run.path)

    def _order(self, size: int) -> LoadOrder:
        return {
            "loader": self._settings.loader,
            "directory": str(self._directory),
            "shards": [info.plain() for info in self._shards.get(size, [])],
            "jsonl": str(self._jsonl(size)),
            "batches": self._settings.batches,
            "batch_pairs": self._settings.batch_pairs,
            "seed": self._seed,
        }

    def _jsonl(self, size: int) -> Path:
        return self._directory / f"pairs-{size}.jsonl"

    def _check_memory(self, file_bytes: int) -> None:
        needed, available = EAGER_OVERHEAD * file_bytes, psutil.virtual_memory().available
        if available < needed:
            raise MissingRequirementError(
                f"The eager loader would take about {needed / 1e9:.1f} GB of memory, but {available / 1e9:.1f} GB are "
                "available.",
                f"{FEWER}.",
            )


# Measures per size, with the size as suffix, such as pairs_per_s_50k.
MEASURES: Mapping[str, BenchMetric] = {
    "first_batch_s": BenchMetric("s", "lower", "opening the data and reading the first batch"),
    "pairs_per_s": BenchMetric("pairs/s", "higher", "drawing batches after the first, and reading their texts"),
    "peak_memory_mb": BenchMetric(
        "MB", "lower", "peak private memory of the loading process, beyond its initial memory"
    ),
}


GAME_MEASURES: Mapping[str, BenchMetric] = {
    "mint_end_s": BenchMetric(
        "s", "lower", "the statistics of all minted rollouts at the end of the mint, and the commit"
    ),
    "verifier_phase_s": BenchMetric("s", "lower", "the verifier phase: pairs, training steps, calibration, commit"),
    "peak_memory_mb": BenchMetric(
        "MB", "lower", "peak private memory (RssAnon) in these phases, beyond that of the opened session"
    ),
    "peak_resident_mb": BenchMetric(
        "MB",
        "lower",
        "peak resident memory (VmHWM), with the mapped pages of the shards, which the kernel can free",
    ),
}


def label(size: int) -> str:
    """5000 -> "5k"."""
    for unit, name in ((1_000_000, "m"), (1_000, "k")):
        if size % unit == 0:
            return f"{size // unit}{name}"
    return str(size)


# --- the child process -------------------------------------------------------------------------------------------


async def load_in_child(order: LoadOrder) -> dict[str, float]:
    """Load and draw in a fresh process: seconds, pairs/s, and the growth of its memory in MB. Raises as `watched`."""
    started, first, done, private = await watched(CHILD, order, ("first_batch", "draw_pairs"))
    growth = {kind: (done[kind] - started[kind]) / MB for kind in ("resident", "mapped")}
    return {
        "first_batch_s": first["first_batch_s"],
        "pairs_per_s": done["pairs_per_s"],
        "characters": done["characters"],
        "peak_memory_mb": (private - started["private"]) / MB,
        "resident_mb": growth["resident"],
        "mapped_mb": max(0.0, growth["mapped"]),
    }


async def play_in_child(run: Path) -> dict[str, float]:
    """Play the game's phases in a fresh process: seconds, and the growth of its memory in MB. Raises as `watched`."""
    started, minted, done, private = await watched(GAME_CHILD, {"run": str(run)}, ("mint_end", "verifier_phase"))
    return {
        "mint_end_s": minted["mint_end_s"],
        "verifier_phase_s": done["verifier_phase_s"],
        "held_out": done["held_out"],
        "peak_memory_mb": (private - started["private"]) / MB,
        "peak_resident_mb": (done["resident"] - started["resident_now"]) / MB,
    }


async def watched(
    module: str, order: Mapping[str, Any], spans: tuple[str, str]
) -> tuple[dict[str, float], dict[str, float], dict[str, float], float]:
    """Run `module` on `order` in a fresh process. Returns the three lines that it writes, and its peak private memory
    in bytes from the first line on. `spans` name the time up to the second line and up to the third.

    Raises MissingRequirementError if the process is killed (as happens without memory), RuntimeError with its last
    output if it fails.
    """
    with span("start_process"):
        child = await _start(module)
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stderr is not None
    errors = asyncio.create_task(child.stderr.read())
    try:
        with span("start_process"):
            child.stdin.write(json.dumps(order).encode())
            child.stdin.close()
            started = await _next_line(child.stdout)
        async with PrivatePeak(child.pid) as peak:
            with span(spans[0]):
                first = await _next_line(child.stdout)
            with span(spans[1]):
                done = await _next_line(child.stdout)
        with span("stop_process"):
            await child.wait()
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        await child.wait()
        said = (await errors).decode(errors="replace").strip()
        # Close its pipes here. Otherwise the garbage collector closes them after the event loop has ended.
        await child.stdout.read()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            await child.stdin.wait_closed()
        await asyncio.sleep(0.01)  # until the transport has seen that all pipes are closed
    if not done:
        raise _failure(child.returncode, said)
    return started, first, done, max(done["private"], float(peak.bytes))


async def _start(module: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        module,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def _next_line(stream: asyncio.StreamReader) -> dict[str, float]:
    """The next event; empty if the process has ended."""
    line = await stream.readline()
    return dict(json.loads(line)) if line.endswith(b"\n") else {}


def _failure(returncode: int | None, said: str) -> Exception:
    if returncode is not None and returncode < 0:
        return MissingRequirementError(
            f"The process that loads the pairs was killed by signal {-returncode}, probably for lack of memory.",
            f"{FEWER}.",
        )
    return RuntimeError(f"The process that loads the pairs failed (exit code {returncode}): {said}")


class PrivatePeak:
    """Watches a process's private memory: `bytes` is the peak while the context was open."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.bytes = 0

    async def __aenter__(self) -> PrivatePeak:
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])
        if not self._task.cancelled():
            self._task.result()

    async def _watch(self) -> None:
        while "RssAnon" in (memory := _memory_if_alive(self._pid)):
            self.bytes = max(self.bytes, memory["RssAnon"])
            await asyncio.sleep(WATCH_EVERY_S)


def _knows_memory() -> bool:
    return Path("/proc/self/status").exists()


def _memory_if_alive(pid: int) -> dict[str, int]:
    try:
        return memory_of(pid)
    except (FileNotFoundError, ProcessLookupError):
        return {}
