"""One fill under way: which canvases are denoised, which are scored, and what they gave.

A hole whose length or text is open is filled in several ways, each on a canvas of its own: a trial.
The trials of a round are rows of one batch that share the prefix. The trial whose hole and
following text have the highest likelihood decides the hole; then the next such hole is tried. Runs
nothing: the plain loop (fill.py) and the engine do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from sfumato.diffusion.canvas import Canvas, Draft
from sfumato.diffusion.constraints.fill_plan import Filling, FillPlan, Form
from sfumato.diffusion.constraints.hole_search import HoleSearch, Tried
from sfumato.diffusion.constraints.template import NOISE
from sfumato.diffusion.noise import Noise
from sfumato.diffusion.outcome import Stats
from sfumato.model.network import Network


@dataclass(eq=False)
class Trial:
    """One canvas of a fill."""

    form: Form
    filling: Filling | None  # of the hole that is tried; None: every hole is decided
    canvas: Canvas | None  # None: no position is open
    ids: list[int]  # of the canvas, once it has settled
    draft: Draft | None = None  # of its last step


@dataclass(frozen=True)
class ScoreTask:
    """Tokens whose log-likelihood is wanted: ids[first:], after the prefix and ids[:first]."""

    prefix: list[int]
    ids: list[int]
    first: int


@dataclass(frozen=True)
class FillOutcome:
    """What the holes of a text were filled with, as ids."""

    holes: tuple[list[int], ...]
    # Of each hole, the most probable tokens of the step that settled it, and their probabilities:
    # int64 and float32 [tokens, top]; None where no position of the canvas was open.
    top: tuple[tuple[Tensor, Tensor] | None, ...]
    tried: tuple[tuple[Tried, ...], ...]  # of each hole; none where nothing was scored
    stats: Stats
    warnings: tuple[str, ...]


class FillProgress:
    """The rounds of one fill.

    Until it is `done`: the canvases in `open` are to be stepped, each step given to `took`; where
    none is open, `tasks` are to be scored, and the scores given to `scored`.
    """

    def __init__(self, plan: FillPlan, network: Network) -> None:
        self.plan, self._network = plan, network
        self.stats = Stats(prompt_tokens=len(plan.template.prefix))
        self.canvas_tokens = 0  # positions of the canvases that have settled
        self.round = 0
        template = plan.template
        self._searches = {
            number: HoleSearch(hole, template.choices[number])
            for number, hole in enumerate(template.holes)
            if hole.varies
        }
        only = {n: search.best for n, search in self._searches.items() if search.is_decided}
        self._fillings: dict[int, Filling] = only  # of the holes that are decided
        self._undecided = [number for number in self._searches if number not in only]
        self._best: tuple[float, Trial] | None = None  # of the hole that is tried
        self._result: Trial | None = None
        self._trials: list[Trial] = []
        if self._undecided:
            self._try(self._searches[self._undecided[0]].next())
        else:
            self._trials = [self._trial(None)]
            self._take_only()

    @property
    def done(self) -> bool:
        return self._result is not None

    @property
    def open(self) -> list[Canvas]:
        """Canvases that have not settled."""
        return [t.canvas for t in self._trials if t.canvas is not None and not t.canvas.done]

    @property
    def shown(self) -> Canvas | None:
        """The canvas of the round whose drafts are shown, the longest one; None once it has
        settled."""
        canvases = [t.canvas for t in self._trials if t.canvas is not None]
        longest = max(canvases, key=lambda canvas: canvas.length, default=None)
        return None if longest is None or longest.done else longest

    def took(self, canvas: Canvas, draft: Draft) -> None:
        """A step of a canvas."""
        if not canvas.done:
            return
        trial = next(trial for trial in self._trials if trial.canvas is canvas)
        trial.ids, trial.draft = draft.token_ids.tolist(), draft
        assert canvas.convergence
        self.canvas_tokens += canvas.length
        self.stats.canvases += 1
        self.stats.steps.append(draft.step)
        self.stats.convergence.append(canvas.convergence)
        self._take_only()

    def tasks(self) -> list[ScoreTask]:
        """What is to be scored, once no canvas is open: each trial's hole, and what follows it up
        to the next hole that is not decided."""
        assert not (self.open or self.done)
        hole, *later = self._undecided
        tasks = []
        for trial in self._trials:
            end = trial.form.holes[later[0]].start if later else trial.form.content
            start, prefix = trial.form.holes[hole].start, self.plan.template.prefix
            tasks.append(ScoreTask(prefix, trial.ids[:end], start))
        return tasks

    def scored(self, scores: Sequence[float]) -> None:
        """The log-likelihoods of the tasks, in nats and in their order."""
        hole = self._undecided[0]
        search = self._searches[hole]
        for trial, score in zip(self._trials, scores, strict=True):
            assert trial.filling is not None
            ids = tuple(trial.ids[trial.form.holes[hole]])
            search.scored(trial.filling, Tried(ids, score))
            if self._best is None or score > self._best[0]:
                self._best = score, trial
        assert self._best
        self.round += 1
        fillings = search.next()
        if not fillings:
            self._fillings[hole] = search.best
            self._undecided.pop(0)
            if not self._undecided:
                self._result = self._best[1]
                return
            self._best = None
            fillings = self._searches[self._undecided[0]].next()
        self._try(fillings)

    def outcome(self, total_s: float) -> FillOutcome:
        """The holes' tokens, once all is done."""
        assert self._result is not None
        trial, template = self._result, self.plan.template
        spans, draft = trial.form.holes, trial.draft
        holes = tuple(trial.ids[span] for span in spans)
        top = (None if draft is None else (draft.top_ids[s], draft.top_probs[s]) for s in spans)
        self.stats.output_tokens, self.stats.total_s = sum(map(len, holes)), total_s
        return FillOutcome(
            holes,
            tuple(top),
            tuple(
                tuple(self._searches[number].tried) if number in self._searches else ()
                for number in range(len(template.holes))
            ),
            self.stats,
            template.warnings,
        )

    def _try(self, fillings: Sequence[Filling]) -> None:
        self._trials = [self._trial(filling) for filling in fillings]

    def _trial(self, filling: Filling | None) -> Trial:
        """filling: of the first hole that is not decided; None: every hole is decided."""
        fillings = dict(self._fillings)
        if filling is not None:
            fillings[self._undecided[0]] = filling
        form = self.plan.template.form(fillings)
        ids = list(form.ids)
        if NOISE not in ids:
            return Trial(form, filling, None, ids)
        config = replace(self.plan.config, canvas_length=len(ids))
        # The same noise in every trial: what fills a hole does not depend on what else is tried.
        noise = Noise(self.plan.seed, 0)
        vocab, device = self._network.config.vocab_size, self._network.device
        canvas = Canvas(config, noise, vocab, device, (), form.pins, bare_pins=True)
        return Trial(form, filling, canvas, ids)

    def _take_only(self) -> None:
        """The result, where there is one canvas and it has settled."""
        if not self.open and self._trials[0].filling is None:
            self._result = self._trials[0]
