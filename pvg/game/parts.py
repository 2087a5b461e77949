"""The parts that a round is put together from (pvg.game.round); pvg.game.prover_phase chooses and opens them.

An optional part that is off is an object that does nothing, so the loop asks for no part whether it is there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from pvg.records import Float32, Group, Rollout
from pvg.training.batch import PolicyBatch

if TYPE_CHECKING:
    from torch import Tensor

    from pvg.verifier.scorer import VerifierScorer

Progress = Mapping[str, Any]  # JSON data of a commit
Tensors = Mapping[str, "Tensor"]  # of a commit


class GroupSource(Protocol):
    """Where the groups of a batch come from. `ahead`: it samples while the trainer works."""

    ahead: bool

    @property
    def carried(self) -> int:
        """Rollouts that wait for the next batch."""
        ...

    def start(self, version: int, batch: int, batches: int) -> None:
        """Begin with batch number `batch`; engine and trainer have `version`. `batches` of them remain."""
        ...

    def published(self, version: int) -> None:
        """The engine has received the trainer's new `version`."""
        ...

    async def batch(self, number: int) -> tuple[list[Group], dict[str, float]]:
        """The groups of batch `number`, and metrics."""
        ...

    async def close(self) -> None: ...

    def state(self) -> dict[str, Any]: ...

    def load_state(self, state: Progress) -> int:
        """Returns the number of rollouts that were in progress and are lost."""
        ...


class Credit(Protocol):
    """Turns the rewards of a batch into advantages."""

    def observe(self, rollouts: Sequence[Rollout], rewards_N: Float32) -> tuple[Float32, dict[str, float]]:
        """Advantages float32 [N] of N rollouts with these rewards, and metrics."""
        ...

    def state(self) -> dict[str, Any]: ...

    def load_state(self, state: Progress) -> None: ...


class VerifierInRound(Protocol):
    """The round's verifier while the prover trains: frozen, or with updates (pvg.game.simultaneous). `threshold`: of
    acceptance, a logit."""

    threshold: float

    async def after(self, batches: int, scorer: VerifierScorer) -> dict[str, float]:
        """Called after the prover's batch number `batches`, counted from 1. Returns the metrics of an update."""
        ...

    async def close(self) -> None: ...

    async def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]: ...

    def load_state(self, tensors: Tensors, progress: Progress, scorer: VerifierScorer) -> dict[str, Tensor]:
        """Restore a `state` whose tensors are among `tensors`; returns the other tensors."""
        ...

    async def save(self) -> list[str]:
        """Write what has changed since the round's verifier; returns the names to commit."""
        ...


class Batches(Protocol):
    """What a phase trains on: pvg.game.round.GameBatches, or whole games (pvg.game.play_phase.PlayBatches). `metrics`:
    those of the newest batch."""

    metrics: dict[str, float]

    @property
    def carried(self) -> int:
        """Rollouts that wait for the next batch."""
        ...

    def start(self, version: int) -> None:
        """Begin work ahead; the engine has the trainer's `version`. Call it outside of spans."""
        ...

    async def next_batch(self) -> PolicyBatch: ...

    async def published(self, version: int) -> dict[str, float]:
        """The engine has received `version`, which has learned from the whole batch. Returns metrics of what
        followed."""
        ...

    async def close(self) -> None: ...

    async def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What the next batches depend on besides the weights."""
        ...

    def load_state(self, tensors: Tensors, progress: Progress) -> tuple[dict[str, Tensor], int]:
        """Restore a `state` whose tensors are among `tensors`. Returns the other tensors, and the number of unfinished
        rollouts that are lost."""
        ...


class TrainingStop(Protocol):
    """Decides whether a training ends early (`pvg.game.prover_phase.StopRule`, or an attack's goal). Commits store its
    state."""

    def observe(self, metrics: Mapping[str, float]) -> bool:
        """Called once per batch, after the last optimizer step on it."""
        ...

    def state(self) -> dict[str, Any]: ...

    def load_state(self, state: Progress) -> None: ...


class Helper(Protocol):
    """Other processes that train or score (pvg.workers)."""

    async def prepare(self) -> None: ...

    async def close(self) -> None: ...
