"""Options from the command line, the environment and a file: which one decides, and what is said of
wrong ones."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from sfumato.cli.arguments import CommandLine, in_options, origin_of, suspicious
from sfumato.cli.serve import _api_keys
from sfumato.decisions.question_file import LARGEST
from sfumato.options.table import OPTIONS, Option
from sfumato.refused import Refused
from sfumato.values import Choice, Each, Flag, Listed, Number, Text, Whole


@pytest.fixture
def parse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Namespace]:
    """parse("serve", …, file="port = 1", SFUMATO_PORT="2"); the file is sfumato.toml."""
    monkeypatch.chdir(tmp_path)
    line = CommandLine()

    def run(*argv: str, file: str | None = None, **variables: str) -> Namespace:
        if file is not None:
            Path("sfumato.toml").write_text(file, encoding="utf-8")
            argv = (*argv, "--config", "sfumato.toml")
        return line.parse_args(argv, variables)

    return run


@pytest.fixture
def refused(parse: Any, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def run(*argv: str, **how: str) -> str:
        with pytest.raises(SystemExit) as stop:
            parse(*argv, **how)
        printed = capsys.readouterr().err
        assert (stop.value.code, printed.count("\n")) == (2, 1)
        return printed.removeprefix("sfumato: error: ")

    return run


def test_precedence(parse: Any) -> None:
    file = "port = 1\nslots = 11\ndrain = 3\n[serve]\nslots = 2\n[run]\nmax-tokens = 7\n"
    args = parse("serve", file=file)
    assert (args.port, args.slots, args.drain, args.max_tokens) == (1, 2, 3.0, 4096)
    assert origin_of(args, "port").label == "port in sfumato.toml"
    assert origin_of(args, "slots").label == "slots in [serve] of sfumato.toml"
    args = parse("serve", file=file, SFUMATO_PORT="4", SFUMATO_SLOTS="")
    assert (args.port, args.slots, origin_of(args, "port").label) == (4, 2, "SFUMATO_PORT")
    args = parse("serve", "--port", "5", file=file, SFUMATO_PORT="4")
    assert (args.port, origin_of(args, "port").label, origin_of(args, "queue").label) == (
        5,
        "--port",
        "--queue",
    )


def test_the_file_may_be_named_by_a_variable(parse: Any, tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text("max-tokens = 9")
    assert parse("run", SFUMATO_CONFIG="x.toml").max_tokens == 9


def test_flags_can_be_turned_on_and_off_again(parse: Any) -> None:
    assert parse("serve", file="strict = true").strict is True
    assert parse("serve", SFUMATO_STRICT="yes").strict is True
    assert parse("serve", file="strict = true", SFUMATO_STRICT="off").strict is False
    assert parse("serve", "--no-strict", SFUMATO_STRICT="1").strict is False
    assert parse("run", "--visual", SFUMATO_NO_VISUAL="1").no_visual is False


def test_several_values(parse: Any) -> None:
    assert parse("run", file='stop = ["a", "b, c"]').stop == ["a", "b, c"]
    assert parse("run", SFUMATO_STOP="a, b").stop == ["a", "b"]
    assert parse("run", SFUMATO_STOP='["a, b"]').stop == ["a, b"]
    assert parse("run", "--stop", "x", SFUMATO_STOP="a,b", file='stop = "c"').stop == ["x"]
    args = parse("bench", file="max-tokens = [16, 32]\nsoft_top_k = [64, 8]")
    assert (args.max_tokens, args.soft_top_k) == ([16, 32], (64, 8))
    one, other = parse("run"), parse("run")
    one.stop.append("x")
    assert other.stop == []  # no command changes the default


def sample(option: Option) -> tuple[str, str]:
    """A value for a variable, and the same in TOML."""
    kind = option.kind
    if isinstance(kind, Each):
        return "x", '["x"]'
    kind = kind.item if type(kind) is Listed else kind
    if isinstance(kind, Text):
        text = kind.names[-1] if isinstance(kind, Choice) else "x"
        return text, f'"{text}"'
    text = "true" if isinstance(kind, Flag) else "0.5" if isinstance(kind, Number) else "1"
    text = str(max(1, int(kind.low))) if isinstance(kind, Whole) else text
    return text, text


def test_every_option_can_come_from_a_variable_and_from_a_file(parse: Any) -> None:
    needed: dict[str, dict[str, list[str]]] = {
        "train": {"out": ["--out", "x"]},
        "fill": {"": ["{{3}}"]},
        "edit": {"": ["f", "shorten"]},
        "perplexity": {"": ["f"]},
        "inspect": {"": ["p"]},
        "remove": {"": ["n"]},
        "convert": {"": ["a", "b"]},
        "merge": {"": ["a", "b"], "out": ["-o", "x"]},
        "deploy": {"": ["ray"]},
        "batch": {"": ["f"], "out": ["-o", "x"]},
        "tune": {"data": ["--data", "x"], "out": ["--out", "x"]},
        "decide": {"questions": ["-q", "q.toml"]},
        "calibrate": {"questions": ["-q", "q.toml"], "labelled": ["--labelled", "t.csv"]},
    }
    for option in OPTIONS:
        if option.name == "config":
            continue
        text, toml = sample(option)
        value = option.kind.parse(text)
        for command in option.commands:
            rest = (words for name, words in needed.get(command, {}).items() if name != option.name)
            argv = [command, *chain.from_iterable(rest)]
            args = parse(*argv, **{option.variable: text})
            assert getattr(args, option.key) == value, (command, option.name)
            args = parse(*argv, file=f"[{command}]\n{option.name} = {toml}\n")
            assert getattr(args, option.key) == value, (command, option.name)


def test_what_is_required_may_come_from_anywhere(parse: Any, refused: Any) -> None:
    assert parse("train", SFUMATO_OUT="x").out == "x"
    assert refused("train").startswith("--out is required (or SFUMATO_OUT, or a --config file)")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"SFUMATO_PORT": "70000"}, "SFUMATO_PORT: '70000' is not a whole number from 0 to 65535"),
        ({"SFUMATO_STRICT": "maybe"}, "SFUMATO_STRICT: 'maybe' is neither true nor false"),
        ({"SFUMATO_PORT": "tcp://10.0.0.1:80"}, "enableServiceLinks: false"),
        ({"file": "port = 70000"}, "port in sfumato.toml: 70000 is not a whole number from 0 to"),
        ({"file": '[serve]\nport = "1"'}, "port in [serve] of sfumato.toml: '1' is not a whole"),
        ({"file": "max_tokens = true"}, "max-tokens in sfumato.toml: true is not a whole number"),
        ({"file": "prot = 1"}, "sfumato.toml: unknown key 'prot'; the nearest name is 'port'"),
        ({"file": "[serve]\nprot = 1"}, "[serve] of sfumato.toml: unknown key 'prot'; the nearest"),
        ({"file": "[sreve]"}, "sfumato.toml: unknown table [sreve]; the nearest name is 'serve'"),
        (
            {"file": "[serve]\nseed = 1"},
            "unknown key 'seed'; it is an option of bench, calibrate, chat",
        ),
        ({"file": "[run]\nsteps = 0"}, "steps in [run] of sfumato.toml: 0 is not"),
        ({"file": "max_body = 1\nmax-body = 1"}, "sfumato.toml: 'max-body' is given twice"),
        ({"file": "config = 'y'"}, "config in sfumato.toml: a file cannot name another file"),
        ({"file": "port = "}, "sfumato.toml: is not TOML: Invalid value (at end of document)"),
        ({"file": "a=" + "[" * 5000}, "sfumato.toml: is not TOML"),
        ({"file": "#" * (LARGEST + 1)}, "sfumato.toml: has more than 4,194,304 bytes"),
    ],
)
def test_wrong_values_are_told_with_their_place(
    refused: Any, how: dict[str, str], message: str
) -> None:
    assert message in refused("serve", **how)


def test_a_value_that_is_overruled_does_no_harm(parse: Any) -> None:
    """As where Kubernetes has set SFUMATO_PORT, and --port says better."""
    assert parse("serve", "--port", "80", SFUMATO_PORT="tcp://10.0.0.1:80").port == 80


def test_common_keys_may_be_another_command_s(parse: Any) -> None:
    file = "temperature = 0.5\njson = true"
    assert parse("serve", file=file).port == 8080
    assert (parse("run", file=file).json, parse("bench", file=file).json) == (True, None)


def test_a_key_is_never_shown(
    parse: Any, refused: Any, cli: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert parse("serve", SFUMATO_API_KEY="s3cret").api_key == ["s3cret"]
    printed = refused("serve", file="api-key = 73577357")
    assert printed.startswith("api-key in sfumato.toml: is not text") and "7357" not in printed
    monkeypatch.setenv("SFUMATO_API_KEY", "s3cret")
    assert "s3cret" not in cli("serve", "--help").out


def test_of_a_key_and_a_file_with_a_key_the_stronger_source_counts(
    parse: Any, tmp_path: Path
) -> None:
    (tmp_path / "key").write_text("filed\n\n other\n", encoding="utf-8")
    by_file = ("serve", "--api-key-file", "key")
    assert _api_keys(parse(*by_file, SFUMATO_API_KEY="told")) == ("filed", "other")
    assert _api_keys(parse("serve", SFUMATO_API_KEY="told\n", file='api-key-file = "key"')) == (
        "told",
    )
    assert _api_keys(parse("serve")) == ()
    several = ("serve", "--api-key", "a", "--api-key", "b", "--api-key", "a")
    assert _api_keys(parse(*several)) == ("a", "b")
    assert _api_keys(parse("serve", SFUMATO_API_KEY="a, b")) == ("a", "b")
    (tmp_path / "key").write_text("\n", encoding="utf-8")
    both = parse("serve", SFUMATO_API_KEY="told", SFUMATO_API_KEY_FILE="key")
    for args, message in (
        (parse(*by_file), "--api-key-file: key has no key"),
        (both, "SFUMATO_API_KEY, SFUMATO_API_KEY_FILE: give one of them"),
    ):
        with pytest.raises(Refused) as refused:
            _api_keys(args)
        assert str(in_options(args, refused.value)) == message


def test_a_file_that_is_not_there_is_one_line(cli: Any) -> None:
    done = cli("run", "Hi", "--config", "no.toml")
    assert (done.code, done.err) == (2, "sfumato: error: no.toml: No such file or directory\n")


def test_a_variable_that_is_almost_an_option_gets_a_warning(
    use: Any, cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {"SFUMATO_ISA": "1", "SFUMATO_DEBUG": "0", "SFUMATO_PORT": "1", "OTHER_PROT": "1"}
    assert suspicious(known | {"SFUMATO_SERVICE_HOST": "10.0.0.1"}) == []
    use("yes")
    monkeypatch.setenv("SFUMATO_MAX_TOKEN", "5")
    done = cli("run", "Hi")
    assert (done.code, done.out) == (0, "yes\n")
    assert done.err == (
        "sfumato: warning: SFUMATO_MAX_TOKEN is not read; did you mean SFUMATO_MAX_TOKENS?\n"
    )


def test_a_device_is_refused_with_its_place(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SFUMATO_DEVICE", "tpu")
    assert cli("run", "Hi").err.startswith("sfumato: error: SFUMATO_DEVICE: 'tpu' is none of auto")
