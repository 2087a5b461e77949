"""`LeanDecoder`: decoding steps of Llama-like models in as few operations as possible, on a transformers module's
weights.

Compared with the module, this saves the Python of about twenty submodules per layer, separate projections (fused into
two products), one mask per layer, and the attention kernel where other operators are faster. `make gpu` compares it on
a GPU.

Invariants:
- The weights are the module's own: its parameters become views of fused matrices, so in-place loads reach both.
- `LeanDecoder.over` has compared its logits with the module's.
- Each row's cache columns start at 0, so rows of any age can run together.

Attention of one new token per row over the cached columns has two implementations, each with its own memory layout.
`KernelAttention` uses torch's fused kernel, for any device and dtype. `SparseAttention` takes less than half the time
on a CPU in float32: the heads of one token are contiguous, and a list of places in the table of all tokens and heads
tells which of them each query sees (`sampled_addmm` for the scores, `embedding_bag` for the values).
"""

from __future__ import annotations

import math
import mmap
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pvg.models.adapters import KEY, SampledLinear, adapted_product
from pvg.models.compute import added, product_tolerance, projected

Zeros = Callable[[tuple[int, ...]], Tensor]


@dataclass(frozen=True, slots=True)
class CommonPrefix:
    """The first `columns` tokens of row r are also those of row `owner_R[r]`."""

    owner_R: Tensor
    columns: int


class Attention(Protocol):
    """R rows, C columns of the cache, T columns in use, H query heads, K key heads, D head width, X = K D. A cache may
    have more rows than a step, which uses the first ones."""

    def buffer(self, zeros: Zeros) -> Tensor:
        """A layer's keys and values [2, rows, C, K, D], allocated by `zeros` in this implementation's memory layout."""

    def prepare(self, position_R: Tensor, columns: int, prefix: CommonPrefix | None = None) -> None:
        """Prepare a step in which row r sees the columns up to `position_R[r]`, all below `columns`. The columns of
        `prefix` may be read from the rows that own them."""

    def write(self, cache_RCKD: Tensor, new_RKD: Tensor) -> None:
        """Write the new token of each row at its position."""

    def attend(self, q_RHD: Tensor, keys_RCKD: Tensor, values_RCKD: Tensor) -> Tensor:
        """The attention output [R, H D]."""


class SparseAttention:
    """Attention by lists of places, for a cache of `rows` rows and `columns` columns on a CPU."""

    def __init__(self, rows: int, columns: int, heads: int, kv_heads: int, width: int) -> None:
        self._shape = (rows, columns, kv_heads, width)
        self._scale = width**-0.5
        # Each query head's tokens in a table with rows of D numbers.
        head_H1 = torch.arange(heads)[:, None] // (heads // kv_heads)
        token_R1C = torch.arange(rows * columns).view(rows, 1, columns)
        self._places_RHC = (token_R1C * kv_heads + head_H1).to(torch.int32)

    def buffer(self, zeros: Zeros) -> Tensor:
        return zeros((2, *self._shape))

    def prepare(self, position_R: Tensor, columns: int, prefix: CommonPrefix | None = None) -> None:
        rows, heads = len(position_R), self._places_RHC.shape[1]
        self._tokens_R = torch.arange(rows) * self._shape[1] + position_R
        hidden_R1T = torch.arange(columns) > position_R[:, None, None]
        self._bias_R1T = torch.zeros(rows, 1, columns).masked_fill_(hidden_R1T, -torch.inf)
        places_RHT = self._places_RHC[:rows, :, :columns].contiguous()
        if prefix is not None:  # rows that read the same memory find it in the processor's cache
            own = slice(min(prefix.columns, columns))
            places_RHT[..., own] = self._places_RHC[prefix.owner_R, :, own]
        self._places_N = places_RHT.flatten()
        ends_Q = torch.arange(0, len(self._places_N) + 1, columns, dtype=torch.int32)
        self._bags_Q = ends_Q[:-1]
        table_rows = math.prod(self._shape[:3])
        # Each layer overwrites the values.
        self._scores_QN = torch.sparse_csr_tensor(
            ends_Q, self._places_N, torch.zeros(len(self._places_N)), (rows * heads, table_rows)
        )

    def write(self, cache_RCKD: Tensor, new_RKD: Tensor) -> None:
        new_RX = new_RKD.flatten(1)
        cache_RCKD.view(-1, new_RX.shape[1]).index_copy_(0, self._tokens_R, new_RX)

    def attend(self, q_RHD: Tensor, keys_RCKD: Tensor, values_RCKD: Tensor) -> Tensor:
        rows, _, columns = self._bias_R1T.shape
        width = self._shape[-1]
        keys_DN, scores_QN = keys_RCKD.view(-1, width).t(), self._scores_QN
        torch.sparse.sampled_addmm(
            scores_QN, q_RHD.reshape(-1, width), keys_DN, beta=0.0, alpha=self._scale, out=scores_QN
        )
        weights_RHT = torch.softmax(scores_QN.values().view(rows, -1, columns) + self._bias_R1T, dim=-1)
        out_QD = F.embedding_bag(
            self._places_N,
            values_RCKD.view(-1, width),
            self._bags_Q,
            mode="sum",
            per_sample_weights=weights_RHT.view(-1),
        )
        return out_QD.view(rows, -1)


