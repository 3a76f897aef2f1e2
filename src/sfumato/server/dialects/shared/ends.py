"""What ends or binds a reply that may call tools: its grammar, and the end of its only call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sfumato.diffusion.constraints.grammar_source import GrammarSource
from sfumato.engine import ServedModel
from sfumato.options import exclusions
from sfumato.server.dialects.shared.grammars import call_grammar
from sfumato.server.dialects.shared.openai_tools import ToolUse
from sfumato.text.tokenizer import Marker

_BESIDE = ("stop", "canvas", "prediction")  # fields of a request, which may say what a reply holds


def reply_ends(
    use: ToolUse,
    model: ServedModel,
    is_single: bool,
    answer: GrammarSource | None,
    fields: Mapping[str, Any],
) -> dict[str, Any]:
    """The fields `grammar` and `stop` of a Request. is_single: whether one call is the most;
    answer: what a reply without calls has to match; fields: the request's others. Raises
    Refused."""
    close = model.template.markers.call_close
    beside = {name: fields.get(name) for name in _BESIDE}
    given = {**fields["sampler"].beside_grammar, **beside}
    may_hold = exclusions.refusal(exclusions.GRAMMAR, given) is None
    required = use.opening is not None
    grammar = call_grammar(use.tools, model, use.name, required, is_single, answer, may_hold)
    canvas = fields.get("canvas")
    stop, is_read = fields["stop"], canvas is not None and canvas.read_only
    if is_single and use.tools and grammar is None and close and not is_read:
        # A call that is cut at its end is complete, and the only one.
        stop = [*(stop or ()), Marker(close)]
    return {"grammar": grammar, "stop": stop}
