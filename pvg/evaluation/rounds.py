"""The parts of one round: the samples that each part needs, and its results. Results on disk are not computed again."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pvg.evaluation import measures
from pvg.evaluation.attacks import (
    AttackTarget,
    attack,
    attack_digest,
    attack_name,
    check,
    final_samples,
    reference_of,
    sample_attacker,
)
from pvg.evaluation.baseline import CorrectnessBaseline, distance, policy_totals, tax
from pvg.evaluation.intervals import CONFIDENCE, RESAMPLES, Float64, draws
from pvg.evaluation.opened_run import (
    BASE_RANGE,
    REFERENCE_RANGE,
    ROUND,
    SAMPLES_RANGE,
    EvaluationContext,
    FrozenVerifier,
    MissingResult,
    digest,
    first_version,
)
from pvg.evaluation.opponents import attack_kinds
from pvg.evaluation.samples import SampleSet, ScoredRollouts, digest_of, is_complete, sampled
from pvg.game.mint import load_source
from pvg.game.prover_phase import read_prover
from pvg.records import BASE_SOURCE, Problem, Role, Rollout, source_of_round
from pvg.seeds import seed_for
from pvg.tasks import LocatesFlaws
from pvg.tasks.task import ConcealsText, Task

BOTH = (Role.HELPFUL, Role.SNEAKY)
ATTACKED = ("found", "censored")  # statuses of attacks that have left an attacker

LOCALISED = 256  # most flawed solutions of a round that are scored step by step; each costs a pass per step
# Raised when a measure's definition changes, which makes earlier measurements stale. Unlike `opened_run.DEFINITIONS`,
# it keeps what took hours: samples and trained attackers.
MEASURED = 2


def bootstrap(context: EvaluationContext, problems: int) -> Float64:
    """The resamples of `problems` problems, equal for every part, so that differences between parts are real."""
    return draws(problems, RESAMPLES, seed_for(context.seed, "evaluate", "bootstrap"))


def base_set(context: EvaluationContext) -> SampleSet:
    return SampleSet(BASE_SOURCE, 0, context.test_problems(), BOTH, context.experiment.evaluate.samples, BASE_SOURCE)


async def base_samples(context: EvaluationContext) -> list[Rollout]:
    return await sampled(
        context, base_set(context), lambda: load_source(context, BASE_SOURCE, first_version(BASE_RANGE))
    )


def round_set(context: EvaluationContext, round_: int) -> SampleSet:
    """Both roles of a round's prover on the test problems."""
    name, size = source_of_round(round_), context.experiment.evaluate.samples
    return SampleSet(name, round_, context.test_problems(), BOTH, size, context.ledger.players_of(round_), round_)


async def round_samples(context: EvaluationContext, round_: int) -> list[Rollout]:
    version = first_version(SAMPLES_RANGE + round_)
    return await sampled(
        context, round_set(context, round_), lambda: load_source(context, source_of_round(round_), version)
    )


