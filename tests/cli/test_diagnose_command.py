"""`pvg diagnose` as a user calls it: --fail-on, --json, mistakes."""

from __future__ import annotations

from pathlib import Path

from calling import pvg
from diagnosed_runs import recorded
from run_samples import begin


def test_a_run_by_its_name_or_its_folder() -> None:
    recorded(Path("runs"), "late", lag_s=6.0)
    recorded(Path("runs"), "plain", lag_s=0.06)
    late, plain = pvg("diagnose", "late"), pvg("diagnose", "runs/plain")
    assert (late.code, plain.code) == (0, 0)
    for shown in ("loop-lag", "lag_max_s 6", "rollout.concurrency"):  # the finding, its evidence, the setting
        assert shown in late.out
    assert "Nothing stands out." in plain.out


def test_json_is_one_document_with_everything() -> None:
    recorded(Path("runs"), queue_s=lambda load: 0.02 * load, train_s=6.0, idle_s=5.0)
    document = pvg("diagnose", "first", "--json").document
    (finding,) = document["findings"]
    assert finding["signature"] == "front-end-queue"
    assert len(finding["evidence"]) == 3
    assert document["timings_s"]["weights_queue_s"]["n"] == 40


def test_what_is_found_fails_only_where_that_is_asked_for() -> None:
    recorded(Path("runs"), commit_s=0.5)
    assert pvg("diagnose", "first", "--fail-on", "loop-lag").code == 0
    called = pvg("diagnose", "first", "--fail-on", "loop-lag", "--fail-on", "checkpoint", "--json")
    assert called.code == 1
    assert called.document["findings"]
    assert "checkpoint" in called.err
    assert pvg("diagnose", "first", "--fail-on", "any").code == 1


def test_mistakes() -> None:
    begin(Path("runs"), "fresh")
    recorded(Path("runs"))
    for arguments, named in (
        (("nothing",), "nothing"),
        (("fresh",), "fresh"),
        (("fresh", "--fail-on", "any"), "fresh"),  # nothing was looked at, so nothing has passed
        (("runs",), "runs"),
        (("first", "--fail-on", "check-point"), "checkpoint"),
    ):
        called = pvg("diagnose", *arguments)
        assert called.code == 2
        assert named in called.err
