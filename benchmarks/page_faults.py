"""Page faults of a denoising step, of a network of random weights.

    .venv/bin/python -m benchmarks.page_faults [--format q4_k_m bf16] [--threads 1]

Two layers of the 26B-A4B's sizes with a vocabulary of 32,768 tokens, or what the options name. The
memory that a step takes from the system costs a fault for each of its pages, 4096 bytes; what the
process has kept costs none. Faults do not depend on other work on the machine. Of each step also
the process's own seconds (user and system). Prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics

import torch

from sfumato.bench.subject import PRESETS, Subject, random_subject
from sfumato.diffusion.sampler import Never
from sfumato.diffusion.sampler_config import SamplerConfig
from sfumato.engine import Engine, EngineConfig, Request
from sfumato.model.quantization import TARGETS

PROMPT = 300


def steps_of(subject: Subject, steps: int) -> list[tuple[int, float]]:
    """Page faults and seconds of each step of a canvas but the first, which encodes the prompt."""
    config = subject.model.config
    engine = Engine(subject.model, EngineConfig(slots=1, context=1024))
    ids = [13 * i % (config.vocab_size - 8) + 5 for i in range(PROMPT)]
    sampler = SamplerConfig(max_steps=steps + 1, stopping=Never(), ignore_eos=True)
    engine.submit(Request(ids=ids, max_tokens=config.canvas_length, sampler=sampler, seed=1))
    engine.step()
    measured = []
    for _ in range(steps):
        before = resource.getrusage(resource.RUSAGE_SELF)
        engine.step()
        after = resource.getrusage(resource.RUSAGE_SELF)
        seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        measured.append((after.ru_minflt - before.ru_minflt, seconds))
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--preset", choices=PRESETS, default="26b-a4b", help="sizes (%(default)s)")
    parser.add_argument("--layers", type=int, default=2, help="(%(default)s)")
    parser.add_argument("--vocab", type=int, default=32768, help="tokens (%(default)s)")
    parser.add_argument("--format", nargs="+", choices=TARGETS, default=["q4_k_m", "bf16"])
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (1)")
    parser.add_argument("--steps", type=int, default=6, help="of a canvas (%(default)s)")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    rows = []
    print("format | faults, median | faults, most | CPU seconds, median")
    for format in given.format:
        subject = random_subject(given.preset, format, given.layers, "cpu", vocab=given.vocab)
        faults, seconds = zip(*steps_of(subject, given.steps), strict=True)
        row = statistics.median(faults), max(faults), round(statistics.median(seconds), 3)
        print(" | ".join(map(str, (format, *row))))
        rows.append({"format": format, "faults": faults, "cpu_seconds": seconds})
    print(json.dumps({**vars(given), "rows": rows}))


if __name__ == "__main__":
    main()
