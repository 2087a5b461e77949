"""Workloads opened, sampled and closed as the runner does it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from pvg.bench.report import Variant
from pvg.bench.runner import VariantTrial, run_trials
from pvg.bench.workloads import (
    BenchSettings,
    SettingChange,
    Workload,
    find_profile,
    make_workload,
    parse_overrides,
    read_profile,
    settings_of,
)


def load_profile(
    name_or_file: str, overrides: Sequence[str] = (), *, changes: Sequence[SettingChange] = ()
) -> BenchSettings:
    """The settings of a profile and its experiment, with `key=value` overrides and then `changes`."""
    path = find_profile(name_or_file)
    return settings_of(read_profile(path), str(path), [*parse_overrides(overrides), *changes])


async def run_variant(make: Callable[[], Workload], **settings: Any) -> tuple[Variant, dict[str, Any]]:
    """Open, sample and close one workload. Returns the variant, and what one sample's work was."""
    trial = VariantTrial(make, **settings)
    await run_trials([trial])
    return trial.result()


def use(
    profile: str, overrides: Sequence[str], look: Callable[[Any, list[dict[str, float]]], Any], *, samples: int = 1
) -> Any:
    """What `look(workload, measured samples)` finds, after the samples and before the workload is closed."""
    settings = load_profile(profile, ["models.threads=1", *overrides])

    async def run() -> Any:
        workload: Workload = make_workload(settings)
        await workload.open()
        try:
            measured = [dict(await workload.sample(index)) for index in range(samples)]
            for values in measured:
                assert values.keys() == workload.measures.keys()
            return look(workload, measured)
        finally:
            await workload.close()

    return asyncio.run(run())
