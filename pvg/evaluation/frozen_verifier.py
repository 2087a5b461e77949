"""The frozen verifier of one round: opened when the first score is needed, and asked for whole sets of samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from pvg.evaluation.study import Study, digest
from pvg.experiment import Experiment
from pvg.game.challenge import environment_of
from pvg.game.prover_phase import open_round_verifier
from pvg.records import Float32, Rollout, source_of_round
from pvg.rollout.episodes import Environment
from pvg.verifier.protocol import Judge
from pvg.verifier.scorer import VerifierScorer


class FrozenVerifier:
    """Scores of one verifier. `digest` says which one it is, without opening it."""

    def __init__(self, study: Study, round_: int) -> None:
        self._study = study
        self.round = round_
        self.digest = study.ledger.players_of(round_)
        self._verifier: Judge | None = None
        self._scorer: VerifierScorer | None = None
        self._threshold = float("nan")

    async def verifier(self) -> Judge:
        if self._verifier is None:
            self._verifier, self._threshold = await open_round_verifier(self._study, self.round)
            self._scorer = self._study.players.scorer(self._verifier)
        return self._verifier

    async def scorer(self) -> VerifierScorer:
        await self.verifier()
        assert self._scorer is not None
        return self._scorer

    async def facts(self) -> dict[str, Any]:
        """The verifier's version, and the score from which it accepts."""
        name = f"verifier-{source_of_round(self.round)}"
        for_ = digest("verifier", self.digest)
        found = self._study.units.read(name, for_)
        if found is None:
            self._study.begin(name)
            found = {"version": (await self.verifier()).version(), "threshold": self._threshold}
            self._study.units.write(name, for_, found)
        return dict(found)

    async def scores(self, name: str, rollouts: Sequence[Rollout], of: str) -> Float32:
        """float32 [N]: the scores of the set `name`, whose digest is `of`, computed once."""
        study, unit = self._study, f"scores-{source_of_round(self.round)}-{name}"
        for_ = digest("scores", self.digest, of)
        found = study.units.read(unit, for_)
        if found is None:
            study.begin(unit)
            scores_N = await (await self.scorer()).score(rollouts)
            study.units.write(unit, for_, [float(score) for score in scores_N])
            return scores_N
        return np.array(found, dtype=np.float32)

    def close(self) -> None:
        if self._verifier is not None:
            self._verifier.close()
            self._verifier = self._scorer = None


@contextmanager
def judged(study: Study, round_: int) -> Iterator[FrozenVerifier]:
    """The verifier of a round: the one that is open already, or one that is closed at the end."""
    if (judge := study.judges.get(round_)) is not None:
        yield judge
        return
    judge = study.judges[round_] = FrozenVerifier(study, round_)
    try:
        yield judge
    finally:
        del study.judges[round_]
        judge.close()


def verifier_asks(experiment: Experiment) -> bool:
    """Whether samples depend on a verifier: a challenge game in which it chooses what to ask about."""
    return experiment.game.protocol == "challenge" and experiment.game.challenge == "weakest"


async def questions(study: Study, asking: FrozenVerifier) -> Environment | None:
    """What asks about the steps of solutions that are sampled next; None but in a challenge game."""
    scorer = await asking.scorer() if verifier_asks(study.experiment) else None
    return environment_of(study, scorer)
