"""What is wrong with a text that is no valid Unicode; knows nothing of what the text is for."""

from __future__ import annotations


def unicode_fault(text: str) -> str | None:
    """What a message can say of `text` that UTF-8 cannot write, and what to do; None if it can.

    Python's texts may hold halves of surrogate pairs: JSON with a cut escape such as `"\\ud83d"`
    makes them, and so does undecodable input under Python's "surrogateescape".
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return (
            "holds a character that is not valid Unicode (lone surrogate "
            f"U+{ord(text[error.start]):04X} at position {error.start}); remove it, or send the "
            "whole character that it is half of"
        )
    return None