class KernelAttention:
    """Attention by torch's fused kernel. The queries of a group are rows of one matrix, so keys are read once for
    them."""

    def __init__(self, rows: int, columns: int, kv_heads: int, width: int) -> None:
        self._shape = (rows, kv_heads, columns, width)

    def buffer(self, zeros: Zeros) -> Tensor:
        kv = zeros((2, *self._shape))
        self._dtype = kv.dtype
        return kv.transpose(2, 3)

    def prepare(self, position_R: Tensor, columns: int, prefix: CommonPrefix | None = None) -> None:
        del prefix  # the kernel reads the columns of every row
        device, (_, kv_heads, capacity, _) = position_R.device, self._shape
        head_RK = torch.arange(len(position_R) * kv_heads, device=device).view(-1, kv_heads)
        self._tokens_N = (head_RK * capacity + position_R[:, None]).flatten()
        hidden_R11T = torch.arange(columns, device=device) > position_R[:, None, None, None]
        bias_R11T = torch.zeros(hidden_R11T.shape, dtype=self._dtype, device=device)
        self._bias_R11T = bias_R11T.masked_fill_(hidden_R11T, -torch.inf)

    def write(self, cache_RCKD: Tensor, new_RKD: Tensor) -> None:
        width = self._shape[-1]
        cache_RCKD.transpose(1, 2).view(-1, width).index_copy_(0, self._tokens_N, new_RKD.reshape(-1, width))

    def attend(self, q_RHD: Tensor, keys_RCKD: Tensor, values_RCKD: Tensor) -> Tensor:
        rows, columns = len(self._bias_R11T), self._bias_R11T.shape[-1]
        q_RKGD = q_RHD.reshape(rows, self._shape[1], -1, self._shape[-1])
        keys_RKTD, values_RKTD = (cache[:rows, :columns].transpose(1, 2) for cache in (keys_RCKD, values_RCKD))
        out_RKGD = F.scaled_dot_product_attention(q_RKGD, keys_RKTD, values_RKTD, attn_mask=self._bias_R11T)
        return out_RKGD.reshape(rows, -1)


# Supported decoders: RMSNorm, half-split rotary positions, grouped queries, gated MLP with silu. Biases and head norms
# are optional. `over` checks the logits, so a wrong entry here cannot give wrong results.
LEAN_TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
# Their frequencies depend on the text's length, so they cannot be tabulated.
CHANGING_ROTARY = frozenset({"dynamic", "longrope"})
# Largest difference from the module's logits relative to their norm: covers rounding in another order only. In 16 bits
# and TF32, of a shallow model (pvg.models.compute.product_tolerance).
PARITY_FLOAT32 = 1e-4
PARITY_REDUCED = {torch.float32: 5e-2, torch.float16: 1e-2, torch.bfloat16: 5e-2}
PARITY_ROWS, PARITY_TOKENS = 3, 7
HUGE_PAGE = 1 << 21


