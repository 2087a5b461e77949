"""The game's state machine: the order of the phases, and the content of a commit.

    INIT -> [WARMUP ->] [SOLVE ->] MINT -> TRAIN_VERIFIER -> TRAIN_PROVER -> CHECKPOINT
                                                                -> (MINT of the next round | COMPLETE)

Self-play (task.kind = "play") has no verifier:

    INIT -> TRAIN_PROVER -> CHECKPOINT -> (TRAIN_PROVER of the next round | COMPLETE)

Invariant: every file that a state on disk names is complete; all other files may be deleted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any

from pvg.errors import StateError


class Phase(StrEnum):
    INIT = "init"
    WARMUP = "warmup"  # only with [warmup]
    SOLVE = "solve"  # decoupled game only
    MINT = "mint"
    TRAIN_VERIFIER = "train_verifier"
    TRAIN_PROVER = "train_prover"
    CHECKPOINT = "checkpoint"
    COMPLETE = "complete"


ALLOWED: dict[Phase, tuple[Phase, ...]] = {
    Phase.INIT: (Phase.WARMUP, Phase.MINT, Phase.SOLVE, Phase.TRAIN_PROVER),
    Phase.WARMUP: (Phase.MINT, Phase.SOLVE),
    Phase.SOLVE: (Phase.MINT,),
    Phase.MINT: (Phase.TRAIN_VERIFIER,),
    Phase.TRAIN_VERIFIER: (Phase.TRAIN_PROVER,),
    Phase.TRAIN_PROVER: (Phase.CHECKPOINT,),
    Phase.CHECKPOINT: (Phase.MINT, Phase.TRAIN_PROVER, Phase.COMPLETE),
    Phase.COMPLETE: (),
}


def later_rounds_begin_with(*, self_play: bool) -> Phase:
    """The first phase of every round after the first. Self-play has no mint, because it has no verifier."""
    return Phase.TRAIN_PROVER if self_play else Phase.MINT


@dataclass(frozen=True)
class GameState:
    """The position of a run at its last commit.

    - `step`: finished units of the phase (mint chunks or optimizer steps).
    - `version`: number of published policy weights.
    - `checkpoint`: name of the trainer's committed checkpoint. `weights`: names of the committed weight folders.
    - `shards`: the committed rollout shards as plain data.
    - `progress`: data of the phase (stop rule, alerts). `rounds`: metrics of the finished rounds.
    - `offsets`: committed lengths of the appended files in bytes. `marks`: their lengths and digests at earlier commits
      and, as the last entry, at this one (pvg.store.state.JournalMark).
    - `machine`: what the last bits of every result depend on (torch, device, threads).
    - `inputs`: digests of the user's files that the run reads, by name (pvg.game.ledger.inputs_of).
    - `folder`: the working directory in which the run began.
    - `peak_memory`: maximum over the processes of the run so far, in bytes (pvg.telemetry.device.peak_memory).
    """

    config_hash: str
    config: Mapping[str, Any]
    code_version: str
    phase: Phase = Phase.INIT
    round: int = 0
    step: int = 0
    version: int = 0
    checkpoint: str | None = None
    shards: tuple[Mapping[str, Any], ...] = ()
    weights: tuple[str, ...] = ()
    progress: Mapping[str, Any] = field(default_factory=dict)
    rounds: tuple[Mapping[str, float | None], ...] = ()
    offsets: Mapping[str, int] = field(default_factory=dict)
    marks: Mapping[str, Sequence[Sequence[Any]]] = field(default_factory=dict)
    machine: str = ""
    inputs: Mapping[str, str] = field(default_factory=dict)
    folder: str = ""
    peak_memory: Mapping[str, float] = field(default_factory=dict)

    def enter(self, phase: Phase, *, round_: int | None = None) -> GameState:
        """The state at the start of `phase`. Raises StateError, naming both phases, if the game forbids this
        transition."""
        target = self.round if round_ is None else round_
        expected_round = self.round + (self.phase is Phase.CHECKPOINT and phase is not Phase.COMPLETE)
        if phase not in ALLOWED[self.phase] or target != expected_round:
            raise StateError(
                f"The game cannot go from {self.phase.value} of round {self.round} to {phase.value} of round {target}.",
                f"Allowed next: {', '.join(ALLOWED[self.phase]) or 'nothing, the run is complete'}.",
            )
        return replace(self, phase=phase, round=target, step=0, checkpoint=None, progress={})

    def after_round(self, rounds: int, *, self_play: bool) -> GameState:
        """The state at the start of the next round, or at the end of a game of `rounds` rounds."""
        if self.round + 1 >= rounds:
            return self.enter(Phase.COMPLETE)
        return self.enter(later_rounds_begin_with(self_play=self_play), round_=self.round + 1)

    def plain(self) -> dict[str, Any]:
        """JSON-compatible data."""
        plain = {each.name: getattr(self, each.name) for each in fields(self)}
        lists = {name: list(plain[name]) for name in ("shards", "weights", "rounds")}
        marks = {name: [list(mark) for mark in marks] for name, marks in self.marks.items()}
        return {**plain, **lists, "phase": self.phase.value, "marks": marks}

    @classmethod
    def from_plain(cls, data: Mapping[str, Any]) -> GameState:
        """Raises StateError if this version of pvg cannot read the data."""
        try:
            return cls(
                **{
                    **data,
                    "phase": Phase(data["phase"]),
                    "shards": tuple(data["shards"]),
                    "weights": tuple(data["weights"]),
                    "rounds": tuple(data["rounds"]),
                }
            )
        except (KeyError, TypeError, ValueError) as error:
            raise StateError(
                f"This version of pvg cannot read the run's state ({error}).",
                "Resume it with the version of pvg that wrote it.",
            ) from None
