"""What no command may do, whatever it is given: crash, hang, fill the memory, or accept what cannot work."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import tomli_w
from bounded import MOST_BYTES, BoundedPvg
from calling import pvg
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

ROOT = Path(__file__).parents[2]
BIG = "9" * 5000


@pytest.fixture(autouse=True)
def _hostile_files(empty_folder: Path) -> None:
    """In the working directory: one file of each hostile kind."""
    for name in ("fifo", "fifo.toml", "fifo.py", "fifo.json"):
        os.mkfifo(name)
    texts = {
        "deep.toml": "seed = " + "[" * 5000,
        "tables.toml": "seed = " + "{a = " * 5000,
        "dotted.toml": ".".join(["a"] * 3000) + " = 1",
        "header.toml": "[" + ".".join(["a"] * 3000) + "]\nx = 1",
        "digits.toml": f"seed = {BIG}",
        "beyond.toml": f"[training]\nsteps = {2**63}",
        "nul.toml": 'name = "a\\u0000b"',
        "nulkey.toml": '[task]\nkind = "custom"\n[task.settings]\n"a\\u0000" = 1',
        "nan.toml": '[task]\nkind = "reasoning_gym"\n[task.settings]\nx = nan',
        "date.toml": '[task]\nkind = "reasoning_gym"\n[task.settings]\nx = 1979-05-27',
        "deep.json": "[" * 5000,
        "nested.json": '{"schema_version": 1, "a": ' + "[" * 500 + "]" * 500 + "}",
        "digits.json": '{"schema_version": 1, "repeats": ' + BIG + "}",
        "mine.py": "X = 5\nL = [1]\ndef f(a, b):\n    return a\nasync def g(): ...\n",
    }
    for name, text in texts.items():
        Path(name).write_text(text)


FILES = [
    ("deep.toml", "nested more than"),
    ("tables.toml", "nested more than"),
    ("dotted.toml", "nested more than"),
    ("header.toml", "nested more than"),
    ("digits.toml", "digits"),
    ("beyond.toml", "beyond 64 bits"),
    ("nul.toml", "NUL character"),
    ("nulkey.toml", "NUL character"),
    ("nan.toml", "not a finite number"),
    ("date.toml", "write it as a string"),
    ("fifo.toml", "fifo.toml"),
]


@pytest.mark.parametrize(("file", "says"), FILES, ids=lambda value: value if value.endswith(".toml") else "")
@pytest.mark.parametrize(
    "command",
    [("config", "validate"), ("train", "--dry-run"), ("train", "-s"), ("study",), ("bench", "--profile")],
    ids=" ".join,
)
def test_a_hostile_file_is_a_mistake_of_one_line(command: tuple[str, ...], file: str, says: str) -> None:
    called = pvg(*command, f"@{file}" if command[-1] == "-s" else file)
    assert_refused(
        called.code, called.out, called.err, says if file != "fifo.toml" or "-s" not in command else "regular"
    )


SETTINGS = [
    ("seed=" + "[" * 5000, "nested more than"),
    (".".join(["a"] * 3000) + "=1", "more than 16 parts"),
    (f"seed={BIG}", "digits"),
    (f"seed={2**63}", "beyond 64 bits"),
    (f"training.groups={10**18}", "training.groups"),
    ("task.settings.x=nan", "not a finite number"),
    ("@fifo", "not a regular file"),
    ("@/dev/zero", "not a regular file"),
    ("@.", "cannot be read"),
    ("@~nosuchuser/x", "not a user of this machine"),
    ("@a\0b", "NUL character"),
    ("store.root=a\0b", "NUL character"),
    ("serving.servers=[['x']]", "valid string"),
    ("telemetry.sinks=[[],{}]", "tensorboard"),
    ("evaluate.attacks=[{}]", "goodhart"),
    ("serving.servers=http://host:99999", "address of a server"),
    ("serving.servers=http://host:0", "address of a server"),
    ("serving.servers=http://:8000", "address of a server"),
    ("serving.servers=http://[::1", "address of a server"),
    ("serving.servers=http://a?b", "address of a server"),
    ("serving.servers=http://user:secret@host:80", "address of a server"),
    ("models.device=meta", "not a device"),
    ("models.threads=1000000000", "models.threads"),
    ("telemetry.metrics_port=1e9", "telemetry.metrics_port"),
    ("telemetry.stall_s=0", "telemetry.stall_s"),
    ("telemetry.loop_lag_hz=1e9", "telemetry.loop_lag_hz"),
    ("name=" + "n" * 300, "at most 100 characters"),
    ("evaluate.attack_window=300", "no attack could succeed"),
    ("game.reward=fifo.py:x", "not a regular file"),
    ("game.reward=mine.py:X", "a plain value"),
    ("game.reward=mine.py:L", "a plain value"),
    ("game.reward=mine.py:g", "an async function"),
    ("training.loss=mine.py:f", "must be a PolicyLoss"),
]


@pytest.mark.parametrize(("setting", "says"), SETTINGS, ids=lambda value: value[:40].replace("\0", "NUL"))
def test_a_hostile_setting_is_a_mistake_of_one_line(setting: str, says: str) -> None:
    for command in (("config", "validate"), ("train", "--dry-run")):
        called = pvg(*command, "-s", setting)
        assert_refused(called.code, called.out, called.err, says)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("config", "validate", ""), "no experiment ''"),
        (("train", "--dry-run", "--name", "../x"), "cannot be the name of a run"),
        (("train", "--dry-run", "--name", "n" * 200), "cannot be the name of a run"),
        (("compare", "fifo", "fifo.json"), "not a regular file"),
        (("compare", "/dev/zero", "/dev/zero"), "not a regular file"),
        (("compare", "deep.json", "deep.json"), "not JSON"),
        (("compare", "nested.json", "nested.json"), "recursion limit"),
        (("compare", "digits.json", "digits.json"), "not JSON"),
        (("report", "nested.json"), "recursion limit"),
        (("diagnose", "fifo"), "not a regular file"),
        (("diagnose", "/dev/zero"), "not a regular file"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, tuple) else "",
)
def test_hostile_arguments_are_mistakes_of_one_line(arguments: tuple[str, ...], says: str) -> None:
    called = pvg(*arguments)
    assert_refused(called.code, called.out, called.err, says)


def assert_refused(code: int, out: str, err: str, says: str) -> None:
    assert code == 2, err
    assert out == ""
    assert err.startswith("error: ")
    assert says in err
    assert "Traceback" not in err


def test_a_file_that_is_too_large_is_not_read_whole() -> None:
    with Path("large.toml").open("wb") as file:
        file.truncate(1 << 40)  # sparse: reading it would fill the memory
    called = pvg("config", "validate", "large.toml")
    assert_refused(called.code, called.out, called.err, "larger than 4 MiB")


# --- any bytes at all ----------------------------------------------------------------------------------------------

SHIPPED = [
    path.read_bytes() for kind in ("experiments", "profiles", "studies") for path in (ROOT / kind).glob("*.toml")
]
REPORT = (ROOT / "docs" / "benchmarks" / "e2e.json").read_bytes()

values = st.recursive(
    st.none().map(lambda _: "")
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["modchain", "vllm", "auto", "mine.py:f", "http://127.0.0.1:1", "~", "/dev/zero", "a\0b"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
SECTIONS = ["task", "models", "rollout", "verifier", "training", "game", "serving", "evaluate", "telemetry", "store"]
KEYS = ["kind", "source", "prover", "threads", "groups", "steps", "loss", "reward", "servers", "root", "sinks", "arm"]
tables = st.dictionaries(
    st.sampled_from([*SECTIONS, "name", "seed", "experiment", "workload", "repeats", "arm", "grid", "common", "x"]),
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


contents = st.binary(max_size=200) | st.text(max_size=200).map(str.encode) | tables.map(toml) | mutated(SHIPPED)
reports = st.binary(max_size=200) | mutated([REPORT])
# An argument of a process holds no NUL, and what is not valid text arrives as surrogates.
arguments = st.text(max_size=60) | st.binary(max_size=60).map(os.fsdecode).filter(lambda text: "\0" not in text)


@pytest.fixture(scope="module")
def bounded() -> Iterator[BoundedPvg]:
    with BoundedPvg() as started:
        yield started


def test_the_bounds_of_a_call_are_real() -> None:
    with BoundedPvg() as started:
        called = started("config", "validate", "nosuch")
        assert (called.code, called.err.startswith("error: ")) == (2, True)
        if Path("/proc/self/status").is_file():
            assert 20_000_000 < called.peak_bytes < MOST_BYTES
        assert started("config", "validate").code == 0
    with (
        BoundedPvg(cpu_s=0.001) as started,
        pytest.raises(AssertionError, match=r"took more than 0\.001 s of CPU time"),
    ):
        started("config", "validate")
    with BoundedPvg(wall_s=0.001) as started, pytest.raises(AssertionError, match=r"took more than 0\.001 s$"):
        started("config", "validate")


def survives(bounded: BoundedPvg, *called: str) -> None:
    """Whatever is wrong is the user's mistake or the environment's, never a defect. And it costs little to find out."""
    done = bounded(*called)
    assert done.code in (0, 1, 2, 3), (done.code, done.err)
    assert done.peak_bytes < MOST_BYTES


fuzzed = settings(
    max_examples=max(20, settings.default.max_examples // 5),  # each example is several commands
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@fuzzed
@given(contents)
def test_any_bytes_as_a_settings_file_are_survived(bounded: BoundedPvg, content: bytes) -> None:
    Path("any.toml").write_bytes(content)
    survives(bounded, "config", "validate", "any.toml")
    survives(bounded, "train", "--dry-run", "-s", "@any.toml")
    survives(bounded, "study", "--dry-run", "any.toml")
    # One wrong key more, so that a profile which happens to be valid runs no benchmark.
    survives(bounded, "bench", "--profile", "any.toml", "-s", "training.nosuch=1")


@fuzzed
@given(arguments, st.sampled_from(["training.steps", "task.path", "serving.servers", "models.device", "name", ""]))
def test_any_text_as_a_setting_is_survived(bounded: BoundedPvg, text: str, key: str) -> None:
    survives(bounded, "config", "validate", "-s", text)
    survives(bounded, "train", "--dry-run", "-s", f"{key}={text}")
    survives(bounded, "bench", "--profile", "rollout", "--sweep", f"training.nosuch={text}")


@fuzzed
@given(arguments)
def test_any_text_as_a_name_is_survived(bounded: BoundedPvg, text: str) -> None:
    for command in (("config", "show"), ("train", "--dry-run"), ("report",), ("diagnose",), ("study", "--dry-run")):
        survives(bounded, *command, "--", text)
    survives(bounded, "compare", "--", text, text)
    survives(bounded, "train", "--dry-run", f"--name={text}")


@fuzzed
@given(reports)
def test_any_bytes_as_a_report_or_a_log_are_survived(bounded: BoundedPvg, content: bytes) -> None:
    Path("any.json").write_bytes(content)
    survives(bounded, "compare", "any.json", "any.json")
    survives(bounded, "report", "--no-html", "any.json")
    survives(bounded, "diagnose", "any.json")


@pytest.fixture(scope="module")
def light() -> Iterator[BoundedPvg]:
    """Another process than `bounded`, because none of its calls may load torch."""
    with BoundedPvg() as started:
        yield started


@pytest.mark.parametrize("hostile", ["fifo.toml", "deep.toml", "dotted.toml", "deep.json", "/dev/zero"])
def test_a_process_stays_small_and_ends(light: BoundedPvg, hostile: str) -> None:
    """Below 300 MB of memory and 20 s of CPU time; the kernel ends a process that takes more."""
    for arguments_ in (
        ("config", "validate", hostile),
        ("train", "--dry-run", "-s", f"@{hostile}"),
        ("compare", hostile, hostile),
    ):
        called = light(*arguments_)
        assert called.code == 2, called.err
        assert called.peak_bytes < 300_000_000
