"""Fills rows of a `LeanCache` with known tokens, each distinct beginning computed once."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from pvg.models.packing import pad_right, token_budget_batches
from pvg.records import Int32
from pvg.rollout.decoding import PREFILL_TOKENS
from pvg.rollout.lean import LeanCache, LeanDecoder
from pvg.rollout.shared_prefixes import shared_parts


def prefill_rows(decoder: LeanDecoder, cache: LeanCache, prefix_of: Mapping[int, Int32]) -> None:
    """Fill the cache's rows with their prefixes int32 [P]: all known tokens but the last, which is the row's first
    input. What several prefixes begin with is computed once."""
    rows_of: dict[bytes, list[int]] = {}
    for row, prefix in prefix_of.items():
        if len(prefix):
            rows_of.setdefault(prefix.tobytes(), []).append(row)
    groups, device = list(rows_of.values()), decoder.device
    prefixes = [prefix_of[rows[0]] for rows in groups]
    for parts in shared_parts(prefixes):
        lengths_P = np.asarray([part.length for part in parts], dtype=np.int64)
        for batch in token_budget_batches(lengths_P, max(PREFILL_TOKENS, int(lengths_P.max(initial=0)))):
            chosen = [parts[number] for number in batch]
            ids_BL, _ = pad_right([prefixes[part.prompts[0]][part.start : part.end] for part in chosen], 0, device)
            starts = [part.start for part in chosen]
            pairs = [(row, b) for b, part in enumerate(chosen) for prompt in part.prompts for row in groups[prompt]]
            rows_F, prompts_F = torch.tensor(pairs, device=device).T
            decoder.prefill(
                ids_BL, cache, rows_F, prompts_F, torch.tensor(starts, device=device) if any(starts) else None
            )
