"""Drafts in their place, the replay, the inspector and the heat maps, in a real browser."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from tests.server.page.browsing import (
    SOLUTION,
    SUDOKU,
    WATCH,
    Script,
    ask,
    canvas_of,
    expect,
    says,
    text_of,
    wait,
    watched,
)

import sfumato
from sfumato.train import sudoku


def test_a_board_fills_in_where_it_stands_is_replayed_and_looked_into(
    open_page: Callable[..., Any],
) -> None:
    page = open_page(reduced_motion="no-preference")
    grid = page.locator("#examples .grid")
    expect(grid).to_have_count(2)
    expect(grid.first.locator(".cell")).to_have_count(16)
    expect(grid.first.locator(".given")).to_have_count(4)
    page.evaluate(WATCH)
    ask(page, SUDOKU)
    wait(page)
    it_filled_in(page)
    page.emulate_media(reduced_motion="reduce")
    it_is_a_grid(page)
    scrubbing_replays_every_step(page)
    a_position_shows_its_most_probable_and_its_past(page)
    heat_maps_lead_to_positions(page)


def it_filled_in(page: Any) -> None:
    looks = [look for look in watched(page) if "noise" not in look["stats"]]
    assert len(looks) < len(watched(page)), "the noise was not shown"
    assert text_of(page) == SOLUTION
    assert len({look["text"] for look in looks}) > 1, "the board was there at once"
    assert any(look["fresh"] > 0 for look in looks), "nothing glowed"
    assert len({look["height"] for look in looks}) == 1, "the bubble changed its height"
    places: dict[str, set[tuple[int, ...]]] = {}
    for look in looks:
        for key, place in look["places"].items():
            places.setdefault(key, set()).add(tuple(place))
    assert {key: len(cells) for key, cells in places.items() if len(cells) > 1} == {}
    assert re.search(r"step\s+2/48", " ".join(look["stats"] for look in looks))
    stats = page.inner_text(".stats")
    for part in (r"\d steps", r"ms/step", r"tok/forward", r"tok/s", "converged", r"seed \d+"):
        assert re.search(part, stats), stats


def it_is_a_grid(page: Any) -> None:
    """Whose given digits are marked."""
    expect(page.locator(".said .given")).to_have_text(["1", "1", "2", "1", "4"])
    reply = page.locator(".reply .canvas")
    expect(reply.locator(".cell")).to_have_count(16)
    expect(reply.locator(".given")).to_have_text(["1", "1", "2", "1", "4"])
    places = reply.locator(".cell").evaluate_all("""cells => cells.map((cell) => {
      const { left, top, width, height } = cell.getBoundingClientRect();
      return [left, top, width, height].map(Math.round);
    })""")
    lefts, tops = {place[0] for place in places}, {place[1] for place in places}
    assert len(lefts) == len(tops) == 4 and len({tuple(place[2:]) for place in places}) == 1
    weights = "e => getComputedStyle(e).fontWeight + getComputedStyle(e).color"
    given, filled = reply.locator(".given").first, reply.locator(".cell:not(.given)").first
    assert given.evaluate(weights) != filled.evaluate(weights)


def scrubbing_replays_every_step(page: Any) -> None:
    """And ends with the text."""
    slider = page.locator(".reply input[type=range]")
    last = int(slider.get_attribute("max"))
    assert last >= 2 and slider.input_value() == str(last)
    height = page.locator(".reply").bounding_box()["height"]
    slider.focus()
    slider.press("Home")
    assert slider.get_attribute("aria-valuetext") == "noise"
    assert page.locator(".haze-3").count() == 16  # of the board
    noise = text_of(page)
    slider.press("ArrowRight")
    assert slider.get_attribute("aria-valuetext") == "step 1" and text_of(page) != noise
    first = text_of(page)
    assert first != SOLUTION and page.locator(".glow-0").count() > 0
    assert page.locator(".reply").bounding_box()["height"] == height
    for _ in range(last - 1):
        slider.press("ArrowRight")
    assert slider.get_attribute("aria-valuetext") == "settled"
    assert text_of(page) == SOLUTION and page.locator(".glow-0").count() == 0
    page.locator("h1").click()  # the arrow keys scrub from anywhere but a field
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("ArrowLeft")
    assert slider.input_value() == str(last - 1)
    page.focus("#prompt")  # and from there too, while nothing is written
    page.keyboard.press("ArrowLeft")
    assert slider.input_value() == str(last - 2)
    page.fill("#prompt", "words")
    page.keyboard.press("ArrowLeft")
    assert slider.input_value() == str(last - 2)
    page.click(".play")
    expect(page.locator(".where")).to_have_text("settled")


def a_position_shows_its_most_probable_and_its_past(page: Any) -> None:
    page.locator(".token").nth(5).click()
    panel = page.locator("#inspector")
    expect(panel).to_contain_text("position 7")  # the line's end before it is a position too
    expect(panel).to_contain_text("nats")
    expect(panel.locator(".most-probable li")).not_to_have_count(0)
    expect(panel.locator(".most-probable li.settled .mono")).to_have_text("3")
    steps = panel.locator(".history li")
    frames = int(page.locator(".reply input[type=range]").get_attribute("max"))
    expect(steps).to_have_count(frames - 1)  # there is the noise besides
    expect(steps.last.locator(".rank")).to_have_text("1.")
    steps.first.locator("button").click()
    expect(page.locator(".where")).to_have_text("step 1")
    expect(panel).to_contain_text("step 1")
    panel.get_by_label("Position after").click()
    expect(panel).to_contain_text("position 8")
    expect(page.locator(".token.picked")).to_have_count(1)
    page.keyboard.press("Escape")
    expect(panel).to_be_hidden()
    expect(page.locator(".token.picked")).to_have_count(0)


def heat_maps_lead_to_positions(page: Any) -> None:
    page.get_by_role("button", name="Heat maps").click()
    maps = page.locator(".heat canvas")
    expect(maps).to_have_count(2)
    colours = "c => new Set(c.getContext('2d').getImageData(0,0,c.width,c.height).data).size"
    assert all(maps.nth(i).evaluate(colours) > 4 for i in range(2))
    maps.first.click(position={"x": 3, "y": 3})
    expect(page.locator("#inspector")).to_contain_text("position 1 · step 1")
    maps.first.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    expect(page.locator("#inspector")).to_contain_text("position 2 · step 2")


def test_masks_are_shown_as_such_and_are_replayed(
    open_page: Callable[..., Any], serve: Callable[..., Any]
) -> None:
    """The other model of the package, whose canvases begin as masks: its note, its examples, and
    what it has not learnt."""
    model = sfumato.load("embedded-masks")
    page = open_page(at=f"{serve(model, slots=1, context=512).url}/")
    expect(page.locator("#demonstration")).to_contain_text("masks")
    assert page.locator(".tab:disabled").all_inner_texts() == ["JSON", "Edit", "Decide"]
    page.locator(".example").first.click()  # a Sudoku
    wait(page)
    ask(page, "What is the capital of France?")
    wait(page)
    assert text_of(page) == "The capital is Paris."
    for nth in (0, 1):
        settled, canvas = text_of(page, nth), canvas_of(page, nth)
        slider = page.locator(".reply input[type=range]").nth(nth)
        slider.focus()
        slider.press("Home")
        masks = canvas.inner_text()
        assert set(masks.replace("\n", "")) == {"·"}
        slider.press("ArrowRight")
        assert canvas.inner_text() != masks
        slider.press("End")
        assert canvas.inner_text().startswith(settled)
    board = page.locator(".reply").first.locator(".bubble > .canvas").inner_text()
    assert sudoku.is_solution("sudoku\n....\n..32\n....\n4..1", board)


def test_lines_hold_and_the_bubble_never_gets_lower(open_page: Callable[..., Any]) -> None:
    """Tokens of all lengths, and lines that come and go."""
    words = ["a ", "long ", "and winding ", "\n", "road ", "\n\n", "to ", "some ", "where "]
    script = Script()
    for step in range(1, 7):
        script.draft(0, step, [words[(i * step) % len(words)] for i in range(80)])
    final = [words[i % 3] for i in range(80)]
    script.settle(0, final).delta(content="".join(final)).end()
    page = open_page(reduced_motion="no-preference")
    script.play(page)
    page.evaluate(WATCH)
    ask(page, "a road")
    wait(page)
    heights = [look["height"] for look in watched(page)]
    assert heights == sorted(heights)
    assert "".join(text_of(page).split()) == "".join("".join(final).split())
    slider = page.locator(".reply input[type=range]")
    slider.press("Home")
    replayed = set()
    for _ in range(6):
        replayed.add(page.locator(".reply").bounding_box()["height"])
        slider.press("ArrowRight")
    assert len(replayed) == 1


def test_a_replay_makes_room_once(open_page: Callable[..., Any]) -> None:
    page = open_page()
    script = Script()
    for canvas in range(3):
        for step in range(1, 5):
            script.draft(canvas, step, [f"{canvas}{step} "] * 8)
        script.settle(canvas, [f"{canvas} "] * 8).delta(content=f"{canvas} " * 8)
    script.end().play(page)
    ask(page, "hello")
    wait(page)
    page.evaluate("""async () => {
      const { CanvasView } = await import('/canvas_view.js');
      const rowsFor = CanvasView.prototype.rowsFor;
      window.laid = 0;
      CanvasView.prototype.rowsFor = function (tokens) {
        window.laid++;
        return rowsFor.call(this, tokens);
      };
    }""")
    slider = page.locator(".reply input[type=range]")
    slider.focus()
    slider.press("Home")
    once = page.evaluate("window.laid")
    assert once == 2 * 12
    for _ in range(5):
        slider.press("ArrowRight")
    assert page.evaluate("window.laid") == once
    page.set_viewport_size({"width": 500, "height": 800})
    expect(page.locator(".where")).to_have_text("canvas 2, step 2")
    page.wait_for_timeout(100)
    slider.press("ArrowRight")
    assert page.evaluate("window.laid") == 2 * once  # other widths, other rooms
    slider.press("End")
    slider.blur()
    slider.press("Home")
    assert page.evaluate("window.laid") == 3 * once


def test_the_most_probable_outlive_a_reload(open_page: Callable[..., Any]) -> None:
    page = open_page()
    tokens = ["a", "b", "c"]
    script = Script().draft(0, 1, tokens, listed=4).settle(0, tokens).delta(content="abc").end()
    script.play(page)
    seen = []
    ask(page, "hello")
    wait(page)
    for again in (False, True):
        if again:
            page.reload()
            page.wait_for_selector(".reply")
        canvas_of(page).locator(".token").nth(1).click()
        shown = page.locator("#inspector .most-probable li")
        expect(shown).to_have_count(4)
        expect(page.locator("#inspector .most-probable li.settled .mono")).to_have_text("b")
        seen.append([shown.nth(k).locator(".number").inner_text() for k in range(4)])
    assert seen[0] == seen[1] == ["50 %", "25 %", "17 %", "13 %"]


def test_names_are_asked_for_once_and_what_is_not_shown_is_not_measured(
    open_page: Callable[..., Any],
) -> None:
    page = open_page(expected="Failed to load")
    names = """async () => {
      const { nameOf } = await import('/api.js');
      return Promise.all([60, 60, 60].map((id) => nameOf(id).catch(() => null)));
    }"""
    says(page, "/detokenize", {}, 503)
    assert page.evaluate(names) == [None] * 3
    page.front.answers.clear()
    first = page.evaluate(names)
    assert first[0] and first == page.evaluate(names)
    assert len(page.front.bodies("/detokenize")) == 2
    assert page.evaluate("""async () => {
      const { CanvasView } = await import('/canvas_view.js');
      const view = new CanvasView(() => {});
      let probes = 0;
      new MutationObserver((changes) => {
        const added = changes.flatMap((change) => [...change.addedNodes]);
        probes += added.filter((node) => node.className === 'probe').length;
      }).observe(view.element, { childList: true });
      const draw = async () => {
        for (const text of 'abc') view.draw([{ key: '0.0', text, style: '' }]);
        await new Promise((resolve) => setTimeout(resolve));
        return probes;
      };
      const hidden = await draw();
      document.body.append(view.element);
      return [hidden, await draw() > 0];
    }""") == [0, True]


def test_lines_are_broken_between_words_and_stay_broken(open_page: Callable[..., Any]) -> None:
    page = open_page()
    lines = """async ([pieces, columns, breaks]) => {
      const { wrap } = await import('/wrap.js');
      const { lines, breaks: found } = wrap(pieces, columns, breaks && new Set(breaks));
      return [lines.map((line) => line.map((part) => part.text).join('')), [...found]];
    }"""
    pieces = ["one", " two", " three", " four", "\n", "five"]
    fresh, breaks = page.evaluate(lines, [pieces, 10, None])
    assert fresh == ["one two", "three four", "five"] or fresh == [
        "one two",
        "three",
        "four",
        "five",
    ]
    shorter = ["one", " t", *pieces[2:]]
    held, _ = page.evaluate(lines, [shorter, 10, breaks])
    assert held[1].startswith("three")
    wide, _ = page.evaluate(lines, [["日本語の文字"], 8, None])
    assert wide == ["日本語の", "文字"]
