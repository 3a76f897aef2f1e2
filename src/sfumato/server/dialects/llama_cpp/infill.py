"""llama-server's infill: POST /infill. Editors send it while their user types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sfumato.engine import Request
from sfumato.refused import Refused
from sfumato.server.dialects.llama_cpp.renderer import LlamaRenderer
from sfumato.server.dialects.llama_cpp.sampling import llama_fields, writing_s
from sfumato.server.dialects.shared.encoded_only import encoded_only
from sfumato.server.dialects.shared.grammars import grammar_of
from sfumato.server.dialects.shared.insertion import insertion
from sfumato.server.http.dialect import Dialect
from sfumato.server.schemas.fill import InfillBody
from sfumato.server.service import Service

PATH = "/infill"


def parse(service: Service, body: InfillBody) -> list[Request]:
    """Raises Refused."""
    extra = [_extra(part, f"input_extra[{i}]") for i, part in enumerate(body.input_extra or ())]
    text = "".join(extra) + body.input_prefix + (body.prompt or "")
    ids = service.raw_prompt(text, PATH, special=False)
    if not ids:
        raise Refused("input_prefix", "is empty, and this model has no token to begin with")
    fields = llama_fields(service, body, PATH)
    if body.n_predict == 0:
        return [encoded_only(Request(ids=ids, **fields))]
    if body.input_suffix:
        suffix = body.input_suffix
        fields |= insertion(service, body, suffix, body.n_predict, "input_suffix", PATH)
    else:  # nothing follows: the text goes on until it ends
        fields["grammar"] = grammar_of(body)
        fields["max_tokens"] = service.limit(body.n_predict, len(ids), body.canvas_length)
    return [Request(ids=ids, **fields)]


def _extra(part: Mapping[str, Any], where: str) -> str:
    """A text of another file, after its name."""
    text, name = part.get("text"), part.get("filename") or ""
    if not isinstance(text, str):
        raise Refused(f"{where}.text", "must be text")
    if not isinstance(name, str):
        raise Refused(f"{where}.filename", "must be text")
    return f"--- {name or 'snippet'} ---\n{text}\n"


INFILL = Dialect(
    name="infill",
    path=PATH,
    tag="llama-server",
    help="Text between a prefix and a suffix, as llama-server has it.",
    body_type=InfillBody,
    parse=parse,
    renderer=LlamaRenderer,
    streams=lambda body: bool(body.stream),
    writing_s=writing_s,
)
