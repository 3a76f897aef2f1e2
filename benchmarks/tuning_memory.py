"""The memory and the processor's seconds of one tuning step: predicted and counted.

    .venv/bin/python -m benchmarks.tuning_memory --preset 180m --bases stored packed dequantized
    .venv/bin/python -m benchmarks.tuning_memory random.gguf --context 1024 --recompute

A step is the objective of `sfumato tune` on random tokens, with a first pass, its gradients and
AdamW's step. Bases take turns: `stored` has the blocks as the file has them, views of it where
there is one; `packed` is what a CPU's kernels read; `dequantized` are floats. Of the process,
anonymous memory is told from pages of mapped files, which the system may drop. `--count` counts
the bytes of tensors, which makes steps slow.
"""

from __future__ import annotations

import argparse
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from tests.support.live_bytes import LiveBytes

from sfumato.bench.subject import PRESETS, random_checkpoint
from sfumato.model.adapters import Adapted
from sfumato.model.families import open_checkpoint
from sfumato.model.loading import config_of, expected_shapes, load_network, place, skeleton
from sfumato.model.transformer import Transformer
from sfumato.train import objective
from sfumato.train.canvas_rows import CanvasBatch
from sfumato.train.memory import step_memory
from sfumato.train.tune import NUMBER, Tuning, new_adapter
from sfumato.weights.checkpoint import Checkpoint
from sfumato.weights.formats import Stored, tensors_of

CPU = torch.device("cpu")
BASES = ("stored", "packed", "dequantized")
EVERY = 0.05  # seconds between two looks at the process's memory


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", nargs="?", type=Path, help="a checkpoint; default: a preset")
    parser.add_argument("--preset", choices=PRESETS, default="180m", help="sizes (%(default)s)")
    parser.add_argument("--format", default="q4_k_m", help="of a preset (%(default)s)")
    parser.add_argument("--layers", type=int, help="of a preset; default: all")
    parser.add_argument("--vocab", type=int, help="tokens of a preset; default: all")
    parser.add_argument("--bases", nargs="+", choices=BASES, default=["stored"], help="(stored)")
    parser.add_argument("--context", type=int, default=128, help="tokens of the row (128)")
    parser.add_argument("--rank", type=int, default=16, help="(16)")
    parser.add_argument("--steps", type=int, default=1, help="of each base (1)")
    parser.add_argument("--recompute", action="store_true", help="compute layers again")
    parser.add_argument("--count", action="store_true", help="count the bytes of tensors")
    args = parser.parse_args()
    if args.file is None:
        checkpoint = random_checkpoint(args.preset, args.format, args.layers, 0, args.vocab)
    else:
        checkpoint = open_checkpoint(args.file)
    runs = {base: Run(checkpoint, base, args) for base in args.bases}
    for _ in range(args.steps):
        for base, run in runs.items():
            print(f"{base}: {run.step()}", flush=True)


class Run:
    """The steps of one base."""

    def __init__(self, checkpoint: Checkpoint, base: str, args: argparse.Namespace) -> None:
        self.network, self.args, self.config = loaded(checkpoint, base), args, config_of(checkpoint)
        self.network.recomputes_layers = args.recompute
        tuning, random = Tuning(rank=args.rank), torch.Generator().manual_seed(0)
        adapter = new_adapter(self.config, tuning, CPU, random)
        self.learned = [half for change in adapter.values() for half in (change.down, change.up)]
        self.network.attach(NUMBER, adapter)
        self.optimizer = torch.optim.AdamW(self.learned)
        weights = sum(info.nbytes for info in checkpoint.tensors.values())
        size = sum(map(torch.numel, self.learned))
        memory = step_memory(
            *(self.config, weights, size, args.context, 1, torch.float32, args.recompute)
        )
        parts = ", ".join(f"{k} {v / 1e6:,.0f}" for k, v in memory._asdict().items())
        print(f"{base}: predicted {memory.total / 1e6:,.0f} MB: {parts}", flush=True)

    def step(self) -> str:
        """Takes a step, and says what it took."""
        batch = random_batch(self.config.vocab_size, self.args.context, self.config.canvas_length)
        values = [v for m in self.network.modules() for v in (*vars(m).values(), *m.parameters())]
        held = [t for v in values if isinstance(v, Stored | torch.Tensor) for t in tensors_of(v)]
        count = LiveBytes(*held) if self.args.count else nullcontext()
        began, spent = time.perf_counter(), time.process_time()
        with count as live, watched_memory() as most:
            random, adapted = torch.Generator().manual_seed(0), (Adapted(NUMBER),)
            losses = objective.loss(
                self.network, batch, random, adapted=adapted, dtype=torch.float32
            )
            results = torch.autograd.grad(sum(losses.values()), self.learned)
            for each, gradient in zip(self.learned, results, strict=True):
                each.grad = gradient
            self.optimizer.step()
        counted = f", tensors made {live.most / 1e6:,.0f} MB" if live is not None else ""
        return (
            f"{time.process_time() - spent:.1f} CPU s, {time.perf_counter() - began:.1f} s, most "
            f"anonymous {most['RssAnon'] / 1e6:,.0f} MB, of files {most['RssFile'] / 1e6:,.0f} MB"
            f"{counted}, canvas {losses['canvas'].item():.3f} nats"
        )


def loaded(checkpoint: Checkpoint, base: str) -> Transformer:
    """The network with one form of its weights."""
    if base == "packed":
        return load_network(checkpoint, CPU, torch.float32).transformer
    network = skeleton(config_of(checkpoint))
    for name in expected_shapes(network.config):
        value, (path, _, leaf) = checkpoint.read(name), name.rpartition(".")
        if base == "dequantized" or not isinstance(value, Stored):
            value = value.to(torch.float32)
        place(network.get_submodule(path), leaf, value)
    return network


def random_batch(vocab: int, context: int, canvas: int) -> CanvasBatch:
    """A row of random tokens whose first pass always comes."""
    objective.CONDITIONED = 1.0
    random = torch.Generator().manual_seed(0)
    text = torch.randint(vocab, (1, context), generator=random)
    target = torch.randint(vocab, (1, canvas), generator=random)
    learned, filled = (torch.ones(1, n, dtype=torch.bool) for n in (context - 1, canvas))
    others = torch.zeros(1, dtype=torch.int64), torch.zeros(0, 3, dtype=torch.int64)
    length = torch.tensor([context])
    return CanvasBatch(*(text, length, learned, ~learned, target, target, filled, filled, *others))


@contextmanager
def watched_memory() -> Iterator[dict[str, int]]:
    """The most of both kinds of this process's memory, in bytes, while the body runs."""
    most, ended = {"RssAnon": 0, "RssFile": 0}, threading.Event()

    def watch() -> None:
        while not ended.wait(EVERY):
            status = Path("/proc/self/status").read_text()
            for kind in most:
                now = re.search(rf"{kind}:\s+(\d+)", status)
                most[kind] = max(most[kind], 1024 * int(now[1]) if now else 0)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield most
    finally:
        ended.set()
        thread.join()


if __name__ == "__main__":
    main()
