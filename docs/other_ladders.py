"""Reports that were measured on another ladder, or another sweep, than their profile has now.

    for line in outdated({"e2e-ablation.json": report, ...}): print(line)       # used by make_benchmarks.py

The page says of an ablation that all switches were slow and then all fast: that is so of the switches that its report
knows. A --sweep of the command line is whatever was asked for; only a profile's own sweep is looked at.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from pvg.bench.profile import Profile, known_profiles, read_profile
from pvg.bench.report import BenchReport


def outdated(reports: Mapping[str, BenchReport]) -> Iterator[str]:
    """A line for each of them, `reports` by the name of their file. Those of profiles that are not pvg's are left out:
    their files may be anywhere."""
    shipped = known_profiles()
    for file, report in reports.items():
        if report.name not in shipped:
            continue
        profile = read_profile(shipped[report.name])
        what = "ladder" if report.kind == "ablation" else "sweep"
        if _is_of_the_profile(report, profile) and _measured(report, what) != _defined(profile, what):
            yield f"{file} was measured with another {what}: repeat {report.command}"


def _is_of_the_profile(report: BenchReport, profile: Profile) -> bool:
    words = shlex.split(report.command)
    given = any(word == "--sweep" or word.startswith("--sweep=") for word in words)
    return report.kind == "ablation" or (report.kind == "sweep" and bool(profile.sweep) and not given)


def _measured(report: BenchReport, what: str) -> list[Any]:
    return [_setting(entry) for entry in report.config["profile"].get(what, [])]


def _defined(profile: Profile, what: str) -> list[Any]:
    return [_setting(entry) for entry in profile.model_dump(mode="json", by_alias=True)[what]]


def _setting(entry: Mapping[str, Any]) -> dict[str, Any]:
    """What it sets. Other words for the same switch measure nothing else."""
    return {key: value for key, value in entry.items() if key != "says"}
