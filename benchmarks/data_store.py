"""Writes the rollouts, and the JSONL of their pairs, that the `data` workload loads; deterministic given its settings.

Every problem has as many correct as wrong solutions, so s solutions form (s/2)^2 pairs. Texts, token ids and log-probs
are slices of a pool that is drawn once. So lengths and content vary from row to row, and writing a quarter of a million
rows takes seconds.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pvg.errors import MissingRequirementError
from pvg.records import BASE_SOURCE, Grade, Role, Rollout, VersionSpan
from pvg.store.shards import RolloutShards, ShardInfo

CHARACTERS_PER_TOKEN = 4  # typical of subword vocabularies on English text
VOCABULARY = 49_152  # SmolLM2's
PROMPT_TOKENS = 50  # a word problem of two or three sentences
ALPHABET = b'abcdefghijklmnopqrstuvwxyz0123456789+-=. \n"\\'
ROWS_PER_SHARD = 4096  # the embedded game's mint of one round: 512 problems, 8 solutions each
POOL_TOKENS = 1 << 20
# Bytes of a stored row in addition to its tokens and text, and of a JSONL line in addition to its texts, rounded up.
ROW_OVERHEAD = 800
LINE_OVERHEAD = 300
SPARE = 1.15  # factor on the estimated space, because lengths are random


@dataclass(frozen=True, slots=True)
class StoreShape:
    """What is stored. `tokens`: mean length of a solution. `solutions`: per problem, half of them correct. `ids`: the
    range of the token ids. `alphabet`: the characters of the texts."""

    solutions: int
    tokens: int
    seed: int
    ids: range = range(VOCABULARY)
    alphabet: bytes = ALPHABET

    @property
    def longest(self) -> int:
        return 4 * self.tokens

    @property
    def pairs_per_problem(self) -> int:
        return (self.solutions // 2) ** 2

    def pairs_formed(self, pairs: int) -> int:
        """`pairs`, rounded up to a whole number of problems."""
        return self.problems_for(pairs) * self.pairs_per_problem

    def problems_for(self, pairs: int) -> int:
        return -(-pairs // self.pairs_per_problem)

    def stored_bytes(self, pairs: int) -> int:
        """Approximate disk space of the shards of `pairs` pairs."""
        per_row = self.tokens * (4 + 4 + CHARACTERS_PER_TOKEN) + ROW_OVERHEAD
        return int(SPARE * self.problems_for(pairs) * self.solutions * per_row)

    def jsonl_bytes(self, pairs: int) -> int:
        """Approximate disk space of `pairs` pairs as text."""
        per_pair = 2 * self.tokens * CHARACTERS_PER_TOKEN + LINE_OVERHEAD
        return int(SPARE * pairs * per_pair)


def check_free_space(folder: Path, needed: int, remedy: str) -> None:
    """Raises MissingRequirementError if the disk of the temporary `folder` has less than `needed` bytes free."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        place = folder.parent
        raise MissingRequirementError(
            f"The benchmark writes about {needed / 1e9:.2f} GB to {place}, which has {free / 1e9:.2f} GB free.",
            remedy,
        )


class SolutionPool:
    """Creates the rollouts of a problem, deterministically from its number and the shape."""

    def __init__(self, shape: StoreShape) -> None:
        self._shape = shape
        generator = np.random.Generator(np.random.PCG64(shape.seed))
        longest = shape.longest
        self._ids = generator.integers(shape.ids.start, shape.ids.stop, POOL_TOKENS + longest, dtype=np.int32)
        self._logprobs = -generator.exponential(0.5, POOL_TOKENS + longest).astype(np.float32)
        letters = generator.choice(
            np.frombuffer(shape.alphabet, np.uint8), (POOL_TOKENS + longest) * CHARACTERS_PER_TOKEN
        )
        self._text = letters.tobytes().decode()

    def rollouts(self, problem: int) -> list[Rollout]:
        """The solutions of one problem; those with even numbers are correct."""
        shape = self._shape
        generator = np.random.Generator(np.random.PCG64((shape.seed, problem)))
        # A gamma distribution of shape 4: most solutions are near the mean, the tail reaches four times that.
        lengths = np.clip(generator.gamma(4.0, shape.tokens / 4, shape.solutions), 8, shape.longest).astype(np.int64)
        starts = generator.integers(0, POOL_TOKENS, shape.solutions)
        question = self._characters(int(starts[0]), PROMPT_TOKENS)
        prompt_ids = self._ids[starts[0] : starts[0] + PROMPT_TOKENS]
        return [
            Rollout(
                id=f"bench/{problem:06d}/{number:02d}",
                problem_id=f"problem-{problem:06d}",
                question=question,
                reference="42",
                role=Role.SNEAKY if number % 2 else Role.HELPFUL,
                round=0,
                source=BASE_SOURCE,
                step=0,
                group=problem,
                prompt_ids=prompt_ids,
                completion_ids=self._ids[start : start + length],
                logprobs=self._logprobs[start : start + length],
                spans=(VersionSpan(0, 0),),
                finish_reason="stop",
                text=self._characters(start, length),
                grade=Grade(correct=number % 2 == 0, well_formed=True, answer="42" if number % 2 == 0 else "41"),
            )
            for number, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True))
        ]

    def _characters(self, start: int, tokens: int) -> str:
        return self._text[start * CHARACTERS_PER_TOKEN : (start + tokens) * CHARACTERS_PER_TOKEN]


def write_store(directory: Path, shape: StoreShape, sizes: Sequence[int]) -> Iterator[tuple[int, ShardInfo]]:
    """Write the rollouts of the largest size (in pairs), one shard at a time, with digests as in a mint.

    Yields each shard with the smallest size that it belongs to. The rollouts of a size are its own shards plus those of
    all smaller sizes.
    """
    pool, shards = SolutionPool(shape), RolloutShards(directory)
    per_shard = max(1, ROWS_PER_SHARD // shape.solutions)
    problem = count = 0
    for size in sorted(sizes):
        end = shape.problems_for(size)
        while problem < end:
            stop = min(problem + per_shard, end)
            rollouts = [rollout for number in range(problem, stop) for rollout in pool.rollouts(number)]
            yield size, shards.write(0, f"mint-{count:05d}", rollouts, by_row=True)
            problem, count = stop, count + 1


def write_pairs(path: Path, shape: StoreShape, pairs: int) -> Iterator[int]:
    """Write every pair of the store of this size as one JSON object per line; yields the bytes written so far."""
    pool = SolutionPool(shape)
    with open(path, "w", encoding="utf-8") as file:
        for problem in range(shape.problems_for(pairs)):
            file.writelines(json.dumps(pair) + "\n" for pair in _pairs_of(pool.rollouts(problem)))
            yield file.tell()


def _pairs_of(rollouts: Sequence[Rollout]) -> Iterator[dict[str, str]]:
    right = [rollout for rollout in rollouts if rollout.grade.correct]
    wrong = [rollout for rollout in rollouts if not rollout.grade.correct]
    for chosen in right:
        for rejected in wrong:
            yield {"prompt": chosen.question, "chosen": chosen.text, "rejected": rejected.text}
