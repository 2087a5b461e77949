"""Servers of OpenEnv's protocol for tests: in a thread with its own event loop, on a free port of this machine.

An environment is an object with `episode()`, which begins a session. A session has `reset(data)` and `step(action)`;
both give {"observation": ..., "reward": ..., "done": ...} or raise `Refusal`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import orjson
from aiohttp import WSMsgType, web

from pvg.records import Grade, Problem, Split


class Refusal(Exception):
    """An error reply. `code`: one of OpenEnv's."""

    def __init__(self, message: str, code: str = "VALIDATION_ERROR") -> None:
        super().__init__(message)
        self.code = code


class Sums:
    """A task. The completion must be the sum."""

    def __init__(self, count: int = 40) -> None:
        self.count = count

    def problems(self, split: Split) -> Iterator[Problem]:
        first = 0 if split == "train" else 1000
        for number in range(first, first + self.count):
            yield Problem(f"sum-{number}", f"{number}+1?", str(number + 1))

    def grade(self, problem: Problem, completion: str) -> Grade:
        correct = completion == problem.answer
        return Grade(correct, completion.isdigit(), completion[:5], "" if correct else "wrong sum")


class TaskEnvironment:
    """A task as episodes of one step. `seed` chooses the problem, counted in a circle."""

    def __init__(self, task: Any) -> None:
        self.task, self.problems = task, [*task.problems("test"), *task.problems("train")]
        self.problem: Problem

    def episode(self) -> TaskEnvironment:
        return TaskEnvironment(self.task)

    def reset(self, data: Mapping[str, Any]) -> dict[str, Any]:
        self.problem = self.problems[data["seed"] % len(self.problems)]
        return {"observation": {"prompt": self.problem.question}, "reward": None, "done": False}

    def step(self, action: Mapping[str, Any]) -> dict[str, Any]:
        grade = self.task.grade(self.problem, action["message"])
        seen = {"well_formed": grade.well_formed, "answer": grade.answer or "", "note": grade.note}
        return {"observation": {"prompt": "", **seen}, "reward": float(grade.correct), "done": True}


class Counting:
    """A game of four moves: the prompt has the seed and the sum so far, the reward of a move is its number. The text
    "boom" fails. Without `seeded` the prompts depend on all moves of all sessions."""

    moves = 0  # of all sessions

    def __init__(self, seeded: bool = True) -> None:
        self.seeded = seeded

    def episode(self) -> Counting:
        return Counting(self.seeded)

    def reset(self, data: Mapping[str, Any]) -> dict[str, Any]:
        self.seed, self.sum, self.left = data.get("seed", 0), 0, 4
        return self.reply(None)

    def step(self, action: Mapping[str, Any]) -> dict[str, Any]:
        if action["message"] == "boom":
            raise Refusal("division by zero", "EXECUTION_ERROR")
        Counting.moves += 1
        self.left -= 1
        self.sum += int(action["message"])
        return self.reply(float(action["message"]))

    def reply(self, reward: float | None) -> dict[str, Any]:
        prompt = f"{self.seed}: {self.sum}" if self.seeded else f"{Counting.moves}"
        return {"observation": {"prompt": prompt}, "reward": reward, "done": self.left == 0}


class EnvironmentServer:
    """`url`: its address. `sessions`: the number of open sessions."""

    def __init__(self, environment: Any, most_sessions: int = 64) -> None:
        self.url = ""
        self.environment, self.most_sessions = environment, most_sessions
        self.opened: set[web.WebSocketResponse] = set()
        self.loop = asyncio.new_event_loop()

    @property
    def sessions(self) -> int:
        return len(self.opened)

    def end_sessions(self) -> None:
        """Close all connections, as an idle timeout does."""
        asyncio.run_coroutine_threadsafe(self.close(), self.loop).result(60.0)

    async def close(self) -> None:
        await asyncio.gather(*(socket.close() for socket in self.opened), return_exceptions=True)

    async def session(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(timeout=2.0)
        await socket.prepare(request)
        if self.sessions >= self.most_sessions:
            await socket.send_str(error("CAPACITY_REACHED", f"All {self.most_sessions} sessions are in use."))
            return socket
        self.opened.add(socket)
        try:
            await self.serve(socket)
        finally:
            self.opened.discard(socket)
        return socket

    async def serve(self, socket: web.WebSocketResponse) -> None:
        episode = self.environment.episode()
        async for message in socket:
            request = orjson.loads(message.data) if message.type is WSMsgType.TEXT else {}
            if request.get("type") not in ("reset", "step"):
                return
            try:
                reply = getattr(episode, request["type"])(request["data"])
            except Refusal as refusal:
                await socket.send_str(error(refusal.code, str(refusal)))
            else:
                await socket.send_str(orjson.dumps({"type": "observation", "data": reply}).decode())


def error(code: str, message: str) -> str:
    return orjson.dumps({"type": "error", "data": {"message": message, "code": code}}).decode()


@contextmanager
def served(
    environment: Any, most_sessions: int = 64, kind: type[EnvironmentServer] = EnvironmentServer
) -> Iterator[Any]:
    """A server that runs until the block ends."""
    server, started, stop = kind(environment, most_sessions), threading.Event(), asyncio.Event()

    async def work() -> None:
        app = web.Application()
        app.add_routes([web.get("/ws", server.session)])
        runner = web.AppRunner(app, shutdown_timeout=1.0, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        started.set()
        await stop.wait()
        await server.close()
        await runner.cleanup()

    thread = threading.Thread(target=server.loop.run_until_complete, args=(work(),))
    thread.start()
    try:
        assert started.wait(60.0)
        yield server
    finally:
        server.loop.call_soon_threadsafe(stop.set)
        thread.join(60.0)
        assert not thread.is_alive(), "the server did not stop"
        server.loop.close()
