"""TRAIN_VERIFIER: a verifier learns to separate correct from incorrect solutions of this round's mint.

Labels are correctness, never role (invariant 3). A held-out share of the mint's problems calibrates the acceptance
threshold and measures the AUC. `read_verifier` reads the round's verifier, one model or an ensemble, from its files.

It starts from its initial weights, unless `verifier.keeps` says what it has of earlier rounds.

With verifier.ensemble.size = K, the phase trains K members one after the other, each for the full number of steps. The
round's verifier combines their scores (pvg.models.heads). Members differ in the pairs that they draw, as in arXiv
2310.02743 (different training seeds, one pretrained start), and in the random part of a head's start weights. All
learn from all problems: networks gained more from all of the data than from bags (arXiv 1612.01474). Member 0 equals
the verifier of a run without an ensemble.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from pvg.config.training import Verifier
from pvg.game.orders import source_weights, sources_for_round
from pvg.game.players import Players
from pvg.game.session import Session
from pvg.game.states import Phase
from pvg.models.heads import ScoreScales, VerifierEnsemble, VerifierModel
from pvg.records import Float32, Scorable
from pvg.seeds import seed_for
from pvg.store.pairs import Pairs, PairStream, PairView, is_held_out
from pvg.store.run_players import saved_verifier_name, verifier_weights_name
from pvg.store.shards import ShardInfo
from pvg.telemetry.alerts import Alert
from pvg.telemetry.events import PhaseInfo
from pvg.telemetry.spans import span
from pvg.training.batch import BatchSource
from pvg.training.trainer import GradientWorkers, OptimizerSettings, Trainer
from pvg.verifier.calibration import auc, common_scales, disagreement, member_scores, separating_threshold
from pvg.verifier.data import VerifierBatch
from pvg.verifier.losses import PairObjective
from pvg.verifier.scorer import ScoringModel

if TYPE_CHECKING:
    from torch import Tensor

    from pvg.verifier.scorer import VerifierScorer


# Opens a verifier at its initial weights, as Players.open_verifier does.
OpenVerifier = Callable[..., VerifierModel]
ReadWeights = Callable[[str], tuple[Mapping[str, "Tensor"], Mapping[str, Any]]]


def member_weights_name(round_: int, member: int) -> str:
    """The name of one member of a round's ensemble; members count from 0."""
    return f"{verifier_weights_name(round_)}-member-{member}"


def read_verifier(open_: OpenVerifier, read_weights: ReadWeights, name: str) -> tuple[ScoringModel, float]:
    """The frozen verifier that was saved as `name`, and its acceptance threshold; the caller closes it. Runs in the
    compute thread. `read_weights` returns what `Ledger.save_weights` stored under a name."""
    tensors, meta = read_weights(name)
    threshold = float(meta["threshold"])
    if "members" not in meta:
        verifier = open_()
        verifier.load_trainable_state(tensors)
        return verifier, threshold
    scales = ScoreScales(tensors["slopes_K"].numpy(), tensors["offsets_K"].numpy())
    members = read_members(open_, read_weights, meta["members"])
    return VerifierEnsemble(members, meta["aggregation"], scales), threshold


def read_members(open_: OpenVerifier, read_weights: ReadWeights, names: Sequence[str]) -> list[VerifierModel]:
    """The members of an ensemble, one model each; they share the tensors that training never changes."""
    members: list[VerifierModel] = []
    with ExitStack() as opened:
        for name in names:
            tensors, _ = read_weights(name)
            member = open_(like=members[0] if members else None)
            opened.callback(member.close)
            member.load_trainable_state(tensors)
            members.append(member)
        opened.pop_all()
    return members


class FixedVerifier:
    """The round's verifier while the prover trains. Here nothing changes (the Stackelberg schedule); with updates it is
    pvg.game.simultaneous.VerifierUpdates. `threshold`: of acceptance, a logit."""

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold

    async def after(self, batches: int, scorer: VerifierScorer) -> dict[str, float]:
        """Called after the prover's batch number `batches`, counted from 1. Returns the metrics of an update."""
        return {}

    async def close(self) -> None: ...

    async def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return {}, {}

    def load_state(
        self, tensors: Mapping[str, Tensor], progress: Mapping[str, Any], scorer: VerifierScorer
    ) -> dict[str, Tensor]:
        """Restore a `state` whose tensors are among `tensors`; returns the other tensors."""
        return dict(tensors)

    async def save(self) -> list[str]:
        """Write what has changed since the round's verifier; returns the names to commit."""
        return []


