"""The README's picture of the web page: replies of the embedded model, one of them in its replay.

    .venv/bin/python -m benchmarks.page_picture [docs/page.png]

Needs playwright and a Chromium, as the page's tests do.
"""

from __future__ import annotations

import argparse
import io
import sys
from pathlib import Path

from benchmarks.screenshots import SUDOKU, ask, chromium, serving
from PIL import Image

SIZE = {"width": 1040, "height": 820}
MOST_BYTES = 300_000
SEEDS = "let drawn = 2; crypto.getRandomValues = (into) => { into[0] = ++drawn; return into; };"


def taken() -> bytes:
    """A PNG of the page."""
    with serving() as url, chromium() as browser:
        page = browser.new_context(viewport=SIZE, color_scheme="dark").new_page()
        page.add_init_script(SEEDS)
        page.goto(url)
        page.wait_for_selector(".example")
        page.get_by_label("Dismiss this note").click()
        ask(page, "How do you work?")
        ask(page, SUDOKU)
        slider = page.locator(".reply input[type=range]").last
        slider.press("Home")
        slider.press("ArrowRight")
        page.evaluate("document.activeElement.blur(); scrollTo(0, document.body.scrollHeight)")
        page.wait_for_timeout(1500)  # colours fade
        picture: bytes = page.screenshot()
    return picture


def main() -> int:
    parser = argparse.ArgumentParser(description="The README's picture of the web page.")
    parser.add_argument("path", nargs="?", type=Path, default=Path("docs/page.png"))
    path: Path = parser.parse_args().path
    with Image.open(io.BytesIO(taken())) as picture:
        picture.convert("RGB").quantize(256).save(path, optimize=True)
    size = path.stat().st_size
    print(f"{path}: {size:,} bytes")
    return 0 if size <= MOST_BYTES else 1


if __name__ == "__main__":
    sys.exit(main())
