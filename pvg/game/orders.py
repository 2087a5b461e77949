"""Orders: the groups that prover training and the mint request from the engine, and whose solutions a mint has.

The groups of batch k depend on the seed, the round and k: one endless shuffle of all problems serves both roles.
Refills (`training.dynamic_sampling`) also depend on how many groups of each role are missing and on the attempt.
`MIXTURES` divides a mint among the base prover and the provers of earlier rounds (`game.mixture`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pvg.config.game import Game
from pvg.game.players import Players
from pvg.game.protocols import ProtocolParts, interaction_for
from pvg.game.roles import PromptBuilder, assign_roles
from pvg.game.session import Session
from pvg.game.states import GameState
from pvg.records import BASE_SOURCE, Group, Problem, Role, source_of_round
from pvg.rollout.dispatcher import GroupOrder, SampleCall
from pvg.rollout.gathering import Deadline, training_deadline
from pvg.rollout.interaction import DIRECT, Interaction
from pvg.seeds import generator_for, seed_for
from pvg.tasks.task import Task
from pvg.verifier.scorer import Scorer

if TYPE_CHECKING:
    from torch import Tensor

# Mixtures: the share of the verifier's data that comes from the base prover and from each earlier round's prover.

DECAY = 0.5  # of the shares of older sources, per round
WINDOW = 2


def sources_for_round(round_: int) -> list[str]:
    """The sources that exist when `round_` mints, oldest first."""
    return [BASE_SOURCE, *(source_of_round(earlier) for earlier in range(round_))]


def source_weights(game: Game, sources: Sequence[str]) -> dict[str, float]:
    """Shares by source, summing to 1; sources with share 0 are left out."""
    raw_S = MIXTURES[game.mixture](np.arange(len(sources))[::-1])
    shares_S = raw_S / raw_S.sum()
    return {source: float(share) for source, share in zip(sources, shares_S, strict=True) if share > 0}


def apportion(total: int, shares: dict[str, float]) -> dict[str, int]:
    """Split `total` into whole numbers by `shares`: largest remainder first, older sources first on a tie."""
    exact = {source: total * share for source, share in shares.items()}
    counts = {source: int(amount) for source, amount in exact.items()}
    by_remainder = sorted(exact, key=lambda source: counts[source] - exact[source])
    for source in by_remainder[: total - sum(counts.values())]:
        counts[source] += 1
    return counts


# The unscaled shares of sources by their ages in rounds, oldest first.
MIXTURES: dict[str, Callable[[NDArray[np.int64]], NDArray[Any]]] = {
    "equal": np.ones_like,
    # Stick-breaking: the newest source takes 1 - DECAY, each older one the same share of the rest, the oldest the rest.
    "geometric": lambda ages_S: np.where(ages_S == ages_S[0], 1.0, 1.0 - DECAY) * DECAY**ages_S,
    "window": lambda ages_S: ages_S < WINDOW,
    "latest": lambda ages_S: ages_S == 0,
    "base": lambda ages_S: ages_S == ages_S[0],  # the control for what the provers' solutions teach the verifier
}


@dataclass
class ProverOrders:
    """`groups` of `size` rollouts per batch, of which `sneaky_share` are sneaky. `deadline`, `interaction`,
    `reference`: see `SampleCall`."""

    session: Session
    groups: int
    size: int
    sneaky_share: float
    deadline: Deadline | None = None
    interaction: Interaction[Any] = DIRECT
    reference: bool = False

    def roles(self, number: int) -> list[Role]:
        """The role of each group of batch `number`: the configured shares in random order."""
        generator = generator_for(self.session.seed, self.session.state.round, "prover-roles", number)
        return assign_roles(self.groups, self.sneaky_share, generator)

    def batch(self, number: int, of: Role | None = None) -> list[GroupOrder]:
        """The groups of batch `number`, with roles and problems. `of`: only groups of this role."""
        roles = self.roles(number)
        groups = [group for group, role in enumerate(roles) if of is None or role is of]
        # Both roles share one shuffle, so a group's problem depends on its position among all groups.
        round_ = self.session.state.round
        problems = self.session.draw("prover", number * len(roles), len(roles), f"prover-{round_}")
        orders = [self.session.order(problems[group], roles[group], group, self.size) for group in groups]
        return self._forked(orders, number, of or "")

    def _forked(self, orders: list[GroupOrder], *place: int | str) -> list[GroupOrder]:
        """The orders with the phases that their rollouts share, drawn in equal parts, if the rules want it."""
        if (phases := getattr(self.interaction.rules, "forks", None)) is None:
            return orders
        generator = generator_for(self.session.seed, self.session.state.round, "prover-forks", *place)
        drawn = (generator.permutation(len(orders)) % phases).tolist()
        return [replace(order, shared=shared) for order, shared in zip(orders, drawn, strict=True)]

    def refill(
        self, number: int, attempt: int, counts: Mapping[Role, int], before: Sequence[GroupOrder]
    ) -> list[GroupOrder]:
        """Further groups for batch `number`: `counts` of each role, numbered after the groups `before`. No role gets a
        problem that it already has in `before`; if too few problems remain, there are fewer groups."""
        session, orders = self.session, list[GroupOrder]()
        for role, count in counts.items():
            asked = {order.problem.id for order in before if order.role is role}
            left = [problem for problem in session.problems("prover") if problem.id not in asked]
            place = ("prover-refill", role.value, number, attempt)
            generator = generator_for(session.seed, session.state.round, *place)
            for position in generator.permutation(len(left))[:count].tolist():
                orders.append(session.order(left[position], role, len(before) + len(orders), self.size))
        return self._forked(orders, number, "refill", attempt)

    def call(self, number: int) -> SampleCall:
        """What all rollouts of batch `number` share."""
        round_ = self.session.state.round
        return SampleCall(
            round_,
            source_of_round(round_),
            step=number,
            seed=seed_for(self.session.seed, round_, "train_prover", number),
            prefix=f"{round_:03d}/train_prover/{number:05d}",
            reference=self.reference,
        )

    def plan(self, number: int) -> tuple[list[GroupOrder], SampleCall]:
        return self.batch(number), self.call(number)

    async def sample(
        self, orders: Sequence[GroupOrder], number: int, gate: AbstractAsyncContextManager[None] | None = None
    ) -> list[Group]:
        """Sample and grade groups of batch `number`. `gate`: see `SampleCall`."""
        call = replace(self.call(number), deadline=self.deadline, gate=gate, interaction=self.interaction)
        return await self.session.players.dispatcher.sample(orders, call)


def prover_orders(session: Session, interaction: Interaction[Any] = DIRECT, *, reference: bool = False) -> ProverOrders:
    training = session.training
    return ProverOrders(
        session,
        training.groups,
        session.rollout.group_size,
        session.game.sneaky_share,
        training_deadline(session.rollout.deadline, training),
        interaction,
        reference,
    )


def mint_orders(session: Session, problems: Sequence[Problem], rng: np.random.Generator) -> list[GroupOrder]:
    """One helpful and one sneaky group per problem, together `game.mint_samples` solutions."""
    game = session.game
    orders = []
    for position, problem in enumerate(problems):
        roles = assign_roles(game.mint_samples, game.sneaky_share, rng)
        for role in (Role.HELPFUL, Role.SNEAKY):
            if size := roles.count(role):
                orders.append(session.order(problem, role, 2 * position + (1 - role.number), size))
    return orders


class WeightsReader(Protocol):
    """A run's finished weights: the ledger of a run in progress, or of a run that is only read."""

    @property
    def state(self) -> GameState: ...

    def read_weights(self, name: str) -> tuple[dict[str, Tensor], dict[str, Any]]: ...


class RunWithPlayers(Protocol):
    """What a `Session` and a run under evaluation both have."""

    prompts: PromptBuilder
    players: Players
    task: Task

    @property
    def ledger(self) -> WeightsReader: ...

    @property
    def game(self) -> Game: ...

    @property
    def seed(self) -> int: ...


def interaction_of(session: RunWithPlayers, scorer: Scorer | None) -> Interaction[Any]:
    """What makes a rollout of the game. `scorer`: of the round's verifier; None if there is none yet."""
    tokenizer = session.players.base.tokenizer
    parts = ProtocolParts(session.task, tokenizer, session.prompts.section, scorer, session.seed)
    return interaction_for(session.game.protocol, parts)
