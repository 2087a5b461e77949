"""Readers of traces: a model on this machine, or one behind an OpenAI-compatible URL.

A reader reads a text in units: a local model in tokens, a server in words. `chances` gives the probability that the
reader writes an answer after each of several prefixes, and `written` what it writes. A local reader computes what
prefixes have in common once (pvg.models.packing), so all prefixes of a trace cost about one forward pass.
"""

from __future__ import annotations

import asyncio
import math
import re
from abc import abstractmethod
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from pvg.config.base import is_run_id, parse_run_id
from pvg.config.training import ModelSection
from pvg.errors import ConfigurationError, UsageError
from pvg.hub import SILENT, Say
from pvg.models import open_model, pick_device
from pvg.models.language_model import LanguageModel
from pvg.models.logprobs import completion_logprobs, shared_prompt_logprobs
from pvg.models.packing import lengths_of, pad_right, row_batches, token_budget_batches
from pvg.models.shared_prompts import check_packing, check_window
from pvg.records import Int32
from pvg.rollout.engine import GenerationRequest, Sampling
from pvg.rollout.torch_engine import TorchEngine
from pvg.servers.pool import together
from pvg.store.run_players import find_player
from pvg.traces.http_client import OpenAiClient, RefusedByServer, is_url
from pvg.traces.loaders import Message, TraceParts

EMPTY_I = np.zeros(0, dtype=np.int32)


class TextUnit(NamedTuple):
    """A piece of a text. `ids`: its tokens, int32 [n]; none for a reader behind a URL."""

    text: str
    ids: Int32 = EMPTY_I


class ToContinue(NamedTuple):
    """What a reader continues: a problem (empty: it is not shown), the beginning of a text, and a `cue` after it."""

    problem: tuple[Message, ...]
    prefix: Sequence[TextUnit]
    cue: str = ""


UNSEEN = "Read this reasoning about a problem that you cannot see. Which final answer does it reach?\n\n"
AWAY = "Answer with the final answer alone."
LAST_LINE = "State the final answer in the last line, after '#### '."
SOLVE, CONTINUE = f"Solve it. {LAST_LINE}", f"Continue this solution to its end. {LAST_LINE}"


class TraceReader:
    """`identity`: what a result depends on, besides the question."""

    name: str
    identity: str

    @abstractmethod
    def units(self, text: str) -> list[TextUnit]:
        """The units of a text, whose texts concatenated are it."""

    @abstractmethod
    def whole(self, text: str) -> TextUnit:
        """The text as one unit."""

    def joined(self, units: Sequence[TextUnit]) -> list[TextUnit]:
        """As many units as the reader can be asked about one by one."""
        return list(units)

    def chosen(self, steps: int) -> list[int]:
        """The places of the steps that it can be asked about one by one."""
        return list(range(steps))

    @abstractmethod
    def fits(self, problem: tuple[Message, ...], units: Sequence[TextUnit]) -> bool:
        """Whether the problem and these units, with some room for an answer, fit into the reader's context."""

    @abstractmethod
    async def chances(
        self, problem: tuple[Message, ...], prefixes: Sequence[Sequence[TextUnit]], parts: TraceParts
    ) -> list[float]:
        """P(answer | problem, prefix, cue) of each prefix, in [0, 1]."""

    @abstractmethod
    async def written(self, asks: Sequence[ToContinue], max_tokens: int) -> list[str]:
        """What the reader writes, greedily."""

    async def portrait(self) -> dict[str, Any]:
        """What tells the model from another one with the same `identity`; {} if none can have it."""
        return {}


# --- on this machine --------------------------------------------------------------------------------------------------

BUDGET = 16_384  # tokens of a forward pass; what rows have in common counts once
ROOM = 32  # tokens for another answer than the stated one
ROWS = 64  # completions that are written together
GREEDY = 1e-9  # the temperature at which the most probable token is drawn


