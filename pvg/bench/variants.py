"""One call of `pvg bench`: which variants it measures, in which order, and the report of it.

    plan = plan_bench("rollout", sweep="rollout.max_rows=8,64,256")
    result = run_plan(plan, command="pvg bench ...")

A plain bench has one variant, a sweep one for each value, an ablation one for each rung of the profile's ladder: first
all switches slow, then one after the other fast, each rung keeping those before it.

The variants run one after the other, or interleaved: all are open at once, and their samples are taken in turn. On a
machine that others use too, its speed drifts over the minutes of a run; one after the other, that drift looks like a
difference between variants, in turn it hits all of them alike. The price is that all models are in memory at once, so
it is the default only for an ablation of models that come with pvg, which are small.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any, Literal, TypeVar

from pvg.bench.environment import read_environment, torch_threads
from pvg.bench.profile import OWN_KEYS, BenchSettings, Change, find_profile, parse_overrides, read_profile, settings_of
from pvg.bench.report import BenchReport, Variant
from pvg.bench.runner import WALL, OnSample, Trial, run_trials
from pvg.bench.workloads import REPLAYING, WORKLOADS, WorkloadTable
from pvg.errors import ConfigurationError, UsageError
from pvg.experiment import Experiment, nearest, parse_list
from pvg.store.run_directory import RunDirectory
from pvg.telemetry.spans import DeviceClock

Kind = Literal["bench", "sweep", "ablation"]
T = TypeVar("T")

# Settings of the whole process: variants that differ in them cannot be open at once.
PROCESS_WIDE = frozenset({"models.threads", "telemetry.event_loop"})
ALL_SLOW = "all slow"


@dataclass(frozen=True)
class Choice:
    """One variant to measure. `says` is what its last switch does."""

    label: str
    overrides: dict[str, Any]
    settings: BenchSettings
    says: str = ""


@dataclass(frozen=True)
class Plan:
    """What one call measures; `base` are the settings without any variant's own."""

    kind: Kind
    base: BenchSettings
    choices: tuple[Choice, ...]
    interleave: bool
    table: WorkloadTable = field(default_factory=lambda: WORKLOADS)

    @property
    def samples(self) -> int:
        """How many samples are taken in all, the warm-up's among them."""
        return len(self.choices) * (self.base.profile.warmup + self.base.profile.repeats)


@dataclass(frozen=True)
class Result:
    """The report, and the exit code: 0, or that of the first variant that failed."""

    report: BenchReport
    exit_code: int


# --- planning --------------------------------------------------------------------------------------------------------


def plan_bench(
    name: str,
    overrides: Sequence[str] = (),
    *,
    sweep: str | None = None,
    ablate: bool = False,
    interleave: bool | None = None,
    replay: RunDirectory | None = None,
    table: WorkloadTable = WORKLOADS,
) -> Plan:
    """Resolve every variant, and make each workload once, so that what is wrong with one is known before any runs.

    `interleave`: None chooses (see above). Raises UsageError and ConfigurationError.
    """
    path = find_profile(name)
    profile, origin, given = read_profile(path), str(path), parse_overrides(overrides)
    _check_workload(profile.profile, origin, replay, table)
    if sweep is not None and ablate:
        raise UsageError("--sweep and --ablate contradict each other.", "Call pvg bench once for each.")
    settle = partial(settings_of, profile, origin, replay=replay)
    base = settle(given)
    kind: Kind = "bench"
    choices = [Choice("", {}, base)]
    if sweep is not None:
        kind, changes = "sweep", _swept(sweep, given)
        choices = [Choice(_label(change), {change.key: change.value}, settle([*given, change])) for change in changes]
    elif ablate:
        kind = "ablation"
        choices = [
            Choice(label, {change.key: change.value for change in state}, settle([*given, *state]), says)
            for label, state, says in _ladder(base, origin, given)
        ]
    for choice in choices:
        _check_headline(table[profile.profile](choice.settings).measures, base)
    return Plan(kind, base, tuple(choices), _interleaved(kind, choices, interleave), table)


