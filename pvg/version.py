"""The version of pvg, with its commit."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pvg


def code_version() -> str:
    """pvg's version, with the git commit if it runs from a checkout."""
    root = Path(pvg.__file__).parent.parent
    if not (root / ".git").exists() or shutil.which("git") is None:
        return pvg.__version__
    command = ["git", "describe", "--always", "--dirty"]
    found = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    return f"{pvg.__version__}+{found.stdout.strip()}" if found.returncode == 0 else pvg.__version__
