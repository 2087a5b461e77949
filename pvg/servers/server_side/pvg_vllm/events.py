"""The server's log lines, in the format that `pvg diagnose` reads: `[weights] t=12.345678 event=... key=value`."""

from __future__ import annotations

import sys
import time


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
