"""The loop workload: what is served is what is stored, the naive sides are correct too, and stalls are really seen."""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pvg.bench.profile import load_profile
from pvg.bench.runner import run_variant
from pvg.bench.workloads import loop
from pvg.bench.workloads.loop import LoopWorkload
from pvg.bench.workloads.loop_engine import JOINS, Payload, RecordedEngine, first_step, recorded
from pvg.errors import ConfigurationError, MissingRequirementError, UsageError
from pvg.game.ledger import Ledger
from pvg.rollout.engine import GenerationRequest, Sampling
from pvg.store.shards import RolloutShards, ShardInfo

PROFILE = "profiles/loop.toml"
TINY = (
    "workload.rollouts=16",
    "workload.tokens=300",
    "workload.chunk=16",
    "workload.seconds=0.02",
    "task.problems=64",
    "task.test_problems=8",
    "models.threads=1",
)
STALL_S = 0.3


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which temporary folders are made."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def make(*overrides: str) -> LoopWorkload:
    workload = loop.make(load_profile(PROFILE, [*TINY, *overrides]))
    assert isinstance(workload, LoopWorkload)
    return workload


def sampled(*overrides: str, plant: Any = None) -> tuple[dict[str, float], dict[str, float], Any]:
    """One sample's measures, the derived figures, and what was stored: id -> (token ids, log-probs, text)."""

    async def play() -> tuple[dict[str, float], dict[str, float], Any]:
        workload = make(*overrides)
        await workload.open()
        try:
            if plant is not None:
                plant(workload)
            return await workload.sample(0), workload.derived(), stored(workload)
        finally:
            await workload.close()

    return asyncio.run(play())


def stored(workload: LoopWorkload) -> dict[str, tuple[list[int], list[float], str]]:
    state, run = workload._ledger.state, workload._run
    if state.shards:
        rows = RolloutShards(run.path).read(ShardInfo.from_plain(state.shards[-1]))
        return {row.id: (row.completion_ids.tolist(), row.logprobs.tolist(), row.text) for row in rows}
    (file,) = run.path.glob("rollouts-*.json")
    records = json.loads(file.read_text())
    return {row["id"]: (row["completion_ids"], row["logprobs"], row["text"]) for row in records}


@pytest.mark.parametrize("overrides", [(), ("workload.encoding=json", "workload.join=quadratic")])
def test_the_runner_takes_its_samples_and_the_folder_goes(overrides: tuple[str, ...], temporary: Path) -> None:
    async def play() -> tuple[Any, dict[str, Any]]:
        return await run_variant(lambda: make(*overrides), warmup=0, repeats=2)

    variant, work = asyncio.run(play())
    assert variant.status == "ok"
    assert {"rollout", "grade", "checkpoint"} <= variant.budget.exposed.keys()
    assert work.pop("prompts")
    assert work == {
        "model": "modchain-prover",
        "parameters": 421_120,
        "task": "modchain",
        "rollouts": 16,
        "groups": 2,
        "tokens_per_rollout": 300,
        "chunk": 16,
        "seconds": 0.02,
        "seed": 0,
    }
    written, copied = (variant.samples[name].values for name in ("bytes_written_mb", "bytes_copied_mb"))
    assert written[0] > 0
    assert len(set(copied)) == 1  # the same work in every sample
    for name in ("commit_stall_ms", "rollout_stall_ms", "decode_ms", "grade_ms"):
        assert variant.derived[name] >= 0
    assert list(temporary.glob("pvg-*")) == []


def test_both_encodings_and_both_joins_store_the_same() -> None:
    product, _, stored_once = sampled()
    naive, _, stored_naively = sampled("workload.encoding=json", "workload.join=quadratic")
    assert stored_once == stored_naively
    assert len(stored_once) == 16
    assert all(250 < len(ids) == len(logprobs) <= 300 for ids, logprobs, _ in stored_once.values())
    assert naive["bytes_copied_mb"] > 5 * product["bytes_copied_mb"]


@pytest.mark.parametrize(("name", "copied"), [("once", 8 * 10), ("quadratic", 8 * (4 + 8 + 10))])
def test_joins_give_what_was_cut_and_count_what_they_copy(name: str, copied: int) -> None:
    ids, logprobs = np.arange(10, dtype=np.int32), np.linspace(-1, 0, 10, dtype=np.float32)
    join = JOINS[name]()
    for start in range(0, 10, 4):
        join.add(ids[start : start + 4], logprobs[start : start + 4])
    joined, joined_logprobs = join.result()
    assert joined.tolist() == ids.tolist()
    assert joined_logprobs.tolist() == logprobs.tolist()
    assert (joined.dtype, joined_logprobs.dtype) == (np.int32, np.float32)
    assert join.copied == copied


