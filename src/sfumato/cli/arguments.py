"""What the command line accepts. Knows names and ranges of options, and not what they do."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NoReturn

from sfumato import __version__

_MODEL = "checkpoint: a GGUF file, or a file or folder of safetensors; default: the embedded model"

SAMPLERS = ("entropy-bound", "fixed-count", "threshold")  # written out: their module needs torch
DEVICES = "auto, cpu, cuda, cuda:1, mps, xpu"
LAST_SEED = 2**64 - 1  # the random numbers take 64 bits of it


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
    _add_seed(parser, "picks the puzzle")
    _add_display(parser)
    _add_verbose(parser)


def _add_inspect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=_path, help="a GGUF file, or a file or folder of safetensors")
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    parser.add_argument("--tensors", action="store_true", help="list every tensor")


def _add_train(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(action="train")
    parser.add_argument("--recipe", default="embedded", help="name of the recipe (embedded)")
    parser.add_argument(
        "--out", type=_path, required=True, metavar="DIR", help="folder for the checkpoint"
    )
    _add_seed(parser, "random seed")
    parser.add_argument("--steps", type=whole(1), help="training steps; default: the recipe's")
    parser.add_argument("--threads", type=whole(1), help="CPU threads; default: all")


def _add_eval(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(action="evaluate")
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    parser.add_argument("--count", type=whole(1), default=200, help="tasks of each set (200)")
    _add_seed(parser, "draws the held-out tasks and the noise")
    parser.add_argument("-m", "--model", type=_path, metavar="PATH", help=_MODEL)
    _add_verbose(parser)


def _add_generation(parser: argparse.ArgumentParser) -> None:
    """The options of everything that loads a model and generates."""
    model = parser.add_argument_group("model")
    model.add_argument("-m", "--model", type=_path, metavar="PATH", help=_MODEL)
    model.add_argument("--device", default="auto", help=f"{DEVICES} (auto)")
    model.add_argument("--dtype", default="auto", help="auto, float32, bfloat16, float16 (auto)")
    group = parser.add_argument_group("generation (defaults are the checkpoint's)")
    add = group.add_argument
    add("--system", metavar="TEXT", help="system message")
    add("--thinking", action="store_true", help="let the model think before it answers")
    add("--max-tokens", type=whole(1), default=256, metavar="N", help="length limit (%(default)s)")
    add("--stop", action="append", default=[], metavar="TEXT", help="end before this text")
    _add_seed(group, "random seed")
    add("--steps", type=whole(1), metavar="N", help="denoising steps per canvas at most")
    add("--sampler", metavar="NAME", help=", ".join(SAMPLERS))
    add("--entropy-bound", type=float, metavar="NATS", help="the entropy-bound sampler's budget")
    add("--temperature", type=float, metavar="T", help="scales the temperature schedule (1)")
    add("--top-k", type=whole(1), metavar="K", help="draw from the K likeliest tokens")
    add("--top-p", type=float, metavar="P", help="draw from the likeliest share P")
    _add_display(parser)
    _add_verbose(parser)


def _add_verbose(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-v", "--verbose", action="store_true", help="tell more, on standard error")


def _add_display(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--no-visual", action="store_true", help="plain lines instead of the live canvas"
    )


def _add_seed(parser: argparse._ActionsContainer, what: str) -> None:
    parser.add_argument(
        "--seed", type=whole(0, LAST_SEED), default=0, metavar="N", help=f"{what}, 0 to 2^64-1 (0)"
    )


def _path(text: str) -> str:
    if not text:  # which pathlib would take for the working directory
        raise argparse.ArgumentTypeError("the path is empty")
    return text


def whole(low: int, high: int | None = None) -> Callable[[str], int]:
    """A parser of whole numbers from `low` to `high`. It raises ArgumentTypeError."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if value < low or (high is not None and value > high):
            reach = f"from {low} on" if high is None else f"from {low} to {high}"
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number {reach}")
        return value

    return parse