# Held-out solutions to read and score at a time: enough to fill batches, also on servers, and only a few megabytes.
SCORED_AT_ONCE = 4096
# Steps in which the learning rate grows from 0: AdamW's first steps have no reliable second moment.
WARMUP = 10


async def train_verifier(session: Session) -> None:
    """Run the phase from the last committed step on, then enter TRAIN_PROVER."""
    section, state = session.verifier, session.state
    info = session.begin("steps", phase_steps(session), state.step)
    started = time.perf_counter()
    if section.ensemble.kind == "none":
        verifier: VerifierModel | VerifierEnsemble = await trained(session, info)
    else:
        verifier = await _trained_ensemble(session, info)
    try:
        await keep_verifier(session, info, verifier, started)
    finally:
        verifier.close()


async def keep_verifier(
    session: Session,
    info: PhaseInfo,
    verifier: VerifierModel | VerifierEnsemble,
    started: float,
    measured: Mapping[str, float] | None = None,
) -> None:
    """Calibrate and save the trained verifier, then enter TRAIN_PROVER. `started`: when the phase did, by
    time.perf_counter. `measured`: further metrics of the phase."""
    with span("evaluate"):
        metrics = await _calibrate(session, verifier)
        metrics |= {"pairs_available": float(open_pairs(session).pairs_available), **(measured or {})}
    round_ = session.state.round
    name = verifier_weights_name(round_)
    with span("checkpoint"):
        meta = {"round": round_, "version": verifier.version(), "threshold": metrics["threshold"]}
        if isinstance(verifier, VerifierEnsemble):
            meta |= {"aggregation": verifier.aggregation, "members": finished_members(session)}
        await session.ledger.save_weights(name, verifier.trainable_state(), meta)
    session.finish_phase(info, metrics, time.perf_counter() - started)
    entered = session.state.enter(Phase.TRAIN_PROVER)
    await session.leave_phase(replace(entered, weights=(*entered.weights, name)))


# --- training: one verifier, or the members of an ensemble ------------------------------------------------------------


def steps_of_member(session: Session) -> int:
    """Optimizer steps of this round's verifier, or of each member of its ensemble."""
    return session.verifier.steps * session.game.effort(session.state.round)


def phase_steps(session: Session) -> int:
    return session.verifier.ensemble.size * steps_of_member(session)


def finished_members(session: Session) -> list[str]:
    """Names of the trained members' weights; their count is the number of the next member."""
    return list(session.state.progress.get("weights", ()))


async def _trained_ensemble(session: Session, info: PhaseInfo) -> VerifierEnsemble:
    """Train the members one after the other; returns an ensemble without scales, which the caller closes. Commits each
    finished member, so that a resumed phase continues with the interrupted one."""
    section, players, round_ = session.verifier, session.players, session.state.round
    for member in range(len(finished_members(session)), section.ensemble.size):
        verifier = await trained(session, info, member)
        try:
            name, meta = member_weights_name(round_, member), {"round": round_, "member": member}
            with span("checkpoint"):
                await session.ledger.save_weights(name, verifier.trainable_state(), meta)
        finally:
            verifier.close()
        state, names = session.state, [*finished_members(session), name]
        step, weights = (member + 1) * steps_of_member(session), (*state.weights, name)
        await session.commit_state(
            replace(state, step=step, checkpoint=None, weights=weights, progress={"weights": names})
        )
    with span("open_models"):
        read, names = session.ledger.read_weights, finished_members(session)
        members = await players.compute(lambda: read_members(players.open_frozen_verifier, read, names))
    return VerifierEnsemble(members, section.ensemble.kind, ScoreScales.none(len(members)))


async def trained(session: Session, info: PhaseInfo | None, member: int = 0) -> VerifierModel:
    """A fully trained member, continued from the last committed step; the caller closes it. Without `info`: a verifier
    with the same training on solutions alone (`PairView.rows`), without records and commits."""
    players, section, steps = session.players, session.verifier, steps_of_member(session)
    await players.engine.rest(replaced=True)  # the prover phase begins with a new version
    with span("open_models"):
        verifier = await players.compute(partial(starting_verifier, session, member))
    try:
        with span("open_models"):
            stream = open_pairs(session, member, alone=info is None)
            if info is not None and session.state.step == 0:  # a resumed phase has already reported this
                _tell_about_sources(session, stream)
            workers = players.verifier_workers(verifier)
            start = 0 if info is None else session.state.step - member * steps
            settings = optimizer_settings(section, steps)
            source = players.pair_source(stream, verifier, start, steps)
            trainer = verifier_trainer(session, verifier, source, settings, workers)
            if info is not None and (checkpoint := session.ledger.read_checkpoint()) is not None:
                trainer.load_state(*checkpoint)
            if workers is not None:
                await workers.prepare()
        session.first_step()
        try:
            while trainer.steps_done < steps:
                started = time.perf_counter()
                report = await trainer.step()
                assert report is not None, "pairs never end"
                if info is None:
                    await session.check_stop()
                    continue
                metrics = {**report.metrics, "pairs_per_s": report.metrics["pairs"] / (time.perf_counter() - started)}
                if section.ensemble.kind != "none":
                    metrics["member"] = float(member)
                done = member * steps + trainer.steps_done
                session.report_step(info, done, metrics)
                if session.due(done, info.total):
                    await session.commit_trainer(trainer, step=done)
            await session.settled()
        finally:
            await source.close()
            if workers is not None:
                await workers.close()
    except BaseException:
        verifier.close()
        raise
    return verifier


