"""NCCL between the trainer's GPU and the servers' (`weights.transport = "nccl"`), by vLLM's own engines.

The trainer is rank 0 of a group, the workers of all servers follow. NCCL wants a GPU of its own for every rank: trainer
and servers must not share one. vLLM's trainer_init would have the ranks find each other through a TCP store, where the
workers unpickle what lies in it; here the trainer makes the group's id (an ncclUniqueId) and sends it with the control
calls, the other way that vLLM's workers know.

Not run on a GPU yet; see pvg.weights.transports.transfer for what was run.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pvg.errors import MissingRequirementError
from pvg.serving.control import ServerInfo
from pvg.weights.transports.group_client import GroupClient
from pvg.weights.transports.transfer import Source, TrainerEngine


class NcclBackend:
    """Dense weights, packed into buffers of vLLM's size and broadcast."""

    def check(self, infos: Sequence[ServerInfo]) -> None:
        """Any server will do."""

    def open(self, client: GroupClient, source: Source) -> TrainerEngine:
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
            rank_offset=1,  # of the first server; the client gives each its own
            world_size=client.ranks,
            nccl_unique_id_b64=base64.b64encode(unique_id).decode("ascii"),
            packed=engine.packed,
            packed_buffer_size_bytes=engine.packed_buffer_size_bytes,
            packed_num_buffers=engine.packed_num_buffers,
        )
        # All ranks must enter at the same time: the workers wait for the trainer inside of the call.
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
        return update_info  # names, dtypes and shapes
