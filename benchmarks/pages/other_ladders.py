"""Labels of variants for the pages, and reports whose profile has another ladder or sweep today.

    for line in outdated({"e2e-ablation.json": report, ...}): print(line)       # used by make_benchmarks

`outdated` compares the ladder or the sweep of a report with that of its profile. It ignores reports of a `--sweep` of
the command line.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pvg.bench.profile import Profile, read_profile
from pvg.bench.report import BenchReport
from pvg.config.load import known_files

DEVELOPERS = Path(__file__).parents[1]


def spelled_out(label: str, *, value_only: bool = False) -> str:
    """A variant's label, with its setting as code. `value_only`: without the key of the setting."""
    setting, *rest = label.split(", ")
    if value_only:
        setting = setting.partition("=")[2] or setting
    elif "=" in setting:
        setting = f"`{setting}`"
    return ", ".join([setting, *rest])


def outdated(reports: Mapping[str, BenchReport]) -> Iterator[str]:
    """A line for each of them, `reports` by the name of their file. Profiles that are not pvg's are skipped: their
    files may be anywhere."""
    shipped = known_files("profiles") | {path.stem: path for path in DEVELOPERS.glob("*.toml")}
    for file, report in reports.items():
        if report.name not in shipped:
            continue
        profile = read_profile(shipped[report.name])
        today = profile.model_dump(mode="json", by_alias=True)
        what = "ladder" if report.kind == "ablation" else "sweep"
        if _is_of_the_profile(report, profile) and _entries(report.config["profile"], what) != _entries(today, what):
            yield f"{file} was measured with another {what}: repeat {report.command}"


def _is_of_the_profile(report: BenchReport, profile: Profile) -> bool:
    words = shlex.split(report.command)
    given = any(word == "--sweep" or word.startswith("--sweep=") for word in words)
    return report.kind == "ablation" or (report.kind == "sweep" and bool(profile.sweep) and not given)


def _entries(profile: Mapping[str, Any], what: str) -> list[dict[str, Any]]:
    """The entries without their descriptions, which do not affect what is measured."""
    return [{key: entry[key] for key in entry if key not in ("says", "label")} for entry in profile.get(what, [])]
