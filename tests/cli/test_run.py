from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import Terminal

from sfumato import SoftTopK
from sfumato.catalog import EMBEDDED
from sfumato.cli import main

INTERRUPTED = "(interrupted; the end of the text is a draft, which had not settled)\n"


def test_plain_output_is_exactly_the_answer(use: Any, cli: Any) -> None:
    use("Hel", "lo [b]you[/b]\n\n  there\x1b[0m ")
    done = cli("run", "Hi")
    assert (done.code, done.out, done.err) == (0, "Hello [b]you[/b]\n\n  there\x1b[0m \n", "")


def test_question_from_standard_input(use: Any, cli: Any) -> None:
    model = use("yes")
    cli("run", stdin="1234\nétc\n")
    cli("run", "-", stdin="again")
    cli("run", "given", stdin="ignored")
    messages = [request["messages"] for request in model.requests]
    assert messages == [
        [{"role": "user", "content": text}] for text in ("1234\nétc\n", "again", "given")
    ]


def test_words_need_no_quotes(use: Any, cli: Any) -> None:
    model = use("yes")
    lines = (
        ("what", "is", "this?"),
        ("what", "is", "--seed", "3", "this?"),
        ("--seed", "3", "what is", "this?"),
        ("--", "-5", "+", "3"),
    )
    assert [cli("run", *words).code for words in lines] == [0] * 4
    questions = [request["messages"][0]["content"] for request in model.requests]
    assert questions == ["what is this?"] * 3 + ["-5 + 3"]


