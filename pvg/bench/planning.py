"""What one call of `pvg bench` is to measure: its variants, resolved and checked before anything runs.

    plan = plan_bench("rollout", sweep="rollout.max_rows=8,64,256")
    plan = plan_bench("sync", server_urls=["http://127.0.0.1:8000"])

A plain bench has one variant, a sweep one for each value, an ablation one for each rung of the profile's ladder: first
all switches slow, then one after the other fast, each rung keeping those before it. A profile may have a sweep of its
own, which is what a plain bench of it measures, unless a setting that it varies is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from pvg.bench import servers
from pvg.bench.profile import (
    OWN_KEYS,
    BenchSettings,
    Profile,
    SettingChange,
    find_profile,
    flattened,
    parse_overrides,
    read_profile,
    settings_of,
)
from pvg.bench.runner import WALL
from pvg.bench.workloads import REPLAYING, SERVED, WORKLOADS, WorkloadTable
from pvg.config.experiment import nearest, parse_list
from pvg.errors import ConfigurationError, UsageError
from pvg.store.run_directory import RunDirectory

Kind = Literal["bench", "sweep", "ablation"]

# Settings of the whole process: variants that differ in them cannot be open at once.
PROCESS_WIDE = frozenset({"models.threads", "telemetry.event_loop"})
ALL_SLOW = "all slow"


@dataclass(frozen=True)
class PlannedVariant:
    """One variant to measure. `says` is what its last switch does."""

    label: str
    overrides: dict[str, Any]
    settings: BenchSettings
    says: str = ""


@dataclass(frozen=True)
class BenchPlan:
    """What one call measures; `base` are the settings without any variant's own. `serve`: on servers of its own."""

    kind: Kind
    base: BenchSettings
    choices: tuple[PlannedVariant, ...]
    interleave: bool
    table: WorkloadTable = field(default_factory=lambda: WORKLOADS)
    serve: bool = False

    @property
    def samples(self) -> int:
        """How many samples are taken in all, the warm-up's among them."""
        return len(self.choices) * (self.base.profile.warmup + self.base.profile.repeats)


def plan_bench(
    name: str,
    overrides: Sequence[str] = (),
    *,
    sweep: str | None = None,
    ablate: bool = False,
    interleave: bool | None = None,
    replay: RunDirectory | None = None,
    server_urls: Sequence[str] = (),
    serve: bool = False,
    table: WorkloadTable = WORKLOADS,
) -> BenchPlan:
    """Resolve every variant, and make each workload once, so that what is wrong with one is known before any runs.

    `interleave`: None chooses (see above). `server_urls`: vLLM servers to measure on; `serve`: start some. Raises
    UsageError and ConfigurationError.
    """
    settings = parse_overrides(overrides)
    given = [*_on_servers(server_urls, serve, settings), *settings]
    profile, origin = _profile(name, given)
    _check_workload(profile.profile, origin, replay, bool(server_urls) or serve, table)
    if sweep is not None and ablate:
        raise UsageError("--sweep and --ablate contradict each other.", "Call pvg bench once for each.")
    settle = partial(settings_of, profile, origin, replay=replay)
    base = settle(given)
    kind: Kind = "bench"
    choices = [PlannedVariant("", {}, base)]
    if sweep is not None:
        kind, changes = "sweep", _swept(sweep, given)
        choices = [
            PlannedVariant(_label(change), {change.key: change.value}, settle([*given, change])) for change in changes
        ]
    elif ablate:
        kind = "ablation"
        choices = [
            PlannedVariant(label, {change.key: change.value for change in state}, settle([*given, *state]), says)
            for label, state, says in _ladder(base, origin, given)
        ]
    elif own := _own_sweep(profile, origin, given):
        kind = "sweep"
        choices = [
            PlannedVariant(label, {change.key: change.value for change in changes}, settle([*given, *changes]), says)
            for label, changes, says in own
        ]
    for choice in choices:
        _check_headline(table[profile.profile](choice.settings).measures, base)
    if not serve and any(map(is_served, choices)):
        servers.refuse_swept(key for choice in choices for key in choice.overrides)
    wanted = profile.interleave or None if interleave is None else interleave
    return BenchPlan(kind, base, tuple(choices), _interleaved(kind, choices, wanted), table, serve)


def _on_servers(urls: Sequence[str], serve: bool, given: Sequence[SettingChange]) -> list[SettingChange]:
    """What --server and --serve set."""
    if urls and serve:
        raise UsageError("--server and --serve contradict each other.", "Name servers, or have them started.")
    if not urls and not serve:
        return []
    origin = "--serve" if serve else f"--server {urls[0]}"
    changes = [SettingChange("rollout.engine", "vllm", origin)]
    changes += [SettingChange("serving.servers", list(urls), origin)] if urls else []
    for change in given:
        if change.key in ("rollout.engine", "serving.servers"):
            raise UsageError(f"{change.key} is set by {origin.split(maxsplit=1)[0]}.", f"Drop {change.origin}.")
    return changes


