"""What `trials` in the server and `trial_process` say to each other, and the limits of a trial."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from sfumato.diffusion.constraints.grammar_tokens import GrammarTokens

STACK = 4 << 20
"""Bytes; a quarter of what the server compiles with, and twice what `depth` lets a grammar take."""
MEMORY = 256 << 20
"""Bytes of address space that one grammar may add."""
WAIT_S = 60.0
"""For one trial, on a machine too busy to give it its time."""
LONGEST_ANSWER = 32 << 20
"""Bytes; the rules of a grammar are some megabytes at most."""

_HEAD = struct.Struct("<IBfI")
TRY, RUN_ON, END = range(3)
"""Asked for: a trial; one that yields to others, since a first one has taken its time; its end."""
DONE, TOO_LONG, TOO_LATE, DIED = range(4)
"""What came of a trial: an answer, or how its child was ended."""


@dataclass(frozen=True)
class Frame:
    """One message, either way."""

    number: int  # of the trial
    kind: int
    seconds: float = 0.0  # of the processor's time: those it may take, or those it took
    body: bytes = b""

    def packed(self) -> bytes:
        return _HEAD.pack(self.number, self.kind, self.seconds, len(self.body)) + self.body


def take_frames(read: bytearray) -> Iterator[Frame]:
    """Takes the whole frames from what was read so far."""
    while len(read) >= _HEAD.size:
        number, kind, seconds, length = _HEAD.unpack_from(read)
        if len(read) < _HEAD.size + length:
            return
        body = bytes(read[_HEAD.size : _HEAD.size + length])
        del read[: _HEAD.size + length]
        yield Frame(number, kind, seconds, body)


@dataclass(frozen=True)
class Vocabulary:
    """What a process needs to build the `GrammarTokens` of another one."""

    pieces: tuple[bytes, ...]
    special_ids: frozenset[int]
    end_ids: tuple[int, ...]

    def tokens(self) -> GrammarTokens:
        """With an encoder of its own, which takes the longest token: it cuts what is forced in
        other places than the model's tokenizer."""
        made: list[GrammarTokens] = []

        def encode(text: str) -> list[int]:
            ids: list[int] = made[0].tokenizer.greedy_tokenize(text)
            return ids

        made.append(GrammarTokens(lambda: self.pieces, self.special_ids, self.end_ids, encode))
        return made[0]
