"""The work of a stage: the benchmark profile of its name, on the experiment that is to be profiled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pvg.bench.profile import (
    WORKLOAD,
    BenchSettings,
    Change,
    find_profile,
    parse_overrides,
    read_profile,
    settings_of,
)
from pvg.errors import UsageError
from pvg.experiment import nearest

Stage = Literal["rollout", "trainer", "e2e"]
STAGES: tuple[Stage, ...] = ("rollout", "trainer", "e2e")
ROLLOUTS = "rollouts"  # of a workload's table: how many there are in a sample


def stage_of(name: str) -> Stage:
    for stage in STAGES:
        if stage == name:
            return stage
    hint = nearest(name, STAGES)
    raise UsageError(
        f"There is no stage {name!r}." + (f" Did you mean {hint!r}?" if hint else ""), f"Known: {', '.join(STAGES)}."
    )


def stage_settings(stage: Stage, experiment: str, overrides: Sequence[str]) -> BenchSettings:
    """The settings of a stage's workload: `experiment` (a name or a file) as it stands, with the overrides.

    The profile's own changes belong to its benchmark and are left out; as many rollouts are worked on as the experiment
    has in a batch, unless `workload.rollouts` is given. Raises UsageError and ConfigurationError.
    """
    path = find_profile(stage)
    profile = read_profile(path).model_copy(update={"experiment": experiment, "changes": {}})
    given = parse_overrides(overrides)
    settings = settings_of(profile, str(path), given)
    key = f"{WORKLOAD}{ROLLOUTS}"
    if ROLLOUTS not in profile.workload or key in {change.key for change in given}:
        return settings
    batch = settings.experiment.arithmetic().rollouts_per_batch
    return settings_of(profile, str(path), [Change(key, batch, "the experiment's batch"), *given])
