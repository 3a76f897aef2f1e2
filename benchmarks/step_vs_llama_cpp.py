"""A denoising step against llama.cpp's unmerged branch, on the same file, by turns.

    .venv/bin/python -m benchmarks.step_vs_llama_cpp FILE.gguf --llama PATH/llama-diffusion-cli
    … --isa avx2 --llama PATH/OF/THE/BUILD/FOR/AVX2/llama-diffusion-cli

The branch is commit c3fb972 of the public repository unslothai/llama.cpp, built outside of this
project: for this processor with `GGML_NATIVE=ON`, and for AVX2 with `GGML_NATIVE=OFF` and
`GGML_AVX2`, `GGML_FMA`, `GGML_F16C` and `GGML_BMI2` on.  FILE needs a real vocabulary
(`benchmarks/random_checkpoint.py --tokenizer`).  Both programs take whole steps of one canvas after
a short prompt, with exact self-conditioning over the whole vocabulary, or what the rounding of
activations hides (docs/head.md).  llama.cpp's figure is its own mean of a run's steps; Sfumato's is
the median of a run's steps, so that its first step, which nothing conditions, counts no more than
the others.  Prints a table and one line of JSON: medians over the rounds and their ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

PROMPT = "Tell me about the sea."
CANVAS = 256
_TIME = re.compile(r"time per step:\s*([\d.]+)\s*ms")
LIMIT_S = 1800


def llama_step(program: Path, file: Path, threads: int, steps: int) -> float:
    """Milliseconds of a step: the mean of one run."""
    command = [str(program), "-m", str(file), "-p", PROMPT, "-t", str(threads), "-ngl", "0"]
    command += ["-n", str(CANVAS), "-c", "1024", "--diffusion-blocks", "1"]
    command += ["--diffusion-eb-max-steps", str(steps), "--diffusion-eb-confidence", "0"]
    done = subprocess.run(command, capture_output=True, timeout=LIMIT_S)
    text = (done.stdout + done.stderr).decode(errors="replace")  # random tokens are seldom UTF-8
    times = _TIME.findall(text)
    if not times:
        raise SystemExit(f"{program}: names no time per step:\n{text[-2000:]}")
    return float(times[-1])


def sfumato_step(file: Path, options: argparse.Namespace) -> float:
    """Milliseconds of a step: the median of one run."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as prompts:
        prompts.write(PROMPT)
        prompts.flush()
        command = [sys.executable, "-m", "sfumato", "bench", "-m", str(file), "--json", "-"]
        command += ["--prompts", prompts.name, "--threads", str(options.threads)]
        command += ["--max-tokens", str(CANVAS), "--fixed-steps", str(options.steps)]
        command += ["--ignore-eos", "--repeats", "1", "--warmup", "0"]
        environment = os.environ | ({"SFUMATO_ISA": options.isa} if options.isa else {})
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=LIMIT_S, env=environment
        )
    if done.returncode:
        raise SystemExit(f"sfumato bench: {done.stderr[-2000:]}")
    median: float = json.loads(done.stdout)["cases"][0]["metrics"]["step_ms"]["p50"]
    return median


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", type=Path, help="a GGUF file that both programs read")
    parser.add_argument("--llama", type=Path, required=True, help="llama-diffusion-cli")
    parser.add_argument("--isa", help="Sfumato's level (SFUMATO_ISA); default: the best")
    parser.add_argument("--threads", type=int, default=2, help="of both (%(default)s)")
    parser.add_argument("--steps", type=int, default=8, help="of a run (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="(%(default)s)")
    options = parser.parse_args()
    times: dict[str, list[float]] = {"llama.cpp": [], "sfumato": []}
    for number in range(options.rounds):
        times["llama.cpp"].append(
            llama_step(options.llama, options.file, options.threads, options.steps)
        )
        times["sfumato"].append(sfumato_step(options.file, options))
        print(f"round {number + 1}:", {n: round(t[-1]) for n, t in times.items()}, file=sys.stderr)
    medians = {name: statistics.median(each) for name, each in times.items()}
    ratio = medians["llama.cpp"] / medians["sfumato"]
    rounds = [a / b for a, b in zip(times["llama.cpp"], times["sfumato"], strict=True)]
    print(
        "| llama.cpp, ms a step | sfumato, ms a step | ratio | of the rounds |\n|---|---|---|---|"
    )
    print(
        f"| {medians['llama.cpp']:,.0f} | {medians['sfumato']:,.0f} | **{ratio:.2f}×** | "
        f"{min(rounds):.2f} to {max(rounds):.2f} |"
    )
    result = {"benchmark": "step_vs_llama_cpp", "isa": options.isa}
    print(json.dumps(result | {"steps": options.steps, "ms": times, "ratio": ratio}))


if __name__ == "__main__":
    main()
