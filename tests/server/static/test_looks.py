"""The page on a phone, in the dark, from the keyboard; and its dashboard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.server.static.browsing import SUDOKU, ask, expect, wait

PHONE = {"width": 360, "height": 740}


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
    page.locator(".reply").last.locator(".token").first.click()
    expect(page.locator("#inspector")).to_be_visible()
    assert page.evaluate(too_wide) <= 0
    page.get_by_label("Close the inspector").click()
    page.get_by_role("button", name="Engine").click()
    page.wait_for_selector(".card")
    assert page.evaluate(too_wide) <= 0


def test_the_dashboard_asks_only_while_it_is_seen(open_page: Callable[..., Any]) -> None:
    page = open_page()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url.rsplit("/", 1)[1]))
    ask(page, SUDOKU)
    wait(page)
    assert "slots" not in asked
    page.get_by_role("button", name="Engine").click()
    page.wait_for_selector(".card")
    for part in ("Queue", "Slots", "Memory", "Speed"):
        expect(page.locator("#dashboard")).to_contain_text(part)
    expect(page.locator(".slot")).to_have_count(2)
    expect(page.get_by_label("Canvas tokens per second, the last 5 minutes")).to_be_visible()
    memory = page.locator(".card", has_text="Memory")
    expect(memory).to_contain_text("were free at the start")
    assert memory.locator(".meter .bar").bounding_box()["width"] > 0
    page.get_by_role("button", name="Chat").click()
    page.wait_for_timeout(300)
    before = asked.count("slots")
    page.wait_for_timeout(1500)
    assert asked.count("slots") == before


def test_dark_light_and_less_motion(open_page: Callable[..., Any]) -> None:
    page = open_page(color_scheme="light", reduced_motion="reduce")
    paper = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(paper)
    page.get_by_role("button", name="Switch between dark and light").click()
    dark = page.evaluate(paper)
    assert light != dark
    page.reload()
    assert page.evaluate(paper) == dark
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
    ask(page, "Who are you?")
    wait(page)
    page.evaluate("document.activeElement.blur()")
    reached = []
    for _ in range(20):
        page.keyboard.press("Tab")
        script = "(e => e.ariaLabel || e.innerText || e.id || e.type)(document.activeElement)"
        reached.append(page.evaluate(script))
    text = " | ".join(reached)
    for name in ("Chat", "Engine", "Settings", "Play the replay", "Replay of the", "Heat maps"):
        assert name in text, text
    unnamed = """[...document.querySelectorAll('button, input, textarea, canvas')]
      .filter(e => !(e.ariaLabel || e.innerText || e.closest('label') || e.labels?.length))
      .map(e => e.outerHTML)"""
    assert page.evaluate(unnamed) == []
