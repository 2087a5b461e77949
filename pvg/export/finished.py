"""A finished round of a run: its verifier, its prover's weights, and the facts that a user of them needs."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pvg.config.base import Player
from pvg.config.experiment import Experiment
from pvg.errors import ConfigurationError, UsageError, path_error, shortened, user_paths
from pvg.inputs import json_row, open_input
from pvg.store.atomic import DamagedFileError
from pvg.store.checkpoints import read_checkpoint
from pvg.store.run_directory import RunDirectory
from pvg.store.run_players import open_round, prover_weights_name, saved_verifier_name

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from pvg.verifier.scorer import ScoringModel, VerifierScorer


@dataclass(frozen=True, slots=True)
class Platt:
    """P(correct) = 1 / (1 + exp(-(slope score + offset))), fitted by `pvg evaluate --parts calibration`."""

    slope: float
    offset: float

    def probability(self, score: float) -> float:
        return 0.5 * (1.0 + math.tanh(0.5 * (self.slope * score + self.offset)))


@dataclass(frozen=True, slots=True)
class FinishedRound:
    """`rounds`: how many are finished. `weights`: the names of the run's committed weight folders. `metrics`: of the
    round, from fresh samples."""

    run: RunDirectory
    experiment: Experiment
    round: int
    rounds: int
    weights: tuple[str, ...]
    metrics: dict[str, float | None]

    @classmethod
    def open(cls, run: RunDirectory, round_: int = -1, player: Player = "verifier") -> FinishedRound:
        """Rounds count from 0; -1 is the last. Raises the errors of pvg.store.run_players.open_round, and StateError if
        the folder of the `player`'s model has changed since the run started."""
        from pvg.game.ledger import check_same_inputs

        state, number = open_round(run, round_)
        rounds, experiment = state["rounds"], run.experiment()
        check_same_inputs(state, experiment, only=f"models.{player}.source")
        return cls(run, experiment, number, len(rounds), tuple(state.get("weights", ())), dict(rounds[number]))

    @property
    def prover_name(self) -> str:
        """The folder of the prover's weights."""
        return prover_weights_name(self.round)

    @property
    def verifier_name(self) -> str:
        """The folder of the verifier's weights. Raises UsageError for a run without a verifier (self-play)."""
        name = saved_verifier_name(self.weights, self.round)
        if name is None:
            raise UsageError(f"Round {self.round} of the run {self.run.name!r} has no verifier.", "Choose another run.")
        return name

    def calibration(self) -> Platt | None:
        """The calibration of the round's verifier; None if `pvg evaluate` has not computed it."""
        from pvg.evaluation.report import report_of

        report = report_of(self.run)
        for found in () if report is None else report.rounds:
            if found.round == self.round and found.calibration is not None:
                return Platt(found.calibration.slope, found.calibration.offset)
        return None

    def read_weights(self, name: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Raises DamagedFileError, with the other rounds, for weights that cannot be used."""
        try:
            return read_checkpoint(self.run.weights, name)
        except DamagedFileError as error:
            others = [str(other) for other in range(self.rounds) if other != self.round]
            more = f" Or use another round (--round N): {', '.join(others)}." if others else ""
            raise DamagedFileError(error.message, error.remedy + more) from error

    def read_verifier(self, device: torch.device) -> tuple[ScoringModel, float]:
        """The verifier and its acceptance threshold. The caller closes the verifier."""
        from pvg.game.verifier_phase import read_verifier
        from pvg.models.sources import open_verifier

        experiment = self.experiment
        opened = partial(open_verifier, experiment.verifier, experiment.models, experiment.seed, device, None)
        return read_verifier(opened, self.read_weights, self.verifier_name)

    def scorer(self) -> VerifierScorer:
        """The scorer of the round's verifier, computed by torch in this process. The caller closes it."""
        from pvg.game.players import template_of
        from pvg.models import pick_device
        from pvg.tasks import opened_task
        from pvg.verifier.scorer import VerifierScorer

        section, device = self.experiment.verifier, pick_device(self.experiment.models.device)
        with ExitStack() as opened:
            executor = opened.enter_context(ThreadPoolExecutor(1, "pvg-score"))
            task = opened.enter_context(opened_task(self.experiment.task))
            verifier, threshold = executor.submit(self.read_verifier, device).result()
            opened.callback(verifier.close)
            return VerifierScorer(
                verifier,
                template_of(self.experiment.prompts, task, verifier),
                verifier.version(),
                token_budget=section.micro_batch_tokens,
                precision=self.experiment.models.compute_dtype,
                executor=executor,
                threshold=threshold,
                owned=opened.pop_all(),
                max_rows=self.experiment.rollout.chunk,
            )


# Scores the rows of a JSONL file with a run's verifier, in constant memory.

ROWS_AT_ONCE = 256  # scored together and then written
BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # some editors on Windows begin a file with it
EXAMPLE = 'Write {"question": "...", "solution": "..."}'


@dataclass(frozen=True, slots=True)
class Verdict:
    """`score`: the verifier's logit. `accepted`: whether it reaches the run's threshold. `probability`: of being
    correct; None without a calibration."""

    score: float
    accepted: bool
    probability: float | None

    @classmethod
    def of(cls, score: float, threshold: float, calibration: Platt | None) -> Verdict:
        return cls(score, score >= threshold, None if calibration is None else calibration.probability(score))

    def plain(self) -> dict[str, Any]:
        known = {} if self.probability is None else {"probability": self.probability}
        return {"score": self.score, **known, "accepted": self.accepted}


def read_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The line numbers (from 1) and objects of a JSONL file. Empty lines are skipped. Raises UsageError for a path that
    is not a regular file, and with the line number for a line that is not an object with two texts."""
    try:
        file = open_input(path)
    except OSError as error:
        raise path_error(error, UsageError, "Give a JSONL file of solutions.") from None
    with file, user_paths():
        for number, line in enumerate(file, 1):
            if text := line.removeprefix(BYTE_ORDER_MARK if number == 1 else b"").strip():
                yield number, _row(path, number, text)


def check_rows(path: Path) -> None:
    """Read the whole file. Raises UsageError as `read_rows` does, and for a file without rows."""
    if not sum(1 for _ in read_rows(path)):
        raise UsageError(f"{path} has no solutions.", f"{EXAMPLE}, one per line.")


def _row(path: Path, number: int, line: bytes) -> dict[str, Any]:
    place = f"{path.name}, line {number}"
    try:
        row = json_row(line, place, UsageError, "Write one JSON object per line.")
    except RecursionError:
        raise UsageError(f"{place}: it is nested too deeply.", EXAMPLE) from None
    if not isinstance(row, dict):
        raise UsageError(f"{place}: this is not a JSON object.", EXAMPLE)
    for key in ("question", "solution"):
        if not isinstance(row.get(key), str):
            wrong = f"{key!r} is missing" if key not in row else f"{key!r} is {shortened(repr(row[key]))}, not a text"
            raise UsageError(f"{place}: {wrong}.", EXAMPLE)
    if not row["question"].strip():
        raise UsageError(f"{place}: 'question' is empty.", "Write the question, or remove the line.")
    if not isinstance(row.get("id"), str | int | None):
        raise UsageError(f"{place}: 'id' is neither a text nor an integer of 64 bits.", "Write it as a text.")
    return row


async def score_rows(
    scorer: VerifierScorer, path: Path, calibration: Platt | None
) -> AsyncIterator[tuple[dict[str, Any], Verdict]]:
    """The result of each row, in order: a plain object for one line of output, and its verdict. Raises UsageError with
    the line number for a row that cannot be scored."""
    rows = read_rows(path)
    while chunk := list(islice(rows, ROWS_AT_ONCE)):
        for result in await _scored(scorer, path, chunk, calibration):
            yield result


async def _scored(
    scorer: VerifierScorer, path: Path, chunk: list[tuple[int, dict[str, Any]]], calibration: Platt | None
) -> list[tuple[dict[str, Any], Verdict]]:
    assert scorer.threshold is not None
    found = await asyncio.gather(*(_score(scorer, path, number, row) for number, row in chunk))
    results = []
    for (number, row), score in zip(chunk, found, strict=True):
        verdict = Verdict.of(score, scorer.threshold, calibration)
        copied = {"id": row["id"]} if "id" in row else {}
        results.append(({"line": number, **copied, **verdict.plain()}, verdict))
    return results


async def _score(scorer: VerifierScorer, path: Path, number: int, row: dict[str, Any]) -> float:
    from pvg.verifier.scorer import TextSolution

    try:
        (score,) = await scorer.score([TextSolution(f"of line {number}", row["question"], row["solution"])])
    except (UsageError, ConfigurationError) as error:
        raise type(error)(f"{path.name}, line {number}: {error.message}", error.remedy) from error
    return float(score)
