"""Serves a run's verifier over HTTP on 127.0.0.1, also to the trainers of other projects.

- GET /health: the run, the round and the verifier's version.
- POST /score: {"rows": [{"question": "...", "solution": "..."}]} -> {"results": [{"score": ..., "accepted": ...}]}.
- POST /get_reward: the request of OpenRLHF's remote reward models, {"query": [...], "prompts": [...]} ->
  {"rewards": [...]}. A query is a prompt and its response in one text, and the prompt is the plain question.

Requests that come at the same time share forward passes. A wrong request gets status 400 and {"error": "..."}. The
server refuses web pages (browsers send an Origin header) and requests under another host name.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any, TypeVar

import orjson
from aiohttp import web
from pydantic import BaseModel, Field, ValidationError

from pvg.errors import UsageError
from pvg.export.finished import FinishedRound, Platt, Verdict
from pvg.inputs import LOOPBACK
from pvg.servers.process import LocalServer
from pvg.verifier.scorer import TextSolution, VerifierScorer

MOST_BYTES = 8 * 2**20  # of a request
MOST_ROWS = 4096  # of a request


class ScoreRow(BaseModel, strict=True):
    question: str
    solution: str


class ScoreRequest(BaseModel, strict=True):
    rows: Annotated[list[ScoreRow], Field(max_length=MOST_ROWS)]


class RewardRequest(BaseModel, strict=True):
    query: Annotated[list[str], Field(max_length=MOST_ROWS)]
    prompts: Annotated[list[str], Field(max_length=MOST_ROWS)]


Body = TypeVar("Body", bound=BaseModel)


class RewardServer:
    """Use `RewardServer.start`."""

    url: str

    def __init__(self, finished: FinishedRound, scorer: VerifierScorer, calibration: Platt | None) -> None:
        self._finished, self._scorer, self._calibration = finished, scorer, calibration

    @classmethod
    @asynccontextmanager
    async def start(cls, finished: FinishedRound, port: int) -> AsyncIterator[RewardServer]:
        """Serve until the block ends. Port 0 is any free one. Raises PortInUseError."""
        with finished.scorer() as scorer:
            server = cls(finished, scorer, finished.calibration())
            routes = [
                web.get("/health", server._health),
                web.post("/score", server._score),
                web.post("/get_reward", server._get_reward),
            ]
            try:
                async with LocalServer.start(routes, port, _error, browsers=False, most_bytes=MOST_BYTES) as local:
                    server.url = f"http://{LOOPBACK}:{local.port}"
                    yield server
            finally:
                await scorer.drop()

    async def _health(self, _: web.Request) -> web.Response:
        return _json(
            {
                "schema_version": 1,  # of the answers of all routes (docs/contracts.md)
                "status": "ok",
                "run": self._finished.run.name,
                "round": self._finished.round,
                "verifier_version": self._scorer.version,
                "threshold": self._scorer.threshold,
                "calibrated": self._calibration is not None,
            }
        )

    async def _score(self, request: web.Request) -> web.Response:
        rows = (await _body(request, ScoreRequest)).rows
        verdicts = await self._verdicts([(row.question, row.solution) for row in rows])
        return _json({"results": [verdict.plain() for verdict in verdicts]})

    async def _get_reward(self, request: web.Request) -> web.Response:
        body = await _body(request, RewardRequest)
        if len(body.query) != len(body.prompts):
            raise UsageError(f'"query" has {len(body.query)} texts, but "prompts" has {len(body.prompts)}.')
        for number, (query, prompt) in enumerate(zip(body.query, body.prompts, strict=True)):
            if not query.startswith(prompt):
                raise UsageError(f"query[{number}] does not begin with prompts[{number}], the question.")
        pairs = zip(body.query, body.prompts, strict=True)
        verdicts = await self._verdicts([(prompt, query[len(prompt) :]) for query, prompt in pairs])
        scores = [verdict.score for verdict in verdicts]
        accepted = [float(verdict.accepted) for verdict in verdicts]
        # OpenRLHF reads `rewards` as the reward, `scores` for its filter of prompts (0 to 1), and logs the rest.
        return _json({"rewards": scores, "scores": accepted, "extra_logs": {"accepted": accepted}})

    async def _verdicts(self, pairs: list[tuple[str, str]]) -> list[Verdict]:
        assert self._scorer.threshold is not None
        texts = [TextSolution(f"number {n}", question, solution) for n, (question, solution) in enumerate(pairs)]
        scores_N = await self._scorer.score(texts)
        return [Verdict.of(float(score), self._scorer.threshold, self._calibration) for score in scores_N]


async def _body(request: web.Request, kind: type[Body]) -> Body:
    try:
        return kind.model_validate_json(await request.read())
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise UsageError(": ".join(filter(None, (".".join(map(str, first["loc"])), first["msg"])))) from None


def _error(text: str, status: int) -> web.Response:
    return _json({"error": text}, status)


def _json(content: dict[str, Any], status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(content), content_type="application/json", status=status)
