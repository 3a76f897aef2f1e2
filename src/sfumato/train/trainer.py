"""The training loop: optimisers, gradients that several processes compute, and reports.

The parts of a step have a process each, on weights in shared memory: in threads of one process they
wait for each other's turn in the interpreter, since most of a step's operations are small.  Knows
no data and no objective; what a client draws for a step has to follow from the step's number, if
`state_dict` is to be all that a run goes on with.
"""

from __future__ import annotations

import math
import multiprocessing
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from sfumato.ops.fast_gradients import fast_ops
from sfumato.refused import Refused

CLIP = 1.0
BETAS = (0.9, 0.98)
SMOOTH = 0.97  # share of the earlier losses in those that a report shows
MATRICES = tuple(f"{name}_proj.weight" for name in ("q", "k", "v", "o", "gate", "up", "down"))
"""Ends of the names of those parameters that Muon trains; AdamW does the others."""
Gradients = tuple[tuple[Tensor, ...], dict[str, float]]
"""The gradient of every parameter that is learned, and the losses by name."""
Work = Callable[[int], Iterator[Gradients]]
"""What a part, by its number, computes in its steps, one after another."""
After = Callable[[dict[str, float]], bool]
"""Called after each step with its losses; False ends the run."""
Progress = Callable[[int, int], None]  # called with the steps done, and all of them


class Watch(NamedTuple):
    """`report` gets a line every so many steps, `progress` is called after each."""

    report: Callable[[str], None] = print
    progress: Progress = lambda done, total: None
    every: int = 100


PRINTED = Watch()
WARM_UP = 100


def warm_up(step: int, steps: int | None = None) -> float:
    """A line up to 1 in so many steps; None: WARM_UP."""
    return min(1.0, (step + 1) / (steps or WARM_UP))


def fallen(angle: float, least: float = 0.02) -> float:
    """A cosine from 1 at angle 0 down to `least` at angle π."""
    return least + (1 - least) * (0.5 * (1 + math.cos(angle)))


def adamw(
    network: nn.Module, betas: tuple[float, float] = BETAS, decay: float = 0.01
) -> list[torch.optim.Optimizer]:
    """AdamW for all parameters; matrices decay."""
    learned = [p for p in network.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in learned if p.ndim > 1], "weight_decay": decay},
        {"params": [p for p in learned if p.ndim == 1], "weight_decay": 0.0},
    ]
    return [torch.optim.AdamW(groups, betas=betas)]


def muon(network: nn.Module) -> list[torch.optim.Optimizer]:
    """Muon for MATRICES, AdamW for the others."""
    named = [(name, p) for name, p in network.named_parameters() if p.requires_grad]
    matrices = [p for name, p in named if name.endswith(MATRICES)]
    others = [p for name, p in named if not name.endswith(MATRICES)]
    return [
        # Equal steps in all directions of a matrix: reads were learnt in fewer steps with it.
        torch.optim.Muon(matrices, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, betas=BETAS, weight_decay=0.0),
    ]


