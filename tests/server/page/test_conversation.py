"""A conversation on the page: stop, retry, reload, settings, what models write, and errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.server.page.browsing import (
    COMPLETIONS,
    SOLUTION,
    SUDOKU,
    Script,
    ask,
    checked_by_axe,
    expect,
    says,
    text_of,
    wait,
)

from sfumato.api import Model
from sfumato.engine import Handle
from sfumato.server.settings import ServerSettings


def test_stopping_ends_the_request_and_no_board_is_drawn_before_its_first_draft(
    open_page: Callable[..., Any],
    served: Any,
    steps: Any,
    eventually: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handles: list[Handle] = []
    submit = served.engine.submit

    def submitted(*args: Any) -> Handle:
        handles.append(submit(*args))
        return handles[-1]

    def cancelled() -> int:
        return int(served.engine.state().totals.requests.get("cancelled", 0))

    monkeypatch.setattr(served.engine, "submit", submitted)
    before = cancelled()
    page = open_page()
    with steps.held_after(0):
        ask(page, SUDOKU)
        expect(page.locator(".reply.live .canvas.size-4")).to_be_visible()
        page.get_by_role("button", name="Stop").click()
        eventually(lambda: [handle.cancelled for handle in handles] == [True])
        wait(page)
    expect(page.locator(".reply .stopped")).to_have_text("Stopped before the first draft")
    expect(page.locator(".reply .canvas.size-4")).to_be_hidden()  # no board is drawn
    eventually(lambda: cancelled() == before + 1 and not served.engine.state().running)


def test_stop_retry_and_reload(
    open_page: Callable[..., Any], served: Any, steps: Any, eventually: Callable[..., None]
) -> None:
    page = open_page()
    with steps.held_after(1):
        ask(page, "How do you work?")
        expect(page.locator(".reply.live .stats")).to_contain_text("step")  # and not its noise
        page.keyboard.press("Escape")
        wait(page)
    expect(page.locator(".stats")).to_contain_text("stopped")
    expect(page.locator(".reply .stopped")).to_contain_text("Stopped: a draft")
    expect(page.locator(".reply .where")).to_have_text("stopped")
    expect(page.locator("#prompt")).to_be_focused()
    # The stopped request takes no more steps: none of them is to be the next one's.
    eventually(lambda: not served.engine.state().running)
    with steps.held_after(1):
        page.get_by_role("button", name="Retry").click()
        page.wait_for_selector(".reply.live .token", state="attached")  # it may be a space
    wait(page)
    expect(page.locator(".reply")).to_have_count(1)
    text, stats = text_of(page), page.inner_text(".stats")
    assert text == "I turn a canvas of random tokens into text, step by step."
    page.reload()
    page.wait_for_selector(".reply")
    assert (text_of(page), page.inner_text(".stats")) == (text, stats)
    expect(page.locator(".said")).to_have_text("How do you work?")
    page.locator(".reply input[type=range]").press("Home")
    assert text_of(page) != text
    ask(page, "Who are you?")
    wait(page)
    assert text_of(page) == "I am Sfumato's embedded demo, a tiny diffusion model."
    page.fill("#prompt", "not sent\nyet")
    page.reload()
    expect(page.locator("#prompt")).to_have_value("not sent\nyet")
    page.locator(".reply").last.wait_for()
    page.get_by_role("button", name="New conversation").click()
    expect(page.locator(".turn")).to_have_count(0)
    expect(page.locator(".example").first).to_be_visible()


def test_a_reply_says_how_far_it_is_and_that_it_broke_off(open_page: Callable[..., Any]) -> None:
    page = open_page()
    lines = page.evaluate("""async () => {
      const { progress, reading } = await import('/footer.js');
      const drafts = [1, 2, 3].map((step) => ({ step, accepted: [1, 0] }));
      return [
        reading({ total: 8000, cache: 0, processed: 2000, time_ms: 10000 }),
        reading({ total: 8000, cache: 4000, processed: 4000, time_ms: 5 }),
        progress(1, drafts, 48, { canvas: 4, tokens: 256, before: 32 }),
        progress(0, drafts.slice(0, 1), 48, { canvas: 0, tokens: 0, before: 1 }),
      ].map((fields) => fields.join(' · ').replaceAll('\u2007', ' '));
    }""")
    assert lines == [
        "reading the prompt: 2,000 of 8,000 tokens · 25 % · 30 s left",
        "reading the prompt: 4,000 of 8,000 tokens · 50 %",
        "canvas 2 · step  3/48 · ━━━━╌╌╌╌ · 8.00 tok/s · at most 1 min 30 s left",
        "canvas 1 · step  1/48 · ━━━━╌╌╌╌",
    ]
    script = Script()
    prompt = {"total": 900, "cache": 0, "processed": 300, "time_ms": 100}
    script.frames.append({"choices": [], "index": 0, "prompt_progress": prompt})
    script.play(page, end="")  # breaks off there, and before says what it read
    page.evaluate("""() => {
      window.stats = [];
      const look = () => window.stats.push(document.querySelector('.reply .stats')?.innerText);
      new MutationObserver(look).observe(document.body, { childList: true, subtree: true });
    }""")
    ask(page, "hello")
    wait(page)
    assert page.front.bodies()[0]["return_progress"] is True
    assert "300 of 900 tokens" in str(page.evaluate("window.stats"))
    Script().draft(0, 1, ["half"]).settle(0, ["half"]).delta(content="half").play(page, end="")
    page.get_by_role("button", name="Retry").click()
    expect(page.locator(".reply .bubble")).to_contain_text("half")
    wait(page)
    expect(page.get_by_role("alert")).to_have_text("The reply broke off.")
    assert text_of(page) == "half"


def test_settings_are_sent_kept_refused_in_words_and_reset(open_page: Callable[..., Any]) -> None:
    page = open_page()
    Script().draft(0, 1, ["a"]).settle(0, ["a"]).delta(content="a").end().play(page)
    page.get_by_role("button", name="Settings").click()
    steps, tokens = page.get_by_label("Most steps per canvas"), page.get_by_label("Most tokens")
    expect(steps).to_have_attribute("placeholder", "48")  # the checkpoint's, not the most
    expect(steps).to_have_attribute("max", "256")
    steps.fill("12")
    steps.blur()
    problem = page.locator(".problem:visible")
    for label in ("Entropy bound", "Temperature"):
        page.get_by_label(label).fill("1000001")
        expect(problem).to_contain_text("Enter a number from 0 to 1,000,000")
        page.get_by_label(label).fill("")
    for wrong in ("0", "-3", "2.5"):
        steps.fill(wrong)
        expect(problem).to_contain_text("Enter a whole number")
        expect(steps).to_have_attribute("aria-invalid", "true")
    page.get_by_role("button", name="Done").click()  # refused: the field is to be looked at
    expect(page.locator("#settings")).to_be_visible()
    expect(steps).to_be_focused()
    steps.fill("12")
    expect(problem).to_have_count(0)
    tokens.fill("16385")  # the model's context: a slot that is larger than 1,024 can be made
    expect(problem).to_have_text("Enter a whole number from 1 to 16,384, or leave the field empty.")
    page.keyboard.press("Escape")  # leaves what was refused behind
    expect(page.locator("#settings")).to_be_hidden()
    ask(page, "Who are you?")
    wait(page)
    sent = page.front.bodies()[-1]
    assert sent["max_steps"] == 12 and "max_tokens" not in sent
    page.get_by_role("button", name="Settings").click()
    expect(tokens).to_have_value("")
    page.get_by_role("button", name="Reset all settings").click()
    expect(steps).to_have_value("")
    page.get_by_label("System prompt").fill(" Be brief. ")
    page.get_by_label("Drafts").select_option("none")
    page.get_by_role("button", name="Done").click()
    ask(page, "Who are you?")
    wait(page)
    sent = page.front.bodies()[-1]
    assert "max_steps" not in sent
    assert sent["messages"][0] == {"role": "system", "content": "Be brief."}
    assert [message["role"] for message in sent["messages"]].count("system") == 1
    page.front.answers.clear()
    page.get_by_role("button", name="Settings").click()
    for label, value in (("Seed", "7"), ("Most steps per canvas", "1"), ("Entropy bound", "0.2")):
        page.get_by_label(label).fill(value)
    page.get_by_label("Think before answering").check()
    page.keyboard.press("Escape")
    ask(page, SUDOKU)
    wait(page)
    sent = page.front.bodies()[-1]
    assert (sent["seed"], sent["max_steps"], sent["entropy_bound"]) == (7, 1, 0.2)
    assert sent["chat_template_kwargs"] == {"enable_thinking": True}
    expect(page.locator(".stats").last).to_contain_text("step cap reached")
    expect(page.locator(".stats").last).to_contain_text("seed 7")
    page.reload()
    page.get_by_role("button", name="Settings").click()
    expect(page.get_by_label("Seed")).to_have_value("7")


def test_what_a_model_writes_is_text_thoughts_are_folded_and_calls_are_quiet(
    open_page: Callable[..., Any],
) -> None:
    page = open_page()
    nasty = ["<img src=x onerror=alert(1)>", "<b>", "bold", "<0xC3>", "<0xA9>"]
    nasty += ["\x1b[31m", "\u202e"]
    text = "<img src=x onerror=alert(1)><b>boldé\x1b[31m\u202e"
    Script().draft(0, 1, nasty).settle(0, nasty).delta(content=text).end().play(page)
    ask(page, "<script>alert(2)</script>")
    wait(page)
    assert text_of(page) == "<img src=x onerror=alert(1)><b>boldé·[31m·"
    assert page.locator("#turns img, #turns b, #turns script").count() == 0
    expect(page.locator("[data-key='0.3']")).to_have_text("é")  # of two bytes, the first has it
    expect(page.locator(".said")).to_have_text("<script>alert(2)</script>")
    first = ["<|channel>", "thought", "\n", "let ", "me ", "see"]
    second = [" then", "<channel|>", "Yes", ".", "<turn|>", "<eos>"]
    script = Script().draft(0, 1, first).settle(0, first).delta(reasoning_content="let me see")
    script.draft(1, 1, second).settle(1, second[:4]).delta(reasoning_content=" then")
    script.delta(content="Yes.").end(warnings=["a warning"]).play(page)
    ask(page, "is it?")
    wait(page)
    assert text_of(page) == "Yes."
    reply = page.locator(".reply").last
    fold = reply.locator("details.thought")
    expect(fold).to_be_visible()
    expect(fold.locator(".canvas")).to_be_hidden()
    fold.locator("summary").click()
    expect(fold.locator(".canvas")).to_have_text("let me see then")
    expect(page.locator(".note:visible")).to_have_text("a warning")
    expect(reply.locator(".markdown")).to_have_text("Yes.")
    tokens = ["one ", "two", "STOP"]  # a stop string is among the tokens, and not in the text
    Script().draft(0, 1, tokens).settle(0, tokens).delta(content="one two").end().play(page)
    ask(page, "count")
    wait(page)
    assert text_of(page) == "one two"


def test_errors_are_told(open_page: Callable[..., Any]) -> None:
    page = open_page(expected="400|503|Failed to load")
    says(page, COMPLETIONS, {"error": {"message": "queue: full, try later"}}, 503)
    ask(page, "hello")
    wait(page)
    expect(page.get_by_role("alert")).to_have_text("queue: full, try later")
    failed = page.locator(".reply")
    expect(failed.locator("input[type=range]")).to_be_hidden()
    for name in ("Heat maps", "Save replay"):
        expect(failed.get_by_role("button", name=name)).to_have_count(0)
    script = Script().draft(0, 1, ["half"])
    script.frames.append({"error": {"message": "the engine stopped"}})
    script.play(page)
    page.get_by_role("button", name="Retry").click()
    expect(page.get_by_role("alert")).to_have_text("the engine stopped")
    assert text_of(page) == "half"
    expect(page.locator(".reply input[type=range]")).to_be_hidden()


def test_a_key_is_asked_for_on_the_page_and_corrected_there(
    open_page: Callable[..., Any], serve: Callable[..., Any], slow: Model
) -> None:
    at = f"{serve(slow, ServerSettings(api_keys=('open sesame',)), slots=1, context=512).url}/"
    page = open_page(at=at, expected="401", awaits="#locked form", color_scheme="dark")
    page.evaluate("window.visit = 1")
    field = page.get_by_label("API key", exact=True).first
    expect(field).to_be_focused()
    expect(page.locator("#locked .problem")).to_be_hidden()
    for wrong, words in (
        (" ", "Enter the key."),
        ("schlüssel", "ASCII"),
        ("open barley", "refuses this key"),
    ):
        field.fill(wrong)
        page.keyboard.press("Enter")
        expect(page.locator("#locked .problem")).to_contain_text(words)
        expect(page.locator("#chat, #composer")).to_have_count(2)
        expect(page.locator("#chat")).to_be_hidden()
    checked_by_axe(page)("a wrong key")
    field.fill("open sesame")
    page.get_by_role("button", name="Open").click()
    page.wait_for_selector(".example")
    page.front.requests.clear()
    ask(page, SUDOKU)
    wait(page)
    assert text_of(page) == SOLUTION
    assert page.front.requests[0][2]["authorization"] == "Bearer open sesame"
    # A wrong one in the settings, too, is told and corrected; what stood on the page stays.
    page.get_by_role("button", name="Settings").click()
    page.locator("#settings").get_by_label("API key").fill("barley")
    page.get_by_label("Close the settings").click()
    expect(page.locator("#locked .problem")).to_contain_text("refuses this key")
    field.fill("open sesame")
    page.keyboard.press("Enter")
    expect(page.locator("#locked")).to_be_hidden()
    assert text_of(page) == SOLUTION
    assert page.evaluate("window.visit") == 1, "the page was loaded anew"
    page.reload()  # the same tab still has it
    page.wait_for_selector(".reply")
    expect(page.locator("#locked")).to_be_hidden()
    assert "sesame" not in page.evaluate("JSON.stringify(localStorage)")
    assert "sesame" in page.evaluate("JSON.stringify(sessionStorage)")
