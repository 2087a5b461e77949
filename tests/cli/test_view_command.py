"""`pvg view` as a user runs it. The live page: a separate process, real HTTP, and a run in a third process."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from calling import pvg, pvg_serving
from run_samples import begin, commit, played, rollout, state, step, tell

from pvg.records import Role
from pvg.store.run_directory import RunDirectory

sys.path.insert(0, str(Path(__file__).parent.parent / "reporting"))
from page_checks import Page

pytestmark = pytest.mark.slow

PATIENCE_S = 300.0


class Following:
    """A running `pvg view --live`."""

    def __init__(self, process: subprocess.Popen[str], document: dict[str, Any]) -> None:
        self.process, self.document = process, document
        self.url: str = document["url"]

    def get(self, path: str = "", **headers: str) -> str:
        with self.open(path, **headers) as answer:
            return answer.read().decode()

    def open(self, path: str = "", **headers: str) -> Any:
        return urllib.request.urlopen(urllib.request.Request(self.url + path, headers=headers), timeout=PATIENCE_S)

    def refused(self, path: str = "", **headers: str) -> int:
        with pytest.raises(urllib.error.HTTPError) as caught:
            self.get(path, **headers)
        return caught.value.code

    def until(self, words: str) -> str:
        """The text of the page as soon as it contains `words`."""
        began = time.monotonic()
        while words not in (text := Page(self.get()).text):
            assert time.monotonic() - began < PATIENCE_S, text[:2000]
            time.sleep(0.2)
        return text


@contextmanager
def following(name: str) -> Iterator[Following]:
    with pvg_serving("view", name, "--live", "--port", "0", "--json") as served:
        yield Following(*served)


def test_the_newest_run_is_shown_and_its_pages_are_written() -> None:
    assert "pvg train" in pvg("view").err
    begin(Path("runs"), "older")
    run = played(Path("runs"))
    called = pvg("view")
    assert called.code == 0
    assert "first is the newest run in runs" in called.err
    assert "87.5 %" in called.out
    assert run.report.is_file()
    assert run.rollouts_page.is_file()
    assert pvg("view", "--json").document["name"] == "first"
    assert "--live" not in called.err
    with run.lock():
        assert "pvg view first --live" in pvg("view", "first").err
    assert pvg("view", "older", "--json").document["name"] == "older"


def test_a_page_that_pvg_did_not_write_stays_and_the_advice_works() -> None:
    """Of each command that shows runs, the advice is a whole command."""
    played(Path("runs"))
    begin(Path("runs"), "second")
    Path("other").touch()
    Path("runs/first/report.html").symlink_to(Path("other").absolute())
    Path("report.html").write_text("not of pvg")
    for words in ("view first", "report first", "compare first second", "report first second"):
        called = pvg(*words.split())
        assert called.code == 2
        advice = re.findall(r"(pvg report [a-z ]+ --(?:html FILE|no-html))", called.err)
        assert len(advice) == 2
        for line in advice:
            assert pvg(*line.replace("FILE", "mine.html").split()[1:]).code == 0
    assert Path("report.html").read_text() == "not of pvg"
    assert pvg("view", "--port", "0").code == 2


def test_the_pages_guard_themselves_and_the_server_ends_at_ctrl_c() -> None:
    run = played(Path("runs"))
    before = contents(run)
    with following("first") as live:
        assert live.url.startswith("http://127.0.0.1:")
        port = live.url.rstrip("/").rpartition(":")[2]
        assert live.document["forward"].startswith(f"ssh -N -L {port}:127.0.0.1:{port} ")
        with live.open() as answer:
            policy, tag = answer.headers["Content-Security-Policy"], answer.headers["ETag"]
            page = Page(answer.read().decode())
        assert page.wrong == []
        for directive in ("default-src 'none'", "connect-src 'self'", "frame-ancestors 'none'"):
            assert directive in policy
        assert not [a for _, a in page.tags if {"src", "action"} & a.keys()]
        assert "87.5 %" in page.text
        with live.open("rollouts.html") as answer:
            assert "form-action 'none'" in answer.headers["Content-Security-Policy"]
            solutions = Page(answer.read().decode())
        assert solutions.wrong == []
        assert "data" in {attributes.get("id") for _, attributes in solutions.tags}
        assert live.refused(**{"If-None-Match": tag}) == 304
        # A name that an attacker's DNS server points to 127.0.0.1 is refused; a forwarded port is not.
        assert live.refused(Host="evil.example") == 403
        assert live.refused("rollouts.html", Host="evil.example:8765") == 403
        assert live.refused("rollouts.html", Host="[") == 403
        assert live.get(Host="localhost:9999")
        assert live.get(Host="[::1]:9999")
        assert live.refused("..%2fstate.json") == 404
        assert live.refused("../state.json") == 404
        live.process.send_signal(signal.SIGINT)
        out, err = live.process.communicate(timeout=PATIENCE_S)
        assert (live.process.returncode, out) == (130, "")
        assert f"The page of first: {live.url}" in err
        assert "Traceback" not in err
        assert err.rstrip().endswith("Stopped. The run is not affected.")
    assert contents(run) == before


def contents(run: RunDirectory) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in run.path.rglob("*") if path.is_file()}


def test_the_page_follows_a_run_that_grows_is_cut_back_and_ends() -> None:
    run = begin(Path("runs"), "growing")
    with following("growing") as live:
        live.until("Nothing is recorded yet.")
        with run.lock():
            tell(run, step("train_prover", 1, helpful_accuracy=0.25))
            assert "25.0 %" in live.until("step 1 of 60")
            commit(
                run, state("train_prover"), {"mint-00000": [rollout("a", Role.SNEAKY, correct=False, score=1.0)] * 3}
            )
            live.until("3 stored solutions")
            # As a resume leaves the file: cut back, then continued with other records.
            os.truncate(run.metrics, 0)
            tell(run, *(step("train_prover", number, helpful_accuracy=0.75) for number in (1, 2, 3)))
            assert "75.0 %" in live.until("step 3 of 60")
            tell(run, {"kind": "run", "time": 2.0, "status": "interrupted", "seconds": 1.0, "budget": {}})
        live.until("Continue it with: pvg train --resume growing")
