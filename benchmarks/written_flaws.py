"""Which flaws do the verifiers of the embedded game accept, also those that no prover of the game writes?

    python -m benchmarks.written_flaws RUN...

The program writes solutions of test problems with one mistake each, scores them with the verifier of each round, and
prints a table in Markdown: the share that reaches the verifier's threshold, by kind and round (the mean and the range
over the runs). The kinds are those of the base prover (pvg.tasks.modchain.flawed_trace), and two more: a correct step
after the last one, and all steps left out but the first. docs/results/embedded-game.md has the results.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from pvg.export.finished import FinishedRound
from pvg.records import Problem
from pvg.reporting.table import markdown_lines
from pvg.store.run_directory import RunDirectory
from pvg.tasks import open_task
from pvg.tasks.modchain import clean_trace, flawed_trace, operands_of, possible_mistakes
from pvg.verifier.scorer import VerifierScorer

PROBLEMS = 64
DRAWS = 8  # solutions of each kind and problem

Accepted = dict[str, float]  # by kind of solution


def written(problem: Problem, rng: np.random.Generator) -> Iterator[tuple[str, str]]:
    """(kind, solution): the correct solution, and `DRAWS` of each kind of flaw."""
    correct = clean_trace(problem)
    yield "correct", correct
    steps, _, answer = correct.rpartition(";A")
    modulus = operands_of(problem)[1]
    for _ in range(DRAWS):
        for kind in possible_mistakes(problem):
            yield kind.replace("_", " "), flawed_trace(problem, kind, rng)
        operand = int(rng.integers(1, modulus))  # adding 0 would not change the answer
        total = (int(answer) + operand) % modulus
        yield "extra step", f"{steps};{answer}+{operand}={total};A{total}"
    first = steps.partition(";")[0]
    if (total_of_first := first.rpartition("=")[2]) != answer:
        yield "first step only", f"{first};A{total_of_first}"


def accepted(scorer: VerifierScorer, problems: Sequence[Problem]) -> Accepted:
    """The share of solutions that reach the threshold."""
    rng, verdicts = np.random.default_rng(0), defaultdict[str, list[bool]](list)
    for problem in problems:
        kinds, solutions = zip(*written(problem, rng), strict=True)
        scores_N = scorer.score_texts(problem.question, solutions)
        for kind, score in zip(kinds, scores_N, strict=True):
            verdicts[kind].append(bool(score >= scorer.threshold))
    return {kind: statistics.fmean(found) for kind, found in verdicts.items()}


def of_run(run: RunDirectory) -> list[Accepted]:
    """By round. The problems are the same for all runs with the same `[task]`."""
    problems = list(itertools.islice(open_task(run.experiment().task).problems("test"), PROBLEMS))
    found = []
    for number in range(FinishedRound.open(run).rounds):
        with FinishedRound.open(run, number).scorer() as scorer:
            found.append(accepted(scorer, problems))
    return found


def table(runs: Sequence[Sequence[Accepted]]) -> str:
    rounds = range(min(len(run) for run in runs))
    rows = [(kind, *(cell([run[number][kind] for run in runs]) for number in rounds)) for kind in sorted(runs[0][0])]
    header = ("solution", *(f"round {number}" for number in rounds))
    return "\n".join(markdown_lines(header, "l" * len(header), rows))


def cell(shares: Sequence[float]) -> str:
    low, mean, high = (f"{100 * share:.0f}" for share in (min(shares), statistics.fmean(shares), max(shares)))
    return f"{mean} % ({low} to {high})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="folders of finished games of modchain")
    arguments = parser.parse_args()
    print(table([of_run(RunDirectory.open(path.name, path.parent)) for path in arguments.runs]))


if __name__ == "__main__":
    main()
