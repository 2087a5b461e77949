"""What the players of a run are opened with."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import torch

from pvg.experiment import build_experiment
from pvg.game import players
from pvg.tasks import open_task


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_the_threads_of_one_experiment_do_not_stay_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep over models.threads opens one after the other in one process; 0 is torch's own choice each time."""
    monkeypatch.setattr(players, "ALL_THREADS", 2)

    async def opened(threads: int) -> list[int]:
        experiment = build_experiment({"models": {"threads": threads}})
        found = players.Players(experiment, open_task(experiment.task))
        try:
            return [torch.get_num_threads(), await found.compute(torch.get_num_threads)]
        finally:
            await found.close()

    assert [asyncio.run(opened(threads)) for threads in (1, 0, 1)] == [[1, 1], [2, 2], [1, 1]]
