"""Showing how a given text is filled or changed: its drafts, and the complete text at the end."""

from __future__ import annotations

from dataclasses import replace
from typing import Self

from sfumato import Done, Draft
from sfumato.cli.view.display import Display, Event


class FillDisplay:
    """A display whose canvases all stand in one place: a text that settles is shown with the last
    event, and not before."""

    def __init__(self, display: Display, shows_text: bool) -> None:
        """shows_text: False where the caller shows the text in another form."""
        self._display, self._shows_text = display, shows_text

    def __enter__(self) -> Self:
        self._display.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._display.__exit__(*error)

    def show(self, event: Event) -> None:
        """Takes in the next event."""
        if isinstance(event, Draft):
            self._display.show(event)
        elif isinstance(event, Done):
            reply = event.reply
            text = reply.text if reply.filled is None else reply.filled.text
            text = text if self._shows_text else ""
            self._display.show(Done(replace(reply, text=text)))