class Trainer:
    """A network with its optimisers, and the number of steps done."""

    def __init__(
        self,
        name: str,
        network: nn.Module,
        optimisers: Sequence[torch.optim.Optimizer],
        steps: int,
        watch: Watch,
        parts: int = 0,
        average: float | None = None,
        accumulate: int = 1,
    ) -> None:
        """name: for reports; parts: of each step, computed with `fast_ops` (0: this process
        computes the steps, with plain operations); average: the share of the mean of the weights
        that a step leaves as it is (None: no mean is kept); accumulate: how many gradients, one
        after another, a step is the mean of, where there are no parts."""
        self.name, self.network, self.optimisers = name, network, optimisers
        self.steps, self.watch, self.parts, self.accumulate = steps, watch, parts, accumulate
        self.learned = [p for p in network.parameters() if p.requires_grad]
        self.done, self.start, self.smooth = 0, time.perf_counter(), dict[str, float]()
        self.mean = None
        if average is not None:
            self.mean = AveragedModel(network, multi_avg_fn=get_ema_multi_avg_fn(average))

    def gradients(
        self,
        losses: Mapping[str, Tensor],
        weights: Mapping[str, float],
        hidden: Collection[str] = (),
    ) -> Gradients:
        """The gradients of the sum of the weighted losses. hidden: losses that no report has."""
        total = sum(
            (weight * losses[name] for name, weight in weights.items()),
            torch.zeros((), device=self.learned[0].device),
        )
        # Without a soft embedding, what reads it has no gradient: one process then leaves it as it
        # is, for several the gradient is zero.
        if not total.requires_grad:
            total = total.requires_grad_()  # nothing that is learned was used at all
        of_parameters = torch.autograd.grad(
            total, self.learned, allow_unused=True, materialize_grads=self.parts > 0
        )
        return of_parameters, {name: losses[name].item() for name in losses if name not in hidden}

    def step(self, results: Iterable[Gradients], rate: float) -> dict[str, float]:
        """One step at this learning rate, on the mean of these gradients; returns the mean of each
        loss over those that have it. Raises Refused where a gradient is not finite; then nothing
        has changed."""
        values: dict[str, list[float]] = {}
        count = 0
        for gradients, losses in results:
            count += 1
            for parameter, own in zip(self.learned, gradients, strict=True):
                if own is not None:
                    parameter.grad = own if parameter.grad is None else parameter.grad + own
            for name, value in losses.items():
                values.setdefault(name, []).append(value)
            del gradients  # the next part's need the room
        for parameter in self.learned:
            if parameter.grad is not None:
                parameter.grad = parameter.grad / count
        norm = torch.nn.utils.clip_grad_norm_(self.learned, CLIP)
        if not norm.isfinite():
            why = f"the gradient of step {self.done + 1} is not finite"
            raise Refused("rate", why, "begin again with a lower one")
        for optimiser in self.optimisers:
            for group in optimiser.param_groups:
                group["lr"] = rate
            optimiser.step()
            optimiser.zero_grad()
        self.done += 1
        if self.mean is not None:
            self.mean.update_parameters(self.network)
        return {name: sum(each) / len(each) for name, each in values.items()}

    def run(
        self,
        until: int,
        rate: Callable[[int], float],
        rows: Callable[[int], Iterable[Any]],
        losses_of: Callable[..., dict[str, Tensor]],
        weights: Mapping[str, float] | None = None,
        hidden: Collection[str] = (),
        after: After = lambda losses: True,
    ) -> None:
        """Takes steps until so many are done, each at the rate of its number. rows: what a part, by
        its number, reads in its steps, one after another: arguments of `losses_of`; weights: of the
        losses (None: 1 each); hidden: see `gradients`."""

        def work(part: int) -> Iterator[Gradients]:
            for read in rows(part):
                losses = losses_of(*read)
                yield self.gradients(losses, weights or dict.fromkeys(losses, 1.0), hidden)

        with self._results(work) as results:
            while self.done < until:
                losses = self.step(results(), rate(self.done))
                for name, value in losses.items():
                    before = self.smooth.get(name, value)
                    self.smooth[name] = SMOOTH * before + (1 - SMOOTH) * value
                self.watch.progress(self.done, self.steps)
                if self.done % self.watch.every == 0:
                    self._report()
                if not after(losses):
                    return

    def state_dict(self) -> dict[str, Any]:
        """All that a run goes on with, tensors and plain values: what is learned, the optimisers,
        the number of steps done, and what reports show."""
        return {
            "done": self.done,
            "smooth": dict(self.smooth),
            "learned": [parameter.detach() for parameter in self.learned],
            "optimisers": [optimiser.state_dict() for optimiser in self.optimisers],
            "mean": None if self.mean is None else self.mean.state_dict(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from there. Raises ValueError for the state of another network."""
        for parameter, value in zip(self.learned, state["learned"], strict=True):
            if parameter.shape != value.shape:
                raise ValueError(
                    f"has a tensor of {tuple(value.shape)} for {tuple(parameter.shape)}"
                )
            parameter.copy_(value)
        for optimiser, own in zip(self.optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(own)
        if self.mean is not None:
            self.mean.load_state_dict(state["mean"])
        self.done, self.smooth = state["done"], dict(state["smooth"])

    def finish(self) -> None:
        """Gives the network the mean of its weights over the steps."""
        assert self.mean is not None
        self.network.load_state_dict(self.mean.module.state_dict())

    @contextmanager
    def _results(self, work: Work) -> Iterator[Callable[[], Iterable[Gradients]]]:
        """What computes the next gradients of all parts."""
        if not self.parts:
            steps = work(0)
            yield lambda: islice(steps, self.accumulate)
            return
        with fast_ops(), part_processes(self.learned, work, self.parts) as results:
            yield results

    def _report(self) -> None:
        spent = time.perf_counter() - self.start
        losses = ", ".join(f"{name} {value:.4f}" for name, value in self.smooth.items())
        self.watch.report(
            f"{self.name}, step {self.done} of {self.steps}: {losses}, "
            f"{spent / self.done * 1e3:.0f} ms a step, {spent / 60:.1f} min"
        )


@contextmanager
def part_processes(
    learned: Sequence[Tensor], work: Work, count: int
) -> Iterator[Callable[[], list[Gradients]]]:
    """What computes the next gradients of `count` parts, valid until the next call.

    learned: the parameters, which move to shared memory. Where the system cannot fork, the parts
    follow each other in this process, with the same results. The call raises what the work of a
    part raises, and RuntimeError where its process has died."""
    if "fork" not in multiprocessing.get_all_start_methods():
        here = [work(part) for part in range(count)]
        yield lambda: [next(steps) for steps in here]
        return
    for parameter in learned:
        parameter.data = parameter.data.share_memory_()
    context, parts = multiprocessing.get_context("fork"), []
    for part in range(count):
        shared = tuple(torch.zeros_like(parameter.data).share_memory_() for parameter in learned)
        pipe, end = context.Pipe()
        process = context.Process(target=_compute, args=(end, work, part, shared), daemon=True)
        process.start()
        # The child's alone from now on: where it dies, reading here ends.
        end.close()
        parts.append((process, pipe, shared))

    def results() -> list[Gradients]:
        for _, pipe, _ in parts:
            pipe.send(True)
        return [(shared, _received(pipe)) for _, pipe, shared in parts]

    try:
        yield results
    finally:
        for process, pipe, _ in parts:
            pipe.close()
            process.terminate()
            process.join()


def _received(pipe: Connection) -> dict[str, float]:
    try:
        result = pipe.recv()
    except EOFError:
        raise RuntimeError("train: a process that computes gradients has died") from None
    if isinstance(result, BaseException):
        raise result
    losses: dict[str, float] = result
    return losses


def _compute(pipe: Connection, work: Work, part: int, shared: Sequence[Tensor]) -> None:
    """The life of a process: one step's gradients for every message."""
    # The parts share the processor's cores; and threads of OpenMP do not outlive a fork.
    torch.set_num_threads(1)
    steps = work(part)
    try:
        while pipe.recv():
            gradients, losses = next(steps)
            for place, gradient in zip(shared, gradients, strict=True):
                place.copy_(gradient)
            pipe.send(losses)
    except (EOFError, KeyboardInterrupt):
        return
    except Exception as error:
        pipe.send(error)
