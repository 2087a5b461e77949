"""`pvg evaluate`: computes every part of every finished round once and stores it.

First it computes the requested parts, unit by unit, and stores each with a digest of what it depends on. Then it makes
the report from everything stored, including parts that were not requested this time. After a kill at any instant, the
next call ends with the same report as an uninterrupted call.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from pvg.config.base import is_run_id, parse_run_id
from pvg.config.experiment import Experiment
from pvg.config.load import differences
from pvg.errors import PvgError, TrainingDivergedError, UsageError, counted, user_paths
from pvg.evaluation import measures
from pvg.evaluation.attacks import AttackTarget, attack, attack_digest, attack_name, check, final_samples, reference_of
from pvg.evaluation.opened_run import (
    BASE_RANGE,
    MOST_ROUNDS,
    REFERENCE_RANGE,
    ROUND,
    SAMPLES_RANGE,
    EvaluationContext,
    FrozenVerifier,
    MissingResult,
    OpenedRun,
    SampleSet,
    ScoredRollouts,
    digest,
    digest_of,
    first_version,
    is_complete,
    open_frozen_verifier,
    recover,
    sampled,
)
from pvg.evaluation.report import (
    ATTACKED,
    PARTS,
    REPORT_FILE,
    EvaluationReport,
    attack_kinds,
    check_attacks,
    check_protocol,
    field_of,
    notes,
    notes_of_results,
    write_report,
)
from pvg.evaluation.trace_report import LEGIBILITY, legibility
from pvg.evaluation.training import (
    CorrectnessBaseline,
    RenamingObserver,
    baseline_experiment,
    baseline_of,
    distance,
    policy_totals,
    tax,
)
from pvg.game.ledger import check_same_inputs
from pvg.game.mint import load_source
from pvg.game.players import Players
from pvg.game.protocols import solutions_of
from pvg.game.prover_phase import read_prover
from pvg.game.roles import prompt_builder
from pvg.game.session import InterruptedByUser
from pvg.game.states import Phase
from pvg.game.warm_start import warmed
from pvg.inputs import file_digest
from pvg.models.sources import located
from pvg.records import BASE_SOURCE, Problem, Role, Rollout, source_of_round
from pvg.seeds import seed_for
from pvg.store.atomic import make_directory, remove_temporaries
from pvg.store.run_directory import RunDirectory
from pvg.store.run_players import find_player, open_round
from pvg.tasks import opened_task
from pvg.tasks.task import ConcealsText, LocatesFlaws, Task
from pvg.telemetry.events import EventLog, Observer, PhaseInfo, Progress, ServerNotices
from pvg.telemetry.spans import CudaClock, Tracer, span
from pvg.traces.http_client import is_url
from pvg.traces.loaders import LoadedTraces, trace_of
from pvg.verifier.intervals import RESAMPLES, Float64, draws
from pvg.version import code_version

# --- the parts of one round -------------------------------------------------------------------------------------------

BOTH = (Role.HELPFUL, Role.SNEAKY)
READ = 256  # helpful solutions that a reader reads, about: as many of each problem, at least one
LOCALISED = 256  # most flawed solutions of a round that are scored step by step; each costs a pass per step
# Raised when a measure's definition changes. Earlier measurements are then stale; samples and attackers, which took
# hours, are kept.
MEASURED = 3


def bootstrap(context: EvaluationContext, problems: int) -> Float64:
    """The resamples of `problems` problems, equal for every part, so that differences between parts are real."""
    return draws(problems, RESAMPLES, seed_for(context.seed, "evaluate", "bootstrap"))


def base_set(context: EvaluationContext) -> SampleSet:
    load = partial(load_source, context, BASE_SOURCE, first_version(BASE_RANGE))
    size = context.experiment.evaluate.samples
    return SampleSet(BASE_SOURCE, 0, context.test_problems(), BOTH, size, BASE_SOURCE, load)


def round_set(context: EvaluationContext, round_: int) -> SampleSet:
    """Both roles of a round's prover on the test problems."""
    name, size, policy = source_of_round(round_), context.experiment.evaluate.samples, context.ledger.players_of(round_)
    load = partial(load_source, context, name, first_version(SAMPLES_RANGE + round_))
    return SampleSet(name, round_, context.test_problems(), BOTH, size, policy, load, round_)


