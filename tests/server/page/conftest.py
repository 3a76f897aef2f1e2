"""The page in a real browser: the embedded model, made slower, behind a real server."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import sfumato
from sfumato.api import Model

STEP_S = 0.12  # the embedded model is made slower, so that its drafts can be seen

# The page draws seeds; here they are known: not with every one does the model solve the puzzle.
SEEDS = "let drawn = 0; crypto.getRandomValues = (into) => { into[0] = ++drawn; return into; };"


@pytest.fixture(scope="module")
def slow() -> Model:
    model = sfumato.load()
    denoise = model.network.denoise_batch

    def slowly(*args: Any, **kwargs: Any) -> Any:
        time.sleep(STEP_S)
        return denoise(*args, **kwargs)

    model.network.denoise_batch = slowly  # type: ignore[method-assign]
    return model


@pytest.fixture
def url(serve: Callable[..., Any], slow: Model) -> str:
    return f"{serve(slow, slots=2, context=1024).url}/"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    names = ("chromium", "chromium-browser", "google-chrome")
    chromium = next(filter(None, map(shutil.which, names)), None)
    if chromium is None:
        pytest.skip("there is no Chromium on this machine")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Any, url: str) -> Iterator[Callable[..., Any]]:
    """Opens the page; at the end nothing may have been asked of another host, refused by the
    content security policy, or complained about in the console."""
    problems: list[str] = []
    contexts = []

    def open_(expected: str = r"\Z.", at: str = url, **options: Any) -> Any:
        def note(text: str) -> None:
            if not re.search(expected, text):
                problems.append(text)

        contexts.append(
            browser.new_context(**{"viewport": {"width": 1200, "height": 800}, **options})
        )
        page = contexts[-1].new_page()
        page.add_init_script(SEEDS)
        page.set_default_timeout(15_000)
        page.on("console", lambda message: note(f"console: {message.text}"))
        page.on("pageerror", lambda error: note(f"error: {error}"))
        page.on("request", lambda sent: note(sent.url) if not sent.url.startswith(at) else None)
        page.goto(at)
        page.wait_for_selector(".example")
        return page

    yield open_
    for context in contexts:
        context.close()
    assert problems == []
