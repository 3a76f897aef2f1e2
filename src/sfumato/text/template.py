"""The checkpoint's chat template: messages to the text of a prompt.

A template is code out of a file, so it runs in Jinja's immutable sandbox, on plain data only.
Knows no ids; prompt.py encodes, and keeps markers inside messages harmless.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from jinja2.utils import Namespace

from sfumato.refused import Refused
from sfumato.text.markers import NO_MARKERS, ChatMarkers
from sfumato.text.messages import PictureParts, check_messages, check_tools
from sfumato.text.tokenizer import TokenizerError, named_tokens
from sfumato.weights.errors import CheckpointError, quoted
from sfumato.weights.files.jsonfile import read_object

Messages = Sequence[Mapping[str, Any]]
Rewrites = Callable[[Messages], tuple[Messages, tuple[str, ...]]]
"""Messages → those that the prompt shows in their place, and lines for the reply's warnings."""


class TemplateError(Refused):
    """A chat template that is absent, broken, or refuses the messages it was given."""

    def __init__(self, why: str) -> None:
        super().__init__(None, why)
        self.args = (why,)


class ChatTemplate:
    """A compiled template.

    Args:
        source: Jinja2 source, written for `transformers`' conventions.
        bos, eos: the texts behind the template's `bos_token` and `eos_token`.
        origin: where the source is from, for errors: a file, or a key of its metadata.
        markers: the special tokens of the chat format that it writes, by role.

    Raises:
        TemplateError: the source does not compile.
    """

    def __init__(
        self,
        source: str,
        bos: str = "<bos>",
        eos: str = "<eos>",
        origin: str | Path = "chat template",
        markers: ChatMarkers = NO_MARKERS,
    ) -> None:
        self.source, self.bos, self.eos, self.origin = source, bos, eos, origin
        self.markers = markers
        # None: prompts show conversations as they are. `load` sets it, for packaged models alone.
        self.rewrites: Rewrites | None = None
        self._shows_messages = False  # until a render has shown it
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(
                f"{origin}, line {error.lineno}: {error.message}; get the template again"
            ) from error
        except (RecursionError, MemoryError, SyntaxError, UnicodeError) as error:
            raise TemplateError(
                f"{origin}: cannot be compiled ({str(error)[:200]}); get the template again"
            ) from error

    @classmethod
    def from_folder(
        cls, path: str | Path, markers: ChatMarkers = NO_MARKERS, default: str = ""
    ) -> ChatTemplate:
        """The template of a checkpoint's folder.

        `chat_template.jinja`, else `chat_template` in `tokenizer_config.json`: a text, or a list of
        `{"name": …, "template": …}` whose "default" is taken; else `default`, where it is given.

        Raises:
            TemplateError: there is none, or it is broken.
        """
        folder = Path(path)
        config = folder / "tokenizer_config.json"
        try:
            source, origin = _source(folder / "chat_template.jinja", config, default)
            tokens = named_tokens(config)
        except (CheckpointError, TokenizerError, OSError) as error:
            raise TemplateError(str(error)) from error
        return cls(source, tokens.get("bos", "<bos>"), tokens.get("eos", "<eos>"), origin, markers)

    @classmethod
    def from_gguf(
        cls, metadata: Mapping[str, Any], markers: ChatMarkers = NO_MARKERS, default: str = ""
    ) -> ChatTemplate:
        """The template in GGUF metadata, `tokenizer.chat_template`, else `default`, where it is
        given.

        Raises:
            TemplateError: there is none, or it is broken.
        """
        source = metadata.get("tokenizer.chat_template", default or None)
        if not isinstance(source, str):
            raise TemplateError(
                "tokenizer.chat_template: the GGUF file has no chat template; use an "
                "instruction-tuned file, or send a plain prompt"
            )
        tokens: Sequence[Any] = metadata.get("tokenizer.ggml.tokens", ())
        named = {}
        for name in ("bos", "eos"):
            token_id = metadata.get(f"tokenizer.ggml.{name}_token_id")
            if token_id is not None and 0 <= int(token_id) < len(tokens):
                named[name] = str(tokens[int(token_id)])
        return cls(source, **named, origin="tokenizer.chat_template", markers=markers)

    def rewrite(
        self, messages: Messages, shows_pictures: bool = False
    ) -> tuple[Messages, tuple[str, ...]]:
        """The messages that a prompt of these has to show, and lines for the reply's warnings.
        Raises Refused where a message is malformed."""
        if self.rewrites is None:
            return messages, ()
        # Before any is left out: errors name messages by their place.
        check_messages(messages, markers=self.markers, pictures=[] if shows_pictures else None)
        return self.rewrites(messages)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        thinking: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        pictures: PictureParts | None = None,
    ) -> str:
        """The prompt's text, for people to read; use `prompt_ids` to make ids of messages.

        Args:
            messages: see `sfumato.text.messages.check_messages`.
            thinking: the template's `enable_thinking`.
            tools: JSON schemas of functions, as in OpenAI's API.
            add_generation_prompt: open the model's turn at the end.
            pictures: see `sfumato.text.messages.check_messages`.

        Raises:
            Refused: a message or a tool is malformed.
            TemplateError: the template failed on them.
        """
        return self.render_checked(
            check_messages(messages, markers=self.markers, pictures=pictures),
            thinking=thinking,
            tools=check_tools(tools),
            add_generation_prompt=add_generation_prompt,
        )

    def render_checked(
        self,
        messages: list[dict[str, Any]],
        *,
        thinking: bool,
        tools: list[dict[str, Any]] | None,
        add_generation_prompt: bool,
    ) -> str:
        """`render` for what `check_messages` and `check_tools` returned."""
        rest = {
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
            "enable_thinking": thinking,
        }
        text = self._filled(messages, rest)
        if not self._shows_messages:
            # One that drops the messages would go unnoticed: the model answers something anyway.
            others = _reworded(messages)
            self._shows_messages = self._filled(others, rest) != text
            if not self._shows_messages and others != messages:
                raise TemplateError(
                    f"{self.origin}: gives the same prompt whatever the messages say, so the model "
                    "would not see them; get the template again"
                )
        return text

    def _filled(self, messages: list[dict[str, Any]], rest: Mapping[str, Any]) -> str:
        if "tool_responses" in self.source:
            messages = _with_tool_responses(messages)
        # Beside calls there may be none, which many templates do not expect.
        messages = [{**message, "content": message.get("content", "")} for message in messages]
        if any(isinstance(message["content"], list) for message in messages):
            messages = messages if self._shows_parts else [*map(_with_text, messages)]
        try:
            return self._template.render(
                messages=messages, bos_token=self.bos, eos_token=self.eos, **rest
            )
        except Exception as error:  # a template is a program: it may fail in any way
            reason = str(error) or type(error).__name__
            raise TemplateError(f"{self.origin}: {reason[:400]}") from error

    @cached_property
    def _shows_parts(self) -> bool:
        """Whether a message's content may be a list of parts; some templates expect a text, and
        others print any value as Python does."""
        message = {"role": "user", "content": [{"type": "text", "text": _PROBE}]}
        rest = {"tools": None, "add_generation_prompt": False, "enable_thinking": False}
        try:
            text = self._template.render(
                messages=[message], bos_token=self.bos, eos_token=self.eos, **rest
            )
        except Exception:  # as above
            return False
        return _PROBE in text and not any(f"{quote}{_PROBE}{quote}" in text for quote in "'\"")


