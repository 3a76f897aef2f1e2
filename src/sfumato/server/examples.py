"""Examples for the page: prompts, decisions, fills, JSON and edits; and what is said of the
models in the package.

The texts are in page/examples.json, for each model in the package and for others. Those of the
package's are of their tasks: boards of held-out grids with one solution, the states and questions
that training makes. Knows which texts these models were trained on, and no page.
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


def page_texts(packaged: str | None, has_masks: bool = False) -> dict[str, Any]:
    """`demonstration`: what the model can do, None for models that the package has not;
    `examples`: titles and messages; `decisions`: a note of what the model can decide, and titles
    with a state and questions in System One's form; `modes`: the same of `fill`, `json` and `edit`.
    None stands for what the model has not learnt; also for json where the package that reads
    grammars is missing, and for edit of a model with masks, which changes no token that is there.
    `prompt` of edit is what the model is asked, with {instruction} and {text} in it.

    packaged: the model's name in the package; None: another model."""
    texts = _texts()[packaged or "others"]
    modes: dict[str, Any] = dict(texts["modes"])
    if has_masks:
        modes["edit"] = None
    if modes["edit"]:
        prompt = edit_message("{text}", "{instruction}")["content"]
        modes["edit"] = {"prompt": prompt} | modes["edit"]
    if not find_spec("llguidance"):
        modes["json"] = None
    return texts | {"modes": modes}


def warnings(embedded: bool, reply: Reply) -> list[str]:
    """The reply's warnings, and one where the embedded model could not answer."""
    cannot = embedded and reply.filled is None and not is_answered(reply)
    return [*reply.warnings, *([CANNOT] if cannot else [])]


def is_answered(reply: Reply) -> bool:
    """Whether a reply of a packaged model is one that the model was trained to write: four rows
    of a Sudoku, a digit, a JSON object, or one of its answers, or a part of one where the reply
    begins or ends inside it. A reply that a schema or a grammar holds is what that asks for, and is
    never judged.
    A canvas of anything else may settle too, and its entropy is as low as that of a right answer.
    A canvas that ran out of steps is no answer: more steps would not help."""
    if reply.stats.constraint is not None:
        return True
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
