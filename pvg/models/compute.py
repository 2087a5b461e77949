"""How a process computes: its thread and torch's threads, freed memory, precision, products and attention.

Each operation ends in a barrier where every thread waits for all others. On a busy machine the kernel often suspends
one of them, and the barrier takes milliseconds, while an operation of a small model takes 0.01 to 0.5 ms. So narrow
models compute in one thread (`default_threads`), which also gives the same bits on any number of cores.

libgomp keeps a pool of threads for every thread that ever computed in parallel. Once all pools together have more
threads than the machine has cores, they sleep between operations instead of spinning. So only one thread has a pool."""

from __future__ import annotations

import ctypes
import itertools
import math
import os
import re
import sys
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pvg.errors import ConfigurationError, PvgError, one_line, raised_by_pvg, shortened
from pvg.telemetry.device import CPUINFO, processor_facts
from pvg.telemetry.waits import usable_cores

# torch's default, read before an experiment changes it: OMP_NUM_THREADS, or the available cores. torch sees no quotas.
ALL_THREADS = torch.get_num_threads()
if "OMP_NUM_THREADS" not in os.environ:
    ALL_THREADS = min(ALL_THREADS, usable_cores())

WIDE = 512  # narrower models are computed in one thread


def default_threads(width: int) -> int:
    """The number of threads for `models.threads = 0`: 1 if the hidden states are narrower than WIDE, otherwise all that
    torch may use. The width sets the size of an operation."""
    return 1 if width < WIDE else ALL_THREADS


def width_of(module: Any) -> int:
    """The size of a transformers model's hidden states."""
    return int(module.config.get_text_config().hidden_size)


class ComputeExecutor(ThreadPoolExecutor):
    """One thread for all torch work, with a pool of `threads` (0: one thread until `settle` decides). `in_use`: the
    threads of the newest executor; torch's default before the first."""

    in_use: ClassVar[int] = ALL_THREADS

    def __init__(self, threads: int) -> None:
        super().__init__(1, "pvg-compute", initializer=torch.set_num_threads, initargs=(threads or 1,))
        self._settled = threads > 0
        self._read()  # starts the thread now, so that its setting becomes that of the process

    def settle(self, width: int) -> int:
        """Return the number of threads. If the setting was 0, the first `width` decides it permanently. All users of
        one executor share it, for example benchmark variants that take turns."""
        if not self._settled:
            self._settled = True
            self.submit(torch.set_num_threads, default_threads(width)).result()
            self._read()
        return self.threads

    def _read(self) -> None:
        self.threads: int = self.submit(torch.get_num_threads).result()
        ComputeExecutor.in_use = self.threads


def compute_executor(threads: int) -> ComputeExecutor:
    """Create the thread for all torch work. From now on the calling thread computes without a pool."""
    torch.set_num_threads(1)
    return ComputeExecutor(threads)


SHALLOW, LARGEST_TOLERANCE = 4, 0.25  # see `rounding_tolerance`
TF32_ERROR = 2.0**-3  # TF32 keeps 10 bits of a number after the point, bfloat16 keeps 7


# Memory of this size stays allocated while it is not in use, so that runs of small models stop allocating. To allocate
# more takes little time beside what fills it.
KEPT_BYTES = 1 << 28
M_MMAP_THRESHOLD = -3


def return_freed_memory(needed: int, at_once: int | None = None) -> None:
    """Call before `needed` bytes are taken, if they may be more than KEPT_BYTES. Gives freed blocks that glibc keeps
    back to the system. From now on, freed blocks of `at_once` bytes go back by themselves; None: as before, at first
    those of glibc's limit, which rises to 32 MB. The system clears memory for each new block, which takes time."""
    if needed > KEPT_BYTES and sys.platform == "linux":
        libc = ctypes.CDLL(None)
        if hasattr(libc, "malloc_trim"):  # other C libraries have none
            if at_once is not None:
                libc.mallopt(M_MMAP_THRESHOLD, at_once)
            libc.malloc_trim(0)


MADV_DONTNEED, MAPPINGS = 4, Path("/proc/self/smaps")  # only Linux has this list
# In it, the addresses of a private mapping of a file, of which no page was changed, in memory or swapped out.
UNCHANGED = re.compile(
    r"(?m)^(\w+)-(\w+) ...p \S+ \S+ +[1-9]\d* +/.*\n"
    r"(?:[A-Z]\w+:.*\n)*?Anonymous: +0 kB\n(?:[A-Z]\w+:.*\n)*?Swap: +0 kB$"
)


