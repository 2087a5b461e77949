"""What an attack asks: a Python function, an HTTP endpoint, or the verifier of a run.

Invariants: a call ends within the time limit, or counts as timed out. An error or a time-out is never a refusal.
Requests go only to the URL that the user named. What a target says is data: it is shown escaped.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import hashlib
import inspect
import json
import math
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from pvg.attack.texts import TABLE
from pvg.errors import ConfigurationError, MissingRequirementError, PvgError, UsageError, said, shortened, visible
from pvg.extensions import digests, is_reference, load, package_remedy, split_reference
from pvg.hub import SILENT, Say
from pvg.inputs import read_text

if TYPE_CHECKING:
    from pvg.export.finished import FinishedRound
    from pvg.sandbox.sandbox import Sandbox
    from pvg.traces.http_client import OpenAiClient
    from pvg.verifier.scorer import VerifierScorer

LONGEST_ERROR = 200  # characters that are kept of what a target says


@dataclass(frozen=True, slots=True)
class TargetAnswer:
    """`score`: None for an error and a time-out. `remedy`: what to do about it, if that is known. `missing`: a package
    that is not installed, or a server that does not answer, is the reason."""

    score: float | None = None
    error: str = ""
    timed_out: bool = False
    remedy: str = ""
    missing: bool = False


@dataclass(frozen=True, slots=True)
class TargetSpec:
    """A target and its options. `name`: FILE.py:NAME or a URL, if it is not the verifier of a `finished` round.
    `threshold`: None for that of the verifier, otherwise 0.5. `limit_s`: of a call. `concurrency`: calls at once;
    None: the kind's default. `template`, `verdict`: the prompt of a chat judge, and its words for accept and refuse."""

    name: str
    finished: FinishedRound | None = None
    sandbox: bool = False
    threshold: float | None = None
    limit_s: float = 10.0
    concurrency: int | None = None
    model: str = ""
    key_variable: str = ""
    template: str = ""
    verdict: tuple[str, str] = ("YES", "NO")


class Target:
    """`identity`: a digest of what its answers depend on. `model`: its name behind a URL, if it has one. `threshold`:
    it accepts a text whose score reaches it. `concurrency`: calls at once."""

    def __init__(self, spec: TargetSpec, concurrency: int, *identity: Any, threshold: float = 0.5) -> None:
        self.about, self.limit_s, self.model = spec.name, spec.limit_s, ""
        self.identity = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:32]
        self.threshold = threshold if spec.threshold is None else spec.threshold
        self.concurrency = spec.concurrency or concurrency

    async def judge(self, question: str, fields: Mapping[str, Any], text: str) -> TargetAnswer:
        """`fields`: what is known about the problem besides its question, as JSON data (`ProblemText`)."""
        raise NotImplementedError


@asynccontextmanager
async def open_target(spec: TargetSpec, say: Say = SILENT) -> AsyncIterator[Target]:
    """`say`: told what a server is waited for. Raises ConfigurationError for a file that does not load, and UsageError
    for a URL of no known route."""
    async with AsyncExitStack() as stack:
        if spec.finished is not None:
            scorer = stack.enter_context(spec.finished.scorer())
            stack.push_async_callback(scorer.drop)
            yield RunTarget(spec, spec.finished, scorer)
        elif is_reference(spec.name) and spec.sandbox:
            from pvg.sandbox.sandbox import Limits, Sandbox

            limits = Limits(cpu_s=spec.limit_s, wall_s=max(30.0, 3 * spec.limit_s), memory_mb=1024)
            yield SandboxTarget(spec, stack.enter_context(Sandbox("full", limits, cache_entries=0)))
        elif is_reference(spec.name):
            stack.push_async_callback((target := FunctionTarget(spec)).close)
            target.idle.append(await target.started())
            target.identity = target.identity[:16] + target.imported[:16]
            yield target
        else:
            yield await HttpTarget.open(spec, stack, say)


