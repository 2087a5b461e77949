"""A run's verifier in other frameworks: it scores what their models write.

    from pvg.bridges import inspect_scorer, reward_function, task_reward

    Task(dataset, solver=generate(), scorer=inspect_scorer("runs/mine"))       # inspect-ai
    class Mine(vf.Task): pvg_verifier = vf.reward(task_reward("runs/mine"))    # verifiers
    GRPOTrainer(model, reward_funcs=reward_function("runs/mine"), ...)         # TRL

`value` is "score" (the verifier's logit), "accepted" (1 if the score reaches the run's threshold, else 0), or
"probability" (of being correct; needs `pvg evaluate RUN --parts calibration`). The weights are loaded at the first
score, by torch in this process. Each function raises UsageError for a run, a round or a value that cannot serve; a
solution that is too long for the verifier raises ConfigurationError when it is scored.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Literal, get_args

from pvg.api import Run
from pvg.errors import MissingRequirementError, UsageError
from pvg.export.finished import FinishedRound, Verdict
from pvg.installation import install_extra
from pvg.telemetry.waits import in_background

if TYPE_CHECKING:
    from pathlib import Path

    from pvg.verifier.scorer import VerifierScorer

Value = Literal["score", "accepted", "probability"]
NAME = "pvg_verifier"  # in the logs of the other frameworks


class RunVerifier:
    """The verifier of a finished round, for callers in any thread and event loop."""

    def __init__(self, run: str | Path | Run, round_: int, value: Value) -> None:
        self._finished = FinishedRound.open((run if isinstance(run, Run) else Run(run)).directory, round_)
        self._calibration, self._value = self._finished.calibration(), value
        if value not in get_args(Value):
            raise UsageError(f"value = {value!r} is not known.", f"Known: {', '.join(get_args(Value))}.")
        if value == "probability" and self._calibration is None:
            name = self._finished.run.argument
            raise UsageError(
                f"Round {self._finished.round} of {name} has no calibration.",
                f"Make one: pvg evaluate {name} --parts calibration",
            )
        _ = self._finished.verifier_name  # raises for a run without a verifier
        self._scorer: VerifierScorer | None = None
        self._opening = asyncio.Lock()

    def ask(self, rows: Sequence[tuple[str, str]]) -> Future[list[Verdict]]:
        """The verdicts on questions and their solutions."""
        return in_background(self._verdicts(rows))

    def number(self, verdict: Verdict) -> float:
        return float(verdict.plain()[self._value])

    async def _verdicts(self, rows: Sequence[tuple[str, str]]) -> list[Verdict]:
        from pvg.verifier.scorer import TextSolution

        async with self._opening:
            if self._scorer is None:
                self._scorer = await asyncio.to_thread(self._finished.scorer)
        texts = [TextSolution(f"{NAME} {number}", *row) for number, row in enumerate(rows)]
        threshold = self._scorer.threshold
        assert threshold is not None, "the scorer of a finished round has one"
        scores_N = await self._scorer.score(texts)
        return [Verdict.of(float(score), threshold, self._calibration) for score in scores_N]


def text_of(content: Any) -> str:
    """The text of what a model wrote: a text, a message, its parts, or messages, of which the last counts."""
    if isinstance(content, str):
        return content
    if isinstance(content, list | tuple):
        parts = [part for part in content if _field(part, "type") == "text"]
        return (
            "".join(str(_field(part, "text")) for part in parts) if parts else text_of(content[-1]) if content else ""
        )
    return text_of(_field(content, "content") or "")


def question_of(prompt: Any) -> str:
    """The question in a prompt: a text, or messages, of which the last one of the user counts."""
    if isinstance(prompt, str):
        return prompt
    asked = [message for message in prompt if _field(message, "role") == "user"]
    if not asked:
        raise UsageError("The prompt has no message of the role 'user'.", "Give the data a column 'question'.")
    return text_of(asked[-1])


def _field(holder: Any, name: str) -> Any:
    return holder.get(name) if isinstance(holder, dict) else getattr(holder, name, None)


def reward_function(run: str | Path | Run, round: int = -1, value: Value = "score") -> Callable[..., list[float]]:
    """A reward function of TRL's trainers. The question of a completion is the column `question` of the data set if it
    has one, otherwise the prompt."""
    verifier = RunVerifier(run, round, value)

    def pvg_verifier(prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float]:
        questions = columns.get("question") or [question_of(prompt) for prompt in prompts]
        rows = [(question, text_of(text)) for question, text in zip(questions, completions, strict=True)]
        return [verifier.number(verdict) for verdict in verifier.ask(rows).result()]

    return pvg_verifier


def task_reward(run: str | Path | Run, round: int = -1, value: Value = "score") -> Callable[..., Any]:
    """A reward of verifiers: a method for a class of tasks, `pvg_verifier = vf.reward(task_reward(run))`. It scores the
    last reply. The question is the field `question` of the task's data if it has one, otherwise the prompt."""
    verifier = RunVerifier(run, round, value)

    async def pvg_verifier(self: Any, task: Any, trace: Any) -> float:
        question = getattr(task, "question", None) or question_of(task.prompt)
        (verdict,) = await asyncio.wrap_future(verifier.ask([(question, trace.last_reply)]))
        return verifier.number(verdict)

    return pvg_verifier


def inspect_scorer(run: str | Path | Run, round: int = -1, value: Value = "accepted") -> Any:
    """A scorer of inspect-ai. The question is the input of the sample, and the target is not used. "accepted" gives
    CORRECT or INCORRECT with the metric accuracy, the other values numbers with their mean. The metadata of each score
    has all values."""
    try:
        from inspect_ai.scorer import CORRECT, INCORRECT, Score, accuracy, mean, scorer, stderr
    except ModuleNotFoundError as error:
        raise MissingRequirementError(
            f"inspect_scorer needs the package inspect-ai (there is no module {error.name!r}).",
            install_extra("bridges"),
        ) from None
    verifier = RunVerifier(run, round, value)

    @scorer(metrics=[accuracy() if value == "accepted" else mean(), stderr()], name=NAME)  # type: ignore[untyped-decorator]
    def pvg_verifier() -> Any:
        async def score(state: Any, target: Any) -> Any:
            (verdict,) = await asyncio.wrap_future(verifier.ask([(state.input_text, state.output.completion)]))
            found = (CORRECT if verdict.accepted else INCORRECT) if value == "accepted" else verifier.number(verdict)
            return Score(value=found, answer=state.output.completion, metadata=verdict.plain())

        return score

    return pvg_verifier()
