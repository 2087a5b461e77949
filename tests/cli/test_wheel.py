"""`make wheel`: the wheel, installed into an empty environment, plays a game outside of the checkout."""

from __future__ import annotations

import shlex
import subprocess
import sys
import zipfile
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import orjson
import pytest
from calling import SMALL
from packaging.requirements import Requirement

from pvg_cli.main import PLACES

REPOSITORY = Path(__file__).parents[2]

SHIPPED = ("experiments", "profiles", "studies")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    dist = tmp_path_factory.mktemp("dist")
    make = ["make", "-o", ".venv/.installed", "wheel", f"DIST={dist}", f"BIN={Path(sys.executable).parent}"]
    made = subprocess.run(make, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stdout + made.stderr
    (found,) = dist.glob("prover_verifier_games-*.whl")
    return found


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel and what it requires, without any extra: links to the packages of this process."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin/python"]
    subprocess.run([*pip, "install", "--quiet", "--no-deps", "--no-index", wheel], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (own,) = site.glob("prover_verifier_games-*.dist-info")
    for distribution in required(metadata.Distribution.at(own), set()).values():
        for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__", "bin"}:
            if not (site / top).exists():
                (site / top).symlink_to(distribution.locate_file(top))
    return folder


def required(distribution: metadata.Distribution, seen: set[str]) -> dict[str, metadata.Distribution]:
    """The installed distributions that a distribution requires without extras, and those that they require, by name."""
    found = {}
    for requirement in map(Requirement, distribution.requires or ()):
        needed = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if needed and requirement.name not in seen:
            seen.add(requirement.name)
            with suppress(metadata.PackageNotFoundError):  # CUDA libraries on a machine without a GPU
                each = metadata.distribution(requirement.name)
                found |= {requirement.name: each, **required(each, seen)}
    return found


def called(environment: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """A program of the environment, in the test's own folder and without this process's search path."""
    program, *arguments = command
    return subprocess.run(
        [environment / "bin" / program, *arguments],
        env={"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_wheel_has_two_packages_and_every_data_file_of_the_checkout(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = set(archive.namelist())
    top = {name.partition("/")[0] for name in packed}
    assert {name for name in top if not name.endswith(".dist-info")} == {"pvg", "pvg_cli"}
    git = ["git", "ls-files", "pvg", "cli/pvg_cli", *SHIPPED]
    listed = subprocess.run(git, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout.split()
    named = {f"pvg/_{name}" if name.startswith(SHIPPED) else name.removeprefix("cli/") for name in listed}
    assert any(name.endswith(".safetensors") for name in named)
    assert named - packed == set()


def test_the_installed_command_says_how_to_install_more_and_plays_outside_of_the_checkout(environment: Path) -> None:
    program = "import pvg, pvg_cli; from pvg.installation import *; print(pvg.__file__); print(pvg_cli.__file__)"
    done = called(environment, "python", "-c", f"{program}; print(install_extra('lora'))")
    *files, hint = done.stdout.splitlines()
    assert all(Path(path).is_relative_to(environment) for path in files)
    python = str(environment / "bin" / "python")
    assert shlex.split(hint) == [python, "-m", "pip", "install", "prover-verifier-games[lora]"]
    played = called(environment, "pvg", "train", *SMALL, "--json")
    assert played.returncode == 0, played.stderr
    assert orjson.loads(played.stdout)["status"] == "complete"
    assert Path("runs/modchain/state.json").is_file()
    Path("rows.jsonl").write_text('{"question": "7+5?", "solution": "7+5=2;A2"}\n')
    done = called(environment, "python", "-c", EACH, "\n".join([f"{name} --help" for name in PLACES] + list(ACTIONS)))
    codes = orjson.loads(done.stdout.splitlines()[-1])
    assert codes == {line: ACTIONS.get(line, 0) for line in codes}, done.stderr
    assert len(codes) == len(PLACES) + len(ACTIONS)


# The cheapest work of each command, and its exit code.
ACTIONS = {
    "doctor": 0,
    "schemas": 0,
    "config show": 0,
    "check modchain": 0,
    "plan": 0,
    "report modchain": 0,
    "diagnose modchain": 0,
    "runs": 0,
    "score modchain rows.jsonl": 0,
    "evaluate modchain --parts detection": 0,
    "export modchain --player verifier --out v --push some/model": 3,  # the hub does not answer
    "train --dry-run -s models.prover.source=hf:some/model": 3,
    "train -s telemetry.sinks=tensorboard --name no": 3,  # an extra
    "train -s telemetry.sinks=wandb --name no": 3,
    "serve embedded": 2,
    "init mine": 0,
    "bench": 0,
    "compare rows.jsonl rows.jsonl": 2,
}
EACH = """
import contextlib, io, json, os, sys
os.environ.update(HF_TOKEN="hf_none", HF_ENDPOINT="http://127.0.0.1:9")
from pvg_cli.main import app
codes = {}
for line in sys.argv[1].splitlines():
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            codes[line] = app(line.split(), prog_name="pvg", standalone_mode=False) or 0
        except SystemExit as end:
            codes[line] = end.code or 0
print(json.dumps(codes))
"""
