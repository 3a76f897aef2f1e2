from __future__ import annotations

import errno
import io
import logging
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import Terminal

from sfumato import __version__
from sfumato.catalog import EMBEDDED
from sfumato.cli import generation, main
from sfumato.cli.arguments import COMMANDS, Command, CommandLine


@pytest.mark.parametrize("word", ["--version", "version"])
def test_version(cli: Any, word: str) -> None:
    done = cli(word)
    assert (done.code, done.out) == (0, f"sfumato {__version__}\n")


def test_it_is_a_module_too() -> None:
    command = [sys.executable, "-m", "sfumato", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, f"sfumato {__version__}\n")


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_every_command_has_help(
    cli: Any, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line of usage; examples, each of which the parser takes; the hardware comes last. On a
    narrow terminal too no word is broken."""
    done = cli(command.name, "--help")
    monkeypatch.setenv("COLUMNS", "40")
    narrow = cli(command.name, "--help").out
    assert all(len(line) <= 40 or len(line.split()) == 1 for line in narrow.splitlines())
    assert re.sub(r"[#\\]", "", narrow).split() == re.sub(r"[#\\]", "", done.out).split()
    monkeypatch.setenv("COLUMNS", "80")
    assert (done.code, cli("help", command.name).out) == (0, done.out)
    usage, blank = done.out.splitlines()[:2]
    assert usage.startswith(f"usage: sfumato {command.name}") and not blank
    _, heading, rest = done.out.partition("\nhardware and memory:\n")
    assert not heading or rest.split("\n\n")[1].startswith(("examples:", "Options can also"))
    for example in command.examples:
        assert f"  {example}\n" in done.out
        words = shlex.split(example, comments=True)
        words = words[: next((i for i, word in enumerate(words) if word in ("<", ">", "|")), None)]
        if words[0] == "sfumato":
            assert CommandLine().parse_args(words[1:], {}).command == command.name


def test_without_a_command_it_shows_help(cli: Any) -> None:
    done = cli()
    assert (done.code, done.err, done.out) == (0, "", cli("--help").out)
    assert cli("help").out == done.out
    assert re.search("serve +serve a model over HTTP", done.out)


@pytest.mark.parametrize(
    "argv",
    [
        ("frobnicate",),
        ("convert",),
        ("train",),
        ("--frob",),
        ("-", "run"),
        ("chat", "Hi"),
        ("run", "Hi", "--frob"),
    ],
)
def test_wrong_usage_is_one_line(cli: Any, argv: tuple[str, ...]) -> None:
    done = cli(*argv)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("sfumato: error: ")
    assert done.err.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "meant"),
    [
        (("rnu", "Hi"), "there is no command 'rnu'; did you mean run?"),
        (("help", "serv"), "there is no command 'serv'; did you mean serve?"),
        (("zzz",), "there is no command 'zzz'; there are run, chat, "),
        (("run", "--max-token", "5", "Hi"), "--max-token; did you mean --max-tokens?"),
        (("run", "Hi", "--max-tok=5"), "--max-tok=5; did you mean --max-tokens?"),
        (("chat", "--t"), "--t; did you mean --thinking or "),
        (("inspect", "--tensor"), "--tensor; did you mean --tensors?"),
        (("run", "--schema", "x.json", "Hi"), "--schema; JSON schemas are for Python"),
        (("run", "--port", "3", "Hi"), "--port; --port is an option of serve"),
    ],
)
def test_a_name_that_there_is_not_is_told_the_nearest(cli: Any, argv: Any, meant: str) -> None:
    """No beginning of an option's name stands for the option."""
    done = cli(*argv)
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert meant in done.err


@pytest.mark.parametrize("words", [("-m", "x"), ("--model=x",), ("--max-tokens", "5", "run")])
def test_an_option_before_the_command_is_told_where_it_belongs(cli: Any, words: Any) -> None:
    done = cli(*words)
    name = words[0].partition("=")[0]
    assert (done.code, done.out) == (2, "")
    assert f"error: {name} belongs to a command: sfumato run {name} …" in done.err


def test_at_a_terminal_an_error_is_wrapped_between_words(
    cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "44")
    monkeypatch.setattr("sys.stderr", stderr := Terminal())
    path = "x" * 60 + ".gguf"
    assert cli("run", "Hi", "--temperature", "-1").code == 2
    assert cli("inspect", path).code == 2
    lines = stderr.getvalue().splitlines()
    assert "sfumato: error: argument --temperature:" in lines
    assert all(len(line) < 44 or path in line for line in lines)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("first\n  second"), "first second"),
        (FileNotFoundError(2, "No such file or directory", "x.gguf"), "x.gguf: No such file"),
        (MemoryError(), "MemoryError"),
    ],
)
def test_bad_input_is_one_line(
    use: Any, cli: Any, monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    def fails(args: object) -> None:
        raise error

    monkeypatch.setattr("sfumato.cli.generation.load", fails)
    done = cli("run", "Hi")
    assert done.code == 2
    assert done.err.startswith(f"sfumato: error: {message}")
    assert done.err.count("\n") == 1
    monkeypatch.setenv("SFUMATO_DEBUG", "1")
    with pytest.raises(type(error)):
        main(["run", "Hi"])


def test_a_bug_is_not_hidden(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(args: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("sfumato.cli.generation.load", fails)
    with pytest.raises(RuntimeError, match="a bug"):
        cli("run", "Hi")


def test_signals_are_as_they_were(use: Any, cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only while a command runs are they exceptions; one that is ignored, as by nohup, stays so."""
    monkeypatch.setattr(
        "sfumato.cli.generation.load", lambda _: signal.raise_signal(signal.SIGTERM)
    )
    assert cli("run", "Hi").code == 143
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL

    model = use("yes")

    def load(_: object) -> Any:
        signal.raise_signal(signal.SIGHUP)
        return model

    monkeypatch.setattr("sfumato.cli.generation.load", load)
    usual = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert cli("run", "Hi").code == 0
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, usual)


def test_one_signal_more_does_not_interrupt_the_clearing_up(
    cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cleared = []

    def load(_: object) -> None:
        try:
            signal.raise_signal(signal.SIGHUP)
        finally:
            signal.raise_signal(signal.SIGTERM)
            cleared.append(True)

    monkeypatch.setattr("sfumato.cli.generation.load", load)
    assert cli("run", "Hi").code == 129
    assert cleared


THREADED = [("run", "Hi"), ("chat",), ("serve",), ("bench",), ("train", "--out", "x")]


@pytest.mark.parametrize("command", THREADED)
def test_threads_have_a_limit(cli: Any, command: tuple[str, ...]) -> None:
    for count in ("0", "1025", "40000"):
        done = cli(*command, "--threads", count)
        assert (done.code, done.out) == (2, "")
        assert f"--threads: '{count}' is not a whole number from 1 to 1024" in done.err
    assert CommandLine().parse_args([*command, "--threads", "1024"]).threads in (1024, [1024])


def test_help_that_finds_a_full_disk_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("sys.stdout", Full())
    assert main(["serve", "--help"]) == 2
    assert capsys.readouterr().err == "sfumato: error: No space left on device\n"


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_closed_pipe_is_no_traceback(unbuffered: str) -> None:
    command = [str(Path(sys.executable).with_name("sfumato")), "--help"]
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        command, stdout=write, stderr=subprocess.PIPE, env=environment, timeout=60
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")


def test_closed_streams_and_plain_locales_do_no_harm() -> None:
    program = Path(sys.executable).with_name("sfumato")
    shell = f"'{program}' --help >&- <&- && '{program}' run --help >/dev/null"
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(shell, shell=True, env=environment, capture_output=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


@pytest.mark.parametrize(
    ("argv", "argument"),
    [
        (("run", "Hi", "-m", ""), "-m/--model"),
        (("chat", "--model="), "-m/--model"),
        (("serve", "-m", ""), "-m/--model"),
        (("eval", "-m", ""), "-m/--model"),
        (("inspect", ""), "path"),
        (("train", "--out", ""), "--out"),
    ],
)
def test_an_empty_path_is_refused_by_name(cli: Any, argv: tuple[str, ...], argument: str) -> None:
    done = cli(*argv)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"sfumato: error: argument {argument}: the path is empty")


@pytest.mark.parametrize("command", ["run", "chat", "demo", "train", "eval"])
def test_seeds_have_64_bits(cli: Any, command: str) -> None:
    out = ("--out", "x") if command == "train" else ()
    assert CommandLine().parse_args([command, *out, f"--seed={2**64 - 1}"]).seed == 2**64 - 1
    for seed in (-1, 2**64):
        done = cli(command, *out, f"--seed={seed}")
        assert (done.code, done.out) == (2, "")
        assert f"'{seed}' is not a whole number from 0 to {2**64 - 1}" in done.err
    assert "0 to 2^64-1" in cli(command, "--help").out


@pytest.fixture
def same_log_level() -> Iterator[None]:
    level = logging.root.level
    yield
    logging.root.setLevel(level)


@pytest.mark.usefixtures("same_log_level")
@pytest.mark.parametrize("command", [("run", "Hi"), ("chat",)])
@pytest.mark.parametrize("option", ["-v", "--verbose", None])
def test_verbose_shows_the_log(
    use: Any, cli: Any, monkeypatch: pytest.MonkeyPatch, command: Any, option: str | None
) -> None:
    monkeypatch.setattr(logging.root, "handlers", [])  # pytest has put its own there
    model = use("yes")

    def load(args: object) -> Any:
        logging.getLogger("sfumato.somewhere").info("a tensor is kept aside")
        return model

    monkeypatch.setattr("sfumato.cli.generation.load", load)
    done = cli(*command, *([option] if option else []))
    assert done.err == ("sfumato: a tensor is kept aside\n" if option else "")


@pytest.mark.parametrize("command", ["run", "chat", "serve", "demo", "eval"])
def test_whatever_loads_a_model_may_be_verbose(cli: Any, command: str) -> None:
    assert "--verbose" in cli(command, "--help").out


def test_the_embedded_model_has_a_name(
    use: Any, cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is what no name means; a path of the same name comes first."""
    monkeypatch.chdir(tmp_path)
    use("yes")
    given: list[Any] = []
    load = generation.load
    monkeypatch.setattr(generation, "load", lambda args: given.append(args.model) or load(args))
    assert cli("run", "-m", "embedded", "Hi").code == 0
    assert str(EMBEDDED) in cli("inspect", "embedded").out
    assert cli("inspect").out == cli("inspect", "embedded").out
    (tmp_path / "embedded").mkdir()
    assert cli("run", "-m", "embedded", "Hi").code == 0
    assert given == [None, "embedded"]
    assert "holds no weights" in cli("inspect", "embedded").err
