"""The page of one run: whole, offline, harmless, and telling what the run's files tell."""

from __future__ import annotations

from pathlib import Path

import pytest
from page_checks import Page, check
from run_samples import begin, commit, played, rollout, state, step, telemetered, tell

from pvg.records import Grade, Role
from pvg.reporting.run_page import collect, markup, run_page
from pvg.reporting.run_summary import read_run
from pvg.reporting.solutions import text_pieces
from pvg.store.run_directory import RunDirectory

NASTY = "</pre><script>alert(1)</script><img src=x onerror=alert(2)>&amp;\x00\u202e"


def page_of(run: RunDirectory, examples: int = 2) -> str:
    return run_page(collect(run, read_run(run), examples))


def test_a_played_run_has_its_sections_and_loads_nothing(tmp_path: Path) -> None:
    page = check(page_of(played(tmp_path)))
    assert {
        "alerts",
        "rounds",
        "learning",
        "scores",
        "solutions",
        "performance",
        "settings",
        "onwards",
    } <= page.anchors()
    assert "87.5 %" in page.text
    assert "It fell." in page.text
    assert "wrong: answer 8, wrong sum in step 1" in page.text


def test_what_a_model_wrote_is_text_and_nothing_else(tmp_path: Path) -> None:
    run = begin(tmp_path, "nasty", name="modchain")
    tell(
        run,
        step("train_prover", 1, loss=1.0, **{NASTY: 1.0}),
        {"kind": "alert", "round": 0, "phase": NASTY, "step": 1, "name": NASTY, "message": NASTY},
        {"kind": "round", "round": 0, "metrics": {"fooled_rate": 0.5}},
    )
    grade = Grade(False, True, NASTY, f"wrong sum in step 1 {NASTY}")
    written = [
        rollout("a", Role.SNEAKY, correct=False, score=1.0, text=NASTY, question=NASTY, reference=NASTY, grade=grade),
        rollout("b", Role.HELPFUL, correct=True, score=1.0, text=NASTY, question=NASTY),
    ]
    commit(run, state("complete", code_version=NASTY, machine=NASTY), {"checkpoint-00000": written})
    text = page_of(run)
    page = check(text)
    assert "alert(1)" in page.text
    assert len(page.scripts) == 1
    assert "alert(1)" not in page.scripts[0]
    assert "\x00" not in text
    assert "\u202e" not in text


def test_device_loop_overlap_and_processes_are_shown(tmp_path: Path) -> None:
    page = check(page_of(telemetered(tmp_path)))
    assert "longest 300 ms" in page.text
    assert "GPU 0 in use, mean 75.0 %" in page.text
    assert "hidden" in page.text
    # Two steps of 1 s, and 1 s outside of them. 0.65 s are outside of all spans. The process has its own budget.
    assert "In steps and phases: 3.0 s, 21.7 % unaccounted." in page.text
    assert "that ended normally: 4.0 s, 12.5 % unaccounted." in page.text


def test_a_warm_start_has_a_curve_of_its_loss(tmp_path: Path) -> None:
    run = begin(tmp_path)
    tell(
        run,
        *(step("warmup", n, loss=4.0 / n) for n in range(1, 9)),
        {"kind": "phase", "round": 0, "phase": "warmup", "seconds": 1.0, "metrics": {"held_out_loss_after": 1.5}},
    )
    page = check(page_of(run))
    assert "Warm start: loss of the demonstrations" in page.text
    batch, held_out = page.charts[0]["series"]
    assert batch["y"][:3] == [4.0, 2.0, 1.3333]
    assert held_out["y"] == [1.5]
    assert "Warm start" not in check(page_of(played(tmp_path, "cold"))).text


def test_a_run_that_has_not_begun_has_a_page(tmp_path: Path) -> None:
    page = check(page_of(begin(tmp_path)))
    assert page.anchors() == {"settings", "onwards"}
    assert "metrics.jsonl is not there yet" in page.text


def test_a_damaged_shard_is_told_and_the_rest_shown(tmp_path: Path) -> None:
    run = played(tmp_path)
    (shard,) = run.rollouts.glob("*/*.arrow")
    shard.write_bytes(shard.read_bytes()[:-1])
    page = check(page_of(run))
    assert "is damaged" in page.text
    assert "87.5 %" in page.text


def test_only_what_differs_from_the_defaults_is_named_first(tmp_path: Path) -> None:
    page = Page(page_of(begin(tmp_path, "odd", seed=3)))
    before, _, after = page.text.partition("The whole configuration")
    settings = before[before.index("Settings with other values than the defaults") :]
    assert "seed 3 0" in settings
    assert "training.steps" not in settings
    assert "[training]" in after


@pytest.mark.parametrize(
    ("text", "note", "wrong"),
    [
        ("7+5=2;2+8=1;A1", "wrong sum in step 2", "2+8=1;"),
        ("7+5=2;2+8=0;A1", "wrong final answer", "A1"),
        ("first\n\nsecond\nthird", "wrong in step 2", "second\n"),
        ("7+5=2;A2", "dropped step", None),
        ("text", "no final answer", None),
        ("", "wrong sum in step 1", None),
    ],
)
def test_the_wrong_step_is_marked_where_the_note_names_it(text: str, note: str, wrong: str | None) -> None:
    written = markup.marked(*text_pieces(text, note), note)
    page = Page(written)
    assert "".join(page.texts) == text
    assert [name for name, _ in page.tags] == (["mark"] if wrong else [])
    if wrong:
        assert f">{wrong}</mark>" in written


def test_a_long_run_has_a_small_page(tmp_path: Path) -> None:
    """3,000 steps in 30 rounds: the charts hold bins of them, and say so."""
    run = begin(tmp_path)
    steps = (divmod(number, 100) for number in range(3000))
    tell(run, *(step("train_prover", n + 1, round_=round_, helpful_accuracy=n / 100, loss=1.0) for round_, n in steps))
    text = page_of(run)
    check(text)
    assert len(text) < 250_000
    assert "Each point is the mean of neighbouring values; the band is their range." in text
