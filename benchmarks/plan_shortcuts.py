"""Plan game on the mini map: soundness, refutability and the verifier's AUC by round, from the runs' stored rollouts.

    python benchmarks/plan_shortcuts.py runs/diplomacy-mini/plans-seed-* [--out FILE.json]

A verifier could merely count supports. So besides the overall AUC this prints the AUC within equal counts: over pairs
of a sound and a refutable legal plan with the same number of supports. The AUC of the count itself is printed too.
Means over the runs, with 95 % intervals (Student's t) from two runs on. All plans are those of a round's own
prover on the test problems, both roles, without malformed ones.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import orjson

from pvg.errors import StateError
from pvg.game.ledger import shards_of
from pvg.game.states import GameState, Phase
from pvg.records import Role, Rollout, source_of_round
from pvg.store.run_directory import RunDirectory
from pvg.store.shards import RolloutShards
from pvg.study.statistics import interval
from pvg.verifier.calibration import auc

MEASURES = {
    "helpful_sound": "helpful sound",
    "helpful_legal": "helpful legal",
    "sneaky_refutable": "sneaky refutable",
    "sneaky_proven": "sneaky proven",
    "auc": "AUC",
    "auc_equal_supports": "AUC, equal supports",
    "auc_of_supports": "AUC of the count",
}


def rounds_of(run: RunDirectory) -> list[list[Rollout]]:
    """The scored test rollouts of each finished round's own prover. Raises StateError for a run without commits."""
    plain = run.load_state().state
    if plain is None:
        raise StateError(f"{run.path} has no finished round.", "Play it first: pvg train diplomacy-mini")
    state, shards = GameState.from_plain(plain), RolloutShards(run.path)
    found = []
    for number in range(len(state.rounds)):
        infos = shards_of(state, number, Phase.CHECKPOINT.value)
        rollouts = [rollout for info in infos for rollout in shards.read(info)]
        found.append([rollout for rollout in rollouts if rollout.source == source_of_round(number)])
    return found


def supports(rollout: Rollout) -> int:
    """The number of supports of a plan; the certificate does not count."""
    return rollout.solution.partition("!")[0].count("+")


def auc_within(rollouts: Sequence[Rollout]) -> float:
    """P(a sound plan scores above a refutable one with as many supports) + P(tie) / 2, over all such pairs."""
    groups: dict[int, list[Rollout]] = defaultdict(list)
    for rollout in rollouts:
        groups[supports(rollout)].append(rollout)
    wins = pairs = 0.0
    for group in groups.values():
        sound_N, refutable_M = scores_by_grade(group)
        if sound_N.size and refutable_M.size:
            pairs += sound_N.size * refutable_M.size
            wins += sound_N.size * refutable_M.size * auc(sound_N, refutable_M)
    return wins / pairs if pairs else float("nan")


def scores_by_grade(rollouts: Sequence[Rollout]) -> tuple[np.ndarray, np.ndarray]:
    """The verifier's scores of sound and of refutable plans."""
    sound = [r.score for r in rollouts if r.grade.correct and r.score is not None]
    return np.array(sound), np.array([r.score for r in rollouts if not r.grade.correct and r.score is not None])


def measured(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """The MEASURES of one round."""
    helpful = [r for r in rollouts if r.role is Role.HELPFUL]
    sneaky = [r for r in rollouts if r.role is Role.SNEAKY]
    legal = [r for r in rollouts if r.grade.well_formed]
    counts = {
        correct: np.array([supports(r) for r in legal if r.grade.correct is correct]) for correct in (True, False)
    }
    return {
        "helpful_sound": float(np.mean([r.grade.correct for r in helpful])),
        "helpful_legal": float(np.mean([r.grade.well_formed for r in helpful])),
        "sneaky_refutable": float(np.mean([r.grade.well_formed and not r.grade.correct for r in sneaky])),
        "sneaky_proven": float(np.mean([r.is_flaw for r in sneaky])),
        "auc": auc(*scores_by_grade(legal)),
        "auc_equal_supports": auc_within(legal),
        "auc_of_supports": auc(counts[True], counts[False]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs")
    parser.add_argument("--out", type=Path, help="a JSON file for the values of all runs")
    options = parser.parse_args()
    runs = {str(path): [measured(found) for found in rounds_of(RunDirectory(path))] for path in options.runs}
    print(f"{'round':>5} " + " ".join(f"{title:>21}" for title in MEASURES.values()))
    for number in range(min(map(len, runs.values()))):
        cells = []
        for name in MEASURES:
            values = [rounds[number][name] for rounds in runs.values()]
            low, high = interval(values)
            spread = "" if low is None or high is None else f" [{low:.3f}, {high:.3f}]"
            cells.append(f"{np.mean(values):.3f}{spread}")
        print(f"{number:>5} " + " ".join(f"{cell:>21}" for cell in cells))
    if options.out is not None:
        options.out.write_bytes(orjson.dumps({"runs": runs}, option=orjson.OPT_INDENT_2))


if __name__ == "__main__":
    main()
