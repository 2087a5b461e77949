"""The version of pvg, with its commit."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pvg

GIT_S = 10.0


def code_version() -> str:
    """pvg's version, with the git commit if it runs from a checkout, or "unknown" if git does not tell it."""
    root = Path(pvg.__file__).parent.parent
    if not (root / ".git").exists() or shutil.which("git") is None:
        return pvg.__version__
    return f"{pvg.__version__}+{git(root, 'describe', '--always', '--dirty') or 'unknown'}"


def git(root: Path, *arguments: str) -> str | None:
    """What git prints; None if it fails, or does not end in GIT_S, as on a disk of the network that hangs."""
    command = ["git", *arguments]
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False, timeout=GIT_S)
    except subprocess.TimeoutExpired:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
