"""Writes tests/traces/written_by and examples/traces/trl: each file by the real package, in an environment that has it.

.venv-peers/bin/python tests/traces/write_fixtures.py trl          # trl 1.16.0
VENV/bin/python tests/traces/write_fixtures.py verifiers           # pip install verifiers==0.4.0
VENV/bin/python tests/traces/write_fixtures.py inspect             # pip install inspect-ai==0.3.285
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

OUT = Path(__file__).parent / "written_by"
EXAMPLE = Path(__file__).parents[2] / "examples/traces/trl"
MODEL = Path(__file__).parents[2] / "pvg/models/embedded/modchain-prover"
# Question, written solution, true answer: two right ones, one wrong.
CHAINS = [
    ("7+5+8+3+6?", "7+5=2;2+8=0;0+3=3;3+6=9;A9", "9"),
    ("1+2+3+4+5?", "1+2=3;3+3=6;6+4=0;0+5=5;A5", "5"),
    ("4+4+4+4+4?", "4+4=8;8+4=3;3+4=7;7+4=1;A1", "0"),
]


def trl() -> None:
    """Two steps of GRPO on the embedded model, with log_completions."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    def accuracy_reward(completions, answer, log_extra, **_):
        log_extra("answer", list(answer))
        return [float(text.endswith(f"A{right}")) for text, right in zip(completions, answer, strict=True)]

    folder = Path(tempfile.mkdtemp())
    arguments = GRPOConfig(
        str(folder),
        max_steps=2,
        logging_steps=1,
        num_generations=4,
        per_device_train_batch_size=16,
        max_completion_length=32,
        log_completions=True,
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="no",
        seed=0,
    )
    terms = [[(7 * n + 3 * k * k + n * k) % 10 for k in range(5)] for n in range(8)]
    rows = Dataset.from_list(
        [{"prompt": f"H{'+'.join(map(str, row))}?", "answer": str(sum(row) % 10)} for row in terms]
    )
    GRPOTrainer(str(MODEL), accuracy_reward, args=arguments, train_dataset=rows).train()
    for file in sorted((folder / "completions").glob("*.parquet")):
        shutil.copy(file, EXAMPLE / file.name)


def verifiers() -> None:
    """Episodes of an evaluation, and of a training as prime-rl 0.6 logs them (prime_rl/monitors/file.py)."""
    import orjson
    import verifiers.v1 as vf
    from verifiers.v1.episode import Episode, EvalRunInfo, TrainRunInfo, TrainWorkInfo
    from verifiers.v1.graph import MessageNode
    from verifiers.v1.types import AssistantMessage, SystemMessage, UserMessage
    from verifiers.v1.utils.trace_store import write_episode

    class Chain(vf.TaskData):
        answer: str = ""

    kinds = (Chain, vf.State, vf.AgentConfig)
    folder, training = Path(tempfile.mkdtemp()), b""
    for number, (question, text, answer) in enumerate(CHAINS):
        task = vf.TraceTask[Chain](type="Chain", data=Chain(idx=number, prompt=question, answer=answer))
        messages = [SystemMessage(content="Add modulo 10."), UserMessage(content=question)]
        nodes = [MessageNode(parent=place - 1 if place else None, message=m) for place, m in enumerate(messages)]
        said = AssistantMessage(content=f"The answer is {text[-1]}.", reasoning_content=text[:-2])
        nodes.append(MessageNode(parent=1, message=said, sampled=True))
        trace = vf.Trace[kinds](agent=vf.AgentInfo(config=vf.AgentConfig()), task=task, nodes=nodes)
        trace.record_reward("correct_answer", float(text.endswith(f"A{answer}")))
        episode = Episode[kinds](task=task, run=EvalRunInfo(id="r"), traces=[trace], ok=True)
        write_episode(folder, episode)
        episode.record_run(TrainRunInfo(id="r", work=TrainWorkInfo(step=number + 1)))
        training += orjson.dumps(episode.to_record(), default=str, option=orjson.OPT_APPEND_NEWLINE)
    shutil.copy(folder / "traces.jsonl", OUT / "verifiers.jsonl")
    (OUT / "prime-rl.jsonl").write_bytes(training)


def inspect() -> None:
    """A log of an evaluation whose model says the written solutions."""
    from inspect_ai import Task, eval
    from inspect_ai.dataset import Sample
    from inspect_ai.model import ModelOutput, ModelUsage, get_model
    from inspect_ai.scorer import pattern

    folder = tempfile.mkdtemp()
    samples = [Sample(input=question, target=answer, id=str(n)) for n, (question, _, answer) in enumerate(CHAINS)]
    outputs = [ModelOutput.from_content("mockllm/model", text) for _, text, _ in CHAINS]
    for output in outputs:
        output.usage = ModelUsage(input_tokens=1, output_tokens=1, total_tokens=2)  # it would load a tokenizer
    model = get_model("mockllm/model", custom_outputs=outputs)
    eval(
        Task(dataset=samples, scorer=pattern(r"A(\d+)")), model=model, log_dir=folder, max_connections=1, display="none"
    )
    (file,) = Path(folder).glob("*.eval")
    shutil.copy(file, OUT / "inspect.eval")


if __name__ == "__main__":
    EXAMPLE.mkdir(parents=True, exist_ok=True)
    {"trl": trl, "verifiers": verifiers, "inspect": inspect}[sys.argv[1]]()
