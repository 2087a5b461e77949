"""The prover in training on several processes (*ranks*), each of which keeps a part of it: SPMD with torch's FSDP2.

Each of N ranks has 1/N of the rows of every weight, gradient and moment. A pass gathers one layer at a time.

Rank 0 broadcasts what comes next as JSON and arrays; then each does its part, and what they exchange goes through
torch's collectives, one whole tensor at a time. Nothing is pickled: pvg does not use torch's calls for objects, nor
its own format of checkpoints, whose metadata is a pickle. Checkpoints are those of a trainer in one process, so any
number of ranks continues those of any other. For them and for publishing, rank 0 has a whole copy of the weights.

Invariant: all ranks run the same number of forward passes. Otherwise they would wait for each other.
"""

from __future__ import annotations

import ipaddress
import math
import os
import signal
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor, distributed, nn
from torch.distributed import FileStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from pvg.config.rollout import Rollouts
from pvg.config.training import Models, Training
from pvg.errors import MissingRequirementError, PvgError, StoppedAtStart
from pvg.models import open_model
from pvg.models.compute import KEPT_BYTES, autocast, return_freed_memory
from pvg.models.logprobs import check_logits
from pvg.models.shared_prompts import check_packing
from pvg.telemetry.events import Events
from pvg.telemetry.metrics import Metrics
from pvg.telemetry.spans import run_in
from pvg.training.batch import PolicyBatch
from pvg.training.losses import PolicyObjective
from pvg.training.trainer import (
    MOMENTS,
    OptimizerSettings,
    PartGradient,
    TrainerRanks,
    accumulate,
    build_optimizer,
    checkpoint_layers,
    optimizer_tensors,
    trainable_parameters,
)
from pvg.workers.frames import Frame, packed, unpacked
from pvg.workers.launch import ALONE, EXIT_LOST, Launch, RankLostError
from pvg.workers.models import policy_fields, policy_shards

# What errors of a broken connection between ranks contain. torch has no type for them: all are RuntimeErrors.
BROKEN = ("gloo/transport", "Gloo connectFullMesh", "NCCL", "Timed out waiting")
LOOPBACK = "127.0.0.1"
ELSEWHERE = "192.0.2.1"  # of no machine (RFC 5737)
JOIN_S = 120.0  # for all processes to import torch and to find each other
COLLECTIVE_S = 600.0  # for a rank that hangs; one that has ended breaks its connections at once
COMMAND_S = 3.0e7  # for the next command of rank 0, which may sample
FIRST_S = 3.0  # for the driver to end before this process, so that torchrun reports the driver's error
RETRY_S = 1.0
# Larger freed blocks go back to the system at once. glibc would keep those of whole layers, which FSDP2 gathers.
LAYER_BYTES = 1 << 20


@contextmanager
def lost_connections(what: str) -> Iterator[None]:
    """Raises RankLostError for an error of a connection to another rank."""
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if not isinstance(error, distributed.DistError) and not any(word in text for word in BROKEN):
            raise
        raise RankLostError(
            f"{what}: {text.splitlines()[0]}.", "Continue the run with pvg train --resume, in all processes."
        ) from error


