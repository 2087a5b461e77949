"""How this pvg was installed, and the command that adds a package to it. Every installation hint comes from here.

    install_extra("lora")    # cd /home/me/pvg && .venv/bin/python -m pip install -c constraints.txt -e '.[lora]'
                             # pipx inject prover-verifier-games 'peft>=0.18'

The distribution is called prover-verifier-games, because the name `pvg` belongs to another project on the package
index. The import name and the command are `pvg`.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pvg

DISTRIBUTION = "prover-verifier-games"
CONSTRAINTS = "constraints.txt"
UV_RECEIPT = "uv-receipt.toml"

Manager = Literal["checkout", "pip", "pipx", "uv tool"]


@dataclass(frozen=True, slots=True)
class Installation:
    """`manager`: what installed pvg. `root`: the checkout; otherwise the folder of the environment."""

    manager: Manager
    root: Path
    python: str
    has_pip: bool = True

    def extra(self, name: str) -> str:
        """The command that installs an extra of pvg."""
        if self.manager == "checkout":
            return self._in_checkout("-e", f".[{name}]")
        if self.manager == "pip":
            return self.packages(f"{DISTRIBUTION}[{name}]")
        return self.packages(*requirements(name))

    def packages(self, *names: str, dependencies: bool = True) -> str:
        """The command that installs packages beside pvg. `dependencies`: False leaves out what they depend on."""
        alone = () if dependencies else ("--no-deps",)
        if self.manager == "checkout":
            return self._in_checkout(*alone, *names)
        if self.manager == "pipx":
            return shlex.join(["pipx", "inject", *(f"--pip-args={word}" for word in alone), self.root.name, *names])
        if self.manager == "uv tool" and dependencies:
            # uv removes what an earlier command added, unless this command names it again.
            every = dict.fromkeys([*added_with_uv(self.root), *names])
            with_all = [word for name in every for word in ("--with", name)]
            return shlex.join(["uv", "tool", "install", *with_all, source_of_wheel()])
        return shlex.join([*self._installer(), *alone, *names])

    def _installer(self) -> list[str]:
        if self.has_pip:
            return [self.python, "-m", "pip", "install"]
        return ["uv", "pip", "install", "--python", self.python]

    def _in_checkout(self, *words: str) -> str:
        command = shlex.join([*self._installer(), "-c", CONSTRAINTS, *words])
        there = self.root == Path.cwd()
        return command if there else f"cd {shlex.quote(str(self.root))} && {command}"


def this_installation() -> Installation:
    """The installation that this process runs."""
    root = Path(pvg.__file__).resolve().parent.parent
    prefix = Path(sys.prefix)
    import shutil

    has_pip = importlib.util.find_spec("pip") is not None or shutil.which("uv") is None
    if (root / "pyproject.toml").is_file():
        return Installation("checkout", root, _python(), has_pip)
    if (prefix / "pipx_metadata.json").is_file():
        return Installation("pipx", prefix, _python())
    if (prefix / UV_RECEIPT).is_file():
        return Installation("uv tool", prefix, _python(), has_pip=False)
    return Installation("pip", prefix, _python(), has_pip)


def install_extra(name: str) -> str:
    """The command that installs an extra of pvg in this installation."""
    return this_installation().extra(name)


def install_packages(*names: str, dependencies: bool = True) -> str:
    """The command that installs packages beside pvg in this installation."""
    return this_installation().packages(*names, dependencies=dependencies)


def in_checkout() -> bool:
    """Whether pvg runs from a checkout, which has a Makefile."""
    return this_installation().manager == "checkout"


def requirements(extra: str) -> list[str]:
    """The requirements of an extra, from the metadata of the installed wheel: ["peft>=0.18"]."""
    from importlib import metadata

    marked = re.compile(rf"""extra\s*==\s*["']{re.escape(extra)}["']""")
    found = [need.split(";") for need in metadata.requires(DISTRIBUTION) or [] if marked.search(need)]
    return [re.sub(r"\s*\((.*)\)", r"\1", name).strip() for name, *_ in found]


def added_with_uv(root: Path) -> list[str]:
    """The packages that `uv tool install --with` has added to the environment `root`: ["peft>=0.18"]."""
    import tomllib

    receipt = root / UV_RECEIPT
    listed = tomllib.loads(receipt.read_text(encoding="utf-8"))["tool"]["requirements"] if receipt.is_file() else []
    return [need["name"] + need.get("specifier", "") for need in listed if need["name"] != DISTRIBUTION]


def source_of_wheel() -> str:
    """Where the installed wheel came from: a file, or the name of the distribution on the package index."""
    from importlib import metadata

    import orjson

    text = metadata.distribution(DISTRIBUTION).read_text("direct_url.json")
    url = orjson.loads(text)["url"] if text else DISTRIBUTION
    return str(url).removeprefix("file://")


def python_command() -> str:
    """The interpreter as a user types it in any folder: `python` if the shell finds this one, otherwise its path. Links
    stay, because an environment's interpreter is a link."""
    import shutil

    for name in ("python", "python3"):
        found = shutil.which(name)
        if found and os.path.abspath(found) == os.path.abspath(sys.executable):
            return name
    return os.path.abspath(sys.executable)


def pvg_command() -> list[str]:
    """The words that start pvg in any folder: `pvg` if the shell finds this one, otherwise `PYTHON -m pvg`."""
    import shutil

    found = shutil.which("pvg")
    beside = Path(sys.executable).parent / "pvg"
    here = found is not None and (Path(found).resolve() == beside.resolve())
    return ["pvg"] if here else [python_command(), "-m", "pvg"]


def _python() -> str:
    """The interpreter as a user types it in this folder."""
    here = Path(python_command())
    return str(here.relative_to(Path.cwd()) if here.is_relative_to(Path.cwd()) else here)
