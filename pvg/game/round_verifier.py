"""A round's verifier on disk: one model or an ensemble.

    verifier, threshold = read_verifier(players, ledger.read_weights, verifier_weights_name(round_))

One model is one folder of weights. An ensemble has one folder per member, and a folder under the verifier's name with
the members' names and scales.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Protocol

from pvg.models.heads import ScoreScales, VerifierEnsemble, VerifierModel
from pvg.store.run_players import verifier_weights_name
from pvg.verifier.scorer import ScoringModel

if TYPE_CHECKING:
    from torch import Tensor

    from pvg.verifier.scorer import VerifierScorer


class VerifierOpener(Protocol):
    """Opens a verifier at its initial weights: the players of a run (pvg.game.players.Players)."""

    def open_verifier(self, round_: int = 0, member: int = 0, like: VerifierModel | None = None) -> VerifierModel: ...


ReadWeights = Callable[[str], tuple[Mapping[str, "Tensor"], Mapping[str, Any]]]


def member_weights_name(round_: int, member: int) -> str:
    """The name of one member of a round's ensemble; members count from 0."""
    return f"{verifier_weights_name(round_)}-member-{member}"


def read_verifier(players: VerifierOpener, read_weights: ReadWeights, name: str) -> tuple[ScoringModel, float]:
    """The frozen verifier that was saved as `name`, and its acceptance threshold; the caller closes it. Runs in the
    compute thread. `read_weights` returns what `Ledger.save_weights` stored under a name."""
    tensors, meta = read_weights(name)
    threshold = float(meta["threshold"])
    if "members" not in meta:
        verifier = players.open_verifier()
        verifier.load_trainable_state(tensors)
        return verifier, threshold
    scales = ScoreScales(tensors["slopes_K"].numpy(), tensors["offsets_K"].numpy())
    members = read_members(players, read_weights, meta["members"])
    return VerifierEnsemble(members, meta["aggregation"], scales), threshold


def read_members(players: VerifierOpener, read_weights: ReadWeights, names: Sequence[str]) -> list[VerifierModel]:
    """The members of an ensemble, one model each; they share the tensors that training never changes."""
    members: list[VerifierModel] = []
    with ExitStack() as opened:
        for name in names:
            tensors, _ = read_weights(name)
            member = players.open_verifier(like=members[0] if members else None)
            opened.callback(member.close)
            member.load_trainable_state(tensors)
            members.append(member)
        opened.pop_all()
    return members


class FixedVerifier:
    """The round's verifier in the Stackelberg schedule: nothing changes while the prover trains."""

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold

    async def after(self, batches: int, scorer: VerifierScorer) -> dict[str, float]:
        return {}

    async def close(self) -> None: ...

    async def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return {}, {}

    def load_state(
        self, tensors: Mapping[str, Tensor], progress: Mapping[str, Any], scorer: VerifierScorer
    ) -> dict[str, Tensor]:
        return dict(tensors)

    async def save(self) -> list[str]:
        return []
