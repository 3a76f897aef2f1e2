"""The options of `sfumato fill` and `sfumato edit`, but for those that other commands have too."""

from __future__ import annotations

from sfumato.options.kinds import EDIT, FILL, FLAG, REPLY, TEXT
from sfumato.options.limits import MOST_TOKENS, STRENGTH
from sfumato.options.option import Option, decoding
from sfumato.values import Number, Whole

_TOKENS = Whole(1, MOST_TOKENS)

# A row is a line or two; the formatter would make it nine.
# fmt: off
FILLING = (
    # Name, kind, commands, help, default, metavar, group.
    Option("at", TEXT, FILL,
           "fill a file in at this line and column, both from 1", metavar="LINE:COLUMN"),
    Option("tokens", _TOKENS, FILL, "of the text at --at, exactly", metavar="N"),
    Option("at-most", _TOKENS, FILL, "of the text at --at; default: 32", metavar="N"),
    Option("reply-to", TEXT, FILL,
           "the text is the complete reply to this message", metavar="MESSAGE"),
    Option("write", FLAG, (*FILL, *EDIT),
           "write the file, and not only show what changes; a copy of it stays beside it", False),
    Option("force", FLAG, EDIT,
           "write even what the embedded model, or an unsettled reply, has made of it", False),
    Option("strength", Number(0, 1), EDIT,
           "share of the text that begins as noise", STRENGTH, "SHARE", REPLY),
    decoding("max_tokens", EDIT, "N", REPLY, None, "; default: twice the text's, and 64"),
)
# fmt: on
