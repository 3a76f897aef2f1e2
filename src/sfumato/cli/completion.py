"""`sfumato completion`: a script for bash, zsh or fish, made from the parser by shtab."""

from __future__ import annotations

import argparse

import shtab

from sfumato.cli.arguments import build_parser
from sfumato.values import Path


def main(args: argparse.Namespace) -> int:
    """Print the script."""
    line = build_parser()
    for action, kind in line.actions:
        if isinstance(kind, Path):
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    print(shtab.complete(line.parser, args.shell))
    return 0
