"""Orders: the groups that prover training and the mint request from the engine.

The groups of batch k depend on the seed, the round and k, and with `training.curriculum` on its success rates so far.
Refills (`training.dynamic_sampling`) also depend on how many groups of each role are missing and on the attempt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

import numpy as np

from pvg.game.curriculum import Curriculum
from pvg.game.roles import assign_roles
from pvg.game.session import Session
from pvg.records import Group, Problem, Role, Rollout, source_of_round
from pvg.rollout.dispatcher import GroupOrder, SampleCall
from pvg.rollout.episodes import Environment
from pvg.rollout.gathering import training_deadline
from pvg.seeds import generator_for, seed_for


@dataclass
class ProverOrders:
    session: Session
    curriculum: Curriculum | None
    environment: Environment | None = None
    on_group: Callable[[Sequence[Rollout]], None] | None = None  # see `Dispatcher.sample`

    def roles(self, number: int) -> list[Role]:
        """The role of each group of batch `number`: the configured shares in random order."""
        session, round_ = self.session, self.session.state.round
        generator = generator_for(session.seed, round_, "prover-roles", number)
        return assign_roles(session.experiment.training.groups, session.experiment.game.sneaky_share, generator)

    def batch(self, number: int, of: Role | None = None) -> list[GroupOrder]:
        """The groups of batch `number`, with roles and problems. `of`: only groups of this role."""
        roles, size = self.roles(number), self.session.experiment.rollout.group_size
        groups = [group for group, role in enumerate(roles) if of is None or role is of]
        problems = self._problems(number, roles, groups)
        return [
            self.session.order(problem, roles[group], group, size)
            for group, problem in zip(groups, problems, strict=True)
        ]

    def refill(
        self, number: int, attempt: int, counts: Mapping[Role, int], before: Sequence[GroupOrder]
    ) -> list[GroupOrder]:
        """Further groups for batch `number`: `counts` of each role, numbered after the groups `before`. No role gets a
        problem that it already has in `before`; if too few problems remain, there are fewer groups."""
        session, round_ = self.session, self.session.state.round
        pool, size = session.problems("prover"), session.experiment.rollout.group_size
        orders: list[GroupOrder] = []
        for role, count in counts.items():
            asked = {order.problem.id for order in before if order.role is role}
            left = [problem for problem in pool if problem.id not in asked]
            generator = generator_for(session.seed, round_, "prover-refill", role.value, number, attempt)
            for position in self._drawn(left, role, min(count, len(left)), generator):
                orders.append(session.order(left[position], role, len(before) + len(orders), size))
        return orders

    def call(self, number: int) -> SampleCall:
        """What all rollouts of batch `number` share."""
        round_ = self.session.state.round
        return SampleCall(
            round_,
            source_of_round(round_),
            step=number,
            seed=seed_for(self.session.seed, round_, "train_prover", number),
            prefix=f"{round_:03d}/train_prover/{number:05d}",
        )

    def plan(self, number: int) -> tuple[list[GroupOrder], SampleCall]:
        return self.batch(number), self.call(number)

    async def sample(
        self, orders: Sequence[GroupOrder], number: int, gate: AbstractAsyncContextManager[None] | None = None
    ) -> list[Group]:
        """Sample and grade groups of batch `number`. `gate`: see `Dispatcher.sample`."""
        call = self.call(number)
        return await self.session.players.dispatcher.sample(
            orders,
            round_=call.round,
            source=call.source,
            step=call.step,
            seed=call.seed,
            prefix=call.prefix,
            deadline=training_deadline(self.session.experiment),
            gate=gate,
            environment=self.environment,
            on_group=self.on_group,
        )

    def _problems(self, number: int, roles: list[Role], groups: list[int]) -> list[Problem]:
        """The problems of `groups`, from the endless shuffle or the curriculum. `roles`: of all groups of the batch."""
        session, round_ = self.session, self.session.state.round
        if self.curriculum is None:
            # Both roles share one shuffle, so a group's problem depends on its position among all groups.
            problems = session.draw("prover", number * len(roles), len(roles), f"prover-{round_}")
            return [problems[group] for group in groups]
        pool = session.problems("prover")
        drawn: dict[Role, list[int]] = {}
        for role in dict.fromkeys(roles[group] for group in groups):
            generator = generator_for(session.seed, round_, "prover-problems", role.value, number)
            drawn[role] = self._drawn(pool, role, roles.count(role), generator)
        return [pool[drawn[roles[group]].pop()] for group in groups]

    def _drawn(self, problems: Sequence[Problem], role: Role, count: int, generator: np.random.Generator) -> list[int]:
        if self.curriculum is None:
            return [int(position) for position in generator.permutation(len(problems))[:count]]
        return self.curriculum.draw([problem.id for problem in problems], role, count, generator)


def mint_orders(session: Session, problems: Sequence[Problem], rng: np.random.Generator) -> list[GroupOrder]:
    """One helpful and one sneaky group per problem, together `game.mint_samples` solutions."""
    game = session.experiment.game
    orders = []
    for position, problem in enumerate(problems):
        roles = assign_roles(game.mint_samples, game.sneaky_share, rng)
        for role in (Role.HELPFUL, Role.SNEAKY):
            if size := roles.count(role):
                orders.append(session.order(problem, role, 2 * position + (1 - role.number), size))
    return orders
