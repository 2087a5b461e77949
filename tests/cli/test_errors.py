"""What a user sees when something is wrong: one line, a remedy, an exit code, and with --json one document."""

from __future__ import annotations

import errno
import os
import runpy
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import orjson
import pytest
import tomli_w
from calling import ENTRY, SMALL, Called, at_import, pvg, pvg_process
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from pvg import extensions
from pvg.config.experiment import Experiment
from pvg.errors import LONGEST_LINE, LONGEST_WORD, MissingRequirementError, PvgError, one_line, visible
from pvg.store.run_directory import RunDirectory
from pvg.store.state import FileStateStore

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
BIG = "9" * 5000
LONG = "x" * 300


def refused(called: Called, code: int, named: str) -> None:
    """The command, called with --json, ended with `code`, and its one-line error names `named`."""
    assert called.code == code, called.err
    error = called.document["error"]
    assert named in error["message"] + error["remedy"]
    assert error["exit_code"] == code
    assert called.err.startswith("error: ")
    assert "Traceback" not in called.err


HOSTILE_FILES = {
    "deep.toml": "seed = " + "[" * 5000,
    "beyond.toml": f"[training]\nsteps = {2**63}",
    "nul.toml": 'name = "a\\u0000b"',
    "deep.json": "[" * 5000,
    "nested.json": '{"schema_version": 1, "a": ' + "[" * 500 + "]" * 500 + "}",
    "mine.py": "X = 5\ndef f(a, b):\n    return a\nasync def g(): ...\n",
}


@pytest.fixture(autouse=True)
def _files(empty_folder: Path) -> None:
    """In the working directory: one file of each hostile kind."""
    for name in ("fifo", "fifo.toml", "fifo.py", "fifo.json"):
        os.mkfifo(name)
    for name, text in HOSTILE_FILES.items():
        Path(name).write_text(text)
    with Path("large.toml").open("wb") as file:
        file.truncate(1 << 40)  # sparse: reading it would fill the memory


# The command line, and the key, file or run that its error names.
MISTAKES: list[tuple[tuple[str, ...], str]] = [
    (("train", "modchian"), "'modchain'"),
    (("train", "-s", "training.step=3"), "'training.steps'"),
    (("train", "-s", "training.steps=many"), "training.steps"),
    (("train", "--dry-run", "-s", "rollout.group_size=1"), "rollout.group_size"),
    (("train", "--name", "../away"), "../away"),
    (("train", "--name", "round-2"), "--name my-round-2"),
    (("train", "--name", "a", "--resume", "b"), "--resume"),
    (("train", "--resume", "gone"), "'gone'"),
    (("report", "gone"), "'gone'"),
    (("report", "nested.json"), "nested.json"),
    (("diagnose", "fifo"), "fifo"),
    (("compare", "deep.json", "deep.json"), "deep.json"),
    (("config", "show", ""), "''"),
    *((("config", "show", name), name) for name in HOSTILE_FILES if name.endswith(".toml")),
    (("config", "show", "fifo.toml"), "fifo.toml"),
    (("config", "show", "large.toml"), "large.toml"),
    (("runs", "list", "--runs", LONG), "too long"),
    (("diagnose", LONG), "too long"),
    (("train", "-s", f"models.prover.source={LONG}"), "too long"),
    (("train", "-s", f"warmup.path={LONG}"), "too long"),
]


@pytest.mark.parametrize(("arguments", "named"), MISTAKES, ids=lambda value: " ".join(value)[:40])
def test_a_mistake_is_one_line_with_exit_code_2(arguments: tuple[str, ...], named: str) -> None:
    refused(pvg(*arguments, "--json"), 2, named)
    assert not Path("runs").exists()


def test_debug_shows_where_a_mistake_was_found() -> None:
    assert "Traceback" in pvg("train", "modchian", "--debug").err


# A setting, and the key or file that its error names.
SETTINGS = [
    (".".join(["a"] * 3000) + "=1", "16 parts"),
    (f"seed={BIG}", "seed"),
    (f"training.groups={10**18}", "training.groups"),
    ("task.settings.x=nan", "task.settings.x"),
    ("@fifo", "fifo"),
    ("@~nosuchuser/x", "nosuchuser"),
    ("@a\0b", "cannot be a path"),
    ("serving.servers=http://host:99999", "serving.servers"),
    ("serving.servers=http://user:secret@host:80", "serving.servers"),
    ("serving.servers=http://..:80", "serving.servers"),
    ("models.device=meta", "models.device"),
    ("name=" + "n" * 300, "name"),
    ("game.reward=fifo.py:x", "fifo.py"),
    ("game.reward=mine.py:g", "mine.py"),
    ("training.loss=mine.py:f", "training.loss"),
]