class RankGroup:
    """The processes of a launch, from the view of one of them. All methods block, and raise RankLostError if another
    rank has ended or does not answer; then this group can do nothing more."""

    def __init__(self, launch: Launch) -> None:
        self.launch, self.number, self.count = launch, launch.number, launch.processes
        self._part: _Part | None = None
        self.broken = False  # whether the other ranks hear no command of this one any more
        interface = _interface_to(LOOPBACK if launch.one_machine else launch.host)
        if not launch.one_machine and interface == _interface_to(LOOPBACK):  # a machine's own name may mean 127.0.1.1
            interface = _interface_to(ELSEWHERE)
        # NCCL takes a name without = for the beginning of one.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
        with lost_connections("The ranks do not find each other"):
            distributed.init_process_group(
                # The one place that decides how tensors travel: through gloo on a CPU, through NCCL on GPUs.
                "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
                store=_store(launch),
                rank=launch.number,
                world_size=launch.processes,
                timeout=timedelta(seconds=COLLECTIVE_S),
            )
            patience = COMMAND_S if launch.number else COLLECTIVE_S
            self._commands = distributed.new_group(backend="gloo", timeout=timedelta(seconds=patience))

    def do(self, what: str, fields: Mapping[str, Any] | None = None, whole: Mapping[str, Tensor] | None = None) -> Any:
        """Rank 0: let all ranks do this, and return rank 0's result. `whole`: the tensors that rank 0 gives or gets."""
        frame = Frame(what, fields or {})
        self.broken = True  # if this fails, because the others may wait within the command
        self._sent(frame)
        found = self._do(frame, whole or {})
        self.broken = False
        return found

    def serve(self) -> int:
        """Ranks 1 and up: do what rank 0 says until it ends. Returns its exit code. Launchers send SIGINT and SIGTERM
        to all processes, and the driver decides when to stop."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        try:
            while (frame := self._sent()).kind != "end":
                return_freed_memory(KEPT_BYTES + 1, LAYER_BYTES)
                self._do(frame, {})
        except RankLostError:
            return EXIT_LOST  # the launcher, or the driver, says why
        except PvgError as error:
            error.message = f"Rank {self.number}: {error.message}"
            error.args = (error.message,)
            raise
        time.sleep(FIRST_S if frame.fields["code"] else 0.0)
        return int(frame.fields["code"])

    def end(self, code: int) -> None:
        """Rank 0: end the others with this exit code."""
        if not self.broken:
            self.broken = True
            with suppress(RankLostError):
                self._sent(Frame("end", {"code": code}))

    @lost_connections("The connection to another rank broke")
    def _do(self, frame: Frame, whole: Mapping[str, Tensor]) -> Any:
        if frame.kind in ("open", "close"):
            self._part = _Part(frame.fields, whole, self) if frame.kind == "open" else None
            return None
        assert self._part is not None
        if frame.kind == "gradient":
            own = self._part.gradient(frame)
            return [self._sent(own if rank == self.number else None, rank) for rank in range(self.count)]
        return self._part.update(frame.fields, whole) if frame.kind == "update" else self._part.moments()

    @lost_connections("The connection to another rank broke")
    def _sent(self, own: Frame | None = None, rank: int = 0) -> Frame:
        """The frame of this rank, which gives it as `own`."""
        data = torch.frombuffer(bytearray().join(packed(own)), dtype=torch.uint8) if own is not None else None
        length = torch.tensor([0 if data is None else len(data)])
        distributed.broadcast(length, rank, group=self._commands)
        data = torch.empty(int(length.item()), dtype=torch.uint8) if data is None else data
        distributed.broadcast(data, rank, group=self._commands)
        return own or unpacked(data.numpy().tobytes())


@contextmanager
def joined(launch: Launch) -> Iterator[RankGroup]:
    """Wait until all processes of the launch have joined. At the end the others get rank 0's exit code."""
    group, code = RankGroup(launch), 1
    if not launch.number:
        del os.environ["TORCHELASTIC_RUN_ID"]  # its children are no ranks
    try:
        yield group
        code = 0
    except RankLostError:
        if launch.store:
            raise SystemExit(EXIT_LOST) from None  # the launcher says which rank, and why
        raise
    except (Exception, StoppedAtStart) as error:
        code = getattr(error, "exit_code", code)  # of pvg's errors, and of the command line's
        raise
    finally:
        if not launch.number:
            group.end(code)


# --- one rank's part --------------------------------------------------------------------------------------------------


