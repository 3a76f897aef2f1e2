"""A text with holes: each hole is filled on canvases, and the best length or choice is kept.

A hole whose length or text is open is filled in several ways, each on a canvas of its own: a trial.
The trials of a round are denoised side by side. The trial whose hole and following text have the
highest likelihood decides the hole; then the next such hole is tried.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
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
    Figures,
    Likelihood,
    MakeCanvas,
    PlacedPicture,
    Prompt,
    Score,
    prompt_work,
)


@dataclass(eq=False)
class Trial:
    """One canvas of a fill."""

    form: Form
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
        pictures: Sequence[PlacedPicture] = (),
    ) -> None:
        """pictures: of the prompt that stands before the text."""
        self.plan, self._make, self._text = plan, make, text
        template = plan.template
        prefix = template.prefix
        # Later fills are likely to share most of the prefix.
        prompt = Prompt(prefix, (len(prefix),), tuple(pictures))
        # What is behind the last whole block begins each canvas, with its tokens pinned.
        prompt, self._opened = prompt.opened(plan.blocks)
        opened = len(self._opened)
        self.claim = Claim(prompt, len(prompt.ids), family, opened=opened, blocks=plan.blocks)
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

    def run(self) -> Generator[Any, Any, Any]:
        """Yields the drafts of one canvas of each round, the longest, and what `FillText.settled`
        gives. Raises FloatingPointError where the model's scores are no numbers."""
        yield prompt_work(self.claim.prompt)
        result: Trial | None = None
        for number, hole in enumerate(self._undecided):
            result = yield from self._tried(hole, self._undecided[number + 1 :])
        if result is None:  # every hole was decided
            result = self._trial(self._fillings)
            yield from self._denoised([result])
        outcome = self._outcome(result)
        yield from self._text.settled(outcome)
        finished = self._text.finish(outcome)
        self.figures = replace(self.figures, output_tokens=self.stats.output_tokens)
        return finished

    def stopped(self) -> Any:
        count = len(self.plan.template.holes)
        holes: tuple[list[int], ...] = tuple([] for _ in range(count))
        none = (None,) * count, ((),) * count
        outcome = FillOutcome(holes, *none, self.stats, (), cancelled=True)
        return self._text.finish(outcome)

    def _tried(self, hole: int, later: Sequence[int]) -> Generator[Any, Any, Trial]:
        """Decides a hole; returns the trial that did. later: holes that are decided after it."""
        search, best, best_score = self._searches[hole], None, -math.inf
        while fillings := search.next():
            trials = [self._trial({**self._fillings, hole: filling}) for filling in fillings]
            yield from self._denoised(trials)
            scores = yield Score(tuple(_likelihoods(trials, hole, later, self._opened)))
            for trial, score in zip(trials, scores, strict=True):
                search.tried.append(Tried(tuple(trial.ids[trial.form.holes[hole]]), score))
                if best is None or score > best_score:
                    best, best_score = trial, score
            self._round += 1
        assert best
        self._fillings[hole] = search.best
        return best

    def _denoised(self, trials: Sequence[Trial]) -> Generator[Any, Any, None]:
        """Steps the canvases of a round until all have settled."""
        canvases = {trial.canvas: trial for trial in trials if trial.canvas is not None}
        shown = max(canvases, key=lambda canvas: canvas.length, default=None)
        while going := tuple(canvas for canvas in canvases if not canvas.done):
            drafts = yield Denoise(going)
            for canvas, of_canvas in zip(going, drafts, strict=True):
                draft = of_canvas.behind(len(self._opened))
                if canvas.done:
                    self._settled(canvases[canvas], canvas, draft)
                if canvas is shown:
                    self.figures = replace(self.figures, canvas=self._round, step=draft.step)
                    pinned = canvas.pinned[len(self._opened) :] >= 0
                    readable = self._text.readable(draft)
                    yield replace(readable, canvas=self._round, pinned=pinned)

    def _settled(self, trial: Trial, canvas: Canvas, draft: Draft) -> None:
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

    def _trial(self, fillings: Mapping[int, Filling]) -> Trial:
        form = self.plan.template.form(fillings)
        ids = list(form.ids)
        if NOISE not in ids:
            return Trial(form, None, ids)
        opened = self._opened
        config = replace(self.plan.config, canvas_length=len(opened) + len(ids))
        pins = dict(enumerate(opened)) | {len(opened) + at: t for at, t in form.pins.items()}
        # The same noise in every trial: what fills a hole does not depend on what else is tried.
        plan = CanvasPlan(config, Noise(self.plan.seed, 0), pinned=pins, hard_pins=True)
        return Trial(form, self._make(plan), ids)


def _likelihoods(
    trials: Sequence[Trial], hole: int, later: Sequence[int], opened: Sequence[int]
) -> Generator[Likelihood, None, None]:
    """Each trial's hole, and what follows it up to the next hole that is not decided."""
    for trial in trials:
        end = trial.form.holes[later[0]].start if later else trial.form.content
        first = len(opened) + trial.form.holes[hole].start
        yield Likelihood([*opened, *trial.ids[:end]], first)
