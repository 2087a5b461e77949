"""The entry point as a process: what it imports, its exit codes, no escape codes in pipes."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import orjson
import pytest
from bench_samples import one
from calling import ENTRY, LOADING, at_import, fill, pvg, pvg_process
from run_samples import played

from pvg import __version__
from pvg.bench.report import write_report
from pvg_cli.main import GROUPS, PLACES

pytestmark = pytest.mark.slow

HEAVY = ("torch", "ray", "transformers", "pyarrow", "numpy", "pydantic", "safetensors", "aiohttp", "jinja2")
# Each of these takes 3 to 20 ms, for every command and every press of the tab key.
SLOW = ("asyncio", "importlib.metadata", "orjson", "pvg.config", "pvg.reporting", "socket", "tempfile")


def test_help_names_every_command_and_imports_nothing_heavy() -> None:
    program = (
        "import sys\nfrom pvg_cli.main import app\n"
        "try:\n    app(['--help'], prog_name='pvg')\nexcept SystemExit as end:\n    assert end.code == 0\n"
        f"print([name for name in {HEAVY + SLOW!r} if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"
    groups = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("╭")]
    assert groups == ["Options", *(title.split()[0] for title in GROUPS)]
    for command in PLACES:
        assert f" {command} " in done.stdout
    assert pvg("--version").out == f"pvg {__version__}\n"


def test_completion_of_names_imports_nothing_heavy() -> None:
    """The shell starts `pvg` for each press of the tab key."""
    of_typer = ("pydantic", "importlib.metadata", "socket", "tempfile")  # typer loads these to read parameters
    heavy = [name for name in HEAVY + SLOW if name not in of_typer]
    program = (
        "import atexit, sys\n"
        f"atexit.register(lambda: print([n for n in {heavy!r} if n in sys.modules], file=sys.stderr))\n"
        "from pvg_cli.main import app\napp(prog_name='pvg')"
    )
    variables = {"_PVG_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": "pvg train modc"}
    environment = {**os.environ, **variables}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, env=environment)
    assert "modchain" in done.stdout
    assert done.stderr.strip() == "[]"


def test_commands_that_look_load_no_torch() -> None:
    played(Path("runs"))
    write_report(Path("a.json"), one())
    program = """
import sys
import pvg.models
import pvg.reporting.live_page
from pvg_cli.main import app
for line in ("report first --json", "report a.json --json", "bench --json", "bench -p rolout"):
    print(line, app(line.split(), standalone_mode=False), file=sys.stderr)
assert not {"torch", "transformers"} & sys.modules.keys()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "bench -p rolout 2" in done.stderr


def test_no_escape_codes_in_pipes() -> None:
    forcing = ("FORCE_COLOR", "GITHUB_ACTIONS")
    terminal = {key: value for key, value in os.environ.items() if key not in forcing} | {"TERM": "xterm-256color"}
    called = pvg_process("train", "--bogus", env=terminal)
    assert called.err
    assert "\x1b" not in called.out + called.err


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("--help | head -n 1 > /dev/null; echo ${PIPESTATUS[0]}", 0),
        ("runs >&-; echo $?", 0),
        ("train x 2>&-; echo $?", 2),
    ],
)
def test_a_stream_may_be_closed_and_its_reader_may_end(line: str, code: int) -> None:
    """As `head` ends, and as a service manager or a careless script starts a command."""
    done = subprocess.run(["bash", "-c", f"{shlex.join(ENTRY)} {line}"], capture_output=True, text=True, check=False)
    assert done.stdout == f"{code}\n"
    assert not {"Traceback", "Exception", "BrokenPipeError"} & set(done.stderr.replace(":", " ").split())


def reader_and_writer(kind: str) -> tuple[int, int]:
    """The two ends of a stream."""
    if "pipe" in kind:
        return os.pipe()
    if kind == "terminal":
        return os.openpty()
    reader, writer = socket.socketpair()
    writer.send(b"text")
    return reader.detach(), writer.detach()


# `pvg config show --json` that tells its progress twice before it prints its document.
TALKING = """
import os, sys
from pvg_cli import config
from pvg_cli.boundary import say
from pvg_cli.main import app
from pvg_cli.output import stderr
plain = config.emit
def emit(document):
    {before}
    for _ in range(2):
        {progress}("progress")
    plain(document)
config.emit = emit
sys.exit(app(["config", "show", "--json"], prog_name="pvg"))
"""


@pytest.mark.parametrize(
    ("progress", "kind"), [("say", "pipe"), ("stderr().print", "terminal"), ("say", "socket"), ("say", "full pipe")]
)
def test_the_work_goes_on_if_the_reader_of_its_progress_ends(progress: str, kind: str) -> None:
    """Its result is then complete. Before, it stopped, at a pipe with exit code 0, and without its document. A full
    pipe that does not block, as event loops make them, has a reader that reads nothing."""
    reader, writer = reader_and_writer(kind)
    ends = f"os.close({reader})"  # the last copy: here the reader ends
    if kind == "full pipe":
        fill(writer)
        ends = "pass"
    work = TALKING.format(before=ends, progress=progress)
    command = [sys.executable, "-c", work]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=writer, pass_fds=(reader,)) as process:
        if kind != "full pipe":
            os.close(reader)
        os.close(writer)
        out, _ = process.communicate()
    assert process.returncode == 0
    assert orjson.loads(out)["schema_version"] == 1


@pytest.mark.parametrize("module", ["typer", "pvg.config.load"])
def test_an_early_interrupt_is_one_line(module: str) -> None:
    command = at_import(module, "os.kill(os.getpid(), signal.SIGINT)", ["train", "--dry-run", "--json"])
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "Stopped before the work started.\n")
    document = orjson.loads(done.stdout)
    assert (document["schema_version"], document["error"]["exit_code"]) == (1, 130)


def test_a_pipe_is_told_on_stderr_what_loads() -> None:
    """A log of CI must not be silent while torch loads, and stdout stays clean for --json."""
    command = at_import("torch", "os._exit(77)", ("train", "--json", "-s", "cluster=none"))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (77, "", LOADING)
