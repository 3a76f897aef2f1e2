"""The vocabulary part of a step: Sfumato's head against `transformers`' way, and its two products.

    .venv/bin/python benchmarks/vocabulary_head.py --threads 2 [--vocabulary 262144] [--rounds 5]

256 positions, hidden size 2816. "transformers" does what its step does with the hidden states, with
its own sampler's calls: logits, softcap in float32, temperature, argmax, softmax and multinomial,
entropy, and softmax @ embedding for the next step's self-conditioning. "two products" are the
bfloat16 matrix products that no exact way avoids. Each round runs every contender once, and begins
with the next one; figures are medians. Prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import deque
from collections.abc import Callable

import torch
import torch.nn.functional as F

from sfumato import ops
from sfumato.model.head import CHUNK, VocabularyHead
from sfumato.weights.formats import FORMATS, quantize

POSITIONS, HIDDEN, CAP, TEMPERATURE = 256, 2816, 30.0, 0.7


def theirs(hidden: torch.Tensor, embedding: torch.Tensor) -> None:
    logits = torch.tanh(F.linear(hidden, embedding).float() / CAP) * CAP / TEMPERATURE
    logits.argmax(dim=-1)
    torch.multinomial(logits.softmax(dim=-1), 1)
    for _ in ("sampler", "stopping"):
        torch.distributions.Categorical(logits=logits).entropy()
    weights = logits.to(hidden.dtype).softmax(dim=-1, dtype=torch.float32).to(hidden.dtype)
    torch.matmul(weights, embedding) * HIDDEN**0.5


def products(hidden: torch.Tensor, embedding: torch.Tensor) -> None:
    for start in range(0, len(embedding), CHUNK):
        rows = embedding[start : start + CHUNK]
        F.linear(hidden, rows) @ rows


def heads(embedding: torch.Tensor) -> dict[str, VocabularyHead]:
    variants = {"sfumato, BF16": VocabularyHead(embedding, CAP)}
    for name in ("q8_0", "q6_k"):
        blocks = quantize(embedding.float(), FORMATS[name.upper()])
        output = [
            ops.pack(blocks[at : at + CHUNK], "int8") for at in range(0, len(embedding), CHUNK)
        ]
        variants[f"sfumato, {name.upper()}"] = VocabularyHead(blocks, CAP, output=output)
    return variants


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=262144)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    embedding = torch.empty(options.vocabulary, HIDDEN, dtype=torch.bfloat16).normal_(0, 0.02)
    hidden = torch.randn(POSITIONS, HIDDEN).bfloat16() * 8
    temperatures = torch.full((POSITIONS,), TEMPERATURE)
    uniform = torch.rand(POSITIONS, dtype=torch.float64)
    runs: dict[str, Callable[[], object]] = {
        "transformers": lambda: theirs(hidden, embedding),
        "two products": lambda: products(hidden, embedding),
    }
    for name, head in heads(embedding).items():
        given = hidden if "BF16" in name else hidden.float()
        runs[name] = lambda head=head, given=given: head(given, temperatures, uniform)
    times: dict[str, list[float]] = {name: [] for name in runs}
    order = deque(runs)
    for round_ in range(options.rounds + 1):
        for name in order:
            start = time.perf_counter()
            runs[name]()
            if round_:  # the first round warms up
                times[name].append(time.perf_counter() - start)
        order.rotate(-1)
    medians = {name: statistics.median(values) for name, values in times.items()}
    print(f"{POSITIONS} positions, vocabulary {options.vocabulary}, {options.threads} threads")
    print(f"{'':18}{'seconds':>8}{'transformers / it':>19}{'it / two products':>19}")
    for name, median in medians.items():
        ratios = medians["transformers"] / median, median / medians["two products"]
        print(f"{name:18}{median:8.2f}{ratios[0]:18.2f}x{ratios[1]:18.2f}x")
    print(json.dumps({"benchmark": "vocabulary_head", **vars(options), "median_s": medians}))


if __name__ == "__main__":
    main()
