"""Forward passes over a batch: which rows go through the model together, and their log-probs.

The loss and the passes without gradient (reference, recomputed) use the same computation, so equal weights give equal
numbers: ratios of 1 and a KL of 0.

With shared prompts, what rows have in common is computed once, forward and backward: prompts, earlier turns, and rows
with the same tokens. A policy with low entropy often repeats solutions within a group: in the embedded game nearly half
of the rows repeat another row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from pvg.config.training import Training
from pvg.errors import ConfigurationError, MissingRequirementError, counted
from pvg.models.compute import autocast
from pvg.models.logprobs import check_logits, completion_logprobs, shared_prompt_logprobs
from pvg.models.packing import Trie, pad_right, row_batches, token_budget_batches
from pvg.models.shared_prompts import check_packing, check_window
from pvg.records import Float32
from pvg.training.batch import PolicyBatch


@dataclass(frozen=True, slots=True)
class ForwardSettings:
    """`token_budget`: the most tokens of a forward pass, those that rows have in common counted once; without shared
    prompts, positions with padding. The others as in Training."""

    temperature: float
    token_budget: int
    pad_id: int
    logits_chunk: int | None = None  # None: as many as suit the device
    shared_prompts: bool = True
    fused_layers: bool = True
    precision: str = "float32"
    router_replay: bool = False

    @classmethod
    def of(
        cls,
        section: Training,
        temperature: float,
        pad_id: int,
        precision: str = "float32",
        *,
        fused_layers: bool = True,
    ) -> ForwardSettings:
        return cls(
            temperature,
            section.micro_batch_tokens,
            pad_id,
            None,
            section.shared_prompts,
            fused_layers,
            precision,
            section.router_replay,
        )


def fitted(section: Training, module: nn.Module, longest: int) -> tuple[Training, str]:
    """The section, without `shared_prompts` if `module` cannot compute rows of up to `longest` tokens in this way, and
    then the reason."""
    if section.shared_prompts:
        try:
            check_packing(module)
            check_window(module, longest)
        except ConfigurationError as error:
            why = f"{error.message} So training computes each row with its own prompt."
            return section.model_copy(update={"shared_prompts": False}), why
    return section, ""


def forward_batches(batch: PolicyBatch, rows: NDArray[np.int64], settings: ForwardSettings) -> list[NDArray[np.int64]]:
    """`rows` of the batch in parts that fit into one forward pass. What rows of a part have in common counts once.

    Raises ConfigurationError if a single row exceeds the token budget.
    """
    if not settings.shared_prompts:
        return [rows[part] for part in token_budget_batches(batch.lengths_N[rows], settings.token_budget)]
    sequences = [batch.sequences[row] for row in rows]
    parts = row_batches(
        sequences, batch.prompt_lengths[rows], settings.token_budget, prompts_alone=settings.router_replay
    )
    return [rows[part] for part in parts]


def batch_logprobs(module: nn.Module, batch: PolicyBatch, settings: ForwardSettings) -> Tensor:
    """logprobs_BL float32, nats, of all rows in one forward pass: at completion tokens, 0 elsewhere. Differentiable.
    Uses the caller's autocast."""
    if settings.router_replay:
        from pvg.models.routing import replayed_experts

        check_logits(module)  # runs own forward passes, which must not happen during a replay
        if settings.shared_prompts:
            check_packing(module, settings.fused_layers)
        experts_TMK = _experts_by_position(batch, settings.shared_prompts).to(next(module.parameters()).device)
        with replayed_experts(module, experts_TMK):
            return _logprobs(module, batch, settings)
    return _logprobs(module, batch, settings)


def _logprobs(module: nn.Module, batch: PolicyBatch, settings: ForwardSettings) -> Tensor:
    if settings.shared_prompts:
        return shared_prompt_logprobs(
            module,
            batch.sequences,
            batch.prompt_lengths,
            temperature=settings.temperature,
            logits_chunk=settings.logits_chunk,
            fused_layers=settings.fused_layers,
            prompts_alone=settings.router_replay,  # the same tokens may have other experts in another completion
        )
    device = next(module.parameters()).device
    ids_BL, lengths_B = pad_right(batch.sequences, settings.pad_id, device)
    prompt_lengths_B = torch.from_numpy(batch.prompt_lengths.astype(np.int64)).to(device)
    return completion_logprobs(
        module,
        ids_BL,
        lengths_B,
        prompt_lengths_B,
        temperature=settings.temperature,
        logits_chunk=settings.logits_chunk,
    )


def _experts_by_position(batch: PolicyBatch, shared_prompts: bool) -> Tensor:
    """The batch's routed experts [T, layers, k] in the order of a forward pass's tokens: that of `pack_rows`, or of
    `pad_right`'s positions (any value at padding). Raises ValueError if the batch has none."""
    rows = batch.routed_experts
    if rows is None:
        raise ValueError("router replay requires routed_experts")
    if shared_prompts:
        trie = Trie.of(batch.sequences, batch.prompt_lengths, prompts_alone=True)
        return torch.from_numpy(trie.tokens_of(rows))
    layers, k = rows[0].shape[1:]
    experts_BLMK = np.empty((len(rows), int(batch.lengths_N.max()), layers, k), dtype=rows[0].dtype)
    experts_BLMK[:] = np.arange(k)
    for number, row in enumerate(rows):
        experts_BLMK[number, : len(row)] = row
    return torch.from_numpy(experts_BLMK).flatten(0, 1)


def recompute_logprobs(module: nn.Module, batch: PolicyBatch, settings: ForwardSettings) -> list[Float32]:
    """float32 [C] per row, in batch order: log-probs in nats of the completion tokens under `module`. For the KL's
    reference policy, for `rollout.logprobs = "recomputed"`, and for the KL of the legibility tax.

    No gradients. Blocks, so call it in the trainer's executor. Raises ConfigurationError if a row exceeds the token
    budget, and MissingRequirementError if the GPU has too little memory.
    """
    device = next(module.parameters()).device
    found: list[Float32] = [np.zeros(0, dtype=np.float32)] * len(batch)
    with torch.no_grad(), autocast(settings.precision, device):
        for rows in forward_batches(batch, np.arange(len(batch)), settings):
            part = batch.select(rows)
            try:
                flat = batch_logprobs(module, part, settings).cpu().numpy()[part.completion_mask()]
            except torch.OutOfMemoryError:
                raise MissingRequirementError(
                    f"The GPU has too little memory for the log-probs of {counted(len(rows), 'solution')} together.",
                    "Lower training.micro_batch_tokens, and continue: pvg train --resume RUN -s "
                    "training.micro_batch_tokens=N, or pvg evaluate RUN -s training.micro_batch_tokens=N",
                ) from None
            for row, values in zip(rows, np.split(flat, np.cumsum(part.completion_lengths_N)[:-1]), strict=True):
                found[row] = values
    return found
