"""The simultaneous schedule (`game.schedule`): the verifier keeps learning while the prover learns against it.

An update samples fresh solutions of the current prover on problems of the verifier's half, so that neither player
learns from the other's problems (invariant 4). Then it makes `game.schedule.every` optimizer steps. Of their pairs,
FRESH_SHARE come from the newest WINDOW updates, and the rest from the round's mint by its mixture. Then the scorer gets
a new version, which clears its cache, and the threshold is calibrated again. The optimizer starts again with each
phase, at the constant verifier.learning_rate.

The equilibria of a game depend on who commits first (Anil et al., arXiv 2108.12099). The rounds of Kirchner et al.
(arXiv 2407.13692) are verifier-first, which is the default.

Invariant: an update depends only on committed state: its number, the shards and the two trainers' states.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pvg.config.game import SimultaneousSchedule
from pvg.game import prover_phase
from pvg.game.orders import interaction_of, mint_orders, source_weights, sources_for_round
from pvg.game.session import Session
from pvg.game.states import Phase
from pvg.game.verdict_phase import VerdictLearning
from pvg.game.verifier_phase import (
    FixedVerifier,
    calibration,
    calibration_view,
    minted,
    minted_roles,
    pair_stream,
    scores_of_rows,
    steps_of_member,
    verifier_trainer,
)
from pvg.models.heads import GenerativeHead, VerifierModel
from pvg.records import Role, Rollout, source_of_round
from pvg.rollout.dispatcher import SampleCall
from pvg.seeds import generator_for, seed_for
from pvg.store.pairs import PairStream, PairView, is_held_out
from pvg.store.run_players import final_verifier_name
from pvg.store.shards import solutions_in_memory
from pvg.telemetry.spans import span
from pvg.training.trainer import OptimizerSettings
from pvg.verifier.data import PairSource, VerifierBatch
from pvg.verifier.scorer import ScoringModel, VerifierScorer

if TYPE_CHECKING:
    from torch import Tensor

# Newest updates whose fresh solutions are used: 20 batches of the prover with the default `every`. The prover that
# wrote older solutions has changed since.
WINDOW = 4
FRESH_SHARE = 0.5  # share of pairs with fresh solutions; the other half keeps the verifier good on the mint
PREFIX = "verifier."  # marks the verifier trainer's tensors in the prover's checkpoint


async def train_prover(session: Session) -> None:
    await prover_phase.train_prover(session, open_updates)


async def open_updates(session: Session, verifier: ScoringModel, threshold: float) -> VerifierUpdates:
    """The updates of the current round, with the rollouts of committed ones."""
    assert isinstance(verifier, VerifierModel), "pvg.config.rules refuses ensembles"
    schedule = session.game.schedule
    assert isinstance(schedule, SimultaneousSchedule)
    round_ = session.state.round
    calibrating, _ = await session.players.compute(lambda: calibration_view(session))
    roles_R = await minted_roles(session, calibrating)
    done = session.state.progress.get("batches", {}).get("verifier", {}).get("done", 0)
    window = range(max(0, done - WINDOW + 1), done)
    prefixes = [f"{_prefix(round_)}{number:05d}" for number in window]
    phase = Phase.TRAIN_PROVER.value
    fresh: dict[int, list[Rollout]] = {}
    for rollout in await session.ledger.read_rollouts_where(round_, phase, prefixes) if prefixes else ():
        fresh.setdefault(rollout.step, []).append(rollout)
    if isinstance(verifier, GenerativeHead):
        learning: PairLearning | VerdictLearning = await VerdictLearning.open(session, verifier)
    else:
        learning = PairLearning(session, verifier)
    return VerifierUpdates(session, schedule, verifier, learning, threshold, calibrating, roles_R, fresh)


class PairLearning:
    """A verifier that scores learns from pairs. It is the source of its trainer: every update replaces the pairs."""

    def __init__(self, session: Session, verifier: VerifierModel) -> None:
        self._players, self._verifier = session.players, verifier
        self._source: PairSource | None = None
        self._workers = session.players.verifier_workers(verifier)
        settings = OptimizerSettings(learning_rate=session.verifier.learning_rate)
        self.trainer = verifier_trainer(session, verifier, self, settings, self._workers)

    async def next_batch(self) -> VerifierBatch | None:
        return None if self._source is None else await self._source.next_batch()

    async def close(self) -> None:
        """Wait for a batch that is being made, and close the workers' copies of the verifier in training."""
        if self._source is not None:
            await self._source.close()
        if self._workers is not None:
            await self._workers.close()

    def excluded(self, stream: PairStream) -> Mapping[str, str]:
        """The sources from which it cannot learn, with reasons."""
        return stream.excluded

    async def learn(self, stream: PairStream, first: int, steps: int) -> dict[str, float]:
        """Take `steps` steps, of which `first` is the number of the first one. Returns metrics of the last one."""
        with span("draw_pairs"):
            opened = partial(self._players.pair_source, stream, self._verifier, first)
            self._source = await self._players.compute(opened)
        metrics: Mapping[str, float] = {}
        for _ in range(steps):
            report = await self.trainer.step()
            assert report is not None, "pairs never end"
            metrics = report.metrics
        return {"verifier_loss": metrics["loss"], "verifier_pair_accuracy": metrics["pair_accuracy"]}


