"""One real server for all tests of a session that are content with the embedded prover."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from vllm_servers import EMBEDDED, Server, started


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The embedded prover, its output layer tied to its embedding, in float32."""
    with started(EMBEDDED, tmp_path_factory.mktemp("server"), "--block-size", "32") as running:
        yield running
