"""A text with holes: each hole is filled on canvases, and the best length or choice is kept.

A hole whose length or text is open is filled in several ways, each on a canvas of its own: a trial.
The trials of a round are denoised side by side. The trial whose hole and following text have the
highest likelihood decides the hole; then the next such hole is tried.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sfumato.diffusion.canvas import Canvas, CanvasPlan, Draft
from sfumato.diffusion.constraints.filling import (
    Filling,
    FillOutcome,
    FillPlan,
    Form,
    HoleSearch,
    Tried,
)
from sfumato.diffusion.constraints.read_template import NOISE
from sfumato.diffusion.limits import ReplyText, Stats
from sfumato.diffusion.noise import Noise
from sfumato.tasks.works import (
    Claim,
    Denoise,
    Encode,
    Figures,
    Likelihood,
    MakeCanvas,
    Prompt,
    Score,
)


@dataclass(eq=False)
class Trial:
    """One canvas of a fill."""

    form: Form
    filling: Filling | None  # of the hole that is tried; None: every hole is decided
    canvas: Canvas | None  # None: no position is open
    ids: list[int]  # of the canvas, once it has settled
    draft: Draft | None = None  # of its last step


class FillText(ReplyText):
    """What the caller of a fill reads: by itself, ids, and a `FillOutcome`."""

    def settled(self, outcome: FillOutcome) -> Sequence[Any]:
        """The events of a fill that is done, before its outcome."""
        return ()


class FillTask:
    """One fill."""

    def __init__(
        self,
        plan: FillPlan,
        make: MakeCanvas,
        text: FillText = FillText(),  # noqa: B008  (stateless)
        family: str = "",
    ) -> None:
        self.plan, self._make, self._text = plan, make, text
        template = plan.template
        prefix = template.prefix
        # Later fills are likely to share most of the prefix.
        self.claim = Claim(Prompt(prefix, (len(prefix),)), len(prefix), family)
        longest = sum(template.longest)
        self.figures = Figures(plan.seed, longest, max_steps=plan.config.max_steps or 0)
        self.stats = Stats(prompt_tokens=len(prefix))
        self._round = 0
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

    def run(self) -> Generator[Any, Any, Any]:
        """Yields the drafts of one canvas of each round, the longest, and what `FillText.settled`
        gives. Raises FloatingPointError where the model's scores are no numbers."""
        yield Encode(self.claim.prompt.ids)
        fillings: Sequence[Filling | None] = [None]
        if self._undecided:
            fillings = self._searches[self._undecided[0]].next()
        while self._result is None:
            self._trials = [self._trial(filling) for filling in fillings]
            yield from self._denoised()
            if not self._undecided:
                self._result = self._trials[0]
                break
            scores = yield Score(tuple(self._likelihoods()))
            fillings = self._scored(scores)
        outcome = self._outcome(self._result)
        yield from self._text.settled(outcome)
        result = self._text.finish(outcome)
        self.figures = replace(self.figures, output_tokens=self.stats.output_tokens)
        return result

    def stopped(self) -> Any:
        count = len(self.plan.template.holes)
        holes: tuple[list[int], ...] = tuple([] for _ in range(count))
        none = (None,) * count, ((),) * count
        outcome = FillOutcome(holes, *none, self.stats, (), cancelled=True)
        return self._text.finish(outcome)

    def _denoised(self) -> Generator[Any, Any, None]:
        """Steps the canvases of the round until all have settled."""
        canvases = [trial.canvas for trial in self._trials if trial.canvas is not None]
        shown = max(canvases, key=lambda canvas: canvas.length, default=None)
        while going := tuple(canvas for canvas in canvases if not canvas.done):
            drafts = yield Denoise(going)
            for canvas, draft in zip(going, drafts, strict=True):
                if canvas.done:
                    self._settled(canvas, draft)
                if canvas is shown:
                    self.figures = replace(self.figures, canvas=self._round, step=draft.step)
                    pinned = canvas.pinned >= 0
                    readable = self._text.readable(draft)
                    yield replace(readable, canvas=self._round, pinned=pinned)

    def _settled(self, canvas: Canvas, draft: Draft) -> None:
        trial = next(trial for trial in self._trials if trial.canvas is canvas)
        trial.ids, trial.draft = draft.token_ids.tolist(), draft
        assert canvas.convergence
        self.stats.canvases += 1
        self.stats.steps.append(draft.step)
        self.stats.convergence.append(canvas.convergence)
        self.figures = replace(
            self.figures,
            canvas_tokens=self.figures.canvas_tokens + canvas.length,
            steps=tuple(self.stats.steps),
            convergence=tuple(self.stats.convergence),
        )

    def _likelihoods(self) -> Generator[Likelihood, None, None]:
        """Each trial's hole, and what follows it up to the next hole that is not decided."""
        hole, *later = self._undecided
        for trial in self._trials:
            end = trial.form.holes[later[0]].start if later else trial.form.content
            yield Likelihood(trial.ids[:end], trial.form.holes[hole].start)

    def _scored(self, scores: Sequence[float]) -> Sequence[Filling]:
        """Takes the log-likelihoods of the trials, in nats and in their order; returns what is
        tried next. Sets the result where nothing is."""
        hole = self._undecided[0]
        search = self._searches[hole]
        for trial, score in zip(self._trials, scores, strict=True):
            search.tried.append(Tried(tuple(trial.ids[trial.form.holes[hole]]), score))
            if self._best is None or score > self._best[0]:
                self._best = score, trial
        assert self._best
        self._round += 1
        fillings = search.next()
        if not fillings:
            self._fillings[hole] = search.best
            self._undecided.pop(0)
            if not self._undecided:
                self._result = self._best[1]
                return []
            self._best = None
            fillings = self._searches[self._undecided[0]].next()
        return fillings

    def _outcome(self, trial: Trial) -> FillOutcome:
        template, draft = self.plan.template, trial.draft
        places = trial.form.holes
        holes = tuple(trial.ids[place] for place in places)
        top = (None if draft is None else (draft.top_ids[s], draft.top_probs[s]) for s in places)
        self.stats.output_tokens = sum(map(len, holes))
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
        plan = CanvasPlan(config, Noise(self.plan.seed, 0), pinned=form.pins, hard_pins=True)
        return Trial(form, filling, self._make(plan), ids)