@pytest.mark.parametrize(("setting", "named"), SETTINGS, ids=lambda value: value[:40].replace("\0", "NUL"))
def test_a_wrong_setting_names_its_key(setting: str, named: str) -> None:
    refused(pvg("config", "show", "-s", setting, "--json"), 2, named)


@pytest.mark.parametrize("arguments", [("train", "--bogus"), ("report",), ("bogus",), ("config", "bogus")])
def test_wrong_usage_is_exit_code_2_and_a_document_with_json(arguments: tuple[str, ...]) -> None:
    plain = pvg(*arguments)
    assert (plain.code, plain.out) == (2, "")
    called = pvg(*arguments, "--json")
    assert (called.code, called.document["error"]["type"]) == (2, "UsageError")


@pytest.mark.parametrize(
    ("option", "key"), [("--seed", "-s seed=VALUE"), ("--learning-rate", "-s training.learning_rate=VALUE")]
)
def test_an_option_that_is_a_setting_is_shown_as_one(option: str, key: str) -> None:
    assert key in pvg("train", option, "3", "--json").document["error"]["message"]
    assert key not in pvg("runs", option, "3", "--json").document["error"]["message"]


def test_samples_without_a_game_are_no_run_to_go_on_with() -> None:
    run = RunDirectory.create(Path("runs"), "drawn", Experiment())
    FileStateStore(run.state).save({"phase": "init", "rounds": [], "shards": [{}]})
    for line in ("train --resume drawn", "score drawn rows.jsonl --out x", "export drawn --player prover --out x"):
        refused(pvg(*line.split(), "--json"), 2, "pvg rollout")


def test_a_file_in_place_of_the_folder_of_runs_and_a_deleted_current_folder_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("runs").touch()
    refused(pvg("train", "--json"), 2, "runs is not a folder")
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    refused(pvg("train", "--json"), 2, "current folder")


@pytest.mark.parametrize(
    ("error", "code", "traceback"),
    [
        (MissingRequirementError("There is no moon.", "pip install moon"), 3, False),
        (KeyboardInterrupt(), 130, False),
        (RuntimeError("a bug of \x1b[31m ours"), 70, True),
        (PermissionError(errno.EACCES, "Permission denied", "runs/secret"), 3, False),
        (OSError(errno.ENOSPC, "No space left on device"), 3, False),
        (OSError(errno.ENAMETOOLONG, "File name too long", "runs/secret"), 2, False),
        (OSError(errno.ELOOP, "Too many levels of symbolic links", "runs/secret"), 2, False),
        (IsADirectoryError(errno.EISDIR, "Is a directory", "runs/secret"), 70, True),
        (PermissionError(errno.EPERM, "not permitted"), 70, True),
    ],
    ids=repr,
)
def test_each_kind_of_error_has_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, traceback: bool
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("pvg_cli.runs.resolve", fail)
    called = pvg("config", "show", "--json")
    assert called.code == code
    assert called.document["error"]["exit_code"] == code
    assert ("Traceback" in called.err) is traceback
    assert called.err.replace("\n", "").isprintable()
    if isinstance(error, OSError) and error.filename:
        assert "runs/secret" in called.err
    if isinstance(error, PvgError):
        assert error.remedy in called.err


def ran_in(module: str, text: str) -> Callable[[], None]:
    return lambda: exec(compile(text, "code", "exec"), {"__name__": module})


def of_user(name: str) -> Callable[[], object]:
    return lambda: extensions.called("a.key", "known", extensions.load("a.key", f"own.py:{name}"))


HANDLING = "import json\ntry:\n    {}\nexcept (OSError, ImportError):\n    json.loads(3)"
FULL_IN_RUST = "def save():\n    raise RuntimeError('I/O error: No space left on device (os error 28)')\nsave()"