class _Root(nn.Module):
    """Calls the loss from its own forward pass, because FSDP gathers the weights of a module only there. pvg's losses
    call parts of the model (its decoder, its head) and not the model itself."""

    def __init__(self, module: nn.Module, objective: PolicyObjective) -> None:
        super().__init__()
        self.module = module
        self.objective = objective

    def forward(self, micro_batch: PolicyBatch) -> tuple[Tensor, Metrics]:
        return self.objective(self.module, micro_batch)


def sharded(module: nn.Module, objective: PolicyObjective, device: torch.device, precision: str) -> _Root:
    """`module` with its loss, divided over all ranks. Each layer is gathered separately; the rest (embedding, norm and
    head, which may be tied) together. Gradients are summed, because pvg's losses are sums over micro-batches. With
    bfloat16, autocast alone would gather float32, and keep its copies of all layers until the backward pass."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(device.type, (distributed.get_world_size(),))
    policy = MixedPrecisionPolicy()
    if precision == "bfloat16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in [part for part in module.modules() if isinstance(part, GradientCheckpointingLayer)]:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    root = _Root(module, objective)
    fully_shard(root, mesh=mesh, mp_policy=policy)
    for part in root.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)  # gloo has no sum that multiplies
    return root


class _Part:
    """What one rank keeps of the prover in training. All ranks call the same methods in the same order."""

    def __init__(self, fields: Mapping[str, Any], whole: Mapping[str, Tensor], group: RankGroup) -> None:
        """Open the prover and its loss, and keep this rank's part of rank 0's weights and moments. For a moment, the
        memory of the CPU holds the whole model."""
        training = Training.model_validate_json(fields["training"])
        rollout = Rollouts.model_validate_json(fields["rollout"])
        models = Models.model_validate_json(fields["models"])
        self._number, self._precision, cpu = group.number, models.compute_dtype, torch.device("cpu")
        device = torch.device("cuda", group.launch.local) if fields["device"] == "cuda" else cpu
        if self._number:
            torch.set_num_threads(fields["threads"])
        if device.type == "cuda":
            torch.cuda.set_device(device)
        learner = model = open_model(models.prover, cpu, models.dtype)
        if training.adapters.rank:
            from pvg.models.adapters import attach_adapters

            learner = attach_adapters(model, training.adapters.rank, training.adapters.alpha, seed=0)
        learner.require_gradients()
        module, pad_id = learner.module, learner.tokenizer.pad_id
        # pvg's own layers use weights outside of the layers' forward passes, where they are not gathered.
        objective = PolicyObjective(training, rollout, pad_id, self._precision, fused_layers=False)
        if training.gradient_checkpointing:
            checkpoint_layers(module)
        with autocast(self._precision, cpu):  # now, while the model is whole
            check_logits(module)
            if training.shared_prompts:
                check_packing(module, fused_layers=False)
        self._root = sharded(module, objective, device, self._precision)
        self._parameters = trainable_parameters(module)
        self._optimizer = build_optimizer(self._parameters, fields["optimizer"])
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(_divided(whole.get(f"model.{name}"), parameter))
        for name, steps in fields["steps"].items():
            parameter = self._parameters[name]
            state = {moment: _divided(whole.get(f"{moment}.{name}"), parameter) for moment in MOMENTS[:2]}
            self._optimizer.state[parameter] = {**state, "step": torch.tensor(steps, device=parameter.device)}

    def gradient(self, frame: Frame) -> Frame:
        """Add up this rank's micro-batches, and passes of weight 0 up to the number of passes of all ranks."""
        micro_batches = frame.fields["micro_batches"][self._number]
        self._root.zero_grad(set_to_none=True)  # of a gradient that was only probed
        self._root.objective.load_state(frame.fields["state"])
        losses, metrics = accumulate(self._root, nn.Module.__call__, micro_batches, self._precision)
        passes = max(len(part) for part in frame.fields["micro_batches"])
        padding = [frame.fields["padding"]] * (passes - len(micro_batches))
        # These take part in the exchange and add nothing.
        accumulate(self._root, lambda root, rows: (root(rows)[0] * 0.0, Metrics()), padding, self._precision)
        return Frame("gradient", {"losses": losses, "metrics": metrics})

    def update(self, fields: Mapping[str, Any], whole: Mapping[str, Tensor]) -> float:
        """Clip the gradient and step, and write the new weights into rank 0's whole tensors. A gradient that is not
        finite changes nothing. Returns its norm before clipping."""
        norm = float(_full(nn.utils.clip_grad_norm_(self._parameters.values(), fields["clip"])).item())
        if math.isfinite(norm):
            for group in self._optimizer.param_groups:
                group["lr"] = fields["rate"]
            self._optimizer.step()
        self._root.zero_grad(set_to_none=True)
        if math.isfinite(norm):
            with torch.no_grad():
                for name, parameter in self._parameters.items():
                    gathered = _full(parameter)  # on all ranks, so one tensor at a time
                    if name in whole:
                        whole[name].copy_(gathered)
        return norm

    def moments(self) -> dict[str, Tensor]:
        """Copies of the whole moments, on the CPU of rank 0; the other ranks return nothing."""
        found = dict[str, Tensor]()
        for name, own in optimizer_tensors(self._optimizer, self._parameters).items():
            gathered = _full(own)  # on all ranks
            found |= {} if self._number else {name: gathered.to("cpu", copy=True)}
        return found


