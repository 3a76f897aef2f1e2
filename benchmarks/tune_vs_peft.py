"""A step of tuning an adapter beside a plain loop of `transformers` and `peft`: seconds and peak
memory, on a random DiffusionGemma, on a CPU.

    .venv/bin/python -m benchmarks.tune_vs_peft [--hidden 512 --layers 8 --rounds 5]

The programs take turns, each in a process of its own, with the same objective on rows of the same
sizes: one random canvas after a prompt, half of the steps with a first pass without gradient, and
the encoder's next tokens over prompt and reply.  The plain loop adapts both stacks that
`transformers` has, with two sets of matrices where Sfumato has one: PEFT cannot share them.  Prints
a table of medians, what other programs took of the processors, and one line of JSON.  Linux only.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from benchmarks.turns import Contender, OtherWork, in_turns
from torch import Tensor

from sfumato.bench.environment import cpu_name
from sfumato.train.objective import noised

WORKER = "import sys; from benchmarks.tune_vs_peft import {0}; {0}(sys.argv[1])"
RATE, CLIP, SCALE = 1.5e-4, 1.0, 2.0
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
MIB = 2**20


def memory_of(name: str) -> int:
    """A line of this process's status, in bytes."""
    text = Path("/proc/self/status").read_text()
    return int(text.partition(f"{name}:")[2].split()[0]) * 1024


def serve(step: Callable[[], None], learned: Sequence[Tensor], steps: int) -> None:
    """A round for each line of the input: the seconds of each of its steps, by the clock and of the
    processor, and the highest memory since the start, with what there was before the first step."""
    optimiser = torch.optim.AdamW(learned, lr=RATE)
    Path("/proc/self/clear_refs").write_text("5")  # what building took does not count
    before = memory_of("VmRSS")
    for _ in sys.stdin:
        clock, cpu = time.perf_counter(), time.process_time()
        for _ in range(steps):
            optimiser.zero_grad()
            step()
            torch.nn.utils.clip_grad_norm_(learned, CLIP)
            optimiser.step()
        figures = {
            "seconds": (time.perf_counter() - clock) / steps,
            "cpu_seconds": (time.process_time() - cpu) / steps,
            "before": before,
            "peak": memory_of("VmHWM"),
            "learned": sum(each.numel() for each in learned),
        }
        print(json.dumps(figures), flush=True)


def rows_of(sizes: dict[str, int], generator: torch.Generator) -> Tensor:
    """Prompts and canvases, int64 [rows, prompt + canvas], without special tokens."""
    shape = sizes["rows"], sizes["prompt"] + sizes["canvas"]
    return torch.randint(10, sizes["vocab"], shape, generator=generator)


def ours(given: str) -> None:
    """Sfumato's loop; given: sizes and the configuration, as JSON."""
    from sfumato.model.adapters import Adapted, LowRank
    from sfumato.model.families.diffusion_gemma.config import config_from_hf
    from sfumato.model.transformer import Linear
    from sfumato.train.canvas_rows import CanvasRow, collate
    from sfumato.train.objective import loss
    from sfumato.train.recipe import initialised

    sizes, generator = json.loads(given), torch.Generator().manual_seed(0)
    torch.set_num_threads(sizes["threads"])
    network = initialised(config_from_hf(sizes["config"]), generator).requires_grad_(False)
    learned, changes = list[Tensor](), dict[str, LowRank]()
    for path, module in network.named_modules():
        if isinstance(module, Linear) and path.endswith(TARGETS):
            out, inputs = module.weight.shape
            down = torch.randn(sizes["rank"], inputs) / inputs**0.5
            halves = [torch.nn.Parameter(each) for each in (down, torch.zeros(out, sizes["rank"]))]
            changes[path] = LowRank(halves[0], halves[1], SCALE)
            learned += halves
    network.attach(1, changes)
    network.recomputes_layers = sizes["recompute"]
    generator = torch.Generator().manual_seed(0)  # the same draws in all programs

    def step() -> None:
        rows = rows_of(sizes, generator).split((sizes["prompt"], sizes["canvas"]), 1)
        made = [
            CanvasRow("questions", prefix, target)
            for prefix, target in zip(*(part.tolist() for part in rows), strict=True)
        ]
        losses = loss(network, collate(made), generator, adapted=(Adapted(1),))
        sum(losses.values(), torch.zeros(())).backward()

    serve(step, learned, sizes["steps"])