class NotLeanError(Exception):
    """Why a module has no lean decoder. The caller uses the module's own forward and logs the reason."""


@dataclass(frozen=True, slots=True)
class _Product:
    """Linear layers with one input: x W^T + b, [N, O], and scaling (x A^T) B^T of low-rank adapters. `A_RI`: the A of
    all layers, one below the other. `B_OR`: their B as the blocks of one matrix, which is zero elsewhere."""

    weight_OI: Tensor
    bias_O: Tensor | None
    A_RI: Tensor | None = None
    B_OR: Tensor | None = None
    scaling: float = 0.0

    def __call__(self, x_NI: Tensor) -> Tensor:
        if self.A_RI is None or self.B_OR is None:
            return projected(x_NI, self.weight_OI, self.bias_O)
        return adapted_product(x_NI, self.weight_OI, self.bias_O, self.A_RI, self.B_OR, self.scaling)

    def onto(self, x_NO: Tensor, y_NI: Tensor) -> Tensor:
        """x + the product of y."""
        if self.A_RI is None:
            return added(_biased(x_NO, self.bias_O), y_NI, self.weight_OI)
        return x_NO + self(y_NI)


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm: Tensor
    qkv: _Product  # W: [(H + 2K) D, W]
    head_norms: tuple[Tensor, Tensor] | None  # of queries and of keys, [D] each
    out: _Product  # [W, H D]
    mlp_norm: Tensor
    gate_up: _Product  # [2 I, W]
    down: _Product  # [W, I]


@dataclass(frozen=True, slots=True)
class LeanCache:
    """Each layer's keys and values [2, rows, columns, K heads, D]; zero where nothing was written, because masked
    values are multiplied by 0 and must be finite. `cos_T1D`, `sin_T1D`: the rotary table, in the model's dtype.
    `attention` defines the memory layout."""

    kv: list[Tensor]
    cos_T1D: Tensor
    sin_T1D: Tensor
    attention: Attention

    @property
    def rows(self) -> int:
        return self.kv[0].shape[1]

    @property
    def columns(self) -> int:
        return self.kv[0].shape[2]

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.kv)

    def move(self, sources_M: Tensor, targets_M: Tensor, columns: int) -> None:
        """Copy row `sources_M[m]` to row `targets_M[m]`, up to `columns`."""
        for layer in self.kv:
            layer[:, targets_M, :columns] = layer[:, sources_M, :columns]


