"""`pvg check`: look at what an experiment would play, and check it. Also the preview of `--dry-run`."""

from __future__ import annotations

from contextlib import ExitStack
from threading import Timer
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument

from pvg.errors import EXIT_CHECK_FAILED, MissingRequirementError, UsageError, counted, shortened, visible
from pvg_cli import completion
from pvg_cli.boundary import announce_loading, emit, say
from pvg_cli.options import DebugOption, JsonOption, SetOption

if TYPE_CHECKING:
    from rich.console import Console

    from pvg.config.experiment import Experiment
    from pvg.game.task_check import PlayerModels, TaskCheck
    from pvg.game.warm_start import Demonstrations
    from pvg.reporting.table import Table

MODELS = ("models.prover.source", "models.verifier.source")
WARNING = ("warn", "yellow")
MARKS = {True: ("ok", "green"), False: ("FAILED", "bold red"), None: ("-", "bright_black")}


def check(
    name: Annotated[
        str,
        Argument(
            metavar="NAME|FILE|FILE.py:CLASS",
            help="An experiment, a TOML file, or the class of a task of your own.",
            autocompletion=completion.experiments,
        ),
    ] = "modchain",
    overrides: SetOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Check an experiment, or a task of your own: settings, problems, prompts, grades, time and memory here.

    It downloads no models. The exit code is 2 if a setting is wrong, and 1 if a check fails.
    """
    from pvg.extensions import is_reference
    from pvg.game.task_check import ANY_TEXT, checks_of, preview
    from pvg.planning.plan import fitted_here
    from pvg.tasks import opened_task
    from pvg.telemetry.events import QUIET_S

    experiment, own = experiment_of(name, overrides or []), is_reference(name)
    warnings = experiment.warnings()
    for warning in warnings:
        say(f"warning: {warning}.")
    announce_loading()
    models, missing = players_here(experiment, own=own)
    needs = "" if own or models is None else fitted_here(experiment, say, force=True)[1]
    with ExitStack() as opened:
        slow = Timer(QUIET_S, say, [f"{name}: making the task's problems and checking them ..."])
        slow.daemon = True
        opened.callback(slow.cancel)
        slow.start()
        task = opened.enter_context(opened_task(experiment.task))
        checks = list(checks_of(experiment, task, models))
        shown = None
        if checks[0].passed:
            gradable = all(each.passed for each in checks if each.name == ANY_TEXT)
            shown = preview(experiment, task, models, grades=gradable)
            missing = " ".join([missing, *shown.pop("notices")]).strip()
            _tell_of_chat_templates(experiment, models)
    failed = [each.name for each in checks if each.passed is False]
    if as_json:
        found = {"task": experiment.task.kind, "passed": not failed, "preview": shown, "notice": missing}
        facts = {"name": experiment.name, "hash": experiment.hash(), "warnings": warnings, "needs": needs}
        emit({**found, **facts, "checks": [each.plain() for each in checks]})
    else:
        _print(needs, checks, shown, missing)
    if failed:
        raise typer.Exit(EXIT_CHECK_FAILED)


def experiment_of(name: str, overrides: list[str]) -> Experiment:
    """The experiment of that name or file. A class of a task becomes the embedded game's experiment with that task, and
    with prompts in words."""
    from pvg.extensions import is_reference
    from pvg_cli.runs import DEFAULT_EXPERIMENT, resolve

    if name.endswith(".py"):
        raise UsageError(f"{name} names no class.", f"Name the class of your task: pvg check {name}:CLASS")
    if not is_reference(name):
        return resolve(name, overrides)
    return resolve(DEFAULT_EXPERIMENT, ["task.kind=custom", f"task.source={name}", "prompts=chat", *overrides])


def players_here(experiment: Experiment, own: bool = False) -> tuple[PlayerModels | None, str]:
    """The experiment's models without weights. None, with the reason, if no model is named (`own`) or if one is not on
    this machine."""
    from pvg.game.task_check import open_models
    from pvg.hub import hub_ids, is_cached

    if own:
        return None, "No model is named, so the prompts are shown without a chat template."
    try:
        for source in hub_ids(experiment.sources(), MODELS).values():
            if not is_cached(source, "model"):
                return None, f"{source} is not downloaded yet, so the prompts are shown without a chat template."
        return open_models(experiment), ""
    except MissingRequirementError as error:
        return None, f"{error.message} So the prompts are shown without a chat template."


def prompts_of(experiment: Experiment, demonstrations: Demonstrations | None = None) -> dict[str, Any]:
    """The preview of `pvg train --dry-run`. Raises what `pvg train` would raise, also for `demonstrations`."""
    announce_loading()
    from pvg.game.prompt_checks import about_test_problems, writable_solution
    from pvg.game.roles import prompt_builder
    from pvg.game.task_check import open_models, preview
    from pvg.game.warm_start import tokens_of
    from pvg.tasks import opened_task

    with opened_task(experiment.task) as task:
        models = open_models(experiment)
        found = preview(experiment, task, models)
        for notice in found.pop("notices"):
            say(notice)
        tokenizers = models.prover.tokenizer, models.verifier.tokenizer
        _tell_of_chat_templates(experiment, models)
        if experiment.task.kind != "play" and experiment.warmup.path is None:
            own = experiment.task.kind == "data"
            writable_solution(experiment.sources(), task, list(task.problems("train")), *tokenizers, own_data=own)
        wanted = experiment.game.test.problems
        for notice in about_test_problems(wanted, experiment.task, task, list(task.problems("test"))):
            say(notice)
        if demonstrations is not None:
            rows = [*demonstrations.train, *demonstrations.held_out]
            prompts = prompt_builder(experiment.prompts, experiment.game.protocol, models.prover.tokenizer, task)
            tokens_of(rows, task, prompts, models.prover, experiment.rollout.max_tokens)
        return found


def _tell_of_chat_templates(experiment: Experiment, models: PlayerModels | None) -> None:
    if models is None or experiment.prompts.kind != "chat":
        return
    if not models.prover.tokenizer.takes_system_message:
        template = f"The chat template of {models.prover.name} has no place for a system message"
        say(f"{template}, so the instructions begin the first user message.")
    parts = {each.name for each in (models.prover, models.verifier) if each.tokenizer.layout(("user",)).parts}
    for name in sorted(parts):
        say(f"The chat template of {name} reads only lists of parts, so each message becomes a list of one text.")


# --- for people -------------------------------------------------------------------------------------------------------


def _print(needs: str, checks: list[TaskCheck], shown: dict[str, Any] | None, missing: str) -> None:
    from rich.text import Text

    from pvg_cli.output import stdout

    console = stdout()
    if needs:
        console.print(f"{needs}\n")
    for each in checks:
        mark, style = WARNING if each.warning else MARKS[each.passed]
        console.print(
            Text.assemble((f"{mark:<6}", style), f"  {each.name}: ", (each.detail, "bright_black")), soft_wrap=True
        )
    if shown is not None:
        print_preview(shown, console)
    if missing:
        say(missing)


def print_preview(found: dict[str, Any], console: Console) -> None:
    """The prompts of a problem, a question of the verifier, the verifier's input, and grades of known solutions."""
    if not found["prompts"]:
        console.print("\nSelf-play: the prompts come from the game.", style="bright_black")
        return
    for role, shown in found["prompts"].items():
        _print_input(f"Prompt of the {role} role for {found['problem']}", shown["text"], shown["tokens"], console)
    for number, turn in enumerate(found["episode"], 1):
        seat, others = turn["seat"], " and ".join(turn["by"])
        did = "writes" if others == seat else f"reads what {others or 'the protocol'} says"
        _print_input(f"Turn {number} of an example: {seat} {did}", turn["text"], turn["tokens"], console)
    if (read := found["verifier_input"]) is not None:
        _print_input("Input of the verifier", read["text"], read["tokens"], console)
    if found["graded"]:
        console.print("\n", _grades_table(found["graded"]), sep="")


def _print_input(title: str, text: str, tokens: int | None, console: Console) -> None:
    from rich.text import Text

    size = "" if tokens is None else f" ({counted(tokens, 'token')})"
    console.print(Text(f"\n{title}{size}", style="bold"))
    for line in text.split("\n"):
        console.print(Text(f"  | {visible(line)}"), soft_wrap=True)


def _grades_table(graded: list[dict[str, Any]]) -> Table:
    from pvg.reporting.table import Column, Table

    table = Table([Column("solution"), Column("its text"), Column("graded"), Column("note", style="quiet")])
    for each in graded:
        verdict = "correct" if each["correct"] else "wrong" if each["well_formed"] else "malformed"
        answer = f" (answer {visible(shortened(each['answer'], 24))})" if each["answer"] else ""
        table.add(each["solution"], visible(shortened(repr(each["text"]), 48)), f"{verdict}{answer}", each["note"])
    return table
