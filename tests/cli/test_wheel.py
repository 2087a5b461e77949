"""`make wheel`: the wheel, installed into an empty environment, plays a game outside of the checkout."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import orjson
import pytest
from calling import SMALL

REPOSITORY = Path(__file__).parents[2]

SHIPPED = ("experiments", "profiles", "studies")

pytestmark = [pytest.mark.slow, pytest.mark.slow]


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
    assert hint == f"{environment / 'bin' / 'python'} -m pip install 'prover-verifier-games[lora]'"
    played = called(environment, "pvg", "train", *SMALL, "--json")
    assert played.returncode == 0, played.stderr
    assert orjson.loads(played.stdout)["status"] == "complete"
    assert Path("runs/modchain/state.json").is_file()
