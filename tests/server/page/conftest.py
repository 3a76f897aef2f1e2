"""The page in a real browser: the embedded model, made slower, behind a real server."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response
from tests.server.conftest import Served, serving
from tests.server.page import browsing

import sfumato
from sfumato.api import Model
from sfumato.server.http.middleware import ASGIApp, Message, Receive, Scope, Send

STEP_S = 0.12  # the embedded model is made slower, so that its drafts can be seen

LARGE = {"width": 1000, "height": 640}
BLANK = "/blank"  # an empty page of the server's origin
FLAGS = (
    *("--no-sandbox", "--process-per-site", "--disable-gpu", "--in-process-gpu"),
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",  # what asks another host fails
)

# The page draws seeds; here they are known: not with every one does the model solve the puzzle.
SEEDS = "let drawn = 0; crypto.getRandomValues = (into) => { into[0] = ++drawn; return into; };"

STORE = """stored => {
  localStorage.clear();
  sessionStorage.clear();
  for (const name in stored) localStorage.setItem(name, stored[name]);
}"""


class Front:
    """Stands before the servers: answers in their place where a test says so, notes what is asked,
    and lets the browser keep the page's files, of which every visit would ask anew: their sixty
    requests take more time than most tests, and so would they where a route of Playwright's is
    set, since the browser then keeps nothing."""

    def __init__(self) -> None:
        self.answers: dict[str, Callable[[Any], Response | None]] = {}
        """Of each path: what answers a body instead of the server; None lets the server answer."""
        self.requests: list[tuple[str, bytes, dict[str, str]]] = []
        """Paths, bodies and headers of the requests, but for those of files."""

    def bodies(self, path: str = "/v1/chat/completions") -> list[Any]:
        """What was sent to a path, the oldest first."""
        return [json.loads(body) for at, body, _ in self.requests if at == path and body]

    def __call__(self, app: ASGIApp) -> ASGIApp:
        async def answered(scope: Scope, receive: Receive, send: Send) -> None:
            async def kept(message: Message) -> None:
                if message["type"] == "http.response.start":
                    others = [item for item in message["headers"] if item[0] != b"cache-control"]
                    message["headers"] = [*others, (b"cache-control", b"max-age=86400")]
                await send(message)

            path = scope["path"]
            if path == BLANK:
                page = '<link rel="icon" href="data:,">'  # else one is asked for
                await Response(page, media_type="text/html")(scope, receive, send)
            elif "." in path:
                await app(scope, receive, kept)
            else:
                request = Request(scope, receive)
                body = await request.body()
                self.requests.append((path, body, dict(request.headers)))
                answer = self.answers.get(path, lambda _: None)(json.loads(body or b"null"))
                messages = [{"type": "http.request", "body": body, "more_body": False}]

                async def again() -> Message:
                    return messages.pop() if messages else await receive()

                await (answer or app)(scope, again, send)

        return answered


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


@pytest.fixture(scope="package")
def front() -> Front:
    return Front()


@pytest.fixture(scope="package")
def served(slow: Model, front: Front) -> Iterator[Served]:
    with serving(slow, slots=2, context=1024, front=front) as served:
        yield served


@pytest.fixture
def serve(front: Front) -> Iterator[Callable[..., Served]]:
    """serve(model, settings, slots=…) starts another one, until the test has ended."""
    with contextlib.ExitStack() as stack:
        yield lambda *args, **how: stack.enter_context(serving(*args, front=front, **how))


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


class Tabs:
    """A page for each kind of browser, which all tests visit: to open another takes longer than to
    load the page. Notes where something is asked of another host, refused by the content security
    policy, or complained about in the console."""

    def __init__(self, browser: Any) -> None:
        self._browser = browser
        self._tabs: dict[frozenset[tuple[str, bool]], Any] = {}
        self.at: list[str] = []  # how the addresses begin that may be asked
        self.expected = ""
        self.problems: list[str] = []

    def of(self, **options: bool) -> Any:
        """The page in a browser of such options."""
        kind = frozenset(options.items())
        if kind not in self._tabs:
            page = self._browser.new_context(**options).new_page()
            page.add_init_script(SEEDS)
            page.set_default_timeout(60_000)
            page.on("console", lambda message: self._note(f"console: {message.text}"))
            page.on("pageerror", lambda error: self._note(f"error: {error}"))
            page.on("requestfailed", lambda failed: self._note_failed(failed.url))
            self._tabs[kind] = page
        return self._tabs[kind]

    def _note(self, text: str) -> None:
        if not re.search(self.expected, text):
            self.problems.append(text)

    def _note_failed(self, url: str) -> None:
        if not url.startswith(tuple(self.at)):
            self._note(url)


@pytest.fixture(scope="package")
def tabs(browser: Any) -> Tabs:
    return Tabs(browser)


@pytest.fixture
def open_page(
    tabs: Tabs, front: Front, served: Served, serve: Any, eventually: Callable[..., None]
) -> Iterator[Callable[..., Any]]:
    """Opens the page as in a new browser, in whose storage something may be `stored`, from a server
    that may say something else of each path; at the end there may have been no problems."""
    opened: dict[str, Any] = {}  # of each address, the page that was opened last

    def open_(
        expected: str = r"\Z.",
        at: str = f"{served.url}/",
        awaits: str = ".example",
        viewport: Any = LARGE,
        color_scheme: str = "light",
        reduced_motion: str = "reduce",
        stored: dict[str, Any] | None = None,
        says: dict[str, Any] | None = None,
        **options: bool,
    ) -> Any:
        opened[at] = page = tabs.of(**options)
        tabs.at, tabs.expected = [at], expected
        page.front = front
        for path, answer in (says or {}).items():
            browsing.says(page, path, answer)
        if page.viewport_size != viewport:
            page.set_viewport_size(viewport)
        page.emulate_media(color_scheme=color_scheme, reduced_motion=reduced_motion)
        page.mouse.move(0, 0)
        if page.url != (blank := at.rstrip("/") + BLANK):
            page.goto(blank)
        page.evaluate(STORE, {name: json.dumps(value) for name, value in (stored or {}).items()})
        page.goto(at)
        page.wait_for_selector(awaits)
        return page

    tabs.problems.clear()
    front.requests.clear()
    yield open_
    front.answers.clear()
    for at, page in opened.items():
        page.unroute_all()
        page.goto(at.rstrip("/") + BLANK)  # ends what the page asks
        page.context.clear_permissions()
    eventually(lambda: not served.engine.state().running)
    assert tabs.problems == []


@pytest.fixture
def open_replay(open_page: Any, tabs: Tabs) -> Callable[[Path], Any]:
    """Opens the file of a replay, which asks for nothing, in a browser that is offline."""

    def open_(path: Path) -> Any:
        page = tabs.of(offline=True)
        tabs.at.append(path.as_uri())
        page.set_viewport_size({"width": 390, "height": 800})
        page.goto(path.as_uri())
        return page

    return open_
