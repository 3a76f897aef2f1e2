"""Speed and error of the quantizers, on normal and on heavy-tailed random numbers.

    .venv/bin/python benchmarks/quantizers.py --threads 1

Speed is bytes of float32 input for each second of processor time and thread, the best of several
rounds; the error is the root mean square over the standard deviation.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor

from sfumato.weights import formats
from sfumato.weights.formats import quantize

FORMATS = ("Q8_0", "Q6_K", "Q5_K", "Q5_1", "Q5_0", "Q4_K", "IQ4_NL", "Q4_0")
SHAPE = (1024, 2816)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (1)")
    parser.add_argument(
        "--rounds", type=int, default=5, help="rounds, the best of which counts (5)"
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    normal = torch.randn(SHAPE) * 0.02
    heavy = torch.distributions.StudentT(4.0).sample(SHAPE) * 0.02
    print(f"{'format':8}{'GB/s':>8}{'normal':>10}{'heavy':>10}")
    for name in FORMATS:
        block = formats.FORMATS[name]
        seconds = min(_seconds(lambda b=block: quantize(normal, b)) for _ in range(args.rounds))
        errors = [
            _error(values, quantize(values, block).dequantize()) for values in (normal, heavy)
        ]
        speed = normal.nbytes / seconds / 1e9
        print(f"{name:8}{speed:8.2f}{errors[0]:10.5f}{errors[1]:10.5f}")


def _seconds(run: Callable[[], object]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def _error(values: Tensor, back: Tensor) -> float:
    return float((back - values).square().mean().sqrt() / values.square().mean().sqrt())


if __name__ == "__main__":
    main()
