"""Recipes: from nothing to a checkpoint, reproducibly.

`embedded` makes the model that ships in the package, in four stages: a network that talks; the
same one once it has learnt to decide; once it fills holes, writes small JSON objects and mends a
wrong prediction; and a tower that reads pictures for it, which leaves the network as it is.  Every
step of the second and third stage mixes what is new with what was learnt before, so that this is
not lost.  `masks` makes the second model of the package, a small network of another family that
learns the talk of the first stage with canvases of masks.  Knows no command line.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sfumato.api import load
from sfumato.convert.files import config_files, save_folder
from sfumato.diffusion.checkpoint_defaults import defaults_of_process
from sfumato.diffusion.sampler import LowConfidence
from sfumato.diffusion.sampler_config import SamplerConfig
from sfumato.model.families import DIFFUSION_GEMMA, Family
from sfumato.model.families.qwen3_blocks import BD3LM
from sfumato.model.families.qwen3_blocks.config import QWEN3
from sfumato.model.model_config import LayerConfig, ModelConfig
from sfumato.model.transformer import Transformer
from sfumato.model.vision.config import VisionConfig
from sfumato.model.vision.loading import to_transformers
from sfumato.model.vision.tower import VisionTower
from sfumato.train import canvas_data, decisions_data, embedded_data, pictures
from sfumato.train.canvas_rows import CanvasBatch, Reads, pooled
from sfumato.train.embedded_data import FIRST_ASKED, Mixture
from sfumato.train.objective import (
    ENCODER_WEIGHT,
    canvas_losses,
    letter_loss,
    loss,
    mask_loss,
    picture_losses,
    read_losses,
    soft_tokens,
)
from sfumato.train.pictures import PictureBatch
from sfumato.train.trainer import (
    PRINTED,
    Progress,
    Trainer,
    Watch,
    adamw,
    fallen,
    muon,
    warm_up,
)
from sfumato.train.vocabulary import (
    BOS,
    END_OF_TURN,
    EOS,
    GEMMA,
    MASK,
    PAD,
    QWEN,
    TOKENS,
    TextSide,
    encode_text,
    write_text_side,
)
from sfumato.weights.files.tensorfile import TensorStream

TALK_STEPS, DECIDE_STEPS, FILL_STEPS = 8_700, 5_550, 13_578
PARTS = 2
"""Parts of each step of the later stages; numbers of rows are those of a part."""
QUESTIONS = 4
"""Questions about each state, of reads."""

TALK_ROWS = 32
TALK_RATE, LAST_RATE = 3e-3, 3e-4
TURN_SHARE, MAIN_SHARE = 3360 / 8700, 8000 / 8700
EARLY, LATER, LAST = Mixture(), Mixture(sudoku=0.35), Mixture(sudoku=0.35, first_asked=0.25)

DECIDE_STATES = 4
DECIDE_CHATS = 12
"""Conversations of each part, in all phases that say no other number."""
READ_WEIGHTS = {"slot": 1.0, "end": 0.3, "options": 1.0}
LOOK_WEIGHT = 0.5
"""Weight of the losses that say where heads look."""

FILL_STATES = 1
FILL_ROWS = 24
FILL_RATE, FALL_SHARE = 6e-4, 0.25
AVERAGE = 0.9995
"""Share of the mean of the weights that a step leaves as it is: a step's own weights answer now
this question better and now that one, and their mean nearly all."""
READS_WEIGHT = 0.5
REPLY_WEIGHT = 0.5
"""Weight of the encoder's next tokens within texts."""

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
CANVAS = EMBEDDED.canvas_length

MASKS = ModelConfig(
    vocab_size=len(TOKENS),
    hidden_size=128,
    intermediate_size=384,
    num_heads=4,
    num_experts=0,
    experts_per_token=0,
    expert_size=0,
    sliding_window=16_384,
    canvas_length=CANVAS,
    context_length=16_384,
    rms_norm_eps=1e-6,
    logit_softcap=0.0,
    layers=(LayerConfig(False, kv_heads=2, head_dim=32, rope_theta=1e4, rope_pairs=16),) * 4,
    eos_ids=(END_OF_TURN, EOS),
    pad_id=PAD,
    mask_id=MASK,
    design=replace(QWEN3, borders="back", tied_head=True),
)
MASK_STEPS, MASK_ROWS, MASK_RATE, MASK_AVERAGE = 6_000, 16, 2e-3, 0.998

