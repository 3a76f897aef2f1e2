"""Recipes: from nothing to a checkpoint, reproducibly.

`embedded` makes the model that ships in the package, in three stages: a network that talks, the
same one once it has learnt to decide (`decision_stage.py`), and once it fills holes and writes
JSON (`fill_stage.py`).  Knows no command line.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

from sfumato.api import load
from sfumato.model.model_config import LayerConfig, ModelConfig
from sfumato.model.transformer import Transformer
from sfumato.train import decision_stage, fill_stage
from sfumato.train.embedded_data import Mixture, batches
from sfumato.train.objective import ENCODER_WEIGHT, loss
from sfumato.train.save import save_checkpoint
from sfumato.train.vocabulary import BOS, END_OF_TURN, EOS, PAD, TOKENS

STEPS = 8_700
BATCH = 32
LEARNING_RATE = 3e-3
WARM_UP = 100
CLIP = 1.0
LAST_RATE = 3e-4
TURN_SHARE, MAIN_SHARE = 3360 / 8700, 8000 / 8700
EARLY, LATER, LAST = Mixture(), Mixture(sudoku=0.35), Mixture(sudoku=0.35, first_asked=0.25)

_SLIDING = LayerConfig(True, kv_heads=2, head_dim=32, rope_theta=1e4, rope_pairs=16)
_FULL = LayerConfig(False, kv_heads=1, head_dim=64, rope_theta=1e6, rope_pairs=8)

EMBEDDED = ModelConfig(
    vocab_size=len(TOKENS),
    hidden_size=128,
    intermediate_size=192,
    num_heads=4,
    num_experts=8,
    experts_per_token=2,
    expert_size=48,
    sliding_window=128,
    canvas_length=32,
    context_length=16_384,
    rms_norm_eps=1e-6,
    logit_softcap=30.0,
    layers=(_SLIDING, _SLIDING, _FULL, _SLIDING, _FULL),
    bos_id=BOS,
    eos_ids=(EOS, END_OF_TURN),
    pad_id=PAD,
    filler_id=EOS,
)

Report = Callable[[str], None]
Progress = Callable[[int, int], None]  # called with the steps done, and all of them


def initialised(config: ModelConfig, generator: torch.Generator) -> Transformer:
    """A network with normal(0, 0.02) matrices and ones for all vectors, in float32."""
    network = Transformer(config)
    for name, parameter in network.named_parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.02, generator=generator)
        # Layer scalars balance two phases in a deep network; five layers need none.
        parameter.requires_grad_(not name.endswith("layer_scalar"))
    return network


def learning_rate(step: int, steps: int) -> float:
    """Linear warm-up, then one cosine down to 2 %: restarting it at full rate costs accuracy. The
    last steps are another one, from a tenth of the rate."""
    main = round(MAIN_SHARE * steps)
    peak, done, total = (
        (LEARNING_RATE, step, main)
        if step < main
        else (LAST_RATE, step - main, max(1, steps - main))
    )
    cosine = 0.5 * (1 + math.cos(math.pi * done / total))
    return peak * min(1.0, (done + 1) / WARM_UP) * (0.02 + 0.98 * cosine)


def mixture(step: int, steps: int) -> Mixture:
    """Sudoku is learnt first; then questions get most of the steps, and in the last ones those
    that people ask first come more often."""
    share = step / steps
    return EARLY if share < TURN_SHARE else LATER if share < MAIN_SHARE else LAST


def train(
    steps: int = STEPS,
    seed: int = 0,
    report: Report = print,
    every: int = 200,
    progress: Progress = lambda done, total: None,
) -> Transformer:
    """Trains the embedded model; the same seed, torch and thread count give the same weights."""
    generator = torch.Generator().manual_seed(seed)
    network = initialised(EMBEDDED, generator)
    learned = [p for p in network.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(
        [
            {"params": [p for p in learned if p.ndim > 1], "weight_decay": 0.01},
            {"params": [p for p in learned if p.ndim == 1], "weight_decay": 0.0},
        ],
        lr=LEARNING_RATE,
        betas=(0.9, 0.98),
    )
    data = batches(
        np.random.default_rng(seed),
        BATCH,
        EMBEDDED.canvas_length,
        lambda step: mixture(step, steps),
    )
    start, smooth = time.perf_counter(), math.nan
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = learning_rate(step, steps)
        canvas_loss, encoder_loss = loss(network, *next(data), generator)
        optimiser.zero_grad(set_to_none=True)
        (canvas_loss + ENCODER_WEIGHT * encoder_loss).backward()
        torch.nn.utils.clip_grad_norm_(learned, CLIP)
        optimiser.step()
        value = canvas_loss.item()
        progress(step + 1, steps)
        smooth = value if math.isnan(smooth) else 0.98 * smooth + 0.02 * value
        if (step + 1) % every == 0:
            spent = time.perf_counter() - start
            report(
                f"step {step + 1} of {steps}: canvas loss {smooth:.4f}, encoder loss "
                f"{encoder_loss.item():.3f}, {spent / (step + 1) * 1e3:.0f} ms a step, "
                f"{spent / 60:.1f} min"
            )
    return network


def run(
    name: str,
    out: Path,
    steps: int | None = None,
    seed: int = 0,
    report: Report = print,
    progress: Progress = lambda done, total: None,
    begin_with: Path | None = None,
    stage: int = 2,
) -> None:
    """Trains the recipe `name` and writes a checkpoint folder. steps: of each stage; None: the
    recipe's. begin_with: a checkpoint to begin `stage` with, 2 or 3; None: begin with nothing.

    Raises ValueError for a name that is no recipe or a checkpoint of another network, and
    CheckpointError for one that cannot be read."""
    if name != "embedded":
        raise ValueError(f"recipe: {name!r} is not known; there is 'embedded'")
    counts = [steps or each for each in (STEPS, decision_stage.STEPS, fill_stage.STEPS)]
    first = 1 if begin_with is None else stage
    network = None if begin_with is None else load_weights(begin_with)
    done, total = 0, sum(counts[first - 1 :])
    for number in range(first, 4):
        before, count = done, counts[number - 1]
        shown = partial(_shown, progress, before, total)
        if network is None:
            network = train(count, seed, report, progress=shown)
        else:
            of_stage = (decision_stage if number == 2 else fill_stage).train
            of_stage(network, count, seed, report, progress=shown)
        done += count
        save_checkpoint(network, out)
        # What a stage begins with is what the checkpoint of the one before holds.
        network = load_weights(out)
    report(f"wrote {out}")


def _shown(progress: Progress, before: int, total: int, done: int, of_stage: int) -> None:
    progress(before + done, total)


def load_weights(folder: Path) -> Transformer:
    """The network of a checkpoint of this recipe, in float32, to be trained on."""
    loaded = load(folder)
    if loaded.config.layers != EMBEDDED.layers or loaded.config.vocab_size != EMBEDDED.vocab_size:
        raise ValueError(f"from: {folder} is no checkpoint of the recipe 'embedded'")
    network = initialised(EMBEDDED, torch.Generator())
    weights = loaded.network.transformer.state_dict()
    network.load_state_dict({name: value.float() for name, value in weights.items()})
    return network