def leave_in_files(weights: Sequence[Tensor]) -> None:
    """Free the memory of weights that are mapped from files, as safetensors are, if they are more than KEPT_BYTES. The
    next read takes them from the system's cache of files, or from the disk. If one weight of a file has changed, all of
    that file stay. Nothing happens where this process cannot read MAPPINGS. No thread may change weights meanwhile."""
    here = [weight for weight in weights if weight.device.type == "cpu"]
    if sum(weight.nbytes for weight in here) > KEPT_BYTES and os.access(MAPPINGS, os.R_OK):
        starts = {weight.data_ptr() for weight in here}
        for found in UNCHANGED.finditer(MAPPINGS.read_text(errors="replace")):
            first, end = (int(address, 16) for address in found.groups())
            if any(first <= start < end for start in starts):
                ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), MADV_DONTNEED)


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """The context of a forward pass: bfloat16 autocast, or nothing for "float32"; "auto" is bfloat16 on a GPU. Weights
    stay float32.

    Autocast is per thread: enter it in the thread that computes.
    """
    if precision == "float32" or (precision == "auto" and device.type != "cuda"):
        return nullcontext()
    if precision in ("auto", "bfloat16"):
        return torch.autocast(device.type, dtype=torch.bfloat16)
    raise ConfigurationError(f"There is no precision {precision!r}.", "Known: float32, bfloat16.")


