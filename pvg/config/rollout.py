"""`[prompts]` and `[rollout]`: what the players read, and how solutions are sampled."""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from pvg.config.base import ByKind, Count, NotEmpty, Positive, Section
from pvg.inputs import expanded, read_text

# `[prompts]`: what the prover and the verifier read besides a problem.


# What a verifier with the head scalar or yes_token reads through a chat template.
FRAME = "Problem:\n{question}\n\nSolution:\n{solution}"
PLACES = re.compile(r"\{(question|solution)\}")


def _text(value: Any) -> Any:
    """A text as it is, or the content of the file of `{ file = "PATH" }` without the line break at its end."""
    if not isinstance(value, dict):
        return value
    path = value.get("file")
    if value.keys() != {"file"} or not isinstance(path, str):
        raise ValueError('write a text, or { file = "PATH" }')
    try:
        text = read_text(expanded(path, "prompts"))
    except OSError as error:
        raise ValueError(
            f"cannot read {path}: {error.strerror}; the path is relative to the working directory"
        ) from None
    if "\0" in text:
        raise ValueError(f"{path} contains a NUL character")
    return text.removesuffix("\n")


_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "object",
            "properties": {"file": {"type": "string"}},
            "required": ["file"],
            "additionalProperties": False,
        },
    ]
}
PromptText = Annotated[str, BeforeValidator(_text), WithJsonSchema(_SCHEMA)]
ExampleText = Annotated[NotEmpty, BeforeValidator(_text), WithJsonSchema(_SCHEMA)]


def framed(question: str, solution: str) -> str:
    """FRAME with a question and a solution in it. Braces in these two are kept as they are."""
    texts = {"question": question, "solution": solution}
    return PLACES.sub(lambda place: texts[place[1]], FRAME)


class PromptExample(Section):
    """A worked example: a question, and the answer of each role."""

    question: ExampleText = Field(description="The question of the example, as a text or { file = PATH }.")
    helpful: ExampleText = Field(description="The helpful role's answer.")
    sneaky: ExampleText = Field(description="The sneaky role's answer.")


class TagPrompts(Section):
    """The character H (helpful) or S (sneaky) before the question, for the embedded models, which were trained so."""

    kind: Literal["tag"] = "tag"


class PlainPrompts(Section):
    """The question alone, the same for both roles."""

    kind: Literal["plain"] = "plain"


class WordedPrompts(Section):
    """Prompts in words. What is unset comes from the task (pvg.tasks.task)."""

    helpful: PromptText | None = Field(
        None, description="Instructions of the helpful role: a text, or { file = PATH }. Unset: those of the task."
    )
    sneaky: PromptText | None = Field(
        None, description="Instructions of the sneaky role: a text, or { file = PATH }. Unset: those of the task."
    )
    examples: Annotated[tuple[PromptExample, ...], Field(strict=False)] | None = Field(
        None,
        description="Worked examples: tables with question, helpful and sneaky. Unset: the task's example. []: none.",
    )


TEXTS_FOR_A_TASK = tuple(WordedPrompts.model_fields)  # they do not fit another task


class ChatPrompts(WordedPrompts):
    """Instructions, examples and question through the model's chat template, for instruction-tuned models. Instructions
    are the system message, or begin the first user message if the template has no place for a system message."""

    kind: Literal["chat"] = "chat"


class TextPrompts(WordedPrompts):
    """Instructions, examples and question as text, for base models, which have no chat template."""

    kind: Literal["text"] = "text"


Prompts = Annotated[TagPrompts | ChatPrompts | TextPrompts | PlainPrompts, ByKind("tag")]


class TorchSampling(Section):
    """This process samples, with torch."""

    kind: Literal["torch"] = "torch"
    max_rows: Count = Field(
        256,
        description="Maximum number of sequences that are decoded together. More of them are faster and take more "
        "memory.",
    )
    decoding: Literal["lean", "module"] = Field(
        "lean",
        description='"lean": pvg\'s own decoding step for Llama-like models. "module": the model\'s own forward pass.',
    )


