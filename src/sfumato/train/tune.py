"""Tunes a loaded model on conversations: an adapter, or all weights.

`tune` is `sfumato tune` in Python.  What a step draws follows from the seed and its number, so that
a run that goes on from a checkpoint has the numbers of one that was never interrupted, on the same
machine.  Knows no command line.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from sfumato.api import Model
from sfumato.convert import write_changed
from sfumato.diffusion.canvas import Canvas
from sfumato.engine.memory.device_memory import budget
from sfumato.model.adapter_files import AdapterFile, write_peft
from sfumato.model.adapters import NONE, Adapted, Adapter, LowRank
from sfumato.model.families import open_checkpoint
from sfumato.model.loading import expected_shapes
from sfumato.model.model_config import ModelConfig
from sfumato.model.network import Network
from sfumato.options.tuning import TUNING
from sfumato.refused import Refused
from sfumato.tasks.alone import alone, finish
from sfumato.tasks.reply import ReplyTask
from sfumato.tasks.works import Prompt
from sfumato.train.canvas_rows import collate
from sfumato.train.chats import Canvases, Exchange, exchanges, read_chats, split
from sfumato.train.memory import Trained, step_memory, targeted
from sfumato.train.objective import Pictures, loss, mask_loss
from sfumato.train.run_folder import ADAPTER, CURVES, MODEL, SAMPLES, RunFolder
from sfumato.train.trainer import Trainer, Watch, adamw, fallen, warm_up
from sfumato.values import size
from sfumato.weights.formats import Stored

NUMBER = 1 << 30
"""The number under which the adapter is attached while it is tuned; those of `Model.adapters` count
from 1."""
MOST_HELD_OUT = 256
"""Held-out rows that an evaluation reads."""
MOST_ANSWER = 512  # tokens of an answer to a held-out prompt
BETAS = (0.95, 0.99)  # of Google's fine-tuning
LAST_WARM_UP = 0.1  # share of the steps along which the rate may rise

Progress = Callable[[int, int, str], None]
"""Called with the steps done, all of them, and a text for people."""


@dataclass(frozen=True)
class Tuning:
    """How a model is tuned; `options.tuning.TUNING` says what each means and which values it takes.
    Raises Refused, naming the field."""

    full: bool = False
    targets: tuple[str, ...] = ("attention", "mlp", "self-conditioning")
    rank: int = 16
    alpha: float = 32.0
    context: int = 1024
    long: str = "refuse"
    replies_only: bool = False
    encoder_weight: float = 1.0
    epochs: float = 3.0
    steps: int | None = None
    batch: int = 8
    at_once: int = 1
    rate: float = 1.5e-4
    last_rate: float = 1.5e-5
    warm_up: int = 100
    weight_decay: float = 1e-4
    recompute: bool = False
    eval_every: int | None = None
    patience: int = 5
    samples: int = 2
    save_every: int | None = None
    keep: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        for each in TUNING:
            value = getattr(self, each.name)
            if value is None and each.default is None:
                continue
            try:
                each.kind.accept(list(value) if isinstance(value, tuple) else value)
            except ValueError as error:
                raise Refused(each.name, str(error)) from None
        if self.batch % self.at_once:
            raise Refused("at_once", f"{self.at_once} does not divide the batch of {self.batch}")
        if self.last_rate > self.rate:
            raise Refused("last_rate", f"{self.last_rate:g} is over the rate of {self.rate:g}")


class Tuned(NamedTuple):
    """What a run came to."""

    out: Path  # of the adapter's folder, or of the checkpoint
    steps: int  # done
    loss: float  # of the last step's canvases, in nats a token
    held_out: float | None  # the lowest, in nats a token
    ended: str  # "steps", "patience" or "stopped"


def tune(
    model: Model,
    data: str | Path,
    out: str | Path,
    tuning: Tuning = Tuning(),
    *,
    held_out: float | str | Path = 0.1,
    resume: bool = False,
    force: bool = False,
    progress: Progress = lambda done, total, more: None,
    report: Callable[[str], None] = lambda line: None,
    stopped: Callable[[], bool] = lambda: False,
) -> Tuned:
    """Tunes a model on the conversations of a file of JSON Lines, or of a folder of `datasets`.

    model: of `sfumato.load`, with float or quantized weights, on one device. Afterwards it is as it
    was, or has the weights of the last step of a full tuning; `model.adapters` loads what was
    written. out: a folder, which gets `adapter/` (PEFT's files) or, of a full
    tuning, `model/` (a checkpoint), and beside it checkpoints, `curves.jsonl`, `curves.svg`,
    `samples.jsonl` and `tuning.json`. held_out: a share of the conversations, 0 for none, or a file
    of others. resume: goes on with the run that is in `out`; force: replaces it. stopped: called
    after each step; True ends the run with a checkpoint.

    With held-out rows, what is written is that of the evaluation with the lowest loss.

    Raises Refused, naming the file, line and field or the choice, for what cannot be tuned;
    CheckpointError for a damaged state; ValueError or OSError where the disk is full: the last
    checkpoint is whole then.
    """
    read = {"model": model.path, "data": data, "held_out": held_out}
    for name, path in read.items():
        if isinstance(path, str | Path) and Path(path).resolve().is_relative_to(
            Path(out).resolve()
        ):
            raise Refused("out", f"{out} has the {name} in it, {path}", "name another folder")
    run = _Run(model, Path(data), Path(out), tuning, held_out, progress, report, stopped)
    transformer = model.network.transformer
    try:
        return run.run(resume, force)
    finally:
        transformer.detach(NUMBER)
        transformer.requires_grad_(False)
        transformer.recomputes_layers = False


def new_adapter(
    config: ModelConfig, tuning: Tuning, device: torch.device, generator: torch.Generator
) -> dict[str, LowRank]:
    """An adapter that changes nothing yet: `down` uniform as PEFT draws it, in ± 1 / sqrt(inputs),
    `up` zeros, both float32 parameters. Raises Refused where there is nothing of that kind."""
    changes = dict[str, LowRank]()
    for path, (*lead, outputs, inputs) in targeted(config, tuning.targets).items():
        bound = inputs**-0.5
        down = torch.empty(*lead, tuning.rank, inputs).uniform_(-bound, bound, generator=generator)
        up = torch.zeros(*lead, outputs, tuning.rank)
        down, up = (nn.Parameter(each.to(device)) for each in (down, up))
        changes[path] = LowRank(down, up, tuning.alpha / tuning.rank)
    if not changes:
        raise Refused("targets", f"this network has no {' and no '.join(tuning.targets)}")
    return changes


class Rows:
    """The rows of a data file in the order of training, by the number of their part of a step.

    A step has rows of all kinds, drawn at random: steps of one kind each would forget the others.
    Its parts have rows of similar lengths, which need fewer pads."""

    def __init__(self, rows: Sequence[Exchange], size: int, parts: int, seed: int) -> None:
        """size: rows of a part; parts: of a step."""
        self.rows, self.size, self.parts, self.seed = rows, size, parts, seed
        # A step's parts follow each other, and a step may have rows of two epochs.
        self._order = lru_cache(2)(self._permuted)
        self._of_step = lru_cache(1)(self._sorted)

    def _permuted(self, epoch: int) -> list[int]:
        order: list[int] = (
            np.random.default_rng((self.seed, 2, epoch)).permutation(len(self.rows)).tolist()
        )
        return order

    def batch(self, number: int) -> list[Exchange]:
        """The rows of a part. Each row comes once before any comes again."""
        step, part = divmod(number, self.parts)
        return self._of_step(step)[part * self.size : (part + 1) * self.size]

    def _sorted(self, step: int) -> list[Exchange]:
        """The rows of a step, by length."""
        count = self.size * self.parts
        drawn = (divmod(at, len(self.rows)) for at in range(step * count, (step + 1) * count))
        rows = [self.rows[self._order(epoch)[at]] for epoch, at in drawn]
        return sorted(rows, key=lambda row: len(row.prompt) + len(row.reply))


def pictures_of(network: Network, rows: Sequence[Exchange], shape: torch.Size) -> Pictures | None:
    """The soft tokens of the rows' pictures, computed by the tower, which stays as it is; None
    where there are none. shape: of the padded contexts."""
    numbers, where, values = torch.zeros(shape, dtype=torch.int64), list[int](), list[Tensor]()
    for i, row in enumerate(rows):
        for number, picture in enumerate(row.pictures, 1):
            numbers[i, picture.start : picture.end] = number
            where += range(i * shape[1] + picture.start, i * shape[1] + picture.end)
            pixels = torch.from_numpy(picture.patches.values())
            values.append(network.soft_tokens(pixels, picture.patches.columns))
    if not values:
        return None
    device = network.device
    return Pictures(torch.tensor(where).to(device), torch.cat(values), numbers.to(device))


class _Run:
    def __init__(
        self,
        model: Model,
        data: Path,
        out: Path,
        tuning: Tuning,
        held_out: float | str | Path,
        progress: Progress,
        report: Callable[[str], None],
        stopped: Callable[[], bool],
    ) -> None:
        self.model, self.network, self.tuning = model, model.network, tuning
        self._hides = model.family.canvas.noise == "mask"
        self.progress, self.report, self.stopped = progress, report, stopped
        if self.network.is_mixed:
            raise Refused("model", "has layers on several devices", "tune it on one device")
        if self.network.dtype == torch.float16:
            why = "small gradients vanish in float16, and losses are not scaled here"
            raise Refused("dtype", why, "use --dtype bfloat16 or float32")
        self.canvases = Canvases.of(model, tuning.context, tuning.long)
        learnt, held = _split(read_chats(data), held_out, tuning.seed)
        self.held = exchanges(held, self.canvases)[:MOST_HELD_OUT]
        if held and not self.held:
            report("no held-out row fits: nothing is held out, and the last step is written")
        rows = exchanges(learnt, self.canvases)
        if not rows:
            raise Refused(str(data), "has no row that fits", "raise --context")
        self.many = tuning.batch // tuning.at_once
        self.rows = Rows(rows, tuning.at_once, self.many, tuning.seed)
        count = math.ceil(tuning.epochs * len(rows) / tuning.batch)
        self.steps = tuning.steps or max(1, count)
        self.folder = RunFolder(out, self._settings(), tuning.keep)
        self.adapter = None if tuning.full else self._adapter()
        self.trainer = self._trainer()
        self.best: dict[str, Any] = {"loss": None, "learned": None}
        self.waited, self.tokens, self.seconds, self.last = 0, 0, 0.0, math.nan
        self.saved, self.ended = -1, "steps"

    def _settings(self) -> dict[str, Any]:
        """What all numbers of the run depend on."""
        free = {"keep", "samples", "recompute"}
        chosen = {name: value for name, value in asdict(self.tuning).items() if name not in free}
        known = {
            **{
                name: value for name, value in asdict(self.model.identity).items() if name != "name"
            },
            "data": _digest(self.rows.rows),
            "held_out": _digest(self.held),
        }
        return known | chosen | {"targets": list(self.tuning.targets), "steps": self.steps}

    def _adapter(self) -> Adapter:
        generator = torch.Generator().manual_seed(self.tuning.seed)
        transformer, device = self.network.transformer, self.network.device
        transformer.requires_grad_(False)
        adapter = new_adapter(self.network.config, self.tuning, device, generator)
        transformer.attach(NUMBER, adapter)
        return adapter

    def _trainer(self) -> Trainer:
        transformer, tuning = self.network.transformer, self.tuning
        transformer.recomputes_layers = tuning.recompute
        if self.adapter is None:
            floats = {
                name for name, p in transformer.named_parameters() if p.dtype == torch.float32
            }
            if not floats >= expected_shapes(self.network.config).keys():
                raise Refused("full", "a full tuning needs float32 weights", "use --dtype float32")
            learned: nn.Module = transformer.requires_grad_(True)
            for (
                parameter
            ) in learned.parameters():  # a view of the file, perhaps: none may be written
                parameter.data = parameter.data.clone()
        else:
            factors = [
                each for change in self.adapter.values() for each in (change.down, change.up)
            ]
            learned = nn.ParameterList(factors)
        optimisers = adamw(learned, BETAS, tuning.weight_decay)
        watch = Watch(lambda line: None, lambda done, total: None)
        return Trainer("tune", learned, optimisers, self.steps, watch, accumulate=self.many)

    def run(self, resume: bool, force: bool) -> Tuned:
        """See `tune`."""
        state = self.folder.begin(resume, force)
        if state is not None:
            self.trainer.load_state_dict(state)
            self.best, self.waited = state["best"], state["waited"]
            self.tokens, self.seconds, self.saved = state["tokens"], state["seconds"], state["done"]
            self.last = state["last"]
        self._check_memory()
        self.began = time.perf_counter()
        if self._is_over():
            self.ended = "patience"
        elif self.trainer.done < self.steps:
            self.trainer.run(
                self.steps, self._rate, self._work, self._losses, self._weights(), (), self._after
            )
        if self.saved != self.trainer.done:
            self._save()
        else:  # a run that was killed may have no result of its last checkpoint
            self._write_result()
        self.folder.plot()
        name = MODEL if self.adapter is None else ADAPTER
        return Tuned(
            self.folder.path / name, self.trainer.done, self.last, self.best["loss"], self.ended
        )

    def _check_memory(self) -> None:
        """Raises Refused where a step takes more than is free beside the loaded model."""
        tuning, network = self.tuning, self.network
        shows = any(row.pictures for row in (*self.rows.rows, *self.held))
        vision = network.tower.config if network.tower is not None and shows else None
        learned = sum(each.numel() for each in self.trainer.learned)
        experts = network.transformer.blocks[0].experts
        trained = Trained(
            () if tuning.full else tuning.targets,
            tuning.rank,
            tuning.full,
            experts is not None and isinstance(experts.gate_up_proj, Stored),
            sums=self.many > 1,
            keeps=bool(self.held),
        )

        def memory(tokens: int, recompute: bool) -> int:
            how = tokens, tuning.at_once, network.dtype, recompute, trained
            return step_memory(network.config, 0, learned, *how, vision).total

        longest, held = (
            max((len(row.prompt) + len(row.reply) for row in rows), default=0)
            for rows in (self.rows.rows, self.held)
        )
        # An evaluation keeps less than a step whose layers are computed again.
        needed = max(memory(longest, tuning.recompute), memory(held, True) if held else 0)
        free, most = budget(network.device), max(longest, held)
        what = f"a step with rows of up to {most:,} tokens takes about {size(needed)} of memory"
        self.report(f"{what} beside the model")
        if free is not None and needed > free.nbytes:
            less = "lower --context, --at-once or --rank"
            advice = less if tuning.recompute else f"{less}, or set --recompute"
            raise Refused(
                "context", f"{what}, and {size(free.nbytes)} are free ({free.source})", advice
            )

    def _rate(self, step: int) -> float:
        tuning = self.tuning
        rises = min(tuning.warm_up, max(1, round(LAST_WARM_UP * self.steps)))
        curve = fallen(math.pi * step / self.steps, tuning.last_rate / tuning.rate)
        return tuning.rate * warm_up(step, rises) * curve

    def _work(self, part: int) -> Iterator[tuple[list[Exchange], tuple[int, ...]]]:
        for number in itertools.count(self.trainer.done * self.many):
            yield self.rows.batch(number), (4, number)

    def _weights(self) -> dict[str, float]:
        of_encoder = {} if self._hides else {"encoder": self.tuning.encoder_weight}
        return {"canvas": 1.0} | of_encoder

    def _losses(self, rows: Sequence[Exchange], key: tuple[int, ...]) -> dict[str, Tensor]:
        """The objective of a canvas of each row; the draws follow from the key."""
        rng = np.random.default_rng((self.tuning.seed, *key))
        noise = torch.Generator().manual_seed(int(rng.integers(2**62)))
        drawn = [int(rng.integers(self.canvases.count(row))) for row in rows]
        made = [self.canvases.row(row, at) for row, at in zip(rows, drawn, strict=True)]
        batch, network = collate(made).to(self.network.device), self.network
        self.tokens += sum(len(row.prefix) + len(row.text) + len(row.target) for row in made)
        how: Any = {"adapted": () if self.adapter is None else (Adapted(NUMBER),)}
        how["dtype"] = network.dtype
        if self._hides:
            return mask_loss(network.transformer, batch, noise, **how)
        how["pictures"] = pictures_of(network, rows, batch.context.shape)
        prompts = not self.tuning.replies_only
        return loss(network.transformer, batch, noise, each_row=True, prompts=prompts, **how)

    def _after(self, losses: dict[str, float]) -> bool:
        """What follows a step; False where it was the last one."""
        done, tuning = self.trainer.done, self.tuning
        self.last = losses["canvas"]
        spent = self.seconds + time.perf_counter() - self.began
        line = {"step": done, "rate": self._rate(done - 1), "tokens": self.tokens, "seconds": spent}
        self.folder.add(CURVES, line | {"losses": losses})
        speed = self.tokens / max(spent, 1e-9)
        shown = self.trainer.smooth["canvas"]
        self.progress(done, self.steps, f"loss {shown:.4f}, {speed:,.0f} tokens/s")
        is_last = done == self.steps
        if self.held and (is_last or done % (tuning.eval_every or -(-self.steps // 10)) == 0):
            self._evaluate()
        if self._is_over():
            self.ended = "patience"
        elif not is_last and self.stopped():
            self.ended = "stopped"
        elif done % (tuning.save_every or -(-self.steps // 20)) == 0:
            self._save()
        return self.ended == "steps"

    def _is_over(self) -> bool:
        return 0 < self.tuning.patience <= self.waited

    @torch.no_grad()
    def _evaluate(self) -> None:
        """The losses of held-out rows, with the same noise at each evaluation, and answers."""
        tokens, size = self.tokens, self.tuning.at_once
        sums: dict[str, float] = {}
        for number, first in enumerate(range(0, len(self.held), size)):
            rows = self.held[first : first + size]
            for name, loss_of in self._losses(rows, (5, number)).items():
                sums[name] = sums.get(name, 0.0) + loss_of.item() * len(rows) / len(self.held)
        self.tokens = tokens
        done, value = self.trainer.done, sums["canvas"]
        self.folder.add(
            CURVES, {"step": done, "losses": {f"held-out {name}": x for name, x in sums.items()}}
        )
        if self.best["loss"] is None or value < self.best["loss"]:
            learned = [each.detach().clone() for each in self.trainer.learned]
            self.best, self.waited = {"loss": value, "learned": learned}, 0
        else:
            self.waited += 1
        self.report(f"step {done}: held-out loss {value:.4f}, lowest {self.best['loss']:.4f}")
        for row in self.held[: self.tuning.samples]:
            self._answer(row)
        self.folder.plot()

    def _answer(self, row: Exchange) -> None:
        """Answers a held-out prompt with what has been learnt so far."""
        most = min(MOST_ANSWER, len(row.reply) + self.canvases.length)
        model, make = self.model, partial(Canvas.of, network=self.network)
        prompt = Prompt(list(row.prompt), (), row.pictures)
        plan, transcript = model.plan_reply(prompt.ids, most, self.tuning.seed)
        number = NONE if self.adapter is None else NUMBER
        task = ReplyTask(plan, prompt, make, text=transcript)
        reply = finish(alone(self.network, task, adapter=number))
        expected = self.model.tokenizer.decode(list(row.reply))
        line = {"step": self.trainer.done, "row": row.where, "reply": reply.text}
        self.folder.add(SAMPLES, line | {"expected": expected})
        self.report(f"  {row.where}: {reply.text[:200]!r}, and {expected[:200]!r} was said")

    def _save(self) -> None:
        """Writes a checkpoint, and what has been learnt."""
        spent = self.seconds + time.perf_counter() - self.began
        own = {"best": self.best, "waited": self.waited, "tokens": self.tokens, "seconds": spent}
        self.folder.save(self.trainer.state_dict() | own | {"last": self.last}, self.trainer.done)
        self.saved = self.trainer.done
        self._write_result()

    def _write_result(self) -> None:
        """Writes the adapter, or the model, of the best evaluation, or of the last step."""
        learned = self.best["learned"] or [each.detach() for each in self.trainer.learned]
        if self.adapter is None:
            names = [name for name, _ in self.network.transformer.named_parameters()]
            source, tower = open_checkpoint(self.model.path), self.network.tower
            weights, path = dict(zip(names, learned, strict=True)), self.folder.path / MODEL
            write_changed(source, weights, path, None if tower is None else tower.opened)
            return
        factors = iter(learned)
        changes = {
            path: LowRank(next(factors), next(factors), each.scale)
            for path, each in self.adapter.items()
        }
        file = AdapterFile(changes, self.tuning.rank, self.tuning.alpha, str(self.model.path.name))
        path = self.folder.path / ADAPTER
        write_peft(path, file, self.model.family, self.network.config, force=True)


def _digest(rows: Sequence[Exchange]) -> str:
    """A hash of all tokens of these rows, in their order."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(f"{list(row.prompt)} {list(row.reply)}\n".encode())
    return digest.hexdigest()


def _split(chats: Sequence[Any], held_out: float | str | Path, seed: int) -> tuple[Any, Any]:
    """The conversations to learn, and those that are held out."""
    if isinstance(held_out, str | Path):
        return chats, read_chats(Path(held_out))
    if not 0 <= held_out < 1:
        raise Refused("held_out", f"{held_out:g} is no share from 0 to under 1, and no file")
    return split(chats, held_out, seed) if held_out else (chats, [])


assert {each.name for each in fields(Tuning)} == {each.name for each in TUNING}
