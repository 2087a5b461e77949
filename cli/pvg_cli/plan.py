"""`pvg plan [EXPERIMENT]`: bounds of the step time, and the memory, before a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from typer import Option

from pvg_cli.boundary import emit, say
from pvg_cli.options import DebugOption, ExperimentOrDefault, JsonOption, SetOption

if TYPE_CHECKING:
    from pvg.planning.plan import ExperimentPlan
    from pvg.reporting.table import Table


def plan(
    *,
    experiment: ExperimentOrDefault = None,
    overrides: SetOption = None,
    workers: Annotated[int | None, Option(min=1, max=4096, help="Servers. Default: those of serving.servers.")] = None,
    gpu: Annotated[str | None, Option(metavar="NAME", help="h100, h200, a100, h20, l40s, cpu. Default: here.")] = None,
    gpu_gb: Annotated[float | None, Option(metavar="N", min=1, help="Its memory. Default: that of --gpu.")] = None,
    gpus: Annotated[int | None, Option(metavar="N", min=1, max=4096, help="A single one has a server too.")] = None,
    inputs: Annotated[
        list[str] | None, Option("--input", "-i", metavar="NAME=VALUE", help="Such as token_s=0.02. Repeatable.")
    ] = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Predict the least step time and the memory of an experiment, and say what to change.

    Loads no model: it reads their config.json.
    """
    from pvg.planning.plan import machine_here, plan_here
    from pvg.store.run_players import pinned_players
    from pvg_cli.runs import resolve

    resolved = resolve(experiment, overrides or [])
    resolved = resolved.with_sources(pinned_players(resolved.sources()))
    planned = gpu or ("l40s" if gpu_gb or gpus else None)
    made = plan_here(resolved, say, gpu=planned, given=inputs or [], workers=workers, memory_gb=gpu_gb, gpus=gpus)
    machine = planned or machine_here(resolved)[0]
    if as_json:
        emit({**made.plain(), "machine": machine})
    else:
        _print(made, machine)


def _print(made: ExperimentPlan, machine: str) -> None:
    from rich.console import Group
    from rich.text import Text

    from pvg.reporting.terminal import section
    from pvg_cli.output import stdout

    work = made.work
    headline = Text(
        f"{made.experiment.name}: {work.workers} x {work.slots} rows decode, {work.concurrency:,} requests in flight, "
        f"batches of {work.rollouts:,} rollouts, times of {machine}"
    )
    advice = Text("\n".join([*made.advice, *made.memory_advice]) or "Nothing stands out.")
    parts = [
        *section("Inputs (change them with --input NAME=VALUE)", _inputs(made)),
        *section("One step, at least", _step(made)),
        *section("Memory", _memory(made)),
        *section("What to change", advice),
    ]
    stdout().print(Group(headline, *parts, *(Text(f"note: {note}", style="yellow") for note in made.notes)))


def _inputs(made: ExperimentPlan) -> Table:
    from pvg.planning.plan import INPUTS
    from pvg.reporting.formats import compact, short_seconds
    from pvg.reporting.table import Column, Table

    table = Table([Column("input", wrap=False), Column("value", "right", wrap=False), Column("from", style="quiet")])
    for name, found in made.inputs.values.items():
        unit, value = INPUTS[name][0], found.value
        number = compact(value) if value >= 1000 else f"{value:.3g}"
        table.add(name, short_seconds(value) if unit == "s" else f"{number} {unit}".strip(), found.source)
    return table


def _step(made: ExperimentPlan) -> Table:
    from pvg.reporting.formats import short_seconds
    from pvg.reporting.table import Column, Table

    bounds, steps = made.bounds, made.experiment.training.minibatches
    rows = [
        ("step time", made.step_s, "sampling runs ahead of training" if made.work.ahead else "in turns"),
        ("training", bounds.trainer_s / steps, "with the weight update"),
        ("sampling", bounds.sampling_s / steps, f"all rows busy; balanced at {bounds.balance:.3g} workers"),
        ("longest rollout", bounds.longest_s, "alone in its worker"),
        ("in turns", bounds.turns_s / steps, "sampling, then training"),
        ("best overlap", bounds.overlap_s / steps, f"{bounds.limit} is the slower side"),
        ("the whole game", made.run_s, "about, with mints, verifier phases and tests"),
    ]
    columns = [Column("", wrap=False), Column("at least", "right", "strong", wrap=False), Column("", style="quiet")]
    return Table(columns, [(name, short_seconds(seconds), note) for name, seconds, note in rows])


def _memory(made: ExperimentPlan) -> Table:
    from pvg.reporting.formats import byte_size
    from pvg.reporting.table import Column, Table

    stages = made.memory
    titles = [f"{stage.stage} ({stage.place})" for stage in stages]
    table = Table([Column("peak of", wrap=False), *(Column(title, "right") for title in titles)])
    for name in dict.fromkeys(name for stage in stages for name, size in stage.parts.items() if size):
        sizes = [stage.parts.get(name, 0.0) for stage in stages]
        table.add(name, *(byte_size(size) if size else "" for size in sizes))
    table.add("total", *(byte_size(stage.total) for stage in stages))
    if made.memory_gb is not None:
        table.add("available", *(byte_size(made.available_gb(stage) * 1e9) for stage in stages))
        table.add("", *("fits" if made.fits(stage) else "does not fit" for stage in stages))
    return table
