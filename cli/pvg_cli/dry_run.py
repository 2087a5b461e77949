"""`pvg train --dry-run`: time and memory, the numbers that follow from the settings, downloads, prompts and grades."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pvg.errors import counted
from pvg.hub import KEYS, download_of, hub_ids
from pvg.reporting.table import Column, Table
from pvg_cli.boundary import emit
from pvg_cli.check import print_preview, prompts_of
from pvg_cli.output import QUIET, stdout

if TYPE_CHECKING:
    from pvg.config.experiment import Experiment
    from pvg.game.warm_start import Demonstrations
    from pvg_cli.runs import RunPlan

    Fit = Callable[[Experiment], tuple[Experiment, str]]


def show_plan(plan: RunPlan, demonstrations: Demonstrations | None, as_json: bool, fit: Fit) -> None:
    """Show what a run would be. Raises what `pvg train` would raise. `fit`: what `pvg train` does for the memory."""
    experiment = plan.experiment
    downloads = {key: download_of(source, KEYS[key]) for key, source in hub_ids(experiment.sources()).items()}
    lacking = [key for key, download in downloads.items() if download.missing]
    experiment, needs = (experiment, "") if lacking else fit(experiment)
    preview = None if lacking else prompts_of(experiment, demonstrations)
    warmup: dict[str, Any] = {}
    if demonstrations is not None:  # their numbers, and how often each is trained on
        epochs = experiment.warmup.steps * experiment.warmup.batch / len(demonstrations.train)
        warmup = {"demonstrations": len(demonstrations.train), "held_out": len(demonstrations.held_out)}
        warmup["epochs"] = round(epochs, 2)
    if as_json:
        facts: dict[str, Any] = {"experiment": experiment.plain(), "arithmetic": asdict(experiment.arithmetic())}
        facts |= {"hash": experiment.hash(), "run": str(plan.run.path), "resume": plan.resume, "preview": preview}
        facts |= {"needs": needs}
        facts |= {"downloads": {key: asdict(download) for key, download in downloads.items()}}
        emit(facts | ({"warmup": warmup} if warmup else {}))
        return
    console = stdout()
    if needs:
        console.print(f"{needs}\n")
    console.print(arithmetic_table(experiment))
    for key, download in downloads.items():
        console.print(f"{key}: {download}")
    if preview is None:
        console.print(f"\nNo prompts yet: {' and '.join(lacking)} must be downloaded first, which pvg train does.")
    else:
        print_preview(preview, console)
    if warmup:
        console.print(
            f"warmup: {warmup['demonstrations']} demonstrations, each about {warmup['epochs']:.3g} times; "
            f"{warmup['held_out']} held out"
        )
    where = f"The run {'would continue' if plan.resume else 'would be'} in {plan.run.path}."
    console.print(f"\n{where} All settings: pvg config show", style=QUIET)


def arithmetic_table(experiment: Experiment) -> Table:
    """The numbers that follow from the settings, each with its derivation."""
    training, game, verifier = experiment.training, experiment.game, experiment.verifier
    numbers, schedule = experiment.arithmetic(), game.schedule
    grows = game.growing and numbers.mint_rollouts_per_round > 0  # self-play has no mint
    per_round, more = ("in round 0", "; each later round adds as many") if grows else ("per round", "")
    members = f"{verifier.ensemble.size} members x " if verifier.ensemble.size > 1 else ""
    prover = counted(training.steps, "step")
    if training.dynamic_sampling:
        prover += f", up to {1 + training.dynamic_sampling} times as many to fill batches up"
    completions = f"{numbers.rollouts_per_batch:,} rollouts x {experiment.rollout.max_tokens}"
    mint = f"{game.mint_problems:,} problems x {game.mint_samples}{more}"
    pairs = f"{members}{counted(verifier.steps, 'step')} x {verifier.pairs}{more}"
    of_groups = numbers.groups * numbers.group_size
    voices = f" x {numbers.rollouts_per_batch // of_groups} voices" if numbers.rollouts_per_batch > of_groups else ""
    rows = [
        ("rollouts per batch", numbers.rollouts_per_batch, f"{numbers.groups} groups x {numbers.group_size}{voices}"),
        ("optimizer steps per batch", numbers.optimizer_steps_per_batch, "training.minibatches"),
        ("rollouts per optimizer step", numbers.rollouts_per_optimizer_step, "batch / optimizer steps"),
        (
            "rollouts per micro-batch, about",
            numbers.micro_batch_rollouts,
            f"at most {training.micro_batch_tokens:,} tokens each",
        ),
        ("accumulation steps, about", numbers.accumulation_steps, "micro-batches per optimizer step"),
        ("completion tokens per batch, at most", numbers.completion_tokens_per_batch, completions),
        (f"mint rollouts {per_round}", numbers.mint_rollouts_per_round, mint),
        (f"verifier pairs {per_round}", numbers.verifier_pairs_per_round, pairs),
        ("prover rollouts per round", numbers.prover_rollouts_per_round, prover),
    ]
    players = "verifier + prover"
    if schedule.kind == "simultaneous":
        players += " + updates"
        every = f"{counted(schedule.every, 'step')} after each {schedule.every:,} batches"
        rows.append(("steps of verifier updates per round", numbers.verifier_update_steps_per_round, every))
    total = f"{counted(game.rounds, 'round')} x ({players})"
    if judge := experiment.judge_steps:
        total = f"judge + {total}"
        rows.append(("steps of a judge in round 0", judge, "compares the critic with it: docs/protocols.md"))
    rows.append(("optimizer steps in total", numbers.optimizer_steps, total))
    table = Table([Column("derived"), Column("", "right", "strong"), Column("from", style="quiet")])
    for label, value, origin in rows:
        table.add(label, f"{value:,}", origin)
    return table
