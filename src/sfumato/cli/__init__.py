"""The command line: parse, run one command, turn failures into one line and an exit code.

Knows no models; each command lives in a module of its own, which is imported only when it runs, so
that `sfumato --help` stays quick.
"""

from __future__ import annotations

import argparse
import codecs
import importlib
import io
import logging
import os
import signal
import sys
from collections.abc import Sequence

from sfumato import catalog
from sfumato.cli.arguments import CommandLine, in_options, suspicious
from sfumato.cli.terminal import handling, loading, print_message, stand_in
from sfumato.refused import Refused

ENDS = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
BAD_INPUT, INTERRUPTED, CLOSED_PIPE = 2, 130, 141  # the last two as a shell reports the signals


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0, 2 for bad input, 130 after Ctrl-C.

    SIGTERM and SIGHUP raise SystemExit(128 + the signal's number), so that nothing half-written
    stays.
    """
    _prepare_streams()
    try:
        # Ctrl-C is left alone: Python raises KeyboardInterrupt for it, and commands handle that.
        with handling(ENDS, _end, signal.SIG_DFL):
            code = _run(argv)
        sys.stdout.flush()  # here: at exit a closed pipe would print a traceback
        return code
    except BrokenPipeError:
        # So that Python's flush at exit succeeds nevertheless.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED_PIPE
    except KeyboardInterrupt:
        # Another Ctrl-C would only interrupt the interpreter's cleanup.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        print("(interrupted)", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        if os.environ.get("SFUMATO_DEBUG") == "1" or not _is_bad_input(error):
            raise
        complain(error)
        return BAD_INPUT


def _run(argv: Sequence[str] | None) -> int:
    line = CommandLine()
    try:
        args = line.parse_args(argv)
    except SystemExit as stop:  # after --help, --version or a complaint
        return int(stop.code or 0)
    if args.command is None:
        line.parser.print_help()
        return 0
    for warning in suspicious(os.environ):
        print_message("warning", warning)
    if getattr(args, "verbose", False):
        logging.basicConfig(level=logging.INFO, format="sfumato: %(message)s", stream=sys.stderr)
    resolve_models(args)
    with loading():
        module = importlib.import_module(f"sfumato.cli.{args.module}")
    try:
        code: int = module.main(args)
    except ValueError as error:
        if isinstance(error, Refused):
            raise in_options(args, error) from error
        raise
    return code


def resolve_models(args: argparse.Namespace) -> None:
    """Replaces names of models by paths: "embedded" and those of the catalogue, unless a path has
    that name, and `hf:` names. The files of models that are not on this machine are downloaded."""
    # `serve` resolves each of its models by itself. With --url, -m is the server's name of a model;
    # SFUMATO_MODEL is for other runs.
    if getattr(args, "url", None) or getattr(args, "random_weights", None):
        return
    for key in ("model", "mmproj", "path", "source", "base"):
        given = getattr(args, key, None)
        if not isinstance(given, str) or os.path.exists(given):
            continue
        if catalog.is_name(given):
            importlib.import_module("sfumato.cli.pull").resolve(args, key)
        elif key != "mmproj" and (path := catalog.packaged_path(given)) is not None:
            # --model without a value means the embedded model too.
            is_meant = key == "model" and path == catalog.EMBEDDED
            setattr(args, key, None if is_meant else str(path))


def _end(number: int, _: object) -> None:
    """Ends the command as SIGTERM and SIGHUP do. Another one would only interrupt the cleanup."""
    for each in ENDS:
        if signal.getsignal(each) is _end:
            signal.signal(each, signal.SIG_IGN)
    raise SystemExit(128 + number)


def _is_bad_input(error: Exception) -> bool:
    """Whether the user can correct the cause: a value, a file, too little memory."""
    too_big = (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or "can't allocate memory" in str(error)  # torch on a CPU: a plain RuntimeError
    )
    return isinstance(error, ValueError | OSError) or too_big


def complain(error: BaseException | str) -> None:
    """The error on standard error: one line, wrapped at a terminal."""
    if isinstance(error, OSError) and error.strerror:
        text = ": ".join(str(part) for part in (error.filename, error.strerror) if part)
    else:
        text = " ".join(str(error).split()) or type(error).__name__
    print_message("error", text)


def _prepare_streams() -> None:
    """Makes standard streams usable where the shell closed them or the locale is not UTF-8."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed, as in `sfumato … >&-`
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 (open as long as we run)
    codecs.register_error("sfumato", stand_in)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="sfumato")
