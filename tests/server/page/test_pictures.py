"""Pictures on the page: chosen, pasted, dropped, sent as data URLs, shown, kept, and replayed."""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


def vision(about: Any, images: int) -> Any:
    """What a server says whose model reads so many pictures at a time."""
    modalities = {**about["modalities"], "vision": images > 0}
    return {**about, "modalities": modalities, "limits": {**about["limits"], "images": images}}


def seeing(open_page: Callable[..., Any], served: Any, images: int = 2, **more: Any) -> Any:
    """The page where the server's model reads so many pictures and says more of itself; every
    question is answered with one word."""
    about = vision(served.http.get("/props").json(), images) | more
    page = open_page(says={"/props": about})
    script = Script().draft(0, 1, ["a"]).settle(0, ["three"]).delta(content="three").end()
    script.play(page)
    if images:
        page.wait_for_selector("#attach .camera:not([hidden])", state="attached")
    return page


def choose(page: Any, *files: dict[str, Any]) -> None:
    page.set_input_files("#attach input[multiple]", list(files))


def file(name: str, data: bytes = PNG, kind: str = "image/png") -> dict[str, Any]:
    return {"name": name, "mimeType": kind, "buffer": data}


def test_what_cannot_be_taken_is_said(open_page: Callable[..., Any], served: Any) -> None:
    page = seeing(open_page, served, images=0)
    expect(page.locator("#attach .camera")).to_be_hidden()
    page.evaluate(GIVE, ["paste", "a.png", base64.b64encode(PNG).decode(), "image/png"])
    alert = page.locator("#tray [role=alert]")
    expect(alert).to_have_text("This model reads no pictures.")
    expect(page.locator("#tray img")).to_have_count(0)
    page = seeing(open_page, served, images=1)
    for wrong, words in (
        (
            file("broken.png", b"no picture"),
            "broken.png is no picture that this browser can read.",
        ),
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
    choose(page, file("a.png"), file("b.png"))
    expect(page.locator("#tray img")).to_have_count(1)
    expect(alert).to_have_text("A question has 1 pictures at most.")


def test_pictures_and_text_files_are_chosen_sent_kept_and_sent_again(
    open_page: Callable[..., Any], open_replay: Callable[..., Any], served: Any, tmp_path: Path
) -> None:
    page = seeing(open_page, served)
    notes = file("<b>notes.md", "# Ä\r\n```\ncode\n```\n".encode(), "")
    choose(page, notes, file("e.csv", b"1,2", "text/csv"), file("a.png"), file("b.png"))
    expect(page.locator("#tray li")).to_have_count(4)
    expect(page.locator("#tray img")).to_have_count(2)
    page.get_by_role("button", name="Remove e.csv").click()
    page.get_by_role("button", name="Remove a.png").click()
    expect(page.locator("#tray img")).to_have_count(1)
    ask(page, "What is it?")
    wait(page)
    expect(page.locator("#tray li")).to_have_count(0)
    expect(page.locator(".said img")).to_have_attribute("alt", "b.png")
    text = "File <b>notes.md:\n````\n# Ä\n```\ncode\n```\n````\n\nWhat is it?"
    content = page.front.bodies()[0]["messages"][-1]["content"]
    assert content == [
        {"type": "image_url", "image_url": {"url": DATA_URL}},  # the file as it is
        {"type": "text", "text": text},
    ]
    page.reload()
    expect(page.locator(".said img")).to_have_count(1)
    shown = page.locator(".said details")
    expect(shown.locator("summary")).to_contain_text("<b>notes.md")
    shown.locator("summary").click()
    expect(shown.locator("pre")).to_contain_text("code")
    ask(page, "And now?")
    wait(page)
    first, _, second = page.front.bodies()[1]["messages"]
    assert first["content"] == content
    assert second["content"] == "And now?"
    with page.expect_download() as download:
        page.get_by_role("button", name="Save replay").first.click()
    replay = tmp_path / "replay.html"
    download.value.save_as(replay)
    other = open_replay(replay)
    expect(other.locator(".said img")).to_have_attribute("alt", "b.png")
    assert other.evaluate("document.querySelector('.said img').naturalWidth") == 60


def test_a_picture_alone_is_a_question_and_a_large_one_is_made_smaller(
    open_page: Callable[..., Any], served: Any
) -> None:
    """Of an example, pasted, dropped and chosen."""
    image = {"type": "image_url", "image_url": {"url": DATA_URL}}
    parts = [image, {"type": "text", "text": "Which digit is this?"}]
    example = {"title": "A digit", "messages": [{"role": "user", "content": parts}]}
    page = seeing(open_page, served, examples=[example])
    expect(page.locator(".example img.pixels")).to_have_count(1)  # small: its pixels are shown
    page.fill("#prompt", "not sent")
    page.locator(".example").click()
    wait(page)
    assert page.front.bodies()[0]["messages"][-1]["content"] == parts
    expect(page.locator("#prompt")).to_have_value("not sent")
    page.fill("#prompt", "")
    for kind in ("paste", "drop"):
        page.evaluate(GIVE, [kind, "a.png", base64.b64encode(PNG).decode(), "image/png"])
        expect(page.locator("#tray img")).to_have_count(1)
        page.locator("#send").click()
        wait(page)
        assert page.front.bodies()[-1]["messages"][-1]["content"] == [image]
        page.get_by_role("button", name="New conversation").click()
    large = file_of(picture(2100, 300).convert("RGB"), "BMP")
    choose(page, file("large.bmp", large, "image/bmp"))
    expect(page.locator("#tray img")).to_have_count(1)
    ask(page, "What is it?")
    wait(page)
    url = page.front.bodies()[-1]["messages"][-1]["content"][0]["image_url"]["url"]
    assert url.startswith("data:image/jpeg;base64,") and len(url) < len(large) / 4
    size = page.evaluate(
        "async (url) => { const image = new Image(); image.src = url; await image.decode();"
        " return [image.naturalWidth, image.naturalHeight]; }",
        url,
    )
    assert size == [2048, 293]
