"""`sfumato run --replay FILE.html`: records a reply as it is shown, and writes its replay.

Knows displays and files; what is in the file is `sfumato.server.replay`'s.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from sfumato import Draft, Settled
from sfumato.cli import output
from sfumato.cli.embedded import is_embedded
from sfumato.cli.view import footer
from sfumato.cli.view.display import Display, Event
from sfumato.server.examples import demonstration, remark
from sfumato.server.replay import Recorder, document

if TYPE_CHECKING:
    from sfumato.api import Model
    from sfumato.cli.generation import Answer


class Recording:
    """A display that passes events on to another one, and records them for a replay."""

    def __init__(self, shown: Display, model: Model) -> None:
        self._shown, self._embedded = shown, is_embedded(model)
        tokenizer = model.tokenizer
        self._recorder = Recorder(
            lambda token: tokenizer.token_text(token) if token < tokenizer.vocab_size else "",
            model.template.markers,
        )

    def __enter__(self) -> Self:
        self._shown.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._shown.__exit__(*error)

    def show(self, event: Event) -> None:
        if isinstance(event, Draft):
            self._recorder.draft(event)
        elif isinstance(event, Settled):
            self._recorder.settled(event)
        self._shown.show(event)

    def write(
        self, name: str, force: bool, model: str, question: str, answer: Answer, hint: str
    ) -> None:
        """Writes the file, whole or not at all; `hint` stands below the embedded model's reply.
        Raises as `output.write` does."""
        reply = answer.reply
        summary = footer.summary(reply.stats) if reply else ["interrupted"]
        badge = demonstration(self._embedded) or ""
        below = remark(self._embedded, reply) if reply else ""
        if badge and hint and not below:
            below = f"{hint.capitalize()}."
        data = self._recorder.data(model, question, answer.text, summary, badge, below)
        output.write(name, document(data), force, "--replay")