class LocalReader(TraceReader):
    """Borrows `model`. `style`: how it is asked: "tag", "plain", "text" or "chat", as in `prompts.kind`."""

    def __init__(self, model: LanguageModel, engine: TorchEngine, executor: Executor, style: str) -> None:
        self.name, self.style = model.name, style
        self.identity = f"{model.fingerprint()}/{model.tokenizer.fingerprint}/{style}"
        self.model, self._engine, self.executor = model, engine, executor

    def units(self, text: str) -> list[TextUnit]:
        pairs = self.model.tokenizer.pieces(text)
        return [TextUnit(piece, np.array([number], dtype=np.int32)) for piece, number in pairs]

    def whole(self, text: str) -> TextUnit:
        return TextUnit(text, self.model.tokenizer.plain(text))

    def fits(self, problem: tuple[Message, ...], units: Sequence[TextUnit]) -> bool:
        opened = max(len(self.prompt(problem)), sum(map(len, self._asked(ToContinue((), ())))))
        return opened + sum(len(unit.ids) for unit in units) + ROOM <= self.model.max_length

    def prompt(self, problem: tuple[Message, ...]) -> Int32:
        """The tokens before a text, int32 [P]. Of no problem: those before any text."""
        tokenizer = self.model.tokenizer
        question = "\n\n".join(content for _, content in problem)
        if problem and problem[0][0] and self.style == "chat":
            return tokenizer.chat([{"role": role, "content": content} for role, content in problem])
        if not problem:
            opened = {"tag": "H?", "plain": "?"}.get(self.style, "")
        elif not problem[0][0]:
            opened = question
        else:
            opened = {"tag": f"H{question}", "plain": question}.get(self.style, f"{question}\n\n")
        ids = tokenizer.opening(opened)
        return ids if len(ids) else np.array([tokenizer.eos_id], dtype=np.int32)  # an end separates texts

    async def chances(
        self, problem: tuple[Message, ...], prefixes: Sequence[Sequence[TextUnit]], parts: TraceParts
    ) -> list[float]:
        work = partial(self.logprobs, *self.rows(problem, prefixes, parts))
        found = await asyncio.get_running_loop().run_in_executor(self.executor, work)
        return [min(1.0, math.exp(value)) for value in found.tolist()]

    def rows(
        self, problem: tuple[Message, ...], prefixes: Sequence[Sequence[TextUnit]], parts: TraceParts
    ) -> tuple[list[Int32], Any]:
        """The token ids of each prefix with cue and answer, and int64 [N]: where the answers start."""
        prompt, cue = self.prompt(problem), self.model.tokenizer.plain(parts.cue)
        answer = self.model.tokenizer.plain(parts.answer + parts.end)
        before = [np.concatenate([prompt, *(unit.ids for unit in prefix), cue]) for prefix in prefixes]
        return [np.concatenate([ids, answer]) for ids in before], lengths_of(before)

    def logprobs(self, rows: Sequence[Int32], starts_N: Any, *, shared: bool = True) -> Any:
        """float64 [N], nats: log P(tokens of a row from its start on | those before). `shared`: compute what rows have
        in common once, if the model can."""
        module, longest = self.model.module, int(lengths_of(rows).max())
        found_N = np.zeros(len(rows))
        try:
            check_packing(module)
            check_window(module, longest)
        except ConfigurationError:
            shared = False  # the same values, computed row by row
        budget = max(BUDGET, longest)
        split = row_batches(rows, starts_N, budget) if shared else token_budget_batches(lengths_of(rows), budget)
        with torch.no_grad():
            for part in split:
                some = [rows[row] for row in part]
                if shared:
                    logprobs_BL = shared_prompt_logprobs(module, some, starts_N[part])
                else:
                    ids_BL, lengths_B = pad_right(some, self.model.tokenizer.pad_id, self.model.device)
                    starts_B = torch.from_numpy(starts_N[part]).to(self.model.device)
                    logprobs_BL = completion_logprobs(module, ids_BL, lengths_B, starts_B)
                found_N[part] = logprobs_BL.double().sum(1).cpu().numpy()
        return found_N

    async def written(self, asks: Sequence[ToContinue], max_tokens: int) -> list[str]:
        tokenizer = self.model.tokenizer
        found = [""] * len(asks)  # what has no room left is not continued
        for first in range(0, len(asks), ROWS):
            requests = []
            for number, ask in enumerate(asks[first : first + ROWS], start=first):
                ids = np.concatenate([*self._asked(ask), tokenizer.plain(ask.cue)])
                if room := min(max_tokens, max(0, self.model.max_length - len(ids))):
                    sampling = Sampling(room, tokenizer.end_ids, GREEDY)
                    requests.append(GenerationRequest(str(number), ids, sampling, seed=0))
            for done in await asyncio.gather(*map(self._engine.generate, requests)):
                found[int(done.request_id)] = tokenizer.decode(tokenizer.without_end(done.token_ids))
        return found

    def _asked(self, ask: ToContinue) -> list[Int32]:
        """The tokens of what is continued, without the cue."""
        if ask.problem or self.style != "chat":
            return [self.prompt(ask.problem), *(unit.ids for unit in ask.prefix)]
        text = "".join(unit.text for unit in ask.prefix)
        return [self.model.tokenizer.chat([{"role": "user", "content": UNSEEN + text}])]


@asynccontextmanager
async def local_reader(
    source: str, device: str = "auto", executor: Executor | None = None
) -> AsyncIterator[LocalReader]:
    """The reader of a model's source: embedded:NAME, hf:OWNER/NAME, run:NAME/round-2, gguf:PACKAGE or a folder. It
    computes in `executor`, or in a thread of its own. Raises the errors of `open_model`."""
    async with AsyncExitStack() as stack:
        thread = executor or stack.enter_context(ThreadPoolExecutor(1, "pvg-reader"))
        model = await asyncio.get_running_loop().run_in_executor(thread, _opened, source, device)
        stack.callback(model.close)
        engine = TorchEngine(model, max_rows=ROWS, max_in_flight=ROWS, executor=thread)
        stack.push_async_callback(engine.close)
        yield LocalReader(model, engine, thread, _style_of(source, model))


def _opened(source: str, device: str) -> LanguageModel:
    place = pick_device(device)
    exact = source.startswith("embedded:") or place.type == "cpu"
    return open_model(ModelSection(source=source), place, "float32" if exact else "bfloat16")


