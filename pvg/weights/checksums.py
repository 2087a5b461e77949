"""`Checksums`: tensors of a server against the trainer's, bit by bit, where the server still has them as they came.

vLLM names and shapes most tensors in its own way (it fuses projections, pads vocabularies, and its CPU build packs
matrices), so only those that it keeps as they were can be compared: norms, and embeddings of even sizes. The canary
covers the rest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from concurrent.futures import Executor
from typing import TYPE_CHECKING

from pvg.errors import WeightsNotArrivedError
from pvg.serving.control import ControlClient, ServerInfo
from pvg.telemetry.spans import run_in

if TYPE_CHECKING:
    from torch import Tensor

VOCABULARY_PADDING = 64  # rows to whose multiples vLLM pads embeddings
NOTHING = hashlib.sha256(b"").hexdigest()  # of a tensor that the server has in another form


class Checksums:
    """`dtype` is the servers'; `always`: at every update, and not only until weights have changed.

    The first version of a run is what servers were started with: that they have it proves no loading. So updates are
    compared up to the first that brings other tensors.
    """

    def __init__(self, dtype: str, executor: Executor, *, always: bool) -> None:
        self._dtype = dtype
        self._executor = executor
        self._always = always
        self._first: dict[str, str] = {}  # the digests of the first version
        self._changed = False
        self.compared = 0  # tensors, in the last check

    @property
    def due(self) -> bool:
        """Whether the next update is to be compared."""
        return self._always or not self._changed

    async def check(
        self, control: ControlClient, info: ServerInfo | None, tensors: Mapping[str, Tensor], version: int
    ) -> None:
        """Raises WeightsNotArrivedError, which names the server, the version and the first tensor that differs."""
        if info is None or info.world_size != 1:  # of a sharded tensor each worker has a part
            return
        found = {name.rpartition(":")[2]: digest for name, digest in (await control.checksums()).items()}
        shared = {
            name: tensors[name]
            for name in sorted(found.keys() & tensors.keys())
            if found[name] != NOTHING and not _may_be_padded(tensors[name])
        }
        expected = await run_in(self._executor, self._digests, shared)
        self.compared = len(shared)
        self._first = self._first or expected
        self._changed |= expected != self._first
        for name in shared:
            if found[name] != expected[name]:
                raise WeightsNotArrivedError(
                    f"{control.url} does not have version {version} of the weights: its {name} differs.",
                    "Restart the server, and continue with --resume.",
                )

    def _digests(self, tensors: Mapping[str, Tensor]) -> dict[str, str]:
        import torch

        dtype = getattr(torch, self._dtype)
        found = {}
        for name, tensor in tensors.items():
            host = tensor.detach().to(device="cpu", dtype=dtype).contiguous()
            found[name] = hashlib.sha256(host.reshape(-1).view(torch.uint8).numpy().data).hexdigest()
        return found


def _may_be_padded(tensor: Tensor) -> bool:
    return tensor.ndim == 2 and tensor.shape[0] % VOCABULARY_PADDING != 0
