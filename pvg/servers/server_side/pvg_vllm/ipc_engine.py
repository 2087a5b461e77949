"""`JsonIpcEngine`: vLLM's CUDA IPC weight transfer with JSON handles instead of pickled ones.

    vllm ... --weight-transfer-config '{"backend": "pvg_ipc"}'

vLLM's `ipc` backend needs a pickle over HTTP (and VLLM_ALLOW_INSECURE_SERIALIZATION=1). This one accepts no pickle.

Experimental: no GPU has run this. Tests on a CPU show that vLLM registers and creates the engine, handles are encoded
and decoded correctly, and anything else is refused (tests/integration/test_transfer_against_vllm.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.weight_transfer.base import WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine, IPCWeightTransferInitInfo

from .ipc_handles import decode_handle

BACKEND = "pvg_ipc"


@dataclass
class JsonIpcUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """`handles`: for each parameter, its handle by GPU UUID. The other fields are vLLM's."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    handles: list[dict[str, Any]]
    ipc_handles: list[dict[str, tuple[Any, ...]]] = field(init=False)
    tensor_sizes: None = field(init=False, default=None)  # only for packed transfers

    def __post_init__(self) -> None:
        if not len(self.names) == len(self.dtype_names) == len(self.shapes) == len(self.handles):
            raise ValueError("names, dtype_names, shapes and handles differ in length.")
        self.ipc_handles = [
            {str(gpu): decode_handle(table) for gpu, table in by_gpu.items()} for by_gpu in self.handles
        ]


class JsonIpcEngine(IPCWeightTransferEngine):  # type: ignore[misc]
    """Takes one handle per parameter. Refuses packed transfers."""

    update_info_cls = JsonIpcUpdateInfo

    def init_transfer_engine(self, init_info: IPCWeightTransferInitInfo) -> None:
        if init_info.packed:
            raise ValueError("This engine takes one handle per parameter, not a packed buffer.")
        super().init_transfer_engine(init_info)


def register() -> None:
    """Register the backend with vLLM in this process. A second call does nothing."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, JsonIpcEngine)
