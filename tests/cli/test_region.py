from __future__ import annotations

import pytest
from rich.console import Console
from rich.text import Text
from tests.cli.screen import Screen

from sfumato.cli.display import Region


@pytest.fixture
def screen() -> Screen:
    return Screen(20)


@pytest.fixture
def console(screen: Screen) -> Console:
    return Console(file=screen, width=20, height=10, force_terminal=True, color_system="standard")


def test_lines_are_replaced_in_place(screen: Screen, console: Console) -> None:
    with Region(console) as region:
        region.draw([Text("first"), Text("second")])
        region.draw([Text("1"), Text("2")], above=[Text("done")])
        assert screen.terminal.lines == ["done", "1", "2"]
        region.draw([])
    assert screen.terminal.lines == ["done"]


def test_cursor_is_shown_again_after_an_error(screen: Screen, console: Console) -> None:
    with pytest.raises(RuntimeError), Region(console):
        raise RuntimeError
    assert screen.getvalue().endswith("\x1b[?25h")


def test_a_narrower_terminal_leaves_nothing_behind(screen: Screen, console: Console) -> None:
    with Region(console) as region:
        region.draw([Text("x" * 18), Text("y" * 7)], above=[Text("kept")])
        screen.terminal.resize(7)
        console.width = 7
        region.draw([Text("a"), Text("b")])
    assert screen.terminal.lines == ["kept", "a", "b"]


def test_markup_is_text(screen: Screen, console: Console) -> None:
    with Region(console) as region:
        region.draw([Text("[bold]x[/bold]")])
    assert screen.terminal.lines == ["[bold]x[/bold]"]
