"""Products in float32: by oneDNN where it is faster, and by torch's own library."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from pvg.models import compute

pytestmark = pytest.mark.skipif(not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="needs a torch with oneDNN")
ROWS, INNER, OUTER = 700, 192, 320  # more than compute.LEAST_BY_ONEDNN multiplications


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.fixture(params=[True, False], ids=["oneDNN", "MKL"])
def chosen(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(compute, "_onednn", lambda: request.param)
    return bool(request.param)


@pytest.mark.parametrize("rows", [1, 3, ROWS])
@pytest.mark.parametrize("turned", [False, True], ids=["rows", "columns"])
def test_products_are_those_of_float64(chosen: bool, rows: int, turned: bool) -> None:
    def made(*shape: int) -> Tensor:
        return random(*reversed(shape)).t() if turned else random(*shape)

    x, weight, bias, rest = made(rows, INNER), made(OUTER, INNER), random(OUTER), random(rows, OUTER)
    expected = x.double() @ weight.double().t()
    for found, exact in (
        (compute.projected(x, weight), expected),
        (compute.projected_alike(x, weight), expected),
        (compute.projected(x, weight, bias), expected + bias.double()),
        (compute.product(x, weight.t()), expected),
        (compute.added(rest.clone(), x, weight), expected + rest.double()),
    ):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-4)


@pytest.mark.skipif(not compute._onednn(), reason="needs a processor by AMD with AVX-512")
def test_a_row_of_a_head_does_not_depend_on_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute, "LEAST_BY_ONEDNN", 0)
    x, weight = random(ROWS, INNER), random(OUTER, INNER)
    whole = compute.projected_alike(x, weight)
    for count in (1, 2, 3, 8, 65, 699):
        assert torch.equal(compute.projected_alike(x[-count:], weight), whole[-count:])


@pytest.mark.parametrize(
    ("text", "faster"),
    [
        ("vendor_id\t: AuthenticAMD\nflags\t\t: sse avx2 avx512f\n", True),
        ("vendor_id\t: AuthenticAMD\nflags\t\t: sse avx2\n", False),
        ("vendor_id\t: GenuineIntel\nflags\t\t: sse avx2 avx512f\n", False),
        ("", False),
    ],
)
def test_onednn_is_for_processors_by_amd_with_avx512(
    text: str, faster: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    monkeypatch.setattr(compute, "CPUINFO", tmp_path / "cpuinfo")
    assert compute._onednn.__wrapped__() is (faster and torch.backends.mkldnn.is_available())
