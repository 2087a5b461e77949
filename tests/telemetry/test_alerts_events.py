from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import get_args

import pytest
from full_disk import files_up_to

from pvg.telemetry.alerts import AlertKind, Alerts
from pvg.telemetry.catalogue import REMEDIES
from pvg.telemetry.events import EventLog, format_event

HEALTHY = {
    "helpful_accuracy": 0.8, "sneaky_error_rate": 0.7, "fooled_rate": 0.2,
    "score_gap": 3.0, "zero_signal": 0.1, "truncated": 0.0, "loss": 0.1,
}  # fmt: skip


def names(alerts, metrics):
    return [alert.name for alert in alerts.check(metrics)]


def names_of_many(alerts, metrics, steps=20):
    return [alert.name for _ in range(steps) for alert in alerts.check(metrics)]


def test_collapse_is_told_once_until_it_ends_and_begins_again():
    alerts = Alerts(two_roles=True)
    sick = HEALTHY | {"sneaky_error_rate": 0.0}
    assert names_of_many(alerts, sick) == ["collapse"]
    assert names_of_many(alerts, HEALTHY) == []
    assert names_of_many(alerts, sick) == ["collapse"]


def test_a_collapse_from_the_first_step_is_told_as_one_and_its_remedy_is_a_warm_start():
    sick, well = {"helpful_accuracy": 0.02}, {"helpful_accuracy": 0.9}
    (weak,) = Alerts(two_roles=True).check(HEALTHY | sick)
    fallen = Alerts(two_roles=True)
    fallen.check(HEALTHY | well)
    (fell,) = (alert for _ in range(40) for alert in fallen.check(HEALTHY | sick))
    assert ("first step" in weak.message, "first step" in fell.message) == (True, False)
    assert "[warmup]" in REMEDIES["collapse"]


def test_one_odd_step_is_no_collapse_and_one_role_has_no_sneaky_collapse():
    alerts = Alerts(two_roles=True)
    names(alerts, HEALTHY)
    assert names(alerts, HEALTHY | {"helpful_accuracy": 0.0}) == []
    single = Alerts(two_roles=False)
    assert names(single, {**HEALTHY, "sneaky_error_rate": math.nan}) == []


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"zero_signal": 1.0}, ["zero_signal"]),
        ({"truncated": 0.9}, ["truncation"]),
        ({"truncated": 0.9, "legal": 1.0}, []),
        ({"truncated": 0.9, "legal": 0.3}, ["truncation"]),
        ({"kl": math.inf}, ["nan"]),
        ({"verifier_auc": 0.55}, ["verifier_at_chance"]),
        ({"verifier_auc": 0.56}, []),
        ({"verifier_auc": math.nan}, []),
        ({"debate_contested": 0.05, "debate_both_wrong": 0.9}, ["agreement"]),
        ({"debate_contested": 0.15, "debate_both_wrong": 0.85}, []),
        ({"debate_first_wins": 0.85}, ["seat_bias"]),
        ({"debate_first_wins": 0.15}, ["seat_bias"]),
        ({"debate_first_wins": 0.75}, []),
        ({"debate_concessions": 0.6}, ["concessions"]),
        ({"debate_concessions": 0.4}, []),
        ({"verifier_mcc": -0.9}, []),
    ],
)
def test_one_metric_out_of_its_bounds_is_one_alert(changes, found):
    assert names(Alerts(True), HEALTHY | changes) == found


def test_goodharting_is_a_prover_that_beats_the_verifier():
    alerts = Alerts(two_roles=True)
    assert names(alerts, HEALTHY) == []
    assert "goodharting" in names_of_many(alerts, HEALTHY | {"fooled_rate": 0.95, "score_gap": -1.0})


def test_a_judge_decays_below_its_own_best():
    alerts = Alerts(two_roles=True)
    assert names_of_many(alerts, HEALTHY | {"verifier_mcc": 0.6}) == []
    assert names_of_many(alerts, HEALTHY | {"verifier_mcc": 0.45}) == []
    alerts.load_state(json.loads(json.dumps(alerts.state())))
    assert names_of_many(alerts, HEALTHY | {"verifier_mcc": 0.35}) == ["judge_decay"]


