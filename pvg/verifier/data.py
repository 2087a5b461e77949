"""The batches of verifier training: distinct solutions, and pairs of row numbers into them. Uses numpy only."""

from __future__ import annotations

import asyncio
import hashlib
import math
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import orjson
import torch
from numpy.typing import NDArray

from pvg.config.rollout import framed
from pvg.config.training import SOLUTIONS_PER_PROBLEM, YES_NO_QUESTION, Verifier
from pvg.errors import ConfigurationError
from pvg.models.heads import VerifierEnsemble, VerifierModel
from pvg.models.packing import PaddedBatch, batches, pad_batch
from pvg.models.tokenizer import Tokenizer
from pvg.records import Float32, Int32
from pvg.store.pairs import Pairs, PairStream
from pvg.telemetry.spans import span, submit_in

# The verifier's input: a problem and a solution as token ids.

Style = Literal["tag", "chat", "text", "plain"]
Head = Literal["scalar", "implicit", "yes_token", "generative"]

# Part of every key. Increase it when the tokens of any style change, so that old scores do not match.
FORM = 1
PROMPTS_KEPT = 4096  # cached questions as token ids; a few MB

# What a generative verifier is asked and answers.
VERDICT_INSTRUCTIONS = (
    "You are given a problem and a solution of it. Check the solution step by step. Then end with a line that is "
    "'Verdict: correct', or 'Verdict: wrong, step N', where N is the number of the first wrong step."
)
VERDICT_TAG = "?"
STEP = "([1-9][0-9]{0,3})"
WORDED_VERDICT, TAG_VERDICT = re.compile(f"Verdict: (?:correct|wrong, step {STEP})"), re.compile(f"0|{STEP}")


def read_verdict(text: str, style: Style) -> int | None:
    """The first wrong step that a verdict names, from 1; 0 if it says correct; None if it is not readable. With words,
    the verdict is the last line, after any check. Otherwise it is a number, and nothing else."""
    worded = style in ("chat", "text")
    line = text.rstrip().rpartition("\n")[2] if worded else text
    found = (WORDED_VERDICT if worded else TAG_VERDICT).fullmatch(line)
    return None if found is None else int(found[1] or 0)


SAYS = {True: "A critic says: ", False: "?"}  # in words or not, before a critique


def read_critique(heard: str, style: Style) -> int | None:
    """The verdict of a critique, as the prover hears it."""
    return read_verdict(heard.lstrip("\n").removeprefix(SAYS[style in ("chat", "text")]), style)


def log_odds(verdicts: Sequence[int | None]) -> float:
    """The logit of (votes for correct + 1/2) / (readable votes + 1); 0 without a readable one."""
    correct, wrong = verdicts.count(0), sum(bool(verdict) for verdict in verdicts)
    return math.log((correct + 0.5) / (wrong + 0.5))