class RoundParts:
    """The parts of one round. Each returns plain data in the report's form. Raises MissingResult if something is not
    stored and computing is not allowed, InterruptedByUser if a stop was requested."""

    def __init__(self, context: EvaluationContext, frozen: FrozenVerifier) -> None:
        self.context = context
        self.frozen = frozen
        self.round = frozen.round
        self.source = source_of_round(frozen.round)
        self.section = context.experiment.evaluate
        self._statistics = [CONFIDENCE, RESAMPLES]

    @cached_property
    def _draws(self) -> Float64:
        return bootstrap(self.context, len(self.context.test_problems()))

    @property
    def _kinds(self) -> list[str]:
        return attack_kinds(self.context.experiment)

    # --- samples ---------------------------------------------------------------------------------------------------

    async def _scored(self, wanted: SampleSet, rollouts: Sequence[Rollout], pool: Sequence[Problem]) -> ScoredRollouts:
        scores_N = await self.frozen.scores(wanted.name, rollouts, digest_of(self.context, wanted))
        return ScoredRollouts(rollouts, scores_N, pool)

    async def base(self) -> ScoredRollouts:
        return await self._scored(
            base_set(self.context), await base_samples(self.context), self.context.test_problems()
        )

    async def of_round(self, round_: int) -> ScoredRollouts:
        """The samples of this or an earlier round's prover, scored by this round's verifier."""
        rollouts = await round_samples(self.context, round_)
        return await self._scored(round_set(self.context, round_), rollouts, self.context.test_problems())

    async def own(self) -> ScoredRollouts:
        return await self.of_round(self.round)

    def _reference_set(self) -> SampleSet:
        pool, size = self.context.prover_problems(), self.section.samples
        name, round_ = f"reference-{self.source}", self.round
        return SampleSet(name, round_, pool, (Role.HELPFUL,), size, self.frozen.digest, round_)

    async def _reference(self) -> ScoredRollouts:
        wanted = self._reference_set()
        version = first_version(REFERENCE_RANGE + ROUND * self.round)
        rollouts = await sampled(self.context, wanted, lambda: load_source(self.context, self.source, version))
        return await self._scored(wanted, rollouts, wanted.problems)

    async def _of_attacker(self, target: AttackTarget, kind: str) -> ScoredRollouts:
        rollouts = await sample_attacker(self.context, target, kind)
        return await self._scored(final_samples(self.context, target, kind), rollouts, self.context.test_problems())

    def _of(self, *sets: SampleSet) -> list[str]:
        """The digests on which a part depends that reads these sets with this round's verifier."""
        return [self.frozen.digest, *(digest_of(self.context, wanted) for wanted in sets)]

    async def _unit(self, name: str, inputs: Sequence[Any], work: Callable[[], Awaitable[Any]]) -> Any:
        """The result of a part of this round, from disk or computed by `work`."""
        context, unit = self.context, f"{name}-{self.source}"
        for_ = digest(name, MEASURED, inputs, self._statistics)
        found = context.units.read(unit, for_)
        if found is None:
            context.begin(unit)
            found = await work()
            context.units.write(unit, for_, found)
        return found

    # --- the parts -------------------------------------------------------------------------------------------------

    async def exploit(self) -> list[dict[str, Any]]:
        """Where computing is not allowed: the attacks that are stored, if there are any and none is stale."""
        target, found, missing = await self.target(), [], None
        for kind in self._kinds:
            try:
                found.append(await self._exploit(target, kind))
            except MissingResult as error:
                missing = error
                if error.stale:
                    break
        if missing is not None and (missing.stale or not found):
            raise missing
        return found

    async def _exploit(self, target: AttackTarget, kind: str) -> dict[str, Any]:
        result = {**await self._attack(target, kind), "reference": target.reference}
        if result["status"] in ATTACKED:
            inputs = [attack_digest(self.context, target, kind), *self._of(round_set(self.context, self.round))]
            work = partial(self._check, target, kind)
            result["check"] = await self._unit(f"check-{kind}", inputs, work)
        return result

    async def _attack(self, target: AttackTarget, kind: str) -> dict[str, Any]:
        name, for_ = attack_name(self.round, kind), attack_digest(self.context, target, kind)
        found = self.context.units.read(name, for_)
        if found is None:
            self.context.begin(name)
            found = await attack(self.context, target, kind, await self.frozen.verifier())
            self.context.units.write(name, for_, found)
        return dict(found)

    async def _check(self, target: AttackTarget, kind: str) -> Any:
        fresh, own = await self._of_attacker(target, kind), await self.own()
        return await self._compute(lambda: check(fresh, own, target.threshold, self._draws))

    async def target(self) -> AttackTarget:
        """The target of this round's attacks, from samples of the round itself."""
        context = self.context
        facts = await self.frozen.facts()
        inputs = self._of(round_set(context, self.round), base_set(context), self._reference_set())
        found = await self._unit("reference", inputs, self._read_target)
        return AttackTarget(self.round, self.frozen.digest, facts["threshold"], **found)

    async def _read_target(self) -> dict[str, Any]:
        own, base, reference = await self.own(), await self.base(), await self._reference()
        weights_BP = bootstrap(self.context, len(reference.pool))
        scores_N = np.concatenate([own.scores_N, base.scores_N, reference.scores_N])
        return {
            "reference": reference_of(reference, weights_BP, CONFIDENCE).plain(),
            "lowest": float(scores_N.min()),
            "highest": float(scores_N.max()),
        }

    async def best_of_n(self) -> Any:
        async def work() -> Any:
            sources = {self.source: await self.own(), BASE_SOURCE: await self.base()}
            return await self._compute(lambda: measures.best_of_n(sources, self.section, self._draws))

        return await self._unit(
            "best-of-n", self._of(round_set(self.context, self.round), base_set(self.context)), work
        )

    async def detection(self) -> Any:
        """Each source of flaws is a separate unit, so a new attacker does not make other results stale. Attackers that
        were trained after the last request for detection are left out until the next request."""
        context, own = self.context, round_set(self.context, self.round)
        threshold = (await self.frozen.facts())["threshold"]

        async def work() -> Any:
            samples = await self.own()
            return await self._compute(lambda: measures.completeness(samples, threshold))

        found = await self._unit("detection", self._of(own), work)
        sources = [await self._flaws(BASE_SOURCE, base_set(context), self.base, threshold)]
        for number in range(self.round + 1):
            earlier = round_set(context, number)
            sources.append(await self._flaws(earlier.name, earlier, partial(self.of_round, number), threshold))
        for kind, target in (await self._attackers()).items():
            fresh, read = final_samples(context, target, kind), partial(self._of_attacker, target, kind)
            with suppress(MissingResult):
                sources.append(await self._flaws(f"attack-{kind}", fresh, read, threshold))
        return {**found, "sources": sources}

    async def _flaws(
        self, name: str, wanted: SampleSet, samples: Callable[[], Awaitable[ScoredRollouts]], threshold: float
    ) -> Any:

        async def work() -> Any:
            own, flaws = await self.own(), await samples()
            return await self._compute(lambda: measures.detection(name, own, flaws, threshold, self._draws))

        inputs = self._of(round_set(self.context, self.round), wanted)
        return await self._unit(f"detection-{name}", inputs, work)

    async def _attackers(self) -> Mapping[str, AttackTarget]:
        """The attackers of this round with stored samples, whether or not attacks are requested now."""
        computing, self.context.computing = self.context.computing, False
        try:
            target = await self.target()
        except MissingResult:
            return {}
        finally:
            self.context.computing = computing
        return {
            kind: target for kind in self._kinds if is_complete(self.context, final_samples(self.context, target, kind))
        }

    async def separability(self) -> Any:
        async def work() -> Any:
            own, tokenizer = await self.own(), self.context.players.base.tokenizer
            read = solutions_read(own.rollouts, self.context.task, tokenizer.encode, tokenizer.end_ids)
            return await self._compute(lambda: measures.separability(own, read, self._draws))

        settings = [measures.NGRAMS, measures.FOLDS]
        return await self._unit(
            "separability", [digest_of(self.context, round_set(self.context, self.round)), settings], work
        )

    async def calibration(self) -> Any:
        async def work() -> Any:
            own, verifier = await self.own(), self.context.experiment.verifier
            return await self._compute(lambda: measures.calibration(own, verifier, self._draws))

        settings = [measures.BINS, measures.FOLDS]
        return await self._unit("calibration", [*self._of(round_set(self.context, self.round)), settings], work)

    async def localisation(self) -> Any:
        async def work() -> Any:
            if not isinstance(self.context.task, LocatesFlaws):
                return {"known": False}
            return await self._localisation(self.context.task)

        settings = [LOCALISED]
        return await self._unit("localisation", [*self._of(round_set(self.context, self.round)), settings], work)

    async def _localisation(self, task: LocatesFlaws) -> Any:
        rollouts = await round_samples(self.context, self.round)
        chosen = flawed(task, rollouts, self.context.test_problems(), LOCALISED)
        encode = self.context.players.base.tokenizer.encode
        prefixes = [
            replace(rollout, id=f"{rollout.id}/{end}", text=text[:end], completion_ids=encode(text[:end]), turns=())
            for rollout, _, _ in chosen
            for text in (rollout.solution,)
            for end in (0, *task.cuts(text))
        ]
        limits = digest(digest_of(self.context, round_set(self.context, self.round)), len(chosen))
        scores_N = await self.frozen.scores(f"prefixes-{self.source}", prefixes, limits)
        lengths = [1 + len(task.cuts(rollout.solution)) for rollout, _, _ in chosen]
        split = [part.tolist() for part in np.split(scores_N, np.cumsum(lengths)[:-1])] if chosen else []
        flaws, places = [flaw for _, flaw, _ in chosen], [place for _, _, place in chosen]
        return await self._compute(lambda: measures.localisation(split, flaws, places, self._draws))

    async def tax(self, baseline: CorrectnessBaseline) -> Any:
        context, wanted = self.context, round_set(self.context, self.round)

        async def work() -> Any:
            rollouts = [r for r in await round_samples(context, self.round) if r.role is Role.HELPFUL]
            of = digest_of(context, wanted)
            policy = await policy_totals(
                context, self.source, of, rollouts, lambda: read_prover(context, self.source)[0]
            )
            totals = [found for _, found in baseline.points]
            estimate = await self._compute(lambda: tax(policy, totals, self._draws, CONFIDENCE))
            ones = np.ones(len(policy.kl_P))
            kls = [found.kl(ones) for found in totals]
            return {
                "policy": distance(self.source, policy, self._draws, CONFIDENCE),
                "tax": estimate.plain(),
                "in_range": min(kls) <= policy.kl(ones) <= max(kls),
                "kl_range": [min(kls), max(kls)],
            }

        return await self._unit("tax", [digest_of(context, wanted), baseline.digest], work)

    async def _compute(self, work: Callable[[], Any]) -> Any:
        """Run `work` in the compute thread, so that the event loop can update the display."""
        return await self.context.players.compute(work)


