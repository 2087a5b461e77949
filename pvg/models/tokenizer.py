"""One tokenizer interface for all models: text to int32 ids and back, the chat template, and a fingerprint.

Invariant: tokenizers with equal fingerprints give every text the same ids, so their models may share token ids.

`encode` and `decode` call the tokenizers library's batch functions even for one text, because only these release
Python's interpreter lock. Otherwise encoding 16,384 tokens in a thread would stop the event loop for 16 ms or more.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import orjson
from jinja2 import TemplateError

from pvg.errors import ConfigurationError, UsageError
from pvg.records import Int32

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedTokenizerFast

# Parts of tokenizer.json that do not affect the ids of a text: state of earlier calls, and special tokens around a
# text, which `encode` never adds.
UNFINGERPRINTED = ("version", "truncation", "padding", "post_processor")
# A batch of one text gains nothing from the library's threads, which would persist and cause a warning after a fork.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


class Tokenizer:
    """Wraps a fast transformers tokenizer. Each of `end_ids` ends a completion; `eos_id`, the first, is written at the
    end of a text. `begin_ids`: the tokens with which a text begins, such as Gemma's `<bos>`; most models have none.
    `pad_id` fills rows; models never see it."""

    eos_id: int
    end_ids: tuple[int, ...]
    begin_ids: tuple[int, ...]
    pad_id: int
    vocab_size: int
    fingerprint: str

    def __init__(
        self, fast: PreTrainedTokenizerFast, name: str = "tokenizer", settings: GenerationConfig | None = None
    ) -> None:
        """`settings`: the model's own settings of generation, which may have more end tokens. Gemma, for example, ends
        the turn of a chat with another token than a text."""
        if not getattr(fast, "is_fast", False):
            raise ConfigurationError(f"The tokenizer of {name} has no tokenizer.json.", "Save it as a fast tokenizer.")
        if fast.eos_token_id is None:
            raise ConfigurationError(f"The tokenizer of {name} has no end-of-sequence token.", "Set its eos_token.")
        self._fast = fast
        self._name = name
        self.eos_id = int(fast.eos_token_id)
        named = settings.eos_token_id if settings is not None else None
        others: list[int] = [] if named is None else named if isinstance(named, list) else [named]
        # Only special tokens count. A configuration may keep a default id, which is an ordinary token here.
        special = {number for number, token in fast.added_tokens_decoder.items() if token.special}
        self.end_ids = tuple(dict.fromkeys([self.eos_id, *(number for number in others if number in special)]))
        begin = list(fast("a").input_ids)[:1]  # not "": a tokenizer that ends texts would write its end token first
        self.begin_ids = tuple(begin) if begin == [fast.bos_token_id] else ()
        self.pad_id = self.eos_id if fast.pad_token_id is None else int(fast.pad_token_id)
        self.vocab_size = len(fast)
        rules = orjson.loads(fast.backend_tokenizer.to_str())
        # From the tokenizer's own model, not transformers' unk_token: byte-level ones have no unknown text.
        unknown = rules["model"].get("unk_token")
        self._unknown_id = None if unknown is None else fast.backend_tokenizer.token_to_id(unknown)
        kept = {key: value for key, value in rules.items() if key not in UNFINGERPRINTED}
        own = [kept, [self.eos_id, self.pad_id, *self.end_ids[1:]], *([list(self.begin_ids)] if self.begin_ids else [])]
        self.fingerprint = hashlib.sha256(orjson.dumps(own, option=orjson.OPT_SORT_KEYS)).hexdigest()[:32]

    def encode(self, text: str) -> Int32:
        """`text` as int32 [n], without added special tokens. Raises UsageError if the vocabulary cannot express it."""
        (encoding,) = self._fast.backend_tokenizer.encode_batch([text], add_special_tokens=False)
        ids: Int32 = np.asarray(encoding.ids, dtype=np.int32)
        if self._unknown_id is not None and bool(np.any(ids == self._unknown_id)):
            start, end = encoding.offsets[int(np.argmax(ids == self._unknown_id))]
            raise UsageError(
                f"The tokenizer of {self._name} cannot express {text[start:end]!r}, found in {text[:60]!r}.",
                "Use a model whose vocabulary covers the text. To train on a task in words: -s models.prover.source=hf:"
                "OWNER/NAME -s models.verifier.source=hf:OWNER/NAME -s prompts=chat",
            )
        return ids

    def opening(self, text: str) -> Int32:
        """`text` at the beginning of the model's input, as int32 [n]: after `begin_ids`. Raises UsageError as `encode`
        does. A chat template writes the begin token itself."""
        ids = self.encode(text)
        return np.concatenate([np.asarray(self.begin_ids, dtype=np.int32), ids]) if self.begin_ids else ids

    def lacking(self, text: str) -> list[str]:
        """The parts of `text` that the vocabulary cannot express, each once, in their order."""
        (encoding,) = self._fast.backend_tokenizer.encode_batch([text], add_special_tokens=False)
        pairs = zip(encoding.ids, encoding.offsets, strict=True)
        return list(dict.fromkeys(text[start:end] for number, (start, end) in pairs if number == self._unknown_id))

    def decode(self, ids: Int32) -> str:
        """The text of `ids` int32 [n]. Special tokens are skipped, spaces are kept."""
        (text,) = self._fast.backend_tokenizer.decode_batch([ids.tolist()], skip_special_tokens=True)
        return str(text)

    def shown(self, ids: Int32) -> str:
        """The text of `ids` int32 [n], special tokens included."""
        (text,) = self._fast.backend_tokenizer.decode_batch([ids.tolist()], skip_special_tokens=False)
        return str(text)

    @cached_property
    def takes_system_message(self) -> bool:
        """Whether the chat template accepts a system message and writes it. Without a template, raises as `chat`."""
        said = "\u2402instructions\u2403"
        try:
            return said in self._through_template(
                [{"role": "system", "content": said}, {"role": "user", "content": "?"}]
            )
        except TemplateError:
            return False

    def chat(self, messages: Sequence[Mapping[str, str]]) -> Int32:
        """`messages` (role, content) through the chat template, with the assistant's header added: int32 [n].

        Raises ConfigurationError if the tokenizer has no chat template, or if the template refuses the messages.
        """
        try:
            text = self._through_template(messages)
        except TemplateError as error:
            raise ConfigurationError(
                f"The chat template of {self._name} refuses a prompt: {error}.", 'Set prompts to "text".'
            ) from None
        return np.asarray(self._fast.backend_tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int32)

    def _through_template(self, messages: Sequence[Mapping[str, str]]) -> str:
        if self._fast.chat_template is None:
            raise ConfigurationError(
                f"The tokenizer of {self._name} has no chat template.",
                'Set prompts to "text", or use an instruction-tuned model.',
            )
        return str(
            self._fast.apply_chat_template(
                [dict(message) for message in messages], add_generation_prompt=True, tokenize=False
            )
        )

    def next_turn(self, content: str) -> Int32:
        """The tokens between the end token of an answer and the next answer when the user says `content`: int32 [n].
        Raises ConfigurationError if the chat template does not end an answer with the end token, or does not exist."""
        marks = "\u2402answer\u2403", "\u2402question\u2403"
        rows = [("user", "?"), ("assistant", marks[0]), ("user", marks[1])]
        text = self._through_template([{"role": role, "content": said} for role, said in rows])
        _, _, after = text.partition(marks[0])
        between = self._fast.backend_tokenizer.encode(after.replace(marks[1], content), add_special_tokens=False).ids
        end = next((place for place, token in enumerate(between[:2]) if token in self.end_ids), None)
        if end is None:
            raise ConfigurationError(
                f"The chat template of {self._name} does not end an answer with the end token.",
                'Set game.protocol to "direct", or prompts to "text".',
            )
        return np.asarray(between[end + 1 :], dtype=np.int32)

    def without_controls(self, text: str) -> str:
        """`text` without special tokens spelled out in it.

        Otherwise its author could end the message that quotes it and continue in another role.
        """
        while len(cleaned := self.decode(self.encode(text))) < len(text):
            text = cleaned  # the rest may spell another one
        return text

    def without_end(self, ids: Int32) -> Int32:
        """`ids` int32 [n] without end tokens at the end."""
        kept = np.flatnonzero(~np.isin(ids, self.end_ids))
        return ids[: kept[-1] + 1 if kept.size else 0]

    def save(self, directory: Path) -> None:
        """Write tokenizer.json and tokenizer_config.json to `directory`."""
        self._fast.save_pretrained(directory)
