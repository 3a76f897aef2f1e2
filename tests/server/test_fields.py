"""Every field of OpenAI's API stands in docs/api.md, and with what the server does with it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai.types import completion_create_params as text_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params as response_params
from tests.server.conftest import serving
from tests.support.answering_model import answering_model

from sfumato.server.dialects.openai_chat import ChatBody
from sfumato.server.dialects.openai_completions import CompletionBody
from sfumato.server.dialects.responses.body import ResponsesBody
from sfumato.server.schemas import Generation

DOCS = Path(__file__).parents[2] / "docs" / "api.md"
CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
ROW = re.compile(r"^\| `(\w+)` \| (honoured|refused|ignored) \|", re.MULTILINE)

USER = [{"role": "user", "content": "Who are you?"}]
BASE: dict[str, dict[str, Any]] = {
    CHAT: {"messages": USER, "seed": 1, "max_tokens": 12, "max_steps": 2},
    TEXT: {"prompt": "Who are you?", "seed": 1, "max_tokens": 12, "max_steps": 2},
    RESPONSES: {"input": "Who are you?", "seed": 1, "max_output_tokens": 12, "max_steps": 2},
}
"""What is asked of the embedded model; a prompt that is no chat would take it every step."""
COMPLETION = {"prompt": "Who?", "n_predict": 8, "max_steps": 2}
TOOLS = [{"type": "function", "function": {"name": "f"}}]
GOOD: dict[str, list[Any]] = {
    "messages": [USER],
    "model": ["any", None],
    "prompt": ["Hi", ["Hi"], [5, 6], [[5, 6]]],
    "max_tokens": [8],
    "max_completion_tokens": [12, None],
    "temperature": [0.7, 1, None],
    "top_p": [0.9, 1, 0, None],
    "seed": [7, -7, None],
    "stop": ["x", ["x", "y"], None],
    "n": [2, None],
    "stream": [False, True, None],
    "stream_options": [None],
    "logprobs": [None],
    "top_logprobs": [None],
    "logit_bias": [{"20": 5.0, "21": -100}, {}, None],
    "tools": [TOOLS, [], None],
    "tool_choice": ["none", "auto", None],
    "parallel_tool_calls": [True, False, None],
    "reasoning_effort": ["none", "low", "max", None],
    "user": ["ann", None],
    "suffix": ["x", "", None],
    "prediction": [
        {"type": "content", "content": "I am"},
        {"type": "content", "content": [{"type": "text", "text": "I am"}], "strength": 0.2},
        None,
    ],
    "echo": [False, None],  # True goes with no max_steps: see test_echo.py
    "response_format": [{"type": "text"}, {"type": "json_object"}, None],
}
"""Values of honoured fields that are accepted."""
GOOD_OF_RESPONSES: dict[str, list[Any]] = {
    "input": ["Hi", USER],
    "instructions": ["Be brief.", None],
    "max_output_tokens": [8, None],
    "tools": [[{"type": "function", "name": "f"}], [], None],
    "text": [{"format": {"type": "text"}, "verbosity": "medium"}, {}, None],
    "reasoning": [{"effort": "low", "summary": "auto"}, {"effort": None}, None],
    "include": [["message.output_text.logprobs", "file_search_call.results"], [], None],
    "top_logprobs": [2, 0, None],
    "truncation": ["auto", "disabled", None],
    "previous_response_id": [None],
    "store": [True, False, None],
    "metadata": [{"a": "b"}, {}, None],
}
"""The same of responses, where chat has none or others."""
NEUTRAL: dict[str, list[Any]] = {
    "frequency_penalty": [0, 0.0],
    "presence_penalty": [0],
    "modalities": [["text"]],
    "functions": [[]],
    "function_call": ["none", "auto"],
    "store": [False],
    "verbosity": ["medium"],
    "best_of": [1],
    "background": [False],
    "context_management": [[]],
}
"""Values of refused fields that ask for nothing; null always is one."""
ASKING: dict[str, Any] = {
    "frequency_penalty": 0.5,
    "presence_penalty": -1,
    "audio": {"voice": "alloy", "format": "wav"},
    "modalities": ["text", "audio"],
    "functions": [{"name": "f"}],
    "function_call": {"name": "f"},
    "store": True,
    "web_search_options": {},
    "moderation": {"model": "omni-moderation-latest"},
    "verbosity": "low",
    "best_of": 2,
    "metadata": {"a": "b"},
    "prompt_cache_key": "k",
    "prompt_cache_options": {"ttl": "24h"},
    "prompt_cache_retention": "24h",
    "safety_identifier": "x",
    "service_tier": "flex",
    "background": True,
    "conversation": "conv_1",
    "prompt": {"id": "pmpt_1"},
    "context_management": [{"type": "compaction"}],
    "max_tool_calls": 3,
    "image": {"context_compression": "auto"},
    "access_programs": {"cyber": "standard"},
    "background_options": {"completion_window": "soonest"},
}
"""Of refused and ignored fields: a value that asks for something."""


NOTHING = {"x": {"y": []}}  # a value that no field takes


HARMLESS: dict[str, list[Any]] = {
    "min_p": [0, 0.0],
    "repetition_penalty": [1, 1.0],
    "length_penalty": [1],
    "use_beam_search": [False],
    "skip_special_tokens": [True],
    "vllm_xargs": [{}],
    "logprob_token_ids": [[]],
    "return_tokens_as_token_ids": [False],
    "cache_prompt": [True, False],
    "timings_per_token": [True],
    "return_progress": [True],
    "best_of": [1],
    "stop": [""],
}
"""Values that clients send without a need for them."""


@pytest.fixture(scope="module")
def quick() -> Iterator[Any]:
    """A server whose model takes no time: for what is accepted, whatever the answer."""
    with serving(answering_model(), slots=4, context=512) as served:
        yield served


def uses_of(route: str) -> dict[str, str]:
    """Field → what becomes of it, as the docs' table of a route has it."""
    section = DOCS.read_text(encoding="utf-8").split(f"### POST {route}\n")[1].split("\n### ")[0]
    return dict(ROW.findall(section))


