"""`Refusal`: a call that the server rejects, as the client sees it."""

from __future__ import annotations


class Refusal(Exception):
    """Becomes a reply of `status` with {"error": {"code", "message"}}."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(f"{status} {code}: {message}")
        self.status = status
        self.code = code
        self.message = message
