"""`pvg evaluate`: computes every part of every finished round once and stores it.

    outcome = await evaluate(experiment, run, request, observer=SilentObserver(), stop=asyncio.Event())

First it computes the requested parts, unit by unit, and stores each with a digest of what it depends on. Then it makes
the report from everything stored, including parts that were not requested this time. After a kill at any instant, the
next call ends with the same report as an uninterrupted call.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from pvg.config.experiment import Experiment
from pvg.config.load import differences
from pvg.errors import TrainingDivergedError, UsageError, counted, user_paths
from pvg.evaluation import baseline as baselines
from pvg.evaluation.baseline import CorrectnessBaseline, baseline_of, distance
from pvg.evaluation.intervals import CONFIDENCE
from pvg.evaluation.opened_run import MOST_ROUNDS, EvaluationContext, MissingResult, OpenedRun, open_frozen_verifier
from pvg.evaluation.opponents import PARTS, attack_kinds, check_attacks, check_protocol
from pvg.evaluation.report import REPORT_FILE, EvaluationReport, notes, notes_of_results, write_report
from pvg.evaluation.rounds import RoundParts, base_samples, base_set, bootstrap, round_samples
from pvg.evaluation.samples import recover
from pvg.evaluation.training import RenamingObserver
from pvg.game.ledger import check_same_code
from pvg.game.players import Players
from pvg.game.protocols import solutions_of
from pvg.game.roles import prompt_builder
from pvg.game.session import InterruptedByUser
from pvg.game.states import Phase
from pvg.game.warm_start import warmed
from pvg.store.atomic import make_directory, remove_temporaries
from pvg.store.run_directory import RunDirectory
from pvg.tasks import open_task
from pvg.telemetry.events import EventLog, Observer, PhaseInfo, Progress, ServerNotices
from pvg.telemetry.spans import CudaClock, Tracer, span
from pvg.version import code_version

MEASURES = ("best-of-n", "detection", "separability", "calibration", "localisation")


@dataclass(frozen=True)
class EvaluationRequest:
    """What to evaluate: parts by name, and rounds by number (None: all finished ones)."""

    parts: Sequence[str] = PARTS
    rounds: Sequence[int] | None = None


@dataclass(frozen=True)
class EvaluationOutcome:
    """The result of a call; `seconds`: its wall time."""

    status: Literal["complete", "interrupted"]
    report: EvaluationReport
    seconds: float


async def evaluate(
    experiment: Experiment, run: RunDirectory, request: EvaluationRequest, *, observer: Observer, stop: asyncio.Event
) -> EvaluationOutcome:
    """Evaluate the finished rounds of `run` (locked by the caller). Raises UsageError for an unsuitable round,
    ConfigurationError for settings that cannot be trained. An error of a part propagates, and all finished
    results are kept."""
    started = time.perf_counter()
    check_protocol(experiment, request.parts)
    reading = OpenedRun.open(run)
    check_same_code(reading.state, experiment)
    rounds = chosen_rounds(reading, run, request.rounds)
    reading.check_players(_sampled_rounds(rounds, request))  # not when their turn comes, perhaps after hours
    if "exploit" in request.parts:
        check_attacks(experiment)
    if "tax" in request.parts:
        baselines.baseline_experiment(experiment)
    async with AsyncExitStack() as stack:
        context = await open_evaluation(experiment, reading, observer, stop, stack)
        if limits := differences(run.experiment().hashed(), experiment.hashed()):
            observer.noticed(f"The last bits of the results may change: {'; '.join(limits)}.")
            context.log.event("evaluation", event="settings", changed="; ".join(limits))
        if reading.notice:
            observer.noticed(reading.notice)
        if reading.rounds < experiment.game.rounds:
            planned = counted(experiment.game.rounds, "round")
            observer.noticed(f"The run is not finished. pvg evaluates {reading.rounds} of {planned}.")
        status: Literal["complete", "interrupted"] = "complete"
        try:
            await _compute(context, rounds, request)
        except InterruptedByUser:
            status = "interrupted"
            observer.noticed("All results so far are kept.")
        report = await assemble(context, rounds, request.parts)
        write_report(context.folder / REPORT_FILE, report)
        return EvaluationOutcome(status, report, time.perf_counter() - started)


def chosen_rounds(reading: OpenedRun, run: RunDirectory, wanted: Sequence[int] | None) -> list[int]:
    """The rounds to evaluate. Raises UsageError for rounds that are not finished."""
    if not reading.rounds:
        raise UsageError(
            f"No round of the run {run.name!r} is finished, so there is nothing to evaluate.",
            f"Continue it: pvg train --resume {run.argument}",
        )
    if reading.rounds > MOST_ROUNDS:
        raise UsageError(f"The run {run.name!r} has more than {MOST_ROUNDS} rounds, the most that can be evaluated.")
    if wanted is None:
        return list(range(reading.rounds))
    if unknown := [number for number in wanted if not 0 <= number < reading.rounds]:
        raise UsageError(
            f"Round {unknown[0]} of the run {run.name!r} is not finished.",
            f"Finished: {', '.join(map(str, range(reading.rounds)))}.",
        )
    return sorted(set(wanted))


async def open_evaluation(
    experiment: Experiment, reading: OpenedRun, observer: Observer, stop: asyncio.Event, stack: AsyncExitStack
) -> EvaluationContext:
    """The evaluation of a run, open until `stack` is left. After this call, the caller's task drives the tracer."""
    tracer, folder = Tracer(), reading.directory.evaluation
    stack.enter_context(tracer.drive())
    serving = experiment.serving
    servers = [serving.servers, serving.verifier_servers, serving.reference_servers]
    with user_paths(), span("open_models"):
        make_directory(folder)
        remove_temporaries(folder)
        log = EventLog(folder / "events.log")
        stack.callback(log.close)
        task = open_task(experiment.task)
        if isinstance(task, AbstractContextManager):
            stack.enter_context(task)
        notices = ServerNotices(log, observer.noticed, servers)
        playing = warmed(experiment, reading.directory, reading.state)
        players = Players(playing, task, notices, run=reading.directory.name)
        stack.push_async_callback(players.close)
    if players.device.type == "cuda":
        tracer.use_device_clock(CudaClock(players.device))
    prompts = prompt_builder(experiment, players.base.tokenizer)
    if prompts.translate is not None:
        prompts.solutions = solutions_of(reading.read_rollouts(0, Phase.SOLVE.value))
    context = EvaluationContext(
        experiment, reading, players, task, prompts, observer, stop, tracer, folder, log, code_version()
    )
    if removed := recover(context):
        observer.noticed(f"Removed {counted(removed, 'unfinished or outdated file')} of an earlier evaluation.")
    with user_paths(), span("sync"):
        await players.ready()
    return context


