"""The vocabulary head with and without the second product of settled positions.

    OMP_NUM_THREADS=1 .venv/bin/python benchmarks/head_skip.py [--vocabulary 16384] [--rounds 5]

A random embedding in blocks, hidden size 2816, and one row of 256 positions, of which some are
settled (one token holds the probability) and some are not (the distribution is flat). "unsettled"
are those that the step before showed as such; "in vain" are as many more that were presumed to be
settled. Each round runs the exact pass and the other one in turn; figures are medians of processor
seconds, on one thread, so that other programs of the machine count less. All of a pass but
constants grows with the vocabulary. Prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch

from sfumato import ops
from sfumato.diffusion.scoring import LATE_AT_MOST
from sfumato.model.head import AS_ROUNDED, CHUNK, Skip, VocabularyHead
from sfumato.weights.formats import FORMATS, quantize

POSITIONS, HIDDEN, CAP = 256, 2816, 30.0
CASES = ((0, 0), (0, 4), (16, 0), (16, 4), (64, 0), (64, 4), (128, 4), (256, 0))
"""Positions that are unsettled, and those that are tried in vain."""


def random_head(vocabulary: int, format: str) -> VocabularyHead:
    embedding = torch.empty(vocabulary, HIDDEN).normal_(0, 0.02)
    blocks = quantize(embedding, FORMATS[format.upper()])
    output = [ops.pack(blocks[at : at + CHUNK], "int8") for at in range(0, vocabulary, CHUNK)]
    rounding = ops.rounding(output[0], torch.bfloat16)
    return VocabularyHead(blocks, CAP, output=output, rounding=rounding)


def seconds(head: VocabularyHead, hidden: torch.Tensor, skip: Skip | None) -> float:
    uniform = torch.linspace(0, 0.999, POSITIONS, dtype=torch.float64)
    begun = time.process_time()
    head(hidden, torch.full((POSITIONS,), 0.7), uniform, skip=skip)
    return time.process_time() - begun


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--vocabulary", type=int, default=16384)
    parser.add_argument("--format", default="q6_k")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    head = random_head(options.vocabulary, options.format)
    settled = head.rows(0, POSITIONS, torch.float32) * 30  # of a score that holds everything
    share, figures = torch.full((POSITIONS,), AS_ROUNDED), []
    seconds(head, settled.bfloat16(), Skip(share, share < 0))  # warms up
    print(f"{'unsettled':>10}{'in vain':>10}{'late':>6}{'exact s':>10}{'skip s':>10}{'ratio':>8}")
    for unsettled, vain in CASES:
        hidden = settled.clone()
        hidden[: unsettled + vain] = 0
        expected = torch.arange(POSITIONS) >= unsettled
        late = torch.full((POSITIONS,), unsettled <= POSITIONS * LATE_AT_MOST)
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(options.rounds):
            for skip, own in zip((None, Skip(share, expected, late)), times, strict=True):
                own.append(seconds(head, hidden.bfloat16(), skip))
        exact, ours = (statistics.median(own) for own in times)
        figures.append({"unsettled": unsettled, "in_vain": vain, "exact_s": exact, "skip_s": ours})
        line = f"{unsettled:>10}{vain:>10}{'yes' if late[0] else 'no':>6}{exact:>10.3f}"
        print(f"{line}{ours:>10.3f}{exact / ours:>7.2f}x", flush=True)
    print(json.dumps({"benchmark": "head_skip", **vars(options), "figures": figures}))


if __name__ == "__main__":
    main()