def _divided(whole: Tensor | None, like: Tensor) -> Tensor:
    """Give each rank its rows, as it has those of `like`, of a tensor that rank 0 has. All ranks call this."""
    assert isinstance(like, DTensor)
    sent = torch.empty(like.shape, dtype=like.dtype) if whole is None else whole.detach()
    return distribute_tensor(sent.to(like.device), like.device_mesh, like.placements)


def _full(tensor: Tensor) -> Tensor:
    """A divided tensor, gathered. All ranks call this."""
    found = tensor.detach()
    return found.full_tensor() if isinstance(found, DTensor) else found


# --- the driver's side ------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class ModelInRanks(TrainerRanks[PolicyBatch]):
    """A prover in training, in the driver. `gradients`, `update` and `moments` block: call them in the thread of
    `executor`. `fields`: how a rank opens the model (`rank_fields`). `parameters`: the whole trained weights by name,
    which `update` keeps current. `loaded`: moments that the ranks get when they open."""

    group: RankGroup
    executor: Executor
    fields: Mapping[str, Any]
    parameters: Mapping[str, nn.Parameter]
    events: Events
    loaded: Mapping[str, Tensor] = field(default_factory=dict)
    opened: bool = False

    async def prepare(self) -> None:
        """Let the ranks open their parts before their first work."""
        began = time.perf_counter()
        await run_in(self.executor, self._open)
        taken_ms = (time.perf_counter() - began) * 1e3
        self.events.event("workers", event="ranks up", ranks=self.group.count, ms=taken_ms)

    async def close(self) -> None:
        if self.opened and not self.group.broken:
            self.opened = False
            await run_in(self.executor, self.group.do, "close")

    @property
    def on_gpus(self) -> bool:
        return bool(self.fields["device"] == "cuda")

    def shards(self, batch: PolicyBatch) -> list[PolicyBatch]:
        return policy_shards(batch, self.group.count)

    def gradients(self, parts: Sequence[Sequence[PolicyBatch]], state: Mapping[str, Any]) -> list[PartGradient]:
        self._open()
        idle: list[list[PolicyBatch]] = [[]] * (self.group.count - len(parts))
        micro_batches = [list(part) for part in parts] + idle
        fields = {"micro_batches": micro_batches, "padding": _shortest_row(parts), "state": state}
        answers = [answer.fields for answer in self.group.do("gradient", fields)]
        return [PartGradient(None, answer["losses"], answer["metrics"]) for answer in answers]

    def update(self, rate: float, clip: float) -> float:
        return float(self.group.do("update", {"rate": rate, "clip": clip}, whole=self.parameters))

    def moments(self) -> dict[str, Tensor]:
        self._open()
        found: dict[str, Tensor] = self.group.do("moments")
        return found

    def load(self, moments: Mapping[str, Tensor]) -> None:
        self.loaded, self.opened = moments, False

    def _open(self) -> None:
        if self.opened:
            return
        steps = {n.removeprefix("step."): t.item() for n, t in self.loaded.items() if n.startswith("step.")}
        whole = {f"model.{name}": tensor for name, tensor in self.parameters.items()} | dict(self.loaded)
        threads = {"threads": torch.get_num_threads(), "steps": steps}
        self.group.do("open", {**self.fields, **threads}, whole=whole)
        self.loaded, self.opened = {}, True


