from __future__ import annotations

import io
import os
import termios

import pytest
from tests.cli.conftest import Terminal

from sfumato.cli import terminal


def test_a_terminal_is_told_of_the_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", stderr := Terminal())
    with terminal.loading():
        assert stderr.getvalue() == "loading …\r"
    assert stderr.getvalue().split("\r")[1:] == [" " * 9, ""]
    monkeypatch.setattr("sys.stderr", stderr := io.StringIO())
    with terminal.loading():
        assert stderr.getvalue() == ""


def test_progress_is_a_bar_in_a_terminal_and_nothing_elsewhere(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    for stderr, shown in ((Terminal(), True), (io.StringIO(), False)):
        monkeypatch.setattr("sys.stderr", stderr)
        with terminal.progress("training") as advance:
            advance(3, 7)
            print("a line of the report")
        assert ("training" in stderr.getvalue()) == ("3/7" in stderr.getvalue()) == shown
        assert capsys.readouterr().out == "a line of the report\n"  # a file gets it unchanged


def test_lines_are_broken_between_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "44")
    assert terminal.wrapped("word " * 20).splitlines()[0] == ("word " * 8).strip()
    monkeypatch.delenv("COLUMNS")
    # The width is that of the stream which is written to: here standard output is a file.
    inner, outer = os.openpty()
    termios.tcsetwinsize(inner, (24, 30))
    with os.fdopen(outer, "w") as narrow:
        monkeypatch.setattr("sys.stderr", narrow)
        terminal.print_message("note", "word " * 8)
        terminal.print_lines(["word " * 8], narrow)
        narrow.flush()
        assert max(map(len, os.read(inner, 1000).decode().splitlines())) < 30
    os.close(inner)
    assert terminal.columns() == 80
