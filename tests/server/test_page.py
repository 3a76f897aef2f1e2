"""The web page in a real browser: the embedded model behind a real server, and scripted replies."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import sfumato
from sfumato.api import Model
from sfumato.server.settings import ServerSettings

api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
expect = api.expect

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="there is no Chromium on this machine")

STEP_S = 0.12  # the embedded model is made slower, so that its drafts can be seen
SUDOKU = "sudoku\n2.1.\n....\n....\n.1.4"
SOLUTION = "2413\n1342\n4231\n3124"
PHONE = {"width": 360, "height": 740}

# The page draws seeds; here they are known: not with every one does the model solve the puzzle.
SEEDS = "let drawn = 0; crypto.getRandomValues = (into) => { into[0] = ++drawn; return into; };"

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


@pytest.fixture(scope="module")
def slow() -> Model:
    model = sfumato.load()
    denoise = model.network.denoise

    def slowly(*args: Any, **kwargs: Any) -> Any:
        time.sleep(STEP_S)
        return denoise(*args, **kwargs)

    model.network.denoise = slowly  # type: ignore[method-assign]
    return model


@pytest.fixture
def url(serve: Callable[..., Any], slow: Model) -> str:
    return f"{serve(slow, slots=2, context=1024).url}/"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
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


def ask(page: Any, text: str) -> None:
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def wait(page: Any) -> None:
    """Until the reply is whole."""
    page.wait_for_selector(".reply:last-child:not(.live)")


def text_of(page: Any, nth: int = -1) -> str:
    return str(page.locator(".reply").nth(nth).locator(".bubble > .canvas").inner_text())


def watched(page: Any) -> list[dict[str, Any]]:
    """What WATCH noted since the first draft."""
    seen: list[dict[str, Any]] = page.evaluate("window.seen")
    return [look for look in seen if look["places"]]


class Script:
    """Frames of a reply that the page is given instead of the server's."""

    def __init__(self) -> None:
        self.frames: list[dict[str, Any]] = []

    def draft(self, canvas: int, step: int, tokens: list[str], few: int = 3) -> Script:
        ids = [self._id(token) for token in tokens]
        n = len(tokens)
        top = [[[token + k, 0.5 / (k + 1)] for k in range(few)] for token in ids]
        frame = {"canvas": canvas, "step": step, "max_steps": 8, "token_ids": ids, "tokens": tokens}
        rest = {"entropy": [1.0 / step] * n, "accepted": [step > 1] * n, "top": top}
        self.frames.append({"choices": [], "draft": {**frame, **rest}})
        return self

    def settle(self, canvas: int, tokens: list[str], convergence: str = "converged") -> Script:
        ids = [self._id(token) for token in tokens]
        frame = {"canvas": canvas, "convergence": convergence, "steps": 2}
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
        body = "".join(f"data: {json.dumps(frame)}\n\n" for frame in self.frames)
        page.route(
            "**/v1/chat/completions",
            lambda route: route.fulfill(
                body=": hello\n\n" + body + end, content_type="text/event-stream"
            ),
        )

    @staticmethod
    def _id(token: str) -> int:
        return sum(token.encode()) % 90 + 5


def test_a_board_fills_in_where_it_stands(open_page: Callable[..., Any]) -> None:
    page = open_page()
    page.evaluate(WATCH)
    ask(page, SUDOKU)
    wait(page)
    looks = watched(page)
    assert text_of(page) == SOLUTION
    assert len({look["text"] for look in looks}) > 1, "the board was there at once"
    assert any(look["fresh"] > 0 for look in looks), "nothing glowed"
    assert len({look["height"] for look in looks}) == 1, "the bubble changed its height"
    places: dict[str, set[tuple[int, ...]]] = {}
    for look in looks:
        for key, place in look["places"].items():
            places.setdefault(key, set()).add(tuple(place))
    assert {key: len(found) for key, found in places.items() if len(found) > 1} == {}
    assert re.search(r"step\s+2/48", " ".join(look["stats"] for look in looks))
    stats = page.inner_text(".stats")
    for part in (r"\d steps", r"ms/step", r"tok/forward", r"tok/s", "converged", r"seed \d+"):
        assert re.search(part, stats), stats