@pytest.mark.parametrize(
    ("act", "code", "named"),
    [
        (ran_in("torch", "raise OSError('libcudart.so.12: cannot open shared object file')"), 3, "torch cannot be"),
        (ran_in("scipy.linalg", "raise ValueError('numpy.dtype size changed')"), 3, "scipy cannot be imported"),
        (ran_in("pvg.models", "import no_such_package.inside"), 3, "no_such_package cannot be imported"),
        (ran_in("huggingface_hub", "{}['0']"), 3, "Check the installation"),
        (ran_in("huggingface_hub", "raise ValueError('HF_ANY_TIMEOUT', 'abc')"), 3, "the variable HF_ANY_TIMEOUT."),
        (lambda: runpy.run_path("library.py", None, "some_library"), 3, "Correct the variable ANY_PLACE."),
        (ran_in("pvg.models", "from pvg import no_such_name"), 70, "no_such_name"),
        (ran_in("pvg.models", "int('abc')"), 70, "abc"),
        (ran_in("safetensors.torch", FULL_IN_RUST), 3, "Free some space"),
        (ran_in("pvg.models", "try:\n    import gone\nexcept ImportError:\n    {}['key']"), 70, "key"),
        (ran_in("pvg.models", HANDLING.format("raise OSError(13, '', '/a')")), 70, "JSON"),
        (ran_in("pvg.models", HANDLING.format("import gone")), 70, "JSON"),
        (ran_in("torch", "try:\n    raise OSError(28, 'full')\nexcept OSError:\n    int('x')"), 3, "Free some space"),
        (of_user("wrong"), 2, "own.py, line 3, failed: TypeError"),
        (of_user("ends"), 2, "own.py, line 5, failed: SystemExit: 4"),
        (tempfile.gettempdir, 3, "TMPDIR"),
    ],
)
def test_the_code_that_raised_an_error_decides_whose_it_is(
    monkeypatch: pytest.MonkeyPatch, act: Callable[[], object], code: int, named: str
) -> None:
    Path("own.py").write_text("import sys\ndef wrong():\n    return 1 + ''\ndef ends():\n    sys.exit(4)\n")
    Path("library.py").write_text("import os\nplace, other = os.environ['ANY_PLACE'], '0'\nint(place[1:] + other)\n")
    monkeypatch.setenv("HF_ANY_TIMEOUT", "abc")
    monkeypatch.setenv("ANY_PLACE", "1x")
    monkeypatch.setenv("_".join(["ANY", "NUMBER"]), "0")  # no file has its name
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", list)
    monkeypatch.setattr("pvg_cli.runs.resolve", lambda *_: act())
    called = pvg("config", "show", "--json")
    assert called.code == code, called.err
    error = called.document["error"]
    assert named in error["message"] + error["remedy"]
    assert ("Traceback" in called.err) is (code == 70)


@pytest.mark.parametrize("size", ["wide", "9" * 20])
def test_a_size_that_no_terminal_has_changes_nothing(size: str) -> None:
    sizes = dict.fromkeys(("COLUMNS", "LINES", "TERMINAL_WIDTH"), size)
    called = pvg_process("runs", "--help", env={**os.environ, **sizes})
    assert called.code == 0, called.err
    assert called.out == pvg_process("runs", "--help").out


def test_a_document_is_all_that_stdout_has_whatever_a_users_file_prints() -> None:
    """A user's file prints while it is loaded; the prompt has characters that the terminal's encoding has not."""
    Path("own.py").write_text("print('loaded')\ndef own(outcomes, game):\n    return outcomes.scores_N\n")
    Path("prompt.txt").write_text("H – é {question}", encoding="utf-8")
    given = ("-s", "prompts.helpful.file=prompt.txt", "-s", "prompts=text")
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "LC_ALL": "C.UTF-8"}  # of the words
    shown = subprocess.run(
        [*ENTRY, "config", "show", "modchain", *given], env=ascii_only, capture_output=True, check=True
    )
    assert "H – é" in shown.stdout.decode()
    shown = subprocess.run(
        [*ENTRY, "config", "show", "modchain", *given, "--json"], env=ascii_only, capture_output=True, check=True
    )
    assert "H – é" in shown.stdout.decode()
    assert orjson.loads(shown.stdout)
    failed = subprocess.run([*ENTRY, "report", "ünï–", "--json"], env=ascii_only, capture_output=True, check=False)
    assert failed.returncode == 2
    assert "ünï–" in orjson.loads(failed.stdout)["error"]["message"]
    played = pvg("train", *SMALL, "-s", "game.reward=own.py:own", "--json")
    assert played.code == 0, played.err
    assert played.document["status"] == "complete"
    assert "loaded" in played.err


@pytest.mark.parametrize("variable", ["NO_COLOR", "TERM"])
def test_errors_have_the_colours_of_everything_else(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    assert "\x1b[31m" in pvg("report", "gone").err
    monkeypatch.setenv(variable, "dumb")
    assert "\x1b[31m" not in pvg("report", "gone").err


@pytest.mark.parametrize("sink", ["wandb", "trackio"])
def test_a_tracker_that_does_not_start_leaves_no_run(sink: str) -> None:
    environment = {**os.environ, "WANDB_MODE": "nonsense", "TRACKIO_SERVER_URL": "http://127.0.0.1:9"}
    given = ("train", *SMALL, "--name", "mine", "-s", f"telemetry.sinks={sink}", "-s", "cluster=none", "--json")
    called = pvg_process(*given, env=environment)
    assert called.code == 3, called.err
    assert sink.upper() in called.document["error"]["remedy"]
    assert not Path("runs/mine").exists()


@pytest.mark.parametrize(("number", "code"), [(errno.EACCES, 3), (errno.ENOTDIR, 2)])
def test_an_error_of_a_path_that_the_user_named_is_no_defect(
    number: int, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number), "runs/secret")

    monkeypatch.setattr(Path, "is_file", fail)  # as in looking for the experiment
    refused(pvg("config", "show", "--json"), code, "runs/secret")


