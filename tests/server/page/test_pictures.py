"""Pictures on the page: chosen, pasted, dropped, sent as data URLs, shown, kept, and replayed."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.server.page.browsing import Script, ask, expect, wait
from tests.support.pictures import file_of, picture

PNG = file_of(picture(60, 40), "PNG")
DATA_URL = "data:image/png;base64," + base64.b64encode(PNG).decode()
GIVE = """([kind, name, data, type]) => {
  const bytes = Uint8Array.from(atob(data), (c) => c.charCodeAt(0));
  const transfer = new DataTransfer();
  transfer.items.add(new File([bytes], name, { type }));
  const target = document.getElementById('prompt');
  const event = kind === 'paste'
    ? new ClipboardEvent('paste', { clipboardData: transfer, bubbles: true, cancelable: true })
    : new DragEvent('drop', { dataTransfer: transfer, bubbles: true, cancelable: true });
  target.dispatchEvent(event);
}"""


def seeing(page: Any, images: int = 2) -> None:
    """Lets the server say that its model reads pictures, so many at a time."""
    says_vision(page, True, images)
    page.wait_for_selector("#attach .camera:not([hidden])", state="attached")


def says_vision(page: Any, vision: bool, images: int = 0) -> None:
    """Lets the server say whether its model reads pictures; the page is loaded anew."""

    def changed(route: Any) -> None:
        about = route.fetch().json()
        about["modalities"]["vision"] = vision
        about["limits"]["images"] = images
        route.fulfill(json=about)

    page.unroute("**/props")
    page.route("**/props", changed)
    page.reload()


def answered(page: Any) -> list[dict[str, Any]]:
    """The bodies of the requests that the page makes from now on, each answered with one word."""
    bodies: list[dict[str, Any]] = []
    page.on(
        "request",
        lambda sent: bodies.append(sent.post_data_json) if "completions" in sent.url else None,
    )
    script = Script().draft(0, 1, ["a"]).settle(0, ["three"]).delta(content="three").end()
    script.play(page)
    return bodies


def choose(page: Any, *files: dict[str, Any]) -> None:
    page.set_input_files("#attach input[multiple]", list(files))


def file(name: str, data: bytes = PNG, kind: str = "image/png") -> dict[str, Any]:
    return {"name": name, "mimeType": kind, "buffer": data}


def test_a_text_model_is_offered_no_pictures(open_page: Callable[..., Any]) -> None:
    page = open_page()
    says_vision(page, False)
    expect(page.locator("#attach .camera")).to_be_hidden()
    page.evaluate(GIVE, ["paste", "a.png", base64.b64encode(PNG).decode(), "image/png"])
    expect(page.locator("#tray [role=alert]")).to_have_text("This model reads no pictures.")
    expect(page.locator("#tray img")).to_have_count(0)


def test_text_files_are_attached_bounded_and_put_into_the_message(
    open_page: Callable[..., Any],
) -> None:
    page = open_page()
    seeing(page)
    bodies = answered(page)
    alert = page.locator("#tray [role=alert]")
    for wrong, words in (
        (file("a.bin", b"\x00\x01", "application/octet-stream"), "a.bin is no text."),
        (file("b.txt", b"\xff\xfe", "text/plain"), "b.txt is no text in UTF-8."),
        (file("c.txt", b" \n", "text/plain"), "c.txt is empty."),
        (
            file("d.txt", b"a" * 200_001, "text/plain"),
            "d.txt has 200 kB; a text file may have 200 kB.",
        ),
    ):
        choose(page, wrong)
        expect(alert).to_have_text(words)
    notes = file("<b>notes.md", "# Ä\r\n```\ncode\n```\n".encode(), "")
    choose(page, notes, file("e.csv", b"1,2", "text/csv"), file("f.png"))
    expect(page.locator("#tray li")).to_have_count(3)
    page.get_by_role("button", name="Remove e.csv").click()
    ask(page, "What is it?")
    wait(page)
    picture, text = bodies[0]["messages"][-1]["content"]
    assert picture["type"] == "image_url"
    assert text["text"] == "File <b>notes.md:\n````\n# Ä\n```\ncode\n```\n````\n\nWhat is it?"
    page.reload()
    shown = page.locator(".said details")
    expect(shown.locator("summary")).to_contain_text("<b>notes.md")
    shown.locator("summary").click()
    expect(shown.locator("pre")).to_contain_text("code")
    ask(page, "And now?")
    wait(page)
    assert bodies[1]["messages"][0]["content"] == bodies[0]["messages"][0]["content"]


def test_a_picture_is_chosen_sent_kept_and_sent_again(
    open_page: Callable[..., Any], tmp_path: Path
) -> None:
    page = open_page()
    seeing(page)
    bodies = answered(page)
    choose(page, file("a.png"), file("b.png"))
    expect(page.locator("#tray img")).to_have_count(2)
    page.get_by_role("button", name="Remove a.png").click()
    expect(page.locator("#tray img")).to_have_count(1)
    ask(page, "How many?")
    wait(page)
    expect(page.locator("#tray img")).to_have_count(0)
    expect(page.locator(".said img")).to_have_attribute("alt", "b.png")
    content = bodies[0]["messages"][-1]["content"]
    assert content == [
        {"type": "image_url", "image_url": {"url": DATA_URL}},  # the file as it is
        {"type": "text", "text": "How many?"},
    ]
    page.reload()
    expect(page.locator(".said img")).to_have_count(1)
    ask(page, "And now?")
    wait(page)
    first, _, second = bodies[1]["messages"]
    assert first["content"] == content
    assert second["content"] == "And now?"
    with page.expect_download() as download:
        page.get_by_role("button", name="Save replay").first.click()
    replay = tmp_path / "replay.html"
    download.value.save_as(replay)
    other = page.context.new_page()
    other.goto(replay.as_uri())
    expect(other.locator(".said img")).to_have_attribute("alt", "b.png")
    assert other.evaluate("document.querySelector('.said img').naturalWidth") == 60


@pytest.mark.parametrize("kind", ["paste", "drop"])
def test_a_picture_alone_is_a_question(open_page: Callable[..., Any], kind: str) -> None:
    page = open_page()
    seeing(page)
    bodies = answered(page)
    page.evaluate(GIVE, [kind, "a.png", base64.b64encode(PNG).decode(), "image/png"])
    expect(page.locator("#tray img")).to_have_count(1)
    page.locator("#send").click()
    wait(page)
    assert [part["type"] for part in bodies[0]["messages"][-1]["content"]] == ["image_url"]


def test_a_large_picture_is_made_smaller(open_page: Callable[..., Any]) -> None:
    page = open_page()
    seeing(page)
    bodies = answered(page)
    large = file_of(picture(2100, 300).convert("RGB"), "BMP")
    choose(page, file("large.bmp", large, "image/bmp"))
    expect(page.locator("#tray img")).to_have_count(1)
    ask(page, "What is it?")
    wait(page)
    url = bodies[0]["messages"][-1]["content"][0]["image_url"]["url"]
    assert url.startswith("data:image/jpeg;base64,") and len(url) < len(large) / 4
    size = page.evaluate(
        "async (url) => { const image = new Image(); image.src = url; await image.decode();"
        " return [image.naturalWidth, image.naturalHeight]; }",
        url,
    )
    assert size == [2048, 293]


def test_what_cannot_be_taken_is_said(open_page: Callable[..., Any]) -> None:
    page = open_page()
    seeing(page, images=1)
    alert = page.locator("#tray [role=alert]")
    choose(page, file("broken.png", b"no picture"))
    expect(alert).to_have_text("broken.png is no picture that this browser can read.")
    choose(page, file("a.png"), file("b.png"))
    expect(page.locator("#tray img")).to_have_count(1)
    expect(alert).to_have_text("A question has 1 pictures at most.")


def test_an_example_may_have_a_picture(open_page: Callable[..., Any]) -> None:
    page = open_page()

    def with_example(route: Any) -> None:
        about = route.fetch().json()
        parts = [
            {"type": "image_url", "image_url": {"url": DATA_URL}},
            {"type": "text", "text": "Which digit is this?"},
        ]
        example = {"title": "A digit", "messages": [{"role": "user", "content": parts}]}
        about["examples"] = [example]
        route.fulfill(json=about)

    page.route("**/props", with_example)
    page.reload()
    expect(page.locator(".example img.pixels")).to_have_count(1)  # small: its pixels are shown
    bodies = answered(page)
    page.fill("#prompt", "not sent")
    page.locator(".example").click()
    wait(page)
    assert json.dumps(DATA_URL) in json.dumps(bodies[0]["messages"])
    expect(page.locator("#prompt")).to_have_value("not sent")
