"""`pvg plan [EXPERIMENT]`: predict step time, idle share, staleness, drops and memory, before a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pvg_cli import completion
from pvg_cli.boundary import DebugOption, ExperimentOrDefault, JsonOption, RunsOption, SetOption, emit, guarded, say

if TYPE_CHECKING:
    from pvg.planning.plan import ExperimentPlan
    from pvg.reporting.table import Table


def register(app: typer.Typer) -> None:
    app.command("plan")(plan)


@guarded
def plan(
    *,
    experiment: ExperimentOrDefault = None,
    overrides: SetOption = None,
    workers: Annotated[
        int | None,
        typer.Option("--workers", min=1, max=4096, help="Servers that sample. Default: as many as serving.servers."),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option("--gpu", metavar="NAME", help="h100, h200, a100, h20, l40s or cpu: for estimates of times."),
    ] = None,
    gpu_gb: Annotated[
        float | None,
        typer.Option("--gpu-gb", metavar="N", min=1, help="Memory of the GPU in GB. Default: that of --gpu."),
    ] = None,
    measured: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="RUN",
            help="Take lengths and times from the records of a run.",
            autocompletion=completion.runs,
        ),
    ] = None,
    runs: RunsOption = Path("runs"),
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--input", "-i", metavar="NAME=VALUE", help="Set an input of the plan: -i token_s=0.02. Repeatable."
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the simulated lengths and failures.")] = 0,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Predict the step time, idle share, staleness, drops and memory of an experiment, and say what to change.

    Simulates sampling, training and weight updates. Loads no model: it reads their config.json.
    """
    from pvg.config.load import load_experiment, nearest
    from pvg.errors import UsageError
    from pvg.planning.inputs import MACHINES, Inputs
    from pvg.planning.measured import measured_in
    from pvg.planning.plan import plan_of
    from pvg.planning.shapes import read_shape
    from pvg.store.run_directory import RunDirectory
    from pvg.store.run_players import base_source, pinned_players
    from pvg_cli.runs import resolve

    run = None if measured is None else RunDirectory.open(measured, runs)
    if run is not None and experiment is None:
        resolved = load_experiment(run.experiment_file, overrides or [])
    else:
        resolved = pinned_players(resolve(experiment, overrides or []))
    sources = [base_source(source) for source in (resolved.models.prover.source, resolved.models.verifier.source)]
    on_cpu = resolved.models.device == "cpu" or all(source.startswith("embedded:") for source in sources)
    name = gpu or ("cpu" if on_cpu else "h100")
    if name not in MACHINES:
        hint = nearest(name, list(MACHINES))
        raise UsageError(
            f"There is no GPU {name!r} in the planner's list." + (f" Did you mean {hint!r}?" if hint else ""),
            f"Known: {', '.join(MACHINES)}. For another one, give the nearest and set its times with --input.",
        )
    machine = MACHINES[name]
    prover, verifier = (read_shape(source, say) for source in sources)
    values, found = Inputs.assumed(resolved, prover, verifier, machine), None
    if run is not None:
        from_run, found = measured_in(run)
        values.update(from_run)
    values.assign(inputs or [])
    made = plan_of(
        resolved,
        values,
        prover,
        verifier,
        workers=workers,
        gpu_gb=gpu_gb or machine.memory_gb or None,
        measured=found,
        seed=seed,
    )
    if as_json:
        emit({**made.plain(), "machine": name})
    else:
        _print(made, name)


def _print(made: ExperimentPlan, machine: str) -> None:
    from rich.text import Text

    from pvg_cli.output import stdout

    out = stdout()
    world = made.world
    out.print(
        Text(
            f"{made.experiment.name}: {world.workers} x {world.slots} rows decode, {world.concurrency:,} requests in "
            f"flight, batches of {world.rollouts:,} rollouts, times of {machine}\n"
        )
    )
    sections = [("Inputs (change them with --input NAME=VALUE)", _inputs(made)), ("One step", _step(made))]
    if made.table:
        sections.append(("By number of workers", _by_workers(made)))
    sections.append(("Memory", _memory(made)))
    for title, table in sections:
        out.print(Text(title, style="bold"))
        out.print(table)
        out.print()
    lines = made.advice + made.memory_advice
    out.print(Text("What to change", style="bold"))
    for line in lines or ["Nothing stands out."]:
        out.print(Text(f"  {line}"))
    for note in made.notes:
        out.print(Text(f"note: {note}", style="yellow"))