def test_further_steps_on_a_batch_move_no_average_and_end_no_alert():
    alerts, once = Alerts(two_roles=True), Alerts(two_roles=True)
    for metrics in (HEALTHY, HEALTHY | {"sneaky_error_rate": 0.0, "fooled_rate": 0.9}):
        once.check(metrics)
        for new_batch in (True, False, False, False):
            alerts.check(metrics, new_batch=new_batch)
    assert alerts == once
    assert [a.name for a in alerts.check(HEALTHY | {"kl": math.inf}, new_batch=False)] == ["nan"]


def test_alerts_resume_where_they_stood():
    alerts = Alerts(two_roles=True)
    for _ in range(20):
        names(alerts, HEALTHY | {"sneaky_error_rate": 0.0})
    again = Alerts(two_roles=True)
    again.load_state(alerts.state())
    assert names(again, HEALTHY | {"sneaky_error_rate": 0.0}) == []


def test_event_lines_stay_one_line_and_quote_blanks(tmp_path):
    log = EventLog(tmp_path / "events.log")
    log.event("weights", event="client.done", wall_ms=1.23456789, note="two words\nand a line")
    log.event("ckpt", event="write.done")
    log.close()
    first, second = (tmp_path / "events.log").read_text().splitlines()
    assert first.startswith("[weights] t=")
    assert 'wall_ms=1.23457 note="two words\\nand a line"' in first
    assert second.endswith("event=write.done")
    assert format_event("x", a="").endswith('a=""')


def test_a_line_that_a_full_disk_cuts_short_spoils_no_other(tmp_path):
    path = tmp_path / "events.log"
    log = EventLog(path)
    log.event("gen", event="first")
    size = path.stat().st_size
    with pytest.raises(OSError, match="File too large"), files_up_to(size + 20):
        log.event("gen", event="second", note="x" * 100)
    log.event("gen", event="third")
    log.close()
    with path.open("a") as file:
        file.write("[gen] t=1.0 event=of_a_killed")
    again = EventLog(path)
    again.event("gen", event="fourth", why="one\r[gen] line")
    again.close()
    lines = path.read_text().split("\n")
    assert [line.rpartition("event=")[2] for line in lines][:4:2] == ["first", "third"]
    assert lines[-2].endswith('event=fourth why="one\\r[gen] line"')
    assert len(lines) == 6


def test_translators_collapse_by_what_they_do_with_the_solvers_answer():
    """Of a weak solver hardly any answer is right, whatever the translators do."""
    weak = {"helpful_accuracy": 0.05, "sneaky_error_rate": 0.95, "faithful": 0.98, "led_astray": 0.9}
    assert names_of_many(Alerts(two_roles=True), weak) == []
    assert names_of_many(Alerts(two_roles=True), weak | {"led_astray": 0.0}) == ["collapse"]
    assert names_of_many(Alerts(two_roles=True), weak | {"faithful": 0.0}) == ["collapse"]


def test_a_weight_update_that_waits_for_long_is_told_once_per_time_that_it_does():
    alerts = Alerts(two_roles=True)
    waited = HEALTHY | {"weights_queue_s": 1.2}
    (alert,) = alerts.check(waited)
    assert alert.name == "weights_queue"
    assert "waited 1,200 ms" in alert.message
    assert names(alerts, waited) == []
    assert names(alerts, HEALTHY) == []  # a step without an update says nothing about updates
    assert names(alerts, waited) == []
    assert names(alerts, HEALTHY | {"weights_queue_s": 0.9}) == []
    assert names(alerts, waited) == ["weights_queue"]


def runbook() -> dict[str, str]:
    page = (Path(__file__).parent.parent.parent / "docs" / "runbook.md").read_text()
    sections = re.split(r"^## ", page, flags=re.MULTILINE)[1:]
    return {section.splitlines()[0].strip().strip("`"): section for section in sections}


def test_every_kind_of_alert_has_a_remedy_of_one_line_that_the_runbook_has_too():
    assert set(REMEDIES) == set(get_args(AlertKind))
    same = {"loop_lag_p99": "loop_lag_p90"}  # the runbook refers to the other kind
    for kind, remedy in REMEDIES.items():
        assert len(remedy) <= 110
        for setting in re.findall(r"\b[a-z]+(?:\.[a-z_]+)+\b", remedy):
            assert setting in runbook()[same.get(kind, kind)], (kind, setting)