def test_scrubbing_replays_every_step_and_ends_with_the_text(open_page: Callable[..., Any]) -> None:
    page = open_page()
    ask(page, SUDOKU)
    wait(page)
    slider = page.locator("input[type=range]")
    last = int(slider.get_attribute("max"))
    assert last >= 2 and slider.input_value() == str(last)
    height = page.locator(".reply").bounding_box()["height"]
    slider.focus()
    slider.press("Home")
    assert slider.get_attribute("aria-valuetext") == "step 1"
    first = text_of(page)
    assert first != SOLUTION and page.locator(".glow-0").count() > 0
    assert page.locator(".reply").bounding_box()["height"] == height
    for _ in range(last):
        slider.press("ArrowRight")
    assert slider.get_attribute("aria-valuetext") == "settled"
    assert text_of(page) == SOLUTION and page.locator(".glow-0").count() == 0
    page.locator("h1").click()  # the arrow keys scrub from anywhere but a field
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("ArrowLeft")
    assert slider.input_value() == str(last - 1)
    page.click(".play")
    expect(page.locator(".where")).to_have_text("settled")


def test_a_position_shows_its_likeliest_and_its_past(open_page: Callable[..., Any]) -> None:
    page = open_page()
    ask(page, SUDOKU)
    wait(page)
    page.locator(".token").nth(5).click()
    panel = page.locator("#inspector")
    expect(panel).to_contain_text("position 7")  # the line's end before it is a position too
    expect(panel).to_contain_text("nats")
    expect(panel.locator(".few li")).not_to_have_count(0)
    expect(panel.locator(".few li.settled .mono")).to_have_text("3")
    steps = panel.locator(".history li")
    expect(steps).to_have_count(int(page.locator("input[type=range]").get_attribute("max")))
    expect(steps.last.locator(".rank")).to_have_text("1.")
    steps.first.locator("button").click()
    expect(page.locator(".where")).to_have_text("step 1")
    expect(panel).to_contain_text("step 1")
    panel.get_by_label("Position after").click()
    expect(panel).to_contain_text("position 8")
    expect(page.locator(".token.picked")).to_have_count(1)
    page.keyboard.press("Escape")
    expect(panel).to_be_hidden()
    expect(page.locator(".token.picked")).to_have_count(0)


def test_heat_maps_are_drawn_and_lead_to_positions(open_page: Callable[..., Any]) -> None:
    page = open_page()
    ask(page, SUDOKU)
    wait(page)
    page.get_by_role("button", name="Heat maps").click()
    maps = page.locator(".heat canvas")
    expect(maps).to_have_count(2)
    colours = "c => new Set(c.getContext('2d').getImageData(0,0,c.width,c.height).data).size"
    assert all(maps.nth(i).evaluate(colours) > 4 for i in range(2))
    maps.first.click(position={"x": 3, "y": 3})
    expect(page.locator("#inspector")).to_contain_text("position 1 · step 1")
    maps.first.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    expect(page.locator("#inspector")).to_contain_text("position 2 · step 2")


def test_stop_retry_and_reload(open_page: Callable[..., Any]) -> None:
    page = open_page()
    ask(page, "How do you work?")
    page.wait_for_selector(".reply.live .token")
    page.keyboard.press("Escape")
    wait(page)
    expect(page.locator(".stats")).to_contain_text("stopped")
    expect(page.locator("#prompt")).to_be_focused()
    page.get_by_role("button", name="Retry").click()
    page.wait_for_selector(".reply.live")
    wait(page)
    expect(page.locator(".reply")).to_have_count(1)
    text, stats = text_of(page), page.inner_text(".stats")
    assert text == "I turn a canvas of random tokens into text, step by step."
    page.reload()
    page.wait_for_selector(".reply")
    assert (text_of(page), page.inner_text(".stats")) == (text, stats)
    expect(page.locator(".said")).to_have_text("How do you work?")
    page.locator("input[type=range]").press("Home")
    assert text_of(page) != text
    ask(page, "Who are you?")
    wait(page)
    assert text_of(page) == "I am Sfumato's embedded demo, a tiny diffusion model."
    page.get_by_role("button", name="New conversation").click()
    expect(page.locator(".turn")).to_have_count(0)
    expect(page.locator(".example").first).to_be_visible()


def test_stopping_ends_the_request(
    open_page: Callable[..., Any],
    serve: Callable[..., Any],
    slow: Model,
    eventually: Callable[..., None],
) -> None:
    served = serve(slow, slots=1, context=512)
    page = open_page(at=f"{served.url}/")
    ask(page, "How do you work?")
    page.wait_for_selector(".reply.live .token")
    page.get_by_role("button", name="Stop").click()
    eventually(lambda: not served.engine.state().running)
    assert served.engine.state().totals.requests == {"cancelled": 1}
    wait(page)
    ask(page, SUDOKU)
    wait(page)
    assert text_of(page) == SOLUTION


