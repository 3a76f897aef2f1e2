"""The page in a real browser: the embedded model, made slower, behind a real server."""

from __future__ import annotations

import contextlib
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import sfumato
from sfumato.api import Model

STEP_S = 0.12  # the embedded model is made slower, so that its drafts can be seen

LARGE = {"width": 1200, "height": 800}
FLAGS = ("--no-sandbox", "--process-per-site", "--disable-gpu", "--in-process-gpu")

# The page draws seeds; here they are known: not with every one does the model solve the puzzle.
SEEDS = "let drawn = 0; crypto.getRandomValues = (into) => { into[0] = ++drawn; return into; };"


class Steps:
    """The denoising steps of the slow model, which a test can hold."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._allowed: int | None = None  # steps that a held model may still take
        self._holds = 0  # holds that have begun or ended

    @contextlib.contextmanager
    def held_after(self, steps: int) -> Iterator[None]:
        """No reply ends inside: the model takes so many steps more, and then waits."""
        self._allow(steps)
        try:
            yield
        finally:
            self._allow(None)

    def take(self) -> None:
        """A step; called in the engine's thread.  One that began before a hold does not count in
        it: it may be the last of a request that was stopped."""
        with self._changed:
            began = self._holds
        time.sleep(STEP_S)
        with self._changed:
            assert self._changed.wait_for(lambda: self._allowed != 0 or self._holds != began, 60), (
                "held for too long"
            )
            if self._allowed and self._holds == began:
                self._allowed -= 1

    def _allow(self, steps: int | None) -> None:
        with self._changed:
            self._allowed = steps
            self._holds += 1
            self._changed.notify_all()


@pytest.fixture(scope="package")
def steps() -> Steps:
    return Steps()


@pytest.fixture(scope="package")
def slow(steps: Steps) -> Model:
    model = sfumato.load()
    denoise = model.network.denoise_batch

    def slowly(*args: Any, **kwargs: Any) -> Any:
        steps.take()
        return denoise(*args, **kwargs)

    model.network.denoise_batch = slowly  # type: ignore[method-assign]
    return model


@pytest.fixture
def url(serve: Callable[..., Any], slow: Model) -> str:
    return f"{serve(slow, slots=2, context=1024).url}/"


@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    names = ("chromium", "chromium-browser", "google-chrome")
    chromium = next(filter(None, map(shutil.which, names)), None)
    if chromium is None:
        pytest.skip("there is no Chromium on this machine")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="package")
def shared(browser: Any) -> Any:
    """The context of most pages.  An empty one of their site stays open: it keeps the process in
    which they are drawn, and to start a process takes longer than to load a page."""
    context = browser.new_context()
    page = context.new_page()
    page.route("**/*", lambda route: route.fulfill(body=""))
    page.goto("http://127.0.0.1/")
    return context


@pytest.fixture
def open_page(browser: Any, shared: Any, url: str) -> Iterator[Callable[..., Any]]:
    """Opens the page; at the end nothing may have been asked of another host, refused by the
    content security policy, or complained about in the console."""
    problems: list[str] = []
    opened: list[Any] = []

    def new_page(at: str, viewport: Any = LARGE, **options: Any) -> Any:
        """Of a context of its own where another one is open, or the options ask for one."""
        if opened or not options.keys() <= {"color_scheme", "reduced_motion"}:
            opened.append(browser.new_context(viewport=viewport, **options))
            return opened[-1].new_page()
        opened.append(page := shared.new_page())
        page.set_viewport_size(viewport)
        page.emulate_media(**options)
        # An earlier server may have had the same port.
        origin = {"origin": at.rstrip("/"), "storageTypes": "all"}
        shared.new_cdp_session(page).send("Storage.clearDataForOrigin", origin)
        return page

    def open_(
        expected: str = r"\Z.", at: str = url, awaits: str = ".example", **options: Any
    ) -> Any:
        def note(text: str) -> None:
            if not re.search(expected, text):
                problems.append(text)

        page = new_page(at, **options)
        page.add_init_script(SEEDS)
        page.set_default_timeout(60_000)
        page.on("console", lambda message: note(f"console: {message.text}"))
        page.on("pageerror", lambda error: note(f"error: {error}"))
        page.on("request", lambda sent: note(sent.url) if not sent.url.startswith(at) else None)
        page.goto(at)
        page.wait_for_selector(awaits)
        return page

    yield open_
    for each in opened:
        each.close()
    shared.clear_permissions()
    assert problems == []