def theirs(given: str) -> None:
    """A plain loop of `transformers` and `peft`."""
    from peft import LoraConfig, inject_adapter_in_model
    from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion, DynamicCache

    sizes, generator = json.loads(given), torch.Generator().manual_seed(0)
    torch.set_num_threads(sizes["threads"])
    config = DiffusionGemmaConfig.from_dict(sizes["config"])
    config._attn_implementation = sizes["attention"]
    model: Any = DiffusionGemmaForBlockDiffusion(config).requires_grad_(False)
    stacks = r"model\.(decoder|encoder\.language_model)\.(layers|self_conditioning)\..*"
    options = LoraConfig(
        r=sizes["rank"],
        lora_alpha=int(SCALE * sizes["rank"]),
        target_modules=f"{stacks}({'|'.join(TARGETS)})",
    )
    inject_adapter_in_model(options, model)
    learned = [each for each in model.parameters() if each.requires_grad]
    cap = config.text_config.final_logit_softcapping

    def step() -> None:
        rows, prompt = rows_of(sizes, generator), sizes["prompt"]
        target = rows[:, prompt:]
        cache = DynamicCache(config=config.text_config)
        encoded = model.model.encoder(input_ids=rows, past_key_values=cache).last_hidden_state
        raw = model.lm_head(encoded[:, :-1]).float()
        of_encoder = F.cross_entropy(
            ((raw / cap).tanh() * cap).flatten(0, 1), rows[:, 1:].flatten()
        )
        cache.crop(-sizes["canvas"])  # the canvas sees what was before it
        canvas = noised(target, sizes["vocab"], generator)
        before = None
        if torch.rand((), generator=generator) < 0.5:
            with torch.no_grad():
                before = model(decoder_input_ids=canvas, past_key_values=cache).logits
        scores = model(
            decoder_input_ids=canvas, past_key_values=cache, self_conditioning_logits=before
        ).logits
        of_canvas = F.cross_entropy(scores.float().flatten(0, 1), target.flatten())
        (of_encoder + of_canvas).backward()

    serve(step, learned, sizes["steps"])


def configuration(hidden: int, layers: int, vocab: int, canvas: int) -> dict[str, Any]:
    """A DiffusionGemma with the 26B's kinds of layers, as config.json has it."""
    from transformers import DiffusionGemmaConfig, DiffusionGemmaTextConfig
    from transformers.models.gemma4.configuration_gemma4 import Gemma4VisionConfig

    kinds = ["full_attention" if i % 4 == 3 else "sliding_attention" for i in range(layers)]
    text = DiffusionGemmaTextConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        global_head_dim=128,
        num_global_key_value_heads=2,
        sliding_window=1024,
        num_experts=16,
        top_k_experts=4,
        moe_intermediate_size=hidden // 2,
        layer_types=kinds,
        use_bidirectional_attention="vision",
    )
    small = dict.fromkeys(("hidden_size", "intermediate_size", "head_dim"), 16)
    ones = dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), 1)
    vision = Gemma4VisionConfig(**small, **ones, position_embedding_size=8)
    config = DiffusionGemmaConfig(text_config=text, vision_config=vision, canvas_length=canvas)
    made: dict[str, Any] = config.to_dict()
    return made


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (
        *(("hidden", 512), ("layers", 8), ("vocab", 8192), ("canvas", 64), ("prompt", 192)),
        *(("rows", 4), ("rank", 16), ("steps", 4), ("rounds", 5), ("threads", 2)),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--attention", default="sdpa", choices=("sdpa", "eager"))
    args = parser.parse_args(argv)
    sizes = vars(args) | {"recompute": False}
    sizes["config"] = configuration(args.hidden, args.layers, args.vocab, args.canvas)
    programs = {
        "sfumato": ("ours", sizes),
        "sfumato, recompute": ("ours", sizes | {"recompute": True}),
        "transformers + peft": ("theirs", sizes),
    }
    with ExitStack() as stack:
        contenders = [
            stack.enter_context(Contender(WORKER.format(name), json.dumps(given)))
            for name, given in programs.values()
        ]
        others = OtherWork(contenders)
        figures = [rounds[1:] for rounds in in_turns(contenders, args.rounds)]
        share = others.share()
    print(
        f"{'':22}{'s a step':>9}{'CPU s':>8}{'peak MiB':>10}{'of it by steps':>16}{'learned':>12}"
    )
    for name, rounds in zip(programs, figures, strict=True):
        medians = {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}
        peak, before = medians["peak"] / MIB, medians["before"] / MIB
        print(
            f"{name:22}{medians['seconds']:9.3f}{medians['cpu_seconds']:8.3f}{peak:10.0f}"
            f"{peak - before:16.0f}{medians['learned']:12,.0f}"
        )
    print(f"other programs took {share:.0%} of {cpu_name()}'s processors meanwhile")
    print(json.dumps({"figures": dict(zip(programs, figures, strict=True)), "others": share}))


if __name__ == "__main__":
    main(sys.argv[1:])
