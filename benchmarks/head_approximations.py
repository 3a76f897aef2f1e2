"""What the vocabulary head saves, and how far off its soft embedding is, when it may skip mass.

A random embedding, and a canvas whose laws go from flat to converged: each hidden state is so
much of one token's row that this token holds a given probability. The rest is spread over the
whole vocabulary, or is on a few rivals, whose rows are in the hidden state too. The saved share is
of the second product's arithmetic, counted; times are medians of the whole pass, exact and
skipping in turn. The error is the soft embedding's (L2, relative, the worst position's), the bound
share · sqrt(hidden) · longest row on the same scale. The guess is right. Prints a table and one
JSON line:

    python benchmarks/head_approximations.py [--vocab 262144] [--hidden 2816] [--dtype float32]
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from sfumato.model.head import HeadStats, Skip, VocabularyHead

CAP = 30.0
TEMPERATURE = 0.5
CONVERGED = 30.0  # the winner's score over the temperature, where rivals hold the rest
FLAT = 1e-5  # of a law spread over the vocabulary, the likeliest token's probability
CASES = {  # where the rest of the mass is: on how many rows (0: all), and the winner's own
    "spread": (0, (FLAT, 0.5, 0.9, 0.99, 0.999)),
    "rivals": (7, (0.5, 0.9, 0.99, 0.999)),
}
SHARES = (1e-3, 1e-2)


def law_of(head: VocabularyHead, top: float, positions: int, rivals: int) -> tuple[Tensor, Tensor]:
    """Hidden states [positions, hidden] whose likeliest tokens int64 [positions] hold about `top`
    each: of least norm among those that give winner and rivals their scores."""
    random = torch.Generator().manual_seed(1)
    ids = torch.randperm(head.vocab_size, generator=random)[: positions * (1 + rivals)]
    rows = head.embedding[ids].float().unflatten(0, (positions, 1 + rivals))
    odds = math.log(top / (1 - top))
    best = CONVERGED if rivals else odds + math.log(head.vocab_size)
    others = [best - odds - math.log(rivals) for _ in range(rivals)]
    raw = CAP * (torch.tensor([best, *others]) * TEMPERATURE / CAP).atanh()
    solution = torch.linalg.solve(rows @ rows.mT, raw.expand(positions, -1)[..., None])
    return (rows.mT @ solution)[..., 0].to(head.embedding.dtype), ids[:: 1 + rivals]


def run(head: VocabularyHead, hidden: Tensor, skip: Skip | None = None) -> HeadStats:
    uniform = torch.linspace(0, 0.999, len(hidden), dtype=torch.float64)
    return head(hidden, torch.full((len(hidden),), TEMPERATURE), uniform, skip=skip)


def timed(head: VocabularyHead, hidden: Tensor, skip: Skip | None = None) -> tuple[float, Tensor]:
    begun = time.perf_counter()
    soft = run(head, hidden, skip).soft
    return time.perf_counter() - begun, soft.float()


def flops(head: VocabularyHead, hidden: Tensor, skip: Skip | None = None) -> int:
    with FlopCounterMode(display=False) as counter:
        run(head, hidden, skip)
    return counter.get_total_flops()


def measure(
    head: VocabularyHead, hidden: Tensor, guess: Tensor, share: float, repeats: int
) -> dict[str, Any]:
    skip = Skip(torch.full((len(hidden),), share), guess)
    second = 2 * len(hidden) * head.embedding.numel()
    saved = (flops(head, hidden) - flops(head, hidden, skip)) / second
    exact_s, skipping_s = [], []
    for _ in range(repeats):
        seconds, exact = timed(head, hidden)
        exact_s.append(seconds)
        seconds, ours = timed(head, hidden, skip)
        skipping_s.append(seconds)
    longest = float(head.embedding.norm(dim=1).max()) * hidden.shape[1] ** 0.5
    size = exact.norm(dim=1)
    return {
        "share": share,
        "top_prob": float(run(head, hidden).top_probs[:, 0].mean()),
        "saved": saved,
        "exact_s": statistics.median(exact_s),
        "skipping_s": statistics.median(skipping_s),
        "error": float(((ours - exact).norm(dim=1) / size).max()),
        "bound": float((share * longest / size).min()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--vocab", type=int, default=262144)
    parser.add_argument("--hidden", type=int, default=2816)
    parser.add_argument("--positions", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    args = parser.parse_args()

    random = torch.Generator().manual_seed(0)
    embedding = torch.randn(args.vocab, args.hidden, generator=random) * args.hidden**-0.5
    head = VocabularyHead(embedding.to(getattr(torch, args.dtype)), CAP)
    columns = ("rest", "top p", "share", "saved", "exact s", "skipping s", "error", "bound")
    print("".join(f"{name:>11}" for name in columns))
    found = []
    cases = [(rest, rivals, top) for rest, (rivals, tops) in CASES.items() for top in tops]
    for rest, rivals, top in cases:
        hidden, winners = law_of(head, top, args.positions, rivals)
        for share in SHARES:
            row = measure(head, hidden, winners, share, args.repeats)
            found.append({"rest": rest, **row})
            print(
                f"{rest:>11}{row['top_prob']:>11.5f}{share:>11.0e}{row['saved']:>11.1%}"
                f"{row['exact_s']:>11.3f}{row['skipping_s']:>11.3f}"
                f"{row['error']:>11.1e}{row['bound']:>11.1e}",
                flush=True,
            )
    print(json.dumps({**vars(args), "temperature": TEMPERATURE, "figures": found}))


if __name__ == "__main__":
    main()
