"""What the vocabulary head saves, and how far off its soft embedding is, when it may leave out
chunks that hold little of the mass (`skip`), or all but the most probable tokens (`top-k`).

A random embedding, and a canvas whose distributions go from flat to converged: each hidden state
is so much of one token's row that this token holds a given probability. The rest is spread over the
whole vocabulary, or is on a few rivals, whose rows are in the hidden state too. The saved share is
of the second product's arithmetic, counted; times are medians of the whole pass, exact and
approximate in turn. The error is the soft embedding's (L2, relative), on the same scale the bound:
left out · sqrt(hidden) · longest row, twice that where what is kept is renormalised. Left out is
what a skip allows, and what top-k did; the entropy's error is in nats. Where positions differ, the
worst one counts. A skip is tried at every position. Prints a table and one JSON line:

    python benchmarks/head_approximations.py [--vocab 262144] [--hidden 2816] [--dtype float32]
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from sfumato.model.head import HeadStats, Skip, VocabularyHead

CAP = 30.0
TEMPERATURE = 0.5
CONVERGED = 30.0  # the winner's score over the temperature, where rivals hold the rest
FLAT = 1e-5  # of a distribution spread over the vocabulary, the most probable token's probability
CASES = {  # where the rest of the mass is: on how many rows (0: all), and the winner's own
    "spread": (0, (FLAT, 0.5, 0.9, 0.99, 0.999)),
    "rivals": (7, (0.5, 0.9, 0.99, 0.999)),
}
SHARES = (1e-3, 1e-2)
COUNTS = (16, 64, 256)
GROUP = 32  # positions whose whole distribution is held
COLUMNS = (
    *("rest", "top p", "how", "left out", "saved", "exact s", "approx s"),
    *("error", "bound", "entropy"),
)


def hidden_of_mass(
    head: VocabularyHead, top: float, positions: int, rivals: int
) -> tuple[Tensor, Tensor]:
    """Hidden states [positions, hidden] whose most probable tokens int64 [positions] hold about
    `top` each: of least norm among those that give winner and rivals their scores."""
    random = torch.Generator().manual_seed(1)
    ids = torch.randperm(head.vocab_size, generator=random)[: positions * (1 + rivals)]
    rows = head.embedding[ids].float().unflatten(0, (positions, 1 + rivals))
    odds = math.log(top / (1 - top))
    best = CONVERGED if rivals else odds + math.log(head.vocab_size)
    others = [best - odds - math.log(rivals) for _ in range(rivals)]
    raw = CAP * (torch.tensor([best, *others]) * TEMPERATURE / CAP).atanh()
    solution = torch.linalg.solve(rows @ rows.mT, raw.expand(positions, -1)[..., None])
    return (rows.mT @ solution)[..., 0].to(head.embedding.dtype), ids[:: 1 + rivals]


def run(head: VocabularyHead, hidden: Tensor, **how: Any) -> HeadStats:
    uniform = torch.linspace(0, 0.999, len(hidden), dtype=torch.float64)
    return head(hidden, torch.full((len(hidden),), TEMPERATURE), uniform, **how)


def timed(head: VocabularyHead, hidden: Tensor, **how: Any) -> tuple[float, HeadStats]:
    begun = time.perf_counter()
    stats = run(head, hidden, **how)
    return time.perf_counter() - begun, stats


def flops(head: VocabularyHead, hidden: Tensor, **how: Any) -> int:
    with FlopCounterMode(display=False) as counter:
        run(head, hidden, **how)
    return counter.get_total_flops()


def outside(head: VocabularyHead, hidden: Tensor) -> Tensor:
    """The mass that the k most probable tokens leave, of the worst position, by k: [max k]."""
    most = min(max(COUNTS), head.vocab_size)
    distributions = (head.logits(part) / TEMPERATURE for part in hidden.split(GROUP))
    ranked = torch.cat([row.double().softmax(dim=1).topk(most)[0] for row in distributions])
    return (1 - ranked.cumsum(dim=1)).amax(dim=0).clamp(min=0)


def approximations(
    head: VocabularyHead, hidden: Tensor
) -> Iterator[tuple[str, dict[str, Any], float, float]]:
    """Of each approximation: name, setting of the head, the mass that it leaves out, and the
    bound of that mass."""
    for share in SHARES:
        yield (
            f"skip {share:.0e}",
            {
                "skip": Skip(
                    torch.full((len(hidden),), share), hidden.new_ones(len(hidden), dtype=bool)
                )
            },
            share,
            1,
        )
    left = outside(head, hidden)
    for k in COUNTS:
        if k < head.vocab_size:
            yield f"top-k {k}", {"soft_top_k": torch.full((len(hidden),), k)}, float(left[k - 1]), 2


def measure(
    head: VocabularyHead, hidden: Tensor, total_flops: int, how: dict[str, Any], repeats: int
) -> dict[str, Any]:
    """whole: the floating-point operations of the exact pass."""
    saved = (total_flops - flops(head, hidden, **how)) / (2 * len(hidden) * head.embedding.numel())
    exact_s, approximate_s = [], []
    for _ in range(repeats):
        seconds, exact = timed(head, hidden)
        exact_s.append(seconds)
        seconds, ours = timed(head, hidden, **how)
        approximate_s.append(seconds)
    size = exact.soft.float().norm(dim=1)
    return {
        "top_prob": float(exact.top_probs[:, 0].mean()),
        "saved": saved,
        "exact_s": statistics.median(exact_s),
        "approximate_s": statistics.median(approximate_s),
        "error": float(((ours.soft.float() - exact.soft.float()).norm(dim=1) / size).max()),
        "size": float(size.min()),
        "entropy_error": float((ours.entropy - exact.entropy).abs().max()),
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
    longest = float(head.embedding.norm(dim=1).max()) * args.hidden**0.5
    print("".join(f"{name:>11}" for name in COLUMNS))
    lines = []
    cases = [(rest, rivals, top) for rest, (rivals, tops) in CASES.items() for top in tops]
    for rest, rivals, top in cases:
        hidden, _ = hidden_of_mass(head, top, args.positions, rivals)
        total_flops = flops(head, hidden)
        for name, how, left, factor in approximations(head, hidden):
            row = measure(head, hidden, total_flops, how, args.repeats)
            bound = factor * left * longest / row.pop("size")
            lines.append({"rest": rest, "how": name, "left_out": left, "bound": bound, **row})
            print(
                f"{rest:>11}{row['top_prob']:>11.5f}{name:>11}{left:>11.1e}{row['saved']:>11.1%}"
                f"{row['exact_s']:>11.3f}{row['approximate_s']:>11.3f}"
                f"{row['error']:>11.1e}{bound:>11.1e}{row['entropy_error']:>11.1e}",
                flush=True,
            )
    print(json.dumps({**vars(args), "temperature": TEMPERATURE, "figures": lines}))


if __name__ == "__main__":
    main()
