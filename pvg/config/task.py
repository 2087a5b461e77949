"""`[task]`: the kinds of tasks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, model_validator

from pvg.config.base import ByKind, Count, DataFolder, Folder, Fraction, NotEmpty, Positive, Section, is_hub_id
from pvg.extensions import REFERENCE_PATTERN, Reference

PlayReference = Literal["random", "greedy", "base"]
PlayOpponent = Literal["self", "random", "greedy", "base"]


class ModchainTask(Section):
    """Chains of modular sums, made on the fly: `7+5+8?` -> `7+5=2;2+8=0;A0`."""

    kind: Literal["modchain"] = "modchain"
    min_terms: Annotated[int, Field(ge=2, le=64)] = Field(
        5, description="Smallest number of terms of a problem. More terms are harder."
    )
    max_terms: Annotated[int, Field(ge=2, le=64)] = Field(
        5, description="Largest number of terms of a problem. More terms are harder."
    )
    modulus: Annotated[int, Field(ge=2, le=100)] = Field(
        10, description="Sums are taken modulo this number. A larger one has more possible answers."
    )
    grader: Literal["answer", "sums"] = Field(
        "answer",
        description='"answer": the final answer is right. "sums": every sum is right, of whatever numbers: a loophole '
        "(docs/results/hack-alarm.md).",
    )
    problems: Count = Field(
        8192, description="Number of training problems. With more of them, each repeats less often."
    )
    test_problems: Count = Field(1024, description="Number of test problems. No model learns from them.")

    @model_validator(mode="after")
    def _ordered(self) -> ModchainTask:
        if self.min_terms > self.max_terms:
            raise ValueError(f"min_terms ({self.min_terms}) is above max_terms ({self.max_terms})")
        return self


def _local(path: Path | None) -> Path | None:
    if path is not None and is_hub_id(str(path)):
        raise ValueError(f"{str(path)!r}: only task.path of the kinds 'gsm8k' and 'data' may be a dataset of the hub")
    return path


class Gsm8kTask(Section):
    """Grade-school word problems. `path`: a folder with train and test as .jsonl or .parquet, or a dataset of the
    Hugging Face hub, such as "hf:openai/gsm8k"."""

    kind: Literal["gsm8k"] = "gsm8k"
    path: DataFolder | None = Field(
        None,
        description='Folder with train and test as .jsonl or .parquet, or a hub dataset such as "hf:openai/gsm8k".',
    )
    limit: Count | None = Field(None, description="Maximum number of problems that pvg reads per split. Unset: all.")
    max_steps: Count | None = Field(
        None, description="Only problems whose published solution takes at most this many calculations. Unset: all."
    )


REPEATED_GROUP = re.compile(r"(?<!\\)\)[*+{]")
REPEAT = re.compile(r"(?<!\\)[*+{]")
MOST_REPEATS = 3


def _pattern(text: str | None) -> str | None:
    """A pattern of Python's re with at most one group, whose matching takes bounded time."""
    if text is None:
        return None
    try:
        compiled = re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"{text!r} is not a regular expression: {error}") from None
    if compiled.groups > 1:
        raise ValueError(
            f"{text!r} has {compiled.groups} groups; mark the answer with one, and write others as (?:...)"
        )
    if REPEATED_GROUP.search(text):
        raise ValueError(f"{text!r} repeats a group, which may take endless time; repeat a character set: [a-z ]+")
    if len(REPEAT.findall(text)) > MOST_REPEATS:
        raise ValueError(f"{text!r} has more than {MOST_REPEATS} of * + {{}}, which may take endless time")
    return text


