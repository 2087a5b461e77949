"""Tests that need a GPU: `make gpu`, or `pytest -m gpu tests/gpu`. Without one they are skipped.

PVG_GPU_TESTS_DEVICE names another device. With "cpu", all but what only CUDA has is tested there, which shows that the
tests themselves run.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
NAME = os.environ.get("PVG_GPU_TESTS_DEVICE", "cuda:0")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not item.path.is_relative_to(HERE):
            continue
        item.add_marker("gpu")
        if not NAME.startswith("cpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a GPU: `make gpu`"))


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device(NAME)


@pytest.fixture
def cuda(device: torch.device) -> torch.device:
    if device.type != "cuda":
        pytest.skip("needs a GPU: `make gpu`")
    return device
