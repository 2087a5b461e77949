"""The commands and the code of docs/export.md run as they are written, and an upload says who can see it."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants

sys.path.insert(0, str(Path(__file__).parent.parent / "cli"))
from calling import pvg

import pvg as library
from pvg.export.finished import FinishedRound
from pvg.export.reward_server import RewardServer
from pvg.telemetry.waits import run_to_end

pytestmark = pytest.mark.slow

PAGE = (Path(__file__).parents[2] / "docs" / "export.md").read_text(encoding="utf-8")
URL = "http://127.0.0.1:8000"
QUESTION, SOLUTION = "7+5+8+3+6?", "7+5=2;2+8=0;0+3=3;3+6=9;A9"


def blocks(language: str) -> list[str]:
    return [body for found, body in re.findall(r"^```(\w*)\n(.*?)^```", PAGE, re.M | re.S) if found == language]


@pytest.fixture(scope="module")
def run(folder: Path) -> library.Run:
    return library.Run("mine")


def test_the_export_and_score_sections_run_as_written(
    run: library.Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (row,) = blocks("json")
    Path("rows.jsonl").write_text(row)
    for line in "".join(blocks("")).splitlines():
        words = shlex.split(line)
        if words[1] != "serve":  # the next test starts the server
            called = pvg(*words[1:])
            assert called.code == 0, called.err
    scored = json.loads(Path("scores.jsonl").read_text())
    prover, verifier, _ = blocks("python")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setitem(sys.modules, "pvg", None)
    exec(prover + verifier, {})
    score, accepted = capsys.readouterr().out.split()
    assert float(score) == pytest.approx(scored["score"], abs=1e-4)
    assert accepted == str(scored["accepted"])


def test_the_requests_of_the_serve_section_run_as_written(run: library.Run) -> None:
    assert shutil.which("curl") is not None
    finished = FinishedRound.open(run.directory)

    async def work() -> tuple[list[Any], list[float]]:
        import asyncio

        async with RewardServer.start(finished, 0) as server:
            answers = []
            for line in "".join(blocks("sh")).splitlines():
                done = await asyncio.to_thread(
                    subprocess.run, shlex.split(line.replace(URL, server.url)), capture_output=True, check=True
                )
                answers.append(json.loads(done.stdout))
            names: dict[str, Any] = {}
            exec(blocks("python")[2].replace(URL, server.url), names)
            return answers, await asyncio.to_thread(names["reward"], [QUESTION], [SOLUTION])

    (health, scores, rewards), called = run_to_end(work)
    assert health["status"] == "ok"
    assert rewards["rewards"] == [scores["results"][0]["score"]]
    with run.open_scorer() as scorer:
        assert called == [float(scorer.score_texts(QUESTION, [SOLUTION])[0])]


@pytest.mark.parametrize("public", [False, True])
def test_an_upload_is_private_unless_asked(run: library.Run, monkeypatch: pytest.MonkeyPatch, public: bool) -> None:
    seen: dict[str, Any] = {}

    class Info:
        def __init__(self, private: bool) -> None:
            self.private = private

    class Api:
        def create_repo(self, name: str, **options: Any) -> str:
            seen["created"] = (name, options)
            return f"hub/{name}"

        def model_info(self, name: str) -> Info:
            return Info(seen["created"][1]["private"])

        def upload_folder(self, **options: Any) -> None:
            print("uploading", file=sys.stderr)
            seen["files"] = sorted(path.name for path in Path(options["folder_path"]).iterdir())

    monkeypatch.setenv("HF_TOKEN", "hf_test")
    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    options = ["--player", "prover", "--out", "pushed", "--overwrite", "--push", "me/mine", "--json"]
    called = pvg("export", "mine", *options, *(["--public"] if public else []))
    assert called.code == 0, called.err
    assert seen["created"] == ("me/mine", {"repo_type": "model", "private": not public, "exist_ok": True})
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= set(seen["files"])
    notice = called.err.index("contain the prompt of each role for a problem of the run's data")
    assert notice < called.err.index("uploading")
    assert ("everyone" if public else "you and the members of the organisation only") in called.err
    assert called.document["url"] == "hub/me/mine"
    assert "AutoModelForCausalLM.from_pretrained('me/mine')" in Path("pushed/README.md").read_text()


def test_an_upload_without_a_token_is_refused_before_the_export(
    run: library.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    called = pvg("export", "mine", "--player", "prover", "--out", "never", "--push", "me/mine")
    assert called.code == 3
    assert "Set HF_TOKEN" in called.err
    assert not Path("never").exists()


def test_a_hub_that_refuses_is_one_sentence(run: library.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    class Refuses(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(403)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Not on stderr."""

    hub = ThreadingHTTPServer(("127.0.0.1", 0), Refuses)
    threading.Thread(target=hub.serve_forever, args=(0.02,), daemon=True).start()
    try:
        monkeypatch.setenv("HF_TOKEN", "hf_test")
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{hub.server_port}")
        called = pvg("export", "mine", "--player", "prover", "--out", "refused", "--push", "me/mine")
    finally:
        hub.shutdown()
        hub.server_close()
    assert called.code == 3
    assert "The upload to me/mine failed" in called.err
    assert (Path("refused") / "model.safetensors").is_file()
