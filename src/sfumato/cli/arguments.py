"""What the command line accepts. Knows names and ranges of options, and not what they do."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NoReturn

from sfumato import __version__

_MODEL = "checkpoint: a GGUF file, or a file or folder of safetensors; default: the embedded model"

SAMPLERS = ("entropy-bound", "fixed-count", "threshold")  # written out: their module needs torch


class _Parser(argparse.ArgumentParser):
    """Complains in one line, as every other error of the command line does."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"sfumato: error: {message} (see {self.prog} --help)\n")


def build_parser() -> argparse.ArgumentParser:
    """The parser of every command; the chosen one's module name is in `args.module`."""
    parser = _Parser(
        prog="sfumato",
        description="Run, inspect and tune block-diffusion language models.",
        epilog="sfumato COMMAND --help tells more of a command.",
    )
    parser.add_argument("--version", action="version", version=f"sfumato {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(name: str, help: str, module: str | None = None) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=help, description=help[0].upper() + help[1:] + ".")
        added.set_defaults(module=module or name)
        return added

    _add_run(command("run", "answer one question"))
    _add_chat(command("chat", "hold a conversation"))
    _add_demo(command("demo", "watch the embedded model solve a Sudoku and answer questions"))
    _add_inspect(command("inspect", "tell what is in a checkpoint, without loading it"))
    doctor = command("doctor", "tell what this machine has, and how fast it may be")
    doctor.add_argument("--json", action="store_true", help="print a JSON object")
    _add_train(command("train", "train a model by a recipe", module="tune"))
    _add_eval(command("eval", "measure a model on its recipe's held-out tasks", module="tune"))
    return parser


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "question", nargs="?", help="the question; without it, or for -, standard input is read"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    _add_generation(parser)


def _add_chat(parser: argparse.ArgumentParser) -> None:
    _add_generation(parser)


def _add_demo(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=_whole(0), default=0, help="picks the puzzle (0)")
    _add_display(parser)
    _add_verbose(parser)


def _add_inspect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", help="a GGUF file, or a file or folder of safetensors")
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    parser.add_argument("--tensors", action="store_true", help="list every tensor")


def _add_train(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(action="train")
    parser.add_argument("--recipe", default="embedded", help="name of the recipe (embedded)")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder for the checkpoint")
    parser.add_argument("--seed", type=_whole(0), default=0, help="random seed (0)")
    parser.add_argument("--steps", type=_whole(1), help="training steps; default: the recipe's")
    parser.add_argument("--threads", type=_whole(1), help="CPU threads; default: all")


def _add_eval(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(action="evaluate")
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    parser.add_argument("--count", type=_whole(1), default=200, help="tasks of each set (200)")
    parser.add_argument("--seed", type=_whole(0), default=0, help="random seed (0)")
    parser.add_argument("-m", "--model", metavar="PATH", help=_MODEL)
    _add_verbose(parser)


def _add_generation(parser: argparse.ArgumentParser) -> None:
    """The options of everything that loads a model and generates."""
    model = parser.add_argument_group("model")
    model.add_argument("-m", "--model", metavar="PATH", help=_MODEL)
    model.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps (auto)")
    model.add_argument("--dtype", default="auto", help="auto, float32, bfloat16, float16 (auto)")
    group = parser.add_argument_group("generation (defaults are the checkpoint's)")
    add = group.add_argument
    add("--system", metavar="TEXT", help="system message")
    add("--thinking", action="store_true", help="let the model think before it answers")
    add("--max-tokens", type=_whole(1), default=256, metavar="N", help="length limit (%(default)s)")
    add("--stop", action="append", default=[], metavar="TEXT", help="end before this text")
    add("--seed", type=_whole(0), default=0, metavar="N", help="random seed (0)")
    add("--steps", type=_whole(1), metavar="N", help="denoising steps per canvas at most")
    add("--sampler", metavar="NAME", help=", ".join(SAMPLERS))
    add("--entropy-bound", type=float, metavar="NATS", help="the entropy-bound sampler's budget")
    add("--temperature", type=float, metavar="T", help="scales the temperature schedule (1)")
    add("--top-k", type=_whole(1), metavar="K", help="draw from the K likeliest tokens")
    add("--top-p", type=float, metavar="P", help="draw from the likeliest share P")
    _add_display(parser)
    _add_verbose(parser)


def _add_verbose(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-v", "--verbose", action="store_true", help="tell more, on standard error")


def _add_display(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--no-visual", action="store_true", help="plain lines instead of the live canvas"
    )


def _whole(low: int) -> Callable[[str], int]:
    """A parser of whole numbers from `low` on."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if value < low:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {low} on")
        return value

    return parse