def _check_workload(workload: str, origin: str, replay: RunDirectory | None, table: WorkloadTable) -> None:
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


def _check_headline(measures: Any, base: BenchSettings) -> None:
    headline, known = base.profile.headline, [WALL, *measures]
    if headline not in known:
        raise ConfigurationError(
            f"Profile {base.profile.name!r} has the headline {headline!r}, which its workload does not measure.",
            f"It measures {', '.join(known)}.",
        )


def _swept(sweep: str, given: Sequence[Change]) -> list[Change]:
    """`key=a,b,c` -> one change for each value."""
    key, values = parse_list(sweep)
    if key in OWN_KEYS:
        raise UsageError(f"--sweep {key}: the variants of one report have the same {key}.", f"Use --set {key}=...")
    if any(change.key == key for change in given):
        raise UsageError(f"{key} is both set and swept.", "Leave out one of --set and --sweep.")
    changes = [Change(key, value, f"--sweep {sweep}") for value in values]
    labels = [_label(change) for change in changes]
    repeated = next((label for label in labels if labels.count(label) > 1), None)
    if repeated:
        raise UsageError(f"--sweep {sweep!r} names {repeated} twice.")
    return changes


def _ladder(base: BenchSettings, origin: str, given: Sequence[Change]) -> list[tuple[str, list[Change], str]]:
    """For each variant, slowest first: its label, the state of all switches, and what its last switch does."""
    rungs = base.profile.ladder
    if not rungs:
        raise UsageError(f"The profile {base.profile.name!r} has no ladder to climb.", "Add [[ladder]] to its file.")
    for change in given:
        if any(change.key == rung.switch for rung in rungs):
            raise UsageError(f"{change.key} is a switch of the ladder, which --ablate sets.", f"Drop {change.origin}.")
    state: dict[str, Change] = {}
    for rung in rungs:
        state.setdefault(rung.switch, Change(rung.switch, rung.slow, f"[[ladder]] of {origin}"))
    variants = [(ALL_SLOW, list(state.values()), "")]
    for rung in rungs:
        fast = Change(rung.switch, rung.fast, f"[[ladder]] of {origin}")
        state[rung.switch] = fast
        variants.append((_label(fast), list(state.values()), rung.says))
    return variants


def _label(change: Change) -> str:
    value = change.value
    return f"{change.key}={str(value).lower() if isinstance(value, bool) else value}"


def _interleaved(kind: Kind, choices: Sequence[Choice], wanted: bool | None) -> bool:
    tied = sorted({key for choice in choices for key in choice.overrides} & PROCESS_WIDE)
    if wanted and tied:
        raise UsageError(
            f"{' and '.join(tied)} belongs to the whole process: variants that differ in it cannot be interleaved.",
            "Drop --interleave.",
        )
    if kind == "bench" or tied:
        return False
    if wanted is not None:
        return wanted
    models = choices[0].settings.experiment.models
    small = all(model.source.startswith("embedded:") for model in (models.prover, models.verifier))
    return kind == "ablation" and small


# --- running ---------------------------------------------------------------------------------------------------------


def _shared_executor(experiment: Experiment) -> ThreadPoolExecutor:
    """One compute thread for all variants that take turns: with one each, every one of them would be slowed down by the
    mere presence of the others."""
    from pvg.game.players import compute_executor

    return compute_executor(experiment.models.threads)