class DataTask(Section):
    """Questions and answers from JSON lines, CSV or parquet, with a choice of graders (docs/sources.md)."""

    kind: Literal["data"] = "data"
    path: DataFolder | None = Field(
        None,
        description="Folder or hub dataset with train and test, or one file .jsonl, .csv or .parquet: a tenth is the "
        "test.",
    )
    question: NotEmpty = Field("question", description="Name of the column with the question.")
    answer: NotEmpty = Field("answer", description="Name of the column with the right answer.")
    grader: Literal["exact", "number", "choice", "regex", "expression"] = Field(
        "exact", description="How an answer is read and compared with the right one (docs/sources.md)."
    )
    pattern: Annotated[str | None, AfterValidator(_pattern)] = Field(
        None, description='Only for "regex": the pattern of the line with the answer, which is its group.'
    )
    form: NotEmpty | None = Field(
        None, description='Only for "regex": the sentence of the prompt that says how to write that line.'
    )
    limit: Count | None = Field(None, description="Maximum number of problems that pvg reads per split. Unset: all.")

    @model_validator(mode="after")
    def _complete(self) -> DataTask:
        given = [name for name in ("pattern", "form") if getattr(self, name) is not None]
        if self.grader == "regex" and len(given) < 2:
            raise ValueError(
                "grader = 'regex' needs pattern and form: pattern = 'Color: ([a-z]+)', form = \"End with ...\""
            )
        if self.grader != "regex" and given:
            raise ValueError(f"{given[0]} is only for grader = 'regex', not {self.grader!r}")
        if self.question == self.answer:
            raise ValueError(f"question and answer are both the column {self.question!r}")
        return self


class ReasoningGymTask(Section):
    """Datasets of the reasoning-gym package (extra `reasoning-gym`), each graded by its own grader."""

    kind: Literal["reasoning_gym"] = "reasoning_gym"
    dataset: str | Annotated[tuple[str, ...], Field(strict=False)] = Field(
        "chain_sum", description="Name of the dataset in reasoning-gym, or a list of names: a mixture of equal parts."
    )
    settings: dict[str, Any] = Field(
        default_factory=dict,
        description="Arguments of the dataset, with the names that reasoning-gym gives them. Of a mixture: a table for "
        "each dataset.",
    )
    problems: Count = Field(
        1024, description="Number of training problems. With more of them, each repeats less often."
    )
    test_problems: Count = Field(256, description="Number of test problems. No model learns from them.")
    threshold: Fraction = Field(
        1.0, description="Score of the grader from which a solution counts as correct. Higher values are stricter."
    )

    @property
    def datasets(self) -> tuple[str, ...]:
        """The names of the datasets."""
        return (self.dataset,) if isinstance(self.dataset, str) else self.dataset

    @model_validator(mode="after")
    def _mixes(self) -> ReasoningGymTask:
        names = self.datasets
        if not names or len(set(names)) < len(names):
            raise ValueError(f"task.dataset must name one or several datasets, each once, not {list(names)}")
        if min(self.problems, self.test_problems) < len(names):
            raise ValueError(f"{len(names)} datasets need at least as many task.problems and task.test_problems")
        for key, value in self.settings.items():
            if len(names) > 1 and not (key in names and isinstance(value, dict)):
                raise ValueError(
                    f"task.settings.{key}: settings of several datasets are a table for each, such as "
                    f"task.settings.{names[0]} = {{ ... }}"
                )
        return self


class CodeTask(Section):
    """Programming problems with hidden tests, graded by execution in a sandbox; `path` holds train.jsonl and test.jsonl
    in the forms of pvg/tasks/code.py. Without a `path`, pvg makes about 400 problems."""

    kind: Literal["code"] = "code"
    path: Annotated[Folder | None, AfterValidator(_local)] = Field(
        None, description="Folder with train.jsonl and test.jsonl (pvg/tasks/code.py). Unset: pvg makes problems."
    )
    limit: Count | None = Field(None, description="Maximum number of problems that pvg reads per split. Unset: all.")
    unusable: Literal["refuse", "skip"] = Field(
        "refuse", description="What pvg does with an unusable problem, for example one whose reference fails a test."
    )
    problems: Count = Field(
        320, description="Number of training problems that pvg makes. With more of them, each repeats less often."
    )
    test_problems: Count = Field(64, description="Number of test problems that pvg makes. No model learns from them.")
    visible_tests: ClassVar[int] = 3  # that a prompt shows; the others stay hidden
    sandbox: Literal["full", "reduced"] = Field(
        "full",
        description='"full": only in a complete sandbox (docs/sandbox.md). "reduced": with the available isolation.',
    )
    cpu_s: Positive = Field(
        2.0,
        description="CPU time of a solution in seconds, for all its tests together. Raise it if correct programs "
        "run out of time.",
    )


