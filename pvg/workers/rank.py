"""One rank of the prover's trainer: a process that keeps a part of the weights, the gradients and the moments.

    rank = Rank(number=0, ranks=2, device="cpu", store="/tmp/.../store")      # waits until all ranks have called this
    answer = rank.do(Frame("rank", {"do": "open", ...}))

torch's FSDP2 (`fully_shard`) gives each of N ranks 1/N of the rows of every weight. A forward or backward pass gathers
the weights of one layer at a time, and each rank gets its rows of the summed gradient. The driver has the whole weights
in memory that it shares with the ranks: each rank reads and writes its own rows there. So a checkpoint does not depend
on N.

Invariant: all ranks get the same requests in the same order, with the same number of forward passes. Otherwise they
would wait for each other.
"""

from __future__ import annotations

import ctypes
import math
import os
import sys
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import numpy as np
import orjson
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from transformers.modeling_layers import GradientCheckpointingLayer

from pvg.config.models import ModelSection
from pvg.config.rollout import Rollouts
from pvg.config.training import Training
from pvg.models import open_model
from pvg.models.logprobs import check_logits
from pvg.models.precision import autocast
from pvg.models.shared_prompts import check_packing
from pvg.telemetry.metrics import Metrics
from pvg.training.batch import PolicyBatch
from pvg.training.losses import PolicyObjective
from pvg.training.optimizer import (
    MOMENTS,
    OptimizerSettings,
    build_optimizer,
    optimizer_tensors,
    trainable_parameters,
)
from pvg.training.trainer import accumulate, checkpoint_layers
from pvg.workers.frames import Frame, record_of
from pvg.workers.shared import MappedTensors

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
# All ranks run on one machine, so no other machine needs to reach their sockets.
LOOPBACK = "lo" if sys.platform == "linux" else "lo0"
# Ranks wait for each other no longer than this: for a rank that computes without end, and for defects. The driver
# notices a rank that ends or hangs within seconds.
COLLECTIVE_S = 600.0
# glibc keeps freed blocks of up to 32 MB for later ones. FSDP2 gathers and frees whole layers, so a rank would keep
# more memory for them than for its part of the model. Larger blocks than this go back to the system at once.
M_MMAP_THRESHOLD, KEPT_BYTES = -3, 1 << 20


class _Root(nn.Module):
    """Calls the loss from its own forward pass, because FSDP gathers the weights of a module only there. pvg's losses
    call parts of the model (its decoder, its head) and not the model itself."""

    def __init__(self, module: nn.Module, objective: PolicyObjective) -> None:
        super().__init__()
        self.module = module
        self.objective = objective

    def forward(self, micro_batch: PolicyBatch) -> tuple[Tensor, Metrics]:
        return self.objective(self.module, micro_batch)


