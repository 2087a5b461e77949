"""The written flaws of benchmarks/written_flaws.py are what their names say."""

from __future__ import annotations

import itertools

import numpy as np

from benchmarks.written_flaws import written
from pvg.config.task import ModchainTask
from pvg.tasks import open_task


def test_each_written_flaw_is_well_formed_and_wrong_as_its_kind_says() -> None:
    task = open_task(ModchainTask())
    seen = set()
    for problem in itertools.islice(task.problems("test"), 40):
        for kind, solution in written(problem, np.random.default_rng(0)):
            grade = task.grade(problem, solution)
            assert grade.well_formed
            assert grade.correct == (kind == "correct"), solution
            if kind in ("extra step", "dropped step"):
                assert grade.note == kind, solution
            seen.add(kind)
    assert {"correct", "extra step", "first step only", "dropped step", "wrong sum"} <= seen
