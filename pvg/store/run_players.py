"""The players that a run keeps: the names of their weights, and how another run finds them as its models.

Invariant: a source with a digest means these weights only. If the other run has changed, finding them raises an error.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pvg.config.base import READER, SCHEME, Player, RunId, Stage, is_run_id, parse_run_id, with_player
from pvg.config.experiment import Experiment
from pvg.config.game import DecoupledProtocol
from pvg.config.load import did_you_mean
from pvg.errors import PvgError, StateError, UsageError, user_paths
from pvg.inputs import expanded
from pvg.store.checkpoints import read_checkpoint_meta
from pvg.store.run_directory import RunDirectory, refuse_samples, runs_in
from pvg.store.state import State

if TYPE_CHECKING:
    from pvg.config.training import ModelSection

WARMED_PROVER = "warmup-prover"  # the base prover after the warm start
DIGITS = 16  # hex digits of a digest in a source
# The settings that may name a player of another run, and which player they mean.
PLAYERS: dict[str, Player] = {"models.prover.source": "prover", "models.verifier.source": "verifier", READER: "prover"}


def _round_name(round_: int) -> str:
    from pvg.records import source_of_round  # imports numpy, which a command loads after its first line

    return source_of_round(round_)


def prover_weights_name(round_: int) -> str:
    return f"{_round_name(round_)}-prover"


def adapter_name(weights_name: str) -> str:
    return f"{weights_name}-adapter"


def verifier_weights_name(round_: int) -> str:
    return f"{_round_name(round_)}-verifier"


def final_verifier_name(round_: int) -> str:
    """The weights of a verifier that kept learning, saved when the round's prover was done."""
    return f"{_round_name(round_)}-verifier-final"


def saved_verifier_name(weights: Collection[str], round_: int) -> str | None:
    """The round's verifier among a run's committed weights; None for a run without one (self-play)."""
    names = (final_verifier_name(round_), verifier_weights_name(round_))
    return next((name for name in names if name in weights), None)


@dataclass(frozen=True, slots=True)
class SavedPlayer:
    """A player of a run. `weights`: the name of its folder of weights. `digest`: their sha256 in hex."""

    run: RunDirectory
    experiment: Experiment
    player: Player
    stage: Stage
    weights: str
    digest: str

    @property
    def name(self) -> str:
        return f"{self.run.name}-{self.weights}"

    @property
    def section(self) -> ModelSection:
        """The model that the run trained."""
        models = self.experiment.models
        return models.prover if self.player == "prover" else models.verifier

    @property
    def source(self) -> str:
        """The source that means these weights only."""
        return str(RunId(str(self.run.path.absolute()), self.stage, self.player, self.digest[:DIGITS]))


@user_paths()
def find_player(run_id: RunId) -> SavedPlayer:
    """The committed weights that a source names. Reads no tensors.

    Raises UsageError for a run, a round or a player that does not exist, StateError for weights with another digest,
    and DamagedFileError.
    """
    run = _open(run_id)
    stage, state = _stage(run_id, run)
    player, weights = run_id.player or "prover", state.get("weights", ())
    name = WARMED_PROVER if stage == "warmup" else prover_weights_name(stage)
    if player == "verifier":
        found = None if stage == "warmup" else saved_verifier_name(weights, stage)
        if found is None:
            where = "warm start" if stage == "warmup" else f"round {stage}"
            raise UsageError(
                f"{run_id}: the {where} of the run {run.name!r} has no verifier.",
                "Name its prover: add /prover, or choose another run.",
            )
        name = found
    digest, meta = read_checkpoint_meta(run.weights, name)
    if "members" in meta:
        raise UsageError(
            f"{run_id}: the verifier is an ensemble of {len(meta['members'])} models, and a model is one of them.",
            "Choose a run with verifier.ensemble = 'none'.",
        )
    if run_id.digest is not None and not digest.startswith(run_id.digest):
        raise StateError(
            f"The weights {run.weights / name} have changed: their digest is {digest[:DIGITS]}, not {run_id.digest}.",
            "Restore them from a copy, or start a new run without the digest.",
        )
    return SavedPlayer(run, run.experiment(), player, stage, name, digest)


def _open(run_id: RunId) -> RunDirectory:
    run = RunDirectory(expanded(run_id.path, "models"))
    if run.is_run:
        return run
    if run_id.digest is not None:  # a run names its source so, with the full path
        raise UsageError(
            f"{RunId(run_id.folder)}: the run is no longer in {run.path}.",
            f"If it has moved, make a link to its new place: ln -s /NEW/PATH {shlex.quote(str(run.path))}. pvg train "
            "--resume and pvg evaluate also take its new path: -s models.prover.source=run:/NEW/PATH (or verifier).",
        )
    known, name = runs_in(run.path.parent), run.path.name
    raise UsageError(
        f"{RunId(run_id.folder)}: there is no run in {run.path}.{did_you_mean(name, known)}",
        "If the run has moved, give its new path: run:PATH/round-N",
    )


