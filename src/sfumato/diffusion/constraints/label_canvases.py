"""The canvases on which one question is read: one for labels of a token, more for labels of two.

They depend on the question's labels alone, so that questions with the same labels share them: a
thousand questions of 255 options would else keep a hundred thousand tuples.
"""

from __future__ import annotations

from collections.abc import Sequence

from sfumato.diffusion.constraints.labels import Label
from sfumato.diffusion.constraints.listing import Listing, listing_orders, means_itself
from sfumato.diffusion.constraints.questions import Question
from sfumato.diffusion.constraints.template import NOISE, ReadCanvas, ReadTemplate
from sfumato.refused import Refused

Options = tuple[tuple[int, int | None], ...]
"""Where each option is on the canvases, see `Target.options`."""


class LabelCanvases:
    """The orders of a plan's questions, and their canvases; each is made once."""

    def __init__(self, template: ReadTemplate, orders: int) -> None:
        """orders: how many are wanted of each question."""
        self._template, self._orders = template, orders
        self._listings: dict[tuple[type[Question], int, bool], list[Listing]] = {}
        self._canvases: dict[Listing, tuple[tuple[ReadCanvas, ...], Options]] = {}

    def listings(self, question: Question, labels: tuple[Label, ...]) -> list[Listing]:
        """labels: those that its line has for its kind and number of options."""
        key = type(question), len(labels), means_itself(question, labels)
        if key not in self._listings:
            self._listings[key] = listing_orders(question, labels, self._orders)
        return self._listings[key]

    def canvases(self, listing: Listing) -> tuple[tuple[ReadCanvas, ...], Options]:
        """Of one of these orders. Raises ValueError where the model's canvas is too short."""
        if listing not in self._canvases:
            self._canvases[listing] = _canvases(self._template, listing.labels)
        return self._canvases[listing]


def _canvases(
    template: ReadTemplate, labels: Sequence[Label]
) -> tuple[tuple[ReadCanvas, ...], Options]:
    if all(len(label.ids) == 1 for label in labels):
        ids = [label.ids[0] for label in labels]
        canvas = _fitting(template.canvas([NOISE], [0], [ids]), template)
        return (canvas,), tuple((number, None) for number in range(len(labels)))
    firsts = list(dict.fromkeys(label.ids[0] for label in labels))
    seconds: list[list[int]] = [
        [label.ids[1] for label in labels if label.ids[0] == first] for first in firsts
    ]
    canvases = [template.canvas([NOISE, NOISE], [0], [firsts])]
    for first, after in zip(firsts, seconds, strict=True):
        canvases.append(template.canvas([first, NOISE], [1], [after]))
    numbers = ((firsts.index(label.ids[0]), label.ids[1]) for label in labels)
    options = tuple((first, seconds[first].index(second)) for first, second in numbers)
    return tuple(_fitting(canvas, template) for canvas in canvases), options


def _fitting(canvas: ReadCanvas | None, template: ReadTemplate) -> ReadCanvas:
    if canvas is None:
        raise Refused(
            "questions",
            f"a canvas of this model has {template.canvas_length} tokens, which is too "
            "short for an answer",
            "use another model",
        )
    return canvas
