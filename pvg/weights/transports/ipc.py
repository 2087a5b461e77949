"""CUDA IPC between a trainer and a server on the same GPU (`weights.transport = "ipc"`), by vLLM's own engines.

The server maps the trainer's memory and copies from it. vLLM sends the handles of that memory as a pickle over HTTP;
here they go as JSON to an engine of ours inside the server (pvg.serving.server_side.pvg_vllm.ipc_engine).

Not run on a GPU yet; see pvg.weights.transports.transfer for what was run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pvg.errors import ConfigurationError, MissingRequirementError
from pvg.serving.control import ServerInfo
from pvg.weights.transports.group_client import GroupClient
from pvg.weights.transports.transfer import Source, TrainerEngine


class IpcBackend:
    """One handle for each parameter, of the copy that the trainer took."""

    def check(self, infos: Sequence[ServerInfo]) -> None:
        for info in infos:
            if info.world_size != 1:
                raise ConfigurationError(
                    f"{info.url} has {info.world_size} workers, and CUDA IPC reaches the one on the trainer's GPU.",
                    'Set serving.tensor_parallel = 1, or weights.transport = "nccl".',
                )

    def open(self, client: GroupClient, source: Source) -> TrainerEngine:
        try:
            from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
            from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
        except ImportError as error:
            raise MissingRequirementError(
                f"This vLLM has no weight transfer by CUDA IPC: {error}.",
                'Install vLLM 0.32 or newer beside the trainer, or set weights.transport = "filesystem".',
            ) from None
        engine: TrainerEngine = WeightTransferTrainerFactory.trainer_init(
            IPCTrainerInitInfo(rank=0, packed=False), client=client, source=source
        )
        return engine

    def plain(self, update_info: Mapping[str, Any]) -> Mapping[str, Any]:
        from pvg.serving.server_side.pvg_vllm.ipc_handles import encode_handle

        return {
            **{name: update_info[name] for name in ("names", "dtype_names", "shapes")},
            "handles": [
                {gpu: encode_handle(arguments) for gpu, arguments in by_gpu.items()}
                for by_gpu in update_info["ipc_handles"]
            ],
        }
