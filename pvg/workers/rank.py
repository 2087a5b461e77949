"""One rank of the prover's trainer: a process that keeps a part of the weights, the gradients and the moments.

    place = RankPlace(number=0, ranks=2, device="cpu", host="127.0.0.1", port=2345)
    rank = Rank(place, "127.0.0.1")                         # waits until all ranks have called this
    answer = rank.do(Frame("rank", {"do": "open", ...}))

torch's FSDP2 (`fully_shard`) gives each of N ranks 1/N of the rows of every weight. A forward or backward pass gathers
the weights of one layer at a time, and each rank gets its rows of the summed gradient. The driver has the whole
weights. On its own machine, ranks read and write their rows in its memory; on other machines, the rows are in the
frames. So a checkpoint does not depend on N, nor on the machines.

Invariant: all ranks get the same requests in the same order, with the same number of forward passes. Otherwise they
would wait for each other.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import orjson
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from transformers.modeling_layers import GradientCheckpointingLayer

from pvg.config.rollout import Rollouts
from pvg.config.training import Models, Training
from pvg.errors import WorkerLostError
from pvg.models import open_model
from pvg.models.compute import autocast
from pvg.models.logprobs import check_logits
from pvg.models.shared_prompts import check_packing
from pvg.telemetry.metrics import Metrics
from pvg.training.batch import PolicyBatch
from pvg.training.losses import PolicyObjective
from pvg.training.trainer import (
    MOMENTS,
    OptimizerSettings,
    accumulate,
    build_optimizer,
    checkpoint_layers,
    optimizer_tensors,
    trainable_parameters,
)
from pvg.workers.frames import Array, Frame, record_of
from pvg.workers.links import interface_of
from pvg.workers.shared import MappedTensors, own_rows, packed_tensors, unpacked_tensors

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
# What errors of a broken connection between ranks contain. torch has no type for them: all are RuntimeErrors.
BROKEN = ("gloo/transport", "Gloo connectFullMesh", "NCCL")
# For all ranks to find each other. A firewall between two nodes shows here.
JOIN_S = 60.0
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


@dataclass(frozen=True)
class RankPlace:
    """Which rank a process is. `device`: "cpu", or "cuda:N" (experimental: no GPU has run this). `host`, `port`: the
    store of the driver, where the ranks find each other."""

    number: int
    ranks: int
    device: str
    host: str
    port: int


class Rank:
    """Raises WorkerLostError if it cannot reach another rank, for example because that one has ended."""

    def __init__(self, place: RankPlace, address: str) -> None:
        """`address`: where the other ranks reach this one."""
        _return_freed_memory()
        interface = interface_of(address)
        # NCCL takes a name without = for the beginning of one.
        os.environ |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}
        self._number, self._ranks = place.number, place.ranks
        self._device = torch.device(place.device)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        join = timedelta(seconds=JOIN_S)
        with _lost_connections(f"it cannot reach the other ranks from {address}"):
            distributed.init_process_group(
                BACKENDS[self._device.type],
                store=distributed.TCPStore(place.host, place.port, timeout=join),  # type: ignore[attr-defined]
                rank=place.number,
                world_size=place.ranks,
                timeout=join,
            )
            self._mesh = init_device_mesh(self._device.type, (place.ranks,))
        _set_pg_timeout(timedelta(seconds=COLLECTIVE_S))
        self._root: _Root
        self._parameters: dict[str, nn.Parameter]
        self._optimizer: torch.optim.AdamW
        self._rows: dict[str, Tensor] | None  # this rank's weights in the driver's memory; None: on another machine
        self._precision: str

    def do(self, frame: Frame) -> Frame:
        with _lost_connections("its connection to another rank broke"):
            match frame.fields["do"]:
                case "open":
                    self._open(frame)
                    return Frame("done")
                case "gradient":
                    return self._gradient(frame)
                case "update":
                    return self._update(frame.fields)
                case "moments":
                    return self._give_moments(frame.fields)
        raise ValueError(f"a rank cannot do {frame.fields['do']!r}")

    def _open(self, frame: Frame) -> None:
        """Open the prover and its loss, and take this rank's part of the driver's weights and moments. For a moment,
        the memory holds the whole model."""
        fields = frame.fields
        training = Training.model_validate_json(orjson.dumps(fields["training"]))
        rollout = Rollouts.model_validate_json(orjson.dumps(fields["rollout"]))
        models = Models.model_validate_json(orjson.dumps(fields["models"]))
        self._precision = models.compute_dtype
        with open_model(models.prover, torch.device("cpu"), models.dtype) as model:
            model.require_gradients()
            module = model.module
            # pvg's own layers use weights outside of the layers' forward passes, where they are not gathered.
            pad_id = model.tokenizer.pad_id
            objective = PolicyObjective(training, rollout, pad_id, self._precision, fused_layers=False)
        if training.gradient_checkpointing:
            checkpoint_layers(module)
        with autocast(self._precision, torch.device("cpu")):  # now, while the model is whole
            check_logits(module)
            if training.shared_prompts:
                check_packing(module, fused_layers=False)
        self._root = sharded(module, objective, self._mesh)
        self._parameters = trainable_parameters(module)
        self._optimizer = build_optimizer(self._parameters, OptimizerSettings(**fields["optimizer"]))
        rows = self._rows_of("weights", frame)
        self._rows = None if "weights" in frame.arrays else rows
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                _local(parameter).copy_(rows[name])
        if fields["moments"] is not None:
            self._load_moments(self._rows_of("moments", frame))

    def _rows_of(self, what: str, frame: Frame) -> dict[str, Tensor]:
        """This rank's rows of the tensors that the driver gives: in the frame, or in its memory."""
        place = frame.fields[what]
        if what in frame.arrays:
            return unpacked_tensors(place["layout"], frame.arrays[what])
        return {name: self._own(whole) for name, whole in MappedTensors(place).tensors.items()}

    def _load_moments(self, rows: Mapping[str, Tensor]) -> None:
        for name, parameter in self._parameters.items():
            if f"step.{name}" not in rows:
                continue
            state = {moment: torch.zeros_like(parameter) for moment in MOMENTS[:2]}
            for moment, tensor in state.items():
                _local(tensor).copy_(rows[f"{moment}.{name}"])
            state["step"] = rows[f"step.{name}"].to(parameter.device, copy=True)
            self._optimizer.state[parameter] = state

    def _gradient(self, frame: Frame) -> Frame:
        """Add up this rank's micro-batches, and passes of weight 0 up to the number of passes of all ranks. Returns
        their losses and metrics, as a worker does."""
        fields, own = frame.fields, frame.fields["micro_batches"]
        self._root.zero_grad(set_to_none=True)  # of a gradient that was only probed
        self._root.objective.load_state(fields["state"])
        micro_batches = [record_of(PolicyBatch, f"{number}.", frame.arrays) for number in range(own)]
        losses, metrics = accumulate(self._root, _loss, micro_batches, self._precision)
        padding = [record_of(PolicyBatch, "padding.", frame.arrays)] * (fields["passes"] - own)
        accumulate(self._root, _nothing, padding, self._precision)
        names, values_M2 = metrics.as_array()
        values = np.array(torch.stack(losses).tolist() if losses else [], dtype=np.float64)
        return Frame("done", {"names": names}, {"losses": values, "metrics": values_M2})

    def _update(self, fields: Mapping[str, Any]) -> Frame:
        """Clip the gradient, step, and give the driver this rank's part of the weights. A gradient that is not finite
        changes nothing. Returns the gradient's norm before clipping, and the bytes that this rank keeps."""
        norm = nn.utils.clip_grad_norm_(self._parameters.values(), fields["clip"])
        found = (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()
        held, given, arrays = self._bytes(), dict[str, Any](), dict[str, Array]()
        if math.isfinite(found):
            for group in self._optimizer.param_groups:
                group["lr"] = fields["rate"]
            self._optimizer.step()
            given, arrays = self._given("weights", self._parameters, self._rows)
            held = self._bytes()
        self._root.zero_grad(set_to_none=True)
        return Frame("done", {"bytes": held, **given}, {"norm": np.array(found), **arrays})

    def _give_moments(self, fields: Mapping[str, Any]) -> Frame:
        """Give the driver this rank's part of the moments. Returns the number of steps of each parameter that has
        some."""
        own, place = optimizer_tensors(self._optimizer, self._parameters), fields["memory"]
        moments = {name: tensor for name, tensor in own.items() if not name.startswith("step.")}
        rows = None if place is None else {n: self._own(whole) for n, whole in MappedTensors(place).tensors.items()}
        given, arrays = self._given("moments", moments, rows)
        steps = {name: own[f"step.{name}"].item() for name in self._parameters if f"step.{name}" in own}
        return Frame("done", {"steps": steps, **given}, arrays)

    def _given(
        self, what: str, tensors: Mapping[str, Tensor], rows: Mapping[str, Tensor] | None
    ) -> tuple[dict[str, Any], dict[str, Array]]:
        """Write this rank's part of the tensors to `rows`. None: the part as fields and arrays of an answer."""
        own = {name: _local(tensor) for name, tensor in tensors.items()}
        if rows is None:
            layout, data = packed_tensors(own)
            return {what: {"layout": layout}}, {what: data}
        with torch.no_grad():
            for name, tensor in own.items():
                rows[name].copy_(tensor)
        return {}, {}

    def _own(self, whole: Tensor) -> Tensor:
        return own_rows(whole, self._number, self._ranks)

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


@contextmanager
def _lost_connections(what: str) -> Iterator[None]:
    """Turns an error of a connection between ranks into a WorkerLostError that begins with `what`."""
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if not isinstance(error, distributed.DistError) and not any(word in text for word in BROKEN):
            raise
        raise WorkerLostError(f"{what}: {text.splitlines()[0]}") from error


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
