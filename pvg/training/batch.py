"""The batches of policy training: rollouts as arrays, with advantages. Uses numpy only."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from pvg.records import Float32, Int32, Rollout, RoutedExperts

BatchT_co = TypeVar("BatchT_co", covariant=True)


class BatchSource(Protocol[BatchT_co]):
    """Provides a trainer's batches: on-policy sampling, preference pairs, or replay. None: there are no more."""

    async def next_batch(self) -> BatchT_co | None: ...


@dataclass(slots=True)
class PolicyBatch:
    """N rollouts as arrays. `sequences[n]`: prompt + completion, int32 [P + C]; `prompt_lengths[n]` is P.

    - `sampled_masks[n]` bool [C]: False for tokens that an environment wrote. These are only input; they have no
      log-prob, no loss and no metric. None: all tokens were sampled. Below, C counts sampled tokens only.
    - `sampled_logprobs[n]` float32 [C], nats: under the policy in the ratio's denominator (the sampler's values, or
      values recomputed with its weights). `reference_logprobs[n]`: likewise under the KL's reference policy.
    - `proximal_logprobs[n]`: under the policy at batch start, for a decoupled clip. If present, they are the ratio's
      denominator. In a batch with one step, the policy at batch start is the trained policy, and the step's forward
      pass computes them; then `stale_N` marks the rows that need them.
    - `role_ids_N`: Role.number. `versions_N`: the oldest policy version of each row.
    - `row_weights_N`: make the loss a plain sum over rows; an objective's `prepare` sets them.
    - `routed_experts[n]` [P + C - 1, layers, k]: experts that the sampler's model chose, for all rows or none; never
      copied.

    Raises ValueError if lengths do not match.
    """

    sequences: list[Int32]
    prompt_lengths: Int32
    sampled_logprobs: list[Float32]
    reference_logprobs: list[Float32] | None
    advantages_N: Float32
    role_ids_N: NDArray[np.int8]
    group_ids_N: Int32
    versions_N: Int32
    row_weights_N: Float32 | None = None
    routed_experts: list[RoutedExperts] | None = None
    proximal_logprobs: list[Float32] | None = None
    sampled_masks: list[NDArray[np.bool_]] | None = None
    stale_N: NDArray[np.bool_] | None = None

    def __post_init__(self) -> None:
        for name, array in self._columns().items():
            if isinstance(array, np.ndarray) and array.shape != (len(self),):
                raise ValueError(f"{name} has shape {array.shape} for {len(self)} rows")
        if self.sampled_masks is not None:
            tokens_N = self.lengths_N - self.prompt_lengths
            if not np.array_equal(_lengths(self.sampled_masks), tokens_N):
                raise ValueError("sampled_masks must have one value per completion token of each row")
        for name in ("sampled_logprobs", "reference_logprobs", "proximal_logprobs"):
            logprobs = getattr(self, name)
            if logprobs is not None and not np.array_equal(_lengths(logprobs), self.completion_lengths_N):
                raise ValueError(f"{name} must have one value per completion token of each row")
        if self.routed_experts is not None and not np.array_equal(_lengths(self.routed_experts), self.lengths_N - 1):
            raise ValueError("routed_experts must have one row per token of each sequence except its last token")

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def lengths_N(self) -> NDArray[np.int64]:
        """Tokens of each row, with prompt."""
        return _lengths(self.sequences)

    @property
    def completion_lengths_N(self) -> NDArray[np.int64]:
        """Sampled completion tokens of each row."""
        if self.sampled_masks is not None:
            return np.fromiter((mask.sum() for mask in self.sampled_masks), dtype=np.int64, count=len(self))
        return self.lengths_N - self.prompt_lengths

    def select(self, rows: NDArray[np.int64]) -> PolicyBatch:
        """The given rows, in the given order."""

        chosen: dict[str, Any] = {}
        for name, column in self._columns().items():
            if column is not None:
                chosen[name] = [column[row] for row in rows] if isinstance(column, list) else column[rows]
        return replace(self, **chosen)

    def _columns(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def with_weights(self, row_weights_N: Float32) -> PolicyBatch:
        return replace(self, row_weights_N=row_weights_N)

    def completion_mask(self) -> NDArray[np.bool_]:
        """bool [N, L]: True where position t of row n is a sampled completion token; L is the longest row."""
        positions_L = np.arange(self.lengths_N.max(initial=0))
        mask_NL = (positions_L >= self.prompt_lengths[:, None]) & (positions_L < self.lengths_N[:, None])
        if self.sampled_masks is not None and len(self):
            mask_NL[mask_NL] = np.concatenate(self.sampled_masks)
        return mask_NL

    def on_positions(self, values: Sequence[Float32]) -> Float32:
        """float32 [N, L]: one value per sampled token at its position, 0 elsewhere."""
        mask_NL = self.completion_mask()
        grid_NL = np.zeros(mask_NL.shape, dtype=np.float32)
        if len(values):
            grid_NL[mask_NL] = np.concatenate(values)
        return grid_NL


def minibatches(batch: PolicyBatch, n: int) -> list[PolicyBatch]:
    """`batch` in `n` parts, one per optimizer step; each row is in exactly one part.

    With at least n groups, groups stay whole and each part gets its share of both roles' groups (otherwise a step could
    train one role only). With fewer groups, rows are distributed individually. Rows keep their order within a part.

    Raises ValueError if there are fewer rows than parts.
    """
    if not 1 <= n <= len(batch):
        raise ValueError(f"cannot make {n} minibatches of {len(batch)} rows")
    if n == 1:
        return [batch]
    keys_N2 = np.stack([batch.role_ids_N.astype(np.int64), batch.group_ids_N.astype(np.int64)], axis=1)
    keys_G2, group_N = np.unique(keys_N2, axis=0, return_inverse=True)  # sorted by role first
    if len(keys_G2) < n:
        group_N = np.argsort(np.argsort(group_N, kind="stable"), kind="stable")  # treat each row as a group
    part_N = group_N.reshape(-1) % n
    return [batch.select(np.flatnonzero(part_N == part)) for part in range(n)]


class MinibatchSource:
    """Splits each batch of `source` into `n` minibatches. `pending`: minibatches of the current batch not yet taken."""

    def __init__(self, source: BatchSource[PolicyBatch], n: int) -> None:
        self._source = source
        self._n = n
        self._parts: deque[PolicyBatch] = deque()

    @property
    def pending(self) -> int:
        return len(self._parts)

    async def next_batch(self) -> PolicyBatch | None:
        if not self._parts:
            batch = await self._source.next_batch()
            if batch is None:
                return None
            self._parts.extend(minibatches(batch, self._n))
        return self._parts.popleft()


def batch_of(rollouts: Sequence[Rollout], advantages_N: Float32) -> PolicyBatch:
    """The batch of these rollouts, with the sampler's log-probs, and those of the reference that the engine gave."""
    group_ids_N, role_ids_N = groups_and_roles(rollouts)
    experts = [rollout.routed_experts for rollout in rollouts if rollout.routed_experts is not None]
    if len(experts) not in (0, len(rollouts)):
        raise ValueError(f"only {len(experts)} of {len(rollouts)} rollouts have routed experts")
    references = [_sampled(r, r.reference_logprobs) for r in rollouts if r.reference_logprobs is not None]
    if len(references) not in (0, len(rollouts)):
        raise ValueError(f"only {len(references)} of {len(rollouts)} rollouts have log-probs of the reference")
    return PolicyBatch(
        sequences=[np.concatenate([r.prompt_ids, r.completion_ids]) for r in rollouts],
        prompt_lengths=np.array([len(r.prompt_ids) for r in rollouts], dtype=np.int32),
        sampled_logprobs=[_sampled(r, r.logprobs) for r in rollouts],
        reference_logprobs=references or None,
        advantages_N=advantages_N,
        role_ids_N=role_ids_N,
        group_ids_N=group_ids_N,
        versions_N=np.array([r.version for r in rollouts], dtype=np.int32),
        routed_experts=experts or None,
        sampled_masks=[r.sampled_mask for r in rollouts] if any(r.turns for r in rollouts) else None,
    )


def _sampled(rollout: Rollout, values: Float32) -> Float32:
    return values[rollout.sampled_mask] if rollout.turns else values


def groups_and_roles(rollouts: Sequence[Rollout]) -> tuple[NDArray[np.int32], NDArray[np.int8]]:
    """Group numbers int32 [N] and role numbers int8 [N] of rollouts."""
    groups_N = np.array([r.group for r in rollouts], dtype=np.int32)
    return groups_N, np.array([r.role.number for r in rollouts], dtype=np.int8)


def _lengths(rows: Sequence[NDArray[Any]]) -> NDArray[np.int64]:
    return np.fromiter((len(row) for row in rows), dtype=np.int64, count=len(rows))
