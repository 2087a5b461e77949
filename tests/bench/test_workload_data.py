"""The data workload: the same files every time, two loaders that read the same pairs, memory that is really seen."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from bench_runs import load_profile, run_variant

from benchmarks import data, data_game
from benchmarks.data_child import EagerLoader, LoadOrder, StreamLoader, memory_of
from benchmarks.data_store import StoreShape, write_pairs, write_store
from pvg.bench.workloads import Workload
from pvg.config.load import load_experiment
from pvg.errors import ConfigurationError, MissingRequirementError
from pvg.game.states import GameState, Phase
from pvg.store.shards import RolloutShards, ShardInfo
from pvg.store.state import FileStateStore

PROFILE = "benchmarks/data.toml"
TINY = ("workload.pairs=[40,160]", "workload.tokens=32", "workload.batches=3", "workload.batch_pairs=8")
SHAPE = StoreShape(solutions=4, tokens=32, seed=5)


def make(*overrides: str) -> Workload:
    return data.make(load_profile(PROFILE, [*TINY, *overrides]))


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which temporary folders are made."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def store(directory: Path, shape: StoreShape, sizes: list[int]) -> dict[int, list[ShardInfo]]:
    """What `write_store` wrote, by size: a size has its own shards and those of all smaller ones."""
    written = list(write_store(directory, shape, sizes))
    return {size: [info for smallest, info in written if smallest <= size] for size in sizes}


def jsonl(path: Path, shape: StoreShape, pairs: int) -> int:
    return list(write_pairs(path, shape, pairs))[-1]


def test_the_store_is_a_function_of_shape_and_seed_and_a_size_is_the_beginning_of_a_larger_one(tmp_path: Path) -> None:
    first = store(tmp_path / "a", SHAPE, [20, 100])
    again = store(tmp_path / "b", SHAPE, [20, 100])
    other = store(tmp_path / "c", StoreShape(4, 32, seed=6), [20, 100])
    assert first == again
    assert first[100][0].checksum != other[100][0].checksum
    assert first[100][: len(first[20])] == first[20]
    # 2 right and 2 wrong solutions are 4 pairs: 25 problems are 100 pairs and 100 rollouts.
    assert [sum(info.rows for info in first[size]) for size in (20, 100)] == [20, 100]
    assert SHAPE.pairs_formed(98) == 100


def test_the_estimates_of_space_cover_what_is_written(tmp_path: Path) -> None:
    shape = StoreShape(solutions=8, tokens=450, seed=0)
    written = sum(info.bytes for info in store(tmp_path, shape, [1600])[1600])
    assert 0.7 * shape.stored_bytes(1600) < written < shape.stored_bytes(1600)
    lines = jsonl(tmp_path / "pairs.jsonl", shape, 1600)
    assert lines == (tmp_path / "pairs.jsonl").stat().st_size
    assert 0.7 * shape.jsonl_bytes(1600) < lines < shape.jsonl_bytes(1600)


def test_both_loaders_read_the_same_pairs_a_right_solution_before_a_wrong_one(tmp_path: Path) -> None:
    infos = store(tmp_path, SHAPE, [40])[40]
    jsonl(tmp_path / "pairs.jsonl", SHAPE, 40)
    eager = EagerLoader(tmp_path / "pairs.jsonl", seed=1)
    stream = StreamLoader(tmp_path, [info.plain() for info in infos], seed=1)
    everything = eager.batch(0, 40)
    assert len(set(everything)) == 40  # one epoch holds every pair once
    assert set(eager.batch(1, 40)) == set(everything)  # and the next one again
    drawn = [pair for step in range(30) for pair in stream.batch(step, 16)]
    assert set(drawn) == set(everything)  # 480 draws of 40: all of them


@pytest.mark.parametrize("loader", ["stream", "eager"])
def test_a_sample_measures_every_size_in_a_process_of_its_own(loader: str, temporary: Path) -> None:
    async def play() -> tuple[Any, dict[str, Any]]:
        return await run_variant(lambda: make(f"workload.loader={loader}"), warmup=0, repeats=2)

    variant, work = asyncio.run(play())
    assert variant.status == "ok"
    assert work["pairs"] == [48, 160]
    assert work["rollouts"] == [24, 80]
    assert work["batches"] == 4
    assert "loader" not in json.dumps(work)  # how it is done is no part of what is done
    assert {"first_batch_s_40", "pairs_per_s_160", "peak_memory_mb_160", "peak_memory_mb"} < variant.samples.keys()
    assert min(variant.samples["peak_memory_mb_160"].values) > 0
    peaks = [variant.samples[f"peak_memory_mb_{size}"].values for size in (40, 160)]
    assert variant.samples["peak_memory_mb"].values == tuple(map(max, *peaks))
    assert {"start_process", "first_batch", "draw_pairs", "stop_process"} <= variant.budget.exposed.keys()
    assert variant.derived["file_mb_160"] > variant.derived["file_mb_40"] > 0
    assert list(temporary.iterdir()) == []


@pytest.mark.drill
def test_the_game_plays_both_phases_on_the_rollouts_of_a_size(temporary: Path) -> None:
    given = ("workload.loader=game", "workload.steps=2", "workload.pairs=[160]")

    async def play() -> tuple[Any, dict[str, Any]]:
        return await run_variant(lambda: make(*given), warmup=0, repeats=1)

    variant, work = asyncio.run(play())
    assert variant.status == "ok", variant
    assert work["rollouts"] == [80]
    assert work["verifier_steps"] == 2
    assert "batches" not in work
    assert min(variant.samples["peak_memory_mb_160"].values) > 0
    assert min(variant.samples["mint_end_s_160"].values) > 0
    assert {"start_process", "mint_end", "verifier_phase", "stop_process"} <= variant.budget.exposed.keys()
    assert variant.derived["file_mb_160"] > 0
    assert list(temporary.iterdir()) == []


def test_a_run_of_the_game_names_the_store_s_shards_and_leaves_the_store_as_it_is(tmp_path: Path) -> None:
    shape = StoreShape(4, 32, seed=5, ids=data_game.IDS, alphabet=data_game.ALPHABET)
    infos = store(tmp_path / "store", shape, [40])[40]
    experiment = load_profile(PROFILE, list(TINY)).experiment
    run = data_game.make_run(tmp_path / "runs", experiment, tmp_path / "store", infos, shape, steps=2, pairs=8)
    state = GameState.from_plain(FileStateStore(run.state).load().state or {})
    assert (state.phase, [plain["path"] for plain in state.shards]) == (Phase.MINT, [info.path for info in infos])
    played = load_experiment(run.experiment_file)
    assert (played.game.mint_problems, played.game.mint_samples, played.verifier.steps) == (10, 4, 2)
    shutil.rmtree(run.path)
    RolloutShards(tmp_path / "store").verify(infos[0])


@pytest.mark.drill
def test_the_same_order_reads_the_same_characters(tmp_path: Path) -> None:
    infos = store(tmp_path, SHAPE, [40])[40]

    async def characters(seed: int) -> float:
        return (await data.load_in_child(order(tmp_path, infos, seed)))["characters"]

    async def play() -> list[float]:
        return [await characters(seed) for seed in (1, 1, 2)]

    first, again, other = asyncio.run(play())
    assert first == again != other


def order(directory: Path, infos: Any, seed: int) -> LoadOrder:
    plain = [info.plain() for info in infos]
    return LoadOrder(
        loader="stream", directory=str(directory), shards=plain, jsonl="", batches=2, batch_pairs=8, seed=seed
    )


# --- memory ------------------------------------------------------------------------------------------------------


def test_memory_that_is_taken_and_given_back_is_seen() -> None:
    planted = 80_000_000
    program = f"import time; kept = b'x' * {planted}; time.sleep(0.2); del kept; print(flush=True); input()"

    async def play() -> tuple[int, int]:
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-c", program, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        async with data.PrivatePeak(child.pid) as peak:
            await child.stdout.readline()
        after = memory_of(child.pid)["RssAnon"]
        await child.communicate(b"\n")
        return peak.bytes, after

    peak, after = asyncio.run(play())
    assert peak > planted
    assert after < planted / 2  # so that it could only be seen in time


def test_a_process_that_has_ended_is_watched_no_longer() -> None:
    async def play() -> None:
        child = await asyncio.create_subprocess_exec(sys.executable, "-c", "pass")
        async with data.PrivatePeak(child.pid) as peak:
            await child.wait()
            await asyncio.wait_for(asyncio.shield(peak._task), 60.0)

    asyncio.run(play())


def test_the_eager_loader_holds_all_of_its_file(temporary: Path) -> None:
    pairs, name = 3200, "3200"

    async def play() -> tuple[dict[str, float], dict[str, float]]:
        workload = make("workload.loader=eager", f"workload.pairs=[{pairs}]", "workload.tokens=450")
        await workload.open()
        try:
            return dict(await workload.sample(0)), dict(workload.derived())
        finally:
            await workload.close()

    measured, derived = asyncio.run(play())
    assert derived[f"file_mb_{name}"] > 10
    assert measured[f"peak_memory_mb_{name}"] > 0.9 * derived[f"file_mb_{name}"]


# --- what goes wrong ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("workload.solutions=7", "must be even"),
        ("workload.pairs=[100,50]", "must be in increasing order"),
        ("workload.pairs=[50,50]", "must be in increasing order"),
        ("workload.pairs=[]", "workload.pairs"),
        ("workload.pairs=[0]", "workload.pairs"),
        ("workload.loader=lazy", "workload.loader"),
        ("workload.paris=[1]", "nearest valid key is 'workload.pairs'"),
    ],
)
def test_settings_that_cannot_work_are_refused(override: str, complaint: str) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        make(override)


def test_a_full_disk_is_told_before_anything_is_written(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(temporary)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10_000))
    for loader in ("stream", "eager"):
        with pytest.raises(MissingRequirementError, match=r"0\.00 GB free") as caught:
            asyncio.run(make(f"workload.loader={loader}").open())
        assert "workload.pairs" in caught.value.remedy
    assert list(temporary.iterdir()) == []


def test_an_eager_loader_that_would_not_fit_into_memory_is_not_tried(temporary: Path) -> None:
    with pytest.raises(MissingRequirementError, match="of memory"):
        asyncio.run(make("workload.loader=eager", "workload.pairs=[2_000_000_000]").open())
    assert list(temporary.iterdir()) == []


def test_a_child_that_is_killed_or_fails_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = order(tmp_path, [], 0) | {"loader": "eager", "jsonl": str(tmp_path / "nothing.jsonl")}
    with pytest.raises(RuntimeError, match=r"nothing\.jsonl"):
        asyncio.run(data.load_in_child(missing))  # type: ignore[arg-type]
    suicide = tmp_path / "suicide"
    suicide.write_text("#!/bin/sh\nkill -9 $$\n")
    suicide.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(suicide))
    with pytest.raises(MissingRequirementError, match="signal 9"):
        asyncio.run(data.load_in_child(order(tmp_path, [], 0)))


def test_ctrl_c_while_the_store_is_written_leaves_nothing_behind(temporary: Path) -> None:
    def shards() -> int:
        return len(list(temporary.glob("*/rollouts/*/*.arrow")))

    async def play() -> int:
        opening = asyncio.create_task(make("workload.pairs=[100_000]").open())
        for _ in range(3):
            await asyncio.sleep(0)
        written = shards()
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        return written

    assert 0 < asyncio.run(play()) < 10  # of about 12
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize(("size", "name"), [(5_000, "5k"), (500_000, "500k"), (2_000_000, "2m"), (1_234, "1234")])
def test_sizes_have_short_names(size: int, name: str) -> None:
    assert data.label(size) == name
