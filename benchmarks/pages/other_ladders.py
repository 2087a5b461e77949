"""Reports of earlier versions of their profile: other switches, other sweeps, other names and other words.

    for line in outdated({"e2e-ablation.json": report, ...}): print(line)       # used by make_benchmarks

`outdated` compares the ladder or the sweep of a report with that of its profile. It ignores reports of a `--sweep` of
the command line. Reports never change. The pages replace labels and descriptions that are hard to understand.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pvg.bench.profile import Profile, read_profile
from pvg.bench.report import BenchReport
from pvg.config.load import known_files

# Switches that were removed with their slow side, because no report showed a significant difference end to end.
REMOVED = frozenset(
    (
        *("rollout.shared_prefill", "rollout.compaction", "rollout.shared_attention"),
        *("training.bucketing", "training.fused_logprobs", "training.blocked_layers", "workload.row_digests"),
    )
)
# Settings that were renamed. `_renamed` also converts the values of choices that became a table with a kind.
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
# Abbreviations in labels -> what the page shows.
ABBREVIATIONS = {
    "old": "oldest group first",
    "workers": "two workers",
    "trainers=1": "one of two workers only trains",
    "spo": "loss spo",
    "partial": "cut rollouts continue",
    "spare": "spare connections",
}
# Descriptions in earlier reports -> the same in words that are easier to understand.
REWORDED = {
    "a decoding step of pvg's own instead of the forward pass of transformers' module": (
        "pvg's decoding step instead of the forward pass of transformers' module"
    ),
    "scores remembered": "scores kept in a cache",
    "scores remembered (within one step no solution comes back: see the verifier profile)": (
        "scores kept in a cache (no effect here, because no solution repeats within one step; see the verifier profile)"
    ),
    "rollouts join as others finish (here all fit at once: rollout-stream shows what it is for)": (
        "rollouts join as others finish (no effect here, because all fit at once; see rollout-stream)"
    ),
    "what the reference's forward pass costs: as if its log-probs were known (no setting of the game)": (
        "without the reference's forward pass, to show its cost (no setting of the game)"
    ),
    "scores/s with a cold and a warm cache, pairs/s of training, time to the first batch, what the penalty costs": (
        "scores/s with a cold and a warm cache, pairs/s of training, time to the first batch, cost of the penalty"
    ),
    "what a weight update waits for: wall, rpc and queue time, with the engine idle and under 150 streams": (
        "time of a weight update: wall, rpc and queue time, with an idle engine and with 150 streams"
    ),
    "what a weight update waits for under 150 streams of a vLLM server, by the client that carries it": (
        "time of a weight update while a vLLM server runs 150 streams, by the HTTP client that sends it"
    ),
    "tokens/s, MFU against this machine's own matmul rate, padding, one forward against two": (
        "tokens/s, MFU relative to this machine's matmul rate, padding, one forward pass compared with two"
    ),
    "step time with workers on two simulated Ray nodes, against as many local workers": (
        "step time with workers on two simulated Ray nodes, compared with the same number of local workers"
    ),
}
# Labels of profiles/pipeline.toml from before the setting became a choice, and what the setting is called now.
PREFETCH = {
    "rollout.prefetch=0": "rollout.prefetch=none",
    "rollout.prefetch=1": "rollout.prefetch.batches=1",
    "rollout.prefetch=2": "rollout.prefetch.batches=2",
}
DEVELOPERS = Path(__file__).parents[1]


def reworded(text: str) -> str:
    return REWORDED.get(text, text)


def spelled_out(label: str, *, value_only: bool = False) -> str:
    """A variant's label for the page, without abbreviations. `value_only`: without the key of its setting."""
    setting, *rest = label.split(", ")
    setting = PREFETCH.get(setting, setting)
    if value_only:
        setting = setting.partition("=")[2] or setting
    elif "=" in setting:
        setting = f"`{setting}`"
    return ", ".join([setting, *(ABBREVIATIONS.get(part, part) for part in rest)])


def outdated(reports: Mapping[str, BenchReport]) -> Iterator[str]:
    """A line for each of them, `reports` by the name of their file. Profiles that are not pvg's are skipped: their
    files may be anywhere."""
    shipped = known_files("profiles") | {path.stem: path for path in DEVELOPERS.glob("*.toml")}
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
    """The entries without removed switches, with the present names of the settings."""
    entries = report.config["profile"].get(what, [])
    return [_renamed(_setting(entry)) for entry in entries if entry.get("switch") not in REMOVED]


def _renamed(entry: dict[str, Any]) -> dict[str, Any]:
    """A rung or a step of a sweep with the present names of its settings."""
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
    """The settings of the report that were removed or renamed later. Nothing if there are none."""
    settings = list(dict.fromkeys(setting for variant in report.variants for setting in variant.overrides))
    commit = (report.environment.git_commit or "unknown")[:10]
    if gone := ", ".join(f"`{setting}`" for setting in settings if setting in REMOVED):
        yield ""
        yield f"After this report (commit {commit}) these switches were removed with their slow sides: {gone}."
    if moved := ", ".join(f"`{name}` (now `{RENAMED[name]}`)" for name in settings if name in RENAMED):
        yield ""
        yield f"After this report (commit {commit}) these settings were renamed: {moved}."


def _setting(entry: Mapping[str, Any]) -> dict[str, Any]:
    """The entry without its descriptions, which do not affect what is measured."""
    return {key: value for key, value in entry.items() if key not in ("says", "label")}
