"""Finds a Python for `make gpu`: with the torch that is installed, and with the other packages that pvg needs.

    python benchmarks/gpu/environment.py FOLDER [--wheels WHEELS] [--any-device]

Prints the path of the Python to use. If packages are missing, it makes an environment in FOLDER that sees the packages
of the calling Python, and installs the missing ones there, from the folder WHEELS if it is given, otherwise from the
package index. Exits with 3, after one line, if there is no GPU or something is missing.

It never installs torch, nor what torch requires: the builder of the installed torch has chosen these. So pip gets
exactly the missing packages (--no-deps), and this script looks again for what these require. It uses the standard
library and pip only, because nothing else may be there.
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

# Prints what is missing. A version counts only for the arguments: their own requirements may be newer or older than
# what works in practice, such as in a container. Nothing below torch is looked at.
UNMET = """
import json, sys
from importlib import metadata
try:
    from packaging.requirements import Requirement
except ImportError:
    from pip._vendor.packaging.requirements import Requirement
found, seen, waiting = [], set(), [(Requirement(line), True) for line in sys.argv[1:]]
while waiting:
    need, direct = waiting.pop(0)
    name = need.name.lower().replace("_", "-")
    if name == "torch" or name in seen:
        continue
    try:
        have = metadata.distribution(need.name)
    except metadata.PackageNotFoundError:
        have = None
    if have is None or direct and not need.specifier.contains(have.version, prereleases=True):
        found.append(f"{need.name}{need.specifier}")
    if have is not None:
        extras = need.extras or {""}
        for line in have.requires or []:
            inner = Requirement(line)
            if inner.marker is None or any(inner.marker.evaluate({"extra": extra}) for extra in extras):
                waiting.append((inner, False))
    seen.add(name)
print(json.dumps(found))
"""
MOST_ROUNDS = 10


class EnvironmentProblemError(Exception):
    """What is missing, in one line with the remedy."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Find a Python for `make gpu`.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--wheels", type=Path, help="a folder with wheels of the missing packages")
    parser.add_argument("--any-device", action="store_true", help="accept a machine without a GPU")
    arguments = parser.parse_args()
    try:
        check_torch(sys.executable, any_device=arguments.any_device)
        print(prepared(arguments.folder, requirements(ROOT, arguments.wheels), arguments.wheels))
    except EnvironmentProblemError as problem:
        print(f"make gpu: {problem}", file=sys.stderr)
        return EXIT_ENVIRONMENT
    return 0


def check_torch(python: str, *, any_device: bool) -> None:
    """Raises EnvironmentProblemError if that Python has no torch, or one that sees no GPU."""
    if sys.version_info < LEAST_PYTHON:
        raise EnvironmentProblemError("pvg needs Python 3.11 or newer. Type: make gpu PYTHON=/path/to/python3.11")
    if importlib.util.find_spec("torch") is None:
        raise EnvironmentProblemError(
            f"{python} has no torch, and this command does not install it. Type: make gpu PYTHON=/path/to/a/python"
        )
    version, _, gpus = torch_of(python)
    if not gpus and not any_device:
        raise EnvironmentProblemError(f"there is no GPU here that torch {version} of {python} can use.")


def torch_of(python: str) -> tuple[str, str, list[str]]:
    """The version and the file of torch in that Python, and the names of the GPUs that it sees."""
    done = subprocess.run([python, "-c", FACTS], capture_output=True, text=True, check=False)
    if done.returncode:
        raise EnvironmentProblemError(f"torch of {python} cannot be imported: {_last_line(done.stderr)}")
    version, file, gpus = json.loads(done.stdout.splitlines()[-1])
    return version, file, gpus


def requirements(root: Path, wheels: Path | None = None) -> list[str]:
    """What pvg, its extra `lora` and the tests need, such as "numpy>=2.1", except torch; and TRL if its wheel is in
    `wheels`."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["lora"]]
    wanted += [line for line in extras["dev"] if _name(line) in TESTS]
    plain = [line.partition(";")[0].strip() for line in wanted]  # the only marker excludes Windows
    # The installed transformers refuses some versions of this one, and no part uses the hub.
    plain = ["huggingface-hub" if _name(line) == "huggingface-hub" else line for line in plain]
    plain += ["trl"] * (wheels is not None and any(wheels.glob("trl-*.whl")))
    return [line for line in plain if _name(line) != "torch"]


def missing(python: str, wanted: list[str]) -> list[str]:
    """What that Python lacks of these requirements, and of what they require in turn. Raises EnvironmentProblemError
    if this cannot be found out."""
    done = subprocess.run([python, "-c", UNMET, *wanted], capture_output=True, text=True, check=False)
    if done.returncode:
        raise EnvironmentProblemError(f"the packages of {python} cannot be listed: {_last_line(done.stderr)}")
    found: list[str] = json.loads(done.stdout)
    return found


def prepared(folder: Path, wanted: list[str], wheels: Path | None) -> str:
    """A Python that has all of `wanted`: this one, or one in `folder`. Raises EnvironmentProblemError."""
    first = lacking = missing(sys.executable, wanted)
    if not lacking:
        return sys.executable
    python = str(folder / "bin" / "python")
    if not Path(python).exists():
        try:
            venv.create(folder, system_site_packages=True, with_pip=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise EnvironmentProblemError(
                f"{sys.executable} lacks {', '.join(lacking)}, and cannot make an environment for them: {error}"
            ) from error
    _show_packages_of_this_python(folder)
    place = ["--no-index", "--find-links", str(wheels)] if wheels is not None else []
    for _ in range(MOST_ROUNDS):
        lacking = missing(python, wanted)
        if not lacking:
            break
        command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", *place]
        done = subprocess.run([*command, *lacking], capture_output=True, text=True, check=False)
        if done.returncode:
            raise EnvironmentProblemError(
                f"{sys.executable} lacks {', '.join(lacking)}, and pip could not install them "
                f"({_last_line(done.stderr)}). Without a network, put their wheels into a folder and type: "
                "make gpu WHEELS=FOLDER"
            )
    else:
        raise EnvironmentProblemError(f"{', '.join(lacking)} is still missing after its installation in {folder}.")
    before, after = torch_of(sys.executable)[:2], torch_of(python)[:2]
    if before != after:
        raise EnvironmentProblemError(
            f"the environment in {folder} would use torch {after[0]} in place of {before[0]}. Delete the folder."
        )
    print(f"make gpu: installed {', '.join(first)} in {folder}", file=sys.stderr)
    return python


def _show_packages_of_this_python(folder: Path) -> None:
    """Of a virtual environment, too: `system_site_packages` shows only those of the Python below it. Also the folders
    that its own .pth files name, because those of a folder that a .pth file names are not read."""
    own = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder)}))
    here = [entry for entry in sys.path if Path(entry).name in ("site-packages", "dist-packages")]
    (own / "packages-of-the-caller.pth").write_text("\n".join(here) + "\n", encoding="utf-8")


def _name(requirement: str) -> str:
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert found is not None, requirement
    return found[0].lower()


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return (errors or lines or ["no message"])[-1]


if __name__ == "__main__":
    sys.exit(main())
