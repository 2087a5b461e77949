"""One tokenizer interface for all models: text to int32 ids and back, the chat template, and a fingerprint.

Invariant: tokenizers with equal fingerprints give every text the same ids, so their models may share token ids.

`encode` and `decode` call the tokenizers library's batch functions even for one text, because only these release
Python's interpreter lock. Otherwise encoding 16,384 tokens in a thread would stop the event loop for 16 ms or more.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import orjson
from jinja2 import Environment, TemplateError

from pvg.errors import ConfigurationError, UsageError, shortened
from pvg.records import Int32

if TYPE_CHECKING:
    from types import FrameType

    from transformers import GenerationConfig, PreTrainedTokenizerFast

# Parts of tokenizer.json that do not affect the ids of a text: state of earlier calls, and special tokens around a
# text, which `encode` never adds.
UNFINGERPRINTED = ("version", "truncation", "padding", "post_processor")
# A batch of one text gains nothing from the library's threads, which would persist and cause a warning after a fork.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# A chat template that asks for the date gets this one on every day, so that prompts and scores of a run, of its exports
# and of other runs do not depend on the day. Llama's template writes it where it cannot ask.
TODAY = datetime(2024, 7, 26)
_CODES = [f"%-{code}" for code in "dHIjmMSy"] + [f"%{code}" for code in "aAbBcCdDeFfgGhHIjmMnpRStTuUVwWxXyYzZ%"]
_CHANGES = "".join(f"|replace({code!r}, {TODAY.strftime(code)!r})" for code in _CODES)
# A macro hides the global function of its name. jinja drops the line break after it.
_DATE = f"{{%- macro strftime_now(format) -%}}{{{{ format{_CHANGES} }}}}{{%- endmacro %}}\n"
# Of templates with a mode in which the model thinks first, as Qwen3's: the verifier reads all that a prover writes.
_UNTHINKING = "{%- set enable_thinking = false -%}\n"
_RANDOM = re.compile(r"\|\s*random\b|\blipsum\b")  # what else of jinja writes another text each time
# Limits of a chat template without its contents, which usually takes a millisecond for 1,000 characters.
TEMPLATE_SECONDS, MOST_WRITTEN = 10.0, 1_000_000  # seconds of CPU time, characters
_PLACE = re.compile("\ue000([0-9]+)\ue001")  # stands for a message, and has no letters that a template could change


def encoded(tokenizer: Any, text: str) -> list[int]:
    """The ids of `text`, without added special tokens."""
    (found,) = tokenizer.backend_tokenizer.encode_batch([text], add_special_tokens=False)
    return list(found.ids)


def plain_ids(tokenizer: Any, text: str, controls: frozenset[int], ends: tuple[int, ...]) -> list[int]:
    """The ids of `text`, whose control tokens are read as ordinary characters, and `ends` at its end as nothing."""
    ids = encoded(tokenizer, text)
    while ids and ids[-1] in ends:
        ids.pop()
    if controls.isdisjoint(ids):
        return ids
    rules = tokenizer.backend_tokenizer  # its steps without the search for added tokens
    text = text if rules.normalizer is None else rules.normalizer.normalize_str(text)
    splits = [(text, None)] if rules.pre_tokenizer is None else rules.pre_tokenizer.pre_tokenize_str(text)
    ids = [token.id for split, _ in splits for token in rules.model.tokenize(split)]
    return [token for token in ids if token not in controls]  # a vocabulary may have them as words


def filled_ids(
    tokenizer: Any, whole: str, pieces: list[str], contents: list[str], controls: frozenset[int], plain: Any
) -> list[int]:
    """The ids of `pieces`, which a chat template wrote, with `contents` between them. Only pieces have control tokens:
    if contents spell some, each part is encoded on its own, and contents by the function `plain`. `whole`: the text of
    all parts as the template wrote it, or ""."""
    written, texts = [encoded(tokenizer, piece) for piece in pieces], [*contents, ""]
    ids = encoded(tokenizer, whole or "".join(piece + text for piece, text in zip(pieces, texts, strict=True)))
    if [token for token in ids if token in controls] == [t for part in written for t in part if t in controls]:
        return ids
    parts = zip(written, map(plain, texts), strict=True)
    return [token for piece, text in parts for token in (*piece, *text)]


def holds(text: str, content: str) -> bool:
    """Whether `content` is in `text`, apart from white space."""
    return content.strip() in text or "".join(content.split()) in "".join(text.split())


class Layout(NamedTuple):
    """What a chat template writes around messages: `pieces[n]` is before the content of message `order[n]`, and the
    last piece is at the end. A system message is a part of the pieces. `parts`: contents are lists of parts."""

    pieces: list[str]
    order: list[int]
    parts: bool


class Tokenizer:
    """Wraps a fast transformers tokenizer. Each of `end_ids` ends a completion; `eos_id`, the first, is written at the
    end of a text. `begin_ids`: the tokens with which a text begins, such as Gemma's `<bos>`; most models have none.
    `pad_id` fills rows, where no token looks."""

    eos_id: int
    end_ids: tuple[int, ...]
    begin_ids: tuple[int, ...]
    pad_id: int
    vocab_size: int
    fingerprint: str

    def __init__(
        self,
        fast: PreTrainedTokenizerFast,
        name: str = "tokenizer",
        settings: GenerationConfig | None = None,
        rows: int | None = None,
    ) -> None:
        """`settings`: the model's own settings of generation, which may have more end tokens. Gemma, for example, ends
        the turn of a chat with another token than a text. `rows`: of the model's embedding; None: as many as needed.
        A fine-tuned model's tokenizer often has a token more than the model, for padding."""
        if not getattr(fast, "is_fast", False):
            raise ConfigurationError(f"The tokenizer of {name} has no tokenizer.json.", "Save it as a fast tokenizer.")
        if fast.eos_token_id is None:
            raise ConfigurationError(f"The tokenizer of {name} has no end-of-sequence token.", "Set its eos_token.")
        self._fast = fast
        self.name = name
        self._rows = len(fast) if rows is None else rows
        named = settings.eos_token_id if settings is not None else None
        others: list[int] = [] if named is None else named if isinstance(named, list) else [named]
        # Only special tokens count. A configuration may keep a default id, which is an ordinary token here.
        special = {number for number, token in fast.added_tokens_decoder.items() if token.special}
        ends = [fast.eos_token_id, *(number for number in others if number in special)]
        self.end_ids = tuple(dict.fromkeys(int(number) for number in ends if number < self._rows))
        words = fast.get_vocab().values() if len(fast) > self._rows else ()  # all of a large one take 0.1 s
        self._refuse_outside([number for number in words if number not in special])
        self._refuse_outside([] if self.end_ids else ends)
        self.eos_id = self.end_ids[0]
        begin = list(fast("a").input_ids)[:1]  # not "": a tokenizer that ends texts would write its end token first
        self.begin_ids = tuple(begin) if begin == [fast.bos_token_id] else ()
        self._refuse_outside(self.begin_ids)
        pad = fast.pad_token_id
        self.pad_id = self.eos_id if pad is None or pad >= self._rows else int(pad)
        self.vocab_size = len(fast)
        rules = orjson.loads(fast.backend_tokenizer.to_str())
        # From the tokenizer's own model, not transformers' unk_token: byte-level ones have no unknown text.
        self._unknown = rules["model"].get("unk_token")
        self._unknown_id = None if self._unknown is None else fast.backend_tokenizer.token_to_id(self._unknown)
        kept = {key: value for key, value in rules.items() if key not in UNFINGERPRINTED}
        own = [kept, [self.eos_id, self.pad_id, *self.end_ids[1:]], *([list(self.begin_ids)] if self.begin_ids else [])]
        self.fingerprint = hashlib.sha256(orjson.dumps(own, option=orjson.OPT_SORT_KEYS)).hexdigest()[:32]
        self.layout = lru_cache(256)(self._layout)

    def encode(self, text: str) -> Int32:
        """`text` as int32 [n], without added special tokens. Raises UsageError if the vocabulary cannot express it."""
        ids: Int32 = np.asarray(encoded(self._fast, text), dtype=np.int32)
        if self._unknown_id in ids or max(ids, default=0) >= self._rows:
            part, *_ = self.lacking(text) or [text]
            raise UsageError(
                f"The tokenizer of {self.name} cannot express {part!r}, found in {text[:60]!r}.",
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

    def _refuse_outside(self, ids: Sequence[int]) -> None:
        if (largest := max(ids, default=0)) >= self._rows:
            raise ConfigurationError(
                f"The tokenizer of {self.name} has the token {self._fast.convert_ids_to_tokens(largest)!r} with the "
                f"id {largest}, but the model's embedding has {self._rows} rows.",
                "Use the tokenizer with which the model was trained, or resize the model's embedding.",
            )

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
        """Whether the chat template accepts a system message and writes it. Raises as `layout` for a user's message."""
        self.layout(("user",))
        with suppress(ConfigurationError):
            self.layout(("system", "user"))
            return True
        return False

    @cached_property
    def controls(self) -> frozenset[int]:
        """The ids of control tokens: special tokens, added tokens that the chat template writes around messages, and
        the token for unknown text."""
        added = self._fast.added_tokens_decoder
        found = {number for number, token in added.items() if token.special}
        found |= set() if self._unknown_id is None else {self._unknown_id}
        for roles in (("user",), ("system", "user"), ("user", "assistant", "user")):
            with suppress(ConfigurationError):  # without a template for such a chat, it writes no tokens there
                written = {token for piece in self.layout(roles).pieces for token in encoded(self._fast, piece)}
                found |= {token for token in written & added.keys() if not added[token].content.isspace()}
        return frozenset(found)

    def plain(self, text: str) -> Int32:
        """`text` as `encode`, but control tokens that it spells become ordinary characters, and end tokens at its end
        nothing: int32 [n]."""
        if self._unknown is not None and set(self.lacking(text)) - {self._unknown}:
            return self.encode(text)  # raises UsageError
        return np.asarray(plain_ids(self._fast, text, self.controls, self.end_ids), dtype=np.int32)

    def pieces(self, text: str) -> list[tuple[str, int]]:
        """The tokens of `plain`, each with its part of `text`. The parts together are `text`."""
        ids = self.plain(text)
        (encoding,) = self._fast.backend_tokenizer.encode_batch([text], add_special_tokens=False)
        if encoding.ids[: len(ids)] == ids.tolist():
            ends = [end for _, end in encoding.offsets[: len(ids)]]
        else:  # the text spells control tokens, whose places are those of other tokens
            ends = [len(self.shown(ids[: place + 1])) for place in range(len(ids))]
        places = [0, *np.maximum.accumulate(np.minimum(ends, len(text))).tolist()[:-1], len(text)]
        return [(text[begin:end], int(token)) for (begin, end), token in zip(pairwise(places), ids, strict=True)]

    def chat(self, messages: Sequence[Mapping[str, str]]) -> Int32:
        """`messages` (role, content) through the chat template, with the assistant's header added: int32 [n]. Control
        tokens that a content spells, except a system message, become ordinary characters. If the template has no place
        for a system message, it begins the first user message.

        Raises ConfigurationError if the tokenizer has no chat template, or if the template refuses or drops a message.
        """
        first, *others = messages
        if first["role"] == "system" and not self.takes_system_message:
            return self.chat([{**others[0], "content": f"{first['content']}\n\n{others[0]['content']}"}, *others[1:]])
        roles = tuple(message["role"] for message in messages)
        layout = self.layout(roles, first["content"] if first["role"] == "system" else "")
        whole = self._rendered(messages, layout.parts)
        if not all(holds(whole, message["content"]) for message in messages if message["role"] == "user"):
            whole = ""  # the template changes such contents
        return self._filled(whole, layout.pieces, [messages[number]["content"] for number in layout.order])

    def next_turn(self, content: str) -> Int32:
        """The tokens between the end token of an answer and the next answer when the user says `content`: int32 [n].
        Raises ConfigurationError if the chat template does not end an answer with the end token, or as `chat`."""
        layout = self.layout(("user", "assistant", "user"))
        between = self._filled("", layout.pieces[-2:], [content])
        end = next((place for place, token in enumerate(between[:2].tolist()) if token in self.end_ids), None)
        if end is None or layout.order[-2:] != [1, 2]:
            raise self._refusal("does not end an answer with the end token")
        return between[end + 1 :]

    def has_only_turns(self, ids: Int32, chat: bool) -> bool:
        """Whether the control tokens in `ids` int32 [n] are those between the turns of a dialogue: end tokens, which a
        model samples only at the end of a turn, and in a `chat` what the template writes around the next turn."""
        turn = [self.eos_id]
        if chat and not self.controls.isdisjoint(ids.tolist()):
            with suppress(ConfigurationError):  # a template without dialogues
                turn += self.next_turn("?").tolist()
        rows = ([t for t in row if t in self.controls] for row in (ids.tolist(), turn))
        found, turn = ([self.eos_id if t in self.end_ids else t for t in row] for row in rows)
        return found in ([self.eos_id] * len(found), turn * (len(found) // len(turn)))

    def _filled(self, whole: str, pieces: list[str], contents: list[str]) -> Int32:
        ids = filled_ids(self._fast, whole, pieces, contents, self.controls, self.plain)
        self._refuse_outside(ids)
        return np.asarray(ids, dtype=np.int32)

    @cached_property
    def chat_template(self) -> str:
        """The chat template, with a fixed date if it asks for one, and without thoughts."""
        if self._fast.chat_template is None:
            raise ConfigurationError(
                f"The tokenizer of {self.name} has no chat template.",
                'Set prompts to "text", or use an instruction-tuned model.',
            )
        if isinstance(found := self._fast.chat_template, dict) and "default" not in found:
            raise self._refusal(f"is not known: there are {', '.join(map(repr, found))}, but no 'default'")
        text = str(self._fast.get_chat_template())
        try:  # the code alone, without comments and texts
            code = " ".join(word for _, kind, word in Environment().lex(text) if kind in ("name", "operator"))
        except TemplateError as error:
            raise self._refusal(f"is none: {error}") from None
        if _RANDOM.search(code):
            raise self._refusal("writes random text")
        text = _UNTHINKING + text if "enable_thinking" in text else text
        return _DATE + text if "strftime_now" in text else text

    def _layout(self, roles: tuple[str, ...], system: str = "") -> Layout:
        """What the chat template writes around messages of these roles. Raises ConfigurationError if it refuses or
        drops one of them, both as texts and as lists of parts."""
        marks = {f"\ue000{number if role != 'system' else ''}\ue001": role for number, role in enumerate(roles)}
        rows = [{"role": role, "content": mark} for mark, role in marks.items()]
        if system:  # a mark at both ends, because a template may cut it
            rows[0]["content"] = rows[0]["content"] + system + rows[0]["content"]
        until, before, wrong = time.thread_time() + TEMPLATE_SECONDS, sys.gettrace(), []

        def watch(frame: FrameType, *_: object) -> Any:
            if (ours := frame.f_code.co_filename == "<template>") and time.thread_time() > until:  # jinja's name of it
                raise TemplateError(f"it takes more than {TEMPLATE_SECONDS:g} s")
            return watch if ours else None

        for parts in (False, True):
            try:
                sys.settrace(watch)
                text = self._rendered(rows, parts)
                times = {role: 1 + (role == "system" and bool(system)) for role in roles}
                if lost := [role for mark, role in marks.items() if text.count(mark) < times[role]]:
                    raise self._refusal(f"leaves out the {lost[0]} message")
                if len(text) > MOST_WRITTEN:
                    raise self._refusal(f"writes {len(text):,} characters around a prompt")
                pieces = _PLACE.split(text.replace("\ue000\ue001", ""))
                return Layout(pieces[::2], [int(number) for number in pieces[1::2]], parts)
            except ConfigurationError as error:
                wrong.append(error)
            finally:
                sys.settrace(before)
        raise wrong[0]

    def _rendered(self, messages: Sequence[Mapping[str, str]], parts: bool) -> str:
        rows: list[dict[str, Any]] = [dict(message) for message in messages]
        for row in rows if parts else ():
            row["content"] = [{"type": "text", "text": row["content"]}]
        asked = {"chat_template": self.chat_template, "add_generation_prompt": True, "tokenize": False}
        try:
            return str(self._fast.apply_chat_template(rows, **asked))
        except TemplateError as error:
            raise self._refusal(f"refuses a prompt: {error}") from None
        except Exception as error:  # noqa: BLE001 - a template is a program, with errors of any type
            raise self._refusal(f"fails: {type(error).__name__}: {error}") from None

    def _refusal(self, what: str) -> ConfigurationError:
        message = f"The chat template of {self.name} {shortened(' '.join(what.split()), 200).rstrip('.: ')}."
        return ConfigurationError(message, 'Set prompts to "text", or use a model with another chat template.')

    def without_end(self, ids: Int32) -> Int32:
        """`ids` int32 [n] without end tokens at the end."""
        while len(ids) and ids[-1] in self.end_ids:
            ids = ids[:-1]
        return ids

    def save(self, directory: Path) -> None:
        """Write tokenizer.json and tokenizer_config.json to `directory`."""
        self._fast.save_pretrained(directory)