TOWER = VisionConfig(
    hidden_size=96,
    intermediate_size=192,
    num_layers=3,
    num_heads=3,
    kv_heads=3,
    head_dim=32,
    patch=pictures.CUT.patch,
    pool=pictures.CUT.pool,
    positions=pictures.CUT.pool * pictures.CUT.tokens,
    text_size=EMBEDDED.hidden_size,
    soft_tokens=pictures.CUT.tokens,
)
SEE_STEPS = 7_000
SEE_ROWS = 12
SEE_RATE = 4e-3
TEXT_ROWS = 1
"""Rows of each part that the text network reads; the letters of all rows, which are learnt without
it, teach nearly all."""
DIGITS_SHARE, DIGITS_ROWS, DIGITS_RATE = 1 / 25, 8, 0.3
DIGITS_NOISE = 1.0
"""At most, in standard deviations of the embeddings."""


def initialised(config: ModelConfig, generator: torch.Generator) -> Transformer:
    """A network with normal(0, 0.02) matrices and ones for all vectors, in float32."""
    network = Transformer(config)
    for name, parameter in network.named_parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.02, generator=generator)
        # Layer scalars balance two phases in a deep network; five layers need none.
        parameter.requires_grad_(not name.endswith("layer_scalar"))
    return network


def talk_rate(step: int, steps: int) -> float:
    """Linear warm-up, then one cosine: restarting it at full rate costs accuracy. The last steps
    are another one, from a tenth of the rate."""
    main = round(MAIN_SHARE * steps)
    peak, done, total = (
        (TALK_RATE, step, main) if step < main else (LAST_RATE, step - main, max(1, steps - main))
    )
    return peak * warm_up(done) * fallen(math.pi * done / total)


def mixture(step: int, steps: int) -> Mixture:
    """Sudoku is learnt first; then questions get most of the steps, and in the last ones those
    that people ask first come more often."""
    share = step / steps
    return EARLY if share < TURN_SHARE else LATER if share < MAIN_SHARE else LAST


def train_talk(steps: int = TALK_STEPS, seed: int = 0, watch: Watch = PRINTED) -> Transformer:
    """The first stage; the same seed, torch and thread count give the same weights."""
    generator = torch.Generator().manual_seed(seed)
    network = initialised(EMBEDDED, generator)
    trainer = Trainer("talk", network, adamw(network), steps, watch)
    rng = np.random.default_rng(seed)
    data = embedded_data.batches(rng, TALK_ROWS, CANVAS, lambda step: mixture(step, steps))
    trainer.run(
        steps,
        lambda step: talk_rate(step, steps),
        lambda part: zip(data, repeat(generator), strict=False),
        lambda batch, noise: loss(network, batch.prefixes(), noise),
        {"canvas": 1.0, "encoder": ENCODER_WEIGHT},
    )
    return network


def _streams(
    key: tuple[int, ...], *sources: Callable[[np.random.Generator], Iterator[Any]]
) -> Iterator[Any]:
    """What one part computes steps of: a batch of each source, and what draws the noise; the same
    for the same key."""
    rng = np.random.default_rng(key)
    batches = [source(rng) for source in sources]
    noise = torch.Generator().manual_seed(int(rng.integers(2**62)))
    return zip(*batches, repeat(noise), strict=False)


def mask_rows(seed: int, part: int, steps: int) -> Iterator[tuple[CanvasBatch, torch.Generator]]:
    """The rows of one part of the steps of `masks`, and what draws the masks."""
    mixed = lambda step: mixture(step, steps)  # noqa: E731
    batches = lambda rng: embedded_data.batches(rng, MASK_ROWS, CANVAS, mixed, QWEN)  # noqa: E731
    return _streams((seed, 6, part), batches)


