"""How far a narrow cache moves what a model computes: by position, and on trajectories.

    .venv/bin/python -m benchmarks.cache_error [--prompts 24] [--length 192] [--steps 8]
    .venv/bin/python -m benchmarks.cache_error --random tiny [--layers 6]

The model computes in float32; each cache is held against one in float32, on the same prompts: those
of held-out tasks, one after another, or random tokens with `--random`.  By position: the relative
L2 error of the stored keys and values of all layers, by quarters of the prompt, and of the hidden
states of a canvas of random tokens behind it, by quarters of the canvas; the share of positions
whose argmax stays, also of the clear ones: the two most probable tokens are further apart than the
first one's probability moves on average.  On trajectories: canvases of fixed steps with the same
noise, behind each prompt by itself; the share of positions whose argmax is that of the float32
cache at a step, and the share of canvases that end alike.  Prints tables and one JSON line.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import sfumato
from sfumato.bench.subject import random_subject
from sfumato.diffusion.canvas import Canvas, Draft
from sfumato.diffusion.noise import Noise
from sfumato.diffusion.sampler_config import REFERENCE, fixed_steps
from sfumato.diffusion.step import Denoiser
from sfumato.model.cache import Slot
from sfumato.model.network import Network
from sfumato.model.placement import CACHE_TYPES
from sfumato.ops.narrow_cache import widened
from sfumato.train.embedded_data import evaluation_sets

QUARTERS = 4


def subject(preset: str | None, layers: int | None) -> tuple[Network, list[list[int]]]:
    """A network in float32, and prompts: of tasks, or of random tokens."""
    if preset is not None:
        network = random_subject(preset, "f32", layers, "cpu", "float32").network
        random = torch.Generator().manual_seed(0)
        most = network.config.vocab_size
        prompts = torch.randint(most, (200, 48), generator=random).tolist()
        return network, prompts
    model = sfumato.load(device="cpu", dtype="float32")
    sets = evaluation_sets(0, 50).values()
    tasks = [task for group in zip(*sets, strict=False) for task in group]
    return model.network, [model.prompt_ids(messages=task.messages) for task in tasks]


def with_cache(network: Network, kind: torch.dtype) -> Network:
    """The same weights with a cache of this kind."""
    other = copy.copy(network)
    other.cache_dtype = kind
    return other


def by_quarter(wrong: Tensor, right: Tensor) -> list[float]:
    """Relative L2 errors: sums of squares [n] by position."""
    parts = zip(wrong.tensor_split(QUARTERS), right.tensor_split(QUARTERS), strict=True)
    return [float((a.sum() / b.sum()).sqrt()) for a, b in parts]


def stored_squares(slot: Slot, other: Slot) -> tuple[Tensor, Tensor]:
    """Σ of squared errors and of squares of what two slots hold, by position of the prompt."""
    wrong, right = torch.zeros(2, slot.length, dtype=torch.float64)
    for layer in range(len(slot.pool.layers)):
        positions = slot.read(layer)[2]
        for one, exact in zip(slot.read(layer)[:2], other.read(layer)[:2], strict=True):
            (wide,) = widened([one], torch.float32)
            squares = (wide.double() - exact).square().sum((0, 2)), exact.double().square()
            wrong.index_add_(0, positions, squares[0])
            right.index_add_(0, positions, squares[1].sum((0, 2)))
    return wrong, right


def positions(network: Network, exact: Network, prompts: Sequence[list[int]]) -> dict[str, Any]:
    """By position of prompts of one length, and of a canvas behind each."""
    width, vocab = network.config.canvas_length, network.config.vocab_size
    random = torch.Generator().manual_seed(1)
    sums = torch.zeros(2, len(prompts[0]), dtype=torch.float64)
    canvas_sums = torch.zeros(2, width, dtype=torch.float64)
    top: list[Tensor] = []
    for ids in prompts:
        slots = [net.new_slot(len(ids)) for net in (network, exact)]
        canvas = torch.randint(vocab, (width,), generator=random)
        hidden = []
        for net, slot in zip((network, exact), slots, strict=True):
            net.encode([torch.tensor(ids)], [slot])
            hidden.append(net.denoise([canvas], [slot]))
        sums += torch.stack(stored_squares(*slots))
        wrong, right = (hidden[0] - hidden[1]).double(), hidden[1].double()
        canvas_sums += torch.stack((wrong.square().sum(1), right.square().sum(1)))
        ones, uniform = torch.ones(width), torch.zeros(width, dtype=torch.float64)
        got, expected = (net.head(h, ones, uniform) for net, h in zip((network, exact), hidden,
                                                                      strict=True))  # fmt: skip
        seen = expected.top_probs[:, 0], expected.top_probs[:, 1], got.top_probs[:, 0]
        top.append(torch.stack((*seen, (got.argmax == expected.argmax).float())))
    first, second, narrow, agree = torch.cat(top, dim=1)
    clear = first - second > (first - narrow).abs().mean()
    return {
        "stored": by_quarter(*sums),
        "canvas": by_quarter(*canvas_sums),
        "worst": float((canvas_sums[0] / canvas_sums[1]).sqrt().max()),
        "argmax": float(agree.mean()),
        "argmax_clear": float(agree[clear].mean()),
        "clear": int(clear.sum()),
        "positions": len(agree),
    }


def trajectory(network: Network, ids: list[int], seed: int, steps: int) -> list[Draft]:
    """The drafts of a canvas of so many steps."""
    slot = network.new_slot(len(ids))
    network.encode([torch.tensor(ids)], [slot])
    config = fixed_steps(steps).over(REFERENCE)
    length = network.config.canvas_length
    config = type(config)(**vars(config) | {"canvas_length": length})
    canvas = Canvas(config, Noise(seed, 0), network.config.vocab_size, network.device)
    denoiser, drafts = Denoiser(network, 1), []
    while not canvas.done:
        drafts += denoiser.step([canvas], [slot])
    return [draft for draft in drafts if isinstance(draft, Draft)]


def measure(
    network: Network, prompts: list[list[int]], count: int, length: int, steps: int
) -> dict[str, Any]:
    exact = with_cache(network, torch.float32)
    joined = [token for prompt in prompts for token in prompt]
    pieces = [joined[at : at + length] for at in range(0, len(joined) - length, length)][:count]
    paths = [trajectory(exact, ids, seed, steps) for seed, ids in enumerate(prompts[:count])]
    figures = {}
    for name, kind in CACHE_TYPES.items():
        narrow = with_cache(network, kind)
        figures[name] = positions(narrow, exact, pieces)
        same, alike = torch.zeros(steps, dtype=torch.float64), 0
        for seed, (ids, path) in enumerate(zip(prompts, paths, strict=False)):
            own = trajectory(narrow, ids, seed, steps)
            equal = [a.token_ids == b.token_ids for a, b in zip(own, path, strict=True)]
            same += torch.stack(equal).double().mean(1)
            alike += bool(equal[-1].all())
        figures[name] |= {"steps": (same / len(paths)).tolist(), "alike": alike / len(paths)}
    return {"pieces": len(pieces), "paths": len(paths), "caches": figures}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--length", type=int, default=192)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--random", metavar="PRESET")
    parser.add_argument("--layers", type=int)
    given = parser.parse_args()
    network, prompts = subject(given.random, given.layers)
    with torch.no_grad():
        figures = measure(network, prompts, given.prompts, given.length, given.steps)
    for name, row in figures["caches"].items():
        for key in ("stored", "canvas"):
            print(f"{name:5} {key:7}", *(f"{error:9.1e}" for error in row[key]))
        argmax = f"{row['argmax']:.2%} of {row['positions']}"
        argmax += f", {row['argmax_clear']:.2%} of {row['clear']} clear ones"
        print(f"{name:5} worst   {row['worst']:9.1e}   argmax stays {argmax}")
        print(f"{name:5} steps  ", *(f"{share:7.1%}" for share in row["steps"]),
              f"  ends alike {row['alike']:.0%}")  # fmt: skip
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
