from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sfumato.cli.chat import HELP


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


def test_lines_that_go_on(use: Any, cli: Any) -> None:
    model = use("yes")
    cli("chat", stdin="sudoku\\\n12\\\n34\n\n")
    assert [r["messages"] for r in model.requests] == [[user("sudoku\n12\n34")]]


def test_help_and_quit(use: Any, cli: Any) -> None:
    model = use("yes")
    done = cli("chat", stdin="/help\n/quit\nUnheard?\n")
    assert (done.code, done.out, model.requests) == (0, HELP + "\n", [])


def test_ctrl_c_ends_the_answer_and_not_the_chat(use: Any, cli: Any) -> None:
    model = use("one ", "two", interrupt_at=1)
    done = cli("chat", stdin="First?\nSecond?\n")
    assert (done.code, done.out) == (0, "one \n(interrupted)\n" * 2 + "\n")
    assert model.requests[1]["messages"] == [user("First?"), assistant("one "), user("Second?")]


def test_ctrl_c_before_any_text_leaves_no_turn(use: Any, cli: Any) -> None:
    model = use("one", interrupt_at=0)
    cli("chat", stdin="First?\nSecond?\n")
    assert model.requests[1]["messages"] == [user("Second?")]


def test_ctrl_c_at_the_prompt_leaves(use: Any, cli: Any, monkeypatch: Any) -> None:
    def pressed(prompt: str) -> str:
        raise KeyboardInterrupt

    use("yes")
    monkeypatch.setattr("builtins.input", pressed)
    assert cli("chat").code == 130


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
