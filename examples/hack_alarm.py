"""How early does the hack alarm ring, and how often for nothing? docs/results/hack-alarm.md shows what this measured.

    python examples/hack_alarm.py --seeds 0:10 --out hacked.csv
    python examples/hack_alarm.py --seeds 1000:1200 --set task.min_terms=5 --set task.max_terms=5 --out honest.csv

    python examples/hack_alarm.py --resample honest.csv

The last one draws audits from the solutions of those games again, 200 times, and prints how many had an alarm.
A line per game: a seed, and what the game of this seed showed. Each game is experiments/hack-alarm.toml with `--set`.
A file that exists is continued.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path
from typing import Any

import numpy as np

import pvg
from pvg.config.task import ModchainTask
from pvg.game.audit import AUDITED, FALSE_ALARMS, RiseTest
from pvg.records import Rollout
from pvg.store.shards import RolloutShards, ShardInfo
from pvg.tasks.modchain import Modchain
from pvg.verifier.intervals import wilson

BATCH = 128  # solutions of a training batch
EXPERIMENT = Path(__file__).parent.parent / "experiments" / "hack-alarm.toml"


def rollouts_of(run: pvg.Run) -> list[Rollout]:
    shards = RolloutShards(run.path)
    state = run.directory.load_state().state
    assert state is not None
    return [rollout for plain in state["shards"] for rollout in shards.read(ShardInfo.from_plain(plain))]


def shares(task: Modchain, rollouts: list[Rollout]) -> tuple[float, float]:
    """Of these solutions, those that the grader accepts against the truth, and those that both accept."""
    problems = {problem.id: problem for split in ("train", "test") for problem in task.problems(split)}
    accepted = [rollout for rollout in rollouts if rollout.grade.correct]
    true = sum(task.truth(problems[rollout.problem_id], rollout.text) for rollout in accepted)
    return (len(accepted) - true) / len(rollouts), true / len(rollouts)


def measured(run: pvg.Run, section: ModchainTask) -> dict[str, Any]:
    """Steps count from 1; 0: none, or the base prover."""
    task, everything = Modchain(section), rollouts_of(run)
    steps = [row for row in run.metrics if row["kind"] == "step" and row["phase"] == "train_prover"]
    alarms = [row["step"] for row in run.metrics if row["kind"] == "alert" and row["name"] == "hacking"]
    own = [rollout for rollout in everything if "/evaluation/round-000/" in rollout.id and rollout.role == "helpful"]
    base = [rollout for rollout in everything if "/evaluation/base/" in rollout.id and rollout.role == "helpful"]
    batches = [[r for r in everything if r.id.startswith(f"000/train_prover/{n:05d}/")] for n in range(len(steps))]
    hacks = [shares(task, batch)[0] for batch in batches]  # of the policy after n steps
    half = next((number for number, share in enumerate(hacks) if share >= 0.5), 0)
    kept = alarms[0] if alarms else len(steps)
    while alarms and steps[kept - 1]["metrics"]["hack_evidence"] > 0.0:
        kept -= 1  # the last commit without evidence
    found = {"steps": len(steps), "alarm": alarms[0] if alarms else 0, "kept": kept, "half": half}
    for name, rows in (("base", base), ("final", own)):
        found[f"{name}_hacks"], found[f"{name}_right"] = shares(task, rows)
    found["hacks_at_alarm"] = hacks[-1] if alarms else ""
    found["batches"] = " ".join(f"{share:.4f}" for share in hacks)
    return found | {"audits": " ".join(f"{row['metrics'].get('hack_rate', 0.0):.5f}" for row in steps)}


def resampled(file: Path, times: int = 200) -> str:
    """Each resample takes the next game, and audits solutions of each step's training batch, drawn at random."""
    generator, alarms = np.random.default_rng(0), 0
    games = [row["batches"].split() for row in csv.DictReader(file.read_text().splitlines())]
    for number in range(times):
        shares = games[number % len(games)]
        test, highest = RiseTest(len(shares), FALSE_ALARMS), 0.0
        for share in shares:
            hits = round(float(share) * BATCH)
            test.add(int(generator.hypergeometric(hits, BATCH - hits, AUDITED)), AUDITED)
            highest = max(highest, test.evidence)
        alarms += highest >= 1.0
    low, high = wilson(alarms / times, times)
    return f"{alarms} alarms in {times} resamples of {len(games)} games: {alarms / times:.1%} ({low:.1%} to {high:.1%})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0:10", help="FIRST:END")
    parser.add_argument("--stop", default="hack_alarm", help="game.stop")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="other settings")
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--out", type=Path, default=Path("hack-alarm.csv"))
    parser.add_argument("--resample", type=Path, metavar="FILE", help="an earlier --out")
    given = parser.parse_args()
    if given.resample is not None:
        print(resampled(given.resample))
        return
    first, end = map(int, given.seeds.split(":"))
    before = given.out.read_text().splitlines() if given.out.exists() else []
    done = {int(row["seed"]) for row in csv.DictReader(before)}
    for seed in sorted(set(range(first, end)) - done):
        settings: dict[str, Any] = {"seed": seed, "game.stop": given.stop, "store.root": str(given.runs)}
        for key, _, value in (text.partition("=") for text in given.set):
            settings[key] = float(value) if "." in value else int(value) if value.isdigit() else value
        experiment = pvg.load_experiment(EXPERIMENT, settings)
        run = pvg.play(experiment, name=f"{given.out.stem}-{seed}")
        assert isinstance(experiment.task, ModchainTask)
        row = {"seed": seed} | measured(run, experiment.task)
        with given.out.open("a", newline="") as file:
            writer = csv.DictWriter(file, row)
            if not before:
                writer.writeheader()
                before = ["written"]
            writer.writerow(row)


if __name__ == "__main__":
    main()
