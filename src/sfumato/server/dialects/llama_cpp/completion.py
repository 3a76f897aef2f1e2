"""llama-server's completion: POST /completion."""

from __future__ import annotations

from dataclasses import replace

from sfumato.engine import Request, new_id
from sfumato.refused import Refused
from sfumato.server.dialects.llama_cpp.renderer import LlamaRenderer
from sfumato.server.dialects.llama_cpp.sampling import llama_fields, writing_s
from sfumato.server.dialects.llama_cpp.slot import COMPLETION, check_slot
from sfumato.server.dialects.shared.encoded_only import encoded_only
from sfumato.server.dialects.shared.grammars import grammar_of
from sfumato.server.dialects.shared.mixed_prompts import prompts_in
from sfumato.server.dialects.shared.sampling import check_size
from sfumato.server.http.dialect import Dialect
from sfumato.server.schemas.llama_cpp import LlamaBody
from sfumato.server.service import Service

PATH = "/completion"


def parse(service: Service, body: LlamaBody) -> list[Request]:
    """One request for each prompt, all of one seed. Raises Refused."""
    prompts, _ = prompts_in(body.prompt, "prompt", service.settings.max_choices)
    limit = body.max_tokens if body.n_predict is None else body.n_predict
    fields = llama_fields(service, body, PATH, body.n_probs)
    fields["grammar"] = grammar_of(body)
    requests = []
    for prompt in prompts:
        ids = service.raw_prompt(prompt, PATH)
        if not ids:
            raise Refused("prompt", "is empty")
        check_slot(service, len(ids), COMPLETION, "prompt")
        made = service.prompt(Request(ids=ids, endpoint=PATH))
        one = Request(ids=ids, made=made, id=new_id(), **fields)
        if limit == 0:
            requests.append(encoded_only(one))
            continue
        most = service.limit(limit, len(ids), body.canvas_length)
        requests.append(replace(one, max_tokens=most))
    check_size(
        service.model,
        (request.max_tokens for request in requests),
        body.n_probs,
        "prompt, n_predict, n_probs",
    )
    return requests


LLAMA_COMPLETION = Dialect(
    name="completion",
    path=PATH,
    tag="llama-server",
    help="A completion as llama-server has it.",
    body_type=LlamaBody,
    parse=parse,
    renderer=LlamaRenderer,
    streams=lambda body: bool(body.stream),
    writing_s=writing_s,
)
