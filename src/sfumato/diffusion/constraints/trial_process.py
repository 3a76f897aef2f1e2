"""The process that tries grammars: a child of it compiles each one, within limits.

`trials` starts this module as a program and speaks with it over pipes.  The vocabulary is built
once; then each grammar gets a fork, with limits of processor time, memory and stack.  Whatever a
grammar does to its child reaches neither another grammar nor the server.  Loads no torch.
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import resource
import selectors
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from sfumato.diffusion.constraints.call_grammar import Source
from sfumato.diffusion.constraints.grammar import GrammarTokens
from sfumato.diffusion.constraints.trials import (
    DIED,
    DONE,
    END,
    LONGEST_ANSWER,
    MEMORY,
    NICENESS,
    RUN_ON,
    TOO_LATE,
    TOO_LONG,
    TRIAL_STACK,
    WAIT_S,
    Frame,
    on_a_stack_of,
)
from sfumato.refused import Refused

_MORE_NICENESS = 2  # of what takes longer than its first turn
_PART = 1 << 20  # bytes that are read at once


@dataclass
class _Child:
    """The process of one trial."""

    number: int
    pid: int
    pipe: int
    until: float
    answer: bytearray = field(default_factory=bytearray)
    is_late: bool = False

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


class _Children:
    """All children, and the pipes from and to the server."""

    def __init__(self, requests: Connection, answers: Connection, tokens: GrammarTokens) -> None:
        self._requests, self._answers, self._tokens = requests, answers, tokens
        self._children: dict[int, _Child] = {}  # by the number of the trial
        self._selector = selectors.DefaultSelector()
        self._selector.register(requests, selectors.EVENT_READ)

    def serve(self) -> None:
        """Until the server closes its pipe."""
        is_open = True
        while is_open:
            for key, _ in self._selector.select(1.0 if self._children else None):
                if key.fileobj is not self._requests:
                    self._take(key.data)
                    continue
                try:
                    frame = Frame.receive(self._requests)
                except (EOFError, OSError):  # in the middle of a frame, too
                    is_open = False
                    break
                if frame.kind != END:
                    self._start(frame)
                elif frame.number in self._children:  # else it has ended meanwhile
                    self._children[frame.number].kill()
            now = time.monotonic()
            for child in self._children.values():
                if now > child.until or not is_open:
                    child.is_late = True
                    child.kill()

    def _start(self, frame: Frame) -> None:
        pipe, end = os.pipe()
        pid = os.fork()
        if pid == 0:
            # Held open here, these would hide the end of the server, or of this process.
            self._requests.close()
            self._answers.close()
            _run(frame, self._tokens, end)
        os.close(end)
        child = _Child(frame.number, pid, pipe, time.monotonic() + WAIT_S)
        self._children[child.number] = child
        self._selector.register(pipe, selectors.EVENT_READ, child)

    def _take(self, child: _Child) -> None:
        """What a child writes; at its end, tells the server what came of it."""
        part = os.read(child.pipe, _PART)
        child.answer += part
        if len(child.answer) > LONGEST_ANSWER:
            child.kill()
        elif part:
            return
        self._selector.unregister(child.pipe)
        os.close(child.pipe)
        _, status = os.waitpid(child.pid, 0)
        del self._children[child.number]
        outcome = DONE if status == 0 and child.answer else DIED
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGPROF, signal.SIGXCPU):
            outcome = TOO_LONG
        elif child.is_late:
            outcome = TOO_LATE
        body = bytes(child.answer) if outcome == DONE else b""
        Frame(child.number, outcome, body=body).send(self._answers)


def _run(frame: Frame, tokens: GrammarTokens, end: int) -> NoReturn:
    """In a child: compiles a source, and writes what came of it. Any failure ends the child."""
    status = 1
    try:
        _limit(frame.seconds)
        if frame.kind == RUN_ON:
            os.nice(_MORE_NICENESS)
        made = on_a_stack_of(TRIAL_STACK, lambda: _tried(pickle.loads(frame.body), tokens))
        with open(end, "wb") as pipe:
            pipe.write(json.dumps(made).encode())
        status = 0
    finally:
        os._exit(status)


def _limit(seconds: float) -> None:
    """Ends this process after so many seconds of its processor time, native code or not."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    resource.setrlimit(resource.RLIMIT_CPU, (int(seconds) + 2, int(seconds) + 2))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError):  # macOS has no /proc, and does not hold this limit
        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[0])
        most = pages * os.sysconf("SC_PAGE_SIZE") + TRIAL_STACK + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _tried(source: Source, tokens: GrammarTokens) -> dict[str, Any]:
    """What comes of a source that is compiled, asked for its first mask, copied and freed."""
    try:
        grammar = source.compile(tokens)
    except Refused as error:
        return {"fields": error.fields, "why": error.why, "advice": error.advice}
    return {"field": grammar.field, "text": grammar.text, "notes": grammar.notes}


def _grammar_tokens(
    pieces: tuple[bytes, ...], special_ids: frozenset[int], end_ids: tuple[int, ...]
) -> GrammarTokens:
    """The server's vocabulary with another encoder, which takes the longest token: it cuts what is
    forced in other places than the model's tokenizer."""

    def encode(text: str) -> list[int]:
        ids: list[int] = made.tokenizer.greedy_tokenize(text)
        return ids

    made = GrammarTokens(lambda: pieces, special_ids, end_ids, encode)
    return made


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the server's end ends this too
    os.nice(NICENESS)
    requests = Connection(os.dup(0), writable=False)
    answers = Connection(os.dup(1), readable=False)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)  # what a library prints is no answer
    try:
        tokens = _grammar_tokens(*pickle.loads(Frame.receive(requests).body))
    except EOFError:
        return
    _ = tokens.tokenizer, tokens.alphabet
    gc.collect()
    gc.freeze()  # so that the children leave the pages of all this alone
    with suppress(BrokenPipeError):  # the server has gone
        _Children(requests, answers, tokens).serve()


if __name__ == "__main__":
    main()
