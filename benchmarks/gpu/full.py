"""All weights of a model of the shape of Qwen2.5-1.5B trained on one device: memory, fragmentation, and FSDP2.

FSDP2 has one rank here. Without a policy, autocast casts each layer's weights and keeps the copies until the backward
pass, which FSDP2 cannot free; with MixedPrecisionPolicy the weights arrive in bfloat16.
"""

from __future__ import annotations

import time
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from benchmarks.gpu.results import Results
from benchmarks.gpu.sizes import Sizes, random_model
from benchmarks.gpu.steps import StepVariant, measure_steps
from pvg.bench.workloads.trainer import matmul_gflops, wait_for
from pvg.models.compute import autocast

POLICIES = {"without a policy": None, "with MixedPrecisionPolicy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}


def measure(results: Results, sizes: Sizes, device: torch.device) -> None:
    rate = matmul_gflops("bfloat16", str(device)) * 1e9
    for checkpointing in (True, False):
        name = "all weights, layers recomputed" if checkpointing else "all weights"
        with random_model(sizes.whole, device, torch.float32) as model:
            measure_steps(results, sizes, model, StepVariant(name, 0, "float32", checkpointing=checkpointing), rate)
        if device.type == "cuda":
            reserved = torch.cuda.max_memory_reserved(device) / torch.cuda.max_memory_allocated(device)
            results.figure(f"{name}: memory that torch reserved", reserved, "of the peak")
            torch.cuda.empty_cache()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=cast(Any, dist).HashStore(), rank=0, world_size=1)
    try:
        for name, policy in POLICIES.items():
            measure_sharded(results, sizes, device, f"FSDP2 over {backend} {name}", policy)
    finally:
        dist.destroy_process_group()


def measure_sharded(
    results: Results, sizes: Sizes, device: torch.device, name: str, policy: MixedPrecisionPolicy | None
) -> None:
    """The forward and the backward pass of the layers."""
    kept = dict[int, torch.UntypedStorage]()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    with random_model(sizes.whole, device, torch.float32) as model:
        decoder: Any = cast(Any, model.module).get_decoder().requires_grad_(True)
        how = {"mesh": init_device_mesh(device.type, (1,))} | ({} if policy is None else {"mp_policy": policy})
        for part in (*decoder.layers, decoder):
            fully_shard(part, **cast(Any, how))
        ids_BL = torch.randint(sizes.whole.vocabulary, (sizes.groups, sizes.prompt + sizes.tokens), device=device)
        for _ in range(2):
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            wait_for(str(device))
            began = time.perf_counter()
            precision = "bfloat16" if policy is None else "float32"  # the policy casts by itself
            with autocast(precision, device), saved_tensors_hooks(keep, lambda tensor: tensor):
                hidden_BLD = decoder(input_ids=ids_BL, use_cache=False).last_hidden_state
            saved = sum(storage.nbytes() for storage in kept.values())  # FSDP2 has emptied those that it frees
            kept.clear()
            hidden_BLD.float().square().mean().backward()
            wait_for(str(device))
            seconds = time.perf_counter() - began
        results.figure(f"{name}: saved for the backward pass", saved / 1e9, "GB")
        results.figure(f"{name}: forward and backward", seconds, "s")
        results.peak(name, device)
