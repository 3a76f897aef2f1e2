"""What has settled: Markdown drawn, boards, what a demonstration model cannot do, heat maps."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.server.page.browsing import Script, ask, canvas_of, expect, says, text_of, wait

import sfumato
from sfumato.server.examples import CANNOT

VENDOR = Path(sfumato.__file__).parent / "server" / "page" / "vendor"

MARKDOWN = """# Tea

**Hot**, see [here](https://example.org/a), [there](javascript:alert(1)) \
and ![a cup](https://example.org/cup.png).

| Drink | mg |
|---|---:|
| Tea | 40 |

```html
<b>bold</b>
```

<img src=x onerror=alert(1)> <style>*{display:none}</style>"""


def tokens_of(text: str) -> list[str]:
    return re.findall(r"\s?\S+|\s", text)


def reply(page: Any, drafts: list[list[str]]) -> None:
    """Asks for a reply whose last draft settles."""
    script = Script()
    for step, tokens in enumerate(drafts, start=1):
        script.draft(0, step, tokens)
    script.settle(0, tokens).delta(content="".join(tokens)).end().play(page)
    ask(page, "what?")
    wait(page)


def test_canvases_that_have_settled_are_drawn_while_the_next_one_forms(
    open_page: Callable[..., Any],
) -> None:
    page = open_page()
    drawn = page.evaluate("""async () => {
      const { ReplyView } = await import('/message.js');
      const record = { role: 'assistant', content: '', thought: '', canvases: [] };
      const view = new ReplyView(record, { question: 'x', pace: () => 0 });
      document.getElementById('turns').append(view.element);
      const frame = (canvas, tokens, step = 1) => ({ canvas, step, max_steps: 4, tokens,
        token_ids: tokens.map((_, i) => i), entropy: tokens.map(() => 1),
        accepted: tokens.map(() => true), top: [] });
      const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
      const heights = [];
      const look = () => {
        heights.push(view.element.offsetHeight);
        return ['.markdown', '.bubble > .canvas'].map((part) =>
          view.element.querySelector(part).innerText.trim());
      };
      view.begin(false);
      view.draft(frame(0, ['**one**', '\\n\\n\\n\\n']));
      await pause(60);
      const before = look();
      view.settle(frame(0, ['**one**', '\\n\\n\\n\\n']));
      record.content = '**one**\\n\\n\\n\\n';
      view.speak(record.content);
      view.draft(frame(1, ['two']));
      let after = look();
      for (let tries = 0; tries < 200 && after[0] === ''; tries++) {
        await pause(50);
        after = look();
      }
      return [before, after, heights.at(-1) >= heights[0]];
    }""")
    before, after, holds = drawn
    assert before == ["", "**one**"]
    assert after == ["one", "two"] and holds


def test_prose_formulas_code_and_markdown_are_drawn_and_columns_stay_on_the_canvas(
    open_page: Callable[..., Any],
) -> None:
    page = open_page()
    drawn = """text => import('/markdown.js').then((m) => {
      const made = m.render(text);
      if (made === null) return null;
      const box = document.createElement('div');
      box.append(made);
      return box.innerHTML;
    })"""
    for text, html in (
        ("I am a model.\nYes.", "<p>I am a model.<br>Yes.</p>"),
        ("a * b, 2_000_000, $5 and $6", "<p>a * b, 2_000_000, $5 and $6</p>"),
        ("<b>x</b>", "<p>&lt;b&gt;x&lt;/b&gt;</p>"),
    ):
        assert page.evaluate(drawn, text).strip() == html, text
    for text in (
        *(">" * 20_000, "- " * 9_000 + "a", "a " * 40_000 + "**b**"),  # too deep, too long
        *("123\n.1.\n2..", '{"a": 1}', "def f():\n  return 1", "a  b\nc  d", ""),  # columns
    ):
        assert page.evaluate(drawn, text) is None, text[:9]
    reply(page, [["I ", "am."]])
    prose = page.locator(".reply .markdown p")
    face = "e => getComputedStyle(e).fontFamily"
    assert "mono" not in prose.evaluate(face).lower()
    canvas_of(page).locator(".token").first.wait_for()
    assert "mono" in page.locator(".reply .bubble > .canvas").evaluate(face).lower()
    formulas_and_code_are_drawn_and_copied(page)
    markdown_is_drawn_once_it_has_settled(page)


def formulas_and_code_are_drawn_and_copied(page: Any) -> None:
    text = (
        "So $x^2 < y_1$, \\(a\\) and\n\n$$\n\\frac{1}{2}\n- b\n$$\n\nnot `$c$`, $5 or $6.\n\n"
        "$\\href{javascript:alert(1)}{x}$ $\\undefined{$ $\\def\\a{\\a\\a}\\a$ "
        "$\\label{prompt}\\class{skip}{y}$\n\n"
        "```python\ndef f(x):  # <b>why</b>\n    return 'a' + str(1)\n```\n\n"
        '```"><img/src=x>\n<script>alert(2)</script>\n```'
    )
    reply(page, [[text]])
    prose = page.locator(".reply").last.locator(".markdown")
    expect(prose.locator("math")).to_have_count(3)
    expect(prose.locator("math msup")).to_have_text("x2")
    expect(prose.locator(".formula math mfrac")).to_have_count(1)
    # What is no formula, or more than the bounds allow, stays as it was written.
    kept = prose.locator("code.math").all_inner_texts()
    assert len(kept) == 4 and all(tex.startswith("\\") for tex in kept), kept
    expect(prose).to_contain_text("$5 or $6")
    assert prose.locator("img, script, b, [id], [href], [onclick]").count() == 0
    code = prose.locator(".code").first
    expect(code.locator(".code-head")).to_contain_text("python")
    expect(code.locator(".code-word")).to_have_text(["def", "return", "str"])
    expect(code.locator(".code-string")).to_have_text("'a'")
    expect(code.locator(".code-comment")).to_have_text("# <b>why</b>")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    code.get_by_role("button", name="Copy code").click()
    expect(code.get_by_role("button", name="Copied")).to_be_visible()
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied.strip() == "def f(x):  # <b>why</b>\n    return 'a' + str(1)"


def markdown_is_drawn_once_it_has_settled(page: Any) -> None:
    tokens = tokens_of(MARKDOWN)
    reply(page, [tokens[::-1], tokens])
    last = page.locator(".reply").last
    drawn, canvas = last.locator(".markdown"), last.locator(".bubble > .canvas")
    expect(drawn).to_be_visible()
    expect(canvas).to_be_hidden()
    expect(drawn.locator("h4")).to_have_text("Tea")
    expect(drawn.locator("strong")).to_have_text("Hot")
    expect(drawn.locator("td").last).to_have_text("40")
    expect(drawn.locator("td").last).to_have_css("text-align", "right")
    expect(drawn.locator("pre code")).to_have_text("<b>bold</b>\n")
    assert drawn.locator("img, style, script, [onerror], [style]").count() == 0
    expect(drawn).to_contain_text("<img src=x onerror=alert(1)>")
    expect(drawn).to_contain_text("image: a cup")
    links = drawn.locator("a[href]").evaluate_all("links => links.map(a => [a.href, a.rel])")
    assert [href for href, _ in links] == ["https://example.org/a", "https://example.org/cup.png"]
    assert all("noopener" in rel for _, rel in links)
    last.get_by_role("button", name="Canvas", exact=True).click()
    expect(canvas).to_be_visible()
    expect(drawn).to_be_hidden()
    assert "**Hot**" in text_of(page)
    last.get_by_role("button", name="Text", exact=True).click()
    expect(drawn).to_be_visible()
    page.keyboard.press("Escape")
    page.focus("#prompt")
    page.keyboard.press("ArrowLeft")  # a replay is of the canvas
    expect(canvas).to_be_visible()
    expect(drawn).to_be_hidden()
    page.keyboard.press("ArrowRight")
    expect(drawn).to_be_visible()
    page.reload()
    expect(drawn.locator("strong")).to_have_text("Hot")


def test_heat_maps_name_their_canvas_and_mark_the_end(open_page: Callable[..., Any]) -> None:
    page = open_page()
    first, second = ["one ", "two ", "three "], ["four", "<eos>", "<pad>"]
    script = Script().draft(0, 1, first).settle(0, first).delta(content="one two three ")
    script.draft(1, 1, second).draft(1, 2, second).settle(1, ["four"]).delta(content="four")
    script.end().play(page)
    page.evaluate("""() => {
      window.written = [];
      const fillText = CanvasRenderingContext2D.prototype.fillText;
      CanvasRenderingContext2D.prototype.fillText = function (text, ...at) {
        window.written.push(text); return fillText.call(this, text, ...at);
      };
    }""")
    ask(page, "count")
    wait(page)
    page.get_by_role("button", name="Heat maps").click()
    title, end = page.locator(".maps h4"), page.locator(".maps > .dim").first
    expect(title).to_have_text("Canvas 2 of 2")
    expect(end).to_contain_text("what follows position 1 was not kept")
    assert {"four", "·"} <= set(page.evaluate("window.written"))
    page.get_by_label("Canvas before").click()
    expect(title).to_have_text("Canvas 1 of 2")
    expect(end).to_be_hidden()
    assert "three␣" in page.evaluate("window.written")
    page.locator(".heat canvas").first.click(position={"x": 4, "y": 4})
    expect(page.locator("#inspector")).to_contain_text("canvas 1 · position 1 · step 1")
    page.locator(".reply input[type=range]").press("End")
    page.locator(".reply .token", has_text="four").click()
    expect(title).to_have_text("Canvas 2 of 2")


def test_vendored_files_are_those_that_are_named() -> None:
    table = (VENDOR / "README.md").read_text("utf-8")
    patterns = {"marked": r"marked v", "dompurify": r"DOMPurify ", "temml": r'version:"'}
    for name, begin in patterns.items():
        match = re.search(rf"{begin}([\d.]+)", (VENDOR / f"{name}.js").read_text("utf-8"))
        assert match and f"`{name}` {match[1]}" in table
        assert (VENDOR / f"{name}.LICENSE.txt").stat().st_size > 1000


def test_what_a_server_says_of_its_model_and_its_format(open_page: Callable[..., Any]) -> None:
    """What a demonstration cannot do. The page knows no chat format; what the server named last
    also serves a reload without it."""
    page = open_page(expected="ERR_FAILED")
    badge = page.locator("#demonstration")
    expect(badge).to_contain_text("4x4 Sudoku")
    tokens = ["x", "y"]
    script = Script().draft(0, 1, tokens).settle(0, tokens, "step_cap").delta(content="xy")
    script.end(warnings=["canvas 0: raise the steps", CANNOT]).play(page)
    ask(page, "what is love?")
    wait(page)
    note = page.locator(".reply .note:visible")
    expect(note).to_contain_text("This demonstration model cannot answer that. Ask a")
    expect(badge).to_be_visible()
    markers = {"tokens": ["[think]", "[/think]", "[end]"], "ends": ["[end]"]}
    markers |= {"thought_open": "[think]", "thought_close": "[/think]", "thought_header": ""}
    says(page, "/props", {"model": "large", "markers": markers, "examples": []})
    page.reload()
    expect(note).to_contain_text("This demonstration model cannot answer that. Ask a")
    expect(page.locator("#model")).to_have_text("large")
    expect(badge).to_be_hidden()
    tokens = ["[think]", "hm", "[/think]", "yes", " <eos>", "[end]", "no"]
    script = Script().draft(0, 1, tokens).settle(0, tokens, "step_cap")
    script.delta(reasoning_content="hm").delta(content="yes <eos>")
    script.end(warnings=["canvas 0: raise the steps"]).play(page)
    page.get_by_role("button", name="Retry").click()
    wait(page)
    expect(note).to_have_text("canvas 0: raise the steps")
    assert text_of(page) == "yes <eos>"
    assert page.locator(".thought .canvas").text_content() == "hm"
    page.route("**/props", lambda route: route.abort())
    page.reload()
    page.wait_for_selector(".reply .markdown p")
    assert text_of(page) == "yes <eos>"


def test_what_a_second_reader_doubts_is_underlined(open_page: Callable[..., Any]) -> None:
    """On the canvas, which stays shown, and below it in words; after a reload too. The setting asks
    for it."""
    page = open_page()
    tokens = ["It", " is", " **Rome**", "."]
    script = Script().draft(0, 1, tokens).settle(0, tokens, doubted=[2])
    verification = {"agreement": 0.759, "doubts": [{"text": " **Rome**"}]}
    ended = {"delta": {}, "finish_reason": "stop", "verification": verification}
    script.delta(content="It is **Rome**.").frames.append({"choices": [ended]})
    script.play(page)
    ask(page, "where?")
    wait(page)
    for again in (False, True):
        if again:
            page.reload()
        doubted = page.locator(".reply .bubble > .canvas .doubted")
        expect(doubted).to_be_visible()
        expect(doubted).to_have_text(" **Rome**")
        expect(page.locator(".reply")).to_contain_text("It doubts “**Rome**”.")
        expect(page.locator(".reply")).to_contain_text("75 % of the tokens")