class Rank:
    """Rank `number` of `ranks`. Raises RuntimeError if another rank ends in the middle of a request."""

    def __init__(self, number: int, ranks: int, device: str, store: str) -> None:
        """`device`: "cpu", or "cuda" for the GPU with this rank's number (experimental: no GPU has run this). `store`:
        a file that does not exist yet, where the ranks find each other."""
        _return_freed_memory()
        os.environ |= {"GLOO_SOCKET_IFNAME": LOOPBACK, "NCCL_SOCKET_IFNAME": LOOPBACK}
        self._number, self._ranks = number, ranks
        self._device = torch.device(device) if device == "cpu" else torch.device(device, number)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        distributed.init_process_group(
            BACKENDS[self._device.type],
            store=distributed.FileStore(store, ranks),  # type: ignore[attr-defined]
            rank=number,
            world_size=ranks,
            timeout=timedelta(seconds=COLLECTIVE_S),
        )
        self._mesh = init_device_mesh(self._device.type, (ranks,))
        self._root: _Root
        self._parameters: dict[str, nn.Parameter]
        self._optimizer: torch.optim.AdamW
        self._weights: dict[str, Tensor]  # the whole ones, in the driver's memory
        self._precision: str

    def do(self, frame: Frame) -> Frame:
        match frame.fields["do"]:
            case "open":
                self._open(frame.fields)
                return Frame("done")
            case "gradient":
                return self._gradient(frame)
            case "update":
                return self._update(frame.fields)
            case "moments":
                return self._write_moments(frame.fields)
        raise ValueError(f"a rank cannot do {frame.fields['do']!r}")

    def _open(self, fields: Mapping[str, Any]) -> None:
        """Open the prover and its loss, and take this rank's part of the driver's weights and moments. For a moment,
        the memory holds the whole model."""
        # pvg's own layers use weights outside of the layers' forward passes, where they are not gathered.
        training = Training.model_validate_json(orjson.dumps(fields["training"])).model_copy(
            update={"fused_layers": False, "blocked_layers": False}
        )
        rollout = Rollouts.model_validate_json(orjson.dumps(fields["rollout"]))
        self._precision = training.precision
        with open_model(ModelSection.model_validate_json(orjson.dumps(fields["model"])), torch.device("cpu")) as model:
            model.require_gradients()
            module = model.module
            objective = PolicyObjective(training, rollout, model.tokenizer.pad_id)
        if training.gradient_checkpointing:
            checkpoint_layers(module)
        with autocast(self._precision, torch.device("cpu")):  # now, while the model is whole
            check_logits(module)
            if training.shared_prompts:
                check_packing(module, False, False)
        self._root = sharded(module, objective, self._mesh)
        self._parameters = trainable_parameters(module)
        self._optimizer = build_optimizer(self._parameters, OptimizerSettings(**fields["optimizer"]))
        self._weights = MappedTensors(fields["weights"]).tensors
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                _local(parameter).copy_(self._own(self._weights[name]))
        if fields["moments"] is not None:
            self._load_moments(MappedTensors(fields["moments"]).tensors)

    def _load_moments(self, whole: Mapping[str, Tensor]) -> None:
        for name, parameter in self._parameters.items():
            if f"step.{name}" not in whole:
                continue
            state = {moment: torch.zeros_like(parameter) for moment in MOMENTS[:2]}
            for moment, tensor in state.items():
                _local(tensor).copy_(self._own(whole[f"{moment}.{name}"]))
            state["step"] = whole[f"step.{name}"].to(parameter.device, copy=True)
            self._optimizer.state[parameter] = state

    def _gradient(self, frame: Frame) -> Frame:
        """Add up this rank's micro-batches, and passes of weight 0 up to the number of passes of all ranks. Returns
        their losses and metrics, as a worker does."""
        fields, own = frame.fields, frame.fields["micro_batches"]
        self._root.zero_grad(set_to_none=True)  # of a gradient that was only probed
        self._root.objective.load_state(fields["state"])
        micro_batches = [record_of(PolicyBatch, f"{number}.", frame.arrays) for number in range(own)]
        losses, metrics, _ = accumulate(self._root, _loss, micro_batches, self._precision)
        padding = [record_of(PolicyBatch, "padding.", frame.arrays)] * (fields["passes"] - own)
        accumulate(self._root, _nothing, padding, self._precision)
        names, values_M2 = metrics.as_array()
        values = np.array(torch.stack(losses).tolist() if losses else [], dtype=np.float64)
        return Frame("done", {"names": names}, {"losses": values, "metrics": values_M2})

    def _update(self, fields: Mapping[str, Any]) -> Frame:
        """Clip the gradient, step, and write this rank's part of the weights. A gradient that is not finite changes
        nothing. Returns the gradient's norm before clipping, and the bytes that this rank keeps."""
        norm = nn.utils.clip_grad_norm_(self._parameters.values(), fields["clip"])
        found = (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()
        held = self._bytes()
        if math.isfinite(found):
            for group in self._optimizer.param_groups:
                group["lr"] = fields["rate"]
            self._optimizer.step()
            with torch.no_grad():
                for name, parameter in self._parameters.items():
                    self._own(self._weights[name]).copy_(_local(parameter))
            held = self._bytes()
        self._root.zero_grad(set_to_none=True)
        return Frame("done", {"bytes": held}, {"norm": np.array(found)})

    def _write_moments(self, fields: Mapping[str, Any]) -> Frame:
        """Write this rank's part of the moments. Returns the names of the parameters that have some, and the number of
        steps of each."""
        whole = MappedTensors(fields["place"]).tensors
        own = optimizer_tensors(self._optimizer, self._parameters)
        for name, tensor in whole.items():
            if name in own:
                self._own(tensor).copy_(_local(own[name]))
        return Frame("done", {"steps": {n: own[f"step.{n}"].item() for n in self._parameters if f"step.{n}" in own}})

    def _own(self, whole: Tensor) -> Tensor:
        """The rows of a whole tensor that this rank keeps; none if there are fewer rows than ranks. FSDP2 divides
        tensors with the same function."""
        parts = whole.chunk(self._ranks)
        return parts[self._number] if self._number < len(parts) else whole[:0]

    def _bytes(self) -> int:
        """The bytes of this rank's weights, gradients and moments."""
        tensors = [*self._parameters.values(), *optimizer_tensors(self._optimizer, self._parameters).values()]
        tensors += [parameter.grad for parameter in self._parameters.values() if parameter.grad is not None]
        return sum(_local(tensor).nbytes for tensor in tensors)


def sharded(module: nn.Module, objective: PolicyObjective, mesh: DeviceMesh) -> _Root:
    """`module` with its loss, on the mesh's devices. Each layer is gathered separately; the rest (embedding, norm and
    head, which may be tied) together. Gradients are summed, because pvg's losses are sums over micro-batches."""
    for layer in [part for part in module.modules() if isinstance(part, GradientCheckpointingLayer)]:
        fully_shard(layer, mesh=mesh)
    root = _Root(module, objective)
    fully_shard(root, mesh=mesh)
    for part in root.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)  # gloo has no sum that multiplies
    return root


def _return_freed_memory() -> None:
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # other C libraries than glibc have none
        libc.mallopt(M_MMAP_THRESHOLD, KEPT_BYTES)


def _loss(root: nn.Module, micro_batch: PolicyBatch) -> tuple[Tensor, Metrics]:
    found: tuple[Tensor, Metrics] = root(micro_batch)
    return found


def _nothing(root: nn.Module, micro_batch: PolicyBatch) -> tuple[Tensor, Metrics]:
    """A pass that takes part in the exchange and adds nothing."""
    loss, metrics = _loss(root, micro_batch)
    return loss * 0.0, metrics


def _local(tensor: Tensor) -> Tensor:
    """The part of a divided tensor that this rank keeps; shares its memory."""
    found = tensor.detach()
    return found.to_local() if isinstance(found, DTensor) else found