# --- computing ---------------------------------------------------------------------------------------------------


async def _compute(context: EvaluationContext, rounds: Sequence[int], request: EvaluationRequest) -> None:
    labels, observer, measured = _labels(rounds, request), context.observer, _measured(request)
    places = iter(enumerate(labels, start=1))

    def begin_part() -> None:
        part, label = next(places)
        context.observer = RenamingObserver(observer, part=part, parts=len(labels), label=label)

    baseline: CorrectnessBaseline | None = None
    # In the order of their versions (pvg.evaluation.opened_run): samples, baseline, then the attacks round by round.
    begin_part()
    await base_samples(context)
    for round_ in _sampled_rounds(rounds, request):
        begin_part()
        await round_samples(context, round_)
    if "tax" in request.parts:
        begin_part()
        try:
            baseline = await _baseline(context)
        except TrainingDivergedError as error:  # the other parts do not need the baseline
            context.observer.noticed(f"The training of the baseline diverged, so there is no tax: {error}")
    for round_ in rounds:
        with _judged(context, round_) as parts:
            if "exploit" in request.parts:
                begin_part()
                await parts.exploit()
            if measured or "tax" in request.parts:
                begin_part()
                await _measure(context, parts, measured, baseline)
        write_report(context.folder / REPORT_FILE, await assemble(context, rounds, request.parts))


def _labels(rounds: Sequence[int], request: EvaluationRequest) -> list[str]:
    """The parts of a call in their order, as `_compute` begins them."""
    found = ["samples of the base prover"]
    found += [f"samples of round {round_}" for round_ in _sampled_rounds(rounds, request)]
    found += ["correctness baseline"] * ("tax" in request.parts)
    for round_ in rounds:
        found += [f"attacks on round {round_}"] * ("exploit" in request.parts)
        found += [f"measures of round {round_}"] * bool(_measured(request) or "tax" in request.parts)
    return found


def _sampled_rounds(rounds: Sequence[int], request: EvaluationRequest) -> Sequence[int]:
    """The rounds whose samples are needed: detection compares with the flaws of all earlier rounds."""
    return range(max(rounds) + 1) if "detection" in request.parts else rounds


def _measured(request: EvaluationRequest) -> list[str]:
    return [part for part in MEASURES if part in request.parts]


