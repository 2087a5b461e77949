"""How this pvg was installed, and the command that adds a package to it. Every installation hint comes from here.

    install_extra("lora")    # cd /home/me/pvg && .venv/bin/python -m pip install -c constraints.txt -e '.[lora]'
                             # /opt/env/bin/python -m pip install 'prover-verifier-games[lora]'

The distribution is called prover-verifier-games, because the name `pvg` belongs to another project on the package
index. The import name and the command are `pvg`.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import pvg

DISTRIBUTION = "prover-verifier-games"
CONSTRAINTS = "constraints.txt"


def in_checkout() -> bool:
    """Whether pvg runs from a checkout, which has a Makefile."""
    return (_root() / "pyproject.toml").is_file()


def usable_gpus(root: Path = Path("/")) -> int:
    """The number of NVIDIA GPUs that torch will find here, without loading it: those that the driver shows and no
    variable hides; 0 if torch is a build for CPUs. `root`: the root of the file system."""
    wsl = (root / "usr/lib/wsl/lib/libcuda.so.1").exists()  # shows no devices
    found = len(list((root / "dev").glob("nvidia[0-9]*"))) or int(wsl)
    if (shown := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        names = [name.strip() for name in shown.split(",")]
        ends = [place for place, name in enumerate(names) if name in ("", "-1")]  # torch ignores what follows
        found = min(found, len(names), *ends)
    builds = {found.version for found in importlib.metadata.distributions(name="torch")}
    return 0 if any("+cpu" in build for build in builds) else found


# Instructions for bfloat16, of the kernel's flags: x86 (matrix tiles, vectors), and Arm.
BFLOAT16 = frozenset({"amx_bf16", "avx512_bf16", "bf16"})


def native_bfloat16(root: Path = Path("/")) -> bool | None:
    """Whether the CPU has instructions for products in bfloat16; None if the system does not tell (not Linux). `root`:
    the root of the file system."""
    try:
        text = (root / "proc/cpuinfo").read_text()
    except OSError:
        return None
    lines = re.findall(r"^(?:flags|Features)\s*:(.*)$", text, flags=re.MULTILINE)
    return all(BFLOAT16 & set(line.split()) for line in lines) if lines else None


def version_of(package: str) -> str | None:
    """The version of an installed package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def install_extra(name: str) -> str:
    """The command that installs an extra of pvg in this installation."""
    return _install("-e", f".[{name}]") if in_checkout() else _install(f"{DISTRIBUTION}[{name}]")


def install_packages(*names: str, dependencies: bool = True) -> str:
    """The command that installs packages beside pvg in this installation. `dependencies`: False leaves out what they
    depend on."""
    return _install(*(() if dependencies else ("--no-deps",)), *names)


def _root() -> Path:
    return Path(pvg.__file__).resolve().parent.parent


def _install(*words: str) -> str:
    """A command of pip, or of uv in an environment without pip. In a checkout with its constraints."""
    python = _python()
    has_pip = importlib.util.find_spec("pip") is not None or shutil.which("uv") is None
    pip = [python, "-m", "pip", "install"] if has_pip else ["uv", "pip", "install", "--python", python]
    if not in_checkout():
        return shlex.join([*pip, *words])
    command = shlex.join([*pip, "-c", CONSTRAINTS, *words])
    return command if _root() == Path.cwd() else f"cd {shlex.quote(str(_root()))} && {command}"


def python_command() -> str:
    """The interpreter as a user types it in any folder: `python` if the shell finds this one, otherwise its path. Links
    stay, because an environment's interpreter is a link."""
    for name in ("python", "python3"):
        found = shutil.which(name)
        if found and os.path.abspath(found) == os.path.abspath(sys.executable):
            return name
    return os.path.abspath(sys.executable)


def pvg_command() -> list[str]:
    """The words that start pvg in any folder: `pvg` if the shell finds this one, otherwise `PYTHON -P -m pvg`."""
    found = shutil.which("pvg")
    beside = Path(sys.executable).parent / "pvg"
    here = found is not None and (Path(found).resolve() == beside.resolve())
    return ["pvg"] if here else [python_command(), "-P", "-m", "pvg"]


def _python() -> str:
    """The interpreter as a user types it in this folder."""
    here = Path(python_command())
    return str(here.relative_to(Path.cwd()) if here.is_relative_to(Path.cwd()) else here)