FULL = Path("/dev/full")


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
def test_output_that_does_not_fit_is_no_defect() -> None:
    with FULL.open("w") as full:
        done = subprocess.run([*ENTRY, "bench", "--json"], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 3
    assert "No space left" in done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


# --- any text, and any bytes ------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.text(max_size=400) | st.text(alphabet="ab \n\x1b\u202e\udc80", min_size=2000, max_size=5000))
def test_one_line_is_one_printable_line_of_bounded_length(text: str) -> None:
    line = one_line(text)
    assert line.isprintable()
    assert len(line) <= LONGEST_LINE
    assert all(len(word) <= 10 * LONGEST_WORD for word in line.split())  # ten characters for one that is escaped
    assert one_line(line.strip()) == line.strip() or len(line) > LONGEST_WORD
    assert visible(text).replace("\n", "").isprintable()


def test_what_is_printable_and_short_stays_as_it_is() -> None:
    text = "é, 中文, 😀 " + "/a/path" * 40
    assert one_line(text) == text


SHIPPED = [
    path.read_bytes() for kind in ("experiments", "profiles", "studies") for path in (ROOT / kind).glob("*.toml")
]
REPORT = (ROOT / "docs" / "benchmarks" / "e2e.json").read_bytes()

values = st.recursive(
    st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
SECTIONS = ["task", "models", "rollout", "verifier", "training", "game", "serving", "evaluate", "telemetry", "store"]
KEYS = ["kind", "source", "prover", "threads", "groups", "steps", "loss", "reward", "servers", "root", "sinks", "arm"]
tables = st.dictionaries(
    st.sampled_from([*SECTIONS, "name", "seed", "experiment", "workload", "arm", "grid", "common", "x"]),
    values | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=6), values, max_size=4),
    max_size=5,
)


@st.composite
def mutated(draw: st.DrawFn, originals: list[bytes]) -> bytes:
    """A shipped file with a few bytes changed, taken out or put in."""
    data = bytearray(draw(st.sampled_from(originals)))
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, len(data)))
        data[place : place + draw(st.integers(0, 12))] = draw(st.binary(max_size=12))
    return bytes(data)


def toml(table: dict[str, object]) -> bytes:
    return tomli_w.dumps(table).encode("utf-8", "surrogatepass")


fuzzed = settings(
    max_examples=max(20, settings.default.max_examples // 5),  # each example is several commands
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def survives(*arguments: str) -> None:
    """What is wrong is the user's mistake or the environment's, never a defect."""
    called = pvg(*arguments)
    assert called.code in (0, 1, 2, 3), (called.code, called.err)
    assert all(line.isprintable() for line in called.err.split("\n"))
    assert len(called.err) < 4 * LONGEST_LINE


@fuzzed
@given(st.binary(max_size=200) | tables.map(toml) | mutated(SHIPPED))
def test_any_bytes_as_a_settings_file_are_survived(content: bytes) -> None:
    Path("any.toml").write_bytes(content)
    survives("config", "show", "any.toml")
    survives("study", "--dry-run", "any.toml")
    # One wrong key more, so that a profile which happens to be valid runs no benchmark.
    survives("bench", "--profile", "any.toml", "-s", "training.nosuch=1")


@fuzzed
@given(st.binary(max_size=200) | mutated([REPORT]))
def test_any_bytes_as_a_report_or_a_log_are_survived(content: bytes) -> None:
    Path("any.json").write_bytes(content)
    survives("compare", "any.json", "any.json")
    survives("report", "--no-html", "any.json")
    survives("diagnose", "any.json")


@fuzzed
@example("k" * 100_000, "")
@example("\x1b[31mred\x07\r\x0bthree\u202egnp\udc80", "name")
@given(st.text(max_size=60), st.sampled_from(["training.steps", "task.path", "serving.servers", "name", ""]))
def test_any_text_as_an_argument_is_survived(text: str, key: str) -> None:
    survives("config", "show", "-s", f"{key}={text}")
    survives("config", "show", "-s", text)
    survives("report", "--no-html", "--", text)


def test_a_termination_ends_a_command_that_a_script_started_in_the_background() -> None:
    """There SIGINT is ignored, so SIGTERM must not be turned into one."""
    wait = 'signal.signal(signal.SIGINT, signal.SIG_IGN); print("ready", flush=True); time.sleep(300)'
    command = at_import("pvg.config.load", wait, ["config", "show"])
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 130
