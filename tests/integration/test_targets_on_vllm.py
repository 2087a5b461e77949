"""Readers of traces and targets of attacks behind a real vLLM: text completions, chat, and a classifier."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import orjson
import pytest
import torch
from transformers import LlamaConfig, LlamaForSequenceClassification
from vllm_servers import EMBEDDED, Server, started

from pvg.attack.targets import TargetAnswer, TargetSpec, open_target
from pvg.tasks.modchain import chain_problem, clean_trace
from pvg.traces.loaders import parts_of
from pvg.traces.readers import ToContinue, local_reader, open_reader

PROBLEM = chain_problem((7, 5, 8, 3, 6), 10)  # 7+5=2;2+8=0;0+3=3;3+6=9;A9


def answers(spec: TargetSpec, *asked: tuple[str, str]) -> list[TargetAnswer]:
    async def ask() -> list[TargetAnswer]:
        async with open_target(spec) as target:
            return [await target.judge(question, {}, text) for question, text in asked]

    return asyncio.run(ask())


@pytest.fixture(scope="module")
def chatting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The embedded prover, which continues what a chat says, with room for the verdict of a judge."""
    folder = tmp_path_factory.mktemp("chatting")
    model, template = folder / "model", folder / "template.jinja"
    shutil.copytree(EMBEDDED, model)
    config = orjson.loads((model / "config.json").read_bytes())
    (model / "config.json").write_bytes(orjson.dumps({**config, "max_position_embeddings": 2048}))
    template.write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    with started(model, folder, "--block-size", "32", "--chat-template", str(template)) as running:
        yield running


def test_a_readers_chances_are_those_of_the_model_and_it_continues_a_chat(chatting: Server) -> None:
    parts = parts_of(clean_trace(PROBLEM))
    assert parts is not None

    async def read() -> tuple[list[float], list[float], list[str]]:
        async with (
            local_reader("embedded:modchain-prover", "cpu") as local,
            open_reader(f"{chatting.url}/v1") as reader,
        ):
            pieces = [reader.whole(step) for step in ("7", "+5=2;2+8=0;", "0+3=3;3+6=9;")]
            prefixes = [pieces[:end] for end in range(1, len(pieces) + 1)]
            found = await reader.chances((), prefixes, parts)
            before = [local.whole("".join(piece.text for piece in prefix) + parts.cue).ids for prefix in prefixes]
            rows = [np.concatenate([ids, local.whole(parts.answer).ids]) for ids in before]
            expected = local.logprobs(rows, np.array(list(map(len, before))))
            written = await reader.written([ToContinue((("user", f"H{PROBLEM.question}"),), [])], 24)
            return found, np.exp(expected).tolist(), written

    found, expected, written = asyncio.run(read())
    assert found == pytest.approx(expected, rel=1e-3)
    assert found[-1] > 0.5
    assert len(written) == 1
    assert written[0]


def test_the_verdict_of_a_judge_in_a_chat_is_read(chatting: Server) -> None:
    """The judge solves the problem: it accepts those with the answer 9."""
    spec = TargetSpec(f"{chatting.url}/v1/chat/completions", template="H{problem}", verdict=("A9", "A5"), limit_s=120.0)
    other = chain_problem((1, 2, 3, 4, 5), 10)
    assert answers(spec, (PROBLEM.question, ""), (other.question, "")) == [TargetAnswer(1.0), TargetAnswer(0.0)]


def test_a_classifiers_last_probability_is_the_score(tmp_path: Path) -> None:
    model = tmp_path / "classifier"
    shutil.copytree(EMBEDDED, model, ignore=shutil.ignore_patterns("*.safetensors"))
    torch.manual_seed(0)
    given = orjson.loads((model / "config.json").read_bytes())
    config = LlamaConfig(**{**given, "num_labels": 2, "pad_token_id": 0, "dtype": "float32"})
    classifier = LlamaForSequenceClassification(config).eval()
    classifier.save_pretrained(model)
    ids = torch.tensor([[9, 12, 7, 12, 10, 15, 16, 2]])  # 7+5+8?A0
    with torch.no_grad():
        (expected,) = classifier(ids).logits.softmax(-1)[:, -1].tolist()
    with started(model, tmp_path / "server", "--runner", "pooling") as running:
        spec = TargetSpec(f"{running.url}/classify", template="{problem}{text}", threshold=0.5, limit_s=120.0)
        (answer,) = answers(spec, ("7+5+8?", "A0"))
    assert answer.score == pytest.approx(expected, abs=1e-3)
