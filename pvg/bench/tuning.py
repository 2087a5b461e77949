"""Which settings of a profile suit this machine: its `[[tune]]` settings, each measured over its values, one after the
other, each with those chosen before it.

    tuned = tune("rollout", ["models.threads=1"], command="pvg bench --profile rollout --tune")
    path.write_text(tuned.to_toml())            # pvg train -s @FILE

One after the other finds the best of each setting beside the others' present values, not the best of all combinations:
a few minutes instead of hours.
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
from pvg.bench.runner import OnSample
from pvg.bench.statistics import median
from pvg.bench.variants import run_plan
from pvg.bench.workloads import WORKLOADS, WorkloadTable
from pvg.config.experiment import assign
from pvg.errors import PvgError, UsageError

# A smaller value is taken when its median is this close to the best one's: larger batches cost memory, and of two
# values that differ by less than the noise the smaller is the cheaper one.
NEAR = 0.02


@dataclass(frozen=True)
class TuningResult:
    """What was chosen, in order, and the sweep behind each choice."""

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
        """A file for `--set @FILE`: the settings, and above them what they were chosen from, in comments."""
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
    """Measure and choose. Raises UsageError for a profile that has nothing to tune, or whose settings are all given;
    PvgError when no value of a setting could be measured."""
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
    """The profile's settings that nobody has given. Raises UsageError when there are none."""
    profile = read_profile(find_profile(name))
    given = {text.partition("=")[0].strip() for text in overrides}
    found = [entry for entry in profile.tune if entry.key not in given]
    if not found:
        what = "whose values are not given already" if profile.tune else "of its own"
        raise UsageError(
            f"The profile {profile.name!r} has no settings to tune {what}.",
            "Measure values of your choice with --sweep KEY=A,B,C.",
        )
    return found


def choose(report: BenchReport, entry: TuningRange) -> Any:
    """The first of the values, smallest first, whose median is within NEAR of the best one's."""
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
