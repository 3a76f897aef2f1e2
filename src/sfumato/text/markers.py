"""The special tokens of a chat format and the texts beside them, as values: what the parsers of
this package look for, and what grammars of calls are made of.

Knows the roles that a token can have, and no format: each family of models has a `ChatMarkers`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class CallStyle:
    """How a tool call is written between its markers: `begin`, the name, `middle`, the arguments,
    `end`.

    arguments: "bare" is `{key:<quote>text<quote>,n:3}`; "json" is an object of JSON, in an object
    with a name and arguments.
    """

    arguments: Literal["bare", "json"] = "bare"
    begin: str = "call:"
    middle: str = ""
    end: str = ""
    forced: str = "{"  # what a call of a given name is begun with, behind the name
    beside: str = ""  # stands before and after a call, and is no part of the answer

    def opening(self, name: str | None) -> str:
        """What follows the opening marker of a call of this tool; None: of any."""
        return self.begin if name is None else f"{self.begin}{name}{self.forced}"


BARE_CALLS = CallStyle()
"""The style of formats that name no other."""


@dataclass(frozen=True)
class ChatMarkers:
    """The texts of a chat format's special tokens by role; empty where the format has none."""

    calls: CallStyle = BARE_CALLS

    turn_open: str = ""
    turn_close: str = ""
    thought_open: str = ""
    thought_close: str = ""
    thought_header: str = ""  # text right after `thought_open` that is no part of the thought
    thought_footer: str = ""  # text right after `thought_close` that is no part of the answer
    call_open: str = ""
    call_close: str = ""
    quote: str = ""  # stands before and after each text in a tool call's arguments
    picture: str = ""  # what a template writes for a picture, and stands for each soft token
    picture_open: str = ""  # comes before the soft tokens of a picture
    picture_close: str = ""
    ends: tuple[str, ...] = ()  # end a reply
    end_tokens: tuple[str, ...] = ()  # of these, added to the end ids that a checkpoint gives
    visible: tuple[str, ...] = ()  # parsers of other programs look for these in the decoded text
    tokens: tuple[str, ...] = ()  # all of the format; those that have no role here are dropped


NO_MARKERS = ChatMarkers()
"""The markers of a format without thoughts, tool calls and turns."""