class LeanDecoder:
    """Create with `over`. R rows, V vocabulary, W width, H query heads, K key heads, D head width, T columns."""

    def __init__(self, module: Any) -> None:
        config, decoder = module.config, module.model
        self._rotary = decoder.rotary_emb
        self._embedding: Tensor = decoder.embed_tokens.weight
        self._head: Tensor = module.lm_head.weight
        self._final_norm: Tensor = decoder.norm.weight
        self._eps: float = config.rms_norm_eps
        self._eps_0 = torch.tensor(self._eps, device=self._embedding.device)
        self._heads: int = config.num_attention_heads
        self._kv_heads: int = config.num_key_value_heads
        self._width: int = decoder.layers[0].self_attn.head_dim
        self._layers = [_fused(layer) for layer in decoder.layers]
        # On a CPU in float32, attention by places and three-pass norms are faster.
        self._sparse = self._embedding.device.type == "cpu" and self._embedding.dtype == torch.float32

    @classmethod
    def over(cls, module: nn.Module) -> LeanDecoder:
        """A decoder whose logits agree with the module's. Raises NotLeanError if the module is unsupported or they
        differ."""
        if complaint := next(_complaints(module), None):
            raise NotLeanError(complaint)
        lean = cls(module)
        lean._compare(module)
        return lean

    @property
    def device(self) -> torch.device:
        return self._embedding.device

    @property
    def token_bytes(self) -> int:
        """Bytes of a cache per row and column."""
        return 2 * len(self._layers) * self._kv_heads * self._width * self._embedding.itemsize

    def new_cache(self, rows: int, columns: int, old: LeanCache | None = None) -> LeanCache:
        """A cache of zeros, with the first rows of another one of no more columns, which loses them: only one layer at
        a time exists twice."""
        cos_1TD, sin_1TD = self._rotary(self._embedding, torch.arange(columns, device=self.device)[None])
        attention: Attention = (
            SparseAttention(rows, columns, self._heads, self._kv_heads, self._width)
            if self._sparse
            else KernelAttention(rows, columns, self._kv_heads, self._width)
        )
        layers: list[Tensor] = []
        for _ in self._layers:
            layers.append(attention.buffer(self._zeros))
            if old is not None:
                before = old.kv.pop(0)[:, :rows]
                layers[-1][:, : before.shape[1], : before.shape[2]] = before
        return LeanCache(layers, cos_1TD[0, :, None], sin_1TD[0, :, None], attention)

    def _zeros(self, shape: tuple[int, ...]) -> Tensor:
        return _zeros(shape, self._embedding.dtype, self.device)

    @torch.inference_mode()
    def prefill(
        self, ids_BL: Tensor, cache: LeanCache, rows_F: Tensor, prompts_F: Tensor, starts_B: Tensor | None = None
    ) -> None:
        """Write keys and values of B prompts, padded on the right. Prompt `prompts_F[f]` goes to row `rows_F[f]`, from
        column 0, or from `starts_B`; then these rows have the columns before it. The padding of a shorter prompt has no
        effect: a row overwrites those columns before it sees them."""
        B, L = ids_BL.shape
        columns_BL = torch.arange(L, device=self.device).expand(B, L)
        if starts_B is not None:
            columns_BL = (starts_B[:, None] + columns_BL).clamp(max=cache.columns - 1)  # only padding reaches the end
            seen = int(columns_BL.max()) + 1
            rows_B = torch.empty_like(starts_B)
            rows_B[prompts_F] = rows_F  # any row of the prompt
            hidden_B1LT = torch.arange(seen, device=self.device) > columns_BL[:, None, :, None]
        x_NW = F.embedding(ids_BL.reshape(-1), self._embedding)
        cos_N1D, sin_N1D = (table[columns_BL.reshape(-1)] for table in (cache.cos_T1D, cache.sin_T1D))
        groups = self._heads // self._kv_heads
        for layer, kv in zip(self._layers, cache.kv, strict=True):
            q_NHD, k_NKD, v_NKD = self._qkv(layer, x_NW, cos_N1D, sin_N1D)
            kv_BTKD = tuple(new_NKD.reshape(B, L, self._kv_heads, self._width) for new_NKD in (k_NKD, v_NKD))
            for buffer, new_BLKD in zip(kv, kv_BTKD, strict=True):
                if starts_B is None:
                    buffer[:, :L].index_copy_(0, rows_F, new_BLKD.index_select(0, prompts_F))
                else:
                    buffer[rows_F[:, None], columns_BL[prompts_F]] = new_BLKD[prompts_F]
            if starts_B is not None:
                kv_BTKD = tuple(buffer[:, :seen].index_select(0, rows_B) for buffer in kv)
            k_BHTD, v_BHTD = (x.transpose(1, 2).repeat_interleave(groups, dim=1) for x in kv_BTKD)
            out_BHLD = F.scaled_dot_product_attention(
                q_NHD.view(B, L, self._heads, self._width).transpose(1, 2),
                k_BHTD,
                v_BHTD,
                attn_mask=None if starts_B is None else ~hidden_B1LT,
                is_causal=starts_B is None,
            )
            x_NW = self._rest(layer, x_NW, out_BHLD.transpose(1, 2).reshape(B * L, -1))

    @torch.inference_mode()
    def step(
        self, token_R: Tensor, position_R: Tensor, cache: LeanCache, columns: int, prefix: CommonPrefix | None = None
    ) -> Tensor:
        """logits_RV after the tokens `token_R` int64 at positions `position_R` int64 of the cache's first R rows.

        `columns` must be above the position of every row whose logits are used. The columns of `prefix` must already be
        filled."""
        x_RW = F.embedding(token_R, self._embedding)
        cos_R1D, sin_R1D = cache.cos_T1D[position_R], cache.sin_T1D[position_R]
        cache.attention.prepare(position_R, columns, prefix)
        for layer, kv in zip(self._layers, cache.kv, strict=True):
            q_RHD, k_RKD, v_RKD = self._qkv(layer, x_RW, cos_R1D, sin_R1D)
            for buffer, new_RKD in zip(kv, (k_RKD, v_RKD), strict=True):
                cache.attention.write(buffer, new_RKD)
            x_RW = self._rest(layer, x_RW, cache.attention.attend(q_RHD, kv[0], kv[1]))
        return projected(self._norm(x_RW, self._final_norm), self._head)

    # --- one layer ---------------------------------------------------------------------------------------------------

    def _qkv(self, layer: _Layer, x_NW: Tensor, cos_N1D: Tensor, sin_N1D: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries [N, H, D] and keys [N, K, D], and values [N, K, D]."""
        mixed_NXD = layer.qkv(self._norm(x_NW, layer.attention_norm))
        mixed_NXD = mixed_NXD.view(len(x_NW), -1, self._width)
        qk_NXD, v_NKD = torch.split(mixed_NXD, [self._heads + self._kv_heads, self._kv_heads], dim=1)
        if layer.head_norms is not None:
            both = zip(torch.split(qk_NXD, [self._heads, self._kv_heads], dim=1), layer.head_norms, strict=True)
            qk_NXD = torch.cat([self._norm(part, weight) for part, weight in both], dim=1)
        half = self._width // 2
        turned_NXD = qk_NXD * cos_N1D
        turned_NXD[..., :half].addcmul_(qk_NXD[..., half:], sin_N1D[..., :half], value=-1)
        turned_NXD[..., half:].addcmul_(qk_NXD[..., :half], sin_N1D[..., half:])
        return turned_NXD[:, : self._heads], turned_NXD[:, self._heads :], v_NKD

    def _rest(self, layer: _Layer, x_NW: Tensor, attended: Tensor) -> Tensor:
        """The output projection and the gated MLP, each added to its input."""
        x_NW = layer.out.onto(x_NW, attended)
        gate, up = layer.gate_up(self._norm(x_NW, layer.mlp_norm)).chunk(2, dim=-1)
        return layer.down.onto(x_NW, F.silu(gate).mul_(up))

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        if not self._sparse:
            return F.rms_norm(x, weight.shape, weight, self._eps)
        # The same result in float32: torch takes six passes on a CPU, while norm, scale and weight are three.
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = torch.addcmul(self._eps_0, length, length, value=1 / len(weight)).rsqrt_()
        return (x * scale).mul_(weight)

    # --- parity ------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _compare(self, module: nn.Module) -> None:
        """Compare a prefill of prompts and a step with one forward pass of the module."""
        generator = torch.Generator().manual_seed(0)
        vocabulary = self._embedding.shape[0]
        ids_BL = torch.randint(vocabulary, (PARITY_ROWS, PARITY_TOKENS), generator=generator).to(self.device)
        expected_BLV = module(input_ids=ids_BL, use_cache=False).logits.float()
        if not bool(torch.isfinite(expected_BLV).all()):
            raise NotLeanError("the module's own logits are not finite")
        cache = self.new_cache(PARITY_ROWS, PARITY_TOKENS)
        rows_B = torch.arange(PARITY_ROWS, device=self.device)
        self.prefill(ids_BL, cache, rows_B, rows_B)
        position_B = PARITY_TOKENS - 1 - rows_B  # different ages: each row must see only its own columns
        with warnings.catch_warnings():  # torch warns once that sparse CSR tensors are in beta state
            warnings.simplefilter("ignore", UserWarning)
            found_BV = self.step(ids_BL[rows_B, position_B], position_B, cache, PARITY_TOKENS).float()
        wanted_BV = expected_BLV[rows_B, position_B]
        gap = float((found_BV - wanted_BV).norm() / (wanted_BV.norm() + 1e-30))
        reduced = PARITY_REDUCED[self._embedding.dtype]
        tolerance = product_tolerance(self._embedding, PARITY_FLOAT32, reduced, len(self._layers))
        if not gap <= tolerance:
            raise NotLeanError(f"its logits differ from the module's by {gap:.2g} of their norm")


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, on Linux in huge pages: a step touches every row's columns, and small pages cost a page walk per row."""
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or not hasattr(mmap, "MADV_HUGEPAGE") or size < HUGE_PAGE:
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)  # the tensor keeps the memory alive


