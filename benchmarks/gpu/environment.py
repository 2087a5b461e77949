"""Finds a Python for `make gpu`: with the torch that is installed, and with the other packages that pvg needs.

    python benchmarks/gpu/environment.py FOLDER [--wheels WHEELS] [--any-device]

Prints the path of the Python to use. It never installs torch. If packages are missing, it makes an environment in
FOLDER that sees the packages of the calling Python, and installs the missing ones there, from the folder WHEELS if it
is given, otherwise from the package index. A constraint keeps the version of torch. Exits with 3, after one line, if
there is no GPU or something is missing. Uses the standard library only, because nothing else may be there.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
TESTS = ("pytest", "pytest-timeout", "hypothesis")  # of the extra `dev`, those that tests/gpu imports
EXIT_ENVIRONMENT = 3
LEAST_PYTHON = (3, 11)
FACTS = """
import json, torch
gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
print(json.dumps([torch.__version__, torch.__file__, gpus if torch.cuda.is_available() else []]))
"""


class EnvironmentProblemError(Exception):
    """What is missing, in one line with the remedy."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Find a Python for `make gpu`.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--wheels", type=Path, help="a folder with wheels of the missing packages")
    parser.add_argument("--any-device", action="store_true", help="accept a machine without a GPU")
    arguments = parser.parse_args()
    try:
        version = check_torch(sys.executable, any_device=arguments.any_device)
        print(prepared(arguments.folder, requirements(ROOT), arguments.wheels, version))
    except EnvironmentProblemError as problem:
        print(f"make gpu: {problem}", file=sys.stderr)
        return EXIT_ENVIRONMENT
    return 0


def check_torch(python: str, *, any_device: bool) -> str:
    """The version of that Python's torch. Raises EnvironmentProblemError without it, or without a GPU that it sees."""
    if sys.version_info < LEAST_PYTHON:
        raise EnvironmentProblemError("pvg needs Python 3.11 or newer. Type: make gpu PYTHON=/path/to/python3.11")
    if importlib.util.find_spec("torch") is None:
        raise EnvironmentProblemError(
            f"{python} has no torch, and this command does not install it. Type: make gpu PYTHON=/path/to/a/python"
        )
    version, _, gpus = torch_of(python)
    if not gpus and not any_device:
        raise EnvironmentProblemError(f"there is no GPU here that torch {version} of {python} can use.")
    return version


def torch_of(python: str) -> tuple[str, str, list[str]]:
    """The version and the file of torch in that Python, and the names of the GPUs that it sees."""
    done = subprocess.run([python, "-c", FACTS], capture_output=True, text=True, check=False)
    if done.returncode:
        raise EnvironmentProblemError(f"torch of {python} cannot be imported: {_last_line(done.stderr)}")
    version, file, gpus = json.loads(done.stdout.splitlines()[-1])
    return version, file, gpus


def requirements(root: Path) -> list[str]:
    """What pvg, its extra `lora` and the tests need, such as "numpy>=2.1", except torch."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["lora"]]
    wanted += [line for line in extras["dev"] if _name(line) in TESTS]
    plain = [line.partition(";")[0].strip() for line in wanted]  # the only marker excludes Windows
    return [line for line in plain if _name(line) != "torch"]


def missing(wanted: list[str]) -> list[str]:
    """The requirements that the packages of this Python do not meet."""
    return [line for line in wanted if not _is_met(line)]


def prepared(folder: Path, wanted: list[str], wheels: Path | None, torch_version: str) -> str:
    """A Python that has all of `wanted`: this one, or one in `folder`. Raises EnvironmentProblemError."""
    lacking = missing(wanted)
    if not lacking:
        return sys.executable
    python = folder / "bin" / "python"
    if not python.exists():
        try:
            venv.create(folder, system_site_packages=True, with_pip=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise EnvironmentProblemError(
                f"{sys.executable} lacks {', '.join(lacking)}, and cannot make an environment for them: {error}"
            ) from error
    _show_packages_of_this_python(python)
    constraint = folder / "constraint.txt"
    constraint.write_text(f"torch=={torch_version}\n", encoding="utf-8")
    place = ["--no-index", "--find-links", str(wheels)] if wheels is not None else []
    options = ["--quiet", "--disable-pip-version-check", "--constraint", str(constraint), *place]
    done = subprocess.run(
        [str(python), "-m", "pip", "install", *options, *lacking], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise EnvironmentProblemError(
            f"{sys.executable} lacks {', '.join(lacking)}, and pip could not install them ({_last_line(done.stderr)}). "
            "Without a network, put their wheels into a folder and type: make gpu WHEELS=FOLDER"
        )
    before, after = torch_of(sys.executable)[:2], torch_of(str(python))[:2]
    if before != after:
        raise EnvironmentProblemError(
            f"the environment in {folder} would use torch {after[0]} in place of {before[0]}. Delete the folder."
        )
    return str(python)


def _show_packages_of_this_python(python: Path) -> None:
    """Of a virtual environment, too: `system_site_packages` shows only those of the Python below it."""
    command = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    here = dict.fromkeys(sysconfig.get_path(kind) for kind in ("purelib", "platlib"))
    (Path(done.stdout.strip()) / "packages-of-the-caller.pth").write_text("\n".join(here) + "\n", encoding="utf-8")


def _is_met(requirement: str) -> bool:
    """Knows the forms that pyproject.toml uses: NAME>=1.2 and NAME>=1.2,<3."""
    try:
        have = _numbers(metadata.version(_name(requirement)))
    except metadata.PackageNotFoundError:
        return False
    least, below = re.search(r">=([\d.]+)", requirement), re.search(r"<([\d.]+)", requirement)
    return (least is None or have >= _numbers(least[1])) and (below is None or have < _numbers(below[1]))


def _name(requirement: str) -> str:
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert found is not None, requirement
    return found[0].lower()


def _numbers(version: str) -> tuple[int, ...]:
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return (errors or lines or ["no message"])[-1]


if __name__ == "__main__":
    sys.exit(main())
