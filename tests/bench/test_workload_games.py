"""The games workload: whole games of Diplomacy, in which each switch changes the way and not the work."""

from __future__ import annotations

import pytest
from bench_runs import load_profile, use

from pvg.bench.runner import ChangedWorkError
from pvg.bench.workloads import WORKLOADS, games
from pvg.errors import ConfigurationError

FEW = ["workload.games=2", "workload.last_year=1901", "rollout.max_tokens=4", "models.threads=1"]
SLOW = [
    "workload.prompts=verbose",
    "workload.together=false",
]


def test_each_switch_changes_the_way_and_not_the_work() -> None:
    def look(workload: object, measured: list[dict[str, float]]) -> tuple[object, dict[str, float], dict[str, float]]:
        return workload.work(), workload.derived(), measured[-1]  # type: ignore[attr-defined]

    fast, *slow = (use("games", FEW + each, look) for each in ([], *([switch] for switch in SLOW), SLOW))
    assert all(work == fast[0] for work, _, _ in slow)
    verbose, one_by_one, all_slow = slow
    assert verbose[2]["tokens_per_decision"] > 5 * fast[2]["tokens_per_decision"]
    assert one_by_one[2]["engine_batch"] < fast[2]["engine_batch"]
    assert one_by_one[2]["tokens_per_decision"] == fast[2]["tokens_per_decision"]
    assert all_slow[1]["prompt_tokens"] == verbose[1]["prompt_tokens"]
    tokens = fast[1]["prompt_tokens"] + 4
    assert fast[2]["tokens_per_decision"] == pytest.approx(tokens)


def test_other_seeds_are_other_games() -> None:
    one, other = (use("games", [*FEW, f"workload.seed={s}"], lambda w, _: w.work()["ends"], samples=0) for s in (0, 1))
    assert one != other


def test_games_that_end_elsewhere_fail_the_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_orders(self: games.RecordedGame, state: object, seat: str, text: str) -> object:
        return self.rules.parse(state.position, seat, "")  # type: ignore[attr-defined]

    monkeypatch.setattr(games.RecordedGame, "parse", no_orders)
    with pytest.raises(ChangedWorkError, match="did not end in the positions"):
        use("games", FEW, lambda *_: None)


def test_servers_are_refused_before_anything_is_opened() -> None:
    with pytest.raises(ConfigurationError, match=r"Set rollout\.engine to torch"):
        WORKLOADS["games"](load_profile("games", ["rollout.engine=vllm"]))
