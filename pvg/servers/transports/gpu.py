"""GPU-to-GPU weight transfer with vLLM's own engines: NCCL and CUDA IPC (`weights.transport`).

Experimental: no GPU has run this. See pvg.servers.transports.transfer for what has run.

NCCL: the trainer is rank 0 of a group, and the workers of all servers follow. Every rank needs its own GPU, so trainer
and servers must not share one. vLLM's trainer_init lets the ranks find each other through a TCP store whose contents
the workers unpickle. Instead the trainer creates the group's id (an ncclUniqueId) and sends it with the control calls,
which vLLM's workers also support.

CUDA IPC: trainer and server share a GPU. The server maps the trainer's memory and copies from it. vLLM sends the memory
handles as a pickle over HTTP; pvg sends them as JSON to its engine inside the server
(pvg.servers.server_side.pvg_vllm.ipc_engine).
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pvg.errors import ConfigurationError, MissingRequirementError
from pvg.servers.control import ServerInfo
from pvg.servers.transports.group_client import GroupClient
from pvg.servers.transports.transfer import TrainerEngine, TransferSource


class NcclBackend:
    """Broadcasts dense weights, packed into buffers of vLLM's size."""

    def check(self, infos: Sequence[ServerInfo]) -> None:
        """Accepts any server."""

    def open(self, client: GroupClient, source: TransferSource) -> TrainerEngine:
        try:
            from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary
            from vllm.distributed.weight_transfer.nccl_common import (
                NCCLWeightTransferInitInfo,
                uid_init_process_group,
                worker_init_payload,
            )
            from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerWeightTransferEngine
        except ImportError as error:
            raise MissingRequirementError(
                f"This vLLM has no weight transfer by a shared id: {error}.",
                'Install vLLM 0.32 or newer beside the trainer, or set weights.transport = "filesystem".',
            ) from None
        engine = NCCLTrainerWeightTransferEngine(client=client, source=source)
        unique_id = bytes(NCCLLibrary().ncclGetUniqueId())
        workers = NCCLWeightTransferInitInfo(
            rank_offset=1,  # of the first server; the client sets each server's own
            world_size=client.ranks,
            nccl_unique_id_b64=base64.b64encode(unique_id).decode("ascii"),
            packed=engine.packed,
            packed_buffer_size_bytes=engine.packed_buffer_size_bytes,
            packed_num_buffers=engine.packed_num_buffers,
        )
        # All ranks must enter at the same time: the workers wait for the trainer during this call.
        caller = ThreadPoolExecutor(1, "pvg-nccl-init")
        try:
            called = caller.submit(client.init_weight_transfer_engine, worker_init_payload(workers))
            engine.model_update_group = uid_init_process_group(unique_id, 0, client.ranks, source.device.index)
            called.result()
        finally:
            caller.shutdown(wait=False)
        opened: TrainerEngine = engine
        return opened

    def plain(self, update_info: Mapping[str, Any]) -> Mapping[str, Any]:
        return update_info  # contains only names, dtypes and shapes


class IpcBackend:
    """One handle per parameter, to the trainer's copy of the weights."""

    def check(self, infos: Sequence[ServerInfo]) -> None:
        for info in infos:
            if info.world_size != 1:
                raise ConfigurationError(
                    f"{info.url} has {info.world_size} workers, but CUDA IPC only reaches the trainer's GPU.",
                    'Set serving.tensor_parallel = 1, or weights.transport = "nccl".',
                )

    def open(self, client: GroupClient, source: TransferSource) -> TrainerEngine:
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
        from pvg.servers.server_side.pvg_vllm.ipc_handles import encode_handle

        return {
            **{name: update_info[name] for name in ("names", "dtype_names", "shapes")},
            "handles": [
                {gpu: encode_handle(arguments) for gpu, arguments in by_gpu.items()}
                for by_gpu in update_info["ipc_handles"]
            ],
        }
