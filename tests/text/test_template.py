from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sfumato.refused import Refused
from sfumato.text.template import ChatTemplate, TemplateError

USER = {"role": "user", "content": " What is 2+2?\n"}
SYSTEM = {"role": "system", "content": "Be brief."}
PAST = {"role": "assistant", "content": "<|channel>thought\nsecret<channel|>4"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a place",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "Where", "enum": ["Paris", "Rome"]},
                    "days": {"type": "integer", "nullable": True},
                    "parts": {"type": "array", "items": {"type": "string"}},
                    "more": {"type": "object", "properties": {"x": {"type": "number"}}},
                },
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "time", "description": ""}},
]
ARGUMENTS = {"city": "Paris", "days": 3, "deep": {"a": [True, "b"]}}
CALLS = [{"type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}]
RESPONSES = [{"name": "weather", "response": "sunny"}]
NATIVE: list[dict[str, Any]] = [
    USER,
    {"role": "assistant", "tool_calls": CALLS, "tool_responses": RESPONSES},
]
OPENAI_CALL = {"name": "weather", "arguments": json.dumps(ARGUMENTS)}
OPENAI: list[dict[str, Any]] = [
    USER,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "type": "function", "function": OPENAI_CALL}],
    },
    {"role": "tool", "tool_call_id": "1", "content": "sunny"},
]
PARTS = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
ANSWER = {"role": "assistant", "content": "Sunny."}


def _by_transformers(source: str, messages: list[Any], **options: Any) -> str:
    chat = pytest.importorskip("transformers.utils.chat_template_utils")
    rendered, _ = chat.render_jinja_template(
        [messages], chat_template=source, bos_token="<bos>", eos_token="<eos>", **options
    )
    return str(rendered[0])


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("add_generation_prompt", [False, True])
@pytest.mark.parametrize(
    ("messages", "same"),
    [
        ([USER], None),
        ([SYSTEM, USER], None),
        ([SYSTEM, USER, PAST, USER], None),
        ([{"role": "user", "content": PARTS}], None),
        (OPENAI, NATIVE),
        ([*OPENAI, ANSWER, USER], [USER, NATIVE[1] | {"content": "Sunny."}, USER]),
        ([*OPENAI, *OPENAI[1:]], [*NATIVE, NATIVE[1]]),
    ],
)
def test_renders_as_transformers_does(
    gemma_template: ChatTemplate,
    messages: list[Any],
    same: list[Any] | None,
    thinking: bool,
    tools: list[Any] | None,
    add_generation_prompt: bool,
) -> None:
    rendered = gemma_template.render(
        messages, thinking=thinking, tools=tools, add_generation_prompt=add_generation_prompt
    )
    assert rendered == _by_transformers(
        gemma_template.source,
        same or messages,
        tools=tools,
        enable_thinking=thinking,
        add_generation_prompt=add_generation_prompt,
    )
    assert rendered.count("<bos>") == 1


def test_the_prompt_of_the_real_template(gemma_template: ChatTemplate) -> None:
    assert gemma_template.render([USER]) == (
        "<bos><|turn>user\nWhat is 2+2?<turn|>\n<|turn>model\n<|channel>thought\n<channel|>"
    )
    assert gemma_template.render([SYSTEM, USER], thinking=True) == (
        "<bos><|turn>system\n<|think|>Be brief.<turn|>\n"
        "<|turn>user\nWhat is 2+2?<turn|>\n<|turn>model\n"
    )
    assert "<|turn>model\n4<turn|>" in gemma_template.render([USER, PAST, USER])
    assert "secret" not in gemma_template.render([USER, PAST, USER], thinking=True)


def test_tool_turns_of_the_real_template(gemma_template: ChatTemplate) -> None:
    turn = (
        '<|turn>model\n<|tool_call>call:weather{city:<|"|>Paris<|"|>,days:3,'
        'deep:{a:[true,<|"|>b<|"|>]}}<tool_call|>'
        '<|tool_response>response:weather{value:<|"|>sunny<|"|>}<tool_response|>'
    )
    assert gemma_template.render(OPENAI, thinking=True, tools=TOOLS).endswith(turn)
    assert f"{turn}Sunny.<turn|>\n<|turn>user" in gemma_template.render([*OPENAI, ANSWER, USER])


def test_other_templates_see_tool_messages() -> None:
    template = ChatTemplate(
        "{% for m in messages %}{{ m.role }}:{{ m.name or m.content }} {% endfor %}"
    )
    user = USER | {"content": "hi"}
    assert template.render([user, *OPENAI[1:]]) == "user:hi assistant: tool:weather "


def test_messages_are_checked(gemma_template: ChatTemplate) -> None:
    with pytest.raises(Refused, match=r"messages\[1\]\.role"):
        gemma_template.render([USER, {"role": "boss", "content": "x"}])