class VerifierTemplate:
    """Renders (question, solution) for one verifier. `key`: a digest of everything that the tokens depend on.

    The styles `plain` and `tag` concatenate question, solution and end token (a verifier gets no role tag). So does
    `text`, with a blank line after the question; `chat` uses the chat template. The head decides where the score is
    read:

    - implicit: at the solution's tokens, which in `chat` are the assistant's message;
    - scalar: at the last token; in `chat` the user's message is FRAME with problem and solution;
    - yes_token: as scalar, but with YES_NO_QUESTION instead of the end token at the end;
    - generative: nowhere, because the verifier writes (`read_verdict`). The problem and the solution are between two
      VERDICT_TAG, or in words in FRAME after VERDICT_INSTRUCTIONS.
    """

    def __init__(
        self, tokenizer: Tokenizer, style: Style, head: Head, shown: Callable[[str], str] | None = None
    ) -> None:
        """`shown`: returns the visible part of a completion, if the task conceals something. Then all completions are
        encoded from text, because otherwise the tokenization would reveal which ones were cut.

        Raises ConfigurationError for style "chat" without a chat template."""
        self._tokenizer, self.style, self._head = tokenizer, style, head
        self._asks = YES_NO_QUESTION if head == "yes_token" else ""
        # Cached: solutions of a problem share its question, and training repeats problems.
        self._prompt = lru_cache(PROMPTS_KEPT)(self._opening)
        rules = [FORM, style == "chat", head, YES_NO_QUESTION, tokenizer.fingerprint, tokenizer.eos_id]
        if style == "chat":  # the tokenizer's fingerprint does not cover the chat template, so render something with it
            rules.append(tokenizer.chat([{"role": "user", "content": "problem"}]).tolist())
        if style == "text":
            rules.append("blank line")
        if head == "generative":
            rules += [style, VERDICT_INSTRUCTIONS]
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
        verifier's fingerprint and they have no control tokens but those between turns; otherwise `completion_text` is
        encoded. Control tokens that question or text spell become ordinary characters.

        Raises ConfigurationError for a question without tokens.
        """
        if self._shown is not None:
            completion_text, completion_ids = self._shown(completion_text), None
        shared = completion_ids is not None and source_tokenizer_fingerprint == self._tokenizer.fingerprint
        solution_ids = completion_ids if shared else None
        prompt_ids, rest_ids = self._render(question, completion_text, solution_ids)
        if not prompt_ids.size:
            raise ConfigurationError(
                "A problem has an empty question, so its solutions cannot be verified.",
                "Remove problems with an empty question from the task.",
            )
        return np.concatenate([prompt_ids, rest_ids]), len(prompt_ids)

    def _render(self, question: str, text: str, ids: Int32 | None) -> tuple[Int32, Int32]:
        """What is before the solution, and the rest."""
        tokenizer = self._tokenizer
        if self.style == "chat" and self._head != "implicit":
            content = framed(question, text)
            content += f"\n\n{self._asks}" if self._asks else ""
            system = [{"role": "system", "content": VERDICT_INSTRUCTIONS}] if self._head == "generative" else []
            return tokenizer.chat([*system, {"role": "user", "content": content}]), np.zeros(0, dtype=np.int32)
        if self.style == "text" and self._head == "generative":
            opening_ids = tokenizer.opening(f"{VERDICT_INSTRUCTIONS}\n\n")
            return opening_ids, np.concatenate([tokenizer.plain(framed(question, text)), tokenizer.encode("\n\n")])
        if ids is None or not tokenizer.has_only_turns(ids := tokenizer.without_end(ids), self.style == "chat"):
            ids = tokenizer.plain(text)
        end_ids = tokenizer.encode(f"\n{self._asks}\n") if self._asks else np.array([tokenizer.eos_id], dtype=np.int32)
        if self._head == "generative":
            question, end_ids = VERDICT_TAG + question, tokenizer.encode(VERDICT_TAG)
        return self._prompt(question), np.concatenate([ids, end_ids])

    def _opening(self, question: str) -> Int32:
        """What is before the solution; callers must not change the array."""
        if self.style == "chat":  # the user's message, followed by the start of the assistant's message
            return self._tokenizer.chat([{"role": "user", "content": question}])
        plain = self._tokenizer.plain(f"{question}\n\n" if question and self.style == "text" else question)
        return np.concatenate([np.asarray(self._tokenizer.begin_ids, dtype=np.int32), plain])


@dataclass(slots=True)
class VerifierBatch:
    """N distinct solutions in M pairs; a pair is one correct and one incorrect solution of a problem.

    - `sequences[n]` int32 [L]: the verifier's input; the solution starts at `prompt_lengths_N[n]`.
    - `pairs_M2[m]`: (correct row, incorrect row).
    - `references_N` float32: VerifierModel.reference of the rows; None if the head needs none or computes it.
    - `shares_M` float32: relative weight of each pair (positive, any scale); None: all equal.
    - `pair_weights_M`, `row_weights_N` float32: make the loss a plain sum; an objective's `prepare` sets them.
    - `own_N` bool: the rows that this micro-batch computes; None: all. `scores_N`: scores of the others, which an
      objective's `survey` sets.

    Raises ValueError if shapes do not match, or if a row is on both sides of pairs and so has no label.
    """

    sequences: Sequence[Int32]
    prompt_lengths_N: Int32
    pairs_M2: Int32
    references_N: Float32 | None
    shares_M: Float32 | None = None
    pair_weights_M: Float32 | None = None
    row_weights_N: Float32 | None = None
    own_N: NDArray[np.bool_] | None = None
    scores_N: NDArray[np.float64] | None = None

    def __post_init__(self) -> None:
        rows, pairs = len(self.sequences), len(self.pairs_M2)
        shapes = {"N": (rows,), "M": (pairs,), "M2": (pairs, 2)}
        for field in fields(self):
            array, shape = getattr(self, field.name), shapes.get(field.name.rpartition("_")[2])
            if shape is not None and array is not None and array.shape != shape:
                raise ValueError(f"{field.name} has shape {array.shape}, not {shape}")
        if pairs and not (self.pairs_M2.min() >= 0 and self.pairs_M2.max() < rows):
            raise ValueError(f"pairs_M2 names rows outside 0..{rows - 1}")
        both = np.intersect1d(self.pairs_M2[:, 0], self.pairs_M2[:, 1])
        if both.size:
            raise ValueError(f"row {both[0]} is both correct and incorrect: a pair of one label has no gradient")

    def __len__(self) -> int:
        """The number of pairs."""
        return len(self.pairs_M2)

    @property
    def lengths_N(self) -> NDArray[np.int64]:
        """Tokens of each row."""
        return np.fromiter((len(row) for row in self.sequences), dtype=np.int64, count=len(self.sequences))

    def with_weights(self, pair_weights_M: Float32, row_weights_N: Float32) -> VerifierBatch:
        return replace(self, pair_weights_M=pair_weights_M, row_weights_N=row_weights_N)

    def select(self, pairs: NDArray[np.int64]) -> VerifierBatch:
        """The given pairs in the given order, with each row that they need once."""
        rows, numbers = np.unique(self.pairs_M2[pairs], return_inverse=True)
        chosen: dict[str, Any] = {"sequences": [self.sequences[row] for row in rows]}
        for field in fields(self):
            array, kind = getattr(self, field.name), field.name.rpartition("_")[2]
            if array is not None and kind in ("N", "M"):
                chosen[field.name] = array[rows if kind == "N" else pairs]
        return replace(self, **chosen, pairs_M2=numbers.reshape(-1, 2).astype(np.int32))


def padded_batches(
    model: VerifierModel | VerifierEnsemble, inputs: Sequence[tuple[Int32, int]], token_budget: int
) -> Iterator[tuple[NDArray[np.int64], PaddedBatch]]:
    """All `inputs` (token ids, start of the solution) in batches within the budget, each with the numbers of its
    inputs."""
    for numbers in batches([len(ids) for ids, _ in inputs], token_budget, model.max_length):
        packed = pad_batch(
            [inputs[number][0] for number in numbers],
            [inputs[number][1] for number in numbers],
            model.tokenizer.pad_id,
            model.device,
            token_budget=token_budget,
            max_length=model.max_length,
        )
        yield numbers, packed


class PairSource:
    """The verifier trainer's batches: pairs of stored rollouts, rendered by the template. Never ends.

    `verifier.pairing = "random"` draws each pair independently, so most solutions are in one pair. `"problem"` draws
    problems with all pairs of their solutions, n^2/4 for n solutions. Both forward each distinct solution once and have
    the same expected loss. A batch depends only on the stream and the step, so a resumed run starts at its step.

    The head's references are computed once per stored solution, at its first draw, and kept as one float32 for each row
    number up to the highest one drawn.
    """

    def __init__(
        self,
        stream: PairStream,
        template: VerifierTemplate,
        model: VerifierModel,
        section: Verifier,
        *,
        executor: Executor,
        start_step: int = 0,
        source_fingerprint: str | None = None,
        precision: str = "float32",
        ahead: int = 0,
    ) -> None:
        """`source_fingerprint`: of the tokenizer that sampled the stored solutions (see VerifierTemplate). `precision`:
        that of the training. `ahead`: the executor makes the batches of steps below it beside the step before each."""
        self._stream = stream
        self._template = template
        self._model = model
        self._section = section
        self._executor = executor
        self._step = start_step
        self._source_fingerprint = source_fingerprint
        self._precision = precision
        self._draw = _drawing(stream, section)
        self._references_R: Float32 = np.empty(0, dtype=np.float32)  # NaN: not computed yet
        self._ahead = ahead
        self._begun: asyncio.Future[VerifierBatch] | None = None

    async def next_batch(self) -> VerifierBatch | None:
        """`section.pairs` pairs (approximately, with pairing by problem); never None. The executor reads, renders and
        computes references."""
        self._begun = self._begun or submit_in(self._executor, self._batch, self._step)
        batch = await asyncio.shield(self._begun)  # a caller that is cancelled leaves it to `close`, or to the next one
        self._step += 1
        self._begun = submit_in(self._executor, self._batch, self._step) if self._step < self._ahead else None
        return batch

    async def close(self) -> None:
        """Wait for the batch that is being made, which uses the model."""
        if self._begun is not None:
            await asyncio.wait([self._begun])

    def _batch(self, step: int) -> VerifierBatch:
        with span("draw_pairs"):
            pairs = self._draw(step)
            drawn_M2 = np.stack([pairs.correct_rows_M, pairs.incorrect_rows_M], axis=1)
            rows_N, numbers = np.unique(drawn_M2, return_inverse=True)
            rendered = [
                self._template.tokens(row.question, row.text, row.completion_ids, self._source_fingerprint)
                for row in self._stream.rows(rows_N)
            ]
        sequences = [ids for ids, _ in rendered]
        prompt_lengths_N = np.array([prompt_length for _, prompt_length in rendered], dtype=np.int32)
        references_N = None
        if self._model.needs_reference:
            with span("reference", device=True):
                references_N = self._references(rows_N, sequences, prompt_lengths_N)
        return VerifierBatch(
            sequences=sequences,
            prompt_lengths_N=prompt_lengths_N,
            pairs_M2=numbers.reshape(-1, 2).astype(np.int32),
            references_N=references_N,
            shares_M=pairs.shares_M,
        )

    def _references(self, rows_N: NDArray[np.int64], sequences: list[Int32], prompt_lengths_N: Int32) -> Float32:
        """References float32 [N] of these rows; computes those that are not known."""
        highest = int(rows_N[-1])  # rows are sorted
        if highest >= self._references_R.size:
            grown = np.full(max(highest + 1, 2 * self._references_R.size), np.nan, dtype=np.float32)
            grown[: self._references_R.size] = self._references_R
            self._references_R = grown
        unknown = np.flatnonzero(np.isnan(self._references_R[rows_N]))
        inputs = [(sequences[number], int(prompt_lengths_N[number])) for number in unknown]
        for part, packed in padded_batches(self._model, inputs, self._section.micro_batch_tokens):
            numbers = unknown[part]
            # The precision of the trained copy, so that both sums are equal at the start of training.
            reduced = self._precision == "bfloat16"
            with torch.autocast(self._model.device.type, dtype=torch.bfloat16, enabled=reduced):
                reference_B = self._model.reference(*packed)
            self._references_R[rows_N[numbers]] = reference_B[: len(numbers)].cpu().numpy()
        return self._references_R[rows_N]


def _drawing(stream: PairStream, section: Verifier) -> Callable[[int], Pairs]:
    if section.pairing == "random":
        return lambda step: stream.draw(step, section.pairs)
    problems = stream.problems_for(section.pairs, SOLUTIONS_PER_PROBLEM)
    return lambda step: stream.draw_problems(step, problems, SOLUTIONS_PER_PROBLEM)