def official(route: str) -> set[str]:
    """The fields that the `openai` package knows."""
    module: Any = {CHAT: chat_params, TEXT: text_params, RESPONSES: response_params}[route]
    start = "ResponseCreateParams" if route == RESPONSES else "CompletionCreateParams"
    kinds = [getattr(module, f"{start}{end}") for end in ("NonStreaming", "Streaming")]
    return {name for kind in kinds for base in kind.__mro__[:1] for name in base.__annotations__}


def texts_of(answer: Any) -> list[Any]:
    """The texts of an answer."""
    body = answer.json()
    if "output" not in body:
        return [body["choices"]]
    return [part["text"] for item in body["output"] for part in item.get("content", ())]


def cases(kind: str) -> list[tuple[str, str]]:
    return [(route, name) for route in BASE for name, f in uses_of(route).items() if f == kind]


@pytest.mark.parametrize("route", list(BASE))
def test_every_field_is_in_the_table(route: str) -> None:
    assert official(route) == set(uses_of(route))


def test_every_field_of_our_own_is_in_the_docs() -> None:
    text = DOCS.read_text(encoding="utf-8").split("### Fields of our own")[1].split("\n## ")[0]
    own = (set(ChatBody.model_fields) | set(CompletionBody.model_fields)) - (
        official(CHAT) | official(TEXT)
    )
    assert own and {name for name in own if f"`{name}`" not in text} == set()
    assert own - set(Generation.model_fields) == {
        *("chat_template_kwargs", "add_generation_prompt", "continue_final_message")
    }


@pytest.mark.parametrize(
    "fields",
    [
        *({name: value} for name, values in HARMLESS.items() for value in values),
        {"stream": True, "stream_options": {"continuous_usage_stats": True}},
    ],
)
def test_harmless_fields_at_neutral_values(quick: Any, fields: dict[str, Any]) -> None:
    for route, base in (BASE | {"/completion": COMPLETION}).items():
        if route in ("/completion", RESPONSES) and fields.keys() & {"stream_options", "max_tokens"}:
            continue
        answer = quick.post(route, **base | fields)
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("name", ["min_p", "repetition_penalty", "use_beam_search", "best_of"])
def test_harmless_fields_that_ask_for_something(quick: Any, name: str) -> None:
    for route, base in BASE.items():
        error = quick.post(route, **base | {name: 5}).json()["error"]
        assert (error["param"], error["code"]) == (name, "unsupported")


def test_what_fits_may_be_asked_for(server: Any) -> None:
    for route, base in ((CHAT, BASE[CHAT]), (TEXT, BASE[TEXT])):
        del (body := dict(base))["max_tokens"]
        choices = server.post(route, **body).json()["choices"]
        assert server.post(route, **body, max_tokens=-1).json()["choices"] == choices
    no_logs = server.post(CHAT, **BASE[CHAT], top_logprobs=0).json()["choices"][0]
    assert no_logs["logprobs"] is None


@pytest.mark.parametrize(("route", "name"), cases("honoured"))
def test_honoured_fields(server: Any, quick: Any, route: str, name: str) -> None:
    if name not in ("response_format", "suffix"):  # of which the quick model can do neither
        server = quick
    good = GOOD | (GOOD_OF_RESPONSES if route == RESPONSES else {})
    for value in good[name]:
        fields = BASE[route] | {name: value}
        assert server.post(route, **fields).status_code == 200, value
    answer = server.post(route, **BASE[route] | {name: NOTHING})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith(name)


@pytest.mark.parametrize(("route", "name"), cases("refused"))
def test_refused_fields(quick: Any, route: str, name: str) -> None:
    answer = quick.post(route, **BASE[route] | {name: ASKING[name]})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, name, "unsupported")
    for value in (None, *NEUTRAL.get(name, ())):
        assert quick.post(route, **BASE[route] | {name: value}).status_code == 200, value


@pytest.mark.parametrize(("route", "name"), cases("ignored"))
def test_ignored_fields(quick: Any, route: str, name: str) -> None:
    without = texts_of(quick.post(route, **BASE[route]))
    for value in (ASKING[name], None):
        answer = quick.post(route, **BASE[route] | {name: value})
        assert answer.status_code == 200, answer.text
        assert texts_of(answer) == without


def test_the_description_has_every_field(quick: Any) -> None:
    schemas = quick.http.get("/openapi.json").json()["components"]["schemas"]
    for name, model in (
        ("ChatBody", ChatBody),
        ("CompletionBody", CompletionBody),
        ("ResponsesBody", ResponsesBody),
    ):
        assert schemas[name]["properties"].keys() == model.model_fields.keys()
        assert schemas[name]["additionalProperties"] == {"type": "null"}
    page = quick.http.get("/docs").text
    assert "reasoning_effort" in page and "<script" not in page and "https://" not in page
