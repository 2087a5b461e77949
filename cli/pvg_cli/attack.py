"""`pvg attack TARGET`: measure how often a grader, a reward model or a judge accepts wrong solutions."""

from __future__ import annotations

import re
from asyncio import Event
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from pvg.errors import EXIT_CHECK_FAILED, StoppedAtStart, UsageError, user_paths
from pvg_cli.boundary import EXIT_STOPPED, announce_loading, command_line, emit, say
from pvg_cli.options import (
    JSON_MARK,
    PAGE_MARK,
    DebugOption,
    JsonOption,
    RoundOption,
    RunsOption,
    SetOption,
    check_folder,
    check_output,
    parse_share,
    write_output,
)

if TYPE_CHECKING:
    from pvg.attack.runner import RobustnessCard
    from pvg.attack.targets import TargetSpec
    from pvg.attack.texts import AttackCase
    from pvg.config.experiment import Experiment
    from pvg.export.finished import FinishedRound
    from pvg.telemetry.events import Observer

    Attacker = tuple[Experiment, int] | None  # what is trained, and for how many steps

TARGET_HELP = "FILE.py:NAME, the URL of a /score, /chat/completions, /classify or /pooling route, or a run's verifier."
DATA_HELP = 'Lines of {"problem": "...", "text": "a correct solution", "answer": "...", "wrong": ["..."]}.'
TASK_HELP = "The problems: those of an experiment, or of a task of your own."


