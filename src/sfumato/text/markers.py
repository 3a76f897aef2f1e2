"""The special tokens of a chat format, as values: what the parsers of this package look for.

Knows the roles that a token can have, and no format: each family of models has a `ChatMarkers`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ChatMarkers:
    """The texts of a chat format's special tokens by role; empty where the format has none."""

    turn_open: str = ""
    turn_close: str = ""
    thought_open: str = ""
    thought_close: str = ""
    thought_header: str = ""  # text right after `thought_open` that is no part of the thought
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
