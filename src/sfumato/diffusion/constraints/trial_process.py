"""The process that tries grammars: a fork of it compiles each one, within limits.

`trials` starts this module as a program.  The vocabulary is built once; then one process serves
first turns, and a fork of it those that run on.  Each reads a source from a socket that it is sent,
watches a fork that compiles the source, with limits of processor time, memory and stack, and
answers.  Whatever a grammar does to its fork reaches neither another grammar nor the server.  Loads
no torch.
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import resource
import signal
import sys
import time
from contextlib import suppress
from multiprocessing.connection import wait
from socket import recv_fds, socket
from typing import Any, NoReturn

from sfumato.diffusion.constraints.call_grammar import Source
from sfumato.diffusion.constraints.grammar import GrammarTokens
from sfumato.diffusion.constraints.trials import (
    DIED,
    DONE,
    LONGEST_ANSWER,
    MEMORY,
    NICENESS,
    TOO_LATE,
    TOO_LONG,
    TRIAL_STACK,
    WAIT_S,
    Answer,
    Request,
    on_a_stack_of,
)
from sfumato.refused import Refused

_PART = 1 << 20  # bytes that are read at once


def _watch(server: socket, tokens: GrammarTokens) -> None:
    """Has a fork compile what the server asks, and answers. Raises where no one waits for that."""
    stream = server.makefile("rwb")
    request: Request = pickle.load(stream)
    pipe, end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(server.fileno())  # held open here, it would hide the end of this process
        _run(request, tokens, end)
    os.close(end)
    answer, until, part = bytearray(), time.monotonic() + WAIT_S, b"."
    while part and len(answer) <= LONGEST_ANSWER:
        # Where the server's end is closed, no one waits any longer.
        ready = wait([pipe, server], until - time.monotonic())
        if ready != [pipe]:
            break
        part = os.read(pipe, _PART)
        answer += part
    os.close(pipe)
    if part:
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    outcome: Answer = (DONE, bytes(answer)) if status == 0 and answer else (DIED, b"")
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGPROF, signal.SIGXCPU):
        outcome = TOO_LONG, b""
    elif part and time.monotonic() > until:
        outcome = TOO_LATE, b""
    pickle.dump(outcome, stream)
    stream.flush()


def _run(request: Request, tokens: GrammarTokens, end: int) -> NoReturn:
    """Compiles a source, and writes what came of it. Any failure ends the fork."""
    status = 1
    try:
        seconds, niceness, source = request
        _limit(seconds)
        os.nice(niceness)
        made = on_a_stack_of(TRIAL_STACK, lambda: _tried(pickle.loads(source), tokens))
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
    made: GrammarTokens = GrammarTokens(
        lambda: pieces,
        special_ids,
        end_ids,
        lambda text: [*made.tokenizer.greedy_tokenize(text)],
    )
    return made


def main() -> None:
    os.nice(NICENESS)
    tokens = _grammar_tokens(*pickle.load(sys.stdin.buffer))
    _ = tokens.tokenizer, tokens.alphabet
    gc.collect()
    gc.freeze()  # so that the forks leave the pages of all this alone
    controls = [socket(fileno=int(number)) for number in sys.argv[1:]]
    control = controls.pop(0 if os.fork() else 1)
    controls[0].close()  # held open here, it would hide the end of the other one
    while fds := recv_fds(control, 1, 1)[1]:
        with suppress(OSError, EOFError), socket(fileno=fds[0]) as server:
            _watch(server, tokens)


if __name__ == "__main__":
    main()
