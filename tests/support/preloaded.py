"""Starts `sfumato` programs from a process that has imported torch and the server already.

The imports take seconds, and a program that is tested for what it prints and how it ends takes
less. A program is a process forked from the preloaded one, with the arguments, environment, folder,
input and outputs of its client. The client is a small process that a test starts in the program's
place: it passes SIGINT and SIGTERM on to the program and ends as the program ends; where the client
is killed, the program is killed too.

`python preloaded.py --serve SOCKET` is the preloaded process and `python preloaded.py SOCKET CODE`
a client, the program's arguments behind CODE (Python that runs in place of the command line, or
empty). SOCKET is empty where there is no preloaded process: the client is then the program itself.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import runpy
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

LARGEST = 1 << 20  # bytes of a request to start a program
PASSED_ON = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def preloaded(environment: dict[str, str]) -> Iterator[list[str]]:
    """The command that starts programs: CODE and the arguments follow it.

    environment: of the preloaded process, for what is read when modules are imported; each program
    has the one that its client was started with.
    """
    if sys.platform != "linux":  # elsewhere a fork of a process that has imported torch may fail
        yield [sys.executable, __file__, ""]
        return
    how: dict[str, Any] = {
        "env": environment,
        "stdin": subprocess.DEVNULL,
        "stdout": subprocess.PIPE,
    }
    with TemporaryDirectory() as folder:  # a socket's path is short
        path = f"{folder}/programs"
        with subprocess.Popen([sys.executable, __file__, "--serve", path], **how) as process:
            try:
                assert process.stdout and process.stdout.readline() == b"ready\n"
                yield [sys.executable, "-S", "-E", __file__, path]
            finally:
                process.kill()


def client(path: str, code: str, arguments: list[str]) -> int:
    """The exit code of a program, negative where a signal ended it."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)

        def pass_on(number: int, frame: object) -> None:
            with contextlib.suppress(OSError):  # the program has just ended
                connection.sendall(bytes([number]))

        for number in PASSED_ON:
            signal.signal(number, pass_on)
        wanted = {"code": code, "arguments": arguments, "environment": dict(os.environ)}
        message = json.dumps(wanted | {"folder": str(Path.cwd())}).encode()
        assert len(message) < LARGEST
        socket.send_fds(connection, [struct.pack("I", len(message))], [0, 1, 2])
        connection.sendall(message)
        for stream in (0, 1, 2):  # the program's alone: its end is the end of the file
            os.close(stream)
        answer = connection.recv(4)
    return int(struct.unpack("i", answer)[0]) if len(answer) == 4 else 1


def serve(path: str) -> NoReturn:
    """Forks a process for each client, until it is killed."""
    import sfumato.api
    import sfumato.server.app  # noqa: F401

    gc.freeze()  # a collection in a program would copy the pages of all that it visits
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel clears them away
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()
        print("ready", flush=True)
        while True:
            connection, _ = listening.accept()
            if os.fork() == 0:
                listening.close()
                _attend(connection)
            connection.close()


def _attend(connection: socket.socket) -> NoReturn:
    """Runs one program, beside a process that waits for its end and for the client's signals."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    head, streams, _, _ = socket.recv_fds(connection, 4, 3)
    (left,) = struct.unpack("I", head)
    message = b""
    while len(message) < left:
        part = connection.recv(left - len(message))
        if not part:  # the client is no more
            os._exit(1)
        message += part
    program = os.fork()
    if program == 0:
        connection.close()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        wanted = json.loads(message)
        os.environ.clear()
        os.environ.update(wanted["environment"])
        os.chdir(wanted["folder"])
        _open_streams()
        run(wanted["code"], wanted["arguments"])
    for stream in (0, 1, 2, *streams):
        os.close(stream)

    child = Child(program)

    def listen() -> None:
        while numbers := connection.recv(1):
            child.signal(numbers[0])
        child.signal(signal.SIGKILL)  # the client is no more

    threading.Thread(target=listen, daemon=True).start()
    code = child.exit_code()
    with contextlib.suppress(OSError):  # the client is no more
        connection.sendall(struct.pack("i", code))
    os._exit(0)


class Child:
    """A process that one thread waits for and others send signals to.

    Its number is another process's as soon as it has been waited for, so a signal is sent under a
    lock, and never after that."""

    def __init__(self, number: int) -> None:
        self._number, self._lock, self._has_ended = number, threading.Lock(), False

    def signal(self, number: int) -> None:
        """Sends a signal, unless the process has ended."""
        with self._lock:
            if not self._has_ended:
                os.kill(self._number, number)

    def exit_code(self) -> int:
        """Waits for its end; negative where a signal ended it."""
        # Waits without the lock, and leaves the process its number.
        os.waitid(os.P_PID, self._number, os.WEXITED | os.WNOWAIT)
        with self._lock:
            self._has_ended = True
            return os.waitstatus_to_exitcode(os.waitpid(self._number, 0)[1])


def _open_streams() -> None:
    """Python's own objects for the standard streams, which are other files than at its start."""
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 as long as the program lives
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", 1, errors="backslashreplace", closefd=False)  # noqa: SIM115


def run(code: str, arguments: list[str]) -> NoReturn:
    """As `python -m sfumato` and `python -c` do; ends the process."""
    sys.argv[:] = ["sfumato", *arguments]
    ended: object = 0
    try:
        if code:
            exec(code, {"__name__": "__main__"})
        else:
            runpy.run_module("sfumato", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        ended = end.code
    except BaseException:
        traceback.print_exc()
        ended = 1
    # As Python ends, but that it would free, object by object, all that was imported.
    threading._shutdown()  # type: ignore[attr-defined] # waits for threads
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(ended if isinstance(ended, int) else 0 if ended is None else 1)


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        serve(sys.argv[2])
    elif not sys.argv[1]:
        run(sys.argv[2], sys.argv[3:])
    else:
        exit_code = client(sys.argv[1], sys.argv[2], sys.argv[3:])
        if exit_code < 0:  # by a signal, and so ends the client
            signal.signal(-exit_code, signal.SIG_DFL)
            os.kill(os.getpid(), -exit_code)
        os._exit(exit_code)
