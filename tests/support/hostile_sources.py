"""Sources that harm the process that compiles them, as no source of a client should be able to."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass

from sfumato.diffusion.constraints.grammar import GrammarSource, llguidance


@dataclass(frozen=True)
class Unchecked(GrammarSource):
    """A schema whose depth is not checked."""

    def compiled(self) -> str:
        text: str = llguidance().LLMatcher.grammar_from_json_schema(self.text)
        return text


@dataclass(frozen=True)
class Doing(GrammarSource):
    """Does what its text says, and is then a regular expression."""

    def compiled(self) -> str:
        if self.text == "spin":
            while True:
                pass
        if self.text == "eat":
            _ = bytearray(1 << 30)
        if self.text.startswith("sleep"):
            time.sleep(60)
        if self.text == "die":
            os.kill(os.getpid(), signal.SIGSEGV)
        if self.text == "print":
            print("no answer" * 1000, flush=True)
            os.write(1, b"no answer")
        if self.text == "leave":
            os._exit(0)
        return super().compiled()


def doing(what: str) -> Doing:
    return Doing("regex", what, what)