def test_settings_are_sent_and_kept(open_page: Callable[..., Any]) -> None:
    page = open_page()
    sent: list[dict[str, Any]] = []
    page.on("request", lambda r: sent.append(r.post_data_json) if r.method == "POST" else None)
    page.get_by_role("button", name="Settings").click()
    for label, value in (("Seed", "7"), ("Most steps per canvas", "1"), ("Entropy bound", "0.2")):
        page.get_by_label(label).fill(value)
    page.get_by_label("Think before answering").check()
    page.keyboard.press("Escape")
    ask(page, SUDOKU)
    wait(page)
    asked = sent[0]
    assert (asked["seed"], asked["max_steps"], asked["entropy_bound"]) == (7, 1, 0.2)
    assert asked["chat_template_kwargs"] == {"enable_thinking": True}
    expect(page.locator(".stats")).to_contain_text("step cap reached")
    expect(page.locator(".stats")).to_contain_text("seed 7")
    page.reload()
    page.get_by_role("button", name="Settings").click()
    expect(page.get_by_label("Seed")).to_have_value("7")
    page.get_by_label("Most steps per canvas").fill("0")  # refused by the field: not sent
    page.keyboard.press("Escape")
    ask(page, SUDOKU)
    wait(page)
    assert "max_steps" not in sent[-1]


def test_lines_hold_and_the_bubble_never_gets_lower(open_page: Callable[..., Any]) -> None:
    """Tokens of all lengths, and lines that come and go."""
    words = ["a ", "long ", "and winding ", "\n", "road ", "\n\n", "to ", "some ", "where "]
    script = Script()
    for step in range(1, 7):
        script.draft(0, step, [words[(i * step) % len(words)] for i in range(80)])
    final = [words[i % 3] for i in range(80)]
    script.settle(0, final).delta(content="".join(final)).end()
    page = open_page()
    script.play(page)
    page.evaluate(WATCH)
    ask(page, "a road")
    wait(page)
    heights = [look["height"] for look in watched(page)]
    assert heights == sorted(heights)
    assert "".join(text_of(page).split()) == "".join("".join(final).split())
    slider = page.locator("input[type=range]")
    slider.press("Home")
    replayed = set()
    for _ in range(6):
        replayed.add(page.locator(".reply").bounding_box()["height"])
        slider.press("ArrowRight")
    assert len(replayed) == 1


def test_what_a_model_writes_is_text(open_page: Callable[..., Any]) -> None:
    nasty = [
        "<img src=x onerror=alert(1)>",
        "<b>",
        "bold",
        "<0xC3>",
        "<0xA9>",
        "\x1b[31m",
        "\u202e",
    ]
    text = "<img src=x onerror=alert(1)><b>boldé\x1b[31m\u202e"
    page = open_page()
    Script().draft(0, 1, nasty).settle(0, nasty).delta(content=text).end().play(page)
    ask(page, "<script>alert(2)</script>")
    wait(page)
    assert text_of(page) == "<img src=x onerror=alert(1)><b>boldé·[31m·"
    assert page.locator("#turns img, #turns b, #turns script").count() == 0
    expect(page.locator("[data-key='0.3']")).to_have_text("é")  # of two bytes, the first has it
    expect(page.locator(".said")).to_have_text("<script>alert(2)</script>")


def test_thoughts_are_folded_and_calls_are_quiet(open_page: Callable[..., Any]) -> None:
    first = ["<|channel>", "thought", "\n", "let ", "me ", "see"]
    second = [" then", "<channel|>", "Yes", ".", "<turn|>", "<eos>"]
    script = Script().draft(0, 1, first).settle(0, first).delta(reasoning_content="let me see")
    script.draft(1, 1, second).settle(1, second[:4]).delta(reasoning_content=" then")
    script.delta(content="Yes.").end(warnings=["a warning"])
    page = open_page()
    script.play(page)
    ask(page, "is it?")
    wait(page)
    assert text_of(page) == "Yes."
    fold = page.locator("details.thought")
    expect(fold).to_be_visible()
    expect(fold.locator(".canvas")).to_be_hidden()
    fold.locator("summary").click()
    expect(fold.locator(".canvas")).to_have_text("let me see then")
    expect(page.locator(".note:visible")).to_have_text("a warning")
    expect(page.locator(".reply [aria-live=polite]")).to_have_text("Yes.")


