"""How the verifier scored the solutions of each round, by kind. Only the columns that are needed are read.

Of a finished round the evaluation's samples speak (fresh, both roles, problems that nobody trained on); of one that is
not finished the prover's newest shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pvg.errors import StateError
from pvg.records import Role, source_of_round
from pvg.reporting.examples import EVALUATION
from pvg.reporting.run_summary import RunSummary
from pvg.store.check_columns import CERTIFIED
from pvg.store.run_directory import RunDirectory
from pvg.store.shards import RolloutShards, ShardInfo
from pvg.store.state import FileStateStore

PROVER = "train_prover"

# Kind -> (role, correct). Of the sneaky wrong ones only flaws count: a malformed text is no solution, and one without
# the proof that its task asks for may be wrong by accident.
KINDS: dict[str, tuple[Role, bool]] = {
    "helpful correct": (Role.HELPFUL, True),
    "helpful wrong": (Role.HELPFUL, False),
    "sneaky flaw": (Role.SNEAKY, False),
    "sneaky correct": (Role.SNEAKY, True),
}


@dataclass(frozen=True, slots=True)
class RoundScores:
    """Scores by kind, float64 [n] each; `fresh`: from the evaluation, not from training. `threshold` may be unknown."""

    round: int
    fresh: bool
    threshold: float | None
    kinds: dict[str, NDArray[np.float64]]

    def accepted(self, kind: str) -> float | None:
        """The share of a kind at or above the threshold."""
        scores = self.kinds[kind]
        return float((scores >= self.threshold).mean()) if self.threshold is not None and len(scores) else None


def round_scores(run: RunDirectory, summary: RunSummary) -> list[RoundScores]:
    """Of every round with scored solutions, in order. Raises DamagedFileError when one of its shards is damaged."""
    try:
        state = FileStateStore(run.state).load().state or {}
    except StateError:  # the summary's notes say so
        return []
    shards = RolloutShards(run.path)
    infos = [ShardInfo.from_plain(plain) for plain in state.get("shards", ())]
    found = []
    for round_ in sorted({info.round for info in infos}):
        own = [info for info in infos if info.round == round_]
        evaluated = [info for info in own if info.label.startswith(f"{EVALUATION}-")]
        trained = [info for info in own if info.label.startswith(f"{PROVER}-")][-1:]
        kinds = _kinds(shards, evaluated or trained, source_of_round(round_))
        if any(len(scores) for scores in kinds.values()):
            found.append(RoundScores(round_, bool(evaluated), _threshold(summary, round_), kinds))
    return found


def _threshold(summary: RunSummary, round_: int) -> float | None:
    told = [summary.rounds.get(round_, {}), *(phase.metrics for phase in summary.phases if phase.round == round_)]
    return next((metrics["threshold"] for metrics in told if "threshold" in metrics), None)


def _kinds(shards: RolloutShards, infos: Sequence[ShardInfo], source: str) -> dict[str, NDArray[np.float64]]:
    found: dict[str, list[NDArray[np.float64]]] = {kind: [] for kind in KINDS}
    for info in infos:
        batch = shards.map(info)
        scores_N = batch.column("score").to_numpy(zero_copy_only=False).astype(np.float64)
        roles_N = np.array(batch.column("role").to_pylist())
        written_N = np.array(batch.column("source").to_pylist()) == source
        correct_N = batch.column("correct").to_numpy(zero_copy_only=False).astype(bool)
        formed_N = batch.column("well_formed").to_numpy(zero_copy_only=False).astype(bool)
        proven_N = np.ones(len(scores_N), dtype=bool)
        if CERTIFIED in batch.schema.names:
            proven_N = np.array([certified is not False for certified in batch.column(CERTIFIED).to_pylist()])
        for kind, (role, correct) in KINDS.items():
            mask_N = written_N & (roles_N == role.value) & (correct_N == correct) & np.isfinite(scores_N)
            if kind == "sneaky flaw":
                mask_N &= formed_N & proven_N
            found[kind].append(scores_N[mask_N])
    return {kind: np.concatenate([np.empty(0), *pieces]) for kind, pieces in found.items()}
