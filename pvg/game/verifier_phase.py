"""TRAIN_VERIFIER: a fresh verifier learns to tell correct from incorrect solutions of this round's mint.

Labels are correctness, never role (invariant 3). A held-out share of the mint's problems calibrates the acceptance
threshold and measures the AUC.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from pvg import sections
from pvg.errors import StateError
from pvg.game.mixtures import source_weights, sources_for_round
from pvg.game.seeds import seed_for
from pvg.game.session import Session
from pvg.game.states import Phase
from pvg.models.heads import VerifierModel
from pvg.records import Float32, Rollout
from pvg.store.pairs import Pairs, PairStream, PairView, is_held_out
from pvg.telemetry.alerts import Alert
from pvg.telemetry.observer import PhaseInfo
from pvg.telemetry.spans import span
from pvg.training.optimizer import OptimizerSettings
from pvg.training.trainer import Trainer
from pvg.verifier.batch import VerifierBatch
from pvg.verifier.data import PairSource
from pvg.verifier.measures import acceptance_threshold, auc
from pvg.verifier.robust import objective_for


def verifier_weights_name(round_: int) -> str:
    return f"round-{round_:03d}-verifier"


async def train_verifier(session: Session) -> None:
    """Play the phase from the last committed step on and enter TRAIN_PROVER."""
    section, state = session.experiment.verifier, session.state
    info = session.begin("steps", section.steps, state.step)
    started = time.perf_counter()
    with span("open_models"):
        verifier = await session.players.compute(session.players.open_verifier)
    try:
        with span("open_models"):
            stream = _open_pairs(session)
            if state.step == 0:  # a resumed phase has told it
                _tell_about_sources(session, stream)
            trainer = _open_trainer(session, verifier, stream)
        session.first_step()
        while trainer.steps_done < section.steps:
            await _step(session, trainer, info)
        with span("evaluate"):
            metrics = await _calibrate(session, verifier)
            metrics["pairs_available"] = float(stream.pairs_available)
        name = verifier_weights_name(state.round)
        with span("checkpoint"):
            meta = {"round": state.round, "version": verifier.version(), "threshold": metrics["threshold"]}
            await session.ledger.save_weights(name, verifier.trainable_state(), meta)
        session.finish_phase(info, metrics, time.perf_counter() - started)
        entered = session.state.enter(Phase.TRAIN_PROVER)
        await session.leave_phase(replace(entered, weights=(*entered.weights, name)))
    finally:
        verifier.close()


def _open_pairs(session: Session) -> PairStream:
    """The mint's pairs less the held-out problems, drawn by the mixture and a seed of the round."""
    game, round_, share = session.experiment.game, session.state.round, session.experiment.verifier.held_out
    shards = session.ledger.shards(round_, Phase.MINT.value)
    view = PairView(session.ledger.rollout_shards, shards, keep=lambda problem_id: not is_held_out(problem_id, share))
    weights = source_weights(game, sources_for_round(round_))
    return pair_stream(session.experiment.verifier, view, weights, seed_for(session.seed, round_, "pairs"))


def pair_stream(section: sections.Verifier, view: PairView, weights: Mapping[str, float], seed: int) -> PairStream:
    """The pairs of a view; with cross-entropy, where there is none, single solutions side by side."""
    stream = PairStream(view, weights, seed)
    if section.loss == "cross_entropy" and not stream.pairs_available:
        return UnpairedStream(view, weights, seed)
    return stream


class UnpairedStream(PairStream):
    """For cross-entropy where no problem has both kinds: each solution counts by itself, so a correct one may stand
    beside an incorrect one of another problem. Sources are those of the correct sides."""

    def draw(self, step: int, n: int) -> Pairs:
        """n correct and n incorrect solutions, side by side."""
        singles = self.balanced_singles(step, 2 * n)
        return Pairs(singles.rows_N[0::2], singles.rows_N[1::2], singles.sources_N[0::2])

    def problems_for(self, pairs: int, solutions: int) -> int:
        """As many: no problem has pairs of its own."""
        return pairs

    def draw_problems(self, step: int, problems: int, solutions: int) -> Pairs:
        """A pair for each."""
        return self.draw(step, problems)


