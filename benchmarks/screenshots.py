"""Screenshots of every view of the web page: desktop, phone, a phone on its side; dark, light.

    .venv/bin/python -m benchmarks.screenshots FOLDER [--view NAME …] [--screen NAME …]

Needs playwright and a Chromium, as the page's tests do. The pictures are for people to look at.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

import sfumato
from sfumato.engine import Engine, EngineConfig
from sfumato.server.app import ServerSettings, create_app
from sfumato.server.http.uvicorn_server import Listener, bind
from sfumato.server.models import Models

SUDOKU = "sudoku\n..1.\n1...\n.2.1\n...4"
KEY = "a-key"
SCREENS = {
    "desktop": {"viewport": {"width": 1280, "height": 800}},
    "phone": {"viewport": {"width": 375, "height": 720}, "has_touch": True, "is_mobile": True},
    "landscape": {"viewport": {"width": 720, "height": 360}, "has_touch": True, "is_mobile": True},
}


def ask(page: Any, text: str) -> None:
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")
    page.wait_for_selector(".reply:last-child:not(.live)")


def chat(page: Any) -> None:
    ask(page, SUDOKU)
    ask(page, "How do you work?")


def open_view(page: Any, name: str) -> None:
    page.evaluate(f"location.hash = '{name}'")


def fill(page: Any) -> None:
    open_view(page, "fill")
    page.get_by_role("button", name="Fill the holes").click()
    page.wait_for_selector("#fill .stage .scrubber input:enabled")


def write_json(page: Any) -> None:
    open_view(page, "json")
    page.get_by_role("button", name="Write the object").click()
    page.wait_for_selector("#json .stage .scrubber input:enabled")


def edit(page: Any) -> None:
    open_view(page, "edit")
    page.get_by_role("button", name="Change the text").click()
    page.get_by_role("button", name="Accept").wait_for()


def decide(page: Any) -> None:
    open_view(page, "decide")
    page.locator(".question .best").first.wait_for()


def engine(page: Any) -> None:
    ask(page, "Who are you?")
    open_view(page, "engine")
    page.wait_for_selector(".card")


def maps(page: Any) -> None:
    ask(page, SUDOKU)
    page.get_by_role("button", name="Colours").click()
    page.get_by_role("button", name="Heat maps").click()
    page.locator(".heat canvas").first.click(position={"x": 3, "y": 3})


def replay(page: Any) -> None:
    ask(page, "What is the capital of France?")
    ask(page, SUDOKU)
    page.locator(".reply input[type=range]").last.press("Home")
    page.locator(".reply input[type=range]").last.press("ArrowRight")


def conversations(page: Any) -> None:
    ask(page, "What is the capital of France?")
    page.get_by_role("button", name="New conversation").click()
    ask(page, SUDOKU)
    page.get_by_role("button", name="Conversations").click()


def written(page: Any) -> None:
    """A scripted reply: what the embedded model does not write."""
    text = (
        "# Roots\n\nThe equation $x^2 = p$ has two, $\\pm\\sqrt{p}$:\n\n"
        "$$x_{1,2} = \\frac{-b \\pm \\sqrt{b^2 - 4ac}}{2a}$$\n\n"
        "```python\ndef root(p):  # the positive one\n    return p ** 0.5\n```\n\n"
        "| p | root |\n|--:|--:|\n| 4 | 2 |"
    )
    frames = [
        {"choices": [{"delta": {"content": text}}]},
        {"choices": [{"delta": {}, "finish_reason": "stop"}]},
    ]
    body = "".join(f"data: {json.dumps(frame)}\n\n" for frame in frames) + "data: [DONE]\n\n"
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(body=body, content_type="text/event-stream"),
    )
    file = {"name": "notes.md", "mimeType": "text/markdown", "buffer": b"# Roots\n"}
    page.set_input_files("#attach input[multiple]", [file])
    ask(page, "What are the roots?")
    page.locator(".turn.user").get_by_role("button", name="Edit this message").click()
    page.set_input_files("#attach input[multiple]", [file])


# In the page: a reply may be whole before a look from outside.
STOP_AT_A_STEP = """new MutationObserver(() => {
  const stats = document.querySelector('.live .stats');
  if (stats?.innerText.includes('step')) document.querySelector('#stop').click();
}).observe(document.body, { subtree: true, childList: true, characterData: true })"""


def stopped(page: Any) -> None:
    page.evaluate(STOP_AT_A_STEP)
    ask(page, "How do you work?")


def settings(page: Any) -> None:
    page.get_by_role("button", name="Settings").click()


def key(page: Any) -> None:
    page.fill("#key", "wrong")
    page.keyboard.press("Enter")
    page.locator("#key-problem:visible").wait_for()


@dataclass(frozen=True)
class View:
    show: Callable[[Any], None]
    is_locked: bool = False  # the server asks for a key


VIEWS = {
    "welcome": View(lambda page: None),
    "chat": View(chat),
    "replay": View(replay),
    "maps": View(maps),
    "settings": View(settings),
    "conversations": View(conversations),
    "written": View(written),
    "stopped": View(stopped),
    "fill": View(fill),
    "json": View(write_json),
    "edit": View(edit),
    "decide": View(decide),
    "engine": View(engine),
    "key": View(key, is_locked=True),
}


@contextlib.contextmanager
def serving(api_keys: tuple[str, ...] = ()) -> Iterator[str]:
    """The address of a server of the embedded model."""
    engine = Engine(sfumato.load(), EngineConfig(slots=2, context=1024)).start()
    app = create_app(Models("sfumato", engine), ServerSettings(api_keys=api_keys))
    ready, bound = threading.Event(), bind("127.0.0.1", 0)
    listener = Listener(app, 0.0, engine.close, ready=ready.set)
    thread = threading.Thread(target=lambda: listener.run(sockets=[bound]), daemon=True)
    thread.start()
    assert ready.wait(20)
    try:
        yield f"http://127.0.0.1:{bound.getsockname()[1]}/"
    finally:
        listener.should_exit = True
        thread.join(20)
        engine.close()


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    names = ("chromium", "chromium-browser", "google-chrome")
    path = next(filter(None, map(shutil.which, names)), None)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--view", action="append", choices=VIEWS, help="this one alone")
    parser.add_argument("--screen", action="append", choices=SCREENS, help="this one alone")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    with serving() as open_url, serving((KEY,)) as locked_url, chromium() as browser:
        for screen in args.screen or SCREENS:
            for scheme in ("dark", "light"):
                for name in args.view or VIEWS:
                    view = VIEWS[name]
                    how = {**SCREENS[screen], "color_scheme": scheme, "reduced_motion": "reduce"}
                    page = browser.new_context(**how).new_page()
                    page.goto(locked_url if view.is_locked else open_url)
                    page.wait_for_selector("#locked form" if view.is_locked else ".example")
                    view.show(page)
                    page.wait_for_timeout(300)
                    page.screenshot(path=args.folder / f"{name}-{screen}-{scheme}.png")
                    page.context.close()


if __name__ == "__main__":
    main()
