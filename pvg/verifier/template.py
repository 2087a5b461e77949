"""The verifier's input: a problem and a solution as token ids.

Invariant 3: role and role prompt cannot enter, because there is no parameter for them. Rollouts with the same question
and solution give the same input. Nothing is tokenized twice: a solution that was sampled with the verifier's vocabulary
keeps its token ids.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Literal

import numpy as np
import orjson

from pvg.config.rollout import framed
from pvg.config.training import YES_NO_QUESTION
from pvg.errors import ConfigurationError
from pvg.models.tokenizer import Tokenizer
from pvg.records import Int32

Style = Literal["tag", "chat", "text", "plain"]
Head = Literal["scalar", "implicit", "yes_token"]

# Part of every key. Increase it when the tokens of any style change, so that old scores do not match.
FORM = 1
PROMPTS_KEPT = 4096  # cached questions as token ids; a few MB


class VerifierTemplate:
    """Renders (question, solution) for one verifier. `key`: a digest of everything that the tokens depend on.

    The styles `plain` and `tag` concatenate question, solution and end token (a verifier gets no role tag). So does
    `text`, with a blank line after the question; `chat` uses the chat template. The head decides where the score is
    read:

    - implicit: at the solution's tokens, which in `chat` are the assistant's message;
    - scalar: at the last token; in `chat` the user's message is FRAME with problem and solution;
    - yes_token: as scalar, but with YES_NO_QUESTION instead of the end token at the end.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        style: Style,
        head: Head,
        shown: Callable[[str], str] | None = None,
    ) -> None:
        """`shown`: returns the visible part of a completion, if the task conceals something. Then all completions are
        encoded from text, because otherwise the tokenization would reveal which ones were cut.

        Raises ConfigurationError for style "chat" without a chat template."""
        self._tokenizer = tokenizer
        render = _chat if style == "chat" else _plain
        self._render: Render = partial(render, asks=YES_NO_QUESTION if head == "yes_token" else "")
        # Cached: solutions of a problem share its question, and training repeats problems.
        self._prompt: Prompt = lru_cache(PROMPTS_KEPT)(partial(OPENINGS.get(style, _question), tokenizer))
        self._head = head
        rules = [FORM, style == "chat", head, YES_NO_QUESTION, tokenizer.fingerprint, tokenizer.eos_id]
        if style == "chat":  # the tokenizer's fingerprint does not cover the chat template, so render something with it
            rules.append(tokenizer.chat([{"role": "user", "content": "problem"}]).tolist())
        if style == "text":
            rules.append("blank line")
        self._shown = shown
        if shown is not None:
            rules.append("shown")
        self.key = hashlib.blake2b(orjson.dumps(rules), digest_size=16).hexdigest()

    def tokens(
        self,
        question: str,
        completion_text: str,
        completion_ids: Int32 | None,
        source_tokenizer_fingerprint: str | None,
    ) -> tuple[Int32, int]:
        """(ids int32 [L], prompt_length): the solution's tokens start at `prompt_length`.

        `completion_ids` int32 [C] (with or without a sampled end token) are used unchanged if their tokenizer has this
        verifier's fingerprint; otherwise `completion_text` is encoded.

        Raises ConfigurationError for a question without tokens.
        """
        if self._shown is not None:
            completion_text, completion_ids = self._shown(completion_text), None
        shared = completion_ids is not None and source_tokenizer_fingerprint == self._tokenizer.fingerprint
        solution_ids = completion_ids if shared else None
        prompt_ids, rest_ids = self._render(
            self._tokenizer, self._head, self._prompt, question, completion_text, solution_ids
        )
        if not prompt_ids.size:
            raise ConfigurationError(
                "A problem has an empty question, so its solutions cannot be verified.",
                "Remove problems with an empty question from the task.",
            )
        return np.concatenate([prompt_ids, rest_ids]), len(prompt_ids)


Prompt = Callable[[str], Int32]  # question -> ids; callers must not change the array
Render = Callable[[Tokenizer, str, Prompt, str, str, Int32 | None], tuple[Int32, Int32]]


def _plain(
    tokenizer: Tokenizer, head: str, prompt: Prompt, question: str, text: str, ids: Int32 | None, *, asks: str
) -> tuple[Int32, Int32]:
    solution_ids = tokenizer.without_end(tokenizer.encode(text) if ids is None else ids)
    if asks:
        return prompt(question), np.concatenate([solution_ids, tokenizer.encode(f"\n{asks}\n")])
    return prompt(question), _with_end(tokenizer, solution_ids)


def _chat(
    tokenizer: Tokenizer, head: str, prompt: Prompt, question: str, text: str, ids: Int32 | None, *, asks: str
) -> tuple[Int32, Int32]:
    if head == "implicit":
        solution_ids = tokenizer.without_end(tokenizer.encode(text) if ids is None else ids)
        return prompt(question), _with_end(tokenizer, solution_ids)
    content = framed(question, tokenizer.without_controls(text))
    if asks:
        content += f"\n\n{asks}"
    return tokenizer.chat([{"role": "user", "content": content}]), np.zeros(0, dtype=np.int32)


def _question(tokenizer: Tokenizer, question: str) -> Int32:
    return tokenizer.opening(question)


def _with_blank_line(tokenizer: Tokenizer, question: str) -> Int32:
    return tokenizer.opening(f"{question}\n\n" if question else "")


def _opened_chat(tokenizer: Tokenizer, question: str) -> Int32:
    """The question as the user's message, followed by the start of the assistant's message."""
    return tokenizer.chat([{"role": "user", "content": question}])


OPENINGS = {"chat": _opened_chat, "text": _with_blank_line}  # style -> what is before the solution


def _with_end(tokenizer: Tokenizer, ids: Int32) -> Int32:
    return np.append(ids, np.int32(tokenizer.eos_id)).astype(np.int32, copy=False)