@contextmanager
def explained(what: str, remedy: str) -> Iterator[None]:
    """Turns errors of transformers and of the libraries below it, which are of many types, into a ConfigurationError
    that begins with `what`. Errors that pvg's own code raises pass, unless they come from the attributes or the shapes
    of a model (SHAPES)."""
    try:
        yield
    except (PvgError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if raised_by_pvg(error) and not isinstance(error, SHAPES):
            raise
        said = shortened(one_line(str(error)), LONGEST_QUOTE) or type(error).__name__
        if isinstance(error, KeyError):  # whose text is the key alone
            said = f"{type(error).__name__} {said}"
        raise ConfigurationError(f"{what}: {said.removesuffix('.')}.", remedy) from error


SHAPES = (AttributeError, RuntimeError, IndexError, TypeError, ValueError)  # torch raises them in C++, without a frame
LONGEST_QUOTE = 400  # characters


def rounding_tolerance(shallow: float, layers: int) -> float:
    """The largest relative difference of two correct ways to compute a model in 16 bits. `shallow`: for SHALLOW layers.

    Each layer adds its own rounding, so the difference grows with the root of their number. With random weights, 28
    layers differ by up to 0.08, and a wrong position or mask makes a difference of at least 0.35.
    """
    return min(LARGEST_TOLERANCE, shallow * math.sqrt(max(1.0, layers / SHALLOW)))


def product_tolerance(weight: Tensor, exact: float, reduced: float, layers: int = SHALLOW) -> float:
    """The largest relative difference of two correct ways to compute products with `weight` here: `exact` if they are
    computed in float32. `reduced` is for 16 bits and SHALLOW layers (see `rounding_tolerance`), and TF32 has an eighth
    of its error."""
    kind = weight.device.type
    if weight.dtype != torch.float32 or torch.is_autocast_enabled(kind):
        return rounding_tolerance(reduced, layers)
    if kind == "cuda" and torch.get_float32_matmul_precision() != "highest":
        return max(exact, TF32_ERROR * rounding_tolerance(reduced, layers))
    return exact


def allow_tf32(device: torch.device, precision: str) -> bool:
    """Let float32 matrix products on a GPU round their inputs to TF32 (10 bits instead of 23), if the `precision` of
    forward passes is bfloat16 (7 bits) anyway. Then sampling, scoring and the reference take a fraction of the time.
    Returns whether they do. On a CPU, and with a precision of float32, products stay exact."""
    allowed = device.type == "cuda" and precision == "bfloat16"
    if device.type == "cuda":
        # The setting of all backends: after `torch.backends.cuda.matmul.fp32_precision = "tf32"` alone, torch refuses
        # to tell the older settings, which other libraries read.
        torch.set_float32_matmul_precision("high" if allowed else "highest")
    return allowed


class LiveBytes(TorchDispatchMode):
    """While it is entered, counts the bytes of living tensors that were made meanwhile: `now`, and the most since
    `peak` was set. The weights and buffers of `module` do not count, nor tensors without memory."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._known = {tensor.untyped_storage()._cdata for tensor in (*module.parameters(), *module.buffers())}

    def __torch_dispatch__(self, operator: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        made = operator(*arguments, **(named or {}))
        for tensor in (leaf for leaf in tree_leaves(made) if isinstance(leaf, Tensor) and not leaf.is_meta):
            if (key := (storage := tensor.untyped_storage())._cdata) not in self._known:
                self._known.add(key)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._gone, key, storage.nbytes())
        return made

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


# Products in float32 on a processor by AMD with AVX-512. There torch's library for float32 (MKL) uses half of the
# vector units. oneDNN, which torch has for 16 bits, uses all of them (docs/benchmarks.md, the step of SmolLM2-135M). In
# its results a row does not depend on the other rows, if there are two or more. Autograd does not know these products:
# use them in passes without a gradient, and inside of autograd functions.

# Multiplications of a product. In smaller ones oneDNN loses time: it compiles one for each number of rows.
LEAST_BY_ONEDNN = 2**24


@cache
def _onednn() -> bool:
    maker, flags = processor_facts(CPUINFO, "vendor_id", "flags")
    return maker == "AuthenticAMD" and "avx512f" in flags.split() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _suits(x: Tensor, weight: Tensor, rows: int | None = None) -> bool:
    large = x.dtype == torch.float32 and (rows or len(x)) * weight.numel() >= LEAST_BY_ONEDNN
    return large and x.device.type == "cpu" and type(x) is Tensor and _onednn()  # not for tensors without memory


def projected(x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """x W' + b, [N, O]. As all products here: the arguments may be views of any strides."""
    return _by_onednn(x_NI, weight_OI, bias_O) if _suits(x_NI, weight_OI) else linear(x_NI, weight_OI, bias_O)


def projected_alike(x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """As `projected`, but the number of rows does not decide which library computes."""
    if not _suits(x_NI, weight_OI, rows=1):
        return linear(x_NI, weight_OI, bias_O)
    return _by_onednn(x_NI if len(x_NI) != 1 else x_NI.expand(2, -1), weight_OI, bias_O)[: len(x_NI)]


def _by_onednn(x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    return cast(Tensor, torch.ops.mkldnn._linear_pointwise(x_NI, weight_OI, bias_O, "none", [], ""))


def added(x_NO: Tensor, y_NI: Tensor, weight_OI: Tensor) -> Tensor:
    """x + y W', [N, O], in one operation, which may overwrite x."""
    if _suits(y_NI, weight_OI):
        return cast(Tensor, torch.ops.mkldnn._linear_pointwise.binary(y_NI, x_NO, weight_OI, None, "add"))
    return x_NO.addmm_(y_NI, weight_OI.t())


def product(x_NK: Tensor, y_KM: Tensor) -> Tensor:
    """x y, [N, M]."""
    return projected(x_NK, y_KM.t()) if _suits(x_NK, y_KM) else x_NK @ y_KM


# Attention in 16 bits on a CPU: torch's kernel has a slow backward pass there for short sequences.
HALVES = (torch.bfloat16, torch.float16)
SCORES_AT_ONCE = 2**20  # so that the processor's cache holds most of them
LEAST_QUERIES = 32  # of a head, at once
LEAST_BY_HEAD = 2**22  # multiplications of a product of one head


def product_dtype(query_TE: Tensor) -> torch.dtype:
    """The dtype of matrix products with this tensor: that of autocast, or its own."""
    kind = query_TE.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query_TE.dtype


def attend(
    query_BQE: Tensor, key_BKE: Tensor, value_BKE: Tensor, mask: Tensor | None, heads: int, scaling: float | None
) -> Tensor:
    """Attention of padded rows [B, Q, E]. Keys and values may have fewer heads. See Block for the mask."""
    size = query_BQE.shape[2] // heads
    query, key, value = (
        tensor.view(*tensor.shape[:2], -1, size).transpose(1, 2) for tensor in (query_BQE, key_BKE, value_BKE)
    )
    repeats, dtype = heads // key.shape[1], product_dtype(query)
    if query.device.type == "cpu" and dtype in HALVES:
        mask = None if mask is None or len(mask) == 1 else mask  # what causality hides needs no product
        given = (query.to(dtype), key.to(dtype), value.to(dtype), mask, size**-0.5 if scaling is None else scaling)
        mixed_BHQE = cast(Tensor, _PartedAttention.apply(*given))  # type: ignore[no-untyped-call]
        return mixed_BHQE.transpose(1, 2).flatten(2)
    if query.device.type != "cpu":  # a CPU's kernel takes fewer heads of keys as they are
        key, value, repeats = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1), 1
    mask = mask if mask is None else mask.to(query.dtype)
    mixed_BHQE = scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=repeats > 1
    )
    return mixed_BHQE.transpose(1, 2).flatten(2)


class _PartedAttention(torch.autograd.Function):
    """Attention of queries [B, H, Q, D] to keys and values [B, K, L, D]. H is a multiple of K. `mask` [B, 1, Q, L]
    float32 is added to the scores; None: causal, and the last query sees all keys. Keeps the inputs alone: the backward
    pass computes the weights again."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        query, key, value, ctx.mask, ctx.scaling = given
        ctx.save_for_backward(query, key, value)
        found = torch.empty_like(query)
        with torch.autocast("cpu", enabled=False):
            for rows, own, keys in _parts(query, key, ctx.mask):
                weights = _weights(query, key, ctx, rows, own, keys).to(value.dtype)
                mixed = weights @ value[rows, :, :keys]
                found[rows, :, own] = mixed.view(len(mixed), query.shape[1], -1, query.shape[3])
        return found

    @staticmethod
    def backward(ctx: Any, grad_BHQD: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value = ctx.saved_tensors
        of_query, of_key, of_value = torch.empty_like(query), torch.zeros(key.shape), torch.zeros(value.shape)
        for rows, own, keys in _parts(query, key, ctx.mask):
            weights = _weights(query, key, ctx, rows, own, keys)
            seen, values = key[rows, :, :keys], value[rows, :, :keys]
            queries, grads = (
                each[rows, :, own].reshape(*seen.shape[:2], -1, seen.shape[3]) for each in (query, grad_BHQD)
            )
            # Of the scores: weights * (dw - sum of weights * dw).
            slopes = _products(grads.float(), values.float()).mul_(weights)
            slopes = slopes.addcmul_(weights, slopes.sum(3, keepdim=True), value=-1.0).mul_(ctx.scaling).to(query.dtype)
            of_query[rows, :, own] = (slopes @ seen).view(len(seen), query.shape[1], -1, query.shape[3])
            of_key[rows, :, :keys] += slopes.transpose(2, 3) @ queries
            of_value[rows, :, :keys] += weights.to(value.dtype).transpose(2, 3) @ grads
        return of_query, of_key.to(key.dtype), of_value.to(value.dtype), None, None


def _parts(query_BHQD: Tensor, key_BKLD: Tensor, mask: Tensor | None) -> Iterator[tuple[slice, slice, int]]:
    """Rows, their queries, and the number of keys that these may see. Of tensors without memory, a largest part."""
    (count, heads, queries, _), keys = query_BHQD.shape, key_BKLD.shape[2]
    at_once = min(queries, max(LEAST_QUERIES, SCORES_AT_ONCE // (heads * keys)))
    rows = max(1, SCORES_AT_ONCE // (heads * at_once * keys))
    whole = type(query_BHQD) is Tensor
    for row in range(0, count if whole else 1, rows):
        for first in range(0 if whole else queries - at_once, queries, at_once):
            last = min(first + at_once, queries)
            yield slice(row, row + rows), slice(first, last), keys if mask is not None else keys - queries + last


def _weights(query_BHQD: Tensor, key_BKLD: Tensor, how: Any, rows: slice, own: slice, keys: int) -> Tensor:
    """Of a part, [B, K, H / K * Q, L] float32. Scores in 16 bits would make most of the error of attention."""
    queries, seen = query_BHQD[rows, :, own].float(), key_BKLD[rows, :, :keys].float()
    scores = _products(queries.reshape(*seen.shape[:2], -1, seen.shape[3]), seen).mul_(how.scaling)
    by_query = scores.view(*queries.shape[:3], keys)
    if how.mask is None:  # the last key is that of the last query
        count = queries.shape[2]
        by_query[..., keys - count :].add_(scores.new_full((count, count), -torch.inf).triu_(1))
    else:
        by_query.add_(how.mask[rows, :, own])
    return torch.softmax(scores, 3)


def _products(x_BKMD: Tensor, y_BKLD: Tensor) -> Tensor:
    """x y' of each head in float32, [B, K, M, L]."""
    (count, heads, queries, _), keys = x_BKMD.shape, y_BKLD.shape[2]
    large = queries * keys * x_BKMD.shape[3] >= LEAST_BY_HEAD and type(x_BKMD) is Tensor
    if not large or not _onednn():
        return x_BKMD @ y_BKLD.transpose(2, 3)
    found, y_BKLD = x_BKMD.new_empty(count, heads, queries, keys), y_BKLD.contiguous()  # it is slow for other strides
    for place in itertools.product(range(count), range(heads)):
        found[place] = _by_onednn(x_BKMD[place], y_BKLD[place], None)
    return found