def solutions_read(
    rollouts: Sequence[Rollout], task: Task, encode: Callable[[str], NDArray[np.int32]], end_ids: Sequence[int]
) -> list[NDArray[np.int32]]:
    """int32 [C] each: the tokens of every solution that its verifier may read, without the end of the text. Concealed
    parts, such as a sneaky solution's certificate, would reveal the role to a style probe. In a dialogue, only what the
    prover wrote: the verifier's question is not its style."""
    if isinstance(task, ConcealsText):
        return [encode(task.shown(rollout.text)) for rollout in rollouts]
    written = [r.completion_ids[r.sampled_mask] if r.turns else r.completion_ids for r in rollouts]
    return [ids[:-1] if len(ids) and ids[-1] in end_ids else ids for ids in written]


def flawed(
    task: LocatesFlaws, rollouts: Sequence[Rollout], pool: Sequence[Problem], most: int
) -> list[tuple[Rollout, int, int]]:
    """At most `most` flaws with a wrong step that the task knows: (solution, step, index of the problem). The first
    flaw of every problem comes first, then the second ones, to cover as many problems as possible."""
    places = {problem.id: place for place, problem in enumerate(pool)}
    seen: dict[str, int] = {}
    found = []
    for rollout in rollouts:
        if not rollout.is_flaw:
            continue
        flaw = task.flaw(pool[places[rollout.problem_id]], rollout.solution)
        if flaw is None or not 0 <= flaw < len(task.cuts(rollout.solution)):
            continue
        turn = seen[rollout.problem_id] = seen.get(rollout.problem_id, -1) + 1
        found.append((turn, places[rollout.problem_id], rollout, flaw))
    found.sort(key=lambda entry: entry[:2])
    return [(rollout, flaw, place) for _, place, rollout, flaw in found[:most]]
