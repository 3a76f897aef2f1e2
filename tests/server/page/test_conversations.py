"""The list of conversations, going back to an earlier message, and what is kept in which room."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.server.page.browsing import Script, ask, expect, text_of, wait

OPEN, NEW = "Conversations", "New conversation"


def ask_and_wait(page: Any, text: str, reply: str = "fine") -> None:
    """A question with a scripted reply, of two drafts."""
    script = Script().draft(0, 1, ["noise"]).draft(0, 2, [reply]).settle(0, [reply])
    script.delta(content=reply).end().play(page)
    ask(page, text)
    wait(page)


def talks(page: Any) -> Any:
    """The list, opened."""
    if not page.locator("#conversations").is_visible():
        page.get_by_role("button", name=OPEN).click()
    return page.locator("#conversations")


def titles(page: Any) -> list[str]:
    return list(page.locator("#conversations .title").all_inner_texts())


def test_conversations_are_listed_found_renamed_and_opened(open_page: Callable[..., Any]) -> None:
    texts = [{}, 3, "turns", None, {"turns": 3}]  # is none
    wrong = {f"sfumato.conversation.{i}": text for i, text in enumerate(texts)}
    page = open_page(stored=wrong)
    page.evaluate("""() => {
      localStorage.setItem('sfumato.conversation.5', '[');
      sessionStorage.setItem('sfumato.current', '"4"');
    }""")
    page.reload()
    page.wait_for_selector(".example")
    talks(page)
    expect(page.locator("#conversations .list")).to_have_text("None is kept yet.")
    page.keyboard.press("Escape")
    ask_and_wait(page, "About boats", "they float")
    page.get_by_role("button", name=NEW).click()
    expect(page.locator(".turn")).to_have_count(0)
    page.reload()
    page.wait_for_selector(".example")  # this tab has begun another one
    ask_and_wait(page, "About <b>trees</b>", "they grow")
    dialog = talks(page)
    assert titles(page) == ["About <b>trees</b>", "About boats"]
    search = dialog.get_by_role("searchbox")
    search.fill("FLOAT boats")  # words of replies and questions
    assert titles(page) == ["About boats"]
    dialog.get_by_role("button", name="Rename About boats").click()
    page.keyboard.type("Ships")
    page.keyboard.press("Enter")
    assert titles(page) == ["Ships"]
    search.fill("nothing")
    expect(dialog.locator(".list")).to_have_text("None has these words.")
    search.fill("")
    dialog.locator(".open", has_text="Ships").click()
    expect(dialog).to_be_hidden()
    assert text_of(page) == "they float"
    page.reload()
    page.wait_for_selector(".reply")
    assert text_of(page) == "they float"  # what this tab showed
    ask_and_wait(page, "And rafts?", "too")
    talks(page)
    assert titles(page) == ["Ships", "About <b>trees</b>"]
    expect(dialog.locator("[aria-current]")).to_contain_text("2 questions")


def test_a_deleted_conversation_comes_back(
    open_page: Callable[..., Any], steps: Any, served: Any, eventually: Callable[..., None]
) -> None:
    page = open_page()
    ask_and_wait(page, "Who are you?", "I am")
    text = text_of(page)
    page.front.answers.clear()
    dialog = talks(page)
    dialog.get_by_role("button", name="Delete Who are you?").click()
    status = dialog.get_by_role("status")
    expect(status).to_contain_text("“Who are you?” was deleted.")  # which a screen reader says
    expect(page.locator(".turn")).to_have_count(0)
    undo = status.get_by_role("button", name="Undo")
    expect(undo).to_be_focused()
    page.keyboard.press("Enter")
    assert titles(page) == ["Who are you?"]
    expect(undo).to_be_hidden()
    page.keyboard.press("Escape")
    assert text_of(page) == text
    # The reply is whole again, and not a picture of itself.
    page.locator(".reply input[type=range]").press("Home")
    assert text_of(page) != text
    with steps.held_after(1):
        page.get_by_role("button", name="Retry").click()
        page.wait_for_selector(".reply.live .token", state="attached")
        talks(page)
        dialog.get_by_role("button", name="Delete").click()  # in the middle of a reply, which ends
        page.keyboard.press("Escape")
    eventually(lambda: not served.engine.state().running)
    talks(page)
    assert titles(page) == []
    expect(undo).to_be_hidden()  # closing the list was the end of it


def test_an_earlier_message_is_edited_and_the_edit_undone(open_page: Callable[..., Any]) -> None:
    page = open_page()
    ask_and_wait(page, "one", "first")
    ask_and_wait(page, "two", "second")
    page.locator(".turn.user").first.get_by_role("button", name="Edit this message").click()
    field = page.get_by_role("textbox", name="The message")
    expect(field).to_be_focused()
    expect(field).to_have_value("one")
    page.keyboard.press("Escape")
    expect(page.locator(".said")).to_have_text(["one", "two"])
    Script().draft(0, 1, ["third"]).settle(0, ["third"]).delta(content="third").end().play(page)
    page.locator(".turn.user").first.get_by_role("button", name="Edit this message").click()
    field.fill("three")
    page.keyboard.press("Enter")
    wait(page)
    expect(page.locator(".said")).to_have_text(["three"])
    assert [m["content"] for m in page.front.bodies()[-1]["messages"]] == ["three"]
    assert text_of(page) == "third"
    undo = page.locator("#undo").get_by_role("button", name="Undo")
    undo.click()
    expect(page.locator(".said")).to_have_text(["one", "two"])
    assert text_of(page) == "second"
    page.reload()
    page.wait_for_selector(".reply")
    expect(page.locator(".said")).to_have_text(["one", "two"])
    page.get_by_role("button", name="Retry").click()
    wait(page)
    assert text_of(page) == "third"
    page.locator("#prompt").focus()
    page.keyboard.press("Control+z")
    assert text_of(page) == "second"
    ask_and_wait(page, "four")
    expect(undo).to_be_hidden()


def test_conversations_go_into_a_file_and_back(
    open_page: Callable[..., Any], tmp_path: Path
) -> None:
    page = open_page()
    ask_and_wait(page, "Who are you?", "I am")
    text = text_of(page)
    dialog = talks(page)
    with page.expect_download() as download:
        dialog.get_by_role("button", name="Export all").click()
    path = tmp_path / download.value.suggested_filename
    download.value.save_as(path)
    other = open_page()  # and nothing in its storage
    dialog = talks(other)
    assert titles(other) == []
    dialog.locator("input.import").set_input_files(path)
    expect(dialog.get_by_role("status")).to_contain_text("1 conversation was added.")
    dialog.locator(".open").click()
    assert text_of(other) == text
    slider = other.locator(".reply input[type=range]")
    slider.press("Home")  # with its drafts
    assert text_of(other) != text


ARCHIVE = {"format": "sfumato.conversations", "version": 1}
WRONG = {
    "no JSON": (b"{", "The file is no JSON."),
    "another JSON": (b'{"a": 1}', "The file holds no conversations of Sfumato."),
    "a later version": (json.dumps({**ARCHIVE, "version": 2, "conversations": []}), "version 2"),
    "nothing in it": (
        json.dumps({**ARCHIVE, "conversations": [3, {}]}),
        "no conversation that can",
    ),
    "no turns": (
        json.dumps({**ARCHIVE, "conversations": [{"turns": [{"role": "system", "content": "x"}]}]}),
        "no conversation",
    ),
}


def given(page: Any, content: bytes | str | Path) -> Any:
    file: Any = content
    if not isinstance(content, Path):
        data = content if isinstance(content, bytes) else content.encode()
        file = {"name": "a.json", "mimeType": "application/json", "buffer": data}
    talks(page).locator("input.import").set_input_files([file])
    return page.locator("#conversations").get_by_role("status")


def test_a_file_that_is_none_is_refused_and_what_one_holds_is_text_or_left_out(
    open_page: Callable[..., Any], tmp_path: Path
) -> None:
    page = open_page()
    for content, words in WRONG.values():
        expect(given(page, content)).to_contain_text(words)
    assert titles(page) == []
    large = tmp_path / "large.json"  # from the disk: no browser is sent its bytes
    large.write_bytes(b" " * 16_000_001)
    expect(given(page, large)).to_contain_text("more than 16 MB")
    nasty = "<img src=x onerror=alert(1)>"
    draft = {"step": 1, "ids": [1], "tokens": [nasty], "entropy": [0.1], "accepted": [1]}
    canvas = {"maxSteps": 1, "drafts": [draft], "settled": {"ids": [1], "tokens": [nasty]}}
    picture = {"name": nasty, "thumb": "data:image/svg+xml,<svg onload=alert(1)>"}
    outside = {"name": "x", "thumb": "https://example.org/x.png"}
    user = {
        "role": "user",
        "content": nasty,
        "pictures": [picture, outside],
        "files": [{"name": nasty, "text": nasty}],
    }
    turns = [
        user,
        {
            "role": "assistant",
            "content": nasty,
            "finish": "stop",
            "canvases": [canvas],
            "onclick": "x",
        },
    ]
    for wrong in (
        {"ids": [1, 2]},
        {"tokens": [3]},
        {"entropy": [None]},
        {"accepted": ["x"]},
        {"step": -1},
        {"ids": ["1"]},
        {"top": {"perPosition": 10**9, "ids": [], "p": []}},
    ):
        broken = {**canvas, "drafts": [draft | wrong]}
        turns += [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "a", "finish": "stop", "canvases": [broken]},
        ]
    turns += [{"role": "tool", "content": "x"}, {"role": "user"}, None, 3]
    expect(
        given(page, json.dumps({**ARCHIVE, "conversations": [{"title": nasty, "turns": turns}]}))
    ).to_contain_text("1 conv")
    assert titles(page) == [nasty]
    page.locator("#conversations .open").click()
    assert text_of(page, 0) == nasty
    expect(page.locator(".said").first).to_contain_text(nasty)
    assert page.locator("#turns img, #turns svg, #turns b, #turns script").count() == 0
    expect(page.locator(".reply")).to_have_count(8)
    # The replays that make sense: the first, and the one without its most probable tokens.
    expect(page.locator(".reply .scrubber:visible")).to_have_count(2)
    kept = page.evaluate("Object.values(localStorage).join()")
    assert "onclick" not in kept and "example.org" not in kept and "svg" not in kept


def test_drafts_are_lost_before_anything_is_lost_and_the_oldest_first(
    open_page: Callable[..., Any],
) -> None:
    page = open_page()
    for count in (1, 3):
        is_kept, talks = page.evaluate(
            """async (count) => {
          localStorage.clear();
          const store = await import('/store.js');
          const top = Array.from({ length: 20000 }, (_, i) => [[i, 0.5], [i + 1, 0.25]]);
          const draft = { step: 1, ids: [1], tokens: ['a'], entropy: [0], accepted: [1], top };
          const turns = Array.from({ length: 12 / count }, (_, i) => ({
            role: 'assistant', content: `reply ${i}`, canvases: [{ maxSteps: 1, drafts: [draft] }],
          }));
          const ids = Array.from({ length: count }, (_, i) => `talk ${i}`);
          const keep = (id, i) => store.saveConversation({ id, title: '', changed: i, turns });
          const isKept = ids.map(keep);
          return [isKept, ids.map((id) => store.loadConversation(id).turns.map(
            (turn) => [turn.content, turn.canvases[0]?.drafts[0].top.length]))];
        }""",
            count,
        )
        assert all(is_kept)
        for turns in talks:
            assert [content for content, _ in turns] == [f"reply {i}" for i in range(12 // count)]
        assert talks[-1][-1][1] == 20000
        assert talks[0][0][1] in (0, None)
    # Two hundred are kept at most; none is thrown out for another.
    full = page.evaluate("""async () => {
      const store = await import('/store.js');
      const turns = [{ role: 'user', content: 'a' }];
      const keep = (i) => store.saveConversation({ id: `few ${i}`, changed: i, turns });
      const saved = Array.from({ length: 201 }, (_, i) => keep(i));
      return [saved.filter(Boolean).length, store.conversations().length];
    }""")
    assert full == [200 - 3, 200]
