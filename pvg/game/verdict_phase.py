"""TRAIN_VERIFIER of a generative verifier: it learns by GRPO which of its verdicts on this round's mint are right.

A batch has `verifier.pairs` correct and as many incorrect solutions, none of held-out problems. The verifier writes
`rollout.group_size` verdicts on each; a right one is paid 1, any other one 0. At the end of the phase, it judges the
solutions of held-out problems, for the metrics; they also calibrate the threshold, as for every verifier.

A verdict is stored as a rollout: its problem is a solution, its grade says whether the verdict is right.
"""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from pvg.config.rollout import NoDeadline, NoPrefetch, framed
from pvg.config.training import ClippedLoss, Kl, Training
from pvg.game.parts import Batches, BatchLogprobs
from pvg.game.prover_phase import StopRule, open_phase, open_trainer
from pvg.game.rewards import credit_of
from pvg.game.session import Session
from pvg.game.statistics import sampling_metrics, staleness_metrics
from pvg.game.verifier_phase import calibration_view, keep_verifier, open_pairs, phase_steps, starting_verifier
from pvg.models.heads import GenerativeHead
from pvg.records import Grade, Group, Problem, Role, Split
from pvg.rollout.dispatcher import GroupOrder, SampleCall
from pvg.seeds import seed_for
from pvg.store.pairs import PairStream
from pvg.store.samples import SolutionRow
from pvg.tasks.task import LocatesFlaws
from pvg.telemetry.spans import span
from pvg.training.batch import PolicyBatch, batch_of, groups_and_roles
from pvg.training.credit import zero_signal_groups
from pvg.training.forward import fitted
from pvg.training.losses import PolicyObjective
from pvg.training.trainer import Trainer
from pvg.verifier.data import read_verdict

# In the metadata of a problem: whether the solution is correct, and its first wrong step from 1, if known.
TRUTH, FLAW = "correct", "flaw"
MEASURED = 1024  # held-out solutions that are judged for the metrics
VERIFIER = "verifier"  # the source of the rollouts


async def train_verifier(session: Session) -> None:
    """Run the phase from the last committed step on, then enter TRAIN_PROVER."""
    players, state = session.players, session.state
    info = session.begin("steps", phase_steps(session), state.step)
    started = time.perf_counter()
    await players.engine.rest(replaced=True)  # the prover phase begins with a new version
    with span("open_models"):
        verifier = await players.compute(partial(starting_verifier, session))
    assert isinstance(verifier, GenerativeHead)
    try:
        async with verdict_session(session, verifier) as (own, verdicts):
            with span("open_models"):
                stream = open_pairs(session)
                if state.step == 0:
                    session.tell_about_excluded_sources(stream.excluded_singles)
                batches = partial(VerdictBatches, own, verdicts, stream)
                phase = open_phase(own, info, verifier.policy, batches, StopRule("steps"))
            if info.total:
                await phase.play()
            with span("evaluate"):
                measured = await held_out_verdicts(own, verdicts, verifier.head.votes)
        await keep_verifier(session, info, verifier, started, measured)
    finally:
        verifier.close()


@asynccontextmanager
async def verdict_session(session: Session, verifier: GenerativeHead) -> AsyncIterator[tuple[Session, Verdicts]]:
    """The session in which the verifier is the policy, and its task."""
    plain = {"temperature": 1.0, "deadline": NoDeadline(), "prefetch": NoPrefetch(), "logprobs": "sampled"}
    rollout = session.rollout.model_copy(update={**plain, "max_tokens": verifier.head.tokens})
    verdicts = Verdicts(session, verifier)
    async with session.players.of_verifier(verifier, verdicts, rollout) as players:
        longest = verdicts.longest_question + session.longest + rollout.max_tokens
        training = verdict_training(session, verifier, longest)
        yield replace(session, players=players, rollout=rollout, training=training), verdicts


def verdict_training(session: Session, verifier: GenerativeHead, longest: int) -> Training:
    """The settings of the verifier's training, as a policy. `longest`: the most tokens of a row."""
    section = session.verifier
    training = Training(
        loss=ClippedLoss(),
        kl=Kl(coefficient=0.0),
        adapters=section.adapters,
        groups=2 * section.pairs,
        steps=phase_steps(session),
        learning_rate=section.learning_rate,
        micro_batch_tokens=section.micro_batch_tokens,
        gradient_checkpointing=session.training.gradient_checkpointing,
        shared_prompts=session.training.shared_prompts,
    )
    return fitted(training, verifier.policy.module, longest)[0]


