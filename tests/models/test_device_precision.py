"""Precision by device: TF32 only where nothing is exact."""

from __future__ import annotations

import pytest
import torch

from pvg.models.compute import product_tolerance

GPU = torch.device("cuda", 1)


class OnGpu:
    """The facts of a weight that `product_tolerance` reads."""

    device = GPU

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype


@pytest.mark.parametrize(
    ("precision", "dtype", "layers", "expected"),
    [
        ("highest", torch.float32, 16, 1e-4),
        ("high", torch.float32, 4, 0.05 / 8),
        ("high", torch.float32, 16, 0.1 / 8),
        ("highest", torch.bfloat16, 16, 0.1),
    ],
)
def test_the_checks_of_fast_code_allow_the_rounding_of_their_products(
    precision: str, dtype: torch.dtype, layers: int, expected: float
) -> None:
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(precision)
        assert product_tolerance(OnGpu(dtype), 1e-4, 0.05, layers) == expected  # type: ignore[arg-type]
        assert product_tolerance(torch.ones(1), 1e-4, 0.05, layers) == 1e-4  # a CPU has no TF32
    finally:
        torch.set_float32_matmul_precision(before)