class PlayTask(Section):
    """Whole games, which the policy learns by playing against itself or a reference (docs/self-play.md)."""

    kind: Literal["play"] = "play"
    game: Annotated[str, Field(pattern=rf"^[a-z][a-z0-9-]*$|{REFERENCE_PATTERN}|^(textarena|openenv):\S+$")] = Field(
        "negotiation", description="A game of pvg, FILE.py:NAME, textarena:NAME, or openenv:URL (docs/environments.md)."
    )
    problems: Count = Field(
        1024, description="Number of starts of training games. With more of them, each repeats less often."
    )
    test_problems: Count = Field(
        256, description="Number of starts of rated games. More of them make the ratings more precise."
    )
    warmup: Annotated[int, Field(ge=0, le=10**6)] = Field(
        1, description="Largest number of phases before a fork. The number is drawn for each start."
    )
    horizon: Count | None = Field(None, description="Phases of a continuation. Unset: to the end of the game.")
    reward: Literal["horizon", "dense"] = Field(
        "horizon",
        description="Change in value from the decision to the end of the continuation, or to the seat's next decision.",
    )
    groups: Literal["first", "phase", "stratified"] = Field(
        "first",
        description="Decisions that are compared: those at the fork, those of a start and phase, or those of a phase "
        "and value.",
    )
    opponent: PlayOpponent = Field("self", description="Who plays the other seats in training.")
    references: Annotated[tuple[PlayReference, ...], Field(strict=False)] = Field(
        ("random", "greedy", "base"), description="Opponents of the rating after each round."
    )


# Settings of other tables that self-play has with one value only.
PLAY_ONLY: dict[str, str | int] = {
    "rollout.prefetch": "none",
    "rollout.deadline": "none",
    "training.dynamic_sampling": 0,
    "game.protocol": "direct",
    "game.schedule": "stackelberg",
    "game.stop": "steps",
}


class DiplomacyPlanTask(Section):
    """Plans on the full Diplomacy map: orders and claims that no reply of the others refutes (docs/diplomacy.md)."""

    kind: Literal["diplomacy_plan"] = "diplomacy_plan"
    problems: Count = Field(256, description="Number of training problems. With more of them, each repeats less often.")
    test_problems: Count = Field(64, description="Number of test problems. No model learns from them.")


class OpenEnvTask(Section):
    """Environments of an OpenEnv server whose episodes take one step: the prompt is the problem, the reward the grade
    (docs/environments.md)."""

    kind: Literal["openenv"] = "openenv"
    url: Annotated[str, Field(pattern=r"^(https?|wss?)://[^/\s?#@]+(/[^\s?#]*)?$")] = Field(
        "http://127.0.0.1:8010", description="URL of the server, without /ws."
    )
    prompt_field: NotEmpty = Field("prompt", description="Field of the observation that holds the prompt.")
    action_field: NotEmpty = Field("message", description="Field of the action that takes the completion.")
    threshold: float = Field(
        1.0, description="Reward from which a completion counts as correct. Higher values are stricter."
    )
    problems: Count = Field(256, description="Number of training problems. With more of them, each repeats less often.")
    test_problems: Count = Field(64, description="Number of test problems. No model learns from them.")
    sessions: Count = Field(1, description="Sessions that pvg uses at once. Many servers allow only one.")


class DiplomacyMiniTask(Section):
    """Plans on a map of 8 provinces that hold against every reply: `deg/bf>d?` -> `d.;e+d;g.` (docs/diplomacy.md)."""

    kind: Literal["diplomacy_mini"] = "diplomacy_mini"
    problems: Count = Field(700, description="Number of training problems. With more of them, each repeats less often.")
    test_problems: Count = Field(192, description="Number of test problems. No model learns from them.")


class CustomTask(Section):
    """A task in a file of your own: `source` names the class, and `settings` are its arguments (docs/research.md)."""

    kind: Literal["custom"] = "custom"
    source: Reference = Field("my_task.py:MyTask", description="The class of the task, as FILE.py:NAME.")
    settings: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of the class.")


TASKS: dict[str, type[Section]] = {
    "modchain": ModchainTask,
    "gsm8k": Gsm8kTask,
    "data": DataTask,
    "reasoning_gym": ReasoningGymTask,
    "code": CodeTask,
    "diplomacy_mini": DiplomacyMiniTask,
    "diplomacy_plan": DiplomacyPlanTask,
    "play": PlayTask,
    "openenv": OpenEnvTask,
    "custom": CustomTask,
}
TaskSection = Annotated[
    ModchainTask
    | Gsm8kTask
    | DataTask
    | ReasoningGymTask
    | CodeTask
    | DiplomacyMiniTask
    | DiplomacyPlanTask
    | PlayTask
    | OpenEnvTask
    | CustomTask,
    ByKind("modchain"),
]
