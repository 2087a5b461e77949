"""Another task for an experiment: `-s task.kind=KIND` on the command line.

The table `[task]` of the file belongs to the file's kind, so it starts again with the defaults of the new kind. The
instructions and examples of `[prompts]` were written for the file's task, so they are dropped too. Everything else
stays. `TaskSwitch` says what was dropped. If the other tables do not fit the new task, one error names
every setting that it needs. If the overrides are wrong with any task, `load_experiment` says so.

Invariant: with the settings that the error names, no other error about settings follows.
"""

from __future__ import annotations

import copy
import importlib.util
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pvg.config.game import CompositeReward, GatedReward
from pvg.config.load import assign, chooses_task, override_settings, parse_override, read_toml, task_kind
from pvg.config.prompts import TEXTS_FOR_A_TASK, WordedPrompts
from pvg.config.rules import conflicts
from pvg.config.sections import AllSections, value_of
from pvg.config.task import (
    PLAY_ONLY,
    CustomTask,
    DataTask,
    Gsm8kTask,
    PlayTask,
    ReasoningGymTask,
    TaskSection,
)
from pvg.errors import UsageError
from pvg.installation import install_extra

# An embedded model knows only the characters of its task. Beginning of the name -> tasks that need other characters,
# with their default settings.
UNSPOKEN = {
    "modchain-": frozenset({"gsm8k", "reasoning_gym", "code", "diplomacy_mini", "diplomacy_plan"}),
    "diplomacy-": frozenset({"modchain", "gsm8k", "reasoning_gym", "code", "diplomacy_plan", "play"}),
}
# Task in characters -> its embedded prover and verifier, and the experiment that plays it. The other tasks are in
# words, and need a model that can read text.
EMBEDDED_FOR = {
    "modchain": ("modchain-prover", "modchain-verifier", "modchain"),
    "diplomacy_mini": ("diplomacy-prover", "diplomacy-verifier", "diplomacy-mini"),
    "play": ("modchain-prover", "modchain-verifier", "negotiation"),
}
# Task in words -> the experiment that plays it.
EXPERIMENT_IN_WORDS = {"gsm8k": "smollm2-gsm8k", "code": "code", "diplomacy_plan": "diplomacy-plan"}
IN_WORDS = ("hf:", "gguf:")  # sources of models that were trained on text
# The embedded models have a context of 128 tokens, and a problem in characters takes at most a fourth of it.
LONGEST_IN_CHARACTERS = 96
ROUNDS_OF_NEEDS = 5  # a setting that is needed may need another one


@dataclass(frozen=True, slots=True)
class TaskSwitch:
    """A task that the overrides chose in place of the file's. `dropped`: the settings of the file that belong to its
    task."""

    before: str
    after: str
    dropped: tuple[str, ...]

    @property
    def note(self) -> str:
        """One line for the user; empty if the file sets nothing that the switch drops."""
        names = ", ".join(self.dropped)
        change = f"task.kind = {self.after!r} replaces {self.before!r}"
        return f"{change}, so these settings of the file are dropped: {names}." if names else ""


def task_switch(path: Path, overrides: Sequence[str]) -> TaskSwitch | None:
    """The switch that `overrides` make in the experiment file `path`; None if the task has the file's kind, or if a
    setting is wrong by itself (`load_experiment` then says so).

    Raises UsageError, naming all other settings that the new task needs.
    """
    file, given = read_toml(path, "experiment"), override_settings(overrides)
    if not any(chooses_task(key) for key, *_ in given):
        return None
    before = task_kind(file)
    data, own_task = copy.deepcopy(file), copy.deepcopy(file)
    for key, value, _ in given:
        assign(data, key, value)
        if key.partition(".")[0] != "task":
            assign(own_task, key, value)
    sections, otherwise = _sections(data), _sections(own_task)
    if sections is None or sections.task.kind == before:
        return None
    after = sections.task.kind
    general = [] if otherwise is None else list(conflicts(otherwise))
    found, settings = _missing(data, sections)
    problems = [problem for problem in found if problem not in general]
    if problems:
        rest = [problem for problem in found if problem in general]
        also = f" Wrong with any task: {'; '.join(rest)}." if rest else ""
        own = EMBEDDED_FOR[after][2] if after in EMBEDDED_FOR else EXPERIMENT_IN_WORDS.get(after)
        other_models = any(setting.startswith("models.") for setting in settings)
        instead = f" Or play the experiment of this task: {own}" if own and other_models else ""
        words = " ".join(f"-s {shlex.quote(setting)}" for setting in settings)
        raise UsageError(
            f"{_typed(overrides)} needs more changes to {path}: {'; '.join(problems)}.{also}",
            f"Add: {words}{'.' if words and instead else ''}{instead}" if words else "",
        )
    return TaskSwitch(before, after, _of_the_task(file))