def _complaints(module: Any) -> Iterator[str]:
    """The reasons why `module` is unsupported. Assumes the attribute names of transformers' decoders."""
    config = module.config
    if config.model_type not in LEAN_TYPES:
        yield f"there is no lean decoding for models of type {config.model_type!r}"
    windowed = config.model_type == "mistral" and config.sliding_window is not None
    if windowed or set(getattr(config, "layer_types", None) or ["full_attention"]) != {"full_attention"}:
        yield "it attends to a window"
    if config.hidden_act != "silu":
        yield f"its MLP uses {config.hidden_act!r}"
    if config.rope_parameters["rope_type"] in CHANGING_ROTARY:
        yield f"its positions are of the type {config.rope_parameters['rope_type']!r}"
    if module.lm_head.bias is not None:
        yield "its output layer has a bias"
    if module.lm_head.weight.dtype not in PARITY_REDUCED:
        yield f"it computes in {module.lm_head.weight.dtype}"
    for layer in module.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        linears = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
        linears += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
        parts = [part.base_layer if isinstance(part, SampledLinear) else part for part in linears]
        yield from (f"its layers hold a {type(part).__name__}" for part in parts if type(part) is not nn.Linear)


def _fused(layer: Any) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    normed = getattr(attention, "q_norm", None) is not None
    return _Layer(
        attention_norm=layer.input_layernorm.weight.data,
        qkv=_product(attention.q_proj, attention.k_proj, attention.v_proj),
        head_norms=(attention.q_norm.weight.data, attention.k_norm.weight.data) if normed else None,
        out=_product(attention.o_proj),
        mlp_norm=layer.post_attention_layernorm.weight.data,
        gate_up=_product(mlp.gate_proj, mlp.up_proj),
        down=_product(mlp.down_proj),
    )