def train_masks(steps: int = MASK_STEPS, seed: int = 0, watch: Watch = PRINTED) -> Transformer:
    """The second model: the exponential mean of its weights over the steps; the same seed and torch
    give the same weights."""
    network = initialised(MASKS, torch.Generator().manual_seed(seed))
    trainer = Trainer("masks", network, muon(network), steps, watch, PARTS, MASK_AVERAGE)
    rate = partial(cosine_rate, MASK_RATE, steps=steps)
    rows = partial(mask_rows, seed, steps=steps)
    trainer.run(steps, rate, rows, partial(mask_loss, network))
    trainer.finish()
    return network


class Phase(NamedTuple):
    """Steps of the second stage up to `until`, with a stream of data of their own. The rate is that
    of a cosine from `peak` at step `start` down to 2 % of it at step `end`; `looks`: the losses of
    where heads look; labels: as `read_losses` takes it; chats: conversations of each part; sudoku:
    their share of Sudoku."""

    until: int
    peak: float
    start: int
    end: int
    looks: tuple[str, ...]
    labels: bool = True
    chats: int = DECIDE_CHATS
    sudoku: float = 0.35

    def learning_rate(self, step: int) -> float:
        """With a linear warm-up of the stage's first steps."""
        done = (step - self.start) / (self.end - self.start)
        return self.peak * warm_up(step) * fallen(math.pi * done)


LOOKS = ("words", "looks", "labels", "evidence", "subjects")
ALL_LOOKS = (*LOOKS, "numbers")
HELPING = frozenset({"end", *ALL_LOOKS})
"""Losses that help to learn others; no report shows them."""
PHASES = (  # a look was added where a figure stood still
    Phase(750, 2e-3, 0, 2400, ("words",), labels=False, chats=5),
    Phase(1000, 2e-3, 0, 2150, ("words", "looks"), labels=False, chats=5),
    Phase(1250, 2e-3, 0, 2100, ("words", "looks", "subjects"), labels=False, chats=5),
    Phase(2150, 1.2e-3, 1250, 2150, LOOKS, chats=5),
    Phase(2500, 1.2e-3, 2150, 6650, LOOKS, chats=8, sudoku=0.3),
    Phase(3250, 1.2e-3, 2150, 6650, ALL_LOOKS, chats=8, sudoku=0.3),
    Phase(4750, 1.1e-3, 3250, 4750, ALL_LOOKS, sudoku=0.2),
    # The last one brings hard grids back.
    Phase(DECIDE_STEPS, 8e-4, 4750, DECIDE_STEPS, ALL_LOOKS, chats=24, sudoku=0.6),
)


def phases(steps: int) -> tuple[Phase, ...]:
    """Phases of the recipe; other numbers of steps have one."""
    if steps == DECIDE_STEPS:
        return PHASES
    return (Phase(steps, 2e-3, 0, steps, ALL_LOOKS, chats=DECIDE_CHATS),)


def decide_rows(
    seed: int, phase: Phase, first: int, part: int
) -> Iterator[tuple[Reads, CanvasBatch, torch.Generator]]:
    """The rows of one part of a phase's steps. first: the phase's first step."""
    mixed = Mixture(phase.sudoku, FIRST_ASKED)
    return _streams(
        (seed, first, part),
        lambda rng: decisions_data.batches(rng, DECIDE_STATES, QUESTIONS),
        lambda rng: embedded_data.batches(rng, phase.chats, CANVAS, lambda step: mixed),
    )


def train_decide(
    network: Transformer, steps: int = DECIDE_STEPS, seed: int = 0, watch: Watch = PRINTED
) -> None:
    """The second stage: trains the network of the first in place; the same seed and torch give the
    same weights."""
    trainer = Trainer("decide", network, muon(network), steps, watch, PARTS)
    for phase in phases(steps):
        weights = {"canvas": 1.0, "encoder": ENCODER_WEIGHT} | READ_WEIGHTS
        weights |= dict.fromkeys(phase.looks, LOOK_WEIGHT)
        rows = partial(decide_rows, seed, phase, trainer.done)
        losses = partial(_decide_losses, network, phase.labels)
        trainer.run(phase.until, phase.learning_rate, rows, losses, weights, HELPING)