def _typed(overrides: Sequence[str]) -> str:
    """The override that chooses the task, as the user typed it."""
    typed = [each for each in overrides if any(chooses_task(key) for key, *_ in override_settings([each]))]
    return f"-s {shlex.quote(typed[-1])}"


def switch_note(before: dict[str, Any], after: dict[str, Any]) -> str:
    """`TaskSwitch.note` for plain data before and after a setting; empty if the kind of task is the same."""
    kinds = task_kind(before), task_kind(after)
    return TaskSwitch(*kinds, _of_the_task(before)).note if kinds[0] != kinds[1] else ""


def _of_the_task(data: dict[str, Any]) -> tuple[str, ...]:
    """The settings that another kind of task drops."""
    task, prompts = data.get("task"), data.get("prompts")
    names = [f"task.{name}" for name in task if name != "kind"] if isinstance(task, dict) else []
    if isinstance(prompts, dict):
        names += [f"prompts.{name}" for name in prompts if name in TEXTS_FOR_A_TASK]
    return tuple(sorted(names))


def _sections(data: dict[str, Any]) -> AllSections | None:
    """The sections without the rules about several of them; None if one is wrong by itself."""
    try:
        return AllSections.model_validate(data)
    except ValidationError:
        return None


def _missing(data: dict[str, Any], sections: AllSections) -> tuple[list[str], list[str]]:
    """What is wrong, and the settings to add. With them, no rule about several settings is broken, unless one of the
    problems has no setting."""
    data, problems, settings = copy.deepcopy(data), dict[str, None](), dict[str, str]()
    for _ in range(ROUNDS_OF_NEEDS):
        new = [need for need in _needs(sections) if need[0] not in problems]
        if not new:
            break
        for problem, setting in new:
            problems[problem] = None
            if setting:
                key, value = parse_override(setting)
                settings[key] = setting
                assign(data, key, value)
        found = _sections(data)
        assert found is not None, f"a setting that the switch names is wrong: {settings}"
        sections = found
    problems.update(dict.fromkeys(conflicts(sections)))
    return list(problems), list(settings.values())


# --- what a task needs: (what is wrong, the setting to add; "" where no setting helps) --------------------------------

Need = tuple[str, str]


def _needs(sections: AllSections) -> Iterator[Need]:
    yield from _task_needs(sections)
    yield from _model_needs(sections)
    yield from _reward_needs(sections)
    yield from _play_needs(sections)


def _task_needs(sections: AllSections) -> Iterator[Need]:
    task = sections.task
    if isinstance(task, ReasoningGymTask) and importlib.util.find_spec("reasoning_gym") is None:
        yield f"the package reasoning-gym is not installed (type: {install_extra('reasoning-gym')})", ""
    if isinstance(task, Gsm8kTask) and task.path is None:
        yield "task.path is not set", "task.path=hf:openai/gsm8k"
    if isinstance(task, DataTask) and task.path is None:
        yield f"task.path is not set{_words_hint(sections)}", "task.path=FILE.jsonl"
    if isinstance(task, CustomTask) and task.source == CustomTask().source and not Path("my_task.py").is_file():
        yield f"task.source is not set{_words_hint(sections)}", "task.source=FILE.py:NAME"