def _product(*layers: Any) -> _Product:
    bases = [getattr(layer, "base_layer", layer) for layer in layers]
    biases = [layer.bias for layer in bases if layer.bias is not None]
    joined = _joined([layer.weight for layer in bases]), _joined(biases) if len(biases) == len(layers) else None
    if not isinstance(layers[0], SampledLinear):
        return _Product(*joined)
    sides_A, sides_B = ([getattr(layer, side)[KEY].weight for layer in layers] for side in ("lora_A", "lora_B"))
    B_OR = sides_B[0].new_zeros([sum(side.shape[axis] for side in sides_B) for axis in (0, 1)])
    row = column = 0
    for side in sides_B:  # as in `_joined`
        block = B_OR[row : row + side.shape[0], column : column + side.shape[1]]
        side.data = block.copy_(side.data)
        row, column = row + side.shape[0], column + side.shape[1]
    return _Product(*joined, _joined(sides_A), B_OR, layers[0].scaling)


def _joined(parts: Sequence[nn.Parameter]) -> Tensor:
    """One matrix of all rows. The parameters become views of it, so memory is not doubled and loads reach both. They
    may be already, if another decoder has the same weights."""
    first, memories = parts[0].data, {part.untyped_storage().data_ptr() for part in parts}
    if len(memories) == 1 and all(b.data_ptr() == a.data_ptr() + a.nbytes for a, b in pairwise(parts)):
        return first.as_strided((sum(map(len, parts)), *first.shape[1:]), first.stride())
    joined = torch.cat([part.data for part in parts])
    for part, rows in zip(parts, torch.split(joined, [len(part) for part in parts]), strict=True):
        part.data = rows
    return joined


def _biased(x_NW: Tensor, bias: Tensor | None) -> Tensor:
    return x_NW if bias is None else x_NW + bias
