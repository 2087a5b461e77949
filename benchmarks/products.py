"""Float32 matrix products as torch does them (MKL) against oneDNN, the two sides of pvg/models/blocked_layers.py.

    python benchmarks/products.py [--threads 1] [--out FILE.json]

Blocks of products.ROWS tokens through linear layers of the embedded prover's sizes and larger ones: forward, gradient
of the input, gradient of the weights, with the copies that the buffers cost. Rounds take turns; prints Gflop/s (median
of the rounds) and the median of the rounds' ratios with the lowest and the highest.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import orjson
import torch
from torch import Tensor

from pvg.models import blocked_layers as products
from pvg.telemetry.processor import processor

WIDTHS = [(128, 128), (128, 384), (192, 128), (512, 512), (512, 1536)]  # (into, out of) a linear layer
ROUNDS, CALLS = 15, 40


def seconds(by_onednn: bool, x_BD: Tensor, weight_FD: Tensor) -> float:
    """Of CALLS times the three products of a linear layer, forward and backward."""
    products.BY_ONEDNN = by_onednn
    out_BF, grad_BD = x_BD.new_empty(len(x_BD), len(weight_FD)), torch.empty_like(x_BD)
    grad_FD = torch.zeros_like(weight_FD)
    began = time.perf_counter()
    for _ in range(CALLS):
        products.product(x_BD, weight_FD, None, out_BF)
        products.input_gradient(out_BF, weight_FD, grad_BD)
        products.add_weight_gradient(grad_FD, out_BF, x_BD)
    return time.perf_counter() - began


def measured(into: int, out_of: int) -> dict[str, float]:
    x_BD, weight_FD = torch.randn(products.ROWS, into), torch.randn(out_of, into)
    seconds(True, x_BD, weight_FD), seconds(False, x_BD, weight_FD)  # kernels are compiled, caches warm
    pairs = [(seconds(False, x_BD, weight_FD), seconds(True, x_BD, weight_FD)) for _ in range(ROUNDS)]
    flop = 3 * 2 * products.ROWS * into * out_of * CALLS
    ratios = [mkl / onednn for mkl, onednn in pairs]
    return {
        "into": into,
        "out_of": out_of,
        "mkl_gflop_per_s": flop / statistics.median(mkl for mkl, _ in pairs) / 1e9,
        "onednn_gflop_per_s": flop / statistics.median(onednn for _, onednn in pairs) / 1e9,
        "ratio": statistics.median(ratios),
        "ratio_lowest": min(ratios),
        "ratio_highest": max(ratios),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    rows = [measured(*widths) for widths in WIDTHS]
    for row in rows:
        print(
            f"{row['into']:>4} -> {row['out_of']:<4} MKL {row['mkl_gflop_per_s']:6.1f}  "
            f"oneDNN {row['onednn_gflop_per_s']:6.1f} Gflop/s  "
            f"{row['ratio']:.2f}x ({row['ratio_lowest']:.2f}-{row['ratio_highest']:.2f})"
        )
    if asked.out:
        report = {"processor": processor(), "torch": torch.__version__, "threads": asked.threads, "rows": rows}
        asked.out.write_bytes(orjson.dumps(report, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))


if __name__ == "__main__":
    main()