def _profile(name: str, given: Sequence[SettingChange]) -> tuple[Profile, str]:
    """The profile and its file; where the engine is vLLM, the one that takes its place there."""
    path = find_profile(name)
    profile = read_profile(path)
    engine = {change.key: change.value for change in given}.get("rollout.engine")
    if engine == "vllm" and profile.on_servers:
        path = find_profile(profile.on_servers)
        profile = read_profile(path)
    return profile, str(path)


def _check_workload(
    workload: str, origin: str, replay: RunDirectory | None, on_servers: bool, table: WorkloadTable
) -> None:
    if workload not in table:
        hint = nearest(workload, list(table))
        raise ConfigurationError(
            f"There is no workload {workload!r} ({origin})." + (f" Did you mean {hint!r}?" if hint else ""),
            f"Known: {', '.join(table)}.",
        )
    if replay is not None and workload not in REPLAYING:
        raise UsageError(
            f"The workload {workload!r} makes its own work; it cannot replay a run.",
            f"--replay goes with {' and '.join(sorted(REPLAYING))}.",
        )
    if on_servers and workload not in SERVED:
        raise UsageError(
            f"The workload {workload!r} does not measure what servers do.",
            f"--server and --serve go with {', '.join(sorted(SERVED))}.",
        )


def _check_headline(measures: Any, base: BenchSettings) -> None:
    headline, known = base.profile.headline, [WALL, *measures]
    if headline not in known:
        raise ConfigurationError(
            f"Profile {base.profile.name!r} has the headline {headline!r}, which its workload does not measure.",
            f"It measures {', '.join(known)}.",
        )


def _swept(sweep: str, given: Sequence[SettingChange]) -> list[SettingChange]:
    """`key=a,b,c` -> one change for each value."""
    key, values = parse_list(sweep)
    if key in OWN_KEYS:
        raise UsageError(f"--sweep {key}: the variants of one report have the same {key}.", f"Use --set {key}=...")
    if any(change.key == key for change in given):
        raise UsageError(f"{key} is both set and swept.", "Leave out one of --set and --sweep.")
    changes = [SettingChange(key, value, f"--sweep {sweep}") for value in values]
    labels = [_label(change) for change in changes]
    repeated = next((label for label in labels if labels.count(label) > 1), None)
    if repeated:
        raise UsageError(f"--sweep {sweep!r} names {repeated} twice.")
    return changes


def _own_sweep(
    profile: Profile, origin: str, given: Sequence[SettingChange]
) -> list[tuple[str, list[SettingChange], str]]:
    """The profile's own sweep: for each variant its label, its changes, and what they do. Empty where there is none, or
    where a setting of it is given."""
    found = [
        (value.label, list(flattened(value.changes, f"[[sweep]] of {origin}")), value.says) for value in profile.sweep
    ]
    varied = {change.key for _, changes, _ in found for change in changes}
    return [] if varied & {change.key for change in given} else found


def _ladder(
    base: BenchSettings, origin: str, given: Sequence[SettingChange]
) -> list[tuple[str, list[SettingChange], str]]:
    """For each variant, slowest first: its label, the state of all switches, and what its last switch does."""
    rungs = base.profile.ladder
    if not rungs:
        raise UsageError(f"The profile {base.profile.name!r} has no ladder to climb.", "Add [[ladder]] to its file.")
    for change in given:
        if any(change.key == rung.switch for rung in rungs):
            raise UsageError(f"{change.key} is a switch of the ladder, which --ablate sets.", f"Drop {change.origin}.")
    state: dict[str, SettingChange] = {}
    for rung in rungs:
        state.setdefault(rung.switch, SettingChange(rung.switch, rung.slow, f"[[ladder]] of {origin}"))
    variants = [(ALL_SLOW, list(state.values()), "")]
    for rung in rungs:
        fast = SettingChange(rung.switch, rung.fast, f"[[ladder]] of {origin}")
        state[rung.switch] = fast
        variants.append((_label(fast), list(state.values()), rung.says))
    return variants


def _label(change: SettingChange) -> str:
    value = change.value
    return f"{change.key}={str(value).lower() if isinstance(value, bool) else value}"


def _interleaved(kind: Kind, choices: Sequence[PlannedVariant], wanted: bool | None) -> bool:
    tied = sorted({key for choice in choices for key in choice.overrides} & PROCESS_WIDE)
    if wanted and tied:
        raise UsageError(
            f"{' and '.join(tied)} belongs to the whole process: variants that differ in it cannot be interleaved.",
            "Drop --interleave.",
        )
    if wanted and any(map(is_served, choices)):
        raise UsageError(
            "Variants on vLLM servers cannot be interleaved: a server has one set of weights.", "Drop --interleave."
        )
    if kind == "bench" or tied or any(map(is_served, choices)):
        return False
    if wanted is not None:
        return wanted
    models = choices[0].settings.experiment.models
    small = all(model.source.startswith("embedded:") for model in (models.prover, models.verifier))
    return kind == "ablation" and small


def is_served(choice: PlannedVariant) -> bool:
    return choice.settings.experiment.rollout.engine == "vllm"
