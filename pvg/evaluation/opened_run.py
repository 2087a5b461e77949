"""The context of an evaluation: the run that it reads, the players that it opens, and the folder that it writes.

Invariants: it writes only to the folder `evaluation/` of the run. Each finished result is stored there with a name and
a *digest* of everything on which it depends. A result with another digest is stale and is computed again.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from pvg.config.experiment import Experiment
from pvg.config.game import ChallengeProtocol, Game
from pvg.errors import StateError
from pvg.game.ledger import shards_of
from pvg.game.orders import interaction_of
from pvg.game.players import Players
from pvg.game.prover_phase import open_round_verifier
from pvg.game.roles import PromptBuilder
from pvg.game.session import InterruptedByUser
from pvg.game.states import GameState
from pvg.game.statistics import RolloutColumns, sample_metrics
from pvg.records import Float32, Problem, Role, Rollout, source_of_round
from pvg.rollout.dispatcher import GroupOrder, SampleCall
from pvg.seeds import draw_cyclic, seed_for
from pvg.store.atomic import (
    DamagedFileError,
    make_directory,
    read_stored,
    remove_temporaries,
    remove_tree,
    temporary_beside,
    write_atomic,
)
from pvg.store.checkpoints import META_FILE, check_size, read_checkpoint
from pvg.store.run_directory import RunDirectory
from pvg.store.shards import RolloutShards, ShardInfo, columns_in_memory
from pvg.tasks.task import Task, problems_of_half
from pvg.telemetry.events import EventLog, Observer, PhaseInfo, Progress
from pvg.telemetry.spans import Tracer
from pvg.verifier.intervals import Ints
from pvg.verifier.scorer import ScoringModel, VerifierScorer

if TYPE_CHECKING:
    from torch import Tensor


# Weight versions that a unit may publish, with one range per unit. Versions only increase in an engine, and must not
# depend on which process computes a unit. So units are computed in the order of their ranges.
VERSIONS = 110_000  # above the maximum of evaluate.attack_steps
BASE_RANGE = 0  # the base prover's samples
SAMPLES_RANGE = 1  # samples of the provers of rounds 0, 1, ...
MOST_ROUNDS = 499
BASELINE_RANGE = 500  # the baseline's training, followed by its probes
REFERENCE_RANGE = 600  # of round 0: the reference samples of attacks, followed by the attacks
ROUND = 16  # ranges per round


def digest(*parts: Any) -> str:
    """The digest of plain data; equal parts have equal digests."""
    data = orjson.dumps(parts, option=orjson.OPT_SORT_KEYS)
    return hashlib.blake2b(data, digest_size=12).hexdigest()


@dataclass(frozen=True, slots=True)
class OpenedRun:
    """A run that is only read (a pvg.game.orders.WeightsReader). `state`: its last commit."""

    directory: RunDirectory
    state: GameState
    notice: str = ""  # why `state` is not the last commit

    @classmethod
    def open(cls, directory: RunDirectory) -> OpenedRun:
        """Raises StateError for a run without a commit, or with damaged commits."""
        loaded = directory.load_state()
        if loaded.state is None:
            raise StateError(
                f"The run {directory.name!r} has not started.", f"Play it: pvg train --resume {directory.argument}"
            )
        return cls(directory, GameState.from_plain(loaded.state), loaded.notice)

    @property
    def rounds(self) -> int:
        return len(self.state.rounds)

    def read_weights(self, name: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return read_checkpoint(self.directory.weights, name)

    def read_rollouts(self, round_: int, phase: str) -> Iterator[Rollout]:
        """The rollouts of a finished phase, in the order of sampling."""
        shards = RolloutShards(self.directory.path)
        for info in shards_of(self.state, round_, phase):
            yield from shards.read(info)

    def rollouts_of(self, round_: int, phase: str) -> str:
        """A digest of the rollouts of a finished phase, from the checksums of their shards."""
        return digest([info.checksum for info in shards_of(self.state, round_, phase)])

    def players_of(self, round_: int) -> str:
        """A digest of the players that a round has produced, from the checksums stored with their tensors."""
        weights = self.directory.weights
        return digest([[name, _sha256(weights / name / META_FILE)] for name in self._weights_of(round_)])

    def check_players(self, rounds: Sequence[int]) -> None:
        """Raises DamagedFileError if the weights of a round are missing or incomplete. Reads no tensors."""
        for round_ in rounds:
            try:
                for name in self._weights_of(round_):
                    check_size(self.directory.weights, name)
            except DamagedFileError as error:
                earlier = ",".join(str(other) for other in range(round_))  # detection reads all rounds up to the last
                more = f" Or evaluate earlier rounds: --rounds {earlier}" if earlier else ""
                raise DamagedFileError(error.message, error.remedy + more) from error

    def _weights_of(self, round_: int) -> list[str]:
        return sorted(name for name in self.state.weights if name.startswith(f"{source_of_round(round_)}-"))


def _sha256(path: Path) -> str:
    try:
        return hashlib.sha256(read_stored(path)).hexdigest()
    except FileNotFoundError:
        raise StateError(f"{path} is missing.", "Restore the run from a copy.") from None


class ResultFiles:
    """Finished results by name, one file each, replaced atomically."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        make_directory(folder)
        remove_temporaries(folder)

    def read(self, name: str, wanted: str) -> Any | None:
        """The result of `name` if it was computed for the digest `wanted`, otherwise None. Raises DamagedFileError."""
        path = self._folder / f"{name}.json"
        found = self._content(path) if path.exists() else {}
        return found["result"] if found.get("digest") == wanted else None

    def exists(self, name: str) -> bool:
        """Whether there is a result of `name`, for any settings."""
        return (self._folder / f"{name}.json").exists()

    def write(self, name: str, for_: str, result: Any) -> Any:
        """Returns the result as `read` returns it: plain data."""
        data = orjson.dumps({"digest": for_, "result": result}, option=orjson.OPT_INDENT_2)
        write_atomic(self._folder / f"{name}.json", data)
        return orjson.loads(data)["result"]

    def all(self) -> Iterator[Any]:
        """Every result, for any settings."""
        for path in sorted(self._folder.glob("*.json")):
            yield self._content(path)["result"]

    @staticmethod
    def _content(path: Path) -> dict[str, Any]:
        try:
            found = orjson.loads(read_stored(path))
        except orjson.JSONDecodeError:
            found = None
        if not isinstance(found, dict) or not {"digest", "result"} <= found.keys():
            raise DamagedFileError(
                f"{path} is damaged.", "Remove it and evaluate again; pvg then computes its content again."
            )
        return found


