"""`pvg diagnose` as a user calls it: runs, files, pipes, --fail-on, --json, mistakes."""

from __future__ import annotations

import gzip
from pathlib import Path

from calling import pvg, pvg_process
from event_logs import steps
from run_samples import begin

QUEUED = steps(queue_ms=lambda load: 20.0 * load)


def test_a_run_by_its_name_or_its_folder() -> None:
    for name, lag_ms in (("late", 6000.0), ("plain", 60.0)):
        steps(lag_ms=lag_ms).write(begin(Path("runs"), name).events)
    late, plain = pvg("diagnose", "late"), pvg("diagnose", "runs/plain")
    assert (late.code, plain.code) == (0, 0)
    assert "loop-lag" in late.out
    assert "Nothing stands out." in plain.out


def test_a_finding_shows_its_cost_its_line_and_the_setting() -> None:
    QUEUED.write(Path("events.log"))
    text = pvg("diagnose", "events.log").out
    assert "front-end-queue   54% of the time, 1 min 11 s" in text
    assert "events.log:29" in text
    assert "rollout.concurrency" in text
    assert "With the load of generation" in text


def test_json_is_one_document_with_everything() -> None:
    QUEUED.write(Path("events.log"))
    document = pvg("diagnose", "events.log", "--json").document
    (finding,) = document["findings"]
    assert finding["signature"] == "front-end-queue"
    assert len(finding["evidence"]) == 3
    assert document["timings_ms"]["queue_ms"]["n"] == 40
    assert document["lines"]["malformed"] == 0
    assert document["with_load"]["queue_ms"]["busy"] == 3600.0


def test_what_is_found_fails_only_where_that_is_asked_for() -> None:
    QUEUED.write(Path("events.log"))
    assert pvg("diagnose", "events.log", "--fail-on", "loop-lag").code == 0
    called = pvg("diagnose", "events.log", "--fail-on", "loop-lag", "--fail-on", "front-end-queue", "--json")
    assert called.code == 1
    assert called.document["findings"]
    assert "Found: front-end-queue" in called.err
    assert pvg("diagnose", "events.log", "--fail-on", "any").code == 1


def test_a_mistyped_signature() -> None:
    QUEUED.write(Path("events.log"))
    called = pvg("diagnose", "events.log", "--fail-on", "frontend-queue")
    assert called.code == 2
    assert "Did you mean 'front-end-queue'?" in called.err


def test_standard_input_plain_and_compressed() -> None:
    text = "\n".join(QUEUED.lines) + "\n"
    called = pvg_process("diagnose", "-", "--json", input=text)
    assert called.document["sources"] == ["standard input"]
    assert called.document["findings"][0]["evidence"][0]["where"] == "standard input:29"
    Path("log.gz").write_bytes(gzip.compress(text.encode()))
    with open("log.gz", "rb") as packed:
        again = pvg_process("diagnose", "-", "--json", stdin=packed)
    assert again.document["timings_ms"] == called.document["timings_ms"]


def test_logs_of_the_same_name_are_told_apart() -> None:
    for name in ("a", "b"):
        Path(name).mkdir()
    QUEUED.write(Path("a/events.log"))
    steps().write(Path("b/events.log"))
    (finding,) = pvg("diagnose", "a/events.log", "b/events.log", "--json").document["findings"]
    assert {line["where"].split(":")[0] for line in finding["evidence"]} <= {"a/events.log", "b/events.log"}


def test_mistakes() -> None:
    begin(Path("runs"), "fresh")
    Path("empty.log").touch()
    QUEUED.write(Path("x.log"))
    for arguments, message in (
        (("nothing",), "There is no run 'nothing'"),
        (("fresh",), "has no events.log"),
        (("x.log", "x.log"), "given twice"),
        (("runs",), "runs is a folder of runs, not a run.\nName a run in it, such as fresh"),
    ):
        called = pvg("diagnose", *arguments)
        assert called.code == 2
        assert message in called.err
    empty = pvg("diagnose", "empty.log")
    assert (empty.code, "There is no event in empty.log" in empty.err) == (2, True)
    assert pvg("diagnose", "empty.log", "--fail-on", "any").code == 2  # nothing was looked at, so nothing has passed


def test_text_of_a_log_is_no_markup() -> None:
    log = steps(write_ms=900.0)
    log.lines = [line.replace("label=", "label=[red]x[/nope]") for line in log.lines]
    log.write(Path("events.log"))
    called = pvg("diagnose", "events.log")
    assert called.code == 0
    assert "label=[red]x[/nope]" in called.out.replace("\n", " ")
