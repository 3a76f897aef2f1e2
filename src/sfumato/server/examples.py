"""Examples for the page: prompts, decisions, fills, JSON and edits; and what is said of the
embedded model.

The texts are in page/examples.json, for the embedded model and for others. The embedded model's are
of its tasks: boards of held-out grids with one solution, the states and questions that its training
makes. Knows which texts the embedded model was trained on, and no page.
"""

from __future__ import annotations

import json
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sfumato.api import Reply
from sfumato.embedded_questions import all_questions
from sfumato.text_side import edit_message

_FILE = Path(__file__).parent / "page" / "examples.json"
_READ = re.compile(r"[0-9]|[1-4.]{4}(\n[1-4.]{4}){3}")
CANNOT = "this demonstration model cannot answer that"


@cache
def _texts() -> dict[str, dict[str, Any]]:
    texts: dict[str, dict[str, Any]] = json.loads(_FILE.read_text("utf-8"))
    return texts


def page_texts(embedded: bool) -> dict[str, Any]:
    """`demonstration`: what the embedded model can do, None for other models; `examples`: titles
    and messages; `decisions`: a note of what the embedded model can decide, and titles with a state
    and questions in System One's form; `modes`: the same of `fill`, `json` and `edit`. json is None
    where the package that reads grammars is missing. `prompt` of edit is what the model is asked,
    with {instruction} and {text} in it."""
    texts = _texts()["embedded" if embedded else "others"]
    prompt = edit_message("{text}", "{instruction}")["content"]
    modes = texts["modes"] | {"edit": {"prompt": prompt} | texts["modes"]["edit"]}
    return texts | {"modes": modes if find_spec("llguidance") else modes | {"json": None}}


def warnings(embedded: bool, reply: Reply) -> list[str]:
    """The reply's warnings, and one where the embedded model could not answer."""
    cannot = embedded and reply.filled is None and not is_answered(reply)
    return [*reply.warnings, *([CANNOT] if cannot else [])]


def is_answered(reply: Reply) -> bool:
    """Whether a reply of the embedded model is one that the model was trained to write: four rows
    of a Sudoku, a digit, a JSON object, or one of its answers, or a part of one where the reply
    begins or ends inside it.
    A canvas of anything else may settle too, and its entropy is as low as that of a right answer.
    A canvas that ran out of steps is no answer: more steps would not help."""
    if "step_cap" in reply.stats.convergence:
        return False
    text = reply.text
    if reply.stop_reason != "eos":
        return any(text in answer for answer in _answers()) or not set(text) - set("1234\n")
    if _READ.fullmatch(text):
        return True
    return _is_object(text) or (bool(text) and any(answer.endswith(text) for answer in _answers()))


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


@cache
def _answers() -> frozenset[str]:
    return frozenset(question.answer for question in all_questions())


def remark(embedded: bool, reply: Reply) -> str:
    """The line below a reply, as on the page (page/footer.js); empty where there is none."""
    lines = warnings(embedded, reply)
    return f"{CANNOT.capitalize()}." if CANNOT in lines else " ".join(lines)