def _style_of(source: str, model: LanguageModel) -> str:
    if is_run_id(source):
        return find_player(parse_run_id(source)).experiment.prompts.kind
    if source.startswith("embedded:"):
        return "tag"
    try:
        model.tokenizer.chat_template  # noqa: B018 - raises without one
    except ConfigurationError:
        return "text"
    return "chat"


# --- behind a URL -----------------------------------------------------------------------------------------------------

# Prefixes of a trace that a server is asked for, one request each, and steps, four requests each.
CUTS, STEPS = 24, 12
# A text that tells models apart: what comes first, and what has log-probs.
PROBE = ("Q: What is 17 + 25?\nA:", " 17 + 25 = 42. The capital of France is Paris. Water boils at 100 degrees.")


class UrlReader(TraceReader):
    """Borrows `client`. It gives `chances` only if the server has text completions with `echo` and `logprobs`."""

    def __init__(self, client: OpenAiClient) -> None:
        self.client = client
        self.name, self.identity = client.model, f"{client.url}/{client.model}"

    def units(self, text: str) -> list[TextUnit]:
        return [TextUnit(word) for word in re.findall(r"\s*\S+|\s+$", text)]

    def whole(self, text: str) -> TextUnit:
        return TextUnit(text)

    def joined(self, units: Sequence[TextUnit]) -> list[TextUnit]:
        """CUTS units of about the same number of words."""
        ends = sorted({round(len(units) * cut / CUTS) for cut in range(CUTS + 1)})
        return [TextUnit("".join(unit.text for unit in units[begin:end])) for begin, end in pairwise(ends)]

    def chosen(self, steps: int) -> list[int]:
        return sorted({round(place) for place in np.linspace(0, steps - 1, min(steps, STEPS))})

    def fits(self, problem: tuple[Message, ...], units: Sequence[TextUnit]) -> bool:
        return True

    async def chances(
        self, problem: tuple[Message, ...], prefixes: Sequence[Sequence[TextUnit]], parts: TraceParts
    ) -> list[float]:
        """Raises RefusedByServer if the server gives no log-probs of prompts."""
        question = "".join(f"{content}\n\n" for _, content in problem)
        texts = [question + "".join(unit.text for unit in prefix) + parts.cue for prefix in prefixes]
        return await together([self._chance(text, parts.answer + parts.end) for text in texts])

    async def _chance(self, before: str, answer: str) -> float:
        return min(1.0, math.exp(math.fsum(await self._logprobs(before + answer, len(answer)))))

    async def _logprobs(self, text: str, last: int) -> list[float]:
        """Those of the tokens that end in the `last` characters of a text."""
        choice = await self.client.complete(text, max_tokens=1, temperature=0, echo=True, logprobs=1)
        try:
            # The last token is the written one, so it begins where the text ends. Places count from there: vLLM also
            # counts the characters of a start token, which the text lacks. A token may begin before the answer.
            offsets, values = (choice["logprobs"][name] for name in ("text_offset", "token_logprobs"))
            start = offsets[-1] - last
            found = [float(value) for end, value in zip(offsets[1:], values[:-1], strict=True) if end > start]
        except (LookupError, TypeError, ValueError):
            found = []
        if not found:
            raise RefusedByServer(f"{self.client.url} gives no log-probs of a prompt.", "Leave out cir and tts.")
        return found

    async def portrait(self) -> dict[str, Any]:
        """The server's own words about the model, and log-probs of a text; if it gives none, []: it must then chat."""
        try:
            found = await self._logprobs("".join(PROBE), len(PROBE[1]))
        except RefusedByServer:
            found = []
            await self.client.chat([{"role": "user", "content": PROBE[0]}], max_tokens=1)
        return {"says": await self.client.about(), "logprobs": found}

    async def written(self, asks: Sequence[ToContinue], max_tokens: int) -> list[str]:
        return await together([self._write(ask, max_tokens) for ask in asks])

    async def _write(self, ask: ToContinue, max_tokens: int) -> str:
        begun = "".join(unit.text for unit in ask.prefix)
        if not ask.problem:
            messages = [("user", f"{UNSEEN}{begun}\n\n{AWAY}")]
        else:
            order = f"{CONTINUE}\n\n{begun}" if begun else SOLVE
            role, content = ask.problem[-1]
            messages = [*ask.problem[:-1], (role or "user", f"{content}\n\n{order}")]
        rows = [{"role": role, "content": content} for role, content in messages]
        choice = await self.client.chat(rows, max_tokens=max_tokens, temperature=0)
        return str(choice["message"]["content"])


@asynccontextmanager
async def open_reader(
    source: str, *, model: str = "", key_variable: str = "", say: Say = SILENT
) -> AsyncIterator[TraceReader]:
    """A reader of a source of `local_reader`, or behind a URL, where it is `model`."""
    if is_url(source):
        async with OpenAiClient.open(source, model, key_variable=key_variable, say=say) as client:
            yield UrlReader(client)
        return
    if model or key_variable:
        raise UsageError("--model and --key-env are for a reader behind a URL.", "Leave them out.")
    async with local_reader(source) as reader:
        yield reader