class ServerSampling(Section):
    """vLLM servers sample (docs/scaling.md). Their addresses are in `[serving]`."""

    kind: Literal["vllm"] = "vllm"
    timeout_s: Positive | None = Field(
        None, description="Timeout of a request in seconds, retries included. Unset: none."
    )


SamplingEngine = Annotated[TorchSampling | ServerSampling, ByKind("torch")]


class NoDeadline(Section):
    """A batch waits for all of its rollouts."""

    kind: Literal["none"] = "none"


class CuttingDeadline(Section):
    """Unfinished rollouts are cancelled at the deadline, and the group (spo, rae: the batch) is used as it is."""

    kind: Literal["cut"] = "cut"
    seconds: Positive = Field(60.0, description="Seconds until the deadline of a group (spo, rae: of a batch).")
    min_rollouts: ClassVar[int] = 2  # of a group (spo, rae: of a batch) that is used at the deadline


class ContinuingDeadline(Section):
    """A batch is used at its deadline. Its incomplete groups (spo, rae: rollouts) continue in the next batch."""

    kind: Literal["continue"] = "continue"
    seconds: Positive = Field(60.0, description="Seconds until the deadline of a batch.")
    min_rollouts: ClassVar[int] = 2  # of a batch that is used at the deadline


DeadlineSection = Annotated[NoDeadline | CuttingDeadline | ContinuingDeadline, ByKind("none")]


class NoPrefetch(Section):
    """Sampling and training take turns."""

    kind: Literal["none"] = "none"
    batches: ClassVar[int] = 0


class SamplingAhead(Section):
    """Groups are sampled ahead of the trainer (docs/scaling.md). The trainer takes the least stale groups first
    (`fresh`), or the oldest first, which drops few (`old`)."""

    kind: Literal["fresh", "old"] = "fresh"
    batches: Count = Field(
        1, description="Batches that are sampled ahead of the trainer. With more of them, rollouts are more stale."
    )


PrefetchSection = Annotated[NoPrefetch | SamplingAhead, ByKind("none")]


class Rollouts(Section):
    """How solutions are sampled."""

    engine: SamplingEngine = TorchSampling()
    deadline: DeadlineSection = NoDeadline()
    prefetch: PrefetchSection = NoPrefetch()
    max_staleness: Count | None = Field(
        None,
        description="Versions that a rollout may be behind, with prefetch or with a deadline that continues. Unset: "
        "batches + 1, or 4.",
    )
    group_size: Count = Field(
        8, description="Solutions per problem and role. More of them give a better baseline, and take longer to sample."
    )
    max_tokens: Count = Field(48, description="Maximum number of tokens of a solution. A longer one is cut off.")
    temperature: Positive = Field(1.0, description="Sampling temperature. Higher values give more varied solutions.")
    concurrency: Count = Field(1024, description="Maximum number of requests in flight.")
    logprobs: Literal["sampled", "recomputed"] = Field(
        "sampled", description="Log-probs of the sampler: as sampled, or computed again by the trainer."
    )

    @property
    def staleness_budget(self) -> int:
        """Versions of the policy that a rollout that was sampled ahead may be behind when it is trained on.

        Groups that are taken in the order they were begun are trained on `batches` + 1 versions after they were: with
        less, most of what is sampled ahead would be dropped."""
        if isinstance(self.prefetch, NoPrefetch):
            return 0
        return self.max_staleness or self.prefetch.batches + 1

    @property
    def continued_versions(self) -> int:
        """Versions that the oldest token of a continued group may be behind."""
        return self.max_staleness or 4

    def default_importance(self, precision: str) -> Literal["truncated", "none"]:
        """`training.importance = "auto"`. The arithmetic of servers differs from the trainer's, and that of the sampler
        from passes whose `precision` is bfloat16."""
        differs = isinstance(self.engine, ServerSampling) or precision == "bfloat16"
        return "truncated" if differs and self.logprobs == "sampled" else "none"

    @property
    def chunk(self) -> int:
        """Rollouts that phases without training sample between two commits: what the engine samples at once."""
        return self.engine.max_rows if isinstance(self.engine, TorchSampling) else self.concurrency