@pytest.mark.parametrize("typed", ["Who are you?\n", ""])
def test_a_terminal_is_asked_for_the_question(typed: str) -> None:
    """The prompt goes to the terminal, and not into the file that the answer goes to."""
    ours, theirs = os.openpty()
    command = [sys.executable, "-m", "sfumato", "run", "--no-visual"]
    running = subprocess.Popen(
        command, stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert running.stderr
    prompt = running.stderr.read(len("Your question: "))
    os.write(ours, typed.encode() or b"\x04")
    out, err = running.communicate(timeout=120)
    os.close(ours), os.close(theirs)
    assert prompt == "Your question: "
    if typed:
        assert (running.returncode, "Sfumato" in out) == (0, True), err
    else:
        assert (running.returncode, out, err.strip()) == (0, "", "")


@pytest.mark.parametrize("stdin", ["", " \n"])
def test_an_empty_question_is_refused(use: Any, cli: Any, stdin: str) -> None:
    use("yes")
    done = cli("run", stdin=stdin)
    assert (done.code, done.out, done.err) == (2, "", "sfumato: error: the question is empty\n")


def test_options_reach_the_model(use: Any, cli: Any) -> None:
    model = use("yes")
    cli(
        *("run", "Hi", "--system", "Be brief.", "--max-tokens", "9", "--seed", "7", "--thinking"),
        *("--stop", "a", "--stop", "b", "--steps", "5", "--temperature", "0", "--top-k", "3"),
        *("--top-p", "0.5", "--entropy-bound", "0.2", "--verify"),
    )
    cli("run", "Hi", "--verify", "abstain")
    assert [request["verify"] for request in model.requests] == ["report", "abstain"]
    request = model.requests[0]
    sampler = request["sampler"]
    assert request["messages"][0] == {"role": "system", "content": "Be brief."}
    assert (request["max_tokens"], request["seed"], request["thinking"]) == (9, 7, True)
    assert request["stop"] == ["a", "b"]
    assert (sampler.max_steps, sampler.temperature, sampler.top_k) == (5, 0, 3)
    assert (sampler.top_p, sampler.sampler.bound) == (0.5, 0.2)


@pytest.mark.parametrize("command", [("run", "Hi"), ("chat",)])
def test_approximations_are_asked_for(use: Any, cli: Any, command: Any) -> None:
    model = use("yes")
    options = ((), ("--soft-skip", "1e-3"), ("--soft-top-k", "64"), ("--soft-top-k", "5:9"))
    for option in options:
        assert cli(*command, *option, stdin="Hi\n").code == 0
    given = [(r["sampler"].soft_skip, r["sampler"].soft_top_k) for r in model.requests]
    assert given == [(None, None), (1e-3, None), (None, SoftTopK(64)), (None, SoftTopK(5, 9))]
    help = " ".join(cli(command[0], "--help").out.split())
    assert "K2, which may be greater, at the last" in help


@pytest.mark.parametrize(
    "option",
    [
        ("--temperature", "-1"),
        ("--temperature", "nan"),
        ("--top-p", "2"),
        ("--entropy-bound", "-3"),
        ("--sampler", "magic"),
        ("--max-tokens", "0"),
        ("--steps", "many"),
        ("--seed", "-1"),
        ("--soft-skip", "1"),
        ("--soft-top-k", "0"),
        ("--soft-top-k", "8:"),
        ("--soft-top-k", "8:4:2"),
        ("--soft-top-k", "5000"),
        ("--soft-top-k", "8", "--soft-skip", "0.1"),
        ("--verify", "a question"),
        ("--no-such-option",),
    ],
)
def test_a_wrong_option_is_one_line_and_exit_code_2(use: Any, cli: Any, option: Any) -> None:
    use("yes")
    done = cli("run", "Hi", *option)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("sfumato: error: ")
    assert done.err.count("\n") == 1


def test_json(use: Any, cli: Any) -> None:
    use("né", "t").warnings = ("canvas 0: odd",)
    done = cli("run", "Hi", "--json")
    reply = json.loads(done.out)
    assert reply["text"] == "nét"
    assert reply["thought"] is None
    assert (reply["tool_calls"], reply["stop_reason"]) == ([], "eos")
    assert reply["warnings"] == ["canvas 0: odd"]
    assert reply["stats"]["steps"] == [2, 2]
    assert reply["stats"]["tokens_per_forward"] == 0.75
    assert done.err == "sfumato: note: canvas 0: odd\n"


def test_ctrl_c_ends_the_reply_with_all_that_belongs_to_it(use: Any, cli: Any) -> None:
    use("one ", "two", interrupt_at=1, held="<").warnings = ("canvas 0: odd",)
    done = cli("run", "Hi")
    assert (done.code, done.out) == (130, "one <two\n")
    assert done.err == f"sfumato: note: canvas 0: odd\n{INTERRUPTED}"
    done = cli("run", "Hi", "--json")
    assert done.code == 130 and "(interrupted)" not in done.err
    reply = json.loads(done.out)
    assert (reply["text"], reply["draft"], reply["stop_reason"]) == ("one <", "two", "cancelled")
    assert reply["stats"]["steps"] == [2]


def test_ctrl_c_in_the_first_canvas_prints_its_draft(use: Any, cli: Any) -> None:
    use("one ", interrupt_at=0)
    done = cli("run", "--slow", "Hi")
    assert (done.code, done.out, done.err) == (130, "one \n", INTERRUPTED)


def test_ctrl_c_before_the_model_is_loaded_is_confirmed(
    cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sfumato.cli.generation.load", lambda _: signal.raise_signal(signal.SIGINT))
    before = signal.getsignal(signal.SIGINT)
    try:
        done = cli("run", "Hi")
    finally:
        signal.signal(signal.SIGINT, before)
    assert (done.code, done.out, done.err) == (130, "", "(interrupted)\n")


def test_a_second_ctrl_c_leaves_what_was_committed_and_the_draft(use: Any, cli: Any) -> None:
    use("one ", "two", interrupt_at=1, held="<", presses=2)
    done = cli("run", "Hi")
    assert (done.code, done.out, done.err) == (130, "one two\n", INTERRUPTED)
    done = cli("run", "Hi", "--json")
    assert done.code == 130
    assert json.loads(done.out) == {"text": "one ", "draft": "two", "stop_reason": "cancelled"}


def test_canvases_that_ran_out_of_steps_are_told_with_what_to_do(use: Any, cli: Any) -> None:
    use("one ", "two").convergence = "step_cap"
    done = cli("run", "Hi")
    assert (done.code, done.out) == (0, "one two\n")
    assert done.err == (
        "sfumato: hint: the text may be unsettled: 2 of 2 canvases hit the step cap (2); "
        "--steps raises it\n"
    )
    assert cli("run", "Hi", "--json").err == ""


def test_a_replay_is_written_beside_the_answer(use: Any, cli: Any, tmp_path: Path) -> None:
    use("né", " </script>")
    path = tmp_path / "replay.html"
    done = cli("run", "Hi", "--replay", str(path))
    assert (done.code, done.out, done.err) == (0, "né </script>\n", "")
    page = path.read_text("utf-8")
    match = re.search(r'id="replay">(.*?)</script>', page)
    assert match
    data = json.loads(match[1])
    assert (data["question"], data["text"]) == ("Hi", "né </script>")
    assert [len(canvas["drafts"]) for canvas in data["canvases"]] == [2, 2]
    assert data["summary"][0] == "4 steps in 2 canvases"
    use("one ", "two", interrupt_at=1)
    assert cli("run", "Hi", "--replay", str(path), "--force").code == 130
    assert '"text":"one "' in path.read_text("utf-8")
    assert [file.name for file in tmp_path.iterdir()] == ["replay.html"]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("no/where.html", "does not exist"),
        ("a.txt", "name it FILE.html"),
        ("d.html", "is a folder"),
        ("mine.html", "mine.html: exists already; name another, or replace it with --force"),
    ],
)
def test_a_replay_that_cannot_be_written_is_refused_first(
    use: Any, cli: Any, tmp_path: Path, name: str, why: str
) -> None:
    model = use("yes")
    (tmp_path / "d.html").mkdir()
    (tmp_path / "mine.html").write_text("mine")
    done = cli("run", "Hi", "--replay", str(tmp_path / name))
    assert (done.code, done.out, model.requests) == (2, "", [])
    assert why in done.err and done.err.count("\n") == 1
    assert (tmp_path / "mine.html").read_text() == "mine"


