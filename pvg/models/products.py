"""Products of float32 matrices on a CPU, by the faster of two libraries that come with torch.

torch gives them to MKL, which on AMD's processors is the slower one: on an EPYC with AVX-512 a linear layer forward and
backward is 1.5 to 1.9 times as fast by oneDNN in one thread, 0.9 to 1.7 times in two, the smallest sizes gaining least
(`python benchmarks/products.py`, docs/products-threads-*.json). On Intel's, which MKL is made for, it is asked.
`BY_ONEDNN` says which; the processor alone decides, so a run repeats bit by bit. What a step gains by blocks and oneDNN
together is a rung of the `trainer` profile.

oneDNN compiles a kernel for each shape that it meets, and keeps some megabytes for it. So it is asked
for blocks of exactly ROWS rows, and MKL for what is left over: a model has a dozen shapes then, not one for every
number of tokens.

The operator is the one that torch.compile puts in the place of a linear layer. It knows no gradient and no output
buffer: these functions are for autograd functions that write out their own backward pass.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROWS = 512  # blocks that stay in a cache, of enough rows that a call costs little


def _is_wider() -> bool:
    """Whether oneDNN is there, and the processor is one on which MKL was the slower one."""
    built: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    wide = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    return built and wide and hasattr(torch.ops.mkldnn, "_linear_pointwise") and vendor() == "AuthenticAMD"


def vendor() -> str:
    """The processor's maker as Linux tells it; empty where it does not."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next((line.split(":")[1].strip() for line in lines if line.startswith("vendor_id")), "")
    except FileNotFoundError:  # not Linux
        return ""


BY_ONEDNN = _is_wider()


def in_blocks(wanted: bool | None) -> bool:
    """Whether layers are to be computed in blocks: `training.blocked_layers`, None being where it pays."""
    return BY_ONEDNN if wanted is None else wanted


def product(x_BD: Tensor, weight_FD: Tensor, bias_F: Tensor | None, out_BF: Tensor) -> Tensor:
    """x W' + b, written to `out_BF`."""
    if _is_block(x_BD):
        return out_BF.copy_(_onednn(x_BD, weight_FD, bias_F))
    if bias_F is None:
        return torch.mm(x_BD, weight_FD.t(), out=out_BF)
    return torch.addmm(bias_F, x_BD, weight_FD.t(), out=out_BF)


def added_product(added_BF: Tensor, x_BD: Tensor, weight_FD: Tensor, out_BF: Tensor) -> Tensor:
    """`added_BF` + x W', written to `out_BF`."""
    if _is_block(x_BD):
        return torch.add(added_BF, _onednn(x_BD, weight_FD), out=out_BF)
    return torch.addmm(added_BF, x_BD, weight_FD.t(), out=out_BF)


def input_gradient(grad_BF: Tensor, weight_FD: Tensor, out_BD: Tensor) -> Tensor:
    """dx = dy W of y = x W', written to `out_BD`."""
    if _is_block(grad_BF):
        return out_BD.copy_(_onednn(grad_BF, weight_FD.t()))
    return torch.mm(grad_BF, weight_FD, out=out_BD)


def add_weight_gradient(sum_FD: Tensor, grad_BF: Tensor, x_BD: Tensor) -> None:
    """dW = dy' x, added to `sum_FD`."""
    if not _is_block(x_BD):
        sum_FD.addmm_(grad_BF.t(), x_BD)
    elif grad_BF.shape[1] <= x_BD.shape[1]:
        sum_FD.add_(_onednn(grad_BF.t(), x_BD.t()))
    else:  # oneDNN is faster where the first matrix has the fewer rows
        sum_FD.add_(_onednn(x_BD.t(), grad_BF.t()).t())


def _is_block(x_BD: Tensor) -> bool:
    return BY_ONEDNN and len(x_BD) == ROWS


def _onednn(x_BD: Tensor, weight_FD: Tensor, bias_F: Tensor | None = None) -> Tensor:
    found: Tensor = torch.ops.mkldnn._linear_pointwise(x_BD, weight_FD, bias_F, "none", [], "")
    return found