async def _measure(
    context: EvaluationContext, parts: RoundParts, wanted: Sequence[str], baseline: CorrectnessBaseline | None
) -> None:
    works = {part: _work(parts, part) for part in wanted}
    if baseline is not None:
        works["tax"] = lambda: parts.tax(baseline)
    if not works:
        return
    info = PhaseInfo(parts.round, context.experiment.game.rounds, "measures", "measures", len(works))
    context.observer.phase_started(info)
    for number, work in enumerate(works.values()):
        await work()
        context.observer.progressed(Progress(number + 1))
    context.observer.phase_finished(info, {})


def _work(parts: RoundParts, part: str) -> Callable[[], Awaitable[Any]]:
    return {
        "exploit": parts.exploit,
        "best-of-n": parts.best_of_n,
        "detection": parts.detection,
        "separability": parts.separability,
        "calibration": parts.calibration,
        "localisation": parts.localisation,
    }[part]


@contextmanager
def _judged(context: EvaluationContext, round_: int) -> Iterator[RoundParts]:
    with open_frozen_verifier(context, round_) as frozen:
        yield RoundParts(context, frozen)


async def _baseline(context: EvaluationContext) -> CorrectnessBaseline:
    return await baseline_of(context, base_set(context), lambda: base_samples(context))


# --- the report --------------------------------------------------------------------------------------------------


async def assemble(context: EvaluationContext, rounds: Sequence[int], wanted: Sequence[str]) -> EvaluationReport:
    """The report of all stored results that fit the present settings; computes nothing."""
    stale: list[str] = []
    found: list[dict[str, Any]] = []
    remarks = notes(context.experiment)
    context.computing = False
    diverged = False
    try:
        try:
            baseline = await _baseline(context)
        except MissingResult:
            baseline = None
        except TrainingDivergedError as error:
            baseline, diverged = None, True
            remarks.append(f"There is no tax, because the training of the correctness baseline diverged: {error}")
        for round_ in range(context.ledger.rounds):
            found.append(await _assemble_round(context, round_, baseline, stale))
    finally:
        context.computing = True
    remarks += notes_of_results(found, context.experiment.evaluate.attack_error_rate)
    required = [part for part in wanted if not (part == "tax" and diverged)]
    complete = all(_is_complete(context, found[round_], part) for round_ in rounds for part in required)
    there = [entry for entry in found if len(entry) > 2]
    record = _baseline_record(context, baseline) if any("tax" in entry for entry in there) else None
    if diverged:
        record = {"points": []}
    return EvaluationReport.model_validate(
        {
            "status": "complete" if complete else "partial",
            "run": context.ledger.directory.name,
            "experiment": context.experiment.name,
            "config_hash": context.config,
            "code_version": context.code_version,
            "machine": context.players.machine,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "rounds_finished": context.ledger.rounds,
            "rounds_planned": context.experiment.game.rounds,
            "settings": context.experiment.evaluate.model_dump(mode="json"),
            "rounds": there,
            "baseline": record,
            "stale": stale,
            "notes": remarks,
        }
    )


def _is_complete(context: EvaluationContext, found: Mapping[str, Any], part: str) -> bool:
    if part == "exploit":  # an interrupted evaluation may have some of the attacks
        return len(found.get("exploit", ())) == len(attack_kinds(context.experiment))
    return found.get(part.replace("-", "_")) is not None


async def _assemble_round(
    context: EvaluationContext, round_: int, baseline: CorrectnessBaseline | None, stale: list[str]
) -> dict[str, Any]:
    found: dict[str, Any] = {"round": round_}
    with _judged(context, round_) as parts:
        try:
            found["verifier_version"] = (await parts.frozen.facts())["version"]
        except MissingResult:
            found["verifier_version"] = None
        for part in PARTS:
            try:
                if part == "tax":
                    if baseline is None:
                        raise MissingResult(part, stale=context.units.exists(f"{part}-{parts.source}"))
                    found["tax"] = await parts.tax(baseline)
                else:
                    found[part.replace("-", "_")] = await _work(parts, part)()
            except MissingResult as missing:
                if missing.stale:
                    stale.append(f"{part} of round {round_}")
    return found


def _baseline_record(context: EvaluationContext, baseline: CorrectnessBaseline | None) -> dict[str, Any] | None:
    if baseline is None:
        return None
    weights_BP = bootstrap(context, len(context.test_problems()))
    points = [distance(name, totals, weights_BP, CONFIDENCE) for name, totals in baseline.points]
    return {"points": points}
