"""`sfumato deploy ray`: a model behind HTTP, served by several replicas, until a signal comes."""

from __future__ import annotations

import argparse
import signal
import threading

from sfumato import catalog
from sfumato.cli import terminal
from sfumato.refused import Refused


def main(args: argparse.Namespace) -> int:
    """Deploy, and return the exit code. Raises ValueError or OSError for bad input."""
    try:
        from sfumato.deploy import ray as on_ray
    except ImportError as error:
        raise Refused(None, f"Ray is not here ({error})", 'pip install "sfumato[ray]"') from None
    ended = threading.Event()
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: ended.set())
        on_ray.start(args)
        name = args.name or catalog.shown_name(args.model)
        print(
            f"{name} on http://{args.host}:{args.port} ({args.replicas} replicas)\nCtrl-C stops it."
        )
        ended.wait()
    finally:
        if on_ray.ray.is_initialized():
            terminal.print_message("note", "the replicas end once they have answered")
            on_ray.serve.shutdown()
    return 0