def _tell_about_sources(session: Session, stream: PairStream) -> None:
    if isinstance(stream, UnpairedStream):
        message = (
            "No problem has both correct and incorrect solutions: correct ones stand beside those of other problems."
        )
        session.alert([Alert("unpaired", message)], 0)
    session.tell_about_excluded_sources(
        stream.excluded_singles if isinstance(stream, UnpairedStream) else stream.excluded
    )


def optimizer_settings(section: sections.Verifier) -> OptimizerSettings:
    """What trains a verifier, by its section."""
    return OptimizerSettings(
        learning_rate=section.learning_rate,
        weight_decay=section.weight_decay,
        warmup=section.warmup,
        schedule=section.schedule,
        total_steps=section.steps,
        gradient_clip=section.gradient_clip,
    )


def _open_trainer(session: Session, verifier: VerifierModel, stream: PairStream) -> Trainer[VerifierBatch]:
    section, players = session.experiment.verifier, session.players
    source = PairSource(
        stream,
        players.template(verifier),
        verifier,
        section,
        executor=players.executor,
        start_step=session.state.step,
        source_fingerprint=players.base.tokenizer.fingerprint,
    )
    sources = len(sources_for_round(session.state.round))
    objective = objective_for(section, verifier.tokenizer.pad_id, environments=sources)
    trainer = Trainer(
        verifier,
        objective,
        optimizer_settings(section),
        source,
        executor=players.executor,
        precision=section.precision,
        waits_for="pairs",
        section="verifier",
    )
    if (checkpoint := session.ledger.read_checkpoint()) is not None:
        trainer.load_state(*checkpoint)
    return trainer


async def _step(session: Session, trainer: Trainer[VerifierBatch], info: PhaseInfo) -> None:
    started = time.perf_counter()
    report = await trainer.step()
    if report is None:
        raise StateError("The pair stream ended before the verifier's steps were done.")
    metrics = dict(report.metrics)
    metrics["pairs_per_s"] = metrics["pairs"] / (time.perf_counter() - started)
    done = trainer.steps_done
    session.report_step(info, done, metrics)
    if session.due(done, info.total):
        await session.commit_trainer(trainer)


async def _calibrate(session: Session, verifier: VerifierModel) -> dict[str, float]:
    """AUC and acceptance threshold on the mint's held-out problems, or, with an alert, on all of the mint where those
    lack correct or incorrect solutions: a weak prover on a small mint must not cost the round."""
    section, round_ = session.experiment.verifier, session.state.round
    minted = await session.ledger.read_rollouts(round_, Phase.MINT.value)
    held_out, enough = calibration_set(minted, section.held_out)
    if not enough:
        correct = sum(is_held_out(r.problem_id, section.held_out) and r.grade.correct for r in minted)
        count = sum(is_held_out(r.problem_id, section.held_out) for r in minted)
        message = (
            f"{correct} of {count} held-out solutions are correct: the threshold and the AUC are taken on all "
            "minted solutions, those trained on included. Raise game.mint_problems or verifier.held_out."
        )
        session.alert([Alert("calibration", message)], section.steps)
    with span("score"):
        scores_N = await session.players.scorer(verifier).score(held_out)
    return {**calibration(held_out, scores_N, section.acceptance), "held_out": float(len(held_out))}


def calibration_set(rollouts: Sequence[Rollout], share: float) -> tuple[list[Rollout], bool]:
    """Those of the held-out problems; all, and False, where these lack correct or incorrect solutions."""
    held_out = [r for r in rollouts if is_held_out(r.problem_id, share)]
    enough = 0 < sum(r.grade.correct for r in held_out) < len(held_out)
    return (held_out, True) if enough else (list(rollouts), False)


def calibration(rollouts: Sequence[Rollout], scores_N: Float32, acceptance: float) -> dict[str, float]:
    """The AUC of correct against incorrect solutions, and the score that `acceptance` of the correct ones reach."""
    correct_N = np.array([r.grade.correct for r in rollouts], dtype=bool)
    return {
        "verifier_auc": auc(scores_N[correct_N], scores_N[~correct_N]),
        "threshold": acceptance_threshold(scores_N[correct_N], acceptance),
    }
