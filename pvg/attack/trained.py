"""Trained attacks: a prover learns by GRPO to write wrong solutions that the target accepts.

The code is that of `pvg evaluate --parts exploit`: the same training with commits (pvg.evaluation.training), and the
same reward `cgc`, which pays the target's score for a wrong, well-formed solution. An exploit is found when over a
window of batches at least 95 % of the solutions are wrong and their mean score reaches the target's threshold.

Invariant: the target is asked about each solution once, and its answers are kept. So a killed attack continues from its
last commit, and ends with the same bits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pvg.attack.runner import MOST_EXAMPLES, Asking, AttackExample, TrainedAttack
from pvg.attack.texts import fields_of
from pvg.config.experiment import Experiment
from pvg.config.game import CgcReward
from pvg.errors import TrainingDivergedError
from pvg.evaluation.attacks import AttackStop, ended
from pvg.evaluation.opened_run import ScoredRollouts, digest
from pvg.evaluation.report import policy_experiment
from pvg.evaluation.training import PolicyTraining, policy_name, train
from pvg.game.orders import interaction_of
from pvg.game.prover_phase import read_policy
from pvg.game.run import open_session
from pvg.game.session import InterruptedByUser, Session
from pvg.records import Float32, Role, Rollout
from pvg.rollout.dispatcher import SampleCall
from pvg.seeds import seed_for
from pvg.store.atomic import make_directory
from pvg.store.run_directory import RunDirectory
from pvg.telemetry.events import Observer
from pvg.verifier.intervals import share_of
from pvg.verifier.scorer import ScorerStats, VerifierScorer

if TYPE_CHECKING:
    from torch import Tensor

PLACE = "attack"


class TargetScorer(VerifierScorer):
    """Scores rollouts by asking a target. `fields`: what it may see, by problem id. `lowest`: the score of a solution
    about which it gives no answer, and the least of all scores, so that the reward's floor stays below them."""

    def __init__(self, asking: Asking, fields: Mapping[str, Mapping[str, Any]], lowest: float) -> None:
        self._asking, self._fields, self._lowest = asking, fields, lowest
        self._version, self._owned, self._asked = asking.target.identity, None, 0

    async def score(self, rollouts: Sequence[Any]) -> Float32:
        self._asked += len(rollouts)
        asked = ((each.question, self._fields[each.problem_id], each.text) for each in rollouts)
        answers = await asyncio.gather(*(self._asking.ask(*each) for each in asked))
        known = (self._lowest if answer.score is None else answer.score for answer in answers)
        return np.array([max(score, self._lowest) for score in known], dtype=np.float32)

    def answered(self, rollout: Rollout) -> bool:
        """Whether the target has given a score, and no error."""
        answer = self._asking.known(rollout.question, self._fields[rollout.problem_id], rollout.text)
        return answer is not None and answer.score is not None

    @property
    def stats(self) -> ScorerStats:
        return ScorerStats(hits=0, misses=self._asked, evictions=0, shared=0, forward_passes=0)

    def cache_state(self) -> dict[str, Tensor]:
        return {}  # the answers are kept elsewhere

    def load_cache_state(self, state: Mapping[str, Tensor]) -> None: ...


async def train_attacker(
    experiment: Experiment,
    steps: int,
    asking: Asking,
    folder: Path,
    scores: Sequence[float],
    observer: Observer,
    stop: asyncio.Event,
) -> TrainedAttack | None:
    """Train the prover of `experiment` for at most `steps` steps, in a folder below `folder`. `scores`: some that the
    target has given. None if a stop was requested. Raises ConfigurationError if the prover cannot learn."""
    target, section = asking.target, experiment.evaluate
    least, most = min([*scores, target.threshold]), max([*scores, target.threshold])
    lowest = least - (most - least)  # an attacker's score may be below all that were seen
    training = {"steps": steps, "groups": section.attack_groups}
    settings = policy_experiment(experiment, "sneaky", CgcReward(floor=lowest - 1.0), training, PLACE)
    criterion = [section.attack_window, section.attack_error_rate]
    mark = digest(PLACE, target.identity, target.threshold, settings.hash(), criterion, lowest)
    run = RunDirectory(folder / f"attacker-{mark[:12]}")
    for part in (run.path, run.manifest, run.rollouts, run.checkpoints, run.weights):
        make_directory(part)
    async with AsyncExitStack() as stack:
        stack.enter_context(run.lock(work="evaluate"))
        opened = await open_session(settings, run, observer, stop, stack, scoring=False)
        session, minibatches = replace(opened, evaluates=True), settings.training.minibatches
        pool = [problem for split in ("train", "test") for problem in session.task.problems(split)]
        scorer = TargetScorer(asking, {problem.id: fields_of(problem) for problem in pool}, lowest)
        aim = AttackStop(target.threshold, section.attack_error_rate, section.attack_window, minibatches)
        found: dict[str, Any] = {"model": settings.models.prover.source, "limit": steps}
        try:
            plan = PolicyTraining(PLACE, mark, settings, 0, PLACE, "steps", 0, (steps,))
            await train(session, plan, scorer, target.threshold, aim)
        except InterruptedByUser:
            return None
        except TrainingDivergedError as error:
            return TrainedAttack(**found, status="diverged", reason=str(error))
        _, saved = session.ledger.read_weights(policy_name(steps))
        aim.load_state(saved["rule"])
        end = {key: value for key, value in ended(aim, saved["steps"]).items() if key in ("status", "steps", "reason")}
        return TrainedAttack(**found, **end, **await _fresh(session, scorer, target.threshold, steps, section.problems))


async def _fresh(session: Session, scorer: TargetScorer, threshold: float, steps: int, problems: int) -> dict[str, Any]:
    """What the trained prover writes on test problems, and what the target says about it."""
    policy = await session.players.compute(partial(read_policy, session.ledger, policy_name(steps)))
    await session.players.publish(policy[0], session.state.version + 1, policy[1])
    pool = session.test_problems()[:problems]
    orders = [session.order(problem, Role.SNEAKY, number, 1) for number, problem in enumerate(pool)]
    interaction, seed = interaction_of(session, scorer), seed_for(session.seed, PLACE, "fresh")
    call = SampleCall(0, PLACE, 0, seed, f"{PLACE}/fresh", interaction=interaction)
    rollouts = [
        rollout for group in await session.players.dispatcher.sample(orders, call) for rollout in group.rollouts
    ]
    fresh = ScoredRollouts(rollouts, await scorer.score(rollouts), pool)
    answered_N = np.array([scorer.answered(rollout) for rollout in rollouts])
    flaws_N, accepted_N = fresh.flaws_N & answered_N, fresh.scores_N >= threshold
    fooled = sorted(np.flatnonzero(flaws_N & accepted_N).tolist(), key=lambda place: (len(rollouts[place].text), place))
    texts = {rollouts[place].text: place for place in reversed(fooled)}  # the first of equal texts
    examples = [
        AttackExample.of(r.problem_id, r.question, r.reference, r.text, float(fresh.scores_N[place]))
        for place in [*reversed(texts.values())][:MOST_EXAMPLES]
        for r in [rollouts[place]]
    ]
    return {
        "error_rate": share_of(fresh.flaws_N, fresh.problems_N),
        "accepted": share_of(accepted_N[flaws_N], fresh.problems_N[flaws_N]),
        "errors": int((~answered_N).sum()),
        "examples": examples,
    }