def _decide_losses(
    network: Transformer, labels: bool, reads: Reads, chats: CanvasBatch, noise: torch.Generator
) -> dict[str, Tensor]:
    return read_losses(network, reads, labels) | loss(network, chats.prefixes(), noise)


def fill_rows(seed: int, part: int) -> Iterator[tuple[Reads, CanvasBatch, torch.Generator]]:
    """The rows of one part of the third stage's steps."""

    def canvases(rng: np.random.Generator) -> Iterator[CanvasBatch]:
        return pooled(
            rng,
            FILL_ROWS,
            lambda first: canvas_data.draw(rng, CANVAS),
            lambda row: len(row.prefix) + len(row.text),
        )

    reads = lambda rng: decisions_data.batches(rng, FILL_STATES, QUESTIONS)  # noqa: E731
    return _streams((seed, 3, part), reads, canvases)


def fill_rate(step: int, steps: int) -> float:
    """A linear warm-up, level, and in the last steps a line down to 2 %: what is learnt last, the
    letters of long words, needs many steps at the full rate."""
    left = min(1.0, (steps - step) / (FALL_SHARE * steps))
    return FILL_RATE * warm_up(step) * (0.02 + 0.98 * left)


def train_fill(
    network: Transformer, steps: int = FILL_STEPS, seed: int = 0, watch: Watch = PRINTED
) -> None:
    """The third stage: trains the network of the second in place, and leaves the exponential mean
    of its weights over the steps; the same seed and torch give the same weights."""
    trainer = Trainer("fill", network, muon(network), steps, watch, PARTS, AVERAGE)
    weights = {"canvas": 1.0, "reply": REPLY_WEIGHT, "prompt": ENCODER_WEIGHT}
    weights |= dict.fromkeys(("copies_of_reply", "copies_of_canvas"), LOOK_WEIGHT)
    weights |= {name: READS_WEIGHT * weight for name, weight in READ_WEIGHTS.items()}
    weights |= dict.fromkeys(ALL_LOOKS, READS_WEIGHT * LOOK_WEIGHT)

    def losses(reads: Reads, canvases: CanvasBatch, noise: torch.Generator) -> dict[str, Tensor]:
        return canvas_losses(network, canvases, noise) | read_losses(network, reads)

    rate, rows = partial(fill_rate, steps=steps), partial(fill_rows, seed)
    trainer.run(steps, rate, rows, losses, weights, HELPING)
    trainer.finish()


def new_tower(config: VisionConfig, generator: torch.Generator) -> VisionTower:
    """A tower in float32 that tells patches apart from the start: its first map is the cosine
    transform of a patch's grey levels, without their mean, so that paper and ink of any tone look
    alike; and patches look at those that are alike and near, since keys begin as queries. With even
    attention behind the same first map, 6 % of boards' digits at most were read after 155 steps."""
    tower = VisionTower(config)
    for parameter in tower.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.02, generator=generator)
        else:
            torch.nn.init.ones_(parameter)
    with torch.no_grad():
        tower.patch_embedding.weight.add_(_cosines(config.patch, config.hidden_size), alpha=0.25)
        tower.position_embedding.mul_(5)
        tower.projection.weight.mul_(0.2)
        for block in tower.blocks:
            own = block.self_attn
            own.k_proj.weight.copy_(own.q_proj.weight)
            own.q_norm.weight.fill_(2 * config.head_dim**-0.5)
    return tower


def _cosines(side: int, count: int) -> Tensor:
    """The first basis vectors of the cosine transform of grey squares but the constant one, from
    slow to fast, float32 [count, side · side · 3]; zeros where there are no more."""
    at, order = torch.arange(side), torch.arange(side)
    waves = torch.cos(math.pi / side * order[:, None] * (at + 0.5)) * (2 / side) ** 0.5
    waves[0] /= 2**0.5
    both = torch.cartesian_prod(order, order)[1:]
    both = both[(both**2).sum(1).argsort(stable=True)][:count]
    squares = waves[both[:, 0], :, None] * waves[both[:, 1], None, :]
    basis = torch.zeros(count, side * side, 3)
    basis[: len(both)] = squares.flatten(1)[..., None] / 3
    return basis.flatten(1)


