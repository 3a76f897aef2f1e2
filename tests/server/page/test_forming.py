"""The page's modes Fill, JSON and Edit: examples, holes, changes, errors in words."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tests.server.page.browsing import expect, props, says

FAILED = r"\Z.|Failed to load resource"
SETTINGS = {"max_steps": 3, "pace": "none"}
SELECT = "field => field.setSelectionRange(field.value.indexOf('Paris'), field.value.length - 1)"


def opened(open_page: Callable[..., Any], mode: str) -> tuple[Any, Any]:
    """The page and the mode's view."""
    page = open_page(expected=FAILED, stored={"sfumato.settings": SETTINGS})
    page.get_by_role("button", name=mode, exact=True).click()
    return page, page.locator(f"#{mode.lower()}")


def last(page: Any, route: str) -> Any:
    return page.front.bodies(route)[-1]


def test_holes_and_a_sudoku_are_filled(open_page: Callable[..., Any], steps: Any) -> None:
    page, fill = opened(open_page, "Fill")
    stage, text = fill.locator(".stage"), fill.get_by_label("Text with holes")
    expect(text).to_have_value("The capital of France is {{5}}.")  # the first example
    text.fill("The capital is Paris.")
    fill.get_by_role("button", name="Fill the holes").click()
    expect(fill.get_by_role("alert")).to_contain_text("The text has no hole.")
    text.evaluate(SELECT)
    fill.get_by_role("button", name="Make a hole").click()
    expect(text).to_have_value("The capital is {{5}}.")
    expect(fill.get_by_role("alert")).to_have_count(0)
    with steps.held_after(1):
        text.press("Control+Enter")
        holes = stage.locator(".token.hole")
        expect(holes).to_have_count(5)  # a token is a character
        given = stage.locator(".token:not(.hole)")
        assert "".join(given.all_inner_texts()) == "The capital is ."
    expect(fill.get_by_role("button", name="Fill the holes")).to_be_visible()
    parts = ["The capital is ", {"tokens": 5}, "."]
    assert last(page, "/v1/fill")["parts"] == parts
    expect(stage.locator(".holes li")).to_have_count(1)
    assert stage.locator(".canvas").inner_text().startswith("The capital is ")
    text.fill("A {{99}}.")
    text.press("Control+Enter")
    problem = fill.locator("[data-for=text]")  # the server's words
    expect(problem).to_contain_text("a canvas has 32")
    fill.get_by_role("button", name="One of three").click()
    expect(problem).to_be_hidden()
    text.press("Control+Enter")
    expect(stage.locator(".holes")).to_contain_text("also tried")
    fill.locator(".chips").get_by_role("button", name="A Sudoku", exact=True).click()
    cell = fill.get_by_label("Row 2, column 2")
    cell.press("ArrowDown")
    page.keyboard.type("7")
    expect(fill.get_by_label("Row 3, column 2")).to_have_value("")  # no digit of this board
    page.evaluate("localStorage.setItem('sfumato.settings', '{}')")
    page.reload()  # what was written is kept
    expect(fill.get_by_label("Row 2, column 3")).to_have_value("3")
    with steps.held_after(1):
        cell.press("Enter")
        expect(stage.locator(".cell.given")).to_have_text(["3", "2", "4", "1"])
        expect(stage.locator(".stats")).to_contain_text("step")
    expect(stage.locator(".note")).to_contain_text("Solved")
    assert last(page, "/v1/fill")["parts"][:2] == [{"tokens": 1}, {"tokens": 1}]
    stage.get_by_label("Replay of the denoising").press("Home")
    expect(stage.locator(".where")).to_have_text("noise")
    expect(stage.locator(".cell.given")).to_have_text(["3", "2", "4", "1"])


def test_an_object_forms_and_a_text_changes(open_page: Callable[..., Any]) -> None:
    page, mode = opened(open_page, "JSON")
    schema = mode.get_by_label("Schema")
    assert json.loads(schema.input_value())["properties"] == {
        "capital": {"type": "string", "maxLength": 20}
    }
    write = mode.get_by_role("button", name="Write the object")
    for text, words in (
        ('{"type": ', "This is no JSON"),
        ('{"type": "string", "pattern": "("}', "unclosed group"),
    ):
        schema.fill(text)
        write.click()
        expect(mode.locator("[data-for=schema]")).to_contain_text(words)
    schema.fill('{"type": "boolean"}')
    write.click()
    expect(mode.locator(".note")).to_contain_text("The object matches the schema")
    assert json.loads(mode.locator(".stage .canvas").inner_text()) in (True, False)
    page.get_by_role("button", name="Edit", exact=True).click()
    edit = page.locator("#edit")
    text, stage = edit.get_by_label("Text", exact=True), edit.locator(".stage")
    edit.get_by_role("button", name="A wrong continent").click()
    edit.get_by_role("button", name="A wrong capital").click()
    edit.get_by_role("button", name="Change the text").click()
    expect(stage.locator(".token.removed")).to_have_text("Rome")
    expect(stage.locator(".token.changed")).to_have_text("Paris")
    body = last(page, "/v1/chat/completions")
    given = {"type": "content", "content": "The capital is Rome.", "strength": 0.5}
    assert (body["prediction"], body["max_tokens"]) == (given, 2 * 20 + 64)
    stage.get_by_role("button", name="Accept").click()
    expect(text).to_have_value("The capital is Paris.")
    stage.get_by_role("button", name="Undo").click()
    expect(text).to_have_value("The capital is Rome.")
    expect(stage.get_by_role("button", name="Accept")).to_be_focused()
    says(page, "/props", {**props(page), "modes": {"fill": None, "json": None, "edit": None}})
    page.reload()  # at the view's address
    expect(page.locator("#chat")).to_be_visible()
    for name in ("Fill", "JSON", "Edit"):
        assert page.get_by_role("button", name=name, exact=True).is_disabled()
        assert not page.get_by_role("link", name=name).is_visible()