def rank_fields(
    training: Training, rollout: Rollouts, models: Models, optimizer: OptimizerSettings, device: torch.device
) -> dict[str, Any]:
    """How a rank opens the prover, its loss and its optimizer."""
    own = {"models": models.model_dump_json(), "optimizer": optimizer, "device": device.type}
    return {**policy_fields(training, rollout), **own}


def _shortest_row(parts: Sequence[Sequence[PolicyBatch]]) -> PolicyBatch:
    shortest = min((m for part in parts for m in part), key=lambda micro_batch: int(micro_batch.lengths_N.min()))
    return shortest.select(np.array([int(shortest.lengths_N.argmin())]))


# --- where the ranks meet ---------------------------------------------------------------------------------------------


def _agent(launch: Launch) -> TCPStore:
    """The store of torchrun. It outlives a restart, so its notes may be those of earlier processes."""
    return TCPStore(launch.host, launch.port, is_master=False, timeout=timedelta(seconds=JOIN_S))


def _store(launch: Launch) -> Any:
    """The store in which the ranks of this attempt find each other. Under torchrun, the driver opens one, and leaves
    its port in that of torchrun."""
    if launch.store:
        return FileStore(launch.store, launch.processes)
    agent = _agent(launch)
    if not launch.number:
        # torch itself would listen on all networks of this machine.
        with socket.create_server((LOOPBACK if launch.one_machine else "", 0)) as listening:
            port, file = int(listening.getsockname()[1]), listening.detach()
        own = TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=file)
        agent.set("pvg/port", str(port))
        return own
    deadline = time.monotonic() + JOIN_S
    while True:
        try:
            return TCPStore(launch.host, int(agent.get("pvg/port")), is_master=False, timeout=timedelta(seconds=5))
        except distributed.DistError:  # that of an earlier driver
            if time.monotonic() > deadline:
                raise
            time.sleep(RETRY_S)


def noted_run(launch: Launch) -> str:
    """The folder of the run that an earlier driver of this launch may have begun; empty in the first attempt."""
    if launch.store:
        return launch.run if launch.lost else ""
    agent = _agent(launch)
    return str(agent.get("pvg/run").decode()) if agent.check(["pvg/run"]) else ""


def note_run(launch: Launch, folder: str) -> None:
    if not launch.store:
        agent = _agent(launch)
        agent.set("pvg/run", folder)
        agent.check(["pvg/run"])  # its answer comes after the note was stored


def _interface_to(host: str) -> str:
    try:
        family, kind, _, _, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)
            own = ipaddress.ip_address(probe.getsockname()[0])
    except (OSError, UnicodeError) as error:
        raise MissingRequirementError(
            f"This machine cannot reach {host}: {getattr(error, 'strerror', None) or error}.",
            f"Give torchrun addresses in place of names: --node-rank N --master-addr ADDRESS, or {ALONE}",
        ) from None
    address = LOOPBACK if own.is_loopback else str(own)
    for name, found in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in found):
            return str(name)
    raise MissingRequirementError(f"No network interface has the address {address}.", "Set GLOO_SOCKET_IFNAME to one.")
