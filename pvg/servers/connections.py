"""`Connections`: HTTP connections to servers, and the key that the control routes require.

The key comes from `PVG_CONTROL_KEY`, or else from a file in `weights.root` that only its owner can read. The first
process that needs the key, a server or a trainer, creates the file.
"""

from __future__ import annotations

import os
import secrets
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from pvg.config.servers import Serving, Weights
from pvg.errors import ConfigurationError
from pvg.servers.control import ControlClient
from pvg.servers.pool import HttpPool
from pvg.store.atomic import disk_full_explained, make_directory, sync_directory, temporary_beside

KEY_VARIABLE = "PVG_CONTROL_KEY"
KEY_FILE = "control.key"
SHORTEST_KEY = 16


@dataclass(frozen=True, slots=True)
class Connections:
    """HTTP connections to servers: `requests` for their work, `control` for weights and probes. With
    `weights.client = "shared"` both are the same pool."""

    requests: HttpPool
    control: HttpPool
    serving: Serving
    weights: Weights

    @classmethod
    def open(cls, serving: Serving, weights: Weights, connections: int, key: str | None = None) -> Connections:
        """`connections`: of each pool. `key`: None reads the key of the control routes. Sends nothing yet."""
        key = control_key(weights.root) if key is None else key
        requests = HttpPool(connections, key=key)
        if weights.client == "shared":
            return cls(requests, requests, serving, weights)
        return cls(requests, HttpPool(connections, key=key, fresh=True), serving, weights)

    def client(self, url: str) -> ControlClient:
        """A client of the control routes of the server at `url`."""
        timeout_s, probe_timeout_s = self.weights.timeout_s, self.serving.probe_timeout_s
        return ControlClient(url, self.control, timeout_s=timeout_s, probe_timeout_s=probe_timeout_s)

    async def close(self) -> None:
        """A second call does nothing."""
        async with AsyncExitStack() as rest:  # closes the second pool even if the first one fails
            rest.push_async_callback(self.control.close)
            await self.requests.close()


# --- the key ---------------------------------------------------------------------------------------------------------


def control_key(root: Path) -> str:
    """The key. Raises ConfigurationError if it cannot be sent in an HTTP header, or if the file is readable by others
    or cannot be read or created; MissingRequirementError if the disk is full."""
    if key := os.environ.get(KEY_VARIABLE, ""):
        return _checked(key, f"The environment variable {KEY_VARIABLE}")
    path = root / KEY_FILE
    if not path.exists():
        _make(path)
    return _checked(_read(path), str(path))


def _make(path: Path) -> None:
    """Create the key unless another process does so first. The file appears with its full content, because a partial
    key would be a different key."""
    try:
        make_directory(path.parent)
        temporary = temporary_beside(path)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with disk_full_explained(path), open(descriptor, "w", encoding="ascii") as file:
                file.write(secrets.token_urlsafe(32))
                file.flush()
                os.fsync(descriptor)
            os.link(temporary, path)  # unlike a rename, it does not replace a key that another process just created
        finally:
            temporary.unlink()
        sync_directory(path.parent)
    except FileExistsError:
        return
    except OSError as error:
        raise ConfigurationError(
            f"The control key cannot be written to {path}: {error.strerror}.",
            f"Set {KEY_VARIABLE} for the trainer and its servers, or set weights.root to a folder that you own.",
        ) from None


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            mode, content = os.fstat(file.fileno()).st_mode, file.read(1 << 12)
    except OSError as error:
        raise ConfigurationError(
            f"The control key {path} cannot be read: {error.strerror}.",
            f"Run trainer and servers as the same user, or set {KEY_VARIABLE} for both.",
        ) from None
    if mode & 0o077:
        raise ConfigurationError(f"{path} is readable by others.", f"chmod 600 {path}")
    return content.decode(errors="replace").strip()


def _checked(key: str, where: str) -> str:
    if not key.isascii() or not key.isprintable() or " " in key or len(key) < SHORTEST_KEY:
        raise ConfigurationError(
            f"{where} is not a valid key: it must be {SHORTEST_KEY} or more printable ASCII characters without spaces.",
            "Remove it: pvg then creates a new one.",
        )
    return key