class MissingResult(Exception):
    """A unit is not stored, and computing is not allowed because its part was not requested. `stale`: a result of the
    unit is stored, but for other settings or samples."""

    def __init__(self, unit: str, *, stale: bool) -> None:
        super().__init__(unit)
        self.stale = stale


@dataclass
class EvaluationContext:
    """Everything that one call of `evaluate` shares. It has the attributes of
    pvg.game.orders.RunWithPlayers, so the functions of the game accept it."""

    experiment: Experiment
    ledger: OpenedRun
    players: Players
    task: Task
    prompts: PromptBuilder
    observer: Observer
    stop: asyncio.Event
    tracer: Tracer
    folder: Path
    log: EventLog
    code_version: str
    computing: bool = True  # False: a result that is not on disk is MissingResult
    config: str = field(init=False)  # the digest of the run's settings; MEMORY_SETTINGS of `experiment` may differ
    units: ResultFiles = field(init=False)
    manifests: ResultFiles = field(init=False)  # the shards of each set of samples
    shards: RolloutShards = field(init=False)
    verifiers: dict[int, FrozenVerifier] = field(default_factory=dict)  # the open ones, by round
    _problems: dict[str, list[Problem]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.config = self.ledger.directory.experiment().hash()
        self.units = ResultFiles(self.folder / "units")
        self.manifests = ResultFiles(self.folder / "samples")
        self.shards = RolloutShards(self.folder)

    @property
    def game(self) -> Game:
        return self.experiment.game

    @property
    def seed(self) -> int:
        return self.experiment.seed

    async def unit(self, name: str, for_: str, work: Callable[[], Awaitable[Any]]) -> Any:
        """The stored result of the unit `name` for the digest `for_`. Computes it with `work` if there is none."""
        found = self.units.read(name, for_)
        if found is None:
            self.begin(name)
            found = self.units.write(name, for_, await work())
        return found

    def begin(self, unit: str) -> None:
        """Call this before computing a unit. Raises MissingResult if computing is not allowed, InterruptedByUser if a
        stop was requested: between two units everything is on disk."""
        if not self.computing:
            raise MissingResult(unit, stale=self.units.exists(unit))
        self.check_stop()

    def check_stop(self) -> None:
        if self.stop.is_set():
            raise InterruptedByUser

    def test_problems(self) -> list[Problem]:
        """`evaluate.problems` of the task's test problems, the first ones of the run's own evaluation."""
        return self._drawn("test", list(self.task.problems("test")), self.experiment.evaluate.problems)

    def problems_of_rounds(self) -> list[Problem]:
        """The test problems of the run's own evaluation of its rounds."""
        return self._drawn("rounds", list(self.task.problems("test")), self.game.test.problems)

    def prover_problems(self) -> list[Problem]:
        """As many problems of the half on which provers and attackers are trained."""
        return self._drawn("prover", problems_of_half(self.task, "prover"), self.experiment.evaluate.problems)

    def _drawn(self, kind: str, pool: list[Problem], most: int) -> list[Problem]:
        if kind not in self._problems:
            place = ("evaluation", kind) if kind == "prover" else ("evaluation",)
            chosen = draw_cyclic(len(pool), 0, min(most, len(pool)), seed_for(self.seed, *place))
            self._problems[kind] = [pool[index] for index in chosen]
        return self._problems[kind]

    def order(self, problem: Problem, role: Role, group: int, size: int) -> GroupOrder:
        return self.prompts.order(problem, role, group, size)


def first_version(ordinal: int) -> int:
    return (1 + ordinal) * VERSIONS


def remove_folder(path: Path) -> None:
    """Remove a folder such that no partial folder stays under its name."""
    if path.exists():
        removed = temporary_beside(path)
        path.rename(removed)
        remove_tree(removed)


# --- the frozen verifier of a round -----------------------------------------------------------------------------------


class FrozenVerifier:
    """Scores whole sets of samples with one round's verifier, which it opens for the first score. `digest` identifies
    the verifier without opening it."""

    def __init__(self, context: EvaluationContext, round_: int) -> None:
        self._context = context
        self.round = round_
        self.digest = context.ledger.players_of(round_)
        self._verifier: ScoringModel | None = None
        self._scorer: VerifierScorer | None = None
        self._threshold = float("nan")

    async def verifier(self) -> ScoringModel:
        if self._verifier is None:
            self._verifier, self._threshold = await open_round_verifier(self._context, self.round)
            self._scorer = self._context.players.scorer(self._verifier)
        return self._verifier

    async def scorer(self) -> VerifierScorer:
        await self.verifier()
        assert self._scorer is not None
        return self._scorer

    async def facts(self) -> dict[str, Any]:
        """The verifier's version and its acceptance threshold."""

        async def work() -> Any:
            return {"version": (await self.verifier()).version(), "threshold": self._threshold}

        name = f"verifier-{source_of_round(self.round)}"
        found: dict[str, Any] = await self._context.unit(name, digest("verifier", self.digest), work)
        return found

    async def scores(self, name: str, rollouts: Sequence[Rollout], of: str) -> Float32:
        """float32 [N]: the scores of the set `name` with digest `of`, computed once."""

        async def work() -> Any:
            return [float(score) for score in await (await self.scorer()).score(rollouts)]

        unit = f"scores-{source_of_round(self.round)}-{name}"
        return np.array(await self._context.unit(unit, digest("scores", self.digest, of), work), dtype=np.float32)

    def close(self) -> None:
        if self._verifier is not None:
            self._verifier.close()
            self._verifier = self._scorer = None


@contextmanager
def open_frozen_verifier(context: EvaluationContext, round_: int) -> Iterator[FrozenVerifier]:
    """A round's verifier: the open one if there is one, otherwise one that is closed at the end."""
    if (frozen := context.verifiers.get(round_)) is not None:
        yield frozen
        return
    frozen = context.verifiers[round_] = FrozenVerifier(context, round_)
    try:
        yield frozen
    finally:
        del context.verifiers[round_]
        frozen.close()


def verifier_asks(experiment: Experiment) -> bool:
    """Whether samples depend on a verifier: in a challenge game in which it chooses the step to ask about."""
    protocol = experiment.game.protocol
    return isinstance(protocol, ChallengeProtocol) and protocol.step == "weakest"


# --- fresh samples ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SampleSet:
    """What to sample: `size` solutions of each problem in each role, the same problems for every policy. `policy`: a
    digest of the policy. `name`: the policy's name in the evaluation. `round`: for the path of the shards and for the
    display. `load` publishes the policy. In a challenge game the verifier of round `asking` asks about the steps; later
    verifiers score the same dialogues."""

    name: str
    round: int
    problems: Sequence[Problem]
    roles: tuple[Role, ...]
    size: int
    policy: str
    load: Callable[[], Awaitable[None]]
    asking: int = 0

    @property
    def rollouts(self) -> int:
        return len(self.problems) * len(self.roles) * self.size


def digest_of(context: EvaluationContext, wanted: SampleSet) -> str:
    ids = [problem.id for problem in wanted.problems]
    roles = [role.value for role in wanted.roles]
    asking = [context.ledger.players_of(wanted.asking)] if verifier_asks(context.experiment) else []
    return digest("samples", context.config, wanted.name, wanted.policy, ids, roles, wanted.size, *asking)


async def sampled(context: EvaluationContext, wanted: SampleSet) -> list[Rollout]:
    """The set's rollouts in order of problems and roles, read from disk or sampled.

    Each chunk is one shard, and a manifest names the committed ones: a killed process leaves at most one shard without
    a name, which the next start removes. Raises InterruptedByUser after a chunk if a stop was requested."""
    for_ = digest_of(context, wanted)
    shards = _committed(context, wanted)
    places = list(product(wanted.problems, wanted.roles))
    step = len(wanted.roles) * max(1, context.experiment.rollout.chunk // (wanted.size * len(wanted.roles)))
    chunks = list(enumerate(range(0, len(places), step)))
    if len(shards) < len(chunks):
        context.begin(wanted.name)
        done = sum(shard.rows for shard in shards)
        info = PhaseInfo(wanted.round, context.experiment.game.rounds, "samples", "rollouts", wanted.rollouts, done)
        context.observer.phase_started(info)
        await wanted.load()
        with open_frozen_verifier(context, wanted.asking) as asking:
            scorer = await asking.scorer() if verifier_asks(context.experiment) else None
            interaction = interaction_of(context, scorer)
            for number, first in chunks[len(shards) :]:
                chosen = enumerate(places[first : first + step], start=first)
                groups = await context.players.dispatcher.sample(
                    [context.order(problem, role, group, wanted.size) for group, (problem, role) in chosen],
                    SampleCall(
                        round=wanted.round,
                        source=wanted.name,
                        step=number,
                        seed=seed_for(context.seed, "evaluate", wanted.name, number),
                        prefix=f"evaluate/{wanted.name}/{number:05d}",
                        interaction=interaction,
                    ),
                )
                rollouts = [rollout for group in groups for rollout in group.rollouts]
                label = f"{wanted.name}-{for_[:8]}-{number:05d}"
                shards.append(context.shards.write(wanted.round, label, rollouts))
                context.manifests.write(wanted.name, for_, [shard.plain() for shard in shards])
                done += len(rollouts)
                metrics = sample_metrics(columns_in_memory(rollouts), 1.0)
                del metrics["tokens_per_s"]
                context.observer.progressed(Progress(done, metrics))
                context.check_stop()
        context.observer.phase_finished(info, {})
    return [rollout for shard in shards for rollout in context.shards.read(shard)]


def is_complete(context: EvaluationContext, wanted: SampleSet) -> bool:
    return sum(shard.rows for shard in _committed(context, wanted)) == wanted.rollouts


def _committed(context: EvaluationContext, wanted: SampleSet) -> list[ShardInfo]:
    return [
        ShardInfo.from_plain(plain) for plain in context.manifests.read(wanted.name, digest_of(context, wanted)) or ()
    ]


def recover(context: EvaluationContext) -> int:
    """Remove shards of killed processes and of stale sets; returns their number."""
    committed = [ShardInfo.from_plain(plain) for shards in context.manifests.all() for plain in shards]
    return len(context.shards.recover(committed))


# --- samples as arrays -------------------------------------------------------------------------------------------


class ScoredRollouts(RolloutColumns):
    """Rollouts with one verifier's scores, as arrays [N]. `pool`: the problems, indexed by `problems_N`."""

    def __init__(self, rollouts: Sequence[Rollout], scores_N: Float32, pool: Sequence[Problem]) -> None:
        super().__init__(rollouts, scores_N)
        self.rollouts, self.pool = rollouts, pool
        places = {problem.id: place for place, problem in enumerate(pool)}
        self.problems_N: Ints = np.array([places[name] for name in self.problem_ids], dtype=np.int64)
