from __future__ import annotations

from itertools import product

import pytest

from pvg.errors import StateError
from pvg.game.states import ALLOWED, GameState, Phase


def state(phase=Phase.INIT, round_=0, **fields):
    return GameState("hash", {"seed": 0}, "0.1", phase=phase, round=round_, **fields)


@pytest.mark.parametrize(("before", "after"), list(product(Phase, Phase)))
def test_every_move_that_is_not_allowed_is_refused_with_both_sides_named(before, after):
    round_ = 1 if before is Phase.CHECKPOINT and after in (Phase.MINT, Phase.TRAIN_PROVER) else 0
    if after in ALLOWED[before]:
        assert state(before).enter(after, round_=round_).phase is after
    else:
        with pytest.raises(StateError, match=f"{before.value} of round 0 to {after.value}"):
            state(before).enter(after, round_=round_)


def test_a_round_cannot_be_skipped_or_repeated():
    with pytest.raises(StateError):
        state(Phase.CHECKPOINT).enter(Phase.MINT, round_=0)
    with pytest.raises(StateError):
        state(Phase.CHECKPOINT).enter(Phase.MINT, round_=2)
    with pytest.raises(StateError):
        state(Phase.MINT).enter(Phase.TRAIN_VERIFIER, round_=1)


def test_entering_a_phase_leaves_the_old_phases_progress_behind():
    now = state(Phase.MINT, step=7, checkpoint="old", progress={"a": 1}, shards=({"path": "x"},), version=5)
    entered = now.enter(Phase.TRAIN_VERIFIER)
    assert (entered.step, entered.checkpoint, entered.progress) == (0, None, {})
    assert entered.shards == now.shards
    assert entered.version == 5


def test_a_foreign_state_is_a_clear_error():
    with pytest.raises(StateError, match="cannot read"):
        GameState.from_plain({"phase": "dance"})
