"""The groups that prover training asks for: one role of a batch is what the whole batch has of that role."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from small_games import changed

from pvg.game.orders import Curriculum, ProverOrders, uncertainty_weights
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


@pytest.mark.parametrize("curriculum", ["none", "prioritised"])
def test_one_role_of_a_batch_draws_for_this_role_alone(curriculum: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Role] = []
    draw = Curriculum.draw

    def counted(
        self: Curriculum, problems: Sequence[Problem], role: Role, count: int, generator: np.random.Generator
    ) -> list[int]:
        drawn.append(role)
        return draw(self, problems, role, count, generator)

    monkeypatch.setattr(Curriculum, "draw", counted)
    orders = prover_orders({"training.curriculum": curriculum})
    for number in range(4):
        everything: list[Any] = orders.batch(number)
        assert len(everything) == 8
        for role in Role:
            drawn.clear()
            assert orders.batch(number, role) == [order for order in everything if order[1] is role]
            assert drawn == ([] if curriculum == "none" else [role])


def test_the_weights_of_a_curriculum_by_hand() -> None:
    assert uncertainty_weights(np.array([0.0, 0.2, 0.5, 1.0, np.nan])) == pytest.approx([0.05, 0.45, 0.55, 0.05, 0.55])
