"""The picture of the display in docs/ is what the display shows, drawn from the records of a run."""

from __future__ import annotations

import html
import re
from pathlib import Path

import pytest
from run_samples import begin, played, step, tell

from benchmarks.pages.draw_pictures import STEP, display_of


def test_the_picture_shows_the_display_at_a_step_of_the_last_round(tmp_path: Path) -> None:
    run = begin(tmp_path)
    for round_ in range(3):
        tell(run, *(step("train_prover", n, round_=round_, helpful_accuracy=n / 90) for n in range(1, 61)))
        ended = {"round": round_, "time": 1060.0, "metrics": {"helpful_accuracy": 0.5}}
        tell(run, {"kind": "phase", "phase": "train_prover", "seconds": 60.0, **ended}, {"kind": "round", **ended})
    text = html.unescape(" ".join(re.findall(r"<text [^>]*>([^<]+)<", display_of(run)))).replace("\xa0", " ")
    assert f"{STEP} /60 steps" in text
    assert "round 2 (3 of 3)" in " ".join(text.split())
    assert f"{100 * STEP / 90:.1f} %" in text
    with pytest.raises(SystemExit, match=f"no prover step {STEP}"):
        display_of(played(tmp_path, "short"))