_PROBE = "probe"


def _with_text(message: dict[str, Any]) -> dict[str, Any]:
    """The message, its parts as one text where all are texts."""
    parts = message["content"]
    if isinstance(parts, str) or any(part["type"] != "text" for part in parts):
        return message
    return message | {"content": "\n".join(part["text"] for part in parts)}


def _source(jinja: Path, config: Path, default: str) -> tuple[str, Path]:
    """The source, and the file that it is from or could be."""
    if jinja.is_file():
        try:
            return jinja.read_text(encoding="utf-8"), jinja
        except UnicodeDecodeError as error:
            raise TemplateError(
                f"{jinja}: is not UTF-8 (at byte {error.start}); download it again"
            ) from error
    source = read_object(config).get("chat_template") if config.is_file() else None
    if isinstance(source, list):
        named = {
            entry["name"]: entry.get("template")
            for entry in source
            if isinstance(entry, dict) and isinstance(entry.get("name"), str)
        }
        if "default" not in named:
            raise TemplateError(
                f"{config}: chat_template has no entry named 'default', only {sorted(named)}"
            )
        source = named["default"]
    if source is None and default:
        return default, jinja
    if source is None:
        raise TemplateError(
            f"{jinja}: does not exist, and {config.name} has no chat_template; complete the "
            "checkpoint's folder, or send a plain prompt"
        )
    if not isinstance(source, str):
        raise TemplateError(f"{config}: chat_template must be a text, not {quoted(source)}")
    return source, config


def _reworded(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same messages, every content another text."""

    def other(content: str | list[dict[str, str]]) -> Any:
        if isinstance(content, str):
            return f"x{content}"
        return [part | {"text": f"x{part['text']}"} if "text" in part else part for part in content]

    return [m | {"content": other(m["content"])} if "content" in m else m for m in messages]


def _with_tool_responses(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tool messages, and the answer after them, folded into the turn whose calls they answer.

    This is the format the model knows: one turn of call, response and answer. Calls that follow a
    response open a turn of their own, since a template writes all calls of a turn first.
    """
    folded: list[dict[str, Any]] = []
    for message in messages:
        last = folded[-1] if folded else {}
        if message["role"] == "tool":
            response = {"name": message["name"], "response": _text(message["content"])}
            folded[-1] = last | {"tool_responses": [*last.get("tool_responses", []), response]}
        elif (
            message["role"] == "assistant"
            and "tool_calls" not in message
            and "tool_responses" in last
        ):
            folded[-1] = last | {"content": _text(last.get("content")) + _text(message["content"])}
        else:
            folded.append(message)
    return folded


def _text(content: Any) -> str:
    return content if isinstance(content, str) else ""


def _environment() -> jinja2.Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    helpers: dict[str, Callable[..., Any]] = {
        "raise_exception": _raise_exception,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "namespace": _Namespace,
    }
    environment.globals.update(helpers)
    environment.filters["tojson"] = _to_json
    return environment


def _raise_exception(message: object) -> None:
    raise jinja2.TemplateError(str(message))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own escapes for HTML; the model reads no HTML.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class _Namespace(Namespace):
    """Jinja's namespace, without a way to store the names Python keeps its internals under."""

    def __init__(self, /, *args: Any, **kwargs: Any) -> None:
        fields = dict(*args, **kwargs)
        for name in fields:
            _check_name(name)
        Namespace.__init__(self, fields)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        Namespace.__setitem__(self, name, value)


def _check_name(name: str) -> None:
    if name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold {name!r}")
