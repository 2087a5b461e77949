"""The bridges to inspect-ai, verifiers and TRL: each runs the real package on a run's models (`make test-bridges`)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pvg.api import Run
from pvg.bridges import inspect_scorer, question_of, reward_function, task_reward, text_of
from pvg.errors import UsageError
from pvg.export.finished import FinishedRound
from pvg.export.folders import export_player
from pvg.verifier.scorer import VerifierScorer

pytestmark = pytest.mark.slow

os.environ.setdefault("HF_HUB_OFFLINE", "1")
QUESTIONS = ["7+5+8?", "1+2+3?", "9+9+9?", "4+0+6?"]
SOLUTIONS = ["7+5=2;2+8=0;A0", "1+2=3;3+3=6;A6", "9+9=1;1+9=0;A0", "A1"]


@pytest.fixture(scope="module")
def run(folder: Path) -> Run:
    return Run("mine")


@pytest.fixture(scope="module")
def prover(run: Run) -> Path:
    """The run's prover as a folder for transformers."""
    export_player(FinishedRound.open(run.directory), "prover", Path("prover"))
    return Path("prover").absolute()


def scores_of(run: Run, questions: Sequence[str], solutions: Sequence[str]) -> list[float]:
    with VerifierScorer.load(run) as scorer:
        return [
            float(scorer.score_texts(question, [solution])[0])
            for question, solution in zip(questions, solutions, strict=True)
        ]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("A1", "A1"),
        ([{"role": "assistant", "content": "A1"}], "A1"),
        ([{"role": "user", "content": "no"}, {"role": "assistant", "content": [{"type": "text", "text": "A1"}]}], "A1"),
        ([], ""),
        ([{"role": "assistant", "content": None}], ""),
    ],
)
def test_a_completion_is_a_text_or_messages(content: Any, text: str) -> None:
    assert text_of(content) == text


def test_a_question_is_the_last_message_of_the_user() -> None:
    messages = [{"role": "system", "content": "Solve."}, {"role": "user", "content": "7+5?"}]
    assert question_of([*messages, {"role": "assistant", "content": "Ok."}]) == question_of("7+5?") == "7+5?"
    with pytest.raises(UsageError, match="no message of the role 'user'"):
        question_of(messages[:1])


def test_what_cannot_serve_is_refused_before_the_first_score(run: Run) -> None:
    for make in (reward_function, task_reward):
        with pytest.raises(UsageError, match="pvg evaluate"):
            make(run, value="probability")
        with pytest.raises(UsageError, match="is not known"):
            make(run, value="logit")  # type: ignore[arg-type]
        with pytest.raises(UsageError):
            make("missing")


def test_a_reward_is_the_score_of_the_run(run: Run) -> None:
    wanted = scores_of(run, QUESTIONS, SOLUTIONS)
    reward, accepted = reward_function("mine"), reward_function(run.path, value="accepted")
    prompts = [f"H{question}" for question in QUESTIONS]
    assert reward(prompts, SOLUTIONS, question=QUESTIONS, trainer_state=None) == wanted
    assert reward(QUESTIONS, SOLUTIONS) == wanted
    with VerifierScorer.load(run) as scorer:
        assert scorer.threshold is not None
        assert accepted(QUESTIONS, SOLUTIONS) == [float(score >= scorer.threshold) for score in wanted]


def test_a_task_of_verifiers_is_rewarded(run: Run) -> None:
    pytest.importorskip("verifiers", reason="`make test-bridges` installs it and runs this test")
    import verifiers.v1 as vf

    class Sums(vf.Task[vf.TaskData]):
        pvg_verifier = vf.reward(task_reward(run), weight=2.0)

    def trace_of(question: str, solution: str) -> Any:
        messages = vf.AssistantMessage(content="A0"), vf.AssistantMessage(content=solution)
        nodes = [vf.MessageNode(message=message, sampled=True) for message in messages]
        agent = vf.AgentInfo(config=vf.AgentConfig())
        return vf.Trace(task=vf.TraceTask(type="Sums", data=vf.TaskData(prompt=question)), agent=agent, nodes=nodes)

    async def scored() -> list[Any]:
        traces = [trace_of(*row) for row in zip(QUESTIONS, SOLUTIONS, strict=True)]
        await asyncio.gather(*(Sums(trace.task.data).score(trace) for trace in traces))
        return traces

    wanted = scores_of(run, QUESTIONS, SOLUTIONS)
    for traces in (asyncio.run(scored()), asyncio.run(scored())):  # in any event loop
        assert [trace.rewards["pvg_verifier"].score for trace in traces] == wanted
        assert [trace.reward for trace in traces] == [2.0 * score for score in wanted]


def test_inspect_evaluates_the_prover_with_the_verifier(run: Run, prover: Path, tmp_path: Path) -> None:
    inspect_ai = pytest.importorskip("inspect_ai", reason="`make test-bridges` installs it and runs this test")
    from inspect_ai.dataset import Sample
    from inspect_ai.model import GenerateConfig
    from inspect_ai.solver import generate

    task = inspect_ai.Task(
        dataset=[Sample(input=question) for question in QUESTIONS],
        solver=generate(),
        scorer=[inspect_scorer(run), inspect_scorer(run, value="score")],
        config=GenerateConfig(max_tokens=20),
    )
    (log,) = inspect_ai.eval(
        task,
        model="hf/local",
        model_args={"model_path": str(prover), "device": "cpu"},
        log_dir=str(tmp_path),
        display="none",
    )
    assert log.status == "success", log.error
    texts = [sample.output.completion for sample in log.samples]
    wanted = scores_of(run, QUESTIONS, texts)
    found = [list(sample.scores.values()) for sample in log.samples]
    assert [number.value for _, number in found] == wanted
    assert [verdict.value == "C" for verdict, _ in found] == [verdict.metadata["accepted"] for verdict, _ in found]
    assert [verdict.metadata["score"] for verdict, _ in found] == wanted
    accuracy = log.results.scores[0].metrics["accuracy"].value
    assert accuracy == np.mean([verdict.value == "C" for verdict, _ in found])


def test_trl_trains_with_the_verifier_as_its_reward(run: Run, prover: Path, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl", reason="`make test-bridges` installs it and runs this test")
    from datasets import Dataset

    seen: list[tuple[str, str]] = []

    def keep(prompts: list[str], completions: list[str], question: list[str], **_: Any) -> list[float]:
        seen.extend(zip(question, completions, strict=True))
        return [0.0] * len(completions)

    settings = trl.GRPOConfig(
        output_dir=str(tmp_path),
        max_steps=1,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=20,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        bf16=False,
    )
    trainer = trl.GRPOTrainer(
        model=str(prover),
        reward_funcs=[reward_function(run), keep],
        args=settings,
        train_dataset=Dataset.from_list([{"prompt": f"H{q}", "question": q} for q in QUESTIONS]),
    )
    trainer.train()
    logged = next(entry for entry in trainer.state.log_history if "rewards/pvg_verifier/mean" in entry)
    assert len(seen) == 8
    wanted = scores_of(run, *zip(*seen, strict=True))
    np.testing.assert_allclose(logged["rewards/pvg_verifier/mean"], np.mean(wanted), rtol=1e-4, atol=1e-5)