def see_rows(seed: int, part: int) -> Iterator[tuple[PictureBatch, torch.Generator]]:
    """The rows of one part of the stage of pictures."""
    return _streams((seed, 4, part), lambda rng: pictures.batches(rng, SEE_ROWS, CANVAS))


def cosine_rate(peak: float, step: int, steps: int) -> float:
    """A linear warm-up, and a cosine."""
    return peak * warm_up(step) * fallen(math.pi * step / steps)


def train_digits(network: Transformer, steps: int, seed: int, watch: Watch) -> Tensor:
    """Ten vectors [10, hidden] that stand for digits: with one of them, and noise, at all places of
    a picture, the network, which stays as it is, says which digit it is. No text says this to the
    network: of 27 forms such as "Say 7" none was answered with the digit."""
    known = network.embed_tokens(torch.arange(len(TOKENS)), torch.float32)
    vectors = torch.nn.ParameterList([known[encode_text("0123456789")]])
    trainer = Trainer("digits", vectors, adamw(vectors), steps, watch, PARTS)
    spread = DIGITS_NOISE * known.std(0).mean()

    def rows(part: int) -> Iterator[tuple[PictureBatch, torch.Generator]]:
        return _streams(
            (seed, 5, part),
            lambda rng: pictures.batches(rng, DIGITS_ROWS, CANVAS, pictures.draw_asked),
        )

    def losses(batch: PictureBatch, noise: torch.Generator) -> dict[str, Tensor]:
        shape = (*batch.letters.shape, network.config.hidden_size)
        level = spread * torch.rand((), generator=noise)
        soft = vectors[0][batch.letters - pictures.DIGITS]
        for size in (shape, (shape[0], 1, shape[2])):  # of each place, and of all alike
            soft = soft + level * torch.randn(size, generator=noise)
        return picture_losses(network, soft, batch, noise)

    trainer.run(steps, lambda step: DIGITS_RATE * warm_up(step) * (1 - step / steps), rows, losses)
    return vectors[0].detach()


def train_see(
    network: Transformer, steps: int = SEE_STEPS, seed: int = 0, watch: Watch = PRINTED
) -> VisionTower:
    """The stage of pictures: a tower for the network of the third stage, which stays as it is; the
    same seed and torch give the same weights."""
    network.requires_grad_(False)
    alone = watch._replace(progress=lambda done, total: None)
    digits = train_digits(network, max(1, round(DIGITS_SHARE * steps)), seed, alone)
    known = network.embed_tokens(torch.arange(len(TOKENS)), torch.float32)
    known = torch.cat([known, digits])
    tower = new_tower(TOWER, torch.Generator().manual_seed(seed))
    trainer = Trainer("see", tower, muon(tower), steps, watch, PARTS, AVERAGE)

    def losses(batch: PictureBatch, noise: torch.Generator) -> dict[str, Tensor]:
        soft = soft_tokens(tower, batch.levels)
        letters = letter_loss(known, soft, batch.letters)
        return picture_losses(network, soft[:TEXT_ROWS], batch, noise) | {"letters": letters}

    rate = partial(cosine_rate, SEE_RATE, steps=steps)
    trainer.run(steps, rate, partial(see_rows, seed), losses)
    trainer.finish()
    return tower


