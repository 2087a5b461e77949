"""The run: play the phases in order until the game is complete.

A run that is killed at any instant and resumed with `resume=True` ends on a CPU with weights bit-identical to an
uninterrupted run's (invariant 1), unless timing decides what is sampled: with prefetch, a deadline or servers. Every
random number depends only on its place in the game, and every phase continues from its last commit.

`pvg rollout` only samples: the base prover's solutions are graded and stored; there is no verifier and no training.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import psutil
import torch

from pvg.config.experiment import Experiment
from pvg.config.game import CorrectnessReward, CriticProtocol, DebateProtocol, OwnProtocol
from pvg.errors import StateError, UsageError, counted, user_paths
from pvg.extensions import imported, resolve
from pvg.game.audit import check_truth
from pvg.game.ledger import Ledger, check_files
from pvg.game.orders import interaction_of
from pvg.game.players import Players, refuse_without_ranks, template_of
from pvg.game.prompt_checks import (
    about_test_problems,
    check_prompts_fit,
    check_verifier_input_fits,
    check_voices_fit,
    writable_solution,
)
from pvg.game.protocols import ProtocolParts, check_rules, interaction_for, longest_episode
from pvg.game.rewards import REWARDS, check_reading
from pvg.game.roles import PromptBuilder, prompt_builder
from pvg.game.session import InterruptedByUser, Session, sample_chunks
from pvg.game.states import Phase
from pvg.models.logprobs import check_logits
from pvg.models.packing import padded_width
from pvg.models.routing import routers_of
from pvg.models.shared_prompts import check_rows
from pvg.models.sources import BaseProver, open_learner, open_verifier
from pvg.records import BASE_SOURCE, Half, Problem, Role, Split
from pvg.rollout.decoding import check_decoding, check_layers
from pvg.rollout.dispatcher import GroupOrder, SampleCall
from pvg.seeds import seed_for
from pvg.store.run_directory import RunDirectory
from pvg.store.state import FileStateStore
from pvg.tasks import opened_task
from pvg.tasks.task import HasNote, Task
from pvg.telemetry.device import GpuUnavailableError, gpu_number
from pvg.telemetry.events import Observer, ServerNotices
from pvg.telemetry.monitoring import Monitoring
from pvg.telemetry.spans import CudaClock, Tracer, span
from pvg.telemetry.waits import usable_cores
from pvg.training.forward import fitted
from pvg.training.losses import PolicyObjective
from pvg.training.trainer import checkpoint_layers
from pvg.verifier.losses import pair_loss
from pvg.version import code_version

if TYPE_CHECKING:
    from torch import nn

    from pvg.models.language_model import LanguageModel
    from pvg.workers.pool import Supply
    from pvg.workers.ranks import RankGroup

SessionT = TypeVar("SessionT", bound=Session)

# The function of each phase, by the place that defines it: a game loads those that it plays.
PHASES = {
    Phase.SOLVE: "pvg.game.protocols:solve",
    Phase.MINT: "pvg.game.mint:mint",
    Phase.TRAIN_VERIFIER: "pvg.game.verifier_phase:train_verifier",
    Phase.TRAIN_PROVER: "pvg.game.prover_phase:train_prover",
    Phase.CHECKPOINT: "pvg.game.round_evaluation:checkpoint",
}
# A generative verifier is a policy, and learns as one.
VERDICTS = {**PHASES, Phase.TRAIN_VERIFIER: "pvg.game.verdict_phase:train_verifier"}
# The verifier learns beside the prover.
BESIDE = {Phase.TRAIN_PROVER: "pvg.game.simultaneous:train_prover"}
# Self-play has no verifier.
SELF_PLAY = {Phase.TRAIN_PROVER: "pvg.game.play_phase:train_player", Phase.CHECKPOINT: "pvg.game.play_phase:rate"}


@dataclass(frozen=True)
class GameOutcome:
    """The result of `play`: `rounds` are the metrics of finished rounds, `seconds` the wall time of this call."""

    status: Literal["complete", "interrupted"]
    run: Path
    rounds: list[Mapping[str, Any]]
    seconds: float


async def play(
    experiment: Experiment,
    run: RunDirectory,
    *,
    observer: Observer,
    stop: asyncio.Event,
    resume: bool,
    supply: Supply | None = None,
    ranks: RankGroup | None = None,
) -> GameOutcome:
    """Play `experiment` in `run` (locked by the caller) to its end, or until `stop` is set and the next commit is done.
    `supply`: starts the workers, if the experiment has any. `ranks`: the processes that train the prover with this one.

    Raises StateError if the run has begun and `resume` is False, or if it began with another configuration, and
    ConfigurationError if the ranks of the experiment are missing. Passes on what a phase raises; all commits stay
    intact.
    """
    refuse_without_ranks(experiment, ranks)
    started = time.perf_counter()
    cold = experiment.warmup.path is not None and _begins_cold(run)
    if cold:
        if not await _warm_up(experiment, run, observer, stop, resume=resume):
            return GameOutcome("interrupted", run.path, [], time.perf_counter() - started)
        resume = True
    async with AsyncExitStack() as stack:
        scoring = experiment.task.kind != "play"
        session = await open_session(
            experiment, run, observer, stop, stack, scoring=scoring, supply=supply, ranks=ranks
        )
        ledger = session.ledger
        _refuse_begun(session, resume)
        if not cold:
            _tell_first(experiment, session)
        try:
            await _play_phases(experiment, session)
        except InterruptedByUser:
            observer.noticed("All work up to this point is committed.")
        status: Literal["complete", "interrupted"] = (
            "complete" if ledger.state.phase is Phase.COMPLETE else "interrupted"
        )
        session.finish_run(status)
        return GameOutcome(
            status=status, run=run.path, rounds=list(ledger.state.rounds), seconds=time.perf_counter() - started
        )


def _begins_cold(run: RunDirectory) -> bool:
    """Whether the commit from which the ledger will go on is before the end of the warm start. If the last commit or a
    file of it is damaged, that is the one before."""
    before = (Phase.INIT.value, Phase.WARMUP.value)
    commits = FileStateStore(run.state).commits()
    if commits and commits[-1]["phase"] not in before:
        return False
    state = run.load_state(partial(check_files, run)).state
    return state is None or state["phase"] in before


def _tell_first(experiment: Experiment, session: Session) -> None:
    """Called once per `play`. A warm start uses a separate session. The command line has shown the warnings already."""
    for warning in experiment.warnings():
        session.ledger.log.event("run", event="warning", text=warning)
    for notice in about_test_problems(
        experiment.game.test.problems, experiment.task, session.task, session.test_problems()
    ):
        session.observer.noticed(notice)


def _refuse_begun(session: Session, resume: bool) -> None:
    if not resume and session.state.phase is not Phase.INIT:
        run = session.ledger.directory
        raise StateError(f"{run.path} has already begun.", f"Continue it with: pvg train --resume {run.argument}")


async def _warm_up(
    experiment: Experiment, run: RunDirectory, observer: Observer, stop: asyncio.Event, *, resume: bool
) -> bool:
    """The warm start, with separate players. Returns False if the user asked to stop."""
    from pvg.game.warm_start import alone, batches_of, read_demonstrations, warm_up

    async with AsyncExitStack() as stack:
        session = await open_session(experiment, run, observer, stop, stack, scoring=False, playing=alone(experiment))
        _refuse_begun(session, resume)
        _tell_first(experiment, session)
        finished = True
        try:
            if session.state.phase is Phase.INIT:  # raises what is wrong with the file before the run has a commit
                batches_of(session, read_demonstrations(experiment.warmup))
            await _enter_game(experiment, session, Phase.WARMUP)
            await warm_up(session, experiment.warmup, _first_phase(experiment))
        except InterruptedByUser:
            observer.noticed("All work up to this point is committed.")
            finished = False
        session.finish_run("warmed up" if finished else "interrupted")
        return finished


async def _enter_game(experiment: Experiment, session: Session, first: Phase) -> None:
    if session.state.phase is Phase.INIT:
        with span("open_models"):
            halves = session.halves()
            await session.players.compute(
                lambda: check_models(experiment, session.task, session.players, halves, session.longest)
            )
            if experiment.task.kind != "play":
                _note_shared_questions(session)
        await session.commit_state(session.state.enter(first))


def _note_shared_questions(session: Session) -> None:
    test = session.test_problems()
    trained = {problem.question for half in session.halves().values() for problem in half}
    if shared := sum(problem.question in trained for problem in test):
        session.observer.noticed(
            f"{shared:,} of {counted(len(test), 'test question')} {'is' if shared == 1 else 'are'} also a training "
            "question, so results on test problems are not all about new problems (pvg check)."
        )


def _first_phase(experiment: Experiment) -> Phase:
    """The phase in which the game itself begins."""
    if experiment.task.kind == "play":
        return Phase.TRAIN_PROVER
    return Phase.SOLVE if experiment.game.protocol.kind == "decoupled" else Phase.MINT


async def _play_phases(experiment: Experiment, session: Session) -> None:
    ledger, self_play = session.ledger, experiment.task.kind == "play"
    await _enter_game(experiment, session, _first_phase(experiment))
    phases = SELF_PLAY if self_play else VERDICTS if experiment.verifier.verdict_tokens else PHASES
    if experiment.game.schedule.kind == "simultaneous" and not self_play:
        phases = phases | BESIDE
    while ledger.state.phase is not Phase.COMPLETE:
        await session.players.place_base(ledger.state.phase)
        await imported(phases[ledger.state.phase])(session)


async def open_session(
    experiment: Experiment,
    run: RunDirectory,
    observer: Observer,
    stop: asyncio.Event,
    stack: AsyncExitStack,
    *,
    scoring: bool = True,
    supply: Supply | None = None,
    ranks: RankGroup | None = None,
    playing: Experiment | None = None,
) -> Session:
    """Open everything that a run needs, until `stack` closes. `scoring`: whether the run uses a verifier. `playing`:
    what the players play, if it is not the run's experiment after its warm start. From here on the caller's task drives
    the tracer."""
    tracer = Tracer()
    stack.enter_context(tracer.drive())
    with user_paths(), span("open_models"):
        task = stack.enter_context(opened_task(experiment.task))
        check_truth(experiment.game.stop, task)
        ledger = Ledger(run, experiment, code_version())
        stack.callback(ledger.close)
        for notice in ledger.notices:
            observer.noticed(notice)
        serving = experiment.serving
        servers = [serving.servers, serving.verifier_servers, serving.reference_servers]
        notices = ServerNotices(ledger.log, observer.noticed, servers)
        if playing is None:
            playing = experiment
            if experiment.warmup.path:
                from pvg.game.warm_start import warmed

                playing = warmed(experiment, run, ledger.state)
        players = Players(playing, task, notices, run=run.name, supply=supply, ranks=ranks)
        stack.push_async_callback(players.close)
        if players.workers is not None:
            players.workers.trained_s = tracer.trained_s
            players.workers.changed = lambda workers, why: ledger.record("scaling", workers=workers, why=why)
        if players.device.type == "cuda":
            tracer.use_device_clock(CudaClock(players.device))
            _note_gpu(players.device, observer)
        # A warm start without the workers of the run does not know the machine of the run.
        same = playing.cluster == experiment.cluster
        if same and (elsewhere := ledger.record_machine(players.machine)):
            observer.noticed(elsewhere)
        prompts = prompt_builder(playing.prompts, playing.game.protocol, players.base.tokenizer, task)
        session = session_of(playing, task, ledger, players, prompts, observer, stop, tracer, Session)
        if prompts.translate is not None and ledger.state.phase not in (Phase.INIT, Phase.WARMUP, Phase.SOLVE):
            from pvg.game.protocols import read_solutions

            prompts.solutions = await read_solutions(session)
        session.longest = check_prompts_fit(
            experiment.token_limits(), prompts, session.halves(), session.test_problems(), players.base.max_length
        )
        session.training, why = await players.compute(
            lambda: fitted(session.training, players.base.module, session.longest)
        )
        if why and ledger.state.phase is Phase.INIT:
            observer.noticed(why)
    with user_paths(), span("sync"):
        await players.ready(scoring=scoring, longest=session.longest)
    place = {"round": ledger.state.round, "phase": ledger.state.phase.value}
    cores = {"threads": players.threads, "usable": usable_cores(), "machine": psutil.cpu_count() or 1}
    ledger.record("start", cores=cores)
    ledger.log.event("run", event="start", run=run.name, **place, **cores)
    session.monitoring = await stack.enter_async_context(monitoring_of(session, experiment, run))
    if url := session.monitoring.endpoint_url:
        observer.noticed(f"Metrics for Prometheus: {url}")
    return session


def session_of(
    experiment: Experiment,
    task: Task,
    ledger: Ledger,
    players: Players,
    prompts: PromptBuilder,
    observer: Observer,
    stop: asyncio.Event,
    tracer: Tracer,
    kind: Callable[..., SessionT],
) -> SessionT:
    """The session of `experiment`, from whose sections it takes what the phases of a game read. `kind`: its class."""
    sections = experiment.game, experiment.training, experiment.rollout, experiment.verifier
    place = experiment.seed, experiment.store.commit_every
    return kind(*place, *sections, task, ledger, players, prompts, observer, stop, tracer)


def _note_gpu(device: torch.device, observer: Observer) -> None:
    """Say which GPU of the charts computes, if its number there is another one."""
    try:
        number = gpu_number(device)
    except GpuUnavailableError:
        return  # the sampler says so
    if number not in (None, device.index):
        observer.noticed(f"This run computes on {device}, which is GPU {number} in the charts and in the metrics.")


def monitoring_of(session: Session, experiment: Experiment, run: RunDirectory) -> Monitoring:
    """Monitors the machine and the event loop during the run of `experiment`, and forwards its metrics."""
    return Monitoring(
        experiment.telemetry,
        record=session.ledger.record,
        notice=session.observer.noticed,
        announce=lambda alert: session.announce(alert, session.state.step),
        alert=lambda alert: session.record_alert(alert, session.state.step),
        run_directory=run.path,
        name=run.name,
        config=experiment.plain(),
        first_step=session.ledger.steps_before,
        load=session.players.workers.measured if session.players.workers is not None else None,
        workers_here=experiment.cluster.kind == "local",
    )


def check_models(
    experiment: Experiment, task: Task, players: BaseProver, halves: Mapping[Half, Sequence[Problem]], longest: int
) -> None:
    """Raises ConfigurationError before anything is sampled, for errors that would otherwise appear in a later phase
    and that depend only on models and settings: `pvg train --dry-run` and `pvg check` call it too. It tests
    whether the files of the user's losses, reward and protocol run, whether the verifier takes its head, its template
    and the longest solution, whether both models can express a correct solution, whether rows of up to `longest` tokens
    get the numbers that they have alone, and whether the prover can be sampled in batches and supports gradient
    checkpointing, router replay and its adapters (without peft: MissingRequirementError)."""
    training, rollout, base = experiment.training, experiment.rollout, players.base
    if rollout.engine.kind == "torch":
        check_layers(base.module)  # as the engine does when it opens
    PolicyObjective(training, rollout, base.tokenizer.pad_id)
    check_rows(base.module, longest, rollout.max_tokens, "models.prover")
    check_logits(base.module)
    if experiment.task.kind != "play":
        pair_loss(experiment.verifier.loss)
        reward = experiment.game.reward
        resolve("game.reward", reward.kind, REWARDS)
        if isinstance(reward, CorrectnessReward) and reward.reads:
            check_reading(reward, task, halves["prover"][0], str(base.device))
        _check_verifier(experiment, task, base, [*halves["verifier"], *halves["prover"]])
    if isinstance(experiment.game.protocol, OwnProtocol | CriticProtocol | DebateProtocol):
        parts = ProtocolParts(task, base.tokenizer, experiment.prompts, None, experiment.seed)
        interaction = interaction_for(experiment.game.protocol, parts)
        check_rules(interaction, parts, halves["prover"])
        lines = longest_episode(interaction, parts, [*halves["prover"], *halves["verifier"]])
        check_voices_fit(experiment.token_limits(), lines, base.max_length)
    if rollout.engine.kind == "torch":
        check_decoding(base.module, base.device, longest)
    if training.router_replay:
        routers_of(base.module)
    if training.adapters.rank or training.gradient_checkpointing:
        with open_learner(players, 0, torch.device("cpu")) as learner:  # which computes nothing
            if training.gradient_checkpointing:
                checkpoint_layers(learner.module)


def _check_verifier(experiment: Experiment, task: Task, base: LanguageModel, problems: Sequence[Problem]) -> None:
    section, limits = experiment.verifier, experiment.token_limits()
    with closing(open_verifier(section, experiment.models, experiment.seed, base.device, base)) as verifier:
        template = template_of(experiment.prompts, task, verifier)
        context, verdict = verifier.max_length + section.verdict_tokens, section.verdict_tokens
        longest = check_verifier_input_fits(limits, template, problems, context, verdict)
        module = cast("nn.Module", verifier.backbone)
        check_rows(module, padded_width(longest, context), verdict or limits.solution, "models.verifier")
        if verdict:
            check_layers(module)
            check_decoding(module, base.device, longest)
        if experiment.training.gradient_checkpointing:
            checkpoint_layers(verifier)
        if experiment.warmup.path is None:
            own = experiment.task.kind == "data"
            writable_solution(experiment.sources(), task, problems, base.tokenizer, verifier.tokenizer, own_data=own)


RoleChoice = Literal["both", "helpful", "sneaky"]


async def sample_only(
    experiment: Experiment,
    run: RunDirectory,
    *,
    observer: Observer,
    stop: asyncio.Event,
    problems: int | None,
    role: RoleChoice,
    split: Split,
) -> GameOutcome:
    """Sample `rollout.group_size` solutions per problem and role of the first `problems` problems (None: all).

    Commits after every chunk of at most `experiment.rollout.chunk` rollouts. Raises StateError if the run is not empty,
    UsageError for a decoupled game.
    """
    started = time.perf_counter()
    if experiment.game.protocol.kind == "decoupled":
        raise UsageError(
            "pvg rollout samples direct solutions, but game.protocol = 'decoupled' samples translations of a solver's.",
            "Add -s game.protocol=direct, or play the game: pvg train",
        )
    async with AsyncExitStack() as stack:
        session = await open_session(experiment, run, observer, stop, stack, scoring=False)
        if session.state.phase is not Phase.INIT or session.state.shards:
            raise StateError(f"{run.path} is not empty.", "Choose another name with --name.")
        if isinstance(session.task, HasNote) and session.task.note:
            observer.noticed(session.task.note)
        if experiment.warmup.path is not None:
            observer.noticed("pvg rollout samples models.prover as it is, without the warm start.")
        roles = list(Role) if role == "both" else [Role(role)]
        pool = list(session.task.problems(split))[:problems]
        status: Literal["complete", "interrupted"] = "complete"
        metrics: dict[str, float] = {}
        try:
            metrics = await _sample_all(session, pool, roles)
        except InterruptedByUser:
            status = "interrupted"
        session.finish_run(status)
        return GameOutcome(status, run.path, [metrics], time.perf_counter() - started)


async def _sample_all(session: Session, pool: list[Problem], roles: list[Role]) -> dict[str, float]:
    size = session.rollout.group_size
    per_chunk = max(1, session.rollout.chunk // (size * len(roles)))
    info = session.begin("rollouts", len(pool) * len(roles) * size)

    async def load(number: int) -> int:
        return session.state.version

    def orders(number: int) -> tuple[list[GroupOrder], SampleCall]:
        first = number * per_chunk
        chunk = [
            session.order(problem, role, len(roles) * (first + position) + rank, size)
            for position, problem in enumerate(pool[first : first + per_chunk])
            for rank, role in enumerate(roles)
        ]
        seed, interaction = seed_for(session.seed, "rollout", number), interaction_of(session, None)
        return chunk, SampleCall(0, BASE_SOURCE, number, seed, f"rollout/{number:05d}", interaction=interaction)

    metrics = await sample_chunks(session, info, -(-len(pool) // per_chunk), orders, load)
    await session.commit()
    return metrics
