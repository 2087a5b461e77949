"""The key of the control routes: from the environment, or from a file that trainer and servers share.

`PVG_CONTROL_KEY` wins. Without it the key lies in `weights.root`, readable by its owner alone; whoever comes first, a
server or a trainer, makes it.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from pvg.errors import ConfigurationError
from pvg.store.atomic import make_directory

KEY_VARIABLE = "PVG_CONTROL_KEY"
KEY_FILE = "control.key"


def control_key(root: Path) -> str:
    """The key. Raises ConfigurationError for one that no HTTP header can carry, or a file that others may read."""
    if key := os.environ.get(KEY_VARIABLE, ""):
        return _checked(key, f"The environment variable {KEY_VARIABLE}")
    make_directory(root)
    path = root / KEY_FILE
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        if path.stat().st_mode & 0o077:
            raise ConfigurationError(f"{path} may be read by others.", f"chmod 600 {path}") from None
        return _checked(path.read_text(encoding="utf-8").strip(), str(path))
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(key := secrets.token_urlsafe(32))
    return key


def _checked(key: str, where: str) -> str:
    if not key.isascii() or not key.isprintable() or " " in key or not key:
        raise ConfigurationError(
            f"{where} holds no key: it must be printable ASCII without blanks.", "Remove it: a new one will be made."
        )
    return key
