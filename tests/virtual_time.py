"""An event loop whose clock jumps to the next timer instead of waiting for it: hours pass in no time, and nothing
depends on how fast the machine is. For work that waits for timers and for other tasks only."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._now = 0.0
        selector = selectors.DefaultSelector()
        select = selector.select

        def jump(timeout: float | None = None) -> Any:
            ready = select(0)
            if not ready and timeout is None:
                raise AssertionError("the loop would wait for ever")
            if not ready and timeout:
                self._now += timeout
            return ready

        selector.select = jump  # type: ignore[method-assign]
        super().__init__(selector)

    def time(self) -> float:
        return self._now


def run_in_virtual_time(work: Coroutine[Any, Any, Any]) -> Any:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(work)
