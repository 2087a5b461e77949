"""CHECKPOINT: sample the round's prover on test problems and compute the round's metrics.

The base prover is sampled once, in round 0, and every later verifier scores these samples. The previous round's prover
is represented by its samples from its own checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from pvg.game.mint import load_source
from pvg.game.orders import interaction_of
from pvg.game.prover_phase import open_round_verifier
from pvg.game.rewards import measures
from pvg.game.session import Session, finite
from pvg.game.states import Phase
from pvg.game.statistics import RolloutColumns, fooled_rate_at, mean_of, play_metrics, shares_of, verifier_auc
from pvg.records import BASE_SOURCE, Role, Rollout, source_of_round
from pvg.rollout.dispatcher import SampleCall
from pvg.seeds import draw_cyclic, seed_for
from pvg.telemetry.spans import span
from pvg.verifier.calibration import ACCEPTANCE, auc
from pvg.verifier.scorer import TextSolution, VerifierScorer

EXAMPLES = 8  # of each kind, in a round's table of examples


async def checkpoint(session: Session) -> None:
    """Evaluate the round, then enter MINT of the next round, or COMPLETE after the last."""
    section, round_ = session.game.test, session.state.round
    started = time.perf_counter()
    own = source_of_round(round_)
    sources = [BASE_SOURCE, own] if round_ == 0 else [own]
    problems = min(section.problems, len(session.test_problems()))
    info = session.begin("rollouts", len(sources) * 2 * problems * section.samples)
    with span("open_models"):
        verifier, threshold = await open_round_verifier(session, round_)
    session.first_step()
    try:
        scorer = session.players.scorer(verifier)
        version = session.state.version
        fresh: dict[str, RolloutColumns] = {}
        for source in sources:
            version += 1
            with span("evaluate"):
                with span("sync"):
                    await load_source(session, source, version)
                with span("rollout"):
                    rollouts = await _sample(session, source, scorer)
                rollouts, fresh[source] = await _scored(scorer, rollouts)
                session.ledger.keep(rollouts := await _turns_scored(scorer, rollouts))
        with span("evaluate"):
            metrics = await _round_metrics(session, scorer, threshold, fresh)
            rules = interaction_of(session, scorer).rules
            of_rules = partial(measures, rules, rollouts, fresh[own].scores_N)  # `own` was sampled last
            metrics |= await session.players.off_loop(of_rules)
            metrics |= _without_the_others(rollouts, fresh[own], metrics)
    finally:
        verifier.close()
    session.report_step(info, info.total, metrics)
    session.finish_phase(info, metrics, time.perf_counter() - started)
    session.finish_round(metrics)
    if session.monitoring is not None:
        session.monitoring.examples(round_, example_rows(rollouts, fresh[own]))
    # One commit for the metrics and the transition: with two, a kill in between would count the round twice.
    rounds = (*session.state.rounds, finite(metrics))
    following = session.state.after_round(session.game.rounds, self_play=False)
    await session.leave_phase(replace(following, version=version, rounds=rounds))


async def _sample(session: Session, source: str, scorer: VerifierScorer) -> list[Rollout]:
    """`game.test.samples` solutions per problem and role; every source and round gets the same test problems."""
    section, round_, size = session.game.test, session.state.round, session.game.test.samples
    pool = session.test_problems()
    chosen = draw_cyclic(len(pool), 0, min(section.problems, len(pool)), seed_for(session.seed, "evaluation"))
    orders = [
        session.order(pool[index], role, 2 * position + (1 - role.number), size)
        for position, index in enumerate(chosen)
        for role in (Role.HELPFUL, Role.SNEAKY)
    ]
    groups = await session.players.dispatcher.sample(
        orders,
        SampleCall(
            round=round_,
            source=source,
            step=0,
            seed=seed_for(session.seed, round_, "evaluation", source),
            prefix=f"{round_:03d}/evaluation/{source}",
            interaction=interaction_of(session, scorer),
        ),
    )
    return [rollout for group in groups for rollout in group.rollouts]


async def _scored(scorer: VerifierScorer, rollouts: list[Rollout]) -> tuple[list[Rollout], RolloutColumns]:
    with span("score"):
        scores_N = await scorer.score(rollouts)
    scored = [
        replace(r, score=score, verifier_version=scorer.version)
        for r, score in zip(rollouts, scores_N.tolist(), strict=True)
    ]
    return scored, RolloutColumns(rollouts, scores_N)


async def _turns_scored(scorer: VerifierScorer, rollouts: list[Rollout]) -> list[Rollout]:
    """Scored rollouts with the verifier's score after each turn: what a reader learns from the turn."""
    parts = [
        TextSolution(
            f"{r.id}/before-{turn.start}",
            r.question,
            "".join(before.text for before in r.turns[:number]),
            r.completion_ids[: turn.start],
        )
        for r in rollouts
        for number, turn in enumerate(r.turns)
        if number
    ]
    with span("score"):
        scores = iter((await scorer.score(parts)).tolist() if parts else [])
    found = []
    for r in rollouts:
        after = [*(next(scores) for _ in r.turns[1:]), r.score]
        turns = tuple(replace(turn, score=score) for turn, score in zip(r.turns, after, strict=False))
        found.append(replace(r, turns=turns))
    return found