def _number(value: float, unit: str) -> str:
    from pvg.reporting.formats import compact, short_seconds

    return (
        short_seconds(value) if unit == "s" else f"{compact(value) if value >= 1000 else f'{value:.3g}'} {unit}".strip()
    )


def _inputs(made: ExperimentPlan) -> Table:
    from pvg.planning.inputs import INPUTS
    from pvg.reporting.table import Column, Table

    table = Table([Column("input", wrap=False), Column("value", "right", wrap=False), Column("from", style="quiet")])
    for name, found in made.inputs.values.items():
        table.add(name, _number(found.value, INPUTS[name][0]), found.source)
    return table


def _step(made: ExperimentPlan) -> Table:
    from pvg.reporting.formats import compact, percent, short_seconds
    from pvg.reporting.table import Column, Table

    outcome, bounds, seen, steps = made.outcome, made.bounds, made.measured, made.experiment.training.minibatches
    limits = f"closed form: at least {short_seconds(bounds.least_s / steps)}"
    if bounds.most_s is not None:
        limits += f", at most {short_seconds(bounds.most_s / steps)}"
    lost = f"{percent(outcome.on_arrival)} on arrival, {percent(outcome.in_queue)} in the queue, "
    lost += f"{percent(outcome.cancelled)} cancelled"
    rows = [
        ("step time", short_seconds(made.step_s), limits),
        ("trainer idle", percent(outcome.idle), f"1 - training / step; {bounds.limit} is the slower side"),
        ("waits for rollouts", percent(outcome.waiting), f"closed form: balanced at {bounds.balance:.3g} workers"),
        ("staleness", f"{outcome.staleness:.2f}", f"largest: {outcome.staleness_max}"),
        ("rollouts dropped", percent(outcome.dropped), lost),
        ("tokens/s trained on", compact(outcome.tokens_per_s), f"{compact(outcome.sampled_tokens_per_s)} sampled"),
        ("rows decoding", percent(outcome.engine_busy), "of workers x rows"),
        ("trainer failures", percent(made.trainer_loss), "restarts and repeated steps, not in the step time"),
    ]
    measured = {}
    if seen is not None:
        measured = {
            "step time": short_seconds(seen.batch_s / steps),
            "trainer idle": percent(seen.idle),
            "staleness": f"{seen.staleness:.2f}",
            "rollouts dropped": percent(seen.dropped),
        }
    columns = [Column("", wrap=False), Column("planned", "right", "strong", wrap=False)]
    columns += [Column("measured", "right", wrap=False)] if seen is not None else []
    table = Table([*columns, Column("", style="quiet")])
    for name, value, note in rows:
        table.add(name, value, *([measured.get(name, "")] if seen is not None else []), note)
    return table


def _by_workers(made: ExperimentPlan) -> Table:
    from pvg.reporting.formats import compact, percent, short_seconds
    from pvg.reporting.table import Column, Table

    titles = (
        "requests in flight",
        "step",
        "trainer idle",
        "waits",
        "dropped",
        "staleness",
        "tokens/s",
        "rows decoding",
    )
    columns = [Column("workers", "right"), *(Column(title, "right") for title in titles)]
    table = Table(columns, caption="Each row with rollout.concurrency = workers x rows.")
    for row in made.table:
        found = row.outcome
        mark = " *" if row.workers == made.world.workers else ""
        table.add(
            f"{row.workers}{mark}",
            f"{row.concurrency:,}",
            short_seconds(found.batch_s / made.experiment.training.minibatches),
            percent(found.idle),
            percent(found.waiting),
            percent(found.dropped),
            f"{found.staleness:.2f}",
            compact(found.tokens_per_s),
            percent(found.engine_busy),
        )
    return table


def _memory(made: ExperimentPlan) -> Table:
    from pvg.reporting.formats import byte_size
    from pvg.reporting.table import Column, Table

    stages = made.memory
    names = list(dict.fromkeys(name for stage in stages for name, size in stage.parts.items() if size))
    titles = [f"{stage.stage} ({stage.place})" for stage in stages]
    table = Table([Column("peak of", wrap=False), *(Column(title, "right") for title in titles)])
    for name in names:
        sizes = [stage.parts.get(name, 0.0) for stage in stages]
        table.add(name, *(byte_size(size) if size else "" for size in sizes))
    table.add("total", *(byte_size(stage.total) for stage in stages))
    if made.gpu_gb is not None:
        table.add("available", *(byte_size(made.available_gb(stage) * 1e9) for stage in stages))
        table.add("", *("fits" if made.fits(stage) else "does not fit" for stage in stages))
    return table
