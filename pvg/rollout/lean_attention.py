"""Attention of one new token per row over the cached columns of all rows, in two ways, each with its order of memory.

    kv = attention.buffer(zeros, layers)                      # keys and values [layers, 2, rows, columns, K, D]
    attention.prepare(position_R, columns)                    # once per step, for all layers
    attention.write(keys_RCKD, new_RKD)                       # the new token's keys; values likewise
    out_RX = attention.attend(q_RHD, keys_RCKD, values_RCKD)  # once per layer

`ByKernel`: torch's fused kernel, for any device and dtype, over a cache in which each head's tokens lie side by side.

`ByProducts`, on a CPU in float32, in about half its time. A token's heads lie side by side, so that a new token is
written in one piece and a row is read from its beginning to its end; reading the cache is what attention costs.
- scores: one product per row for all its heads. A head's query fills its own block of a row of zeros, so that products
  with whole tokens give that head's scores; K times the multiplications, which wait for the memory anyway.
- values: a weighted sum of rows of a table, which torch has as `embedding_bag`; it fetches ahead what it will read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

Zeros = Callable[[tuple[int, ...]], Tensor]


@dataclass(frozen=True, slots=True)
class Shared:
    """Rows 0, `rows`, 2 `rows`, ... and the `rows` - 1 behind each have the same tokens in their first `columns`."""

    rows: int
    columns: int


class Attention(Protocol):
    """R rows, C columns of the cache, T columns in use, H query heads, K key heads, D head width, X = K D. A cache may
    have more rows than a step: it uses the first."""

    def buffer(self, zeros: Zeros, layers: int) -> Tensor:
        """Keys and values [layers, 2, rows, C, K, D], made by `zeros`, in the order of memory that this way reads."""
        ...

    def prepare(self, position_R: Tensor, columns: int, shared: Shared | None = None) -> None:
        """Row r will see the columns up to `position_R[r]`, all of which are below `columns`. What is `shared` may be
        read of the first of those rows alone."""
        ...

    def write(self, cache_RCKD: Tensor, new_RKD: Tensor) -> None:
        """To the positions of the step."""
        ...

    def attend(self, q_RHD: Tensor, keys_RCKD: Tensor, values_RCKD: Tensor) -> Tensor:
        """[R, H D]."""
        ...


class ByProducts:
    """For a cache of `rows` rows and `columns` columns, on a CPU."""

    def __init__(self, rows: int, columns: int, heads: int, kv_heads: int, width: int) -> None:
        self._shape = (rows, columns, kv_heads, width)
        self._scale = width**-0.5
        # Zero but for the blocks that every call overwrites.
        self._query_RHX = torch.zeros(rows, heads, kv_heads * width)
        blocks_RKGKD = self._query_RHX.view(rows, kv_heads, -1, kv_heads, width)
        self._blocks_RKGD = blocks_RKGKD.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)
        # Where a query head's values stand, in a table of D numbers a row.
        head_H1 = torch.arange(heads)[:, None] // (heads // kv_heads)
        token_R1C = torch.arange(rows * columns).view(rows, 1, columns)
        self._places_RHC = (token_R1C * kv_heads + head_H1).to(torch.int32)

    def buffer(self, zeros: Zeros, layers: int) -> Tensor:
        return zeros((layers, 2, *self._shape))

    def prepare(self, position_R: Tensor, columns: int, shared: Shared | None = None) -> None:
        rows, self._shared = len(position_R), shared
        self._tokens_R = torch.arange(rows) * self._shape[1] + position_R
        hidden_R1T = torch.arange(columns) > position_R[:, None, None]
        self._bias_R1T = torch.zeros(rows, 1, columns).masked_fill_(hidden_R1T, -torch.inf)
        places_RHT = self._places_RHC[:rows, :, :columns].contiguous()
        if shared is not None:
            places_GSHT = places_RHT.view(-1, shared.rows, *places_RHT.shape[1:])[..., : shared.columns]
            places_GSHT.copy_(places_GSHT[:, :1].clone())
        self._places_N = places_RHT.flatten()
        self._bags_N = torch.arange(0, len(self._places_N), columns, dtype=torch.int32)

    def write(self, cache_RCKD: Tensor, new_RKD: Tensor) -> None:
        new_RX = new_RKD.flatten(1)
        cache_RCKD.view(-1, new_RX.shape[1]).index_copy_(0, self._tokens_R, new_RX)

    def attend(self, q_RHD: Tensor, keys_RCKD: Tensor, values_RCKD: Tensor) -> Tensor:
        rows, _, columns = self._bias_R1T.shape
        *_, kv_heads, width = self._shape
        self._blocks_RKGD[:rows].copy_(q_RHD.view(rows, kv_heads, -1, width))
        weights_RHT = torch.softmax(self._scores(keys_RCKD[:rows, :columns].flatten(2)), dim=-1)
        out_ND = F.embedding_bag(
            self._places_N,
            values_RCKD.view(-1, width),
            self._bags_N,
            mode="sum",
            per_sample_weights=weights_RHT.view(-1),
        )
        return out_ND.view(rows, -1)

    def _scores(self, keys_RTX: Tensor) -> Tensor:
        """scores_RHT, -inf where a row does not see."""
        query_RHX, shared = self._query_RHX[: len(keys_RTX)], self._shared
        if shared is None:
            scores_RHT = torch.bmm(query_RHX, keys_RTX.transpose(1, 2))
            return torch.add(self._bias_R1T, scores_RHT, alpha=self._scale, out=scores_RHT)
        common, (rows, heads, width) = shared.columns, query_RHX.shape
        scores_RHT = query_RHX.new_empty(rows, heads, keys_RTX.shape[1])
        own_RHU = torch.bmm(query_RHX, keys_RTX[:, common:].transpose(1, 2))
        torch.add(self._bias_R1T[..., common:], own_RHU, alpha=self._scale, out=scores_RHT[..., common:])
        # All rows and heads that share are the rows of one matrix.
        keys_GCX = keys_RTX[:: shared.rows, :common]
        common_GNC = torch.bmm(query_RHX.view(-1, shared.rows * heads, width), keys_GCX.transpose(1, 2))
        torch.mul(common_GNC.view(rows, heads, common), self._scale, out=scores_RHT[..., :common])
        return scores_RHT


class ByKernel:
    """The queries of a group stand as rows of one query matrix, so that keys are read once for all of them."""

    def __init__(self, rows: int, columns: int, kv_heads: int, width: int) -> None:
        self._shape = (rows, kv_heads, columns, width)

    def buffer(self, zeros: Zeros, layers: int) -> Tensor:
        kv = zeros((layers, 2, *self._shape))
        self._dtype = kv.dtype
        return kv.transpose(3, 4)

    def prepare(self, position_R: Tensor, columns: int, shared: Shared | None = None) -> None:
        del shared  # the kernel reads every row's own
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
