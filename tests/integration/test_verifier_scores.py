"""Scores from a real vLLM against those of torch, for both heads and several versions of the verifier."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pvg.config import experiment
from pvg.models import open_model
from pvg.models.heads import VerifierModel, build_verifier
from pvg.records import Grade, Role, Rollout, VersionSpan
from pvg.servers.command import Purpose, find_interpreter, model_folder, server_spec
from pvg.servers.process import VllmServer
from pvg.verifier.data import VerifierTemplate
from pvg.verifier.scorer import ScoreCache, VerifierScorer
from pvg.verifier.vllm_backend import VerifierServing, VllmBackend

# Its attention heads have 32 numbers: vLLM's CPU build computes no smaller ones, such as the embedded verifier's.
SOURCE = "embedded:modchain-prover"
TOLERANCE = 1e-3  # of a score: float32 here and there, other kernels


class Heard:
    """Keeps events."""

    def __init__(self) -> None:
        self.found: list[tuple[str, dict[str, Any]]] = []

    def event(self, tag: str, **fields: Any) -> None:
        self.found.append((tag, fields))

    def weights(self, name: str, of: str = "verifier") -> list[Mapping[str, Any]]:
        return [f for tag, f in self.found if tag == "weights" and f["event"] == name and f.get("of") == of]


def settings(folder: Path, head: str, ports: Mapping[Purpose, int]) -> experiment.Experiment:
    beta = {"beta": 0.5} if head == "implicit" else {}
    return experiment.Experiment.model_validate(
        {
            "models": {"verifier": {"source": SOURCE}, "device": "cpu"},
            "verifier": {"head": {"kind": head, **beta}, "engine": "vllm", "micro_batch_tokens": 2048},
            "serving": {
                "verifier_servers": [f"http://127.0.0.1:{ports['verifier']}"],
                "reference_servers": [f"http://127.0.0.1:{ports['reference']}"] if "reference" in ports else [],
                "max_num_seqs": 32,
            },
            "weights": {"root": str(folder / "weights")},
        }
    )


@asynccontextmanager
async def running(resolved: experiment.Experiment, folder: Path, ports: Mapping[Purpose, int]) -> AsyncIterator[None]:
    interpreter = find_interpreter()
    async with AsyncExitStack() as stack:
        servers = [
            VllmServer.start(
                server_spec(
                    resolved,
                    purpose,
                    interpreter,
                    model_folder(resolved, purpose),
                    port=port,
                    log=folder / f"{purpose}.log",
                )
            )
            for purpose, port in ports.items()
        ]
        for server in servers:
            await stack.enter_async_context(server)
        yield


def rollouts(count: int, seed: int) -> list[Rollout]:
    rng = np.random.default_rng(seed)
    return [rollout("".join(rng.choice(list("0123456789+=;A"), size=rng.integers(4, 40)))) for _ in range(count)]


def rollout(text: str) -> Rollout:
    return Rollout(
        id=f"mint/{text}",
        problem_id="modchain-10-7+5+8",
        question="7+5+8?",
        reference="0",
        role=Role.HELPFUL,
        round=0,
        source="base",
        step=0,
        group=0,
        prompt_ids=np.zeros(1, dtype=np.int32),
        completion_ids=np.zeros(1, dtype=np.int32),
        logprobs=np.zeros(1, dtype=np.float32),
        spans=(VersionSpan(0, 0),),
        finish_reason="stop",
        text=text,
        grade=Grade(correct=True, well_formed=True),
    )


def train(model: VerifierModel, seed: int) -> None:
    """Move every weight, the embedding and the norms included, by a tenth of its size or more: by nats, in scores."""
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.trainable_state().values():
            spread = 0.2 if weight.numel() == 1 or not weight.any() else float(weight.std()) or 0.1
            weight.add_(0.15 * spread * torch.randn(weight.shape, generator=noise))


class Bench:
    """One verifier, scored by torch and by servers."""

    def __init__(self, resolved: experiment.Experiment, executor: ThreadPoolExecutor) -> None:
        self.heard = Heard()
        self.model = build_verifier(resolved.verifier, open_model(resolved.models.verifier, torch.device("cpu")))
        self.serving = VerifierServing(resolved, executor, self.heard, run="test")
        self._section = resolved.verifier
        self._executor = executor

    def scorer(self, *, on_servers: bool) -> VerifierScorer:
        template = VerifierTemplate(self.model.tokenizer, "plain", self._section.head.kind)
        backend = VllmBackend(self.serving, self.model, template.key, ScoreCache(1000)) if on_servers else None
        return VerifierScorer(
            self.model,
            template,
            self.model.version(),
            cache_entries=1000,
            token_budget=self._section.micro_batch_tokens,
            executor=self._executor,
            backend=backend,
        )

    async def gap(self, scorer: VerifierScorer, asked: list[Rollout]) -> tuple[float, np.ndarray]:
        """The largest difference from torch's scores, and these."""
        expected = await self.scorer(on_servers=False).score(asked)
        return float(np.abs(await scorer.score(asked) - expected).max()), expected


@pytest.mark.parametrize("head", ["scalar", "implicit"])
def test_scores_of_a_real_server_are_those_of_torch(head: str, tmp_path: Path) -> None:
    ports: dict[Purpose, int] = {"verifier": 8150} if head == "scalar" else {"verifier": 8151, "reference": 8152}
    resolved = settings(tmp_path, head, ports)

    async def play(executor: ThreadPoolExecutor) -> None:
        bench = Bench(resolved, executor)
        asked = rollouts(60, seed=1)
        async with running(resolved, tmp_path, ports):
            train(bench.model, seed=1)
            scorer = bench.scorer(on_servers=True)
            gap, first = await bench.gap(scorer, asked)
            assert gap < TOLERANCE
            assert first.std() > 0.1
            stats = scorer.stats
            assert (stats.hits, stats.misses) == (0, len({one.text for one in asked}))
            assert stats.forward_passes > 1

            train(bench.model, seed=2)
            scorer.set_version(bench.model.version())
            gap, second = await bench.gap(scorer, asked)
            assert gap < TOLERANCE
            assert np.abs(second - first).max() > 0.1

            same = bench.scorer(on_servers=True)  # as the next phase of a round opens one
            assert (await bench.gap(same, asked[:5]))[0] < TOLERANCE
            assert [line["version"] for line in bench.heard.weights("client.send")] == [1, 2]
            assert [line["failed"] for line in bench.heard.weights("client.done")] == [0, 0]
            proofs = bench.heard.weights("canary") + bench.heard.weights("canary", of="reference")
            assert len(proofs) == 1 + len(ports)
            assert all(line["gap"] < TOLERANCE for line in proofs)
            await bench.serving.close()
        bench.model.close()

    with ThreadPoolExecutor(1) as executor:
        asyncio.run(play(executor))
