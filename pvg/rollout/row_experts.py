"""`RowExperts`: the experts that a mixture-of-experts model chose for each token of the rows of one batch.

A prompt but for its last token is computed in the prefill, once for all rows that share it; every other token is the
input of one decoding step, but for the last sampled one, which is never computed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from pvg.models.routing import ExpertRecorder, number_of_experts, routers_of
from pvg.records import RoutedExperts


class RowExperts:
    """To be told after each forward pass. `rows` requests, of at most `steps` sampled tokens each."""

    def __init__(self, module: nn.Module, recorder: ExpertRecorder, rows: int, steps: int) -> None:
        experts = max(map(number_of_experts, routers_of(module)))
        # torch cannot write rows of a uint16: their bits are held as int16, and seen as uint16 by `_read`.
        self._dtype = torch.uint8 if experts <= 256 else torch.int16
        self._recorder = recorder
        self._prefix: list[RoutedExperts | None] = [None] * rows
        self._shape = (rows, steps)
        self._steps_NTMK: Tensor | None = None  # where the model is; made at the first step

    def prefilled(self, rows_of: Sequence[Sequence[int]], lengths_B: NDArray[np.int64]) -> None:
        """The pass computed prompt b, padded to the right, for the rows `rows_of[b]`."""
        experts_TMK = _read(self._recorder.take().to(self._dtype))
        experts_BLMK = experts_TMK.reshape(len(rows_of), -1, *experts_TMK.shape[1:])
        for prompt, rows in enumerate(rows_of):
            for row in rows:
                self._prefix[row] = experts_BLMK[prompt, : lengths_B[prompt]]

    def stepped(self, request_R: Tensor, step: int) -> None:
        """The pass computed one token of each row of `request_R`, from which its sampled token number `step` came."""
        experts_RMK = self._recorder.take().to(self._dtype)
        if self._steps_NTMK is None:
            shape = (*self._shape, *experts_RMK.shape[1:])
            self._steps_NTMK = torch.zeros(shape, dtype=self._dtype, device=experts_RMK.device)
        self._steps_NTMK[request_R, step] = experts_RMK

    def results(self, lengths: Sequence[int]) -> list[RoutedExperts]:
        """[P + C - 1, layers, k] of each row, C its entry in `lengths`. Each is copied once."""
        assert self._steps_NTMK is not None
        steps_NTMK = _read(self._steps_NTMK)
        found = []
        for row, length in enumerate(lengths):
            prefix, sampled = self._prefix[row], steps_NTMK[row, :length]
            found.append(sampled.copy() if prefix is None else np.concatenate([prefix, sampled]))
        return found


def _read(experts: Tensor) -> RoutedExperts:
    found = experts.cpu().numpy()
    return found.view(np.uint16) if found.dtype == np.int16 else found
