"""One denoising step: Sfumato against `transformers` on the same random weights, interleaved.

    .venv/bin/python benchmarks/step_vs_transformers.py --dtype bfloat16 --threads 2 [--where]
    … --sizes 26b-a4b --layers 2 --dtype bfloat16 --peers 'transformers grouped_mm'

A step is all of it: the forward, softmax, draw, entropy, acceptance, stop test, and what the next
step's self-conditioning needs.  Each round runs every contender once and begins with the next
one, on the same prefix and canvas, at the second step (so that self-conditioning is paid); figures
are medians over rounds and their ratios to Sfumato.  Peak memory is measured in a fresh process per
contender.  With --where, a few more steps of Sfumato's tell in which of its parts the time goes.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

CANVAS, PREFIX = 256, 256

# What the 26B-A4B has, and its proportions at hidden size 512: about 180 M parameters in 6 layers.
SIZES: dict[str, dict[str, int]] = {
    "26b-a4b": {
        "vocab_size": 262144, "hidden_size": 2816, "intermediate_size": 2112,
        "num_attention_heads": 16, "num_key_value_heads": 8, "num_global_key_value_heads": 2,
        "head_dim": 256, "global_head_dim": 512, "moe_intermediate_size": 704,
    },
    "180m": {
        "vocab_size": 32768, "hidden_size": 512, "intermediate_size": 384,
        "num_attention_heads": 6, "num_key_value_heads": 3, "num_global_key_value_heads": 1,
        "head_dim": 128, "global_head_dim": 256, "moe_intermediate_size": 128,
    },
}  # fmt: skip


def hf_config(sizes: str, layers: int):
    from transformers import DiffusionGemmaConfig, DiffusionGemmaTextConfig
    from transformers.models.gemma4.configuration_gemma4 import Gemma4VisionConfig

    text = DiffusionGemmaTextConfig(
        **SIZES[sizes],
        num_hidden_layers=layers,
        sliding_window=1024,
        num_experts=128,
        top_k_experts=8,
        max_position_embeddings=8192,
        use_bidirectional_attention="vision",
    )
    vision = Gemma4VisionConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=16,
        position_embedding_size=8,
    )
    return DiffusionGemmaConfig(text_config=text, vision_config=vision, canvas_length=CANVAS)


def write_weights(folder: Path, sizes: str, layers: int, dtype: torch.dtype) -> int:
    """Random weights into `folder`; returns the number of parameters."""
    from transformers import DiffusionGemmaForBlockDiffusion

    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    model = DiffusionGemmaForBlockDiffusion(hf_config(sizes, layers)).to(dtype)
    torch.set_default_dtype(torch.float32)
    for name, tensor in model.state_dict().items():
        if "q_norm" in name:
            tensor.fill_(0.2)
    model.save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())


def vocabulary(folder: Path) -> int:
    return json.loads((folder / "config.json").read_text())["text_config"]["vocab_size"]


def inputs(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = vocabulary(folder)
    prompt = torch.randint(0, tokens, (PREFIX,), generator=generator)
    return prompt, torch.randint(0, tokens, (CANVAS,), generator=generator)


def sfumato_step(folder: Path, soft_skip: float | None = None) -> Callable[[], None]:
    """Runs the second step of a canvas at every call."""
    from tests.support.denoise import denoise_step

    from sfumato.diffusion.canvas import Canvas
    from sfumato.diffusion.noise import Noise
    from sfumato.diffusion.sampler_config import REFERENCE, fixed_steps
    from sfumato.model.families import open_checkpoint
    from sfumato.model.loading import load_network
    from sfumato.model.placement import pick_dtype

    checkpoint, cpu = open_checkpoint(folder), torch.device("cpu")
    network = load_network(checkpoint, cpu, pick_dtype("auto", checkpoint, cpu))
    config = fixed_steps(48).over(REFERENCE)
    config = replace(config, canvas_length=CANVAS, soft_skip=soft_skip)
    prompt, tokens = inputs(folder)
    slot = network.new_slot(PREFIX)
    network.encode([prompt], [slot])
    canvas = Canvas(config, Noise(0, 0), vocabulary(folder), cpu)
    denoise_step(network, [canvas], [slot])
    assert canvas.place
    batch, row = canvas.place
    batch.tokens[row].copy_(tokens)
    start = [tensor[row].clone() for tensor in batch.tensors()]

    def step() -> None:
        canvas.step, canvas.convergence = 1, None
        for tensor, value in zip(batch.tensors(), start, strict=True):
            tensor[row].copy_(value)
        denoise_step(network, [canvas], [slot])

    return step


def transformers_step(folder: Path, experts: str) -> Callable[[], None]:
    """The same with `transformers`' own step, sdpa attention and DynamicCache."""
    from transformers import DiffusionGemmaForBlockDiffusion, DynamicCache
    from transformers.models.diffusion_gemma import generation_diffusion_gemma as generation

    model = DiffusionGemmaForBlockDiffusion.from_pretrained(
        folder, dtype="auto", attn_implementation="sdpa", experts_implementation=experts
    ).eval()
    prompt, tokens = inputs(folder)
    cache = DynamicCache(config=model.config.text_config)
    sampler = generation.EntropyBoundSampler(
        generation.EntropyBoundSamplerConfig(0.1), CANVAS, vocabulary(folder), 48
    )
    schedule = generation.LinearTemperatureScheduleLogitsProcessor(0.4, 0.8, 48)
    stopping = generation.StableAndConfidentStoppingCriteria(1, 0.005)
    state = {
        "past_key_values": cache,
        "decoder_forward": model.forward,
        "argmax_canvas": tokens[None],
        "input_ids": prompt[None],
        "decoder_position_ids": torch.arange(PREFIX, PREFIX + CANVAS)[None],
        "mask_mapping": {"full_attention": None, "sliding_attention": None},
        "sampler": sampler,
        "logits_processor": lambda ids, scores, cur_step: schedule(ids, scores, cur_step),
        "diffusion_stopping_criteria": stopping,
    }
    with torch.no_grad():
        model.model.encoder(input_ids=prompt[None], past_key_values=cache)

        def run(soft: torch.Tensor | None) -> torch.Tensor:
            with torch.no_grad():
                out = model._denoising_step(
                    current_canvas=tokens[None],
                    self_conditioning_logits=soft,
                    finished_denoising=torch.zeros(1, dtype=torch.bool),
                    cur_step=47,
                    **state,
                )
            return out[2]

        soft = run(None)

    def step() -> None:
        run(soft)

    return step


