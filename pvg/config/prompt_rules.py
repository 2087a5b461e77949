"""Settings of `[prompts]` that cannot work with other settings, or are probably not intended.

See pvg.config.rules and pvg.config.cautions.
"""

from __future__ import annotations

from collections.abc import Iterator

from pvg.config.prompts import TEXTS_FOR_A_TASK, WordedPrompts
from pvg.config.sections import AllSections

# Sources of models that were not trained with the tags of prompts = "tag". A folder may hold one that was.
WITHOUT_TAGS = ("hf:", "gguf:")


def same_prompt(experiment: AllSections) -> str:
    """Why both roles get one prompt, with a remedy; "" if they do not."""
    prompts = experiment.prompts
    if prompts.kind == "plain":
        return "prompts = 'plain' gives both the same prompt; set it to 'tag', 'chat' or 'text'"
    if not isinstance(prompts, WordedPrompts) or prompts.helpful is None or prompts.helpful != prompts.sneaky:
        return ""
    if prompts.examples is None or any(example.helpful != example.sneaky for example in prompts.examples):
        return ""
    return "prompts.helpful and prompts.sneaky are the same text; change one of them"


def prompt_conflicts(experiment: AllSections) -> Iterator[str]:
    """Texts that no player would read."""
    prompts = experiment.prompts
    if not isinstance(prompts, WordedPrompts):
        return
    own = list(prompts.model_dump(exclude_none=True, include=set(TEXTS_FOR_A_TASK)))
    if own and experiment.task.kind == "play":
        yield f"prompts.{own[0]} has no effect with task.kind = 'play', whose prompts come from the game; leave it out"


def prompt_warnings(experiment: AllSections) -> Iterator[str]:
    prompts, source, task = experiment.prompts.kind, experiment.models.prover.source, experiment.task.kind
    if task == "play":
        return
    yield from _empty_instructions(experiment)
    if prompts == "tag" and source.startswith(WITHOUT_TAGS):
        yield (
            f"prompts = 'tag' puts only H or S before the question, which models.prover.source = {source!r} has never "
            "learned; set prompts to 'chat', or to 'text' for a base model"
        )
    if prompts == "plain" and 0.0 < experiment.game.sneaky_share < 1.0:
        yield (
            "prompts = 'plain' gives both roles the same prompt; set it to 'chat' or 'text', or game.sneaky_share to 0"
        )


def _empty_instructions(experiment: AllSections) -> Iterator[str]:
    """An empty text may be intended, or be left of `-s prompts.helpful=`."""
    prompts = experiment.prompts
    if not isinstance(prompts, WordedPrompts):
        return
    for name in ("helpful", "sneaky"):
        text = getattr(prompts, name)
        if text is not None and not text.strip():
            yield f"prompts.{name} is empty, so its role gets no instructions; leave it out for those of the task"
