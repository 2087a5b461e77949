"""The "model" of the tests' own server: tokens and log-probs as pure functions that a test can compute as well.

A token depends on the weights' fingerprint, the prompt, the seed and its position; not on the tokens before it. So a
test predicts every completion, also one that an update went through, and sees which weights sampled which token.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

VOCABULARY = 64
STOPS_EVERY = 24  # one stop token per this many tokens, if the request has one
AS_STARTED = "as started"  # the fingerprint of a server that has loaded nothing


@dataclass(frozen=True)
class Weights:
    """What lies in a safetensors file: by name, (dtype, shape, raw bytes)."""

    tensors: Mapping[str, tuple[str, tuple[int, ...], bytes]]

    @cached_property  # every sampled token asks for it
    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for name in sorted(self.tensors):
            dtype, shape, raw = self.tensors[name]
            digest.update(f"{name}|{dtype}|{list(shape)}|".encode() + raw)
        return digest.hexdigest()[:16]

    @classmethod
    def of(cls, arrays: Mapping[str, Any]) -> Weights:
        """Of float32 arrays or torch tensors, as they are published in float32."""
        found = {name: np.asarray(array, dtype=np.float32) for name, array in arrays.items()}
        return cls({name: ("F32", array.shape, array.tobytes()) for name, array in found.items()})

    def float32(self) -> dict[str, np.ndarray]:
        return {n: np.frombuffer(raw, np.float32).reshape(shape) for n, (_, shape, raw) in self.tensors.items()}


def read_weights(path: Path) -> Weights:
    """The tensors of a safetensors file. Raises ValueError for what is none."""
    data = path.read_bytes()
    if len(data) < 8 or (end := 8 + struct.unpack("<Q", data[:8])[0]) > len(data):
        raise ValueError(f"{path.name} is no safetensors file")
    entries: dict[str, Any] = json.loads(data[8:end])
    entries.pop("__metadata__", None)
    found = {}
    for name, entry in entries.items():
        first, last = entry["data_offsets"]
        if end + last > len(data):
            raise ValueError(f"{path.name} is cut short")
        found[name] = (entry["dtype"], tuple(entry["shape"]), data[end + first : end + last])
    return Weights(found)


def mark_stable(folder: Path, sizes: Mapping[str, Any], version: object = 1) -> Path:
    """Mark a folder of published weights as whole, with files of these sizes."""
    content = {"version": version, "files": {file: {"bytes": size} for file, size in sizes.items()}}
    (folder / "STABLE").write_text(json.dumps(content))
    return folder


def sampled(
    fingerprint: str, prompt: Sequence[int], seed: int, position: int, stop_ids: Sequence[int] = ()
) -> tuple[int, float]:
    """The token at `position` of a completion, and its log-prob in nats (a float32 exactly)."""
    draw = _draw("token", fingerprint, prompt, seed, position)
    stops = bool(stop_ids) and position > 0 and draw % STOPS_EVERY == 0
    token = stop_ids[0] if stops else 2 + (draw >> 16) % (VOCABULARY - 2)
    return token, float(np.float32(-((draw >> 32) % 4096) / 1024))


def completion(
    fingerprint: str, prompt: Sequence[int], seed: int, max_tokens: int, stop_ids: Sequence[int] = ()
) -> tuple[list[int], list[float]]:
    """All of a completion by one version of the weights: (token ids, log-probs)."""
    ids: list[int] = []
    logprobs: list[float] = []
    while len(ids) < max_tokens and not (ids and ids[-1] in stop_ids):
        token, logprob = sampled(fingerprint, prompt, seed, len(ids), stop_ids)
        ids.append(token)
        logprobs.append(logprob)
    return ids, logprobs


def prompt_logprobs(fingerprint: str, ids: Sequence[int]) -> list[float]:
    """Log-probs of ids[1:], in nats."""
    return [-(_draw("prompt", fingerprint, ids[: i + 1], 0, i) % 4096) / 1024 for i in range(1, len(ids))]


@dataclass
class Sampled:
    """One request's completion as it grows."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None

    def add(self, token: int, logprob: float, label: str) -> None:
        if not self.spans or self.spans[-1]["version"] != label:
            self.spans.append({"version": label, "start": len(self.ids), "end": 0})
        self.ids.append(token)
        self.logprobs.append(logprob)
        self.spans[-1]["end"] = len(self.ids)

    def choice(self) -> dict[str, Any]:
        """As pvg's part of the server writes it."""
        return {
            "token_ids": base64.b64encode(np.array(self.ids, "<i4").tobytes()).decode(),
            "logprobs": base64.b64encode(np.array(self.logprobs, "<f4").tobytes()).decode(),
            "finish_reason": self.finish_reason,
            "weight_versions": self.spans,
        }


def routed_experts(ids: Sequence[int]) -> np.ndarray:
    """The experts of a sequence's tokens but the last: uint8 [L - 1, 2 layers, 2], from the token and its place."""
    ids_L = np.asarray(ids[:-1], dtype=np.int64)
    mixed_L = ids_L * 7 + np.arange(len(ids_L))
    return np.stack([(mixed_L + layer) % 8 for layer in range(4)], axis=1).reshape(-1, 2, 2).astype(np.uint8)


def as_vllm_writes(array: np.ndarray) -> str:
    """An .npy file in base64."""
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return base64.b64encode(file.getvalue()).decode()


def _draw(*what: object) -> int:
    text = "|".join(
        str([*map(int, part)]) if isinstance(part, (list, tuple, np.ndarray)) else str(part) for part in what
    )
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
