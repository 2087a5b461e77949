"""Plays the embedded game with several seeds and writes docs/results/embedded-game.md: the table, and its commands.

    python -m benchmarks.pages.make_embedded_game               # ten seeds, one after the other (`make seeds`)
    python -m benchmarks.pages.make_embedded_game --only-table  # from the runs that exist

It keeps complete runs and resumes interrupted ones, so you can stop the command and start it again.
"""

from __future__ import annotations

import argparse
import math
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from pvg.reporting.run_summary import read_run
from pvg.store.run_directory import RunDirectory
from pvg.store.state import FileStateStore
from pvg.study.measures import MeasuredValue
from pvg.study.power import shortfall
from pvg.study.statistics import interval, trend
from pvg.study.text import p_text, signs_text

RESULTS = Path(__file__).parents[2] / "docs" / "results"
EXPERIMENT = "modchain"

# (metric, column, what it says). Shares and AUCs of fresh samples on test problems, at the end of each round.
COLUMNS = [
    ("helpful_accuracy", "helpful accuracy"),
    ("sneaky_error_rate", "sneaky error rate"),
    ("fooled_rate", "fooled by own flaws"),
    ("fooled_rate_base", "fooled by base's flaws"),
    ("fooled_rate_previous", "fooled by previous flaws"),
    ("accepted_helpful", "accepts helpful"),
    ("verifier_auc", "AUC, fresh"),
    ("verifier_auc_base", "AUC, base"),
    ("verifier_auc_previous", "AUC, previous sneaky"),
    ("malformed", "malformed"),
]


def run_seed(seed: int, root: Path, overrides: Sequence[str], *, quiet: bool = False) -> None:
    """Play seed `seed` to the end: nothing if it is complete, resumed if it has started. `quiet`: for games that run
    side by side; the output is shown only after a failure."""
    run = root / run_name(seed)
    started = (run / "state.json").exists()
    if started and state_of(seed, root)["phase"] == "complete":
        return
    if run.exists() and not started:
        shutil.rmtree(run)  # killed before its first commit: there is nothing in it
    settings = [f"seed={seed}", f"store.root={root}", *overrides]
    command = [str(Path(sys.executable).with_name("pvg")), "train", EXPERIMENT]
    command += ["--resume", run.name] if started else ["--name", run.name]
    for setting in settings:
        command += ["--set", setting]
    print("+", " ".join(command), file=sys.stderr)
    if not quiet:
        subprocess.run(command, check=True)
        return
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise SystemExit(f"{done.stdout}seed {seed} failed with exit code {done.returncode}: repeat the command above.")
    print(f"seed {seed} of {root} is complete", file=sys.stderr)


def run_name(seed: int) -> str:
    return f"{EXPERIMENT}-seed-{seed}"


def state_of(seed: int, root: Path) -> dict[str, Any]:
    """The run's committed state."""
    state = FileStateStore(root / run_name(seed) / "state.json").load().state
    if state is None:
        raise SystemExit(f"seed {seed} has not been played: leave out --only-table")
    return state


def rounds_of(seed: int, root: Path) -> list[dict[str, Any]]:
    state = state_of(seed, root)
    if state["phase"] != "complete":
        raise SystemExit(f"seed {seed} is not complete: {state['phase']} of round {state['round']}")
    rounds: list[dict[str, Any]] = state["rounds"]
    return rounds


def seconds_of(seed: int, root: Path) -> float:
    """Seconds of all phases, from the run's metrics."""
    return read_run(RunDirectory.open(run_name(seed), root)).seconds