def test_what_templates_may_rely_on() -> None:
    render = ChatTemplate(
        "{% for x in [1, 2, 3] %}\n  {% if x == 2 %}{% continue %}{% endif %}\n{{ x }}{% endfor %}"
        "{{ {'a': '<é>'} | tojson }}{{ strftime_now('%Y') | length }}{{ bos_token }}{{ eos_token }}"
        "{% set n = namespace(a=1) %}{% set n.a = 2 %}{{ n.a }}{{ messages[0].content }}",
        bos="B",
        eos="E",
    ).render
    assert render([USER]) == '13{"a": "<é>"}4BE2 What is 2+2?\n'


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ messages.append(1) }}",
        "{{ namespace.__init__.__globals__['json'] }}",
        "{{ namespace(_x=1) }}",
        "{% set n = namespace() %}{% set n.__class__ = 1 %}",
        "{{ (1).__class__.__base__ }}",
        "{% for x in range(10 ** 9) %}{% endfor %}",
        "{% include '/etc/passwd' %}",
        "{{ 1 // 0 }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ messages[0].nothing.at_all }}",
    ],
)
def test_templates_are_kept_in_their_box(source: str) -> None:
    with pytest.raises(TemplateError, match="chat template"):
        ChatTemplate(source).render([USER])


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ ''|attr('__class__') }}",
        "{{ '{0.__class__}'.format('') }}",
    ],
)
def test_internals_are_as_if_not_there(source: str) -> None:
    template = ChatTemplate(source + "{{ messages[0].content }}")
    assert template.render([USER]) == USER["content"]


def test_a_template_can_refuse() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(TemplateError, match="chat template: roles must alternate"):
        template.render([USER])


@pytest.mark.parametrize("source", ["{% if %}", "{{", "a\n{% nothing %}", "{{ " + "(" * 5000])
def test_sources_that_do_not_compile(source: str) -> None:
    with pytest.raises(TemplateError, match="chat template"):
        ChatTemplate(source)


@pytest.mark.parametrize(
    "chat", ["", "Hello.", "{{ messages | length }}", "{{ messages[0].role }}"]
)
@pytest.mark.parametrize("content", [USER["content"], "", PARTS])
def test_a_template_that_ignores_the_messages_is_refused(chat: str, content: Any) -> None:
    template = ChatTemplate("{{ bos_token }}<|turn>user\n" + chat)
    for _ in range(2):  # not only the first time
        with pytest.raises(TemplateError, match=r"same prompt whatever the messages say.*get"):
            template.render([{"role": "user", "content": content}])


def test_only_what_was_said_can_be_ignored() -> None:
    template = ChatTemplate(
        "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    )
    calls = {"role": "assistant", "tool_calls": CALLS}
    assert template.render([calls]) == ""  # nothing to ignore: it shows no more than this
    with pytest.raises(TemplateError, match="whatever the messages say"):
        template.render([SYSTEM])
    assert template.render([SYSTEM, USER]) == USER["content"]


def test_messages_are_rendered_once_when_the_template_is_known_to_heed_them() -> None:
    template = ChatTemplate("{{ messages[0].content }}")
    template.render([USER])
    filled: list[Any] = []
    template._filled = lambda *given: filled.append(given) or "x"  # type: ignore[method-assign]
    template.render([USER])
    assert len(filled) == 1


SAYS = "{{ messages[0].content }}"
HI = [{"role": "user", "content": "hi"}]


def test_from_folder(tmp_path: Path) -> None:
    with pytest.raises(TemplateError, match=r"chat_template\.jinja: does not exist"):
        ChatTemplate.from_folder(tmp_path)
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": SAYS + "{{ bos_token }}", "bos_token": "<s>"}))
    assert ChatTemplate.from_folder(tmp_path).render(HI) == "hi<s>"
    named = [{"name": "rag", "template": "no"}, {"name": "default", "template": SAYS + "2"}]
    config.write_text(json.dumps({"chat_template": named}))
    assert ChatTemplate.from_folder(tmp_path).render(HI) == "hi2"
    (tmp_path / "chat_template.jinja").write_text(SAYS + "3", encoding="utf-8")
    assert ChatTemplate.from_folder(tmp_path).render(HI) == "hi3"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (b"{{ messages }}\xff", "is not UTF-8 .at byte 14.; download it again"),
        (b"\n{% if %}", "line 2: .*; get the template again"),
        (b"{{ 1 // 0 }}", "division"),
        (b"Hello.", "same prompt whatever"),
    ],
)
def test_errors_name_the_file(tmp_path: Path, source: bytes, message: str) -> None:
    file = tmp_path / "chat_template.jinja"
    file.write_bytes(source)
    with pytest.raises(TemplateError, match=message) as caught:
        ChatTemplate.from_folder(tmp_path).render(HI)
    assert str(caught.value).startswith(str(file))


@pytest.mark.parametrize(
    "source", ["{% if %}", "{{ 1 // 0 }}", "{{ '\ud800' }}", "\ud800", "Hello."]
)
def test_errors_name_the_other_places(tmp_path: Path, source: str) -> None:
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": source}))
    with pytest.raises(TemplateError) as caught:
        ChatTemplate.from_folder(tmp_path).render(HI)
    assert str(caught.value).startswith(str(config))
    with pytest.raises(TemplateError, match=r"^tokenizer\.chat_template"):
        ChatTemplate.from_gguf({"tokenizer.chat_template": source}).render(HI)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{}", "has no chat_template"),
        ('{"chat_template": 3}', "chat_template must be a text, not 3"),
        ('{"chat_template": [{"name": "rag", "template": "x"}]}', r"only \['rag'\]"),
        ('{"chat_template": [{"name": "default"}]}', "has no chat_template"),
        ('{"chat_template": "x", "bos_token": 3}', "bos_token must be a text"),
        ("[]", "instead of an object"),
        ("{", "is not JSON"),
    ],
)
def test_bad_folders(tmp_path: Path, config: str, message: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(config)
    with pytest.raises(TemplateError, match=message):
        ChatTemplate.from_folder(tmp_path)


def test_gguf_without_a_template() -> None:
    with pytest.raises(TemplateError, match=r"tokenizer\.chat_template: the GGUF file has no"):
        ChatTemplate.from_gguf({})