def starting_verifier(session: Session, member: int = 0) -> VerifierModel:
    """The verifier with which this round's training begins; the caller closes it. Runs in the compute thread."""
    round_ = session.state.round
    with ExitStack() as opened:
        verifier = session.players.open_verifier(round_, member)
        opened.callback(verifier.close)
        if session.verifier.keeps in ("weights", "both") and round_ > 0:
            before = saved_verifier_name(session.state.weights, round_ - 1)
            if session.verifier.ensemble.kind != "none":
                before = member_weights_name(round_ - 1, member)
            assert before is not None, "each round saves a verifier"
            verifier.load_trainable_state(session.ledger.read_weights(before)[0])
        opened.pop_all()
    return verifier


def minted(session: Session) -> list[ShardInfo]:
    """The mints from which this round's verifier learns, oldest first."""
    last = session.state.round
    rounds = range(0 if session.verifier.keeps in ("mints", "both") else last, last + 1)
    return [info for round_ in rounds for info in session.ledger.shards(round_, Phase.MINT.value)]


def open_pairs(session: Session, member: int = 0, *, alone: bool = False) -> PairStream:
    """The mint's pairs without the held-out problems, drawn by the mixture with a seed of round and member. `alone`:
    see `PairView.rows`."""
    game, round_, section = session.game, session.state.round, session.verifier
    place = ("pairs", member) if member else ("pairs",)
    seed = seed_for(session.seed, round_, *place)
    view = PairView(
        session.ledger.rollout_shards, minted(session), keep=lambda name: not is_held_out(name, section.held_out)
    )
    weights = source_weights(game, sources_for_round(round_))
    return pair_stream(section, view, weights, seed, alone=alone)


def pair_stream(
    section: Verifier, view: PairView, weights: Mapping[str, float], seed: int, *, alone: bool = False
) -> PairStream:
    """The pairs of a view. With cross-entropy and no pairs: single solutions next to each other."""
    stream = PairStream(view, weights, seed, alone=alone)
    if section.loss == "cross_entropy" and not stream.pairs_available:
        return UnpairedStream(view, weights, seed, alone=alone)
    return stream


class UnpairedStream(PairStream):
    """For cross-entropy if no problem has both correct and incorrect solutions. Solutions count independently, so a
    correct one is put next to an incorrect one of another problem. Sources are those of the correct solutions."""

    def draw(self, step: int, n: int) -> Pairs:
        """n correct and n incorrect solutions, next to each other."""
        singles = self.balanced_singles(step, 2 * n)
        return Pairs(singles.rows_N[0::2], singles.rows_N[1::2], singles.sources_N[0::2])

    def problems_for(self, pairs: int, solutions: int) -> int:
        """The number of pairs: no problem has both correct and incorrect solutions."""
        return pairs

    def draw_problems(self, step: int, problems: int, solutions: int) -> Pairs:
        """One pair per problem."""
        return self.draw(step, problems)


def _tell_about_sources(session: Session, stream: PairStream) -> None:
    if isinstance(stream, UnpairedStream):
        message = "No problem has both correct and incorrect solutions: each pair combines solutions of two problems."
        session.alert([Alert("unpaired", message)], 0)
    session.tell_about_excluded_sources(
        stream.excluded_singles if isinstance(stream, UnpairedStream) else stream.excluded
    )


def optimizer_settings(section: Verifier, steps: int) -> OptimizerSettings:
    return OptimizerSettings(learning_rate=section.learning_rate, warmup=WARMUP, schedule="linear", total_steps=steps)


