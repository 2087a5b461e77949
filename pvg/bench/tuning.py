"""Chooses settings that suit this machine: measures each `[[tune]]` setting of a profile over its values.

    tuned = tune("rollout", ["models.threads=1"], command="pvg bench --profile rollout --tune")
    path.write_text(tuned.to_toml())            # pvg train -s @FILE

Settings are chosen one after the other, each with the earlier choices applied. This finds the best value of each
setting given the others, not the best of all combinations. It takes a few minutes instead of hours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tomli_w

from pvg.bench.compare import headline_of
from pvg.bench.planning import plan_bench
from pvg.bench.profile import TuningRange, find_profile, read_profile
from pvg.bench.report import BenchReport, Variant
from pvg.bench.runner import OnSample, run_plan
from pvg.bench.statistics import median
from pvg.bench.workloads import WORKLOADS, WorkloadTable
from pvg.config.load import assign
from pvg.errors import PvgError, UsageError

# Take a smaller value if its median is within this share of the best one: larger batches cost memory, and a difference
# below the noise is not worth it.
NEAR = 0.02


@dataclass(frozen=True)
class TuningResult:
    """The chosen settings in order, and the sweep behind each choice."""

    choices: tuple[tuple[str, Any], ...]
    reports: tuple[BenchReport, ...]
    command: str

    def settings(self) -> dict[str, Any]:
        """The chosen settings as nested plain data."""
        data: dict[str, Any] = {}
        for key, value in self.choices:
            assign(data, key, value)
        return data

    def to_toml(self) -> str:
        """A file for `--set @FILE`: the settings, with the measurements behind each choice as comments."""
        first = self.reports[0]
        machine = first.environment
        lines = [
            f"Made by {self.command}",
            f"on {first.created[:10]}: {machine.gpu or machine.cpu}, {machine.cores} cores, torch {machine.torch}.",
            "Use it with: --set @FILE",
        ]
        for (key, value), report in zip(self.choices, self.reports, strict=True):
            lines += ["", f"{key}: {value} was chosen by {headline_of(report)}:"]
            lines += [f"  {_measured(variant, headline_of(report))}" for variant in report.variants]
        return "".join(f"# {line}".rstrip() + "\n" for line in lines) + "\n" + tomli_w.dumps(self.settings())


def tune(
    name: str,
    overrides: Sequence[str] = (),
    *,
    command: str,
    on_sample: OnSample | None = None,
    table: WorkloadTable = WORKLOADS,
) -> TuningResult:
    """Measure and choose. Raises UsageError if the profile has nothing to tune, or if all its settings are given;
    PvgError if no value of a setting could be measured."""
    choices: list[tuple[str, Any]] = []
    reports = []
    for entry in to_tune(name, overrides):
        chosen = [f"{key}={value}" for key, value in choices]
        values = ",".join(map(str, entry.values))
        plan = plan_bench(name, [*overrides, *chosen], sweep=f"{entry.key}={values}", interleave=True, table=table)
        report = run_plan(plan, command=command, on_sample=on_sample).report
        reports.append(report)
        choices.append((entry.key, choose(report, entry)))
    return TuningResult(tuple(choices), tuple(reports), command)


def to_tune(name: str, overrides: Sequence[str]) -> list[TuningRange]:
    """The profile's `[[tune]]` settings that the user has not given. Raises UsageError if there are none."""
    profile = read_profile(find_profile(name))
    given = {text.partition("=")[0].strip() for text in overrides}
    found = [entry for entry in profile.tune if entry.key not in given]
    if not found:
        what = "that are not given already" if profile.tune else "at all"
        raise UsageError(
            f"The profile {profile.name!r} has no settings to tune {what}.",
            "Measure values of your choice with --sweep KEY=A,B,C.",
        )
    return found


def choose(report: BenchReport, entry: TuningRange) -> Any:
    """The smallest value whose median is within NEAR of the best one's."""
    headline = headline_of(report)
    measured = {
        variant.overrides[entry.key]: variant.samples[headline] for variant in report.variants if variant.status == "ok"
    }
    if not measured:
        raise PvgError(f"No value of {entry.key} could be measured: {report.variants[0].reason}", "")
    sign = 1.0 if next(iter(measured.values())).better == "higher" else -1.0
    worth = {value: median(samples.values) ** sign for value, samples in measured.items()}
    best = max(worth.values())
    return next(value for value in sorted(worth) if worth[value] >= (1.0 - NEAR) * best)


def _measured(variant: Variant, headline: str) -> str:
    if variant.status != "ok":
        return f"{variant.label}: failed ({variant.reason})"
    samples = variant.samples[headline]
    low, high = min(samples.values), max(samples.values)
    return f"{variant.label}: {median(samples.values):.4g} {samples.unit} ({low:.4g} to {high:.4g})"
