"""What an evaluation works with: the run it reads, the players it opens, and the folder it writes.

Invariants: nothing of the run is written, but for `evaluation/` inside of it. Whatever is finished lies there under a
name and a *digest* of all that it depends on; a unit whose digest is another one is stale, and is computed again.
"""

from __future__ import annotations

import asyncio
import hashlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from pvg.config.experiment import Experiment
from pvg.config.sections import ChallengeProtocol
from pvg.errors import StateError
from pvg.game.challenge import environment_of
from pvg.game.ledger import shards_of
from pvg.game.players import Players
from pvg.game.prover_phase import open_round_verifier
from pvg.game.roles import Asked
from pvg.game.seeds import draw_cyclic, seed_for
from pvg.game.session import InterruptedByUser
from pvg.game.states import GameState
from pvg.records import Float32, Problem, Role, Rollout, source_of_round
from pvg.rollout.dispatcher import GroupOrder
from pvg.rollout.episodes import Environment
from pvg.store.atomic import DamagedFileError, make_directory, remove_temporaries, temporary_beside, write_atomic
from pvg.store.checkpoints import META_FILE, read_checkpoint
from pvg.store.run_directory import RunDirectory
from pvg.store.shards import RolloutShards, ShardInfo
from pvg.tasks.task import Task, problems_of_half
from pvg.telemetry.events import EventLog
from pvg.telemetry.observer import Observer
from pvg.telemetry.spans import Tracer
from pvg.verifier.protocol import Judge
from pvg.verifier.scorer import VerifierScorer

if TYPE_CHECKING:
    from torch import Tensor

# Raised where a measure's definition changes: what an older pvg computed is then stale.
DEFINITIONS = 1

# Versions of the weights that a unit may publish, each unit in a range of its own: versions only go up in an engine,
# and must be the same ones whichever process comes to a unit. So units are computed in the order of their ranges.
VERSIONS = 110_000  # more than evaluate.attack_steps may be
BASE_RANGE = 0  # the untrained prover's samples
SAMPLES_RANGE = 1  # and those of the provers of rounds 0, 1, ...
MOST_ROUNDS = 499
BASELINE_RANGE = 500  # the baseline's training, and behind it its probes
MOST_PROBES = 90
REFERENCE_RANGE = 600  # of round 0: the samples that attacks are compared with, and behind it the attacks
ROUND = 16  # ranges from one round's to the next one's


def digest(*parts: Any) -> str:
    """Of plain data; equal parts have equal digests."""
    data = orjson.dumps([DEFINITIONS, *parts], option=orjson.OPT_SORT_KEYS)
    return hashlib.blake2b(data, digest_size=12).hexdigest()


