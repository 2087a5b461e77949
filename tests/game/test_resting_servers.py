"""The game gives an engine its rest before every training, so that one on the trainer's GPU can free its memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from small_games import changed, played

from pvg.rollout.torch_engine import TorchEngine
from pvg.training.trainer import Trainer

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("resampled", [0, 1])
def test_the_engine_rests_before_each_training_and_drops_weights_only_if_new_ones_come(
    resampled: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def noting(owner: Any, method: str, said: str) -> None:
        original = getattr(owner, method)

        def noted(*arguments: Any, **options: Any) -> Any:
            seen.append(said + str(options.get("replaced", "")))
            return original(*arguments, **options)

        monkeypatch.setattr(owner, method, noted)

    noting(TorchEngine, "generate", "sample")
    noting(TorchEngine, "load_weights", "publish")
    noting(TorchEngine, "rest", "rest")
    noting(Trainer, "_train_on", "train")
    played(changed({"training.dynamic_sampling": resampled}), tmp_path)
    assert seen.count("train") > 4
    rested, dropped = False, False
    for event in seen:
        assert event != "train" or rested
        assert event != "sample" or not dropped
        rested = event.startswith("rest") or (rested and event == "train")
        dropped = event == "restTrue" or (dropped and event != "publish")
    assert ("restFalse" in seen) == bool(resampled)