def _words_hint(sections: AllSections) -> str:
    """For tasks whose problems only the user knows."""
    if not sections.models.prover.source.startswith("embedded:"):
        return ""
    return (
        ", and an embedded model knows only the characters of its task (for problems in words also add "
        "-s models.prover.source=hf:OWNER/NAME -s models.verifier.source=hf:OWNER/NAME -s prompts=chat)"
    )


def _model_needs(sections: AllSections) -> Iterator[Need]:
    """Models that can write solutions of the task, and prompts that fit them."""
    kind, prompts, fitting = sections.task.kind, sections.prompts, EMBEDDED_FOR.get(sections.task.kind)
    sources = {"prover": sections.models.prover.source}
    if kind != "play":  # self-play has no verifier, and a model that reads text can play it
        sources["verifier"] = sections.models.verifier.source
    told = isinstance(prompts, WordedPrompts) and prompts.helpful is not None and kind != "diplomacy_mini"
    in_characters = fitting is not None and kind != "play" and not told
    unfit = False
    for number, (player, source) in enumerate(sources.items()):
        in_words = in_characters and source.startswith(IN_WORDS)
        if in_words or _cannot_express(source, sections.task):
            unfit = True
            model = f"embedded:{fitting[number]}" if fitting else "hf:OWNER/NAME"
            why = "is for problems in words" if in_words else "does not know the characters of this task"
            yield f"models.{player}.source = {source!r} {why}", f"models.{player}.source={model}"
    if in_characters and isinstance(prompts, WordedPrompts):
        yield f"prompts = {prompts.kind!r} has no instructions for this task", "prompts=tag"
    if unfit and not fitting and not isinstance(prompts, WordedPrompts):
        yield f"prompts = {prompts.kind!r} is for the embedded models", "prompts=chat"
    longest = sections.rollout.max_tokens
    if fitting and sources["prover"].startswith("embedded:") and longest > LONGEST_IN_CHARACTERS:
        yield f"rollout.max_tokens = {longest} is too long for the embedded models", "rollout.max_tokens=48"
    if sources.get("verifier", "").startswith("embedded:") and sections.verifier.head.kind == "yes_token":
        yield "verifier.head = 'yes_token' needs a verifier that can answer in words", "verifier.head=implicit"


def _cannot_express(source: str, task: TaskSection) -> bool:
    if isinstance(task, PlayTask) and task.game != PlayTask().game:
        return False  # only the user knows its characters
    name = source.removeprefix("embedded:")
    return name != source and any(name.startswith(start) and task.kind in kinds for start, kinds in UNSPOKEN.items())


def _reward_needs(sections: AllSections) -> Iterator[Need]:
    reward = sections.game.reward
    if isinstance(reward, GatedReward | CompositeReward) and reward.similarity_weight and sections.task.kind != "code":
        yield (
            f"game.reward.similarity_weight = {reward.similarity_weight} compares programs",
            "game.reward.similarity_weight=0.0",
        )


def _play_needs(sections: AllSections) -> Iterator[Need]:
    """Self-play: what it does not support."""
    task = sections.task
    if not isinstance(task, PlayTask):
        return
    if sections.warmup.kind != "none":
        yield "a warm start shows solutions of questions, and self-play has no questions", "warmup=none"
    for key, only in PLAY_ONLY.items():
        value = value_of(sections, key)
        if value != only:
            yield f"self-play does not support {key} = {value!r}", f"{key}={only}"
    if sections.training.groupless:
        yield (
            f"self-play needs groups, and training.loss = {sections.training.loss.kind!r} has none",
            ("training.loss=grpo"),
        )
    if sections.rollout.engine.kind == "vllm" and "base" in (task.opponent, *task.references):
        if task.opponent == "base":
            yield "task.opponent = 'base' needs a second engine", "task.opponent=self"
        references = [name for name in task.references if name != "base"] or ["random"]
        listed = ", ".join(f'"{name}"' for name in references)
        yield (
            "'base' in task.references needs a second engine, and vLLM servers have one policy",
            (f"task.references=[{listed}]"),
        )