def test_the_engine_serves_what_is_recorded_under_an_id_as_often_as_it_is_asked() -> None:
    payload = Payload(np.arange(7, dtype=np.int32), np.zeros(7, np.float32), "length", duration_s=0.0)
    engine = RecordedEngine({"a": payload}, chunk=3, join=JOINS["once"], max_in_flight=4)
    request = GenerationRequest("a", np.arange(2, dtype=np.int32), Sampling(7, ()), seed=1)

    async def play() -> list[Any]:
        return await asyncio.gather(engine.generate(request), engine.generate(request))

    for completion in asyncio.run(play()):
        assert completion.token_ids.tolist() == list(range(7))
        assert completion.finish_reason == "length"
    assert engine.copied == 2 * 7 * 8
    assert (engine.stats.rows, engine.stats.tokens, engine.stats.prompt_tokens) == (2, 14, 4)
    with pytest.raises(KeyError):
        asyncio.run(engine.generate(GenerationRequest("b", request.prompt_ids, request.sampling, 1)))


def test_a_stretched_solution_repeats_its_first_step_and_keeps_its_grade() -> None:
    async def play() -> tuple[LoopWorkload, list[Any]]:
        workload = make()
        await workload.open()
        try:
            groups = await loop._sample(workload._dispatcher, workload._orders, 0)
            return workload, [(group.problem, rollout) for group in groups for rollout in group.rollouts]
        finally:
            await workload.close()

    workload, rows = asyncio.run(play())
    grades = set()
    for number, (problem, rollout) in enumerate(rows):
        grades.add((rollout.grade.correct, rollout.grade.well_formed))
        again = recorded(rollout, number, tokens=400, seconds=2.0, tokenizer=workload._tokenizer)
        assert 1.0 <= again.duration_s <= 2.0
        step = first_step(rollout.completion_ids, workload._tokenizer)
        assert 400 - step < len(again.token_ids) <= 400
        assert again.token_ids[-len(rollout.completion_ids) :].tolist() == rollout.completion_ids.tolist()
        assert again.token_ids[:step].tolist() == rollout.completion_ids[:step].tolist()
        if rollout.grade.well_formed:
            ids = again.token_ids[:-1] if rollout.finish_reason == "stop" else again.token_ids
            grade = workload._task.grade(problem, workload._tokenizer.decode(ids))
            assert (grade.well_formed, grade.correct) == (True, rollout.grade.correct)
    assert (True, True) in grades  # so that there was something to keep


# --- stalls ------------------------------------------------------------------------------------------------------


class StallingTask:
    """Grades as `task` does, and blocks the loop at the first completion."""

    def __init__(self, task: Any) -> None:
        self._task = task
        self._stalled = False

    def grade(self, problem: Any, completion: str) -> Any:
        if not self._stalled:
            self._stalled = True
            time.sleep(STALL_S)
        return self._task.grade(problem, completion)


def test_a_stall_while_grading_is_seen_where_it_happened() -> None:
    def plant(workload: LoopWorkload) -> None:
        workload._dispatcher._task = StallingTask(workload._task)

    measured, derived, _ = sampled(plant=plant)
    # A tick comes due at most 10 ms after the stall begins and can run when it ends.
    assert measured["lag_max_ms"] > (STALL_S - 0.02) * 1e3
    assert derived["rollout_stall_ms"] > (STALL_S - 0.02) * 1e3


def test_a_stall_while_committing_is_seen_where_it_happened(monkeypatch: pytest.MonkeyPatch) -> None:
    commit = Ledger.commit

    async def slow(self: Ledger, *arguments: Any, **named: Any) -> None:
        time.sleep(STALL_S)  # noqa: ASYNC251
        await commit(self, *arguments, **named)

    def plant(_: LoopWorkload) -> None:
        monkeypatch.setattr(Ledger, "commit", slow)

    measured, derived, _ = sampled(plant=plant)
    assert derived["commit_stall_ms"] > (STALL_S - 0.02) * 1e3
    assert measured["lag_max_ms"] > (STALL_S - 0.02) * 1e3
    assert measured["write_s"] > STALL_S


# --- what goes wrong ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("workload.encoding=pickle", r"workload\.encoding"),
        ("workload.chunk=0", r"workload\.chunk"),
        ("workload.lag_hz=5000", r"workload\.lag_hz"),
        ("workload.seconds=0", r"workload\.seconds"),
        ("workload.rollouts=12", "no whole number of groups of 8"),
    ],
)
def test_settings_that_cannot_work_are_refused(override: str, complaint: str) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        make(override)


def test_a_prover_that_is_not_there_leaves_nothing_behind(temporary: Path) -> None:
    with pytest.raises(UsageError, match="No embedded model"):
        asyncio.run(make("models.prover.source=embedded:nobody").open())
    assert list(temporary.glob("pvg-*")) == []


def test_a_full_disk_is_told_before_anything_is_recorded(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(temporary)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(MissingRequirementError, match=r"0\.00 GB free"):
        asyncio.run(make().open())
    assert list(temporary.glob("pvg-*")) == []
