"""The commands: names, what they take without a name, and the modules that do them.

Their options are in sfumato.options. Imports no command, so that `sfumato --help` stays quick.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sfumato.values import Choice, Kind, Path, Text

SHELLS = ("bash", "zsh", "fish")
_CHECKPOINT = "a GGUF file, or a file or folder of safetensors"


@dataclass(frozen=True)
class Argument:
    """What a command takes without a name."""

    name: str
    help: str
    kind: Kind = field(default_factory=Text)
    count: str = ""  # argparse's nargs: "", "?" or "*"


@dataclass(frozen=True)
class Command:
    """A command, and the module in sfumato.cli that does it."""

    name: str
    help: str
    arguments: tuple[Argument, ...] = ()
    module: str = ""  # the command's name where it is not given


COMMANDS = (
    Command(
        "run",
        "answer one question",
        (
            Argument(
                "question",
                "the question, in quotes or not; without it, or for -, standard input is read",
                count="*",
            ),
        ),
    ),
    Command("chat", "hold a conversation"),
    Command(
        "fill",
        "fill the holes of a text: {{6}} has 6 tokens, {{<=8}} up to 8, {{a|b}} is a or b",
        (Argument("text", "the text, or a file; - is standard input"),),
    ),
    Command(
        "edit",
        "change a file as an instruction says, and show what changes",
        (
            Argument("file", "the file", Path()),
            Argument("instruction", "what to change, in quotes or not", count="+"),
        ),
    ),
    Command(
        "decide",
        "answer questions about each row of a table with probabilities, without writing text",
        (Argument("table", "a CSV, TSV or JSON Lines file; or use --state", Path(), count="?"),),
    ),
    Command("calibrate", "fit the probabilities of decisions to labelled rows"),
    Command(
        "perplexity",
        "measure how well the causal mode predicts a text",
        (Argument("file", "a file of UTF-8 text; - is standard input", Path()),),
    ),
    Command("serve", "serve a model over HTTP, to OpenAI's clients and as a web page"),
    Command("demo", "watch the embedded model solve a Sudoku and answer questions"),
    Command(
        "inspect",
        "list what is in a checkpoint, without loading it",
        (Argument("path", _CHECKPOINT, Path()),),
    ),
    Command(
        "convert",
        "turn a checkpoint into GGUF or safetensors, or quantize it",
        (
            Argument("source", _CHECKPOINT),
            Argument("out", "a file that ends in .gguf, or else a folder of safetensors"),
        ),
    ),
    Command("doctor", "estimate whether DiffusionGemma fits this machine, and how fast it is"),
    Command(
        "pull",
        "download a model; without a name, list what is published",
        (Argument("name", "hf:owner/name, or hf:owner/name:file", count="?"),),
    ),
    Command("train", "train a model by a recipe"),
    Command("eval", "measure a model on its recipe's held-out tasks", module="train"),
    Command("bench", "measure how fast a model, or a server, is"),
    Command(
        "completion",
        "print what makes a shell complete commands and options",
        (Argument("shell", "bash, zsh or fish", Choice(SHELLS)),),
    ),
)


def command_of(name: str) -> Command:
    """The command of that name, which there is."""
    return next(command for command in COMMANDS if command.name == name)
