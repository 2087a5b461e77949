"""Measures all variants of one call of `pvg bench` and makes the report.

    plan = plan_bench("rollout", sweep="rollout.max_rows=8,64,256")     # pvg.bench.planning
    result = run_plan(plan, command="pvg bench ...")

Variants run one after the other, or interleaved: all are open at once and take their samples in turn. The speed of a
shared machine drifts over minutes. Without interleaving, this drift looks like a difference between variants;
interleaved, it affects all of them alike. The price is that all models are in memory at once. So interleaving is the
default only for an ablation of models that come with pvg, which are small. Variants on vLLM servers are never
interleaved: a server has one set of weights, those of the session that published last.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from itertools import groupby
from typing import Any, TypeVar

from pvg.bench import servers
from pvg.bench.planning import BenchPlan, Kind, PlannedVariant, is_served, plan_bench
from pvg.bench.profile import BenchSettings
from pvg.bench.report import BenchReport, Variant, read_environment, torch_threads
from pvg.bench.runner import OnSample, VariantTrial, run_trials
from pvg.config.experiment import Experiment
from pvg.errors import ConfigurationError, PvgError
from pvg.servers.control import ServerInfo
from pvg.telemetry.device import peak_memory
from pvg.telemetry.spans import DeviceClock

__all__ = ["BenchPlan", "BenchResult", "PlannedVariant", "common_work", "on_loop", "plan_bench", "run_plan"]

T = TypeVar("T")


@dataclass(frozen=True)
class BenchResult:
    """The report, and the exit code: 0, or that of the first failed variant."""

    report: BenchReport
    exit_code: int


def _shared_executor(experiment: Experiment) -> ThreadPoolExecutor:
    """One compute thread for all interleaved variants. With one thread each, the variants would slow each other down
    even while idle."""
    from pvg.models.compute import compute_executor

    return compute_executor(experiment.models.threads)


def run_plan(
    plan: BenchPlan, *, command: str, on_sample: OnSample | None = None, on_server: servers.OnServer | None = None
) -> BenchResult:
    """Measure every variant. A workload's PvgError fails its variant; any other exception propagates, as does Ctrl-C.

    Before measuring, raises the errors of `pvg.bench.servers.look` about missing or unsuitable servers. `on_server`
    receives a line of progress for each server that pvg starts.
    """
    profile, experiment = plan.base.profile, plan.base.experiment
    created = datetime.now(UTC).isoformat(timespec="seconds")
    environment = read_environment(experiment.telemetry.event_loop)
    trial = partial(_trial, plan, on_sample, _device_clock(plan.base, environment.gpu))
    infos: list[ServerInfo] = []
    if plan.serve:
        trials = _run_on_own_servers(plan, trial, infos, on_server)
    else:
        infos = _look_at_servers(plan)
        trials = _run_interleaved(plan, trial) if plan.interleave else _run_one_by_one(plan, trial)
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
        config=plan.base.plain()
        | ({} if plan.kind == "bench" else {"interleave": plan.interleave})
        | ({"servers": servers.told(infos)} if infos else {}),
        work=common_work(works),
        environment=environment.model_copy(
            update={
                "threads": torch_threads(experiment.models.threads),
                "vllm": servers.versions(infos) or environment.vllm,
            }
        ),
        warmup=profile.warmup,
        repeats=profile.repeats,
        variants=variants,
        peak_memory=peak_memory(),
    )
    failed = next((trial.error for trial in trials if trial.error is not None), None)
    return BenchResult(report, failed.exit_code if failed is not None else 0)


# Arguments: the executor of the compute thread and the experiment of the workload; None: the choice's defaults.
MakeTrial = Callable[[PlannedVariant, Executor | None, Experiment | None], VariantTrial]


def _trial(
    plan: BenchPlan,
    on_sample: OnSample | None,
    clock: DeviceClock | None,
    choice: PlannedVariant,
    executor: Executor | None,
    experiment: Experiment | None,
) -> VariantTrial:
    profile = plan.base.profile
    settings = replace(choice.settings, executor=executor, experiment=experiment or choice.settings.experiment)
    return VariantTrial(
        partial(plan.table[profile.profile], settings),
        warmup=profile.warmup,
        repeats=profile.repeats,
        label=choice.label,
        overrides=choice.overrides,
        on_sample=on_sample,
        device_clock=clock,
    )


def _run_interleaved(plan: BenchPlan, trial: MakeTrial) -> list[VariantTrial]:
    experiment = plan.base.experiment
    with _shared_executor(experiment) as executor:
        trials = [trial(choice, executor, None) for choice in plan.choices]
        on_loop(experiment.telemetry.event_loop, run_trials(trials))
    return trials


def _run_one_by_one(plan: BenchPlan, trial: MakeTrial) -> list[VariantTrial]:
    trials = []
    for choice in plan.choices:
        trials.append(trial(choice, None, None))
        on_loop(choice.settings.experiment.telemetry.event_loop, run_trials(trials[-1:]))
    return trials


def _run_on_own_servers(
    plan: BenchPlan, trial: MakeTrial, infos: list[ServerInfo], on_server: servers.OnServer | None
) -> list[VariantTrial]:
    """Measure on servers that pvg starts. Adjacent variants share a server if they can. Adds each server's description
    to `infos`. A server that does not start fails the variants that need it."""

    async def measure(choices: Sequence[PlannedVariant]) -> list[VariantTrial]:
        trials: list[VariantTrial] = []
        try:
            async with servers.own_server(choices[0].settings.experiment, on_server) as served:
                infos.extend(await servers.look(served))
                for choice in choices:
                    own = servers.with_servers(choice.settings.experiment, served.serving.servers)
                    trials.append(trial(choice, None, own))
                    await run_trials(trials[-1:])
        except PvgError as error:
            for choice in choices[len(trials) :]:
                trials.append(trial(choice, None, None))
                trials[-1].error = error
        return trials

    done: list[VariantTrial] = []
    for _, group in groupby(plan.choices, key=lambda choice: servers.start_settings(choice.settings.experiment)):
        choices = list(group)
        done += on_loop(choices[0].settings.experiment.telemetry.event_loop, measure(choices))
    return done


def _look_at_servers(plan: BenchPlan) -> list[ServerInfo]:
    """The descriptions of the running servers, each server once."""
    given = [key for key, origin in plan.base.origins.items() if origin.startswith("--set")]
    found: dict[str, ServerInfo] = {}
    for choice in filter(is_served, plan.choices):
        experiment = choice.settings.experiment
        if not set(experiment.serving.servers) <= found.keys():
            infos = on_loop("asyncio", servers.look(experiment, given))
            found |= dict(zip(experiment.serving.servers, infos, strict=True))
    return list(found.values())


class OtherWorkError(ConfigurationError):
    """A rung of a ladder changes the work itself, so its gain cannot be measured."""


def _results(trials: Sequence[VariantTrial], kind: Kind) -> tuple[tuple[Variant, ...], dict[str, dict[str, Any]]]:
    """The variants, and the work of those that ran. All rungs of a ladder must do the same work."""
    works: dict[str, dict[str, Any]] = {}
    variants = []
    for trial in trials:
        variant, work = trial.result()
        if variant.status == "ok":
            first = next(iter(works.values()), work)
            if kind == "ablation" and work != first:
                trial.error = OtherWorkError(
                    f"Its work differs from that of {next(iter(works))!r}: {_differing(first, work)}."
                )
                variant, _ = trial.result()
            else:
                works[variant.label] = work
        variants.append(variant)
    return tuple(variants), works


def _differing(first: dict[str, Any], other: dict[str, Any]) -> str:
    keys = [key for key in first.keys() | other.keys() if first.get(key) != other.get(key)]
    return ", ".join(f"{key} is {other.get(key)}, not {first.get(key)}" for key in sorted(keys))


def common_work(works: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The work that all variants have in common; differences stand under "by_variant", by label."""
    if not works:
        return {}
    first = next(iter(works.values()))
    alike = {key: value for key, value in first.items() if all(work.get(key) == value for work in works.values())}
    rest = {label: {k: v for k, v in work.items() if k not in alike} for label, work in works.items()}
    return alike | ({"by_variant": rest} if any(rest.values()) else {})


def on_loop(event_loop: str, work: Coroutine[Any, Any, T]) -> T:
    """Run `work` to its end in a new event loop of the kind that `telemetry.event_loop` names."""
    with asyncio.Runner(loop_factory=_loop_factory(event_loop)) as runner:
        return runner.run(work)


def _loop_factory(event_loop: str) -> Callable[[], asyncio.AbstractEventLoop]:
    if event_loop == "uvloop":
        import uvloop

        factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
        return factory
    return asyncio.new_event_loop


def _device_clock(settings: BenchSettings, gpu: str | None) -> DeviceClock | None:
    """A clock for CUDA if the models run there. Without a GPU it does not import torch: not every workload needs it."""
    if gpu is None:
        return None
    from pvg.models import pick_device
    from pvg.telemetry.spans import CudaClock

    return CudaClock() if pick_device(settings.experiment.models.device).type == "cuda" else None
