"""`make wheel`: the wheel, installed into an empty environment, plays a game outside of the checkout."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import orjson
import pytest
from test_real_game import SMALL

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
    """An environment with the wheel alone. It finds the other packages in the folders that this process uses."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin/python"]
    subprocess.run([*pip, "install", "--quiet", "--no-deps", "--no-index", wheel], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    shared = [path for path in sys.path if Path(path).name == "site-packages"]
    (site / "shared.pth").write_text("\n".join(shared))
    return folder


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


def pvg(environment: Path, *arguments: str) -> Any:
    done = called(environment, "pvg", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    return orjson.loads(done.stdout)


def test_the_wheel_installs_two_packages_and_none_is_called_cli(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        top = {name.partition("/")[0] for name in archive.namelist()}
    assert {name for name in top if not name.endswith(".dist-info")} == {"pvg", "pvg_cli"}


def test_the_wheel_has_every_data_file_of_the_checkout(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = set(archive.namelist())
    git = ["git", "ls-files", "pvg", "cli/pvg_cli", *SHIPPED]
    listed = subprocess.run(git, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout.split()
    named = {f"pvg/_{name}" if name.startswith(SHIPPED) else name.removeprefix("cli/") for name in listed}
    assert any(name.endswith(".safetensors") for name in named)
    assert named - packed == set()


def test_both_packages_come_from_the_environment(environment: Path) -> None:
    done = called(environment, "python", "-c", "import pvg, pvg_cli; print(pvg.__file__, pvg_cli.__file__)")
    assert all(Path(path).is_relative_to(environment) for path in done.stdout.split())
    assert called(environment, "python", "-c", "import cli").returncode == 1


def test_the_installed_command_finds_its_data_and_says_how_to_install_more(environment: Path) -> None:
    for command in (("pvg", "--help"), ("pvg", "config", "show"), ("pvg", "config", "schema")):
        assert called(environment, *command).returncode == 0
    assert called(environment, "python", "-m", "pvg", "--version").stdout.startswith("pvg ")
    hint = called(environment, "python", "-c", "from pvg.installation import *; print(install_extra('lora'))")
    python = environment / "bin" / "python"
    assert hint.stdout == f"{python} -m pip install 'prover-verifier-games[lora]'\n"


def test_the_installed_command_plays_a_game_outside_of_the_checkout(environment: Path) -> None:
    assert pvg(environment, "train", "--dry-run")["run"] == "runs/modchain"
    assert {"quick"} <= {study["name"] for study in pvg(environment, "study")["studies"]}
    played = pvg(environment, "train", *SMALL)
    assert played["status"] == "complete"
    assert Path("runs/modchain/state.json").is_file()
