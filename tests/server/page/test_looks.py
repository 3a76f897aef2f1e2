"""The page on a phone, in the dark, from the keyboard; and its dashboard."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from tests.server.page.browsing import (
    PHONE,
    SUDOKU,
    Script,
    ask,
    canvas_of,
    checked_by_axe,
    expect,
    says,
    wait,
)

# What a finger may want to hit and is smaller than 44 pixels, but for links in a text and boxes,
# whose labels are hit.
SMALL = """() => [...document.querySelectorAll('button, input, select, textarea, summary, .check')]
  .filter((e) => e.offsetParent && !e.matches('.link, [type=checkbox]'))
  .map((e) => [e.outerHTML.slice(0, 80), e.offsetWidth, e.offsetHeight])
  .filter(([, width, height]) => width < 44 || height < 44)"""

# Words that begin on one line and end on another.
BROKEN = """() => {
  const found = [];
  const main = document.querySelector('main:not([hidden])');
  const walker = document.createTreeWalker(main, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    for (const { 0: word, index } of walker.currentNode.data.matchAll(/[\\w.]+/g)) {
      const range = document.createRange();
      range.setStart(walker.currentNode, index);
      range.setEnd(walker.currentNode, index + word.length);
      if (range.getClientRects().length > 1) found.push(word);
    }
  }
  return found;
}"""


# Lines of text that each slot takes.
LINES_OF_SLOTS = """() => [...document.querySelectorAll('.slot')].map((slot) =>
  new Set([...slot.children].filter((e) => e.offsetParent && e.innerText)
    .flatMap((e) => [...e.getClientRects()].map((box) => Math.round(box.bottom)))).size)"""


def test_a_phone_is_wide_enough(open_page: Callable[..., Any]) -> None:
    page = open_page(viewport=PHONE)
    too_wide = "document.documentElement.scrollWidth - innerWidth"
    assert page.evaluate(too_wide) <= 0
    page.locator(".example").first.click()
    wait(page)
    ask(page, "How do you work?")
    wait(page)
    page.locator(".reply").last.get_by_role("button", name="Heat maps").click()
    assert page.evaluate(too_wide) <= 0
    canvas_of(page).locator(".token").first.click()
    inspector = page.locator("#inspector").bounding_box()
    send = page.locator("#send").bounding_box()
    assert inspector["y"] + inspector["height"] <= send["y"]
    assert page.evaluate(too_wide) <= 0
    page.get_by_label("Close the inspector").click()
    assert page.evaluate(SMALL) == []
    page.evaluate("scrollTo(0, 0)")  # the header comes back
    page.get_by_role("button", name="Engine").click()
    page.wait_for_selector(".card")
    assert page.evaluate(too_wide) <= 0
    assert page.evaluate(BROKEN) == []
    assert page.evaluate(LINES_OF_SLOTS) == [1, 1]
    page.get_by_role("button", name="Decide").click()
    page.get_by_role("button", name="Descriptions").nth(1).click()
    assert page.evaluate(SMALL) == []
    assert page.evaluate(too_wide) <= 0
    page.get_by_role("button", name="Show as code").click()
    assert page.evaluate(SMALL) == []
    assert page.evaluate(too_wide) <= 0
    page.keyboard.press("Escape")
    for mode, run in (("Fill", "Fill the holes"), ("JSON", None), ("Edit", "Change the text")):
        page.get_by_role("button", name=mode, exact=True).click()
        if run:
            page.get_by_role("button", name=run).click()
            page.get_by_role("button", name="Stop").click()
        assert page.evaluate(SMALL) == []
        assert page.evaluate(too_wide) <= 0
    page.get_by_role("button", name="Settings").click()
    assert page.evaluate(SMALL) == []
    assert page.evaluate(too_wide) <= 0


def test_a_phones_header_is_low_goes_away_and_no_field_zooms(open_page: Callable[..., Any]) -> None:
    page = open_page(viewport=PHONE, has_touch=True, is_mobile=True)
    header = page.locator(".top")
    assert header.bounding_box()["height"] <= 96
    note = page.locator("#demonstration")
    tab = page.locator(".tab[data-view][aria-pressed=true]").bounding_box()
    assert tab["y"] + tab["height"] + 4 <= note.bounding_box()["y"]
    note.get_by_role("button").click()
    expect(note).to_be_hidden()
    page.reload()
    page.wait_for_selector(".example")
    expect(note).to_be_hidden()
    small = """[...document.querySelectorAll('input, textarea, select')]
      .filter((e) => parseFloat(getComputedStyle(e).fontSize) < 16).map((e) => e.outerHTML)"""
    assert page.evaluate(small) == []
    words = ["and ", "so ", "on ", "it ", "goes\n"] * 8
    Script().draft(0, 1, words).settle(0, words).delta(content="".join(words)).end().play(page)
    ask(page, "\n".join(map(str, range(60))))
    wait(page)
    page.evaluate("scrollTo(0, 0)")
    expect(header).to_be_in_viewport()
    page.mouse.wheel(0, 400)
    expect(header).not_to_be_in_viewport()
    page.mouse.wheel(0, -100)
    expect(header).to_be_in_viewport()
    page.set_viewport_size({"width": 720, "height": 340})
    page.evaluate("scrollTo(0, 0)")
    expect(header).to_be_in_viewport()
    bars = header.bounding_box()["height"] + page.locator("#composer").bounding_box()["height"]
    assert bars <= 340 / 2, "the text has less than half of a phone on its side"
    canvas_of(page).locator(".token").first.click()
    for width in (720, 568):  # the inspector covers neither the text nor the composer
        page.set_viewport_size({"width": width, "height": 340})
        edge = page.locator("#inspector").bounding_box()["x"]
        assert header.bounding_box()["height"] < 60  # no word of it is broken
        for name in ("#send", "#open-settings", ".reply .bubble"):
            box = page.locator(name).last.bounding_box()
            assert 0 < box["x"] + box["width"] <= edge, (width, name)


def test_another_model_is_chosen_beside_the_title(
    open_page: Callable[..., Any], serve: Callable[..., Any], embedded: Any
) -> None:
    served = serve(embedded, name="small", others=["large"], slots=1)
    phone = {"viewport": PHONE, "has_touch": True, "is_mobile": True}
    page = open_page(at=f"{served.url}/", **phone)
    choice = page.get_by_label("Model", exact=True)
    expect(choice).to_have_value("small")
    assert page.evaluate(SMALL) == []
    assert page.locator(".top").bounding_box()["height"] <= 96
    ask(page, "Who are you?")
    wait(page)
    choice.select_option("large")
    ask(page, "And now?")  # waits for it
    wait(page)
    expect(choice).to_be_enabled()
    expect(page.locator("#prompt")).to_be_focused()  # who writes on keeps the focus
    expect(choice).to_have_value("large")
    assert served.http.get("/props").json()["model"] == "large"
    for nth, name in enumerate(("small", "large")):
        expect(page.locator(".reply").nth(nth).locator(".stats")).to_contain_text(name)
    # What another client has loaded is shown, and its loading is waited for.
    assert served.chat(model="small", max_tokens=1).json()["model"] == "small"
    page.reload()
    expect(choice).to_have_value("small")
    checked_by_axe(page)("a choice of models")


def test_tabs_stay_where_they_are(open_page: Callable[..., Any]) -> None:
    places = """[...document.querySelectorAll('.tab[data-view]')]
      .map((e) => Math.round(e.getBoundingClientRect().left)).join()"""
    page = open_page()
    script = f"addEventListener('DOMContentLoaded', () => window.first = {places})"
    for viewport in (page.viewport_size, PHONE):
        page.set_viewport_size(viewport)
        with page.add_init_script(script):
            page.evaluate("location.hash = ''")
            page.reload()
            page.wait_for_selector(".example")
        first = page.evaluate("window.first")
        for name in ("Decide", "Engine", "Fill", "Chat"):
            page.locator(".tab[data-view]", has_text=name).click()
            assert page.evaluate(places) == first, name
        # A view is as far down as it was left, and its beginning is seen first.
        page.locator("#composer").evaluate("e => e.style.marginTop = '2000px'")
        page.evaluate("scrollTo(0, 700)")
        for name, top in (("Engine", 0), ("Chat", 700)):
            page.evaluate(f"location.hash = '{name.lower()}'")
            page.wait_for_function(f"scrollY === {top}")
    says(page, "/props", {"model": "m", "modes": {}})
    page.reload()
    expect(page.locator(".tab[data-view=fill]")).to_be_disabled()
    assert page.evaluate(places) == first


def test_the_dashboard_asks_only_while_it_is_seen(open_page: Callable[..., Any]) -> None:
    page = open_page()

    def asks() -> int:
        return [path for path, _, _ in page.front.requests].count("/state")

    ask(page, SUDOKU)
    wait(page)
    assert asks() == 0
    page.get_by_role("button", name="Engine").click()
    page.wait_for_selector(".card")
    cards = page.locator("#dashboard h3")
    expect(cards).to_have_text(["Speed while busy", "Requests", "Slots", "Memory"])
    headline = page.locator(".card").first.locator(".figure")
    expect(headline).to_contain_text("tokens per second")
    busy = float(headline.inner_text().split()[0].replace(",", ""))
    facts = page.locator(".card").first.locator(".facts dd")
    assert busy > float(facts.first.inner_text()), "the pauses are in it"
    labels = page.locator("#dashboard dt").all_inner_texts()
    assert len(labels) > 15 and not [label for label in labels if re.search(r"_|bytes", label)]
    expect(page.locator(".slot")).to_have_count(2)
    expect(page.get_by_label("Canvas tokens per second, the last 5 minutes")).to_be_visible()
    memory = page.locator(".card", has_text="Memory")
    expect(memory).to_contain_text("were free at the start")
    assert memory.locator(".meter .bar").bounding_box()["width"] > 0
    *parts, total = memory.locator("dd").all_inner_texts()
    units = {text.split()[1] for text in (*parts, total)}
    assert len(parts) == 6 and len(units) == 1
    assert sum(float(text.split()[0]) for text in parts) == pytest.approx(float(total.split()[0]))
    lefts = {box["x"] for name in memory.locator("dt").all() if (box := name.bounding_box())}
    assert len(lefts) == 1  # one column
    page.get_by_role("button", name="Chat").click()
    page.wait_for_timeout(300)
    before = asks()
    assert before > 0
    page.wait_for_timeout(1500)
    assert asks() == before


def test_dark_light_and_less_motion(open_page: Callable[..., Any], steps: Any) -> None:
    page = open_page(color_scheme="light")
    paper = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(paper)
    page.get_by_role("button", name="Switch between dark and light").click()
    dark = page.evaluate(paper)
    assert light != dark
    page.reload()
    assert page.evaluate(paper) == dark
    with steps.held_after(1):
        ask(page, SUDOKU)
        page.wait_for_selector(".reply.live .token")
        assert page.evaluate("document.getAnimations().length") == 0
    wait(page)


def test_the_keyboard_reaches_everything(open_page: Callable[..., Any]) -> None:
    page = open_page()
    page.fill("#prompt", "one")
    page.press("#prompt", "Shift+Enter")
    page.type("#prompt", "two")
    assert page.input_value("#prompt") == "one\ntwo"
    Script().draft(0, 1, ["I"]).settle(0, ["I"]).delta(content="I").end().play(page)
    ask(page, "Who are you?")
    wait(page)
    page.evaluate("document.activeElement.blur()")
    reached = []
    for _ in range(20):
        page.keyboard.press("Tab")
        script = "(e => e.ariaLabel || e.innerText || e.id || e.type)(document.activeElement)"
        reached.append(page.evaluate(script))
    text = " | ".join(reached)
    for name in (
        "Chat",
        "Decide",
        "Engine",
        "Settings",
        "Play the replay",
        "Replay of the",
        "Heat maps",
    ):
        assert name in text, text
    page.get_by_role("button", name="Decide").click()
    unnamed = """[...document.querySelectorAll('button, input, textarea, canvas')]
      .filter(e => !(e.ariaLabel || e.innerText || e.closest('label') || e.labels?.length))
      .map(e => e.outerHTML)"""
    assert page.evaluate(unnamed) == []


def test_axe_finds_nothing_in_conversations(open_page: Callable[..., Any]) -> None:
    page = open_page(color_scheme="dark")
    check = checked_by_axe(page)
    check("welcome")
    page.get_by_role("button", name="Conversations").click()
    check("no conversations")
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Seed").fill("-1")
    check("settings")
    page.keyboard.press("Escape")
    ask(page, SUDOKU)
    wait(page)
    page.get_by_role("button", name="Colours").click()
    page.get_by_role("button", name="Heat maps").click()
    page.locator(".heat canvas").first.click(position={"x": 3, "y": 3})
    check("heat maps and inspector")
    page.keyboard.press("Escape")
    notes = {"name": "notes.md", "mimeType": "text/markdown", "buffer": b"# Notes\n"}
    page.set_input_files("#attach input[multiple]", [notes])
    page.locator("#tray .file").wait_for()
    text = "# A\n\n[b](https://example.org) `c` $x^2$\n\n| d |\n|---|\n| e |\n"
    text += "\n```py\nif 'f': 1  # g\n```"
    tokens = [text]
    Script().draft(0, 1, tokens).settle(0, tokens).delta(content=text).end().play(page)
    ask(page, "markdown")
    wait(page)
    page.get_by_role("button", name="Text", exact=True).wait_for()
    page.locator(".files summary").click()
    page.set_input_files("#attach input[multiple]", [notes])
    page.locator("#tray .file").wait_for()
    page.get_by_role("button", name="Edit this message").first.click()
    check("markdown, what was attached and is, and an earlier message")
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Conversations").click()
    page.locator("#conversations").get_by_role("button", name="Rename").click()
    check("conversations")


def test_axe_finds_nothing_in_the_other_views(open_page: Callable[..., Any]) -> None:
    page = open_page(color_scheme="dark")
    check = checked_by_axe(page)
    page.get_by_role("button", name="Engine").click()
    page.wait_for_selector(".card")
    check("engine")
    page.get_by_role("button", name="JSON").click()
    check("json")
    page.get_by_role("button", name="Edit", exact=True).click()
    page.get_by_role("button", name="Change the text").click()
    page.get_by_role("button", name="Accept").wait_for()
    check("edit")
    page.get_by_role("button", name="Fill", exact=True).click()
    page.get_by_label("Text with holes").fill("no hole")
    page.get_by_role("button", name="Fill the holes").click()
    check("fill")
    page.locator(".chips").get_by_role("button", name="A Sudoku", exact=True).click()
    page.get_by_role("button", name="Fill the grid").click()
    page.locator(".stage .note", has_text="olved").wait_for()
    check("a board")
    page.get_by_role("button", name="Decide").click()
    page.locator(".question .best").first.wait_for()
    page.get_by_label("Option 1", exact=True).fill("books")  # a second one
    page.get_by_role("button", name="Descriptions").nth(1).click()
    page.locator("#decide summary").click()
    check("decide")
    page.get_by_role("button", name="Show as code").click()
    check("program")