def verifier_trainer(
    session: Session,
    verifier: VerifierModel,
    source: BatchSource[VerifierBatch],
    optimizer: OptimizerSettings,
    workers: GradientWorkers[VerifierBatch] | None = None,
) -> Trainer[VerifierBatch]:
    players, training = session.players, session.training
    longest = verifier.longest_packed if training.shared_prompts else 0
    return Trainer(
        verifier,
        PairObjective(session.verifier, verifier.tokenizer.pad_id, longest_packed=longest),
        optimizer,
        source,
        executor=players.executor,
        precision=players.models.compute_dtype,
        gradient_checkpointing=training.gradient_checkpointing,
        waits_for="pairs",
        section="verifier",
        workers=workers,
    )


# --- calibration ------------------------------------------------------------------------------------------------------


async def _calibrate(session: Session, verifier: VerifierModel | VerifierEnsemble) -> dict[str, float]:
    """AUC and acceptance threshold on held-out solutions. For an ensemble, first sets its members' scales, then uses
    the aggregated score."""
    players = session.players
    held_out, reason = await players.compute(lambda: calibration_view(session))
    if reason:  # an alert instead of an error, so that a weak prover on a small mint does not end the run
        session.alert([Alert("calibration", reason)], phase_steps(session))
    try:
        found: dict[str, float] = {}
        with span("score"):
            if isinstance(verifier, VerifierEnsemble):
                scores_N, found = await _scaled(session, verifier, held_out)
            else:
                scores_N = await scores_of_rows(players, held_out, players.scorer(verifier).score)
    finally:
        held_out.close()
    helpful_N = await minted_roles(session, held_out)
    calibrated = calibration(held_out.correct_R, helpful_N, scores_N)
    return {**calibrated, "held_out": float(len(scores_N)), **found}


def calibration_view(session: Session) -> tuple[PairView, str]:
    """The minted solutions of the held-out problems, and "". If all of these are correct, or all incorrect: all minted
    solutions, and the reason. Runs in the compute thread."""
    section, round_ = session.verifier, session.state.round
    shards, infos = session.ledger.rollout_shards, session.ledger.shards(round_, Phase.MINT.value)
    held_out = PairView(shards, infos, keep=lambda problem_id: is_held_out(problem_id, section.held_out))
    correct, count = int(held_out.correct_R.sum()), len(held_out.correct_R)
    if 0 < correct < count:
        return held_out, ""
    reason = (
        f"{correct} of {count} held-out solutions are correct, so all minted solutions, including those used for "
        "training, determine the threshold and the AUC."
    )
    return PairView(shards, infos), reason


async def scores_of_rows(
    players: Players, view: PairView, score: Callable[[Sequence[Scorable]], Awaitable[Float32]]
) -> Float32:
    """float32 [..., R]: `score` of all rows of a view, at most SCORED_AT_ONCE rows at a time in memory."""
    parts = []
    for rows_N in np.array_split(view.rows_R, range(SCORED_AT_ONCE, len(view.rows_R), SCORED_AT_ONCE)):
        solutions = await players.compute(partial(view.rows, rows_N))
        parts.append(await score(solutions))
    return np.concatenate(parts, axis=-1)


async def minted_roles(session: Session, view: PairView) -> NDArray[np.bool_]:
    """bool [R]: which rows of a view of this round's mint were written in the helpful role. Labels never depend on it
    (invariant 3)."""
    minted = await session.ledger.sample_columns(session.state.round, Phase.MINT.value)
    return minted.helpful_N[view.rows_R]


def calibration(correct_N: NDArray[np.bool_], helpful_N: NDArray[np.bool_], scores_N: Float32) -> dict[str, float]:
    """The AUC of correct against incorrect solutions, and the score that best separates the correct helpful ones (all
    correct ones, if the helpful role has none) from the incorrect ones.

    Correct solutions of the sneaky role are failed attempts to be wrong, and often look like flaws, so they do not
    count. A threshold that a fixed share of the correct solutions reaches falls among the flaws where the scores of
    correct solutions have a long lower tail (docs/results/growing-game.md has both figures).
    """
    wanted_N = correct_N & helpful_N
    if not wanted_N.any():
        wanted_N = correct_N
    return {
        "verifier_auc": auc(scores_N[correct_N], scores_N[~correct_N]),
        "threshold": separating_threshold(scores_N[wanted_N], scores_N[~correct_N]),
    }


async def _scaled(session: Session, ensemble: VerifierEnsemble, held_out: PairView) -> tuple[Float32, dict[str, float]]:
    """Bring the members to one scale. Returns the ensemble's scores of the held-out solutions, float32 [N], and
    metrics."""
    section, players, correct_N = session.verifier, session.players, held_out.correct_R
    members_KN = await scores_of_rows(
        players,
        held_out,
        partial(
            member_scores,
            ensemble,
            players.template(ensemble),
            token_budget=section.micro_batch_tokens,
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