class ProblemText(str):
    """The question of a problem. A grader can read its `answer` ("" if it is not known), its `id`, and all `fields`."""

    fields: dict[str, object]
    id: object
    answer: object

    def __new__(cls, question: str, fields: dict[str, object]) -> "ProblemText":  # noqa: UP037 - also runs without pvg
        self = super().__new__(cls, question)
        self.fields, self.id, self.answer = fields, fields.get("id", ""), fields.get("answer", "")
        return self


def scored(found: Any) -> TargetAnswer:
    """What a target returned: a finite number or a bool, which counts as 1 or 0; an error for anything else."""
    number = found.item() if hasattr(found, "item") else found
    with contextlib.suppress(OverflowError):
        if isinstance(number, bool | int | float) and math.isfinite(number):
            return TargetAnswer(float(number))
    return failed(f"it returned {shortened(repr(found), 60)}, which is neither a finite number nor a bool")


def failed(what: str, remedy: str = "", missing: bool = False) -> TargetAnswer:
    return TargetAnswer(error=visible(what)[:LONGEST_ERROR], remedy=remedy, missing=missing)


# --- a user's function, in separate processes -------------------------------------------------------------

COMMAND = "import sys; from pvg.attack.targets import serve; serve(sys.argv[1])"
START_S = 120.0  # for the imports of the user's file


