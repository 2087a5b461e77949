"""Environment servers of the tests: in a thread with its own event loop, on a free port of this machine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pvg.records import Grade, Problem, Split
from pvg.servers.environment_server import EnvironmentServer
from pvg.servers.environments import ServedEnvironment


class Sums:
    """A task. The completion must be the sum; "slow" makes grading wait until `release` is set."""

    def __init__(self, count: int = 40) -> None:
        self.count, self.release = count, threading.Event()

    def problems(self, split: Split) -> Iterator[Problem]:
        first = 0 if split == "train" else 1000
        for number in range(first, first + self.count):
            yield Problem(f"sum-{number}", f"{number}+1?", str(number + 1))

    def grade(self, problem: Problem, completion: str) -> Grade:
        if completion == "slow":
            self.release.wait(60.0)
        if completion == "defect":
            raise ZeroDivisionError("of the test")
        correct = completion == problem.answer
        return Grade(correct, completion.isdigit(), completion[:5], "" if correct else "wrong sum")


LOOPS: dict[EnvironmentServer, asyncio.AbstractEventLoop] = {}


def end_sessions(server: EnvironmentServer) -> None:
    """Close all connections, as an idle timeout does."""
    asyncio.run_coroutine_threadsafe(server.end_sessions(), LOOPS[server]).result(60.0)


@contextmanager
def served(
    environment: ServedEnvironment, kind: type[EnvironmentServer] = EnvironmentServer, **options: Any
) -> Iterator[EnvironmentServer]:
    """A server that runs until the block ends."""
    started, loop = threading.Event(), asyncio.new_event_loop()
    found: list[EnvironmentServer] = []
    stop = asyncio.Event()

    async def work() -> None:
        async with kind.start(environment, **options) as server:
            found.append(server)
            started.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(work(),))
    thread.start()
    try:
        assert started.wait(60.0)
        LOOPS[found[0]] = loop
        yield found[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(60.0)
        assert not thread.is_alive(), "the server did not stop"
        loop.close()
