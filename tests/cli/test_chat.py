from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sfumato.catalog import EMBEDDED, PACKAGED
from sfumato.cli import chat
from sfumato.cli.chat import completions, help_text
from sfumato.cli.generation import TOYS


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def test_the_conversation_is_remembered(use: Any, cli: Any) -> None:
    model = use("yes")
    done = cli("chat", "--system", "Be brief.", stdin="One?\nTwo?\n")
    assert (done.code, done.err) == (0, "")
    assert done.out == "yes\nyes\n\n"
    system = {"role": "system", "content": "Be brief."}
    assert model.requests[1]["messages"] == [system, user("One?"), assistant("yes"), user("Two?")]


def test_clear_keeps_the_system_message(use: Any, cli: Any) -> None:
    model = use("yes")
    cli("chat", "--system", "S", stdin="One?\n/clear\nTwo?\n")
    assert model.requests[1]["messages"] == [{"role": "system", "content": "S"}, user("Two?")]


def test_the_embedded_model_says_beforehand_that_it_does_not_think(use: Any, cli: Any) -> None:
    for path in (EMBEDDED, Path("x")):
        use("yes").path = path
        done = cli("chat", stdin="/thinking on\nWho?\n")
        assert ("has not learnt to think" in done.err) == (path == EMBEDDED)


def test_settings(use: Any, cli: Any) -> None:
    model = use("yes")
    cli("chat", stdin="/seed 5\n/steps 3\n/thinking on\nOne?\n/thinking off\nTwo?\n")
    first, second = model.requests
    assert (first["seed"], first["sampler"].max_steps, first["thinking"]) == (5, 3, True)
    assert (second["seed"], second["sampler"].max_steps, second["thinking"]) == (5, 3, False)


def test_save(use: Any, cli: Any, tmp_path: Path) -> None:
    use("oui é")
    cli("chat", stdin=f"One?\n/save {tmp_path / 'a talk.json'}\n")
    saved = json.loads((tmp_path / "a talk.json").read_text(encoding="utf-8"))
    assert saved == [user("One?"), assistant("oui é")]


def test_mistakes_are_told_and_the_chat_goes_on(use: Any, cli: Any) -> None:
    model = use("yes")
    wrong = ["/nonsense", "/seed x", "/steps 0", "/thinking maybe", "/save", "/save /no/such/dir/f"]
    done = cli("chat", stdin="\n".join([*wrong, "/", "Still there?"]) + "\n")
    assert done.code == 0
    assert done.err.count("sfumato: error: ") == done.err.count("\n") == len(wrong) + 1
    assert [r["messages"] for r in model.requests] == [[user("Still there?")]]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/seed", "/seed: it needs an argument; usage: /seed N"),
        ("/seed x", "/seed: 'x' is not a whole number from 0 to 18446744073709551615; usage:"),
        (f"/seed {2**64}", f"/seed: '{2**64}' is not a whole number from 0 to"),
        ("/steps 0", "/steps: '0' is not a whole number from 1 to 4096; usage: /steps N"),
        ("/steps 99999", "/steps: '99999' is not a whole number from 1 to 4096; usage: /steps N"),
        ("/thinking maybe", "/thinking: 'maybe' is neither on nor off; usage: /thinking on|off"),
        ("/save", "/save: it needs an argument; usage: /save [--force] FILE"),
        ("/clear all", "/clear: it takes no argument; usage: /clear"),
        ("/claer", "/claer: no such command; did you mean /clear?"),
        ("/xyz", "/xyz: no such command; /help lists those that there are"),
    ],
)
def test_a_wrong_command_is_told_how_it_is_used(
    use: Any, cli: Any, line: str, message: str
) -> None:
    use("yes")
    assert cli("chat", stdin=f"{line}\n").err.startswith(f"sfumato: error: {message}")