@dataclass(frozen=True, slots=True)
class Reading:
    """A run that is read and not played (a pvg.game.prover_phase.Written). `state` is its last commit."""

    directory: RunDirectory
    state: GameState
    notice: str = ""  # why it is not the last commit

    @classmethod
    def open(cls, directory: RunDirectory) -> Reading:
        """Raises StateError for a run without a commit, or whose commits are damaged."""
        loaded = directory.load_state()
        if loaded.state is None:
            raise StateError(
                f"The run {directory.name!r} has not begun.", f"Play it: pvg train --resume {directory.name}"
            )
        return cls(directory, GameState.from_plain(loaded.state), loaded.notice)

    @property
    def rounds(self) -> int:
        """How many rounds are finished."""
        return len(self.state.rounds)

    def read_weights(self, name: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return read_checkpoint(self.directory.weights, name)

    def read_rollouts(self, round_: int, phase: str) -> Iterator[Rollout]:
        """Those of a finished phase, in the order they were sampled."""
        shards = RolloutShards(self.directory.path)
        for info in shards_of(self.state, round_, phase):
            yield from shards.read(info)

    def players_of(self, round_: int) -> str:
        """A digest of the players that a round has left: their checksums, read from what lies beside the tensors."""
        names = sorted(name for name in self.state.weights if name.startswith(f"{source_of_round(round_)}-"))
        return digest([[name, _sha256(self.directory.weights / name / META_FILE)] for name in names])


def _sha256(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except FileNotFoundError:
        raise StateError(f"{path} is missing.", "Restore the run from a copy.") from None


def read_json(path: Path, key: str) -> dict[str, Any] | None:
    """What an evaluation wrote at `path`, with a digest and `key`; None where nothing is. Raises DamagedFileError."""
    try:
        found = orjson.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except orjson.JSONDecodeError:
        found = None
    if not isinstance(found, dict) or not {"digest", key} <= found.keys():
        raise DamagedFileError(f"{path} is damaged.", "Remove it, and evaluate again: what it held is computed anew.")
    return found


class Units:
    """Finished results by name, each one file, replaced as a whole."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        make_directory(folder)
        remove_temporaries(folder)

    def read(self, name: str, wanted: str) -> Any | None:
        """The result of `name` where it was computed for the digest `wanted`."""
        found = read_json(self._folder / f"{name}.json", "result")
        return None if found is None or found["digest"] != wanted else found["result"]

    def exists(self, name: str) -> bool:
        """Whether there is a result of `name`, for whatever settings."""
        return (self._folder / f"{name}.json").exists()

    def write(self, name: str, for_: str, result: Any) -> None:
        data = orjson.dumps({"digest": for_, "result": result}, option=orjson.OPT_INDENT_2)
        write_atomic(self._folder / f"{name}.json", data)


class Missing(Exception):
    """A unit that is not there, while nothing may be computed: its part was not asked for."""


@dataclass
class Study:
    """Everything that one call of `evaluate` shares. A pvg.game.prover_phase.Played."""

    experiment: Experiment
    ledger: Reading
    players: Players
    task: Task
    asked: Asked
    observer: Observer
    stop: asyncio.Event
    tracer: Tracer
    folder: Path
    log: EventLog
    code_version: str
    computing: bool = True  # False: what is not on the disk is Missing
    units: Units = field(init=False)
    shards: RolloutShards = field(init=False)
    judges: dict[int, FrozenVerifier] = field(default_factory=dict)  # those that are open, by round
    _problems: dict[str, list[Problem]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.units = Units(self.folder / "units")
        self.shards = RolloutShards(self.folder)

    @property
    def seed(self) -> int:
        return self.experiment.seed

    @property
    def config(self) -> str:
        """A digest of what the run computed."""
        return self.experiment.hash()

    def begin(self, unit: str) -> None:
        """Before a unit is computed. Raises Missing where none may be, InterruptedByUser where a stop was asked for:
        between two units everything is on the disk."""
        if not self.computing:
            raise Missing(unit)
        self.check_stop()

    def check_stop(self) -> None:
        if self.stop.is_set():
            raise InterruptedByUser

    def test_problems(self) -> list[Problem]:
        """`evaluate.problems` of the task's test problems: those that the run's own evaluation begins with."""
        return self._drawn("test", list(self.task.problems("test")))

    def prover_problems(self) -> list[Problem]:
        """As many of the half that provers, and attackers, are trained on."""
        return self._drawn("prover", problems_of_half(self.task, "prover"))

    def _drawn(self, kind: str, pool: list[Problem]) -> list[Problem]:
        if kind not in self._problems:
            place = ("evaluation",) if kind == "test" else ("evaluation", kind)
            wanted = min(self.experiment.evaluate.problems, len(pool))
            chosen = draw_cyclic(len(pool), 0, wanted, seed_for(self.seed, *place))
            self._problems[kind] = [pool[index] for index in chosen]
        return self._problems[kind]

    def order(self, problem: Problem, role: Role, group: int, size: int) -> GroupOrder:
        return self.asked.order(problem, role, group, size)


def first_version(ordinal: int) -> int:
    """The first version of the weights in range `ordinal`."""
    return (1 + ordinal) * VERSIONS


def remove_folder(path: Path) -> None:
    """Remove a folder of which no half may be left under its name."""
    if path.exists():
        doomed = temporary_beside(path)
        path.rename(doomed)
        shutil.rmtree(doomed)


def committed_shards(manifests: list[Mapping[str, Any]]) -> list[ShardInfo]:
    return [ShardInfo.from_plain(plain) for manifest in manifests for plain in manifest["shards"]]


# The frozen verifier of one round: opened when the first score is needed, and asked for whole sets of samples.


class FrozenVerifier:
    """Scores of one verifier. `digest` says which one it is, without opening it."""

    def __init__(self, study: Study, round_: int) -> None:
        self._study = study
        self.round = round_
        self.digest = study.ledger.players_of(round_)
        self._verifier: Judge | None = None
        self._scorer: VerifierScorer | None = None
        self._threshold = float("nan")

    async def verifier(self) -> Judge:
        if self._verifier is None:
            self._verifier, self._threshold = await open_round_verifier(self._study, self.round)
            self._scorer = self._study.players.scorer(self._verifier)
        return self._verifier

    async def scorer(self) -> VerifierScorer:
        await self.verifier()
        assert self._scorer is not None
        return self._scorer

    async def facts(self) -> dict[str, Any]:
        """The verifier's version, and the score from which it accepts."""
        name = f"verifier-{source_of_round(self.round)}"
        for_ = digest("verifier", self.digest)
        found = self._study.units.read(name, for_)
        if found is None:
            self._study.begin(name)
            found = {"version": (await self.verifier()).version(), "threshold": self._threshold}
            self._study.units.write(name, for_, found)
        return dict(found)

    async def scores(self, name: str, rollouts: Sequence[Rollout], of: str) -> Float32:
        """float32 [N]: the scores of the set `name`, whose digest is `of`, computed once."""
        study, unit = self._study, f"scores-{source_of_round(self.round)}-{name}"
        for_ = digest("scores", self.digest, of)
        found = study.units.read(unit, for_)
        if found is None:
            study.begin(unit)
            scores_N = await (await self.scorer()).score(rollouts)
            study.units.write(unit, for_, [float(score) for score in scores_N])
            return scores_N
        return np.array(found, dtype=np.float32)

    def close(self) -> None:
        if self._verifier is not None:
            self._verifier.close()
            self._verifier = self._scorer = None


@contextmanager
def judged(study: Study, round_: int) -> Iterator[FrozenVerifier]:
    """The verifier of a round: the one that is open already, or one that is closed at the end."""
    if (judge := study.judges.get(round_)) is not None:
        yield judge
        return
    judge = study.judges[round_] = FrozenVerifier(study, round_)
    try:
        yield judge
    finally:
        del study.judges[round_]
        judge.close()


def verifier_asks(experiment: Experiment) -> bool:
    """Whether samples depend on a verifier: a challenge game in which it chooses what to ask about."""
    protocol = experiment.game.protocol
    return isinstance(protocol, ChallengeProtocol) and protocol.step == "weakest"


async def questions(study: Study, asking: FrozenVerifier) -> Environment | None:
    """What asks about the steps of solutions that are sampled next; None but in a challenge game."""
    scorer = await asking.scorer() if verifier_asks(study.experiment) else None
    return environment_of(study, scorer)
