"""A game whose servers hold the base model: the trainer computes no log-probs of the KL penalty's reference."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from aiohttp import web
from small_games import StopAt, changed, prover_rows

SERVING = Path(__file__).parent.parent / "servers"
sys.path.insert(0, str(SERVING))

import fake_vllm  # noqa: E402
from fake_vllm import FakeOptions, FakeVllm  # noqa: E402

from pvg.game.run import play  # noqa: E402
from pvg.models import open_model  # noqa: E402
from pvg.models.language_model import LanguageModel  # noqa: E402
from pvg.models.logprobs import completion_logprobs  # noqa: E402
from pvg.servers.control import KEY_VARIABLE  # noqa: E402
from pvg.store.run_directory import RunDirectory  # noqa: E402
from pvg.training.losses import PolicyObjective  # noqa: E402

pytestmark = pytest.mark.slow

KEY = "the-key-of-the-game"


class WithBase(FakeVllm):
    """Samples and computes log-probs of prompts with the game's own base, whatever the adapter. `beside`: for each of
    the latter requests, how many solutions were in progress."""

    def __init__(self, options: FakeOptions, base: LanguageModel) -> None:
        super().__init__(options, scorer=lambda weights, ids: self.logprobs(ids))
        self.base, self.scoring, self.beside = base, 0, list[int]()
        self.made: dict[tuple[tuple[int, ...], int], list[int]] = {}

    def sampled(self, _: str, prompt: tuple[int, ...], seed: int, position: int, stop: object) -> tuple[int, float]:
        ids = self.made.setdefault((prompt, seed), [])
        del ids[position:]  # of an earlier process of the run
        with torch.inference_mode():
            logprobs_V = self.base.module(torch.tensor([[*prompt, *ids]])).logits[0, -1].log_softmax(-1)
        draw = torch.Generator().manual_seed(seed + position)
        ids.append(token := int(torch.multinomial(logprobs_V.exp(), 1, generator=draw)))
        return token, float(logprobs_V[token])

    def logprobs(self, ids: Any) -> list[float]:
        ids_BL, length_B = torch.tensor([list(ids)]), torch.tensor([len(ids)])
        with torch.inference_mode():
            found = completion_logprobs(self.base.module, ids_BL, length_B, torch.ones_like(length_B))
        return [float(value) for value in found[0, 1:]]

    async def _answered(self, request: web.Request, body: dict[str, Any], name: str) -> web.StreamResponse:
        if body["sampling_params"].get("prompt_logprobs") is None:
            return await super()._answered(request, body, name)
        assert body.get("model") is None
        self.scoring += 1
        self.beside.append(self.running - self.scoring)
        try:
            return await super()._answered(request, body, name)
        finally:
            self.scoring -= 1


@pytest.mark.parametrize(
    ("temperature", "prefetch", "logprobs"),
    [(1.0, "none", "sampled"), (1.0, "fresh", "sampled"), (0.8, "none", "sampled"), (1.0, "none", "recomputed")],
)
def test_servers_compute_the_reference_while_they_sample(
    temperature: float, prefetch: str, logprobs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    recompute, passes = PolicyObjective.recompute, []
    monkeypatch.setattr(PolicyObjective, "recompute", lambda *parts: passes.append(1) or recompute(*parts))
    settings = {
        "rollout.engine": "vllm",
        "rollout.temperature": temperature,
        "rollout.prefetch": prefetch,
        "rollout.logprobs": logprobs,
        "weights.transport": "lora",
        "weights.root": str(tmp_path / "weights"),
        "weights.canary_prompts": 0,  # the tests' own server samples from nothing that the trainer knows
        "training.adapters.rank": 2,
        "training.steps": 4,
        "training.learning_rate": 5e-3,
    }

    async def work() -> tuple[RunDirectory, list[int]]:
        with open_model(changed({}).models.prover, torch.device("cpu")) as base:
            options = FakeOptions(root=tmp_path / "weights", key=KEY, max_lora_rank=8, token_ms=2.0, max_num_seqs=4)
            async with WithBase(options, base) as server:
                monkeypatch.setattr(fake_vllm, "sampled", server.sampled)
                experiment = changed({**settings, "serving.servers": [server.url]})
                run = RunDirectory.create(tmp_path, "drill", experiment)
                for stop_at, resume in ((("train_prover", 3), False), (("", 0), True)):
                    observer = StopAt(stop := asyncio.Event(), *stop_at)
                    with run.lock():
                        await play(experiment, run, observer=observer, stop=stop, resume=resume)
                return run, server.beside

    run, beside = asyncio.run(work())
    rows = prover_rows(run)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    served = temperature == 1.0 and logprobs == "sampled"
    assert bool(passes) != served
    assert bool(beside) == served
    assert rows[0]["metrics"]["kl"] == pytest.approx(0.0, abs=1e-6)  # of the start, token by token
    assert rows[3]["metrics"]["kl"] > 1e-5
    assert not served or np.mean(np.array(beside) > 0) > 0.5