def test_text_that_tokens_do_not_show_is_the_servers(open_page: Callable[..., Any]) -> None:
    """A stop string is among the tokens, and not in the text."""
    page = open_page()
    tokens = ["one ", "two", "STOP"]
    Script().draft(0, 1, tokens).settle(0, tokens).delta(content="one two").end().play(page)
    ask(page, "count")
    wait(page)
    assert text_of(page) == "one two"


def test_errors_are_told(open_page: Callable[..., Any]) -> None:
    page = open_page(expected="400|503|Failed to load")
    body = json.dumps({"error": {"message": "queue: full, try later"}})
    page.route("**/v1/chat/completions", lambda route: route.fulfill(status=503, body=body))
    ask(page, "hello")
    wait(page)
    expect(page.get_by_role("alert")).to_have_text("queue: full, try later")
    page.unroute("**/v1/chat/completions")
    script = Script().draft(0, 1, ["half"])
    script.frames.append({"error": {"message": "the engine stopped"}})
    script.play(page)
    page.get_by_role("button", name="Retry").click()
    expect(page.get_by_role("alert")).to_have_text("the engine stopped")
    assert text_of(page) == "half"


def test_a_reply_that_breaks_off_is_not_taken_for_a_whole_one(
    open_page: Callable[..., Any],
) -> None:
    page = open_page()
    Script().draft(0, 1, ["half"]).settle(0, ["half"]).delta(content="half").play(page, end="")
    ask(page, "hello")
    wait(page)
    expect(page.get_by_role("alert")).to_have_text("The reply broke off.")
    assert text_of(page) == "half"


def test_what_else_is_in_the_storage_does_no_harm(open_page: Callable[..., Any]) -> None:
    page = open_page()
    for text in ("{}", "3", '"turns"', "null", "["):
        # What the page itself keeps as it goes would be written over it.
        page.add_init_script(f"localStorage.setItem('sfumato.conversation', {text!r})")
        page.reload()
        expect(page.locator(".example").first).to_be_visible()


def test_a_replay_makes_room_once(open_page: Callable[..., Any]) -> None:
    page = open_page()
    script = Script()
    for canvas in range(3):
        for step in range(1, 5):
            script.draft(canvas, step, [f"{canvas}{step} "] * 8)
        script.settle(canvas, [f"{canvas} "] * 8).delta(content=f"{canvas} " * 8)
    script.end().play(page)
    ask(page, "hello")
    wait(page)
    page.evaluate("""async () => {
      const { CanvasView } = await import('/canvas_view.js');
      const rowsFor = CanvasView.prototype.rowsFor;
      window.laid = 0;
      CanvasView.prototype.rowsFor = function (tokens) {
        window.laid++;
        return rowsFor.call(this, tokens);
      };
    }""")
    slider = page.locator("input[type=range]")
    slider.focus()
    slider.press("Home")
    once = page.evaluate("window.laid")
    assert once == 2 * 12
    for _ in range(5):
        slider.press("ArrowRight")
    assert page.evaluate("window.laid") == once
    page.set_viewport_size({"width": 500, "height": 800})
    expect(page.locator(".where")).to_have_text("canvas 2, step 2")
    page.wait_for_timeout(100)
    slider.press("ArrowRight")
    assert page.evaluate("window.laid") == 2 * once  # other widths, other rooms
    slider.press("End")
    slider.blur()
    slider.press("Home")
    assert page.evaluate("window.laid") == 3 * once


def test_the_likeliest_outlive_a_reload(open_page: Callable[..., Any]) -> None:
    page = open_page()
    tokens = ["a", "b", "c"]
    script = Script().draft(0, 1, tokens, few=4).settle(0, tokens).delta(content="abc").end()
    script.play(page)
    seen = []
    for _ in range(2):
        if not page.locator(".reply").count():
            ask(page, "hello")
            wait(page)
        page.locator(".token").nth(1).click()
        few = page.locator("#inspector .few li")
        expect(few).to_have_count(4)
        expect(page.locator("#inspector .few li.settled .mono")).to_have_text("b")
        seen.append([few.nth(k).locator(".number").inner_text() for k in range(4)])
        page.reload()
        page.wait_for_selector(".reply")
    assert seen[0] == seen[1] == ["50 %", "25 %", "17 %", "13 %"]


