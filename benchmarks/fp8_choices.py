"""What FP8 in each group of matrices costs the embedded model: error of logits, and argmaxes.

    PYTHONPATH=src:. .venv/bin/python benchmarks/fp8_choices.py [--tasks 40]

Each task of the embedded model's prompts gives two steps: of a random canvas, and of the canvas and
the soft embedding that the model itself makes of it, half renewed.  Every choice gets the same
canvases.  Weights in FP8 are multiplied as on a GPU (activations rounded a token at a time, sums of
float32); embedding and router, which `--quantize fp8` leaves as they are, have their weights
rounded alone.  An argmax counts where the two best of the model's own logits are further apart than
twice the root mean square of the error.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable

import torch
from tests.support.fixed_prompts import fixed_prompts
from torch import Tensor

import sfumato
from sfumato.model.loading import place
from sfumato.weights.formats import Kind, round_rows

ATTENTION, DENSE = r"layers\.\d+\.self_attn\..*_proj\.weight", r"layers\.\d+\.mlp\..*_proj\.weight"
EXPERTS = r"layers\.\d+\.experts\..*_proj"
CONDITIONING = r"self_conditioning\..*_proj\.weight"
ALL = rf"{ATTENTION}|{DENSE}|{EXPERTS}"
Step = tuple[list[int], Tensor, Tensor | None]
"""Prompt, canvas and soft embedding."""
CHOICES = {
    "attention": ATTENTION,
    "dense MLP": DENSE,
    "experts": EXPERTS,
    "all three: --quantize fp8": ALL,
    "all three and self-conditioning": rf"{ALL}|{CONDITIONING}",
    "self-conditioning alone": CONDITIONING,
}
WEIGHTS = {
    "all three, activations as they are": ALL,
    "embedding and head, weights alone": r"embed_tokens\.weight",
    "router, weights alone": r".*\.router\.proj\.weight",
}


def changed(pattern: str, kind: Kind, weights_alone: bool) -> sfumato.Model:
    """The embedded model, whose matrices of these names are codes, or floats rounded to codes."""
    model = sfumato.load(device="cpu")
    network = model.network.transformer
    for name, value in list(network.named_parameters()):
        if re.fullmatch(pattern, name) is None:
            continue
        held = round_rows(value.detach(), kind)
        path, _, leaf = name.rpartition(".")
        if weights_alone:
            value.data.copy_(held.dequantize(value.dtype))
        else:
            place(network.get_submodule(path), leaf, held)
    return model


def steps(model: sfumato.Model, tasks: int) -> list[Step]:
    """Two of each task."""
    random, made = torch.Generator().manual_seed(0), list[Step]()
    config = model.config
    for task in fixed_prompts(tasks):
        prompt = model.prompt_ids(messages=task.messages)
        noise = torch.randint(config.vocab_size, (2, config.canvas_length), generator=random)
        made.append((prompt, noise[0], None))
        logits = logits_of(model, prompt, noise[0], None)
        renewed = torch.rand(config.canvas_length, generator=random) < 0.5
        canvas = torch.where(renewed, noise[1], logits.argmax(-1))
        made.append((prompt, canvas, model.soft_embedding(logits[None])))
    return made


def logits_of(
    model: sfumato.Model, prompt: list[int], canvas: Tensor, soft: Tensor | None
) -> Tensor:
    """float32 [length, vocab]."""
    cache = model.new_cache(1, len(prompt) + len(canvas))
    model.encode(torch.tensor([prompt]), cache)
    return model.denoise_logits(canvas[None], cache, soft)[0]


def report(name: str, model: sfumato.Model, given: list[Step], expected: list[Tensor]) -> None:
    """One line: error of the logits, their mean taken off, and agreement."""
    ours = torch.cat([logits_of(model, *step) for step in given])
    right = torch.cat(expected)
    centred = right - right.mean(-1, keepdim=True)
    difference = ours - ours.mean(-1, keepdim=True) - centred
    error = float(difference.norm() / centred.norm())
    best = right.topk(2, dim=-1).values
    apart = best[:, 0] - best[:, 1] > 2 * float(difference.square().mean().sqrt())
    same = (ours.argmax(-1) == right.argmax(-1)).double()
    agree = f"{100 * float(same[apart].mean()):.2f} % of {int(apart.sum())}"
    print(f"{name:36} {error:.4f}  {agree}, {100 * float(same.mean()):.2f} % of all {len(same)}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tasks", type=int, default=40)
    given = parser.parse_args()
    torch.set_num_threads(1)
    model = sfumato.load(device="cpu")
    made = steps(model, given.tasks)
    expected = [logits_of(model, *step) for step in made]
    report("bfloat16", model, made, expected)
    rows: list[tuple[str, Callable[[], sfumato.Model]]] = []
    for name, pattern in CHOICES.items():
        rows.append((name, lambda pattern=pattern: changed(pattern, "FP8", False)))
    for name, pattern in WEIGHTS.items():
        rows.append((name, lambda pattern=pattern: changed(pattern, "FP8", True)))
    rows.append(("all three in INT8", lambda: changed(ALL, "INT8", False)))
    for name, make in rows:
        report(name, make(), made, expected)


if __name__ == "__main__":
    with torch.no_grad():
        main()