def test_the_embedded_model_is_not_to_be_given_more_steps(
    use: Any, cli: Any, tmp_path: Path
) -> None:
    model = use("bbl")
    model.path, model.convergence = EMBEDDED, "step_cap"
    path = tmp_path / "replay.html"
    done = cli("run", "Hi", "--replay", str(path))
    page = path.read_text("utf-8")
    assert '"demonstration":"This demonstration model knows' in page
    assert '"remark":"This demonstration model cannot answer that."' in page
    assert (done.code, done.out) == (0, "bbl\n")
    assert done.err == "sfumato: hint: this demonstration model cannot answer that\n"


@pytest.mark.parametrize(
    ("text", "known"),
    [
        ("I am Sfumato's embedded demo, a tiny diffusion model.", True),
        ("1234\n3412\n2143\n4321", True),
        ("I am Sfumato's embedded demo, a dog.", False),
        ("", False),
    ],
)
def test_a_settled_reply_that_the_embedded_model_was_not_taught_gets_a_remark(
    use: Any, cli: Any, text: str, known: bool
) -> None:
    use(text).path = EMBEDDED
    hint = "sfumato: hint: this demonstration model cannot answer that"
    assert cli("run", "Hi").err == ("" if known else hint + "\n")
    done = cli("chat", stdin="Hi\n")  # there is a conversation to clear, perhaps
    assert done.err == "" if known else done.err.startswith(hint + "; ask ")


def test_the_embedded_model_does_not_think(use: Any, cli: Any) -> None:
    for path, note in ((EMBEDDED, True), (Path("x"), False)):
        use("Hello! How can I help?").path = path
        assert (
            "note: the embedded model has not learnt" in cli("run", "--thinking", "Hi").err
        ) == note


@pytest.mark.parametrize(("path", "warned"), [(EMBEDDED, True), (Path("model.gguf"), False)])
def test_a_terminal_is_told_that_the_embedded_model_is_a_toy(
    use: Any, cli: Any, monkeypatch: pytest.MonkeyPatch, path: Path, warned: bool
) -> None:
    use("yes").path = path
    for argv in (("run", "Hi"), ("run", "Hi", "--json")):
        stderr = Terminal()
        monkeypatch.setattr("sys.stderr", stderr)
        assert cli(*argv).code == 0
        printed = " ".join(stderr.getvalue().split())
        assert ("is a toy: it solves 4x4 Sudoku" in printed) == (warned and "--json" not in argv)
        assert "loading" in printed


def test_slow_shows_the_noise_and_holds_every_frame(
    use: Any, cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, waits = use("one", "two"), []
    model.config.canvas_length, model.config.vocab_size = 3, 64
    monkeypatch.setattr("sfumato.cli.generation.is_visual", lambda: True)
    monkeypatch.setattr("time.sleep", waits.append)
    done = cli("run", "Hi", "--slow")
    assert all(f"step  {step}/48" in done.out for step in range(3))
    noise = done.out[done.out.index("step  0/48") : done.out.index("step  1/48")]
    assert "ms/step" not in noise  # nothing has been measured
    # Between noise, two drafts and the commit, for each of two canvases.
    assert sum(0.35 < wait <= 0.4 for wait in waits) == 6
    del waits[:]
    assert "step  0/48" not in cli("run", "Hi").out
    assert waits == []


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_json_says_the_same_in_every_encoding(
    use: Any, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    use("né 漢")
    stdout = io.TextIOWrapper(io.BytesIO(), encoding)
    monkeypatch.setattr("sys.stdout", stdout)
    assert main(["run", "Hi", "--json"]) == 0
    written = stdout.buffer.getvalue()  # type: ignore[attr-defined]
    assert json.loads(written.decode(encoding))["text"] == "né 漢"
    assert ("漢".encode() in written) == (encoding == "utf-8")
