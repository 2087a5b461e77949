"""`pvg watch` as a user runs it: a separate process, real HTTP, and a run in a third process."""

from __future__ import annotations

import os
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

import orjson
import pytest
from calling import ENTRY
from run_samples import begin, commit, played, rollout, state, step, tell
from shipped_schemas import check_document

from pvg.records import Role
from pvg.store.run_directory import RunDirectory

sys.path.insert(0, str(Path(__file__).parent.parent / "reporting"))
from page_checks import Page

pytestmark = pytest.mark.slow

PATIENCE_S = 300.0


class Watching:
    """A running `pvg watch`."""

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
def watching(name: str, *options: str) -> Iterator[Watching]:
    process = subprocess.Popen(
        [*ENTRY, "watch", name, "--port", "0", "--json", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    try:
        assert process.stdout is not None
        text = ""
        for line in process.stdout:
            text += line
            if line == "}\n":
                break
        assert text, process.stderr.read() if process.stderr else ""
        document = orjson.loads(text)
        check_document(("watch",), document)
        yield Watching(process, document)
    finally:
        process.kill()
        process.communicate()


def test_the_pages_guard_themselves_and_the_server_ends_at_ctrl_c() -> None:
    run = played(Path("runs"))
    before = contents(run)
    with watching("first") as watch:
        assert watch.url.startswith("http://127.0.0.1:")
        port = watch.url.rstrip("/").rpartition(":")[2]
        assert watch.document["forward"].startswith(f"ssh -N -L {port}:127.0.0.1:{port} ")
        with watch.open() as answer:
            policy, tag = answer.headers["Content-Security-Policy"], answer.headers["ETag"]
            page = Page(answer.read().decode())
        assert page.wrong == []
        for directive in ("default-src 'none'", "connect-src 'self'", "frame-ancestors 'none'"):
            assert directive in policy
        assert not [a for _, a in page.tags if {"src", "action"} & a.keys()]
        assert "87.5 %" in page.text
        with watch.open("rollouts.html") as answer:
            assert "form-action 'none'" in answer.headers["Content-Security-Policy"]
            solutions = Page(answer.read().decode())
        assert solutions.wrong == []
        assert "data" in {attributes.get("id") for _, attributes in solutions.tags}
        assert watch.refused(**{"If-None-Match": tag}) == 304
        # A name that an attacker's DNS server points to 127.0.0.1 is refused; a forwarded port is not.
        assert watch.refused(Host="evil.example") == 403
        assert watch.refused("rollouts.html", Host="evil.example:8765") == 403
        assert watch.refused("rollouts.html", Host="[") == 403
        assert watch.get(Host="localhost:9999")
        assert watch.get(Host="[::1]:9999")
        assert watch.refused("..%2fstate.json") == 404
        assert watch.refused("../state.json") == 404
        watch.process.send_signal(signal.SIGINT)
        out, err = watch.process.communicate(timeout=PATIENCE_S)
        assert (watch.process.returncode, out) == (130, "")
        assert f"Watching first: {watch.url}" in err
        assert "Traceback" not in err
        assert err.rstrip().endswith("Stopped. The run is not affected.")
    assert contents(run) == before


def contents(run: RunDirectory) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in run.path.rglob("*") if path.is_file()}


def test_the_page_follows_a_run_that_grows_is_cut_back_and_ends() -> None:
    run = begin(Path("runs"), "growing")
    with watching("growing") as watch:
        watch.until("Nothing is recorded yet.")
        with run.lock():
            tell(run, step("train_prover", 1, helpful_accuracy=0.25))
            assert "25.0 %" in watch.until("step 1 of 60")
            commit(
                run, state("train_prover"), {"mint-00000": [rollout("a", Role.SNEAKY, correct=False, score=1.0)] * 3}
            )
            watch.until("3 stored solutions")
            # As a resume leaves the file: cut back, then continued with other records.
            os.truncate(run.metrics, 0)
            tell(run, *(step("train_prover", number, helpful_accuracy=0.75) for number in (1, 2, 3)))
            assert "75.0 %" in watch.until("step 3 of 60")
            tell(run, {"kind": "run", "time": 2.0, "status": "interrupted", "seconds": 1.0, "budget": {}})
        watch.until("Continue it with: pvg train --resume growing")
