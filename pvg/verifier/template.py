"""What a verifier reads: a problem and a solution as token ids.

Invariant 3: the role and the role prompt cannot get in, because there is no parameter for them; two rollouts with the
same question and the same solution are the same input. Nothing is tokenised twice: a solution sampled with the
verifier's own vocabulary keeps the token ids it was sampled as.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Literal

import numpy as np
import orjson

from pvg.errors import ConfigurationError
from pvg.models.tokenizer import Tokenizer
from pvg.records import Int32

Style = Literal["tag", "chat", "plain"]
Head = Literal["scalar", "implicit", "yes_token"]

QUESTION = "Is this solution correct? Answer yes or no."
# Part of every key: raise it when the tokens of any style change, so that no old score is taken for a new one.
FORM = 1
PROMPTS_KEPT = 4096  # questions, as token ids: a few MB


class VerifierTemplate:
    """Renders (question, solution) for one verifier. `key` is a digest of everything the tokens depend on.

    Styles: `plain` and `tag` are the question, the solution and the end token, one after the other (a verifier gets no
    tag); `chat` uses the chat template. The head decides where the score is read:

    - implicit: over the solution's tokens, which are the assistant's answer in `chat`;
    - scalar: at the last token; in `chat` problem and solution both stand in the user's message;
    - yes_token: likewise, with a question at the end instead of the end token.
    """

    def __init__(
        self, tokenizer: Tokenizer, style: Style, head: Head, shown: Callable[[str], str] | None = None
    ) -> None:
        """`shown` gives what may be read of a completion, where its task conceals something. All of them are then
        encoded from their texts: the tokens of one that was cut would be another cut than those of one that was not.

        Raises ConfigurationError for style "chat" where the tokenizer has no chat template."""
        self._tokenizer = tokenizer
        self._render = _chat if style == "chat" else _plain
        # A problem's solutions ask for the same question, and a verifier's training for the same problems.
        of_question = partial(_opened_chat, tokenizer) if style == "chat" else tokenizer.encode
        self._prompt: Prompt = lru_cache(PROMPTS_KEPT)(of_question)
        self._head = head
        rules = [FORM, style == "chat", head, QUESTION, tokenizer.fingerprint, tokenizer.eos_id]
        if style == "chat":  # the chat template is no part of the tokenizer's fingerprint: render something with it
            rules.append(tokenizer.chat([{"role": "user", "content": "problem"}]).tolist())
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
        """(ids int32 [L], prompt_length): the solution's tokens are those from `prompt_length` on.

        `completion_ids` int32 [C] (a sampled end token included or not) are taken as they are if the tokenizer they
        come from has this verifier's fingerprint; otherwise `completion_text` is encoded.

        Raises ConfigurationError for a question without a single token.
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
                "A problem has no text, so there is nothing to verify a solution against.",
                "Remove problems with an empty question from the task.",
            )
        return np.concatenate([prompt_ids, rest_ids]), len(prompt_ids)


Prompt = Callable[[str], Int32]  # of a question; nobody changes what it gives
Render = Callable[[Tokenizer, str, Prompt, str, str, Int32 | None], tuple[Int32, Int32]]


def _plain(
    tokenizer: Tokenizer, head: str, prompt: Prompt, question: str, text: str, ids: Int32 | None
) -> tuple[Int32, Int32]:
    solution_ids = _without_end(tokenizer, tokenizer.encode(text) if ids is None else ids)
    if head == "yes_token":
        return prompt(question), np.concatenate([solution_ids, tokenizer.encode(f"\n{QUESTION}\n")])
    return prompt(question), _with_end(tokenizer, solution_ids)


def _chat(
    tokenizer: Tokenizer, head: str, prompt: Prompt, question: str, text: str, ids: Int32 | None
) -> tuple[Int32, Int32]:
    if head == "implicit":
        solution_ids = _without_end(tokenizer, tokenizer.encode(text) if ids is None else ids)
        return prompt(question), _with_end(tokenizer, solution_ids)
    content = f"Problem:\n{question}\n\nSolution:\n{tokenizer.without_controls(text)}"
    if head == "yes_token":
        content += f"\n\n{QUESTION}"
    return tokenizer.chat([{"role": "user", "content": content}]), np.zeros(0, dtype=np.int32)


def _opened_chat(tokenizer: Tokenizer, question: str) -> Int32:
    """The question as the user's message, ready for the assistant's answer."""
    return tokenizer.chat([{"role": "user", "content": question}])


def _without_end(tokenizer: Tokenizer, ids: Int32) -> Int32:
    """`ids` without the end tokens it may end in."""
    kept = np.flatnonzero(ids != tokenizer.eos_id)
    return ids[: kept[-1] + 1 if kept.size else 0]


def _with_end(tokenizer: Tokenizer, ids: Int32) -> Int32:
    return np.append(ids, np.int32(tokenizer.eos_id)).astype(np.int32, copy=False)
