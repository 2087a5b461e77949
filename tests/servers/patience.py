"""Waiting for something that sets no event."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


async def until(true: Callable[[], bool], patience_s: float = 20.0) -> None:
    """Wait for something to be true. Raises TimeoutError."""
    async with asyncio.timeout(patience_s):
        while not true():  # noqa: ASYNC110 - nothing sets an event
            await asyncio.sleep(0.002)
