"""A reply's replay as one HTML file that plays without a server and without a network.

The file is page/replay.html with the page's own styles and modules in it, and the replay as JSON.
The page exports with the same template (page/share.js). Knows events and files, and no HTTP.
"""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from PIL import Image

from sfumato.api import Draft, Settled
from sfumato.media.picture import Source, read_picture
from sfumato.text.markers import ChatMarkers

PAGE = Path(__file__).parent / "page"
STYLES = ("style.css", "reply.css")
# Each after those that it imports.
SCRIPTS = (
    *("dom.js", "tokens.js", "wrap.js", "trace.js", "reading.js", "board.js"),
    *("question.js", "canvas_view.js", "scrubber.js", "player.js"),
)
SLOT = '"REPLAY"'

MOST_POSITIONS = 400_000
"""Positions of all drafts together at most, which is a file of some megabytes. Above it, steps are
left out."""

THUMBNAIL = 320  # pixels of the longer side at most, as page/pictures.js has it

_IMPORT = re.compile(r"^import\s[^;]*;\n", re.MULTILINE)
_EXPORT = re.compile(r"^export (?=const|class|function|async)", re.MULTILINE)


@cache
def template() -> str:
    """The page with `SLOT` in the place of its data. Its modules become one script."""
    styles = "\n".join((PAGE / name).read_text("utf-8") for name in STYLES)
    scripts = "\n".join((PAGE / name).read_text("utf-8") for name in SCRIPTS)
    scripts = _EXPORT.sub("", _IMPORT.sub("", scripts))
    page = (PAGE / "replay.html").read_text("utf-8")
    return page.replace("/* STYLES */", styles).replace("/* SCRIPTS */", scripts)


def document(data: dict[str, Any]) -> str:
    """The page with a replay in it: what `Recorder.data` returns. No `<` is left in the data, so
    that no text can end its element."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    return template().replace(SLOT, text)


def thumbnail(source: Source, name: str = "picture") -> dict[str, str]:
    """A picture as replays show it: its name, and a JPEG as a data URL. Raises Refused."""
    picture, stream = read_picture(source), io.BytesIO()
    picture.thumbnail((THUMBNAIL, THUMBNAIL), Image.Resampling.LANCZOS)
    picture.save(stream, "JPEG", quality=85)
    data = base64.b64encode(stream.getvalue()).decode()
    return {"name": name, "thumb": f"data:image/jpeg;base64,{data}"}


class Recorder:
    """Collects one reply's events. Tokens are kept as numbers into a list of their texts."""

    def __init__(self, token_text: Callable[[int], str], markers: ChatMarkers) -> None:
        self._token_text, self._markers = token_text, markers
        self._numbers: dict[str, int] = {}
        self._canvases: list[dict[str, Any]] = []

    def draft(self, draft: Draft) -> None:
        """Adds a step. A step that comes again means that the canvas is drawn again."""
        while len(self._canvases) <= draft.canvas:
            self._canvases.append({"max_steps": 0, "noise": None, "drafts": [], "settled": None})
        canvas = self._canvases[draft.canvas]
        if canvas["drafts"] and draft.step <= canvas["drafts"][-1]["step"]:
            canvas["drafts"] = []
        canvas["max_steps"] = draft.max_steps
        if draft.noise is not None:
            canvas["noise"] = self._pack(draft.noise.tolist())
        canvas["drafts"].append(
            {
                "step": draft.step,
                "tokens": self._pack(draft.token_ids.tolist()),
                "entropy": [round(nats, 2) for nats in draft.entropy.tolist()],
                "accepted": "".join("01"[flag] for flag in draft.accepted.tolist()),
            }
        )

    def settled(self, settled: Settled) -> None:
        """Adds the tokens of a settled canvas."""
        if settled.canvas < len(self._canvases):
            canvas = self._canvases[settled.canvas]
            canvas["settled"] = self._pack(settled.token_ids)
            if (read := settled.verification) is not None:
                canvas["doubted"] = [at for run in read.doubted_runs for at in run]
        self._thin()

    def data(
        self,
        model: str,
        question: str,
        text: str,
        summary: Sequence[str],
        demonstration: str = "",
        remark: str = "",
        pictures: Sequence[dict[str, str]] = (),
    ) -> dict[str, Any]:
        """The replay in the form of the page's share.js. demonstration: the note about a
        demonstration model; remark: the line below the reply; pictures: thumbnails of the
        question's."""
        self._thin()
        return {
            "version": 1,
            "model": model,
            "question": question,
            "pictures": list(pictures),
            "text": text,
            "summary": list(summary),
            "demonstration": demonstration,
            "remark": remark,
            "markers": asdict(self._markers),
            "texts": list(self._numbers),
            "canvases": self._canvases,
        }

    def _pack(self, ids: Sequence[int]) -> list[int]:
        texts = (self._token_text(token) for token in ids)
        return [self._numbers.setdefault(text, len(self._numbers)) for text in texts]

    def _thin(self) -> None:
        """Drops every second draft until all fit MOST_POSITIONS; the last of a canvas stays."""
        while self._positions() > MOST_POSITIONS:
            if all(len(canvas["drafts"]) < 2 for canvas in self._canvases):
                return
            for canvas in self._canvases:
                canvas["drafts"] = canvas["drafts"][::-1][::2][::-1]

    def _positions(self) -> int:
        return sum(len(draft["tokens"]) for c in self._canvases for draft in c["drafts"])