def attack(
    *,
    target: Annotated[str, Argument(metavar="TARGET", help=TARGET_HELP)],
    task: Annotated[str | None, Option(metavar="NAME|FILE|FILE.py:CLASS", help=TASK_HELP)] = None,
    data: Annotated[Path | None, Option(metavar="FILE.jsonl", help=DATA_HELP)] = None,
    problems: Annotated[int, Option(min=1, help="Problems that are used, at most.")] = 32,
    seed: Annotated[int, Option(help="Of the draws of problems and texts.")] = 0,
    round_: RoundOption = -1,
    sandbox: Annotated[bool, Option("--sandbox", help="Run FILE.py:NAME in pvg's sandbox.")] = False,
    limit: Annotated[float, Option(min=0.1, metavar="SECONDS", help="Of one call of the target.")] = 10.0,
    threshold: Annotated[float | None, Option(help="Least accepted score. Default: a run's own, or 0.5.")] = None,
    concurrency: Annotated[int | None, Option(min=1, max=256, help="Calls at once. Default: 1; HTTP: 8.")] = None,
    model: Annotated[str, Option(help="The model of a URL. Default: its only one.")] = "",
    key_env: Annotated[str, Option(metavar="VARIABLE", help="Has the key. Default: OPENAI_API_KEY.")] = "",
    template: Annotated[Path | None, Option(help="Prompt of a judge, with {problem}, {text}, {answer}.")] = None,
    accept: Annotated[str, Option(metavar="WORD", help="The last word of a judge that accepts.")] = "YES",
    refuse: Annotated[str, Option(metavar="WORD", help="The last word of a judge that refuses.")] = "NO",
    train: Annotated[str | None, Option(metavar="MODEL", help="Train it too. prover: that of the task.")] = None,
    steps: Annotated[int, Option(min=1, help="Optimizer steps of the trained attack, at most.")] = 200,
    overrides: SetOption = None,
    out: Annotated[Path | None, Option(metavar="FOLDER", help="Of results. Default: attacks/TARGET.")] = None,
    markdown: Annotated[Path | None, Option(metavar="FILE", help="Write the card as Markdown.")] = None,
    fail_above: Annotated[str | None, Option(metavar="5%", help="Exit code 1 above this share wrong.")] = None,
    runs: RunsOption = Path("runs"),
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Attack a grader, a reward model or a judge, and write its robustness card.

    Static attacks are texts that must be refused, or accepted, made from correct solutions. With --train, a prover
    learns against the target. Ctrl-C and kill keep all answers; the same command goes on.
    """
    allowed = None if fail_above is None else parse_share(fail_above, most=1.0)
    finished, experiment = _problems(target, task, data, (runs, round_), overrides or [], train, sandbox)
    folder = out or Path("attacks", re.sub(r"[^A-Za-z0-9._-]+", "-", target).strip("-.")[-80:] or "target")
    check_output("--markdown", markdown, b"![pvg attack:")
    check_folder(folder, card_json=JSON_MARK, card_html=PAGE_MARK)
    from pvg.attack.targets import TargetSpec
    from pvg.inputs import read_text
    from pvg_cli.driving import drive, killed_document
    from pvg_cli.output import stderr
    from pvg_cli.run_display import RunDisplay
    from pvg_cli.runs import fetch, located

    with user_paths():
        prompt = "" if template is None else read_text(template)
    if template is not None and "{text}" not in prompt:
        raise UsageError(f"{template} has no place for the solution.", "Write {text} where the judge must read it.")
    spec = TargetSpec(
        target, finished, sandbox, threshold, limit, concurrency, model, key_env, prompt, verdict=(accept, refuse)
    )
    if experiment is not None:
        experiment = experiment.with_sources(located(experiment.sources()))
        fetch(experiment.sources(), () if train else ("task.path",))
    if train or finished:
        announce_loading()

    async def work(observer: Observer, stop: Event) -> RobustnessCard:
        cases = _cases(data, experiment, finished, problems, seed)
        attacker = (experiment, steps) if train and experiment else None
        names = {"data": str(data or task or target), "template": str(template or "")}
        return await _attacked(spec, attacker, cases, seed, folder, names, observer, stop)

    display, again = RunDisplay(target, 1, stderr(), phases=("static",)), "The same command goes on."
    try:
        card = drive(work, display, killed_document(target, again, as_json))
    except StoppedAtStart:
        raise StoppedAtStart(f"Stopped before the attack on {target} began.", again) from None
    _print(card, folder, markdown, allowed, display.elapsed, as_json)


def _problems(
    target: str,
    task: str | None,
    data: Path | None,
    run: tuple[Path, int],
    settings: list[str],
    train: str | None,
    sandbox: bool,
) -> tuple[FinishedRound | None, Experiment | None]:
    """The finished round if the target is a run, and the experiment whose task has the problems. Raises UsageError for
    what is missing, before anything loads."""
    from pvg.config.load import load_experiment
    from pvg.extensions import check_references, is_reference
    from pvg_cli.check import experiment_of

    if data is not None and (task or train):
        also = "--task also names problems" if task else "--train needs a task, whose grader says what is wrong"
        raise UsageError(f"--data gives problems, but {also}.", "Leave one of them out.")
    if target.endswith(".py"):
        raise UsageError(f"{target} names no function.", f"Name it: pvg attack {target}:NAME")
    if sandbox and not is_reference(target):
        raise UsageError("--sandbox runs a function of a Python file.", "Leave it out, or give FILE.py:NAME.")
    finished = None
    if train is not None:  # by this process alone: workers refuse an experiment with one role
        source = [] if train == "prover" else [f"models.prover.source={train}"]
        settings = ["cluster=none", *source, *settings]
    if is_reference(target):
        check_references([("TARGET", target)])
    elif not re.match(r"https?://", target):
        from pvg.export.finished import FinishedRound
        from pvg.store.run_directory import RunDirectory

        finished = FinishedRound.open(RunDirectory.open(target, run[0]), run[1])
        finished.verifier_name  # noqa: B018 - raises for a run without a verifier
    if task is not None:
        return finished, experiment_of(task, settings)
    if finished is not None and data is None:
        return finished, load_experiment(finished.run.experiment_file, settings)
    if data is None:
        example = "Give a task (--task modchain), or problems with correct solutions: --data FILE.jsonl"
        raise UsageError("The problems to attack with are missing.", example)
    return finished, None


def _cases(
    data: Path | None, experiment: Experiment | None, finished: FinishedRound | None, problems: int, seed: int
) -> list[AttackCase]:
    """The problems with their texts; those of a run have also its stored solutions."""
    from pvg.attack.texts import cases_of_file, cases_of_task
    from pvg.tasks import opened_task

    if experiment is None:
        assert data is not None
        return cases_of_file(data, problems)
    stored: dict[str, list[tuple[str, bool]]] = {}
    if finished is not None:
        from pvg.evaluation.opened_run import OpenedRun

        for rollout in OpenedRun.open(finished.run).read_rollouts(finished.round, "checkpoint"):
            if rollout.grade.well_formed:
                stored.setdefault(rollout.problem_id, []).append((rollout.solution, rollout.grade.correct))
    with opened_task(experiment.task) as task:
        return cases_of_task(task, problems, seed, stored)


async def _attacked(
    spec: TargetSpec,
    train: Attacker,
    cases: list[AttackCase],
    seed: int,
    folder: Path,
    names: dict[str, str],
    observer: Observer,
    stop: Event,
) -> RobustnessCard:
    """All attacks, and the files of the card. After Ctrl-C, it is the card of the answers so far. `names`: those of
    data and template."""
    from pvg.attack import runner
    from pvg.attack.targets import open_target
    from pvg.attack.texts import ATTACKS
    from pvg.reporting.attack_page import card_page
    from pvg.store import atomic
    from pvg.traces.kept_results import KeptResults
    from pvg.version import code_version

    attempts, trained = runner.attempts_of(cases, ATTACKS.values(), seed), None
    with KeptResults(folder / runner.ANSWERS_FILE) as kept:
        async with open_target(spec, observer.noticed) as target:
            names |= {"target": target.about, "model": target.model}
            runner.refuse_other(folder, names)
            asking = runner.Asking(target, kept)
            complete = await runner.ask_all(asking, attempts, observer, stop)
            if complete and train is not None:
                from pvg.attack.trained import train_attacker

                scores = [answer.score for each in attempts if (answer := asking.known(*each.asked))]
                given = [score for score in scores if score is not None]
                trained = await train_attacker(*train, asking, folder, given, observer, stop)
                complete = trained is not None
            found, wrong, right = runner.results(asking, attempts)
    card = runner.RobustnessCard(
        status="complete" if complete else "interrupted",
        **names,
        identity=target.identity,
        threshold=target.threshold,
        problems=len(cases),
        seed=seed,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        code_version=code_version(),
        wrong=wrong,
        right=right,
        attacks=found,
        trained=trained,
    )
    with user_paths():
        atomic.write_output(folder / runner.CARD_FILE, card.model_dump_json(indent=2).encode() + b"\n")
        atomic.write_output(folder / "card.html", card_page(card).encode())
    return card


def _print(
    card: RobustnessCard, folder: Path, markdown: Path | None, allowed: float | None, seconds: float, as_json: bool
) -> None:
    from pvg.reporting.attack_page import attack_tables, markdown_card
    from pvg_cli.output import stdout

    stopped, limit = card.status == "interrupted", 1.0 if allowed is None else allowed
    accepted, refused = ([], []) if allowed is None else (card.above(limit), card.refused_above(limit))
    if markdown is not None:
        write_output(markdown, markdown_card(card))
    if as_json:
        facts = {"status": card.status, "path": str(folder), "seconds": seconds, "failed": [*accepted, *refused]}
        emit({**facts, "card": card.plain(), "resume": command_line() if stopped else None})
    else:
        stdout().print(attack_tables(card))
        say(f"\nNumbers: {folder / 'card.json'}. Page: {folder / 'card.html'}")
    if stopped:
        say(f"Stopped. To resume: {command_line()}")
        raise typer.Exit(EXIT_STOPPED)
    for verb, names in (("accepted", accepted), ("refused, though correct", refused)):
        if names:
            say(f"More than {100 * limit:g} % {verb}, or nothing answered: {', '.join(names)}.")
    if accepted or refused:
        raise typer.Exit(EXIT_CHECK_FAILED)