def run(
    name: str,
    out: Path,
    steps: int | None = None,
    seed: int = 0,
    report: Callable[[str], None] = print,
    progress: Progress = lambda done, total: None,
    begin_with: Path | None = None,
    stage: int = 2,
) -> None:
    """Trains the recipe `name` and writes a checkpoint folder. steps: of each stage; None: the
    recipe's. begin_with: a checkpoint to begin `stage` with, 2 to 4; None: begin with nothing.

    Raises ValueError for a name that is no recipe or a checkpoint of another network, and
    CheckpointError for one that cannot be read."""
    if name == "masks" and begin_with is None:
        masks = train_masks(steps or MASK_STEPS, seed, Watch(report, progress))
        save_masks(masks, out)
        report(f"wrote {out}")
        return
    if name != "embedded":
        known = "'embedded', and 'masks', which begins with nothing"
        raise ValueError(f"recipe: {name!r} is not known; there are {known}")
    counts = [steps or each for each in (TALK_STEPS, DECIDE_STEPS, FILL_STEPS, SEE_STEPS)]
    first = 1 if begin_with is None else stage
    network = None if begin_with is None else load_weights(begin_with)
    done, total = 0, sum(counts[first - 1 :])
    for number, count in list(enumerate(counts, 1))[first - 1 :]:
        watch, tower = Watch(report, partial(_shown, progress, done, total)), None
        if network is None:
            network = train_talk(count, seed, watch)
        elif number == 4:
            tower = train_see(network, count, seed, watch)
        else:
            (train_decide if number == 2 else train_fill)(network, count, seed, watch)
        done += count
        save_checkpoint(network, out, tower)
        # What a stage begins with is what the checkpoint of the one before holds.
        network = load_weights(out)
    report(f"wrote {out}")


def _shown(progress: Progress, before: int, total: int, done: int, of_stage: int) -> None:
    progress(before + done, total)


def save_masks(network: Transformer, folder: Path) -> None:
    """Writes the second model as `save_checkpoint` does. It reveals what it is sure of at once: the
    static rule of its family takes a step for each token."""
    sampler = replace(
        defaults_of_process(BD3LM.canvas), sampler=LowConfidence(0.9), max_steps=CANVAS
    )
    save_checkpoint(network, folder, family=BD3LM, side=QWEN, sampler=sampler)


def load_weights(folder: Path) -> Transformer:
    """The network of a checkpoint of this recipe, in float32, to be trained on."""
    loaded = load(folder)
    if loaded.config.layers != EMBEDDED.layers or loaded.config.vocab_size != EMBEDDED.vocab_size:
        raise ValueError(f"from: {folder} is no checkpoint of the recipe 'embedded'")
    network = initialised(EMBEDDED, torch.Generator())
    weights = loaded.network.transformer.state_dict()
    network.load_state_dict({name: value.float() for name, value in weights.items()})
    return network


def save_checkpoint(
    network: Transformer,
    folder: Path,
    tower: VisionTower | None = None,
    family: Family = DIFFUSION_GEMMA,
    side: TextSide = GEMMA,
    sampler: SamplerConfig | None = None,
) -> None:
    """Writes config.json, generation_config.json with the sampler (None: the family's),
    model.safetensors (bfloat16) and the text side, in place of an earlier checkpoint: whole, or not
    at all.  `transformers` loads DiffusionGemma's folder too. Without a tower such a folder has an
    untrained one, which `transformers` asks for. Raises ValueError for a folder that is more than a
    checkpoint, and OSError."""
    folder.parent.mkdir(parents=True, exist_ok=True)

    def stored(module: torch.nn.Module, name_of: Callable[[str], str]) -> list[TensorStream]:
        values = module.state_dict().items()
        return [TensorStream.of(name_of(name), value, "BF16") for name, value in values]

    config, sampler = network.config, sampler or defaults_of_process(family.canvas)
    tensors = stored(network, family.tensor_names.transformers_name)
    if tower is None:
        files = config_files(family, config, sampler, config.eos_ids)
        untrained = family.config.hf_placeholders(config).items()
        tensors += [TensorStream.of(name, value, "BF16") for name, value in untrained]
    else:
        files = config_files(family, config, sampler, config.eos_ids, tower=tower.config)
        tensors += stored(tower, to_transformers)
        files["config.json"]["image_token_id"] = pictures.PLACEHOLDER
        # Nothing stands around a picture: a board is found by its distance from the canvas.
        files["config.json"] |= {"boi_token_id": None, "eoi_token_id": None}
    save_folder(folder, files, tensors, partial(write_text_side, side=side), force=True)