CONTENDERS: dict[str, Callable[[Path], Callable[[], None]]] = {
    "sfumato": sfumato_step,
    "sfumato exact": lambda folder: sfumato_step(folder, 0.0),  # leaves nothing out: docs/head.md
    "transformers eager": lambda folder: transformers_step(folder, "eager"),
    "transformers grouped_mm": lambda folder: transformers_step(folder, "grouped_mm"),
}


def peak_mib(name: str, folder: Path, threads: int) -> float:
    """Peak resident memory (MiB) of a process that loads the weights and runs three steps, over
    that of one that only imports."""
    code = (
        "import sys, torch; sys.path.insert(0, sys.argv[3]); import step_vs_transformers as b;"
        "from pathlib import Path; torch.set_num_threads(int(sys.argv[4]));"
        "import transformers.models.diffusion_gemma.modeling_diffusion_gemma, sfumato.api;"
        "peak = lambda: int(next(l for l in open('/proc/self/status') if 'VmHWM' in l).split()[1]);"
        "base = peak(); step = b.CONTENDERS[sys.argv[1]](Path(sys.argv[2]));"
        "step(); step(); step(); print((peak() - base) / 1024)"
    )
    here = str(Path(__file__).parent)
    command = [sys.executable, "-c", code, name, str(folder), here, str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def where(step: Callable[[], None], rounds: int) -> dict[str, float]:
    """Percent of a step of Sfumato's inside each part, by the clock: medians over rounds."""
    from sfumato.model.head import VocabularyHead
    from sfumato.model.transformer import Attention, Experts, GatedMLP

    # None of them is called within another; "attention" has its projections in it.
    parts = {
        "head": (VocabularyHead, "__call__"),
        "experts": (Experts, "forward"),
        "attention": (Attention, "forward"),
        "dense": (GatedMLP, "forward"),
    }
    spent = dict.fromkeys(parts, 0.0)

    def timed(part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **options: Any) -> Any:
            start = time.perf_counter()
            result = call(*args, **options)
            spent[part] += time.perf_counter() - start
            return result

        return wrapper

    shares: dict[str, list[float]] = {part: [] for part in parts}
    with ExitStack() as patches:
        for part, (owner, name) in parts.items():
            wrapper = timed(part, getattr(owner, name))
            patches.enter_context(mock.patch.object(owner, name, wrapper))
        for _ in range(rounds):
            spent.update(dict.fromkeys(parts, 0.0))
            start = time.perf_counter()
            step()
            total = time.perf_counter() - start
            for part, seconds in spent.items():
                shares[part].append(100 * seconds / total)
    medians = {part: statistics.median(values) for part, values in shares.items()}
    return medians | {"rest": 100 - sum(medians.values())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--sizes", default="180m", choices=SIZES)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--peers", nargs="+", default=list(CONTENDERS)[2:], help="whom to run")
    parser.add_argument("--exact", action="store_true", help="Sfumato leaves nothing out")
    parser.add_argument("--where", action="store_true", help="the share of each part of a step")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    own = "sfumato exact" if options.exact else "sfumato"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        parameters = write_weights(
            folder, options.sizes, options.layers, getattr(torch, options.dtype)
        )
        steps = {name: CONTENDERS[name](folder) for name in (own, *options.peers)}
        times: dict[str, list[float]] = {name: [] for name in steps}
        order = deque(steps)
        for round_ in range(options.rounds + 1):
            for name in order:
                start = time.perf_counter()
                steps[name]()
                if round_:  # the first round warms up
                    times[name].append((time.perf_counter() - start) * 1e3)
            order.rotate(-1)
        shares = where(steps[own], options.rounds) if options.where else None
        del steps
        memory = {name: peak_mib(name, folder, options.threads) for name in times}
    medians = {name: statistics.median(values) for name, values in times.items()}
    print(
        f"{options.sizes}, {options.layers} layers, {parameters / 1e6:.0f} M parameters, "
        f"{options.dtype}, {options.threads} threads, canvas {CANVAS}, prefix {PREFIX}"
    )
    print(f"{'':24}{'ms a step':>10}{'against sfumato':>17}{'peak MiB':>10}")
    for name, median in medians.items():
        ratio = median / medians[own]
        print(f"{name:24}{median:10.0f}{ratio:16.2f}x{memory[name]:10.0f}")
    if shares:
        print("a step of sfumato: " + ", ".join(f"{p} {v:.0f} %" for p, v in shares.items()))
    print(json.dumps({
        "benchmark": "step_vs_transformers", "sizes": options.sizes,
        "layers": options.layers, "parameters": parameters, "dtype": options.dtype,
        "threads": options.threads, "rounds": options.rounds, "median_ms": medians,
        "peak_mib": memory, "where_percent": shares, "torch": torch.__version__,
        "machine": platform.machine(),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