class Verdicts:
    """A task whose problems are solutions, and whose completions are verdicts on them."""

    def __init__(self, session: Session, verifier: GenerativeHead) -> None:
        # In a dialogue, the text has more than the solution.
        self._critic: object = session.task if session.game.protocol.kind in ("direct", "decoupled") else None
        self._template = session.players.template(verifier)
        self._source = session.players.base.tokenizer.fingerprint
        self._problems = {problem.id: problem for problem in session.problems("verifier")}

    @property
    def longest_question(self) -> int:
        """The most tokens of the verifier's prompt without the solution."""
        question = max((problem.question for problem in self._problems.values()), key=len)
        return len(self._template.tokens(question, "", None, None)[0])

    def problems(self, split: Split) -> Iterable[Problem]:
        return ()

    def grade(self, problem: Problem, completion: str) -> Grade:
        """Correct: the verdict is right. Well-formed: it is readable. The note tells a wrong reason."""
        named, flaw = read_verdict(completion, self._template.style), problem.metadata[FLAW]
        if named is None:
            return Grade(correct=False, well_formed=False, note="unreadable verdict")
        right = (named == 0) == problem.metadata[TRUTH]
        note = f"wrong reason: step {named}, not {flaw}" if right and flaw is not None and named != flaw else ""
        return Grade(correct=right, well_formed=True, answer=str(named), note=note)

    def orders(self, rows: Sequence[SolutionRow], correct_N: NDArray[np.bool_], size: int) -> list[GroupOrder]:
        """A group of `size` verdicts on each solution. Runs in the compute thread."""
        return [
            GroupOrder(
                self._problem(row, correct),
                Role.HELPFUL,
                self._template.tokens(row.question, row.text, row.completion_ids, self._source)[0],
                number,
                size,
            )
            for number, (row, correct) in enumerate(zip(rows, correct_N.tolist(), strict=True))
        ]

    def _problem(self, row: SolutionRow, correct: bool) -> Problem:
        flaw = None
        if isinstance(self._critic, LocatesFlaws) and not correct:
            place = self._critic.flaw(self._problems[row.problem_id], row.text)
            flaw = None if place is None else place + 1
        answer = "0" if correct else str(flaw or "wrong")
        return Problem(row.problem_id, framed(row.question, row.text), answer, {TRUTH: correct, FLAW: flaw})


def verdict_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Shares of verdicts: right ones, unreadable ones, and of the right ones on solutions with a known flaw those that
    name another step (NaN without any)."""
    judged = [(group.problem.metadata[FLAW], rollout.grade) for group in groups for rollout in group.rollouts]
    reasons = [bool(grade.note) for flaw, grade in judged if flaw is not None and grade.correct]
    return {
        "verdict_accuracy": float(np.mean([grade.correct for _, grade in judged])),
        "unreadable": float(np.mean([not grade.well_formed for _, grade in judged])),
        "wrong_reason": float(np.mean(reasons)) if reasons else math.nan,
    }


@dataclass
class VerdictBatches(Batches):
    """The batches of a generative verifier's training. A batch depends only on the weights and its number. The players
    of `session` are the verifier's."""

    session: Session
    verdicts: Verdicts
    stream: PairStream
    objective: PolicyObjective
    logprobs: BatchLogprobs
    done: int = 0
    metrics: dict[str, float] = field(default_factory=dict)

    async def next_batch(self) -> PolicyBatch:
        session, number = self.session, self.done
        players, training = session.players, session.training
        began, before = time.perf_counter(), players.engine.stats
        with span("rollout"):
            drawn = self.stream.balanced_singles(number, training.groups)
            rows = await players.compute(lambda: self.stream.rows(drawn.rows_N))
            size, place = session.rollout.group_size, f"{number:05d}"
            groups = await sample_verdicts(session, self.verdicts, rows, drawn.correct_N, place, number, size)
        seconds, engine = time.perf_counter() - began, players.engine.stats.since(before)
        with span("credit"):
            rollouts = [rollout for group in groups for rollout in group.rollouts]
            rewards_N = np.array([float(rollout.grade.correct) for rollout in rollouts], dtype=np.float32)
            groups_N, roles_N = groups_and_roles(rollouts)
            advantages_N, _ = credit_of(training.loss.kind, self.objective.credit).observe(rollouts, rewards_N)
            batch = batch_of(rollouts, advantages_N)
        session.tell_rollouts(rollouts, number)
        await players.engine.rest(replaced=True)
        batch = await self.logprobs.add(batch)
        with span("record"):
            paid = zip(rollouts, rewards_N.tolist(), strict=True)
            session.ledger.keep([replace(rollout, reward=reward) for rollout, reward in paid])
            self.done += 1
            self.metrics = {
                "rollouts": float(len(rollouts)),
                **verdict_metrics(groups),
                "zero_signal": zero_signal_groups(rewards_N, groups_N, roles_N),
                **sampling_metrics(rollouts, engine, seconds),
                **staleness_metrics(rollouts, players.engine.version),
            }
        return batch