def _stage(run_id: RunId, run: RunDirectory) -> tuple[Stage, State]:
    if run_id.stage != "warmup":
        state, number = open_round(run, -1 if run_id.stage is None else run_id.stage)
        return number, state
    state = run.load_state().state or {}
    if WARMED_PROVER not in state.get("weights", ()):
        raise UsageError(
            f"{run_id}: the run {run.name!r} has no finished warm start.", "Name one of its rounds: run:NAME/round-0"
        )
    return "warmup", state


def open_round(run: RunDirectory, round_: int = -1) -> tuple[State, int]:
    """The committed state of `run`, and the number of the finished round `round_` (-1: the last one).

    Raises UsageError for a round that is not finished, and StateError if the last commit is damaged or missing and may
    have had it: the commit before it has only earlier rounds.
    """
    loaded = run.load_state()
    state = loaded.state or {}
    refuse_samples(run, state)
    finished, planned = len(state.get("rounds", ())), run.experiment().game.rounds
    if loaded.notice and finished < planned and not 0 <= round_ < finished and round_ < planned:
        known = f"It has the rounds 0 to {finished - 1}." if finished else "It has no finished round."
        choose = "Name one of these rounds, or play" if finished else "Play"
        raise StateError(
            f"The last commit of {run.name} is lost, and with it perhaps the round. {loaded.notice} {known}",
            f"{choose} on from it: pvg train --resume {run.argument}",
        )
    number = finished + round_ if round_ < 0 else round_
    if 0 <= number < finished:
        return state, number
    if not finished:
        raise UsageError(
            f"The run {run.name!r} has no finished round.",
            f"Wait for the end of its first round. If it has stopped: pvg train --resume {run.argument}",
        )
    raise UsageError(
        f"Round {round_} of the run {run.name!r} is not finished.",
        f"Finished rounds, counted from 0: {', '.join(map(str, range(finished)))}.",
    )


# --- the models of an experiment --------------------------------------------------------------------------------------


def run_sources(sources: Mapping[str, str], keys: Collection[str] = tuple(PLAYERS)) -> dict[str, RunId]:
    """The models of `sources` (`Experiment.sources`) that are players of other runs: `run:NAME`, or a path such as
    runs/NAME/round-2."""
    found = {key: _run_id_of(sources[key], PLAYERS[key]) for key in keys if key in sources}
    return {key: run_id for key, run_id in found.items() if run_id is not None}


def runs_that_start_from(run: RunDirectory, root: Path) -> list[RunDirectory]:
    """The runs in `root` that need `run`: a model of theirs, or their solver, is a player or a folder of it. Skips runs
    whose settings cannot be read."""
    found, folder = [], run.path.resolve()
    for name in runs_in(root):
        other = RunDirectory(root / name)
        try:
            needed = _needed_folders(other.experiment())
        except PvgError:
            continue
        if other.path.resolve() != folder and any(place.is_relative_to(folder) for place in needed):
            found.append(other)
    return found


def _needed_folders(experiment: Experiment) -> list[Path]:
    """The folders from which the models and the solver of an experiment come. A source of another kind, such as
    hf:OWNER/NAME, becomes a path that does not exist."""
    protocol = experiment.game.protocol
    given = experiment.sources()
    sources = [given[key] for key in PLAYERS if key in given]
    if isinstance(protocol, DecoupledProtocol):
        sources.append(protocol.solver)
    folders = [parse_run_id(source).path if is_run_id(source) else Path(source) for source in sources]
    return [expanded(folder, "models").resolve() for folder in folders]


def _run_id_of(source: str, player: Player) -> RunId | None:
    if is_run_id(source):
        return parse_run_id(source)
    named = parse_run_id(with_player(f"{SCHEME}{source}", player))
    is_run = "/" in source and RunDirectory(expanded(named.path, "models")).is_run
    return named if is_run else None


def pinned_players(sources: Mapping[str, str], keys: Collection[str] = tuple(PLAYERS)) -> dict[str, str]:
    """The sources; each model that is a player of another run gets its full path, its round and the digest of its
    weights. Raises the errors of `find_player`."""
    found = run_sources(sources, keys)
    return {**sources, **{key: find_player(run_id).source for key, run_id in found.items()}}


def pinned_players_as(sources: Mapping[str, str], earlier: Mapping[str, str]) -> dict[str, str]:
    """The sources; one without a digest gets that of `earlier`, the run to resume, if it means the same player."""
    found, before = dict(sources), run_sources(earlier)
    for key, run_id in run_sources(sources).items():
        own = before.get(key)
        if own is None or run_id.digest is not None or run_id.path.absolute() != own.path.absolute():
            continue
        if run_id.stage in (None, own.stage) and run_id.player == own.player:
            found[key] = str(own)
    return found


def base_source(source: str) -> str:
    """The source from which a player of a run was first trained; any other source is its own base. Raises the errors of
    `find_player`."""
    while is_run_id(source):
        source = find_player(parse_run_id(source)).section.source
    return source