class RoundParts:
    """The parts of one round. Each returns plain data in the report's form. Raises MissingResult if something is not
    stored and computing is not allowed, InterruptedByUser if a stop was requested."""

    def __init__(self, context: EvaluationContext, frozen: FrozenVerifier) -> None:
        self.context = context
        self.frozen = frozen
        self.round = frozen.round
        self.source = source_of_round(frozen.round)
        self.section = context.experiment.evaluate
        self.kinds = attack_kinds(context.experiment)
        self.base, self.own = base_set(context), round_set(context, frozen.round)

    @cached_property
    def _draws(self) -> Float64:
        return bootstrap(self.context, len(self.context.test_problems()))

    @property
    def _reference(self) -> SampleSet:
        pool, round_ = self.context.prover_problems(), self.round
        load = partial(load_source, self.context, self.source, first_version(REFERENCE_RANGE + ROUND * round_))
        name, size = f"reference-{self.source}", self.section.samples
        return SampleSet(name, round_, pool, (Role.HELPFUL,), size, self.frozen.digest, load, round_)

    async def _scored(self, wanted: SampleSet) -> ScoredRollouts:
        """A set of samples with the scores of this round's verifier."""
        rollouts = await sampled(self.context, wanted)
        scores_N = await self.frozen.scores(wanted.name, rollouts, digest_of(self.context, wanted))
        return ScoredRollouts(rollouts, scores_N, wanted.problems)

    def _of(self, *sets: SampleSet) -> list[str]:
        """The digests on which a part depends that reads these sets with this round's verifier."""
        return [self.frozen.digest, *(digest_of(self.context, wanted) for wanted in sets)]

    async def _measured(
        self, name: str, sets: Sequence[SampleSet], measure: Callable[..., Any], inputs: Sequence[Any] | None = None
    ) -> Any:
        """The result of a part of this round: `measure` of these sets with the verifier's scores. It depends on
        `inputs` (by default the sets and the verifier)."""

        async def work() -> Any:
            scored = [await self._scored(wanted) for wanted in sets]
            return await self._compute(lambda: measure(*scored))

        return await self._unit(name, self._of(*sets) if inputs is None else inputs, work)

    async def _unit(self, name: str, inputs: Sequence[Any], work: Callable[[], Awaitable[Any]]) -> Any:
        """The result of a part of this round, from disk or computed by `work`."""
        return await self.context.unit(f"{name}-{self.source}", digest(name, MEASURED, inputs), work)

    # --- the parts -------------------------------------------------------------------------------------------------

    def named(self, part: str) -> Callable[[], Awaitable[Any]]:
        """The method of a part of PARTS except the tax, which needs a baseline."""
        found: Callable[[], Awaitable[Any]] = getattr(self, field_of(part))
        return found

    async def exploit(self) -> list[dict[str, Any]]:
        """Where computing is not allowed: the attacks that are stored, if there are any and none is stale."""
        target, found, missing = await self.target(), [], None
        for kind in self.kinds:
            try:
                found.append(await self._exploit(target, kind))
            except MissingResult as error:
                missing = error
                if error.stale:
                    break
        if missing is not None and (missing.stale or not found):
            raise missing
        return found

    async def _exploit(self, target: AttackTarget, kind: str) -> dict[str, Any]:

        async def attacked() -> Any:
            return await attack(self.context, target, kind, await self.frozen.verifier())

        for_ = attack_digest(self.context, target, kind)
        found = await self.context.unit(attack_name(self.round, kind), for_, attacked)
        result = {**found, "reference": target.reference}
        if result["status"] in ATTACKED:
            result["check"] = await self._measured(
                f"check-{kind}",
                [final_samples(self.context, target, kind), self.own],
                lambda fresh, own: check(fresh, own, target.threshold, self._draws),
                [for_, *self._of(self.own)],
            )
        return result

    async def target(self) -> AttackTarget:
        """The target of this round's attacks, from samples of the round itself."""

        def measure(own: ScoredRollouts, base: ScoredRollouts, reference: ScoredRollouts) -> dict[str, Any]:
            weights_BP = bootstrap(self.context, len(reference.pool))
            scores_N = np.concatenate([own.scores_N, base.scores_N, reference.scores_N])
            return {
                "reference": reference_of(reference, weights_BP),
                "lowest": float(scores_N.min()),
                "highest": float(scores_N.max()),
            }

        facts = await self.frozen.facts()
        found = await self._measured("reference", [self.own, self.base, self._reference], measure)
        return AttackTarget(self.round, self.frozen.digest, facts["threshold"], **found)

    async def best_of_n(self) -> Any:
        def measure(own: ScoredRollouts, base: ScoredRollouts) -> Any:
            return measures.best_of_n({self.source: own, BASE_SOURCE: base}, self.section, self._draws)

        return await self._measured("best-of-n", [self.own, self.base], measure)

    async def detection(self) -> Any:
        """Each source of flaws is a separate unit, so a new attacker does not make other results stale. Attackers that
        were trained after the last request for detection are left out until the next request."""
        context, threshold = self.context, (await self.frozen.facts())["threshold"]
        found = await self._measured("detection", [self.own], lambda own: measures.helpful_shares(own, threshold))
        sources = [await self._flaws(BASE_SOURCE, self.base, threshold)]
        for earlier in (round_set(context, number) for number in range(self.round + 1)):
            sources.append(await self._flaws(earlier.name, earlier, threshold))
        for kind, fresh in (await self._attackers()).items():
            with suppress(MissingResult):
                sources.append(await self._flaws(f"attack-{kind}", fresh, threshold))
        return {**found, "sources": sources}

    async def _flaws(self, name: str, wanted: SampleSet, threshold: float) -> Any:
        def measure(own: ScoredRollouts, flaws: ScoredRollouts) -> Any:
            return measures.detection(name, own, flaws, threshold, self._draws)

        return await self._measured(f"detection-{name}", [self.own, wanted], measure)

    async def _attackers(self) -> Mapping[str, SampleSet]:
        """The stored samples of this round's attackers, whether or not attacks are requested now."""
        computing, self.context.computing = self.context.computing, False
        try:
            target = await self.target()
        except MissingResult:
            return {}
        finally:
            self.context.computing = computing
        found = {kind: final_samples(self.context, target, kind) for kind in self.kinds}
        return {kind: wanted for kind, wanted in found.items() if is_complete(self.context, wanted)}

    async def separability(self) -> Any:
        def measure(own: ScoredRollouts) -> Any:
            tokenizer = self.context.players.base.tokenizer
            read = solutions_read(own.rollouts, self.context.task, tokenizer.encode, tokenizer.end_ids)
            return measures.separability(own, read, self._draws)

        return await self._measured("separability", [self.own], measure, [digest_of(self.context, self.own)])

    async def calibration(self) -> Any:
        def measure(own: ScoredRollouts) -> Any:
            return measures.calibration(own, self.context.experiment.verifier, self._draws)

        return await self._measured("calibration", [self.own], measure)

    async def localisation(self) -> Any:
        async def work() -> Any:
            if not isinstance(self.context.task, LocatesFlaws):
                return {"known": False}
            return await self._localisation(self.context.task)

        return await self._unit("localisation", self._of(self.own), work)

    async def _localisation(self, task: LocatesFlaws) -> Any:
        rollouts = await sampled(self.context, self.own)
        chosen = flawed(task, rollouts, self.context.test_problems(), LOCALISED)
        encode = self.context.players.base.tokenizer.encode
        prefixes = [
            replace(rollout, id=f"{rollout.id}/{end}", text=text[:end], completion_ids=encode(text[:end]), turns=())
            for rollout, _, _ in chosen
            for text in (rollout.solution,)
            for end in (0, *task.cuts(text))
        ]
        limits = digest(digest_of(self.context, self.own), len(chosen))
        scores_N = await self.frozen.scores(f"prefixes-{self.source}", prefixes, limits)
        lengths = [1 + len(task.cuts(rollout.solution)) for rollout, _, _ in chosen]
        split = [part.tolist() for part in np.split(scores_N, np.cumsum(lengths)[:-1])] if chosen else []
        flaws, places = [flaw for _, flaw, _ in chosen], [place for _, _, place in chosen]
        return await self._compute(lambda: measures.localisation(split, flaws, places, self._draws))

    async def cross(self) -> Any:
        """This round's verifier with the test samples that the game stored, of the base prover and of all rounds. A
        round that is played later makes the result stale, but not the scores of the earlier samples."""
        ledger, phase = self.context.ledger, Phase.CHECKPOINT.value
        places = [(BASE_SOURCE, 0), *((source_of_round(number), number) for number in range(ledger.rounds))]

        async def work() -> Any:
            threshold, pool = (await self.frozen.facts())["threshold"], self.context.problems_of_rounds()
            weights_BP, found = bootstrap(self.context, len(pool)), []
            for source, number in places:
                rollouts = [r for r in ledger.read_rollouts(number, phase) if r.source == source]
                of = ledger.rollouts_of(number, phase)
                scores_N = await self.frozen.scores(f"stored-{source}", rollouts, of)
                scored = ScoredRollouts(rollouts, scores_N, pool)
                found.append(await self._compute(partial(measures.cross, source, scored, threshold, weights_BP)))
            return found

        stored = [ledger.rollouts_of(number, phase) for number in range(ledger.rounds)]
        return await self._unit("cross", [self.frozen.digest, *stored], work)

    async def legibility(self) -> Any:
        """What a reader finds in helpful solutions of the round's prover, and of the base prover."""
        return [await self._legible(wanted) for wanted in (self.own, self.base)]

    async def _legible(self, wanted: SampleSet) -> Any:
        context, name = self.context, f"legibility-{wanted.name}"
        if not (context.computing or context.units.exists(name)):
            raise MissingResult(name, stale=False)
        try:
            reader = reader_of(context.experiment)
        except PvgError:
            if context.computing:
                raise
            raise MissingResult(name, stale=True) from None
        each = max(1, READ // len(wanted.problems))

        async def work() -> Any:
            helpful = [rollout for rollout in await sampled(context, wanted) if rollout.role is Role.HELPFUL]
            traces = [trace_of(rollout) for n, rollout in enumerate(helpful) if n % wanted.size < each]
            total = len(LEGIBILITY) * len(traces)
            info = PhaseInfo(self.round, context.experiment.game.rounds, "reading", "solutions", total)

            def told(name: str, done: int, _: int) -> None:
                context.observer.progressed(Progress(LEGIBILITY.index(name) * len(traces) + done))
                context.check_stop()

            context.observer.phase_started(info)
            loaded, kept = LoadedTraces(wanted.name, "run", traces, []), context.folder / "reading.jsonl"
            limit, say = context.experiment.rollout.max_tokens, context.observer.noticed
            found = await legibility(loaded, reader, kept, limit, told, say)
            context.observer.phase_finished(info, {})
            return found.plain()

        inputs = [digest_of(context, wanted), reader, _files(reader), each]
        inputs_digest = digest("legibility", MEASURED, inputs)
        found = await context.unit(name, inputs_digest, work)
        if context.computing and found.get("refused"):  # perhaps the server can do it now; the other measures are kept
            found = context.units.write(name, inputs_digest, await work())
        return found

    async def tax(self, baseline: CorrectnessBaseline) -> Any:
        of = digest_of(self.context, self.own)

        async def work() -> Any:
            policy = await policy_totals(
                self.context,
                self.source,
                of,
                [r for r in await sampled(self.context, self.own) if r.role is Role.HELPFUL],
                partial(read_prover, self.context, self.source),
            )
            totals = [found for _, found in baseline.points]
            estimate = await self._compute(lambda: tax(policy, totals, self._draws))
            ones = np.ones(len(policy.kl_P))
            kls = [found.kl(ones) for found in totals]
            return {
                "policy": distance(self.source, policy, self._draws),
                "tax": estimate,
                "in_range": min(kls) <= policy.kl(ones) <= max(kls),
                "kl_range": [min(kls), max(kls)],
            }

        return await self._unit("tax", [of, baseline.digest], work)

    async def _compute(self, work: Callable[[], Any]) -> Any:
        """Run `work` in the compute thread, so that the event loop can update the display."""
        return await self.context.players.compute(work)


def reader_of(experiment: Experiment) -> str:
    """The source of the model that reads solutions; a player of another run with its digest. Raises the errors of
    `find_player`."""
    source = experiment.evaluate.reader or experiment.models.prover.source
    return find_player(parse_run_id(source)).source if is_run_id(source) else source


def solutions_read(
    rollouts: Sequence[Rollout], task: Task, encode: Callable[[str], NDArray[np.int32]], end_ids: Sequence[int]
) -> list[NDArray[np.int32]]:
    """int32 [C] each: the tokens of every solution that its verifier may read, without the end of the text. Concealed
    parts, such as a sneaky solution's certificate, would reveal the role to a style probe. In a dialogue, only what the
    prover wrote: the verifier's question is not its style."""
    if isinstance(task, ConcealsText):
        return [encode(task.shown(rollout.text)) for rollout in rollouts]
    written = [r.completion_ids[r.sampled_mask] if r.turns else r.completion_ids for r in rollouts]
    return [ids[:-1] if len(ids) and ids[-1] in end_ids else ids for ids in written]


def flawed(
    task: LocatesFlaws, rollouts: Sequence[Rollout], pool: Sequence[Problem], most: int
) -> list[tuple[Rollout, int, int]]:
    """At most `most` flaws with a wrong step that the task knows: (solution, step, index of the problem). The first
    flaw of every problem comes first, then the second ones, to cover as many problems as possible."""
    places = {problem.id: place for place, problem in enumerate(pool)}
    seen: dict[str, int] = {}
    found = []
    for rollout in rollouts:
        if not rollout.is_flaw:
            continue
        flaw = task.flaw(pool[places[rollout.problem_id]], rollout.solution)
        if flaw is None or not 0 <= flaw < len(task.cuts(rollout.solution)):
            continue
        turn = seen[rollout.problem_id] = seen.get(rollout.problem_id, -1) + 1
        found.append((turn, places[rollout.problem_id], rollout, flaw))
    found.sort(key=lambda entry: entry[:2])
    return [(rollout, flaw, place) for _, place, rollout, flaw in found[:most]]


MEASURES = ("best-of-n", "detection", "separability", "calibration", "localisation", "cross")


@dataclass(frozen=True)
class EvaluationOutcome:
    """The result of a call; `seconds`: its wall time."""

    status: Literal["complete", "interrupted"]
    report: EvaluationReport
    seconds: float


async def evaluate(
    experiment: Experiment,
    run: RunDirectory,
    parts: Sequence[str] = PARTS,
    rounds: Sequence[int] | None = None,
    *,
    observer: Observer,
    stop: asyncio.Event,
) -> EvaluationOutcome:
    """Evaluate `parts` of these finished rounds of `run` (None: all). The caller has locked the run. Raises UsageError
    for a round that is not finished, ConfigurationError for settings that cannot be trained. An error of a part
    propagates, and all finished results are kept."""
    started = time.perf_counter()
    check_protocol(experiment, parts)
    reading = OpenedRun.open(run)
    check_same_inputs(reading.state.plain(), experiment)
    finished = sorted({open_round(run, number)[1] for number in rounds or [0]})  # raises for one that is not
    if reading.rounds > MOST_ROUNDS:
        raise UsageError(f"The run {run.name!r} has more than {MOST_ROUNDS} rounds, the most that can be evaluated.")
    chosen = list(range(reading.rounds)) if rounds is None else finished
    reading.check_players(_sampled_rounds(chosen, parts))  # not when their turn comes, perhaps after hours
    if "exploit" in parts:
        check_attacks(experiment)
    if "tax" in parts:
        baseline_experiment(experiment)
    if "legibility" in parts and not is_url(reader := reader_of(experiment)) and not is_run_id(reader):
        located(reader)  # raises if there is no such model
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
            await _compute(context, chosen, parts)
        except InterruptedByUser:
            status = "interrupted"
            observer.noticed("All results so far are kept.")
        report = await assemble(context, chosen, parts)
        write_report(context.folder / REPORT_FILE, report)
        return EvaluationOutcome(status, report, time.perf_counter() - started)


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
        task = stack.enter_context(opened_task(experiment.task))
        notices = ServerNotices(log, observer.noticed, servers)
        playing = warmed(experiment, reading.directory, reading.state)
        players = Players(playing, task, notices, run=reading.directory.name)
        stack.push_async_callback(players.close)
    if players.device.type == "cuda":
        tracer.use_device_clock(CudaClock(players.device))
    prompts = prompt_builder(experiment.prompts, experiment.game.protocol, players.base.tokenizer, task)
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


def _files(reader: str) -> list[str]:
    """Digests of a folder's files, which may change. What a server or the hub gives by a name counts as the same."""
    folder = Path(reader)
    return [file_digest(file, weights=True) for file in sorted(folder.glob("*.*"))] if folder.is_dir() else []


# --- computing ---------------------------------------------------------------------------------------------------


async def _compute(context: EvaluationContext, rounds: Sequence[int], parts: Sequence[str]) -> None:
    baseline: CorrectnessBaseline | None = None

    async def find_baseline() -> None:
        nonlocal baseline
        try:
            baseline = await baseline_of(context, base_set(context))
        except TrainingDivergedError as error:  # the other parts do not need the baseline
            context.observer.noticed(f"The training of the baseline diverged, so there is no tax: {error}")

    async def measure(round_: int) -> None:
        with open_frozen_verifier(context, round_) as frozen:
            measured = RoundParts(context, frozen)
            if "exploit" in parts:
                await measured.exploit()
            if "legibility" in parts:
                await measured.legibility()
            await _measure(context, measured, parts, baseline)
        write_report(context.folder / REPORT_FILE, await assemble(context, rounds, parts))

    # In the order of their versions (pvg.evaluation.opened_run): samples, baseline, then the attacks round by round.
    works: list[tuple[str, Callable[[], Awaitable[object]]]] = []
    if set(parts) != {"cross"}:  # which reads only the samples of the game
        works.append(("samples of the base prover", partial(sampled, context, base_set(context))))
        for round_ in _sampled_rounds(rounds, parts):
            works.append((f"samples of round {round_}", partial(sampled, context, round_set(context, round_))))
    if "tax" in parts:
        works.append(("correctness baseline", find_baseline))
    works += [(f"attacks and measures of round {round_}", partial(measure, round_)) for round_ in rounds]
    observer = context.observer
    for part, (label, work) in enumerate(works, start=1):
        context.observer = RenamingObserver(observer, part=part, parts=len(works), label=label)
        await work()


def _sampled_rounds(rounds: Sequence[int], parts: Sequence[str]) -> Sequence[int]:
    """The rounds whose samples are needed: detection compares with the flaws of all earlier rounds."""
    return range(max(rounds) + 1) if "detection" in parts else rounds


async def _measure(
    context: EvaluationContext, parts: RoundParts, wanted: Sequence[str], baseline: CorrectnessBaseline | None
) -> None:
    works = [parts.named(part) for part in MEASURES if part in wanted]
    if baseline is not None:
        works.append(partial(parts.tax, baseline))
    if not works:
        return
    info = PhaseInfo(parts.round, context.experiment.game.rounds, "measures", "measures", len(works))
    context.observer.phase_started(info)
    for number, work in enumerate(works):
        await work()
        context.observer.progressed(Progress(number + 1))
    context.observer.phase_finished(info, {})


# --- the report --------------------------------------------------------------------------------------------------


async def assemble(context: EvaluationContext, rounds: Sequence[int], wanted: Sequence[str]) -> EvaluationReport:
    """The report of all stored results that fit the present settings; computes nothing."""
    stale: list[str] = []
    found: list[dict[str, Any]] = []
    remarks = notes(context.experiment)
    baseline: CorrectnessBaseline | None = None
    record: dict[str, Any] | None = None
    context.computing = False
    try:
        try:
            baseline = await baseline_of(context, base_set(context))
        except MissingResult:
            pass
        except TrainingDivergedError as error:
            record = {"points": []}
            remarks.append(f"There is no tax, because the training of the correctness baseline diverged: {error}")
        for round_ in range(context.ledger.rounds):
            found.append(await _assemble_round(context, round_, baseline, stale))
    finally:
        context.computing = True
    remarks += notes_of_results(found, context.experiment.evaluate.attack_error_rate)
    if baseline is not None and any("tax" in entry for entry in found):
        weights_BP = bootstrap(context, len(context.test_problems()))
        record = {"points": [distance(name, totals, weights_BP) for name, totals in baseline.points]}
    report = EvaluationReport.model_validate(
        {
            "status": "partial",
            "run": context.ledger.directory.name,
            "experiment": context.experiment.name,
            "config_hash": context.config,
            "code_version": context.code_version,
            "machine": context.players.machine,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "rounds_finished": context.ledger.rounds,
            "rounds_planned": context.experiment.game.rounds,
            "settings": context.experiment.evaluate.model_dump(mode="json"),
            "rounds": [entry for entry in found if len(entry) > 2],
            "baseline": record,
            "stale": stale,
            "notes": remarks,
        }
    )
    missing = report.missing(wanted, rounds, attack_kinds(context.experiment))
    return report if missing else report.model_copy(update={"status": "complete"})


async def _assemble_round(
    context: EvaluationContext, round_: int, baseline: CorrectnessBaseline | None, stale: list[str]
) -> dict[str, Any]:
    found: dict[str, Any] = {"round": round_, "verifier_version": None}
    with open_frozen_verifier(context, round_) as frozen:
        parts = RoundParts(context, frozen)
        with suppress(MissingResult):
            found["verifier_version"] = (await frozen.facts())["version"]
        for part in PARTS:
            try:
                if part != "tax":
                    found[field_of(part)] = await parts.named(part)()
                elif baseline is not None:
                    found["tax"] = await parts.tax(baseline)
                elif context.units.exists(f"tax-{parts.source}"):
                    stale.append(f"tax of round {round_}")
            except MissingResult as missing:
                if missing.stale:
                    stale.append(f"{part} of round {round_}")
    return found