def run_plan(plan: Plan, *, command: str, on_sample: OnSample | None = None) -> Result:
    """Measure every variant. A workload's PvgError fails its variant; any other exception surfaces, as does Ctrl-C."""
    profile, experiment = plan.base.profile, plan.base.experiment
    created = datetime.now(UTC).isoformat(timespec="seconds")
    environment = read_environment(experiment.telemetry.event_loop)
    clock = _device_clock(plan.base, environment.gpu)
    executor = _shared_executor(experiment) if plan.interleave else None
    trials = [
        Trial(
            partial(plan.table[profile.profile], replace(choice.settings, executor=executor)),
            warmup=profile.warmup,
            repeats=profile.repeats,
            label=choice.label,
            overrides=choice.overrides,
            on_sample=on_sample,
            device_clock=clock,
        )
        for choice in plan.choices
    ]
    if executor is not None:
        with executor:
            on_loop(experiment.telemetry.event_loop, run_trials(trials))
    else:
        for trial, choice in zip(trials, plan.choices, strict=True):
            on_loop(choice.settings.experiment.telemetry.event_loop, run_trials([trial]))
    variants, works = _results(trials, plan.kind)
    reason = next(
        (f"{variant.label}: {variant.reason}".removeprefix(": ") for variant in variants if variant.reason), ""
    )
    report = BenchReport(
        kind=plan.kind,
        profile=profile.profile,
        name=profile.name,
        status="failed" if reason else "ok",
        reason=reason,
        created=created,
        command=command,
        config=plan.base.plain() | ({} if plan.kind == "bench" else {"interleave": plan.interleave}),
        work=common_work(works),
        environment=environment.model_copy(update={"threads": torch_threads()}),
        warmup=profile.warmup,
        repeats=profile.repeats,
        variants=variants,
    )
    failed = next((trial.error for trial in trials if trial.error is not None), None)
    return Result(report, failed.exit_code if failed is not None else 0)


class OtherWorkError(ConfigurationError):
    """A rung of a ladder that changes what is done, not only how: what it buys cannot be said."""


def _results(trials: Sequence[Trial], kind: Kind) -> tuple[tuple[Variant, ...], dict[str, dict[str, Any]]]:
    """The variants, and the work of those that ran. The rungs of a ladder must all do the same work."""
    works: dict[str, dict[str, Any]] = {}
    variants = []
    for trial in trials:
        variant, work = trial.result()
        if variant.status == "ok":
            first = next(iter(works.values()), work)
            if kind == "ablation" and work != first:
                trial.error = OtherWorkError(
                    f"It does other work than {next(iter(works))!r}: {_differing(first, work)}."
                )
                variant, _ = trial.result()
            else:
                works[variant.label] = work
        variants.append(variant)
    return tuple(variants), works


def _differing(first: dict[str, Any], other: dict[str, Any]) -> str:
    keys = [key for key in first.keys() | other.keys() if first.get(key) != other.get(key)]
    return ", ".join(f"{key} is {other.get(key)} and not {first.get(key)}" for key in sorted(keys))


def common_work(works: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What all variants did; what they did not do alike stands under "by_variant"."""
    if not works:
        return {}
    first = next(iter(works.values()))
    alike = {key: value for key, value in first.items() if all(work.get(key) == value for work in works.values())}
    rest = {label: {k: v for k, v in work.items() if k not in alike} for label, work in works.items()}
    return alike | ({"by_variant": rest} if any(rest.values()) else {})


def on_loop(event_loop: str, work: Coroutine[Any, Any, T]) -> T:
    """Run to the end in a fresh event loop of the kind that `telemetry.event_loop` names."""
    with asyncio.Runner(loop_factory=_loop_factory(event_loop)) as runner:
        return runner.run(work)


def _loop_factory(event_loop: str) -> Callable[[], asyncio.AbstractEventLoop]:
    if event_loop == "uvloop":
        import uvloop

        factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
        return factory
    return asyncio.new_event_loop


def _device_clock(settings: BenchSettings, gpu: str | None) -> DeviceClock | None:
    """CUDA's clock when the models run there. Without a GPU torch is not even loaded: not every workload needs it."""
    if gpu is None:
        return None
    from pvg.models import pick_device
    from pvg.telemetry.cuda_clock import CudaClock

    return CudaClock() if pick_device(settings.experiment.models.device).type == "cuda" else None
