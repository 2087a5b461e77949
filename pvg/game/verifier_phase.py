"""TRAIN_VERIFIER: a fresh verifier learns to tell correct from incorrect solutions of this round's mint.

Labels are correctness, never role (invariant 3). A held-out share of the mint's problems calibrates the acceptance
threshold and measures the AUC.

With verifier.ensemble = K, K members are trained one after the other, each from the initial weights and with the whole
budget, and the round's verifier scores with all of them (pvg.models.ensembles). They differ in the pairs they draw, as
in arXiv 2310.02743 (other seeds of the training, one pretrained start); where a head's start leaves something free, in
that too; and with verifier.bag < 1 in the problems that they see at all. Bags are no default: networks gained more from
all of the data (arXiv 1612.01474). Member 0, without a bag, is the verifier that a run without an ensemble trains.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from pvg.config import sections
from pvg.errors import StateError
from pvg.game.mixtures import source_weights, sources_for_round
from pvg.game.players import Players
from pvg.game.round_verifier import member_weights_name, read_members, verifier_weights_name
from pvg.game.seeds import seed_for
from pvg.game.session import Session
from pvg.game.states import Phase
from pvg.models.ensembles import ScoreScales, VerifierEnsemble
from pvg.models.heads import VerifierModel
from pvg.records import Float32, Scorable
from pvg.store.pairs import Pairs, PairStream, PairView, is_held_out, is_in_bag
from pvg.telemetry.alerts import Alert
from pvg.telemetry.observer import PhaseInfo
from pvg.telemetry.spans import span
from pvg.training.optimizer import OptimizerSettings
from pvg.training.trainer import Trainer
from pvg.verifier.calibration import acceptance_threshold, auc, common_scales, disagreement, member_scores
from pvg.verifier.data import PairSource, VerifierBatch
from pvg.verifier.robust import objective_for

# Held-out solutions that are read and scored together: they fill batches, also on servers, and take a few megabytes.
SCORED_AT_ONCE = 4096


async def train_verifier(session: Session) -> None:
    """Play the phase from the last committed step on and enter TRAIN_PROVER."""
    section, state = session.experiment.verifier, session.state
    info = session.begin("steps", section.ensemble * section.steps, state.step)
    started = time.perf_counter()
    if section.ensemble == 1:
        verifier: VerifierModel | VerifierEnsemble = await _trained(session, info, member=0)
    else:
        verifier = await _trained_ensemble(session, info)
    try:
        with span("evaluate"):
            metrics = await _calibrate(session, verifier)
            metrics["pairs_available"] = float(_open_pairs(session).pairs_available)
        name = verifier_weights_name(state.round)
        with span("checkpoint"):
            meta = {"round": state.round, "version": verifier.version(), "threshold": metrics["threshold"]}
            if isinstance(verifier, VerifierEnsemble):
                meta |= {"aggregation": verifier.aggregation, "members": finished_members(session)}
            await session.ledger.save_weights(name, verifier.trainable_state(), meta)
        session.finish_phase(info, metrics, time.perf_counter() - started)
        entered = session.state.enter(Phase.TRAIN_PROVER)
        await session.leave_phase(replace(entered, weights=(*entered.weights, name)))
    finally:
        verifier.close()


# --- members: the one verifier, or each of an ensemble's --------------------------------------------------------------


def finished_members(session: Session) -> list[str]:
    """The weights of the ensemble's members that are trained, by name: their number says which one comes next."""
    return list(session.state.progress.get("weights", ()))


async def _trained_ensemble(session: Session, info: PhaseInfo) -> VerifierEnsemble:
    """The members, one trained after the other, as an ensemble without scales; the caller closes it. What is finished
    is committed, so that a resumed phase goes on within the member that it was at."""
    section, players, round_ = session.experiment.verifier, session.players, session.state.round
    for member in range(len(finished_members(session)), section.ensemble):
        verifier = await _trained(session, info, member)
        try:
            name, meta = member_weights_name(round_, member), {"round": round_, "member": member}
            with span("checkpoint"):
                await session.ledger.save_weights(name, verifier.trainable_state(), meta)
        finally:
            verifier.close()
        state, names = session.state, [*finished_members(session), name]
        step, weights = (member + 1) * section.steps, (*state.weights, name)
        await session.commit_state(
            replace(state, step=step, checkpoint=None, weights=weights, progress={"weights": names})
        )
    with span("open_models"):
        read, names = session.ledger.read_weights, finished_members(session)
        members = await players.compute(lambda: read_members(players, read, names))
    return VerifierEnsemble(members, section.aggregation, ScoreScales.none(len(members)))


async def _trained(session: Session, info: PhaseInfo, member: int) -> VerifierModel:
    """A member after its last step, trained from the last committed one on; the caller closes it."""
    players, round_ = session.players, session.state.round
    with span("open_models"):
        verifier = await players.compute(lambda: players.open_verifier(round_, member))
    try:
        with span("open_models"):
            stream = _open_pairs(session, member)
            if session.state.step == 0:  # a resumed phase has told it
                _tell_about_sources(session, stream)
            trainer = _open_trainer(session, verifier, stream, member)
        session.first_step()
        while trainer.steps_done < session.experiment.verifier.steps:
            await _step(session, trainer, info, member)
    except BaseException:
        verifier.close()
        raise
    return verifier