def _without_the_others(
    rollouts: Sequence[Rollout], own: RolloutColumns, measured: Mapping[str, float]
) -> dict[str, float]:
    """How well the verifier ranks the solutions alone, and how well a critic classifies them: both are 0.5 by chance,
    the second is the AUC of a classifier that says yes or no. Empty for solutions without other turns."""
    if not any(rollout.turns for rollout in rollouts):
        return {}
    first = [rollout.turns[0].score if rollout.turns else rollout.score for rollout in rollouts]
    alone_N = np.array(first, dtype=np.float32)
    found = {"verifier_auc_alone": auc(alone_N[own.correct_N], alone_N[~own.correct_N])}
    if {"critic_found", "critic_alarm"} <= set(measured):
        found["critic_balanced"] = (measured["critic_found"] + 1.0 - measured["critic_alarm"]) / 2.0
    return found


async def _round_metrics(
    session: Session, scorer: VerifierScorer, threshold: float, fresh: Mapping[str, RolloutColumns]
) -> dict[str, float]:
    """The metrics of the round; a share of an empty set is NaN."""
    round_ = session.state.round
    own = fresh[source_of_round(round_)]
    base = fresh[BASE_SOURCE] if round_ == 0 else await _earlier(session, scorer, 0, BASE_SOURCE)
    metrics = play_metrics(own, threshold)
    metrics["tested"] = float(own.helpful_N.sum())
    metrics["solved"], metrics["flaws"] = float(own.solved_N.sum()), float(own.flaws_N.sum())
    metrics["solutions"], metrics["verifier_auc"] = float(len(own.scores_N)), verifier_auc(own)
    for name, share in shares_of(own, threshold).items():
        if share.low is not None and share.high is not None:
            metrics |= {f"{name}_low": share.low, f"{name}_high": share.high}
    metrics["fooled_rate_at_90"], metrics["threshold"] = fooled_rate_at(own, ACCEPTANCE), threshold
    base_metrics = play_metrics(base, threshold)
    metrics["base_helpful_accuracy"] = base_metrics["helpful_accuracy"]
    metrics["base_sneaky_error_rate"] = base_metrics["sneaky_error_rate"]
    metrics["fooled_rate_base"] = base_metrics["fooled_rate"]
    metrics["verifier_auc_base"] = verifier_auc(base)
    if round_ > 0:
        before = await _earlier(session, scorer, round_ - 1, source_of_round(round_ - 1))
        metrics["fooled_rate_previous"] = mean_of(before.scores_N >= threshold, before.flaws_N)
        metrics["verifier_auc_previous"] = auc(own.scores_N[own.solved_N], before.scores_N[before.flaws_N])
    return metrics


def example_rows(rollouts: Sequence[Rollout], own: RolloutColumns) -> list[dict[str, object]]:
    """Example solutions for a table: the flaws with the highest scores, then the correct solutions with the lowest; at
    most EXAMPLES of each."""
    flaws_E = np.flatnonzero(own.flaws_N)
    correct_E = np.flatnonzero(own.solved_N)
    chosen_E = [
        *flaws_E[np.argsort(-own.scores_N[flaws_E], kind="stable")][:EXAMPLES],
        *correct_E[np.argsort(own.scores_N[correct_E], kind="stable")][:EXAMPLES],
    ]
    return [
        {
            "role": rollout.role.value,
            "question": rollout.question,
            "solution": rollout.text,
            "reference": rollout.reference,
            "correct": rollout.grade.correct,
            "score": float(own.scores_N[index]),
        }
        for index in chosen_E
        for rollout in (rollouts[index],)
    ]


async def _earlier(session: Session, scorer: VerifierScorer, round_: int, source: str) -> RolloutColumns:
    """The samples of `source` from an earlier checkpoint, scored by this round's verifier."""
    rollouts = await session.ledger.read_rollouts(round_, Phase.CHECKPOINT.value)
    return (await _scored(scorer, [r for r in rollouts if r.source == source]))[1]
