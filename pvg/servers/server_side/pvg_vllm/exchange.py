"""One HTTP exchange in plain ASGI: JSON request in, JSON reply or refusal out, and its log lines."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

MOST_BODY_BYTES = 1 << 20


class ClientGone(Exception):
    """The client disconnected before its request was complete."""


def header(scope: Scope, name: bytes) -> bytes:
    """The first header of that name (lower case); empty if missing."""
    return next((bytes(value) for key, value in scope["headers"] if key.lower() == name), b"")


def routed_path(scope: Scope) -> str:
    """The path that the application routes by, without a proxy's root path."""
    path, root = str(scope["path"]), str(scope.get("root_path", "")).rstrip("/")
    return path[len(root) :] if root and path.startswith(root + "/") else path


async def read_table(receive: Receive) -> dict[str, Any]:
    """The body as a JSON object. Raises a Refusal (400, 413) for anything else, ClientGone if the client
    disconnects."""
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        body += message.get("body", b"")
        if len(body) > MOST_BODY_BYTES:
            raise Refusal(413, "too_large", f"A body has at most {MOST_BODY_BYTES} bytes.")
        if not message.get("more_body", False):
            break
    try:
        found = json.loads(bytes(body))
    except (ValueError, RecursionError) as error:
        raise Refusal(400, "bad_request", f"The body is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise Refusal(400, "bad_request", f"The body must be a JSON object, not {type(found).__name__}.")
    return found


async def reply(send: Send, status: int, content: Mapping[str, Any]) -> None:
    body = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def refuse(send: Send, refusal: Refusal) -> None:
    await reply(send, refusal.status, {"error": {"code": refusal.code, "message": refusal.message}})


class Refusal(Exception):
    """Becomes a reply of `status` with {"error": {"code", "message"}}."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(f"{status} {code}: {message}")
        self.status = status
        self.code = code
        self.message = message


# --- log lines, in the format that `pvg diagnose` reads: `[weights] t=12.345678 event=... key=value` ------------------


def tell(event: str, **fields: object) -> None:
    """Write one line to stderr in a single write, so that lines of several processes do not mix."""
    parts = ["[weights]", f"t={time.monotonic():.6f}", f"event={event}"]
    parts += [f"{key}={_value(value)}" for key, value in fields.items()]
    sys.stderr.write(" ".join(parts) + "\n")
    sys.stderr.flush()


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    # A trace id comes from outside, so it must not create a new line or field.
    text = str(value).replace("\r", "\\r").replace("\n", "\\n").replace('"', "'")
    return f'"{text}"' if (" " in text or not text) else text