def serve(reference: str) -> None:
    """The process of a FunctionTarget: answers lines of stdin until it ends. What the user's code prints is lost."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a call that hangs ends with the parent
    answers, questions, process = os.fdopen(os.dup(1), "wb", buffering=0), os.fdopen(os.dup(0), "rb"), os.getpid()
    os.dup2(2, 1)
    os.dup2(2, 0)  # input() and what the user's code starts must not read our questions

    def tell(**found: Any) -> None:
        answers.write(json.dumps(found).encode() + b"\n")

    try:
        function = load("TARGET", reference)
    except PvgError as error:
        alone = f"To see why: {sys.executable} {split_reference(reference)[0]}"
        missing = error.exit_code == MissingRequirementError.exit_code
        tell(message=error.message, remedy=error.remedy if missing else alone, missing=missing)
        return
    places = {str(getattr(module, "__dict__", {}).get("__file__")) for module in list(sys.modules.values())}
    imported = [Path(place).read_bytes() for place in places if place.endswith(".py") and Path(place).is_file()]
    tell(ready=hashlib.sha256(b"".join(sorted(hashlib.sha256(source).digest() for source in imported))).hexdigest())
    for line in questions:
        question, fields, text = json.loads(line)
        try:
            found = function(ProblemText(question, fields), text)
            answer = scored(asyncio.run(_awaited(found)) if inspect.isawaitable(found) else found)
        except BaseException as error:  # noqa: BLE001 - the code is the user's
            remedy = package_remedy(error)
            answer = failed(f"{type(error).__name__}: {said(error)}", remedy, bool(remedy))
        if os.getpid() != process:
            os._exit(0)  # the user's code has forked: an answer of both would be taken for that of the next question
        tell(**asdict(answer))


async def _awaited(found: Any) -> Any:
    return await found


class FunctionTarget(Target):
    """Calls the function in child processes. One that exceeds the time limit is killed, and another takes its place."""

    def __init__(self, spec: TargetSpec) -> None:
        super().__init__(spec, 1, split_reference(spec.name)[1], sorted(digests([("TARGET", spec.name)]).values()))
        self.idle: list[asyncio.subprocess.Process] = []
        self.imported = ""  # a digest of all modules of the process: packages change the answers too

    async def close(self) -> None:
        for child in self.idle:
            await _end(child)

    async def judge(self, question: str, fields: Mapping[str, Any], text: str) -> TargetAnswer:
        while self.idle and self.idle[-1].returncode is not None:  # it ended after its last answer
            self.idle.pop()
        child = self.idle.pop() if self.idle else await self.started()
        line = await _asked(child, json.dumps([question, dict(fields), text]).encode() + b"\n", self.limit_s)
        with contextlib.suppress(ValueError, TypeError):
            answer = TargetAnswer(**json.loads(line or b""))
            self.idle.append(child)
            return answer
        if line:
            await _end(child)
            return failed("it wrote into the pipe of its answers")
        return TargetAnswer(timed_out=True) if line is None else failed(f"its process ended with {child.returncode}")

    async def started(self) -> asyncio.subprocess.Process:
        pipe, silent = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
        words = (sys.executable, "-c", COMMAND, self.about)
        child = await asyncio.create_subprocess_exec(
            *words, stdin=pipe, stdout=pipe, stderr=silent, start_new_session=True
        )
        found = json.loads(await _asked(child, b"", START_S) or b"{}")
        if "ready" not in found:
            await _end(child)
            ended = f"{self.about} does not load in a separate process."
            kind = MissingRequirementError if found.get("missing") else ConfigurationError
            raise kind(found.get("message", ended), found.get("remedy", "Import it in Python."))
        self.imported = found["ready"]
        return child


async def _asked(child: asyncio.subprocess.Process, line: bytes, limit_s: float) -> bytes | None:
    """What a child answers; b"" if it has ended, None after `limit_s`. It is then killed."""
    assert child.stdin is not None
    assert child.stdout is not None
    found: bytes | None = None
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                # uvloop raises RuntimeError for a pipe that was closed before
                with contextlib.suppress(BrokenPipeError, ConnectionResetError, RuntimeError):
                    child.stdin.write(line)
                    await child.stdin.drain()
                found = await child.stdout.readline()
    finally:
        if not found:  # also if this call is cancelled
            await _end(child)
    return found


async def _end(child: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)  # with what it started
    await child.wait()


# --- the same function in the sandbox -------------------------------------------------------------------------------


class SandboxTarget(Target):
    """Runs the function as a program, which has only the standard library. The time limit is one of CPU time."""

    def __init__(self, spec: TargetSpec, sandbox: Sandbox) -> None:
        path, name = split_reference(spec.name)
        entry = f"def pvg_entry(question, fields, text):\n    return {name}(ProblemText(question, fields), text)\n"
        self._source = f"{read_text(path)}\n\n{inspect.getsource(ProblemText)}\n\n{entry}"
        self._sandbox = sandbox
        super().__init__(spec, 2, "sandbox", self._source)

    async def judge(self, question: str, fields: Mapping[str, Any], text: str) -> TargetAnswer:
        from pvg.sandbox.sandbox import Program

        program = Program.of_function(self._source, "pvg_entry", [[question, dict(fields), text]])
        done = await asyncio.to_thread(self._sandbox.run, program)
        if done.status in ("timeout", "stalled"):
            return TargetAnswer(timed_out=True)
        (case,) = done.cases
        if case.error.startswith("ModuleNotFoundError"):
            alone = "the sandbox has the standard library and this file alone; leave --sandbox out"
            return failed(f"{case.error.partition(': ')[2]}: {alone}, or copy what it needs into the file")
        return failed(case.error) if case.error else scored(case.value)


# --- an HTTP endpoint -----------------------------------------------------------------------------------------------

TEMPLATE: str = TABLE["judge"]  # what a chat judge reads
PAIR = "{problem}\n{text}"  # what a classifier reads
CHAT = "/chat/completions"
ROUTES = (CHAT, "/score", "/classify", "/pooling")
VERDICT_TOKENS = 1024  # of a judge that reasons first
RETRIES = 4  # about 2 s of waiting: a server that fails on a text is part of the result


class HttpTarget(Target):
    """The URL says which route it is: /score of `pvg serve --player verifier`, /chat/completions of a server with
    OpenAI's routes, /classify or /pooling of vLLM."""

    def __init__(self, spec: TargetSpec, route: str, client: OpenAiClient) -> None:
        self._template = spec.template or (TEMPLATE if route == CHAT else PAIR)
        super().__init__(spec, 8, spec.name, client.model, self._template, spec.verdict)
        self._route, self._client, self.model = route, client, client.model.removeprefix("-")
        self._words = dict(zip(("accept", "refuse"), spec.verdict, strict=True))
        words = "|".join(sorted(map(re.escape, spec.verdict), key=len, reverse=True))
        self._verdicts = re.compile(rf"(?<!\w)(?:{words})(?!\w)", re.IGNORECASE)

    @classmethod
    async def open(cls, spec: TargetSpec, stack: AsyncExitStack, say: Say) -> HttpTarget:
        from pvg.traces.http_client import OpenAiClient, check_url

        check_url(spec.name)
        url, routes = spec.name.rstrip("/"), ", ".join(ROUTES)
        route = next((each for each in ROUTES if urlsplit(url).path.endswith(each)), None)
        if route is None:
            raise UsageError(f"{url} is no route that pvg can attack.", f"Give a URL that ends in one of {routes}.")
        model = spec.model or ("" if route == CHAT else "-")  # "" asks the server for its only one
        options: dict[str, Any] = {"key_variable": spec.key_variable, "timeout_s": spec.limit_s + 5.0, "say": say}
        opened = OpenAiClient.open(url.removesuffix(CHAT), model, concurrency=spec.concurrency or 8, **options)
        client = await stack.enter_async_context(opened)
        client.retries = RETRIES
        return cls(spec, route, client)

    async def judge(self, question: str, fields: Mapping[str, Any], text: str) -> TargetAnswer:
        try:
            async with asyncio.timeout(self.limit_s):
                return scored(await self._score(question, fields, text))
        except TimeoutError:
            return TargetAnswer(timed_out=True, missing=True)
        except PvgError as error:
            return failed(error.message, error.remedy, error.exit_code == MissingRequirementError.exit_code)
        except (LookupError, TypeError, ValueError) as error:
            return failed(f"its reply has another form: {said(error)}", "Check the URL, its route and --template.")

    async def _score(self, question: str, fields: Mapping[str, Any], text: str) -> Any:
        if self._route == "/score":
            found = await self._client.post("", {"rows": [{"question": question, "solution": text}]})
            return found["results"][0]["accepted"]
        known = {"problem": question, "text": text, "answer": str(fields.get("answer", "")), **self._words}
        prompt = re.sub(r"\{(problem|text|answer|accept|refuse)\}", lambda place: known[place[1]], self._template)
        if self._route == CHAT:
            options = {"max_tokens": VERDICT_TOKENS, "temperature": 0}
            choice = await self._client.chat([{"role": "user", "content": prompt}], **options)
            said_ = choice["message"]["content"]
            if choice.get("finish_reason") == "length":
                raise ValueError(f"cut after {VERDICT_TOKENS} tokens, before its verdict")
            if not (verdicts := self._verdicts.findall(said_)):
                raise ValueError(f"no verdict in {shortened(repr(said_), 60)}")
            return verdicts[-1].casefold() == self._words["accept"].casefold()
        named = {} if self._client.model == "-" else {"model": self._client.model}
        (row,) = (await self._client.post("", {**named, "input": prompt}))["data"]
        found = row["probs"] if self._route == "/classify" else row["data"]
        return found[-1] if isinstance(found, list) else found


# --- the verifier of a run ------------------------------------------------------------------------------------------


class RunTarget(Target):
    """The verifier of a finished round, computed by torch in this process. Solutions at the same time share batches."""

    def __init__(self, spec: TargetSpec, finished: FinishedRound, scorer: VerifierScorer) -> None:
        assert scorer.threshold is not None
        super().__init__(spec, 256, scorer.version, finished.experiment.hash(), threshold=scorer.threshold)
        self.about = f"{finished.run.name}, round {finished.round}"
        self._scorer = scorer

    async def judge(self, question: str, fields: Mapping[str, Any], text: str) -> TargetAnswer:
        from pvg.verifier.scorer import TextSolution

        try:
            (score,) = await self._scorer.score([TextSolution("of the attack", question, text)])
        except (UsageError, ConfigurationError) as error:  # it is too long, or has characters that no token has
            return failed(error.message)
        return scored(score)
