"""Reports that were measured on another ladder, or another sweep, than their profile has now.

    for line in outdated({"e2e-ablation.json": report, ...}): print(line)       # used by make_benchmarks

The page says of an ablation that all switches were slow and then all fast: that is so of the switches that its report
knows. A --sweep of the command line is whatever was asked for; only a profile's own sweep is looked at.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pvg.bench.profile import Profile, known_profiles, read_profile
from pvg.bench.report import BenchReport

# Switches that were removed with their slow side, because the reports could not tell their two sides apart end to end.
REMOVED = frozenset(
    (
        *("rollout.shared_prefill", "rollout.compaction", "rollout.shared_attention"),
        *("training.bucketing", "training.fused_logprobs", "workload.row_digests"),
    )
)
# Settings that were renamed. `_renamed` gives their values too, where a choice became a table with a kind.
RENAMED = {
    "rollout.max_rows": "rollout.engine.max_rows",
    "rollout.decoding": "rollout.engine.decoding",
    "rollout.batching": "rollout.engine.batching",
    "rollout.grading": "workload.grading",
    "rollout.group_deadline_s": "rollout.deadline.seconds",
    "rollout.min_group": "rollout.deadline.min_rollouts",
    "rollout.partial": "rollout.deadline.kind",
    "rollout.partial_versions": "rollout.deadline.max_versions",
    "rollout.prefer": "rollout.prefetch.kind",
}
DEVELOPERS = Path(__file__).parents[1]


def outdated(reports: Mapping[str, BenchReport]) -> Iterator[str]:
    """A line for each of them, `reports` by the name of their file. Those of profiles that are not pvg's are left out:
    their files may be anywhere."""
    shipped = known_profiles() | {path.stem: path for path in DEVELOPERS.glob("*.toml")}
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
    """Without the switches that no profile can have any more, and with the names that the settings have now."""
    entries = report.config["profile"].get(what, [])
    return [_renamed(_setting(entry)) for entry in entries if entry.get("switch") not in REMOVED]


def _renamed(entry: dict[str, Any]) -> dict[str, Any]:
    """A rung or a step of a sweep under the names of now. One that has these names already stays as it is."""
    if "switch" in entry:
        return entry | {"switch": RENAMED.get(entry["switch"], entry["switch"])}
    before = entry["set"]
    now = {RENAMED.get(key, key): value for key, value in before.items()}
    if "rollout.group_deadline_s" in before:
        now["rollout.deadline.kind"] = "continue" if before.get("rollout.partial") else "cut"
    ahead = before.get("rollout.prefetch")
    if ahead == 0:
        now["rollout.prefetch"] = "none"
    elif isinstance(ahead, int):
        del now["rollout.prefetch"]
        now |= {"rollout.prefetch.kind": before.get("rollout.prefer", "fresh"), "rollout.prefetch.batches": ahead}
    return entry | {"set": now}


def _defined(profile: Profile, what: str) -> list[Any]:
    return [_setting(entry) for entry in profile.model_dump(mode="json", by_alias=True)[what]]


def later_lines(report: BenchReport) -> Iterator[str]:
    """What became of the report's settings after it: which were removed, which were renamed. Nothing if none."""
    settings = list(dict.fromkeys(setting for variant in report.variants for setting in variant.overrides))
    commit = (report.environment.git_commit or "unknown")[:10]
    if gone := ", ".join(f"`{setting}`" for setting in settings if setting in REMOVED):
        yield ""
        yield f"After this report (commit {commit}) these switches were removed with their slow sides: {gone}."
    if moved := ", ".join(f"`{name}` (now `{RENAMED[name]}`)" for name in settings if name in RENAMED):
        yield ""
        yield f"After this report (commit {commit}) these settings were renamed: {moved}."


def _setting(entry: Mapping[str, Any]) -> dict[str, Any]:
    """What it sets. Other words for the same switch measure nothing else."""
    return {key: value for key, value in entry.items() if key not in ("says", "label")}
