"""Routes around the tokenizer: llama-server's, and Anthropic's count of a prompt's tokens."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from sfumato.refused import Refused
from sfumato.server.chat.call import continuation
from sfumato.server.chat.objects import warned
from sfumato.server.dialects import openai_chat
from sfumato.server.dialects.anthropic import messages
from sfumato.server.dialects.anthropic.forms import CountBody
from sfumato.server.dialects.openai_chat import ChatBody, conversation
from sfumato.server.http.request_body import leaves_out
from sfumato.server.plain_routes import Post
from sfumato.server.schemas import json_schemas
from sfumato.server.schemas.body import Body, Ids, Ignored
from sfumato.server.schemas.generation import Continue, Messages, TemplateKwargs, Tools
from sfumato.server.service import Service
from sfumato.text.prompt import check_long_texts


class TokenizeBody(Body):
    """llama-server's, with a content, or vLLM's, with a prompt."""

    content: str | None = None
    prompt: str | None = Field(None, description="The same as content.")
    add_special: bool | None = Field(None, description="Put bos in front (false).")
    add_special_tokens: bool | None = Field(None, description="The same as add_special.")
    parse_special: bool | None = Field(None, description="Read markers as their tokens (true).")
    with_pieces: bool | None = Field(None, description="Answer objects with id and piece (false).")
    model: Ignored = None


class DetokenizeBody(Body):
    tokens: Annotated[Ids, WithJsonSchema(json_schemas.IDS)]
    model: Ignored = None


class TemplateBody(Body):
    messages: Messages = Field(min_length=1)
    tools: Tools = None
    chat_template_kwargs: TemplateKwargs | None = None
    add_generation_prompt: bool | None = Field(None, description="Open the model's turn (true).")
    continue_final_message: Continue = None


def _tokens(service: Service, body: TokenizeBody) -> dict[str, Any]:
    """Raises Refused."""
    tokenizer = service.model.tokenizer
    text = body.prompt if body.content is None else body.content
    field = "prompt" if body.content is None else "content"
    if text is None:
        raise Refused("content", "is missing", code="missing")
    if body.prompt is not None and body.prompt != text:
        raise Refused(("content", "prompt"), "differ", "send one")
    marked = body.parse_special is not False
    ids = service.encode(text, field, marked)
    if (body.add_special or body.add_special_tokens) and tokenizer.bos_id is not None:
        ids = [tokenizer.bos_id, *ids]
    fields: dict[str, Any] = {"tokens": ids, "count": len(ids), "max_model_len": service.context}
    if body.with_pieces:
        pieces = zip(ids, service.token_texts(ids), strict=True)
        fields["tokens"] = [{"id": token, "piece": piece} for token, piece in pieces]
    return fields | warned(body)


def _input_tokens(service: Service, body: ChatBody) -> dict[str, Any]:
    """Raises Refused."""
    (request, *_) = openai_chat.parse(service, body)
    assert request.made is not None
    return {"input_tokens": len(request.made.ids)} | warned(body)


def _text(service: Service, body: DetokenizeBody) -> dict[str, Any]:
    """Raises Refused."""
    ids = body.tokens
    most = service.model.config.context_length
    if len(ids) > most:
        raise Refused(
            "tokens",
            f"are {len(ids):,}, and this model's context has {most:,}",
            "send them in parts",
        )
    try:
        text = service.model.tokenizer.decode(ids, skip_special=False)
    except (ValueError, OverflowError) as error:
        raise Refused("tokens", str(error)) from None
    # The prompt is as vLLM has it.
    return {"content": text, "prompt": text} | warned(body)


def _prompt(service: Service, body: TemplateBody) -> dict[str, Any]:
    """Raises Refused."""
    ignored = leaves_out(body, service.settings)
    talk, continued = conversation(body.messages, service.settings, ignored), None
    opens_turn = body.add_generation_prompt
    if opens_turn is not False or body.continue_final_message:
        talk, continued = continuation(service, talk, body.continue_final_message, opens_turn)
    kwargs = body.chat_template_kwargs
    check_long_texts([talk, body.tools], lambda text: service.engine.check_length(text, "messages"))
    prompt = service.model.template.render(
        talk,
        thinking=bool(kwargs and kwargs.enable_thinking),
        tools=body.tools,
        add_generation_prompt=opens_turn is not False or continued is not None,
    )
    return {"prompt": prompt + (continued or "")} | warned(body)


ROUTES: tuple[Post[Any], ...] = (
    Post("/tokenize", "tokenize", "llama-server", "Text to token ids.", TokenizeBody, _tokens),
    Post("/detokenize", "detokenize", "llama-server", "Token ids to text.", DetokenizeBody, _text),
    Post(
        f"{openai_chat.PATH}/input_tokens",
        "input_tokens",
        "llama-server",
        "How many tokens the prompt of a chat has.",
        ChatBody,
        _input_tokens,
    ),
    Post(
        "/apply-template",
        "apply_template",
        "llama-server",
        "The prompt that messages become.",
        TemplateBody,
        _prompt,
    ),
)
COUNT_TOKENS = Post(
    messages.COUNT_PATH,
    "count_tokens",
    "Anthropic",
    "The tokens of a prompt, without a reply.",
    CountBody,
    messages.count,
    form=messages.MESSAGES.errors,
    wording=messages.MESSAGES.wording,
)
