"""Tensors compared bit by bit with a server's digests."""

from __future__ import annotations

import asyncio
import hashlib
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from pvg.errors import WeightsNotArrivedError
from pvg.servers.canary import NOTHING, ChecksumTest
from pvg.servers.control import ControlClient, ServerInfo

PREFIX = "dp0:pp0:pcp0:tp0:"
TENSORS = {
    "norm.weight": torch.linspace(-1, 1, 8),
    "even.weight": torch.linspace(-1, 1, 128).reshape(64, 2),
    "odd.weight": torch.linspace(-1, 1, 38).reshape(19, 2),  # a vocabulary that vLLM pads
    "packed.weight": torch.ones(64, 4),
}


class Digests(ControlClient):
    """A server that gives these digests."""

    def __init__(self, digests: dict[str, str]) -> None:
        self.url = "http://server"
        self.digests = digests

    async def checksums(self) -> dict[str, str]:
        return {PREFIX + name: digest for name, digest in self.digests.items()}


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def info(world_size: int = 1) -> ServerInfo:
    return ServerInfo(
        "http://server", "b", "0.32", "m", "", "generate", "float32", 9, 9, True, "raw", 0, "", False, world_size
    )


def served(dtype: torch.dtype) -> dict[str, str]:
    return {
        "norm.weight": digest(TENSORS["norm.weight"].to(dtype)),
        "even.weight": digest(TENSORS["even.weight"].to(dtype)),
        "odd.weight": "of the padded tensor",
        "packed.weight": NOTHING,
        "qkv_proj.weight": "of what the trainer has under other names",
    }


def checked(digests: dict[str, str], dtype: str = "float32", world_size: int = 1) -> int:
    with ThreadPoolExecutor(1) as executor:
        checksums = ChecksumTest(dtype, executor, always=True)
        asyncio.run(checksums.check(Digests(digests), info(world_size), TENSORS, 4))
        return checksums.compared


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_the_server_keeps_as_it_was_is_compared_in_its_dtype(dtype: str) -> None:
    assert checked(served(getattr(torch, dtype)), dtype) == 2


def test_a_tensor_that_differs_is_named_with_server_and_version() -> None:
    digests = served(torch.float32) | {"even.weight": digest(TENSORS["even.weight"] + 1e-7)}
    with pytest.raises(WeightsNotArrivedError, match=r"http://server .* version 4 .* even\.weight differs"):
        checked(digests)


def test_servers_that_keep_different_tensors_do_not_look_like_changed_weights() -> None:
    digests = served(torch.float32)
    with ThreadPoolExecutor(1) as executor:
        checksums = ChecksumTest("float32", executor, always=False)

        def check(digests: dict[str, str], tensors: dict[str, torch.Tensor], version: int) -> bool:
            asyncio.run(checksums.check(Digests(digests), info(), tensors, version))
            return checksums.due

        assert check(digests, TENSORS, 0)
        assert check(digests | {"even.weight": NOTHING}, TENSORS, 0)
        assert check(digests, TENSORS, 1)
        norm = TENSORS["norm.weight"] + 1
        assert not check(digests | {"norm.weight": digest(norm)}, TENSORS | {"norm.weight": norm}, 2)


def test_shards_are_not_compared() -> None:
    assert checked({"norm.weight": "a shard's"}, world_size=2) == 0