def test_lines_that_go_on(use: Any, cli: Any) -> None:
    model = use("yes")
    cli("chat", stdin="sudoku\\\n12\\\n34\n\n")
    assert [r["messages"] for r in model.requests] == [[user("sudoku\n12\n34")]]


def test_help_and_quit(use: Any, cli: Any) -> None:
    model = use("yes")
    done = cli("chat", stdin="/help\n/quit\nUnheard?\n")
    assert (done.code, done.out, model.requests) == (0, help_text() + "\n", [])


@pytest.mark.parametrize("width", [44, 80])
def test_help_is_wrapped_between_words(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    words = help_text().split()
    monkeypatch.setenv("COLUMNS", str(width))
    assert max(map(len, help_text().splitlines())) < width
    assert help_text().split() == words


def test_ctrl_c_ends_the_answer_and_not_the_chat(use: Any, cli: Any) -> None:
    model = use("one ", "two", interrupt_at=1)
    done = cli("chat", stdin="First?\nSecond?\n")
    assert (done.code, done.out) == (0, "one two\n(interrupted)\n" * 2 + "\n")
    assert model.requests[1]["messages"] == [user("First?"), assistant("one "), user("Second?")]


def test_ctrl_c_before_any_text_leaves_no_turn(use: Any, cli: Any) -> None:
    model = use("one", interrupt_at=0)
    cli("chat", stdin="First?\nSecond?\n")
    assert model.requests[1]["messages"] == [user("Second?")]


PRESSED = object()


@pytest.fixture
def typing(cli: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """typing("line", ("half a li", PRESSED), …) chats with a user at a terminal."""

    def chat(*script: Any) -> Any:
        lines, buffer = iter(script), [""]
        terminal = SimpleNamespace(isatty=lambda: True)

        def type_in(prompt: str) -> str:
            line = next(lines, None)
            if line is None:
                raise EOFError
            if isinstance(line, str):
                return line
            buffer[0] = line[0]
            raise KeyboardInterrupt

        monkeypatch.setattr("builtins.input", type_in)
        monkeypatch.setattr("sfumato.cli.chat._typed", lambda: buffer[0])
        monkeypatch.setattr("sfumato.cli.chat.sys", SimpleNamespace(stdin=terminal))
        return cli("chat", "--no-visual")

    return chat


def test_a_terminal_is_greeted_with_the_model_and_help(
    use: Any, typing: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = use("yes")
    assert typing().out.startswith("sfumato-embedded · /help lists the commands\n\n")
    assert TOYS.keys() == PACKAGED.keys()
    for model.path in PACKAGED.values():
        assert ("canvases of masks" in typing().out) == (model.packaged == "embedded-masks")
    monkeypatch.setenv("SFUMATO_MODEL", "models/small.gguf")
    assert typing().out.startswith("small.gguf · /help")
    monkeypatch.setenv("SFUMATO_MODEL", "hf:owner/name")
    monkeypatch.setattr("sfumato.cli.pull.local", lambda reference: Path("snapshots/1a2b"))
    assert typing().out.startswith("hf:owner/name · /help")


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        (EMBEDDED, "this demonstration model cannot answer that; ask a whole question, as"),
        (Path("x.gguf"), "the text may be unsettled: 1 of 1 canvases hit the step cap (2); /steps"),
    ],
)
def test_canvases_that_ran_out_of_steps(use: Any, cli: Any, path: Path, hint: str) -> None:
    model = use("bbl")
    model.path, model.convergence = path, "step_cap"
    assert cli("chat", stdin="Hi\n").err.startswith(f"sfumato: hint: {hint}")


def test_ctrl_c_clears_a_half_typed_line_and_on_an_empty_one_leaves(use: Any, typing: Any) -> None:
    model = use("yes")
    done = typing(("Fir", PRESSED), "First?", ("Sec", PRESSED), ("Thi", PRESSED), ("", PRESSED))
    assert (done.code, [r["messages"] for r in model.requests]) == (130, [[user("First?")]])
    again = "\n(Ctrl-C again leaves)\n"
    assert done.out.endswith(f"commands\n\n{again}yes\n\n{again}{again}\n(left)\n")


def test_one_ctrl_c_on_an_empty_line_loses_nothing(use: Any, typing: Any) -> None:
    """It may be meant for an answer that has just ended."""
    model = use("yes")
    done = typing("First?", ("", PRESSED), "Second?", ("", PRESSED), ("", PRESSED), "Unheard?")
    assert (done.code, len(model.requests)) == (130, 2)
    assert done.out.endswith("\n(left)\n")


def test_ctrl_c_within_lines_that_go_on_clears_them_all(use: Any, typing: Any) -> None:
    model = use("yes")
    typing(("", PRESSED), "one\\", ("", PRESSED), "two")
    assert [r["messages"] for r in model.requests] == [[user("two")]]


def test_ctrl_c_just_after_an_answer_keeps_the_chat(
    use: Any, cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = use("one ", "two", interrupt_at=1)
    answer = chat.generation.answer

    def and_once_more(*args: Any, **options: Any) -> Any:
        monkeypatch.setattr(chat.generation, "answer", answer)
        answer(*args, **options)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(chat.generation, "answer", and_once_more)
    done = cli("chat", stdin="First?\nSecond?\n")
    assert (done.code, done.err, len(model.requests)) == (0, "", 2)


def test_ctrl_c_where_nobody_types_leaves(use: Any, cli: Any, monkeypatch: Any) -> None:
    def pressed(prompt: str) -> str:
        raise KeyboardInterrupt

    use("yes")
    monkeypatch.setattr("builtins.input", pressed)
    assert cli("chat").code == 130


def test_a_line_that_is_no_text_does_not_end_the_chat(
    use: Any, cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = use("yes")
    lines: Any = iter([b"\xff", b"Still there?"])

    def type_in(prompt: str) -> str:
        for line in lines:
            return str(line.decode())
        raise EOFError

    monkeypatch.setattr("builtins.input", type_in)
    done = cli("chat")
    assert done.err.startswith("sfumato: error: 'utf-8' codec can't decode byte 0xff")
    assert [r["messages"] for r in model.requests] == [[user("Still there?")]]


def ended(program: subprocess.Popen[bytes], terminal: int) -> int | None:
    """The exit code; what the program writes last is read, or it may wait for that."""
    until = time.monotonic() + 200
    while program.poll() is None and time.monotonic() < until:
        if select.select([terminal], [], [], 0.2)[0]:
            with suppress(OSError):  # its end of the terminal is closed
                os.read(terminal, 4096)
    return program.poll()


def test_at_a_real_terminal() -> None:
    """The line editor forgets what was typed, takes a paste of several lines as one message, and
    clears the screen; the second Ctrl-C leaves."""
    ours, theirs = os.openpty()
    program = subprocess.Popen(
        [sys.executable, "-m", "sfumato", "chat", "--no-visual"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        env=os.environ | {"TERM": "xterm"},
    )
    os.close(theirs)
    seen = b""

    def expect(text: str, otherwise: Callable[[], None] | None = None) -> None:
        nonlocal seen
        while text.encode() not in seen:
            if not select.select([ours], [], [], 10 if otherwise else 200)[0]:
                assert otherwise, f"no {text!r} after {seen!r}"
                otherwise()
                otherwise = None
                continue
            seen += os.read(ours, 4096)
        seen = seen.split(text.encode(), 1)[1]

    def press_ctrl_c_and_expect(text: str) -> None:
        # CPython leaves a signal lying that comes just before it waits for a key; a second one
        # wakes it, and counts as the same.
        press = partial(program.send_signal, signal.SIGINT)
        time.sleep(0.3)
        press()
        expect(text, otherwise=press)

    try:
        expect("loading")
        expect("sfumato-embedded · /help lists the commands")
        expect("is a toy")
        expect("› ")
        os.write(ours, b"What is the cap")
        expect("cap")
        press_ctrl_c_and_expect("(Ctrl-C again leaves)")
        expect("› ")
        os.write(ours, b"\x1b[200~What is the capital\nof France?\x1b[201~\r")  # a paste
        expect("Paris")
        expect("› ")
        os.write(ours, b"\x0c")  # Ctrl-L
        expect("\x1b[2J")
        expect("› ")
        os.write(ours, b"Who are you?\r")
        expect("Sfumato")
        for answer in ("(Ctrl-C again leaves)", "(left)"):
            expect("› ")
            press_ctrl_c_and_expect(answer)
        assert ended(program, ours) == 130
    finally:
        program.kill()
        program.wait()
        os.close(ours)


def test_a_conversation_too_long_for_the_context_suggests_to_clear_it(cli: Any) -> None:
    """With the real model: the complaint is recognised by its words."""
    done = cli("chat", "--max-tokens", "8", stdin=f"Hi\n{'x' * 16_384}\n/clear\n{'x' * 16_384}\n")
    first, second = done.err.splitlines()
    assert "context" in first
    assert first.endswith("or /clear the conversation")
    assert "context" in second
    assert "/clear" not in second


def test_a_failed_answer_leaves_no_turn(use: Any, cli: Any) -> None:
    model = use("yes")
    stream = model.stream

    def fails_once(**request: Any) -> Any:
        model.stream = stream
        raise ValueError("the prompt is too long")

    model.stream = fails_once
    done = cli("chat", stdin="First?\nSecond?\n")
    assert done.err == "sfumato: error: the prompt is too long\n"
    assert model.requests[0]["messages"] == [user("Second?")]


def requests_of(model: Any) -> list[tuple[list[str], int]]:
    """Of each request: what the messages say, and the seed."""
    return [([m["content"] for m in r["messages"]], r["seed"]) for r in model.requests]


def test_a_saved_conversation_goes_on(use: Any, cli: Any, tmp_path: Path) -> None:
    model = use("yes")
    file = tmp_path / "a talk.json"
    cli("chat", "--system", "S", stdin=f"One?\n/save {file}\n")
    done = cli("chat", stdin=f"Other?\n/load {file}\nTwo?\n/undo\n/undo\nThree?\n")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("yes\n(the conversation has 1 question)\nyes\n")
    assert [messages for messages, _ in requests_of(model)] == [
        ["S", "One?"],
        ["Other?"],
        ["S", "One?", "yes", "Two?"],
        ["Other?", "yes", "Three?"],
    ]


def test_save_replaces_no_file(use: Any, cli: Any, tmp_path: Path) -> None:
    use("yes")
    file = tmp_path / "talk.json"
    file.write_text("mine")
    done = cli("chat", stdin=f"One?\n/save {file}\n")
    assert f"/save: {file}: exists already; name another, or replace it with --force" in done.err
    assert file.read_text() == "mine"
    assert cli("chat", stdin=f"One?\n/save --force {file}\n").err == ""
    assert json.loads(file.read_text()) == [user("One?"), assistant("yes")]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"{", "is not JSON"),
        (b"\xff", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"{}", "has no list of messages, as /save writes"),
        (b"[1]", "message 1: must have a role and a content and nothing else"),
        (
            b'[{"role": "user", "content": "a", "x": 1}]',
            "message 1: must have a role and a content",
        ),
        (b'[{"role": "user", "content": [1]}]', "message 1: its content must be text"),
        (b'[{"role": "user", "content": "a"}]', "message 1: is a question without an answer"),
        (
            b'[{"role": "system", "content": "a"}, {"role": "assistant", "content": "a"}]',
            "message 2: must have the role user, not 'assistant'",
        ),
        (b"[" + b"1," * 10_000 + b"1]", "has more than 10,000 messages"),
        (b" " * ((16 << 20) + 1), "has more than 16,777,216 bytes"),
        (None, "No such file or directory"),
    ],
)
def test_what_is_no_conversation_is_not_loaded(
    use: Any, cli: Any, tmp_path: Path, content: bytes | None, why: str
) -> None:
    model = use("yes")
    file = tmp_path / "talk.json"
    if content is not None:
        file.write_bytes(content)
    done = cli("chat", stdin=f"One?\n/load {file}\nTwo?\n")
    assert why in done.err and done.err.count("\n") == 1
    assert requests_of(model)[1][0] == ["One?", "yes", "Two?"]


def test_retry_draws_another_answer(use: Any, cli: Any) -> None:
    model = use("yes")
    done = cli("chat", stdin="One?\nTwo?\n/retry\n/retry\n/seed 9\n/retry\n/steps 3\n/retry\n")
    assert done.err == "" and done.out.count("(seed ") == 2
    assert requests_of(model)[1:] == [(["One?", "yes", "Two?"], seed) for seed in (0, 1, 2, 9, 9)]
    model.requests.clear()
    cli("chat", stdin=f"/seed {2**64 - 1}\nOne?\n/retry\n")
    assert requests_of(model) == [(["One?"], 2**64 - 1), (["One?"], 0)]


def test_retry_asks_again_what_has_no_answer(use: Any, cli: Any) -> None:
    model = use("one", interrupt_at=0)
    cli("chat", stdin="First?\n/retry\n/undo\n/retry\n")
    assert [messages for messages, _ in requests_of(model)] == [["First?"], ["First?"]]


def test_an_answer_stays_until_a_retry_has_another(use: Any, cli: Any, tmp_path: Path) -> None:
    model = use("one")
    begun = cli("chat", stdin=f"First?\n/save {tmp_path / 'a'}\n")
    model = use("one", interrupt_at=0)
    cli("chat", stdin=f"/load {tmp_path / 'a'}\n/retry\nNext?\n")
    assert begun.code == 0
    assert [messages for messages, _ in requests_of(model)] == [
        ["First?"],
        ["First?", "one", "Next?"],
    ]


def test_undo_takes_back_turns_retries_and_clear(use: Any, cli: Any) -> None:
    model = use("yes")
    done = cli("chat", stdin="One?\nTwo?\n/clear\n/undo\n/undo\nThree?\n")
    assert done.out.endswith(
        "(the conversation has 2 questions)\n(the conversation has 1 question)\nyes\n\n"
    )
    assert requests_of(model)[-1][0] == ["One?", "yes", "Three?"]
    model.requests.clear()
    cli("chat", stdin="One?\n/retry\n/undo\nTwo?\n")
    assert requests_of(model)[-1][0] == ["One?", "yes", "Two?"]


def test_there_may_be_nothing_to_retry_or_undo(use: Any, cli: Any) -> None:
    use("yes")
    done = cli("chat", "--system", "S", stdin="/retry\n/undo\n/retry 3\n")
    assert done.err.splitlines() == [
        "sfumato: error: /retry: there is no question yet; usage: /retry",
        "sfumato: error: /undo: there is nothing to take back; usage: /undo",
        "sfumato: error: /retry: it takes no argument; usage: /retry",
    ]


def test_a_line_is_completed(tmp_path: Path) -> None:
    (tmp_path / "a talk.json").touch()
    (tmp_path / "a[1]").mkdir()
    assert completions("/s") == ["/seed ", "/steps ", "/save "]
    assert completions("/u") == ["/undo"]
    assert completions("/thinking o") == ["/thinking on", "/thinking off"]
    assert completions(f"/load {tmp_path}/a t") == [f"/load {tmp_path}/a talk.json"]
    assert completions(f"/save --force {tmp_path}/a[") == [f"/save --force {tmp_path}/a[1]/"]
    for line in ("Hello", "/seed 1", "/nonsense x", "/clear "):
        assert completions(line) == []
