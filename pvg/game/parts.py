"""The parts of a training phase (pvg.game.round): batches, a rule that ends it, and processes that help.

pvg.game.prover_phase chooses and opens them. An optional part that is off is an object that does nothing, so the loop
asks for no part whether it is there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from pvg.training.batch import PolicyBatch

if TYPE_CHECKING:
    from torch import Tensor

Progress = Mapping[str, Any]  # JSON data of a commit
Tensors = Mapping[str, "Tensor"]  # of a commit


class Batches:
    """What a phase trains on: pvg.game.round.GameBatches, or whole games (pvg.game.play_phase.PlayBatches). `metrics`:
    those of the newest batch; `done`: the number of batches so far. Here: batches that sample nothing ahead."""

    metrics: dict[str, float]
    done: int

    @property
    def carried(self) -> int:
        """Rollouts that wait for the next batch."""
        return 0

    def start(self, version: int) -> None:
        """Begin work ahead; the engine has the trainer's `version`. Call it outside of spans."""

    async def next_batch(self) -> PolicyBatch:
        raise NotImplementedError

    async def published(self, version: int) -> dict[str, float]:
        """The engine has received `version`, which has learned from the whole batch. Returns metrics of what
        followed."""
        return {}

    async def close(self) -> None: ...

    async def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What the next batches depend on besides the weights."""
        return {}, {"done": self.done}

    def load_state(self, tensors: Tensors, progress: Progress) -> tuple[dict[str, Tensor], int]:
        """Restore a `state` whose tensors are among `tensors`. Returns the other tensors, and the number of unfinished
        rollouts that are lost."""
        self.done = progress["done"]
        return dict(tensors), 0


class TrainingStop(Protocol):
    """Decides whether a training ends early (`pvg.game.prover_phase.StopRule`, or an attack's goal). Commits store its
    state."""

    def observe(self, metrics: Mapping[str, float]) -> bool:
        """Called once per batch, after the last optimizer step on it."""

    def state(self) -> dict[str, Any]: ...

    def load_state(self, state: Progress) -> None: ...


class Helper(Protocol):
    """Other processes that train or score (pvg.workers)."""

    async def prepare(self) -> None: ...

    async def close(self) -> None: ...