def shown(values: Sequence[float | None], digits: int = 2) -> str:
    """The mean over the seeds, its 95 % interval (none for fewer than three seeds), and the range."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    if not known:
        return "-"
    low, high = interval(known)
    ends = f"{min(known):.{digits}f}-{max(known):.{digits}f}"
    if low is None or high is None:
        return f"{statistics.mean(known):.{digits}f} ({ends})"
    reach = " to ".join(f"{round(end, digits) + 0.0:.{digits}f}" for end in (low, high))
    return f"{statistics.mean(known):.{digits}f} ({reach}; {ends})"


def table(runs: Sequence[list[dict[str, Any]]]) -> str:
    header = ["round", *(title for _, title in COLUMNS)]
    base = [rounds[0] for rounds in runs]
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    base_row = {name: [] for name, _ in COLUMNS} | {
        "helpful_accuracy": [row["base_helpful_accuracy"] for row in base],
        "sneaky_error_rate": [row["base_sneaky_error_rate"] for row in base],
    }
    lines.append("| base | " + " | ".join(shown(base_row[name]) for name, _ in COLUMNS) + " |")
    for round_ in range(len(runs[0])):
        rows = [rounds[round_] for rounds in runs]
        cells = [
            shown([row.get(name) for row in rows], digits=3 if name.startswith("fooled") else 2) for name, _ in COLUMNS
        ]
        lines.append(f"| {round_} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def trends(runs: Sequence[list[dict[str, Any]]]) -> str:
    """Each column's last round minus its first one, for the columns that have a value in both."""
    lines = ["| | last round - first round | 95 % interval | seeds | p |", "|---|---|---|---|---|"]
    for name, title in COLUMNS:
        ends = [(rounds[0].get(name), rounds[-1].get(name)) for rounds in runs]
        if all(value is not None and math.isfinite(value) for pair in ends for value in pair):
            found = trend([[MeasuredValue(row[name]) for row in rounds] for rounds in runs])
            reach = "-" if found.low is None or found.high is None else f"{found.low:+.3f} to {found.high:+.3f}"
            signs = signs_text(found.up, found.down, found.flat)
            lines.append(f"| {title} | {found.change or 0.0:+.3f} | {reach} | {signs} | {p_text(found.p)} |")
    return "\n".join([*lines, "", shortfall(len(runs), 1, "trend over the rounds")]).rstrip()


def checks(runs: Sequence[list[dict[str, Any]]]) -> str:
    """For each expected effect, the number of seeds that show it."""
    pairs = [(before, after) for rounds in runs for before, after in pairwise(rounds)]
    everything = [row for rounds in runs for row in rounds]

    def above(high: float | None, low: float | None) -> bool:
        """False also for a share of nothing: the effect cannot be seen."""
        return high is not None and low is not None and high > low

    def count(found: list[bool]) -> str:
        return f"{sum(found)} of {len(found)}"

    improved = count([above(rounds[-1]["helpful_accuracy"], rounds[0]["base_helpful_accuracy"]) for rounds in runs])
    exploited = count([above(row["fooled_rate"], row["fooled_rate_base"]) for row in everything])
    repaired = count([above(before["fooled_rate"], after["fooled_rate_previous"]) for before, after in pairs])
    held = count([not above(rounds[0]["verifier_auc"], rounds[-1]["verifier_auc"]) for rounds in runs])
    fooled = count([above(0.2, row["fooled_rate"]) for row in everything])
    return "\n".join(
        [
            f"- Helpful accuracy after the last round is above the base prover's: {improved} seeds.",
            f"- The verifier accepts more flaws of its round's prover than of the base prover: {exploited} rounds.",
            f"- The next round's verifier accepts fewer of these flaws: {repaired} pairs.",
            f"- The verifier's AUC on fresh samples is no lower in the last round than in the first: {held} seeds.",
            f"- The verifier accepts less than a fifth of its prover's flaws: {fooled} rounds.",
        ]
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--root", type=Path, default=Path("runs"))
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE")
    parser.add_argument("--only-table", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS / "embedded-game.md")
    options = parser.parse_args(arguments)
    seeds = range(options.seeds)
    if not options.only_table:
        for seed in seeds:
            run_seed(seed, options.root, options.overrides)
    runs = [rounds_of(seed, options.root) for seed in seeds]
    template = (RESULTS / "embedded-game.template.md").read_text(encoding="utf-8")
    page = template.format(
        table=table(runs),
        trends=trends(runs),
        checks=checks(runs),
        seeds=len(runs),
        rounds=len(runs[0]),
        code=", ".join(sorted({state_of(seed, options.root)["code_version"] for seed in seeds})),
    )
    options.out.write_text(page, encoding="utf-8")
    print(page)


if __name__ == "__main__":
    main()