class VerifierUpdates(FixedVerifier):
    """Trains `verifier`, which the caller owns, by `learning`. `threshold`: that of the current verifier.

    `calibrating`: minted solutions that no update trains on (all of them if the mint is too small); `helpful_R`: which
    of them have the helpful role. `fresh`: fresh solutions of earlier updates in the window, by the number of the
    update.
    """

    def __init__(
        self,
        session: Session,
        schedule: SimultaneousSchedule,
        verifier: VerifierModel,
        learning: PairLearning | VerdictLearning,
        threshold: float,
        calibrating: PairView,
        helpful_R: NDArray[np.bool_],
        fresh: dict[int, list[Rollout]],
    ) -> None:
        super().__init__(threshold)
        self._session, self._schedule, self._verifier, self._learning = session, schedule, verifier, learning
        self._calibrating, self._helpful_R, self._fresh = calibrating, helpful_R, fresh
        self._done = 0
        self._told_excluded = False

    async def close(self) -> None:
        await self._learning.close()

    async def after(self, batches: int, scorer: VerifierScorer) -> dict[str, float]:
        """Make an update if one is due after the prover's batch number `batches`, counted from 1. No score may be in
        flight during this call. Returns the metrics of the last optimizer step and of the calibration."""
        if batches % self._schedule.every:
            return {}
        session = self._session
        with span("rollout"):
            fresh = await self._sample(scorer)
        session.ledger.keep(fresh)
        self._fresh[self._done] = fresh
        self._drop_old_samples()
        with span("draw_pairs"):
            stream = await session.players.compute(self._open_stream)
        excluded = self._learning.excluded(stream)
        if excluded and not self._told_excluded:  # after a role has collapsed, no update has fresh pairs
            self._told_excluded = True
            session.tell_about_excluded_sources(excluded)
        every = self._schedule.every
        learned = await self._learning.learn(stream, steps_of_member(session) + self._done * every, every)
        scorer.set_version(await session.players.compute(self._verifier.version))
        self._done += 1
        calibrated = await self._calibrate(scorer)
        return {**learned, "fresh_correct": sum(r.grade.correct for r in fresh) / len(fresh), **calibrated}

    async def _sample(self, scorer: VerifierScorer) -> list[Rollout]:
        """Solutions of the engine's current policy, in both roles for each problem, as in a mint."""
        session, round_, number = self._session, self._session.state.round, self._done
        size = self._schedule.problems
        problems = session.draw("verifier", number * size, size, f"fresh-{round_}")
        rng = generator_for(session.seed, round_, "fresh-roles", number)
        groups = await session.players.dispatcher.sample(
            mint_orders(session, problems, rng),
            SampleCall(
                round=round_,
                source=source_of_round(round_),
                step=number,
                seed=seed_for(session.seed, round_, "fresh", number),
                prefix=f"{_prefix(round_)}{number:05d}",
                interaction=interaction_of(session, scorer),
            ),
        )
        return [rollout for group in groups for rollout in group.rollouts]

    def _open_stream(self) -> PairStream:
        """Pairs of the mint and the window, without the held-out problems. Runs in the compute thread."""
        session, round_ = self._session, self._session.state.round
        section, game = session.verifier, session.game
        view = PairView(
            session.ledger.rollout_shards,
            minted(session),
            keep=lambda problem_id: not is_held_out(problem_id, section.held_out),
            more=[solutions_in_memory(self._window)],
        )
        shares = source_weights(game, sources_for_round(round_))
        weights = {name: (1.0 - FRESH_SHARE) * share for name, share in shares.items()}
        weights[source_of_round(round_)] = FRESH_SHARE
        return pair_stream(section, view, weights, seed_for(session.seed, round_, "fresh-pairs", self._done))

    async def _calibrate(self, scorer: VerifierScorer) -> dict[str, float]:
        """Calibrate on held-out problems, with solutions of the mint and of the window."""
        section = self._session.verifier
        held_out = [r for r in self._window if is_held_out(r.problem_id, section.held_out)]
        with span("score"):
            minted_N = await scores_of_rows(self._session.players, self._calibrating, scorer.score)
            scores_N = np.concatenate([minted_N, await scorer.score(held_out)])
        correct_N = np.array([r.grade.correct for r in held_out], dtype=bool)
        helpful_N = np.array([r.role is Role.HELPFUL for r in held_out], dtype=bool)
        found = calibration(
            np.concatenate([self._calibrating.correct_R, correct_N]),
            np.concatenate([self._helpful_R, helpful_N]),
            scores_N,
        )
        self.threshold = found["threshold"]
        return found

    @property
    def _window(self) -> list[Rollout]:
        return [rollout for number in sorted(self._fresh) for rollout in self._fresh[number]]

    def _drop_old_samples(self) -> None:
        oldest = self._done - WINDOW
        self._fresh = {number: rollouts for number, rollouts in self._fresh.items() if number > oldest}

    async def save(self) -> list[str]:
        session, name = self._session, final_verifier_name(self._session.state.round)
        tensors, version = await session.players.compute(
            lambda: (self._verifier.trainable_state(), self._verifier.version())
        )
        meta = {"round": session.state.round, "version": version, "threshold": self.threshold}
        await session.ledger.save_weights(name, tensors, meta)
        return [name]

    async def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """For the prover's checkpoint: tensors named "verifier.*", and JSON data."""
        tensors, meta = await self._session.players.compute(self._learning.trainer.state)
        copied = self._learning.trainer.copies_state  # otherwise the next update would change what is being written
        named = {PREFIX + name: tensor if copied else tensor.clone() for name, tensor in tensors.items()}
        own = {"done": self._done, "threshold": self.threshold, "told_excluded": self._told_excluded}
        return named, {**own, "trainer": meta}

    def load_state(
        self, tensors: Mapping[str, Tensor], progress: Mapping[str, Any], scorer: VerifierScorer
    ) -> dict[str, Tensor]:
        """Restore a `state` whose tensors are among `tensors`; returns the other tensors."""
        own = {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items() if name.startswith(PREFIX)}
        self._learning.trainer.load_state(own, progress["trainer"])
        self._done, self.threshold = progress["done"], progress["threshold"]
        self._told_excluded = progress.get("told_excluded", False)  # not in a commit of an older pvg
        self._drop_old_samples()
        scorer.set_version(self._verifier.version())
        return {name: tensor for name, tensor in tensors.items() if not name.startswith(PREFIX)}


def _prefix(round_: int) -> str:
    return f"{round_:03d}/fresh/"
