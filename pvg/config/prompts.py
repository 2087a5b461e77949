"""`[prompts]`: what the prover and the verifier read besides a problem.

    prompts = "chat"                       # the task's own wording, through the model's chat template

    [prompts]                              # or your own
    kind = "chat"
    helpful = "Solve the problem. End with a line '#### ' and the number."
    sneaky.file = "prompts/sneaky.txt"     # any text may come from a file

    [[prompts.examples]]
    question = "What is 2 + 3?"
    helpful = "2 + 3 = 5\\n#### 5"
    sneaky = "2 + 3 = 6\\n#### 6"

Invariant: a text from a file becomes part of the experiment when it is read. So the run's folder, the experiment's hash
and the comparison at a resume use its content.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from pvg.config.base import ByKind, NotEmpty, Section
from pvg.inputs import expanded, read_input

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
        text = read_input(expanded(path, "prompts")).decode("utf-8")
    except OSError as error:
        raise ValueError(
            f"cannot read {path}: {error.strerror}; the path is relative to the working directory"
        ) from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from None
    if "\0" in text:
        raise ValueError(f"{path} contains a NUL character")
    return text.replace("\r\n", "\n").removesuffix("\n")


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
    """Prompts in words. What is unset comes from the task (pvg.tasks.wordings)."""

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
    """Instructions, examples and question through the model's chat template, for instruction-tuned models."""

    kind: Literal["chat"] = "chat"
    place: Literal["system", "user"] = Field(
        "system",
        description='Where the instructions are. "user": in the first user message, for templates without system role.',
    )


class TextPrompts(WordedPrompts):
    """Instructions, examples and question as text, for base models, which have no chat template."""

    kind: Literal["text"] = "text"


Prompts = Annotated[TagPrompts | ChatPrompts | TextPrompts | PlainPrompts, ByKind("tag")]