def test_a_name_is_asked_for_once(open_page: Callable[..., Any]) -> None:
    page = open_page(expected="Failed to load")
    asked: list[str] = []
    page.on("request", lambda r: asked.append(r.url) if "detokenize" in r.url else None)
    names = """async () => {
      const { nameOf } = await import('/api.js');
      return Promise.all([60, 60, 60].map((id) => nameOf(id).catch(() => null)));
    }"""
    page.route("**/detokenize", lambda route: route.fulfill(status=503, body="{}"))
    assert page.evaluate(names) == [None] * 3
    page.unroute("**/detokenize")
    first = page.evaluate(names)
    assert first[0] and first == page.evaluate(names)
    assert len(asked) == 2


def test_what_is_not_shown_is_not_measured(open_page: Callable[..., Any]) -> None:
    page = open_page()
    assert page.evaluate("""async () => {
      const { CanvasView } = await import('/canvas_view.js');
      const view = new CanvasView(() => {});
      let probes = 0;
      new MutationObserver((changes) => {
        const added = changes.flatMap((change) => [...change.addedNodes]);
        probes += added.filter((node) => node.className === 'probe').length;
      }).observe(view.element, { childList: true });
      const draw = async () => {
        for (const text of 'abc') view.draw([{ key: '0.0', text, style: '' }]);
        await new Promise((resolve) => setTimeout(resolve));
        return probes;
      };
      const hidden = await draw();
      document.body.append(view.element);
      return [hidden, await draw() > 0];
    }""") == [0, True]


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


def test_a_key_opens_the_page_and_is_sent(
    open_page: Callable[..., Any], serve: Callable[..., Any], slow: Model
) -> None:
    at = f"{serve(slow, ServerSettings(api_key='open sesame'), slots=1, context=512).url}/"
    password = {"username": "", "password": "open sesame"}
    page = open_page(at=at, http_credentials=password)
    ask(page, SUDOKU)
    wait(page)
    assert text_of(page) == SOLUTION
    sent: list[str] = []
    page.on("request", lambda request: sent.append(request.headers.get("authorization", "")))
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("API key").fill("open sesame")
    page.get_by_label("Close the settings").click()
    ask(page, SUDOKU)
    wait(page)
    assert sent[-1] == "Bearer open sesame"
    assert "sesame" not in page.evaluate("JSON.stringify(localStorage)")


def test_an_old_reply_loses_its_drafts_before_anything_is_lost(
    open_page: Callable[..., Any],
) -> None:
    page = open_page()
    kept = page.evaluate("""async () => {
      const store = await import('/store.js');
      const top = Array.from({ length: 20000 }, (_, i) => [[i, 0.5], [i + 1, 0.25]]);
      const draft = { step: 1, ids: [1], tokens: ['a'], entropy: [0], accepted: [1], top };
      const turns = Array.from({ length: 40 }, (_, i) => ({
        role: 'assistant', content: `reply ${i}`, canvases: [{ maxSteps: 1, drafts: [draft] }],
      }));
      store.saveTurns(turns);
      const left = store.loadTurns();
      return left.map((turn) => [turn.content, turn.canvases[0]?.drafts[0].top.length]);
    }""")
    assert [content for content, _ in kept] == [f"reply {i}" for i in range(40)]
    assert kept[-1][1] == 20000 and kept[0][1] == 0


def test_lines_are_broken_between_words_and_stay_broken(open_page: Callable[..., Any]) -> None:
    page = open_page()
    lines = """async ([pieces, columns, breaks]) => {
      const { wrap } = await import('/wrap.js');
      const { lines, breaks: found } = wrap(pieces, columns, breaks && new Set(breaks));
      return [lines.map((line) => line.map((part) => part.text).join('')), [...found]];
    }"""
    pieces = ["one", " two", " three", " four", "\n", "five"]
    fresh, breaks = page.evaluate(lines, [pieces, 10, None])
    assert fresh == ["one two", "three four", "five"] or fresh == [
        "one two",
        "three",
        "four",
        "five",
    ]
    shorter = ["one", " t", *pieces[2:]]
    held, _ = page.evaluate(lines, [shorter, 10, breaks])
    assert held[1].startswith("three")
    wide, _ = page.evaluate(lines, [["日本語の文字"], 8, None])
    assert wide == ["日本語の", "文字"]
