"""`pvg rollout` on many small chunks: the metrics of all of them, with work that grows with the rollouts alone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from small_games import changed, recorded, rows

from pvg.game import session as game_session
from pvg.game.run import sample_only
from pvg.store.run_directory import RunDirectory
from pvg.store.samples import SampleColumns
from pvg.store.shards import columns_in_memory
from pvg.telemetry.events import SilentObserver

pytestmark = pytest.mark.slow

CHUNKS, GROUP_SIZE = 8, 2


def test_every_rollout_is_joined_and_summed_up_a_fixed_number_of_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined, summed = [], []
    join, sum_up = SampleColumns.joined, game_session.sample_metrics

    def counted_join(parts: Sequence[SampleColumns]) -> SampleColumns:
        joined.append(sum(map(len, parts)))
        return join(parts)

    def counted_sum(sample: SampleColumns, seconds: float) -> dict[str, float]:
        summed.append(len(sample))
        return sum_up(sample, seconds)

    monkeypatch.setattr(SampleColumns, "joined", counted_join)
    monkeypatch.setattr(game_session, "sample_metrics", counted_sum)
    settings = {"rollout.group_size": GROUP_SIZE, "rollout.engine.max_rows": 2 * GROUP_SIZE, "rollout.max_tokens": 8}
    experiment = changed(settings)
    run = RunDirectory.create(tmp_path, "samples", experiment)
    with run.lock():
        outcome = asyncio.run(
            sample_only(
                experiment,
                run,
                observer=SilentObserver(),
                stop=asyncio.Event(),
                problems=CHUNKS,
                role="both",
                split="train",
            )
        )
    sampled = recorded(run)
    assert len(rows(run, "step")) == CHUNKS  # one problem with both roles in each chunk
    assert len(sampled) == outcome.rounds[0]["rollouts"] == 2 * GROUP_SIZE * CHUNKS
    everything = sum_up(columns_in_memory(sampled), 1.0)
    for name in ("truncated", "completion_tokens", "malformed"):
        assert outcome.rounds[0][name] == pytest.approx(everything[name])
    assert sum(joined) == len(sampled)
    assert sum(summed) == 2 * len(sampled)  # in its chunk, and at the end
