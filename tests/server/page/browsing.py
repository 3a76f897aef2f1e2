"""What tests of the page do in it, and replies of which they say every frame."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from starlette.responses import JSONResponse, Response

expect = pytest.importorskip("playwright.sync_api", reason="playwright is not installed").expect
expect.set_options(timeout=20_000)  # of a busy machine; milliseconds

COMPLETIONS = "/v1/chat/completions"
SUDOKU = "sudoku\n..1.\n1...\n.2.1\n...4"
SOLUTION = "2413\n1342\n4231\n3124"

# Notes, with every picture of the screen, how high the live bubble is and where its tokens are.
WATCH = """() => {
  window.seen = [];
  const look = () => {
    const live = document.querySelector('.reply.live');
    if (live) {
      const box = live.querySelector('.canvas:not(.thought .canvas)');
      const top = box.getBoundingClientRect().top;
      const places = {};
      for (const token of box.querySelectorAll('.token')) {
        const at = token.getBoundingClientRect();
        places[token.dataset.key] = [Math.round(at.left), Math.round(at.top - top)];
      }
      window.seen.push({
        height: Math.round(live.getBoundingClientRect().height), places, text: box.innerText,
        fresh: box.querySelectorAll('.glow-0').length,
        stats: live.querySelector('.stats').innerText,
      });
    }
    requestAnimationFrame(look);
  };
  look();
}"""

# The rules that do not hold, and of what.
AXE = """() => axe.run({ preload: false, resultTypes: ['violations'] }).then(({ violations }) =>
  violations.map(({ id, nodes }) => [id, nodes.map(({ html }) => html.slice(0, 200))]))"""

PHONE = {"width": 360, "height": 740}


def checked_by_axe(page: Any) -> Callable[[str], None]:
    """check(state): the rules of axe-core hold, on a large screen in dark colours and on a phone in
    light ones."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    large = page.viewport_size

    def check(state: str) -> None:
        for scheme, size in (("light", PHONE), ("dark", large)):
            page.set_viewport_size(size)
            page.emulate_media(color_scheme=scheme)
            page.wait_for_selector(f":root[data-theme={scheme}]")
            if not page.evaluate("'axe' in window"):
                page.evaluate(axe.axe_script)
            shown = page.evaluate(AXE)
            assert shown == [], (state, scheme, shown)

    return check


def ask(page: Any, text: str) -> None:
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def wait(page: Any) -> None:
    """Until the reply is whole."""
    page.wait_for_selector(".reply:last-child:not(.live)")


def text_of(page: Any, nth: int = -1) -> str:
    """What a reply shows: its prose, or its canvas."""
    bubble = page.locator(".reply").nth(nth).locator(".bubble")
    prose = bubble.locator(":scope > .markdown:visible")
    return str((prose if prose.count() else bubble.locator(":scope > .canvas")).inner_text())


def says(page: Any, path: str, answer: Any, status: int = 200) -> None:
    """Answers a path with JSON, from now on."""
    page.front.answers[path] = lambda _: JSONResponse(answer, status)


def props(page: Any) -> Any:
    """What the server itself says of its model."""
    page.front.answers.pop("/props", None)
    return page.evaluate("fetch('/props').then((answer) => answer.json())")


def canvas_of(page: Any, nth: int = -1) -> Any:
    """The canvas of a reply, in the place of its prose."""
    reply = page.locator(".reply").nth(nth)
    canvas = reply.get_by_role("button", name="Canvas", exact=True)
    if canvas.count():
        canvas.click()
    return reply.locator(".bubble > .canvas")


def watched(page: Any) -> list[dict[str, Any]]:
    """What WATCH noted since the first draft."""
    seen: list[dict[str, Any]] = page.evaluate("window.seen")
    return [look for look in seen if look["places"]]


class Script:
    """Frames of a reply that the page is given instead of the server's."""

    def __init__(self) -> None:
        self.frames: list[dict[str, Any]] = []

    def draft(self, canvas: int, step: int, tokens: list[str], listed: int = 3) -> Script:
        ids = [self._id(token) for token in tokens]
        n = len(tokens)
        top = [[[token + k, 0.5 / (k + 1)] for k in range(listed)] for token in ids]
        frame = {"canvas": canvas, "step": step, "max_steps": 8, "token_ids": ids, "tokens": tokens}
        rest = {"entropy": [1.0 / step] * n, "accepted": [step > 1] * n, "top": top}
        self.frames.append({"choices": [], "draft": {**frame, **rest}})
        return self

    def settle(
        self, canvas: int, tokens: list[str], convergence: str = "converged", **more: Any
    ) -> Script:
        ids = [self._id(token) for token in tokens]
        frame = {"canvas": canvas, "convergence": convergence, "steps": 2, **more}
        self.frames.append(
            {"choices": [], "settled": {**frame, "token_ids": ids, "tokens": tokens}}
        )
        return self

    def delta(self, **delta: str) -> Script:
        self.frames.append({"choices": [{"delta": delta}]})
        return self

    def end(self, reason: str = "stop", **more: Any) -> Script:
        choice = {"delta": {}, "finish_reason": reason}
        self.frames.append({"choices": [choice], **more})
        return self

    def play(self, page: Any, end: str = "data: [DONE]\n\n") -> None:
        """Answers all questions from now on."""
        body = "".join(f"data: {json.dumps(frame)}\n\n" for frame in self.frames)
        page.front.answers[COMPLETIONS] = lambda _: Response(
            f": hello\n\n{body}{end}", media_type="text/event-stream"
        )

    @staticmethod
    def _id(token: str) -> int:
        return sum(token.encode()) % 90 + 5
