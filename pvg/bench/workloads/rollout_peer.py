"""transformers' own `generate` in the place of the torch engine's decoding: the peer that the rollout profile names.

Everything else is shared: the dispatcher, the batches of rollout.max_rows, the prompts, the grading. `generate` repeats
the prompt of a group in every row, samples all rows until the last one ends, and gives no log-probs here (they would
cost it more): so what is compared is what a trainer built on `generate` does before it has log-probs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pvg.errors import ConfigurationError
from pvg.game.players import Players
from pvg.models.language_model import LanguageModel
from pvg.rollout.decoding import Decoded, Job, Rows, Turn
from pvg.rollout.engine import Sampling
from pvg.rollout.torch_engine import TorchEngine
from pvg.telemetry.spans import span


class GenerateRows:
    """`Rows` by `generate`, one batch at a time. All jobs must have the same sampling."""

    def __init__(self, model: LanguageModel) -> None:
        self._model = model
        model.module.generation_config.eos_token_id = None  # what is not asked for here is taken from there

    @property
    def joins(self) -> bool:
        return False

    @torch.inference_mode()
    def turn(self, jobs: Sequence[Job], dropped_N: NDArray[np.bool_]) -> Turn:
        """Rows whose callers have left are decoded on: `generate` does not ask."""
        del dropped_N
        sampling = jobs[0].request.sampling
        if any(job.request.sampling != sampling for job in jobs):
            raise ConfigurationError("generate samples all rows of a batch alike.", 'Set workload.engine to "pvg".')
        with span("decode", device=True):
            tokens_NC = self._generated(jobs, sampling)
        results = [_cut(row, sampling) for row in tokens_NC]
        lengths = [len(result.token_ids) for result in results]
        finished = [(job.ticket, result) for job, result in zip(jobs, results, strict=True)]
        return Turn(finished, max(lengths), sum(lengths))

    def _generated(self, jobs: Sequence[Job], sampling: Sampling) -> NDArray[np.int64]:
        prompts, module = [job.request.prompt_ids for job in jobs], self._model.module
        longest = max(map(len, prompts))
        ids_NP = np.zeros((len(jobs), longest), dtype=np.int64)
        for row, prompt in zip(ids_NP, prompts, strict=True):
            row[longest - len(prompt) :] = prompt
        starts_N1 = longest - np.asarray([len(prompt) for prompt in prompts])[:, None]
        torch.manual_seed(jobs[0].request.seed % 2**63)
        generated: Tensor = module.generate(
            input_ids=torch.from_numpy(ids_NP).to(self._model.device),
            attention_mask=torch.from_numpy(np.arange(longest) >= starts_N1).long().to(self._model.device),
            do_sample=True,
            max_new_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            eos_token_id=list(sampling.stop_ids) or None,
            pad_token_id=0,
        )
        tokens_NC: NDArray[np.int64] = generated[:, longest:].cpu().numpy()
        return tokens_NC


class GenerateEngine(TorchEngine):
    """The torch engine with `generate` inside."""

    def _open_rows(self) -> Rows:
        return GenerateRows(self._model)


def open_generate_engine(players: Players) -> GenerateEngine:
    """Beside the players' own engine, with weights of its own; the caller closes it."""
    rollout = players.experiment.rollout
    dtype = None if rollout.dtype == "model" else getattr(torch, rollout.dtype)
    return GenerateEngine(
        players.base.copy(dtype),
        max_rows=rollout.max_rows,
        max_in_flight=rollout.concurrency,
        executor=players.executor,
        shared_prefill=False,
    )


def _cut(tokens_C: NDArray[np.int64], sampling: Sampling) -> Decoded:
    """Up to the first stop token; log-probs that nobody computed are NaN."""
    stops = np.flatnonzero(np.isin(tokens_C, sampling.stop_ids))
    length = int(stops[0]) + 1 if stops.size else len(tokens_C)
    logprobs = np.full(length, np.nan, dtype=np.float32)
    return Decoded(tokens_C[:length].astype(np.int32), logprobs, "stop" if stops.size else "length")