class VerdictLearning:
    """The updates of a generative verifier beside the prover (pvg.game.simultaneous): GRPO steps on the solutions of a
    stream. A step depends on the weights, the stream and the step's number, which continues the verifier phase's."""

    def __init__(
        self,
        session: Session,
        verifier: GenerativeHead,
        batches: VerdictBatches,
        trainer: Trainer[PolicyBatch],
        opened: AsyncExitStack,
    ) -> None:
        self._players, self._verifier, self._batches = session.players, verifier, batches
        self.trainer, self._opened = trainer, opened

    @classmethod
    async def open(cls, session: Session, verifier: GenerativeHead) -> VerdictLearning:
        async with AsyncExitStack() as stack:
            own, verdicts = await stack.enter_async_context(verdict_session(session, verifier))
            made = partial(VerdictBatches, own, verdicts, open_pairs(session))
            batches, _, trainer, _ = open_trainer(own, verifier.policy, made)
            assert isinstance(batches, VerdictBatches)
            return cls(own, verifier, batches, trainer, stack.pop_all())

    async def close(self) -> None:
        await self._opened.aclose()

    def excluded(self, stream: PairStream) -> Mapping[str, str]:
        return stream.excluded_singles

    async def learn(self, stream: PairStream, first: int, steps: int) -> dict[str, float]:
        """Take `steps` steps, of which `first` is the number of the first one. Returns metrics of the last one."""
        players, batches = self._players, self._batches
        batches.stream, batches.done = stream, first
        metrics: Mapping[str, float] = {}
        for _ in range(steps):
            with span("sync"):
                policy = await players.compute(self._verifier.policy.policy)
                await players.publish(policy[0], batches.done + 1, policy[1])
            report = await self.trainer.step()
            assert report is not None, "solutions never end"
            metrics = report.metrics
        verdicts = ("verdict_accuracy", "unreadable", "wrong_reason")
        return {"verifier_loss": metrics["loss"], **{name: batches.metrics[name] for name in verdicts}}


async def held_out_verdicts(session: Session, verdicts: Verdicts, votes: int) -> dict[str, float]:
    """The metrics of `votes` verdicts on each solution of held-out problems, at most on MEASURED."""
    players = session.players
    view, _ = await players.compute(lambda: calibration_view(session))  # calibration tells the reason
    try:
        rows = await players.compute(lambda: view.rows(view.rows_R[:MEASURED]))
    finally:
        view.close()
    correct_N, steps = view.correct_R[:MEASURED], phase_steps(session)
    groups = await sample_verdicts(session, verdicts, rows, correct_N, "held-out", steps, votes)
    session.ledger.keep([rollout for group in groups for rollout in group.rollouts])
    return verdict_metrics(groups)


async def sample_verdicts(
    session: Session,
    verdicts: Verdicts,
    rows: Sequence[SolutionRow],
    correct_N: NDArray[np.bool_],
    place: str,
    step: int,
    size: int,
) -> list[Group]:
    """`size` verdicts on each solution. `place`: distinguishes them from others of the phase."""
    round_ = session.state.round
    orders = await session.players.compute(lambda: verdicts.orders(rows, correct_N, size))
    seed = seed_for(session.seed, round_, "train_verifier", place)
    call = SampleCall(round_, VERIFIER, step, seed, prefix=f"{round_:03d}/train_verifier/{place}")
    return await session.players.dispatcher.sample(orders, call)