def _open_pairs(session: Session, member: int = 0) -> PairStream:
    """The mint's pairs less the held-out problems, drawn by the mixture and a seed of the round and the member. Of an
    ensemble with bags, those of the member's bag."""
    game, round_, section = session.experiment.game, session.state.round, session.experiment.verifier
    place = ("pairs", member) if member else ("pairs",)
    seed = seed_for(session.seed, round_, *place)
    bag, share = seed_for(session.seed, round_, "bag", member), section.bag if section.ensemble > 1 else 1.0

    def keep(problem_id: str) -> bool:
        return not is_held_out(problem_id, section.held_out) and is_in_bag(problem_id, bag, share)

    shards = session.ledger.shards(round_, Phase.MINT.value)
    view = PairView(session.ledger.rollout_shards, shards, keep=keep)
    weights = source_weights(game, sources_for_round(round_))
    return pair_stream(section, view, weights, seed)


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


def _open_trainer(session: Session, verifier: VerifierModel, stream: PairStream, member: int) -> Trainer[VerifierBatch]:
    section, players = session.experiment.verifier, session.players
    source = PairSource(
        stream,
        players.template(verifier),
        verifier,
        section,
        executor=players.executor,
        start_step=session.state.step - member * section.steps,
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


async def _step(session: Session, trainer: Trainer[VerifierBatch], info: PhaseInfo, member: int) -> None:
    section, started = session.experiment.verifier, time.perf_counter()
    report = await trainer.step()
    if report is None:
        raise StateError("The pair stream ended before the verifier's steps were done.")
    metrics = dict(report.metrics)
    metrics["pairs_per_s"] = metrics["pairs"] / (time.perf_counter() - started)
    if section.ensemble > 1:
        metrics["member"] = float(member)
    done = member * section.steps + trainer.steps_done
    session.report_step(info, done, metrics)
    if session.due(done, info.total):
        await session.commit_trainer(trainer, step=done)


# --- calibration ------------------------------------------------------------------------------------------------------


async def _calibrate(session: Session, verifier: VerifierModel | VerifierEnsemble) -> dict[str, float]:
    """AUC and acceptance threshold on held-out solutions; of an ensemble, those of the aggregated score, after the
    scales of its members, which it gets here."""
    section, players = session.experiment.verifier, session.players
    held_out = await _held_out(session)
    try:
        found: dict[str, float] = {}
        with span("score"):
            if isinstance(verifier, VerifierEnsemble):
                scores_N, found = await _scaled(session, verifier, held_out)
            else:
                scores_N = await scores_of_rows(players, held_out, players.scorer(verifier).score)
    finally:
        held_out.close()
    calibrated = calibration(held_out.correct_R, scores_N, section.acceptance)
    return {**calibrated, "held_out": float(len(scores_N)), **found}


def calibration_view(session: Session) -> tuple[PairView, str]:
    """The minted solutions of the held-out problems, and "". If these are all correct or all incorrect: all minted
    solutions, and the reason. Runs in the compute thread."""
    section, round_ = session.experiment.verifier, session.state.round
    shards, infos = session.ledger.rollout_shards, session.ledger.shards(round_, Phase.MINT.value)
    held_out = PairView(shards, infos, keep=lambda problem_id: is_held_out(problem_id, section.held_out))
    correct, count = int(held_out.correct_R.sum()), len(held_out.correct_R)
    if 0 < correct < count:
        return held_out, ""
    reason = (
        f"{correct} of {count} held-out solutions are correct: the threshold and the AUC are computed from all "
        "minted solutions, including those used for training. Raise game.mint_problems or verifier.held_out."
    )
    return PairView(shards, infos), reason


async def scores_of_rows(
    players: Players, view: PairView, score: Callable[[Sequence[Scorable]], Awaitable[Float32]]
) -> Float32:
    """float32 [..., R]: `score` of all rows of a view. Holds at most SCORED_AT_ONCE rows in memory at a time."""
    parts = []
    for rows_N in np.array_split(view.rows_R, range(SCORED_AT_ONCE, len(view.rows_R), SCORED_AT_ONCE)):
        solutions = await players.compute(partial(view.rows, rows_N))
        parts.append(await score(solutions))
    return np.concatenate(parts, axis=-1)


def calibration(correct_N: NDArray[np.bool_], scores_N: Float32, acceptance: float) -> dict[str, float]:
    """The AUC of correct against incorrect solutions, and the score that `acceptance` of the correct ones reach."""
    return {
        "verifier_auc": auc(scores_N[correct_N], scores_N[~correct_N]),
        "threshold": acceptance_threshold(scores_N[correct_N], acceptance),
    }


async def _held_out(session: Session) -> PairView:
    """The calibration view. If it is the whole mint, raises an alert, not an error: a weak prover on a small mint must
    not end the run."""
    section = session.experiment.verifier
    view, reason = await session.players.compute(lambda: calibration_view(session))
    if reason:
        session.alert([Alert("calibration", reason)], section.ensemble * section.steps)
    return view


async def _scaled(session: Session, ensemble: VerifierEnsemble, held_out: PairView) -> tuple[Float32, dict[str, float]]:
    """Bring the members to one scale. Returns the ensemble's scores of these solutions, float32 [N], and metrics."""
    section, players, correct_N = session.experiment.verifier, session.players, held_out.correct_R
    members_KN = await scores_of_rows(
        players,
        held_out,
        partial(
            member_scores,
            ensemble,
            players.template(ensemble),
            token_budget=section.score_tokens,
            executor=players.executor,
            prover_fingerprint=players.base.tokenizer.fingerprint,
        ),
    )
    ensemble.scales = common_scales(members_KN)
    aucs = [auc(own_N[correct_N], own_N[~correct_N]) for own_N in members_KN]

    def aggregated() -> tuple[Float32, float]:
        scaled = ensemble.scales.applied(torch.from_numpy(members_KN)).numpy()
        return ensemble.aggregated(torch.from_numpy(members_KN)).numpy(), disagreement(scaled)

    scores_N, apart = await players.compute(aggregated)
    return scores_N, {"disagreement": apart, "member_auc_best": max(aucs), "member_auc_worst": min(aucs)}
