"""A finished round of a run: its verifier, its prover's weights, and the facts that a user of them needs.

finished = FinishedRound.open(RunDirectory.open("mine", Path("runs")))
with finished.scorer() as scorer:
    scores_N = await scorer.score(solutions)
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pvg.config.experiment import Experiment
from pvg.errors import StateError, UsageError
from pvg.store.atomic import DamagedFileError
from pvg.store.checkpoints import read_checkpoint
from pvg.store.run_directory import RunDirectory
from pvg.store.run_folders import refuse_samples
from pvg.store.run_players import prover_weights_name, saved_verifier_name

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from pvg.models.heads import VerifierModel
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
    def open(cls, run: RunDirectory, round_: int = -1) -> FinishedRound:
        """Rounds count from 0; -1 is the last. Raises UsageError for a round that is not finished, and StateError for
        one that a lost commit may have had."""
        loaded = run.load_state()
        state = loaded.state or {}
        rounds = state.get("rounds", ())
        refuse_samples(run, state)
        number = len(rounds) + round_ if round_ < 0 else round_
        if loaded.notice and (not rounds or len(rounds) <= round_ < run.experiment().game.rounds):
            lost = f"does not have round {round_}" if rounds else "has no finished round"
            raise StateError(
                f"The last valid commit of {run.name} {lost}. {loaded.notice}",
                f"To play on from it: pvg train --resume {run.argument}",
            )
        if not rounds:
            raise UsageError(
                f"No round of {run.name} is finished yet.",
                f"Wait for the end of its first round. If it has stopped: pvg train --resume {run.argument}",
            )
        if not 0 <= number < len(rounds):
            raise UsageError(
                f"Round {round_} of the run {run.name!r} is not finished.",
                f"Finished rounds, counted from 0: {', '.join(map(str, range(len(rounds))))}.",
            )
        return cls(run, run.experiment(), number, len(rounds), tuple(state.get("weights", ())), dict(rounds[number]))

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
        from pvg.game.round_verifier import read_verifier

        return read_verifier(_Verifiers(self.experiment, device), self.read_weights, self.verifier_name)

    def scorer(self) -> VerifierScorer:
        """The scorer of the round's verifier, computed by torch in this process. The caller closes it."""
        from pvg.game.players import template_of
        from pvg.models import pick_device
        from pvg.tasks import open_task
        from pvg.verifier.scorer import VerifierScorer

        section, device = self.experiment.verifier, pick_device(self.experiment.models.device)
        with ExitStack() as opened:
            executor = opened.enter_context(ThreadPoolExecutor(1, "pvg-score"))
            task = open_task(self.experiment.task)
            if isinstance(task, AbstractContextManager):
                opened.enter_context(task)
            verifier, threshold = executor.submit(self.read_verifier, device).result()
            opened.callback(verifier.close)
            return VerifierScorer(
                verifier,
                template_of(self.experiment.prompts, task, verifier),
                verifier.version(),
                cache_entries=section.cache_entries,
                token_budget=section.score_tokens,
                precision=section.precision,
                executor=executor,
                threshold=threshold,
                owned=opened.pop_all(),
            )


class _Verifiers:
    """Opens a run's verifiers without its prover."""

    def __init__(self, experiment: Experiment, device: torch.device) -> None:
        self._experiment, self._device = experiment, device

    def open_verifier(self, round_: int = 0, member: int = 0, like: VerifierModel | None = None) -> VerifierModel:
        from pvg.models.sources import open_verifier

        section, models, seed = self._experiment.verifier, self._experiment.models, self._experiment.seed
        return open_verifier(section, models, seed, self._device, None, round_, member, like)
