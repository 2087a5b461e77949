"""The groups that prover training asks for: one role of a batch is what the whole batch has of that role."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from small_games import changed

from pvg.game.orders import ProverOrders
from pvg.game.orders import prover_orders as orders_of
from pvg.records import Problem, Role
from pvg.seeds import draw_cyclic

POOL = [Problem(f"p{number}", "1+1?", "2") for number in range(50)]


def prover_orders(settings: dict[str, Any]) -> ProverOrders:
    experiment = changed({"training.groups": 8, **settings})
    session = SimpleNamespace(
        game=experiment.game,
        training=experiment.training,
        rollout=experiment.rollout,
        seed=3,
        state=SimpleNamespace(round=0),
        problems=lambda half: POOL,
        draw=lambda half, start, size, place: [POOL[i] for i in draw_cyclic(len(POOL), start, size, 3)],
        order=lambda problem, role, group, size: (problem.id, role, group),
    )
    return orders_of(session)  # type: ignore[arg-type]


def test_one_role_of_a_batch_has_the_groups_that_the_whole_batch_has_of_it() -> None:
    orders = prover_orders({})
    for number in range(4):
        everything: list[Any] = orders.batch(number)
        assert len(everything) == 8
        for role in Role:
            assert orders.batch(number, role) == [order for order in everything if order[1] is role]
