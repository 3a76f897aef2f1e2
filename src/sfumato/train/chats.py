"""What a model is tuned on: conversations of a file → the ids of prompts and replies, and their
canvases.

A file of JSON Lines has an object a line: `messages` as a chat body of the server has them, with
`tools` and pictures; or a `prompt` and a `completion`, each a text or a list of messages.  A folder
is one that Hugging Face's `datasets` has saved.  Each message of the assistant is a row: the prompt
before it, as it is served, and the reply.  Files are hostile: each number has a bound, and what is
wrong is named by file, line and field.  Knows no noise, no loss and no network.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sfumato.api import Model
from sfumato.media.part import of_url
from sfumato.media.patches import Patches
from sfumato.refused import Refused
from sfumato.tasks.works import PlacedPicture
from sfumato.text.jsonscan import JsonTooLarge, extent
from sfumato.text.messages import MAX_DEPTH, MOST_VALUES, PictureParts
from sfumato.text.prompt import exchange_ids, rewritten
from sfumato.train.canvas_rows import CanvasRow

MOST_LINE = 2**26  # bytes: a picture in base64 is some megabytes
MOST_CHATS = 2**22
MOST_MESSAGES = 1024  # of a conversation
MOST_FILE = 2**31  # bytes of a file, or of a folder: conversations lie in memory while it is read
MOST_ALL = 2**28  # tokens of all rows: they lie in memory
MOST_PATCHES = 2**32  # bytes of the patches of all pictures, which do so too

Ids = Sequence[int]


class Chat(NamedTuple):
    """A conversation as a file has it."""

    where: str  # "chats.jsonl, line 3"
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None


@dataclass(frozen=True, eq=False)
class Exchange:
    """A prompt and the reply to learn, with the token that ends it."""

    where: str
    prompt: Ids
    reply: Ids
    pictures: tuple[PlacedPicture, ...]


@dataclass(frozen=True)
class Canvases:
    """How replies of a model become canvases: `length` tokens each, the last one filled up with
    `filler`. context: positions of a row at most; long: what becomes of a row with more, of
    `options.tuning.LONG`."""

    model: Model
    context: int
    long: str
    filler: int
    length: int

    @classmethod
    def of(cls, model: Model, context: int, long: str) -> Canvases:
        """Raises Refused for a vocabulary that cannot end a canvas, or too small a context."""
        closing, config = model.fills.closing, model.config
        if closing is None:
            raise Refused("model", "has no token that fills a canvas behind the end of a reply")
        context = min(context, config.context_length)
        return cls(model, context, long, closing.filler_id, config.canvas_length)

    def begin(self, exchange: Exchange) -> int:
        """Where the first canvas begins: at the end of the prompt, or of its last whole block."""
        prompt = len(exchange.prompt)
        return self.model.config.blocks(prompt).border(prompt)

    def count(self, exchange: Exchange) -> int:
        """How many canvases the reply has."""
        tokens = len(exchange.prompt) + len(exchange.reply) - self.begin(exchange)
        return -(-tokens // self.length)

    def row(self, exchange: Exchange, number: int) -> CanvasRow:
        """The canvas of this number, with all of the reply in the context."""
        ids, prompt = [*exchange.prompt, *exchange.reply], len(exchange.prompt)
        at = self.begin(exchange) + number * self.length
        text = ids[at : at + self.length]
        target = text + [self.filler] * (self.length - len(text))
        is_open = [at + place >= prompt for place in range(self.length)]
        return CanvasRow("chat", ids[:at], target, is_open, None, min(prompt, at), behind=ids[at:])

    def fitted(self, exchange: Exchange) -> Exchange | None:
        """The exchange with a reply that fits, or None for one to leave out. Raises Refused."""
        begin = self.begin(exchange)
        room = (self.context - begin) // self.length
        if self.count(exchange) <= room:
            return exchange
        if self.long == "skip":
            return None
        tokens = begin + self.count(exchange) * self.length
        if self.long == "refuse" or room < 1:
            raise Refused(
                exchange.where,
                f"a row of {tokens:,} tokens with its canvases, of which "
                f"{len(exchange.prompt):,} are the prompt's; a row has {self.context:,} at most",
                "raise --context, or say with --long cut or skip what becomes of such rows",
            )
        end = begin + room * self.length - len(exchange.prompt)
        return replace(exchange, reply=exchange.reply[:end])


def exchanges(chats: Iterable[Chat], canvases: Canvases) -> list[Exchange]:
    """The rows of conversations. Raises Refused, naming file, line and field."""
    made, tokens, pictures = list[Exchange](), 0, _Pictures(canvases.model)
    for chat in chats:
        for exchange in _named(chat, canvases.model, pictures):
            fitting = canvases.fitted(exchange)
            if fitting is None:
                continue
            made.append(fitting)
            tokens += len(fitting.prompt) + len(fitting.reply)
            if tokens > MOST_ALL:
                raise _too_many(chat.where, MOST_ALL, "tokens")
    return made


def _too_many(where: str, most: int, what: str) -> Refused:
    return Refused(where, f"all rows have more than {most:,} {what}", "give fewer rows")


def _named(chat: Chat, model: Model, pictures: _Pictures) -> Iterator[Exchange]:
    """Yields what `_exchanges` does; errors name the conversation."""
    try:
        yield from _exchanges(chat, model, pictures)
    except Refused as error:
        fields = error.fields or ("messages",)
        raise error.about(*(f"{chat.where}: {field}" for field in fields)) from None


def _exchanges(chat: Chat, model: Model, pictures: _Pictures) -> Iterator[Exchange]:
    """An exchange for each of the assistant's messages."""
    if not any(message.get("role") == "assistant" for message in chat.messages):
        raise Refused("messages", "has no message of an assistant, from which to learn")
    for at, message in enumerate(chat.messages):
        if message.get("role") != "assistant":
            continue
        if not at:
            raise Refused("messages[0].role", "a reply needs a message before it")
        end = at + 1
        while end < len(chat.messages) and chat.messages[end].get("role") == "tool":
            end += 1
        parts: PictureParts | None = [] if model.reads_pictures else None
        before = chat.messages[:at]
        shown, _ = rewritten(model.template, before, chat.tools, shows_pictures=parts is not None)
        ids, reply = exchange_ids(
            model.template,
            model.tokenizer,
            shown,
            chat.messages[at:end],
            model.end_ids,
            tools=chat.tools,
            pictures=parts,
        )
        placed: tuple[PlacedPicture, ...] = ()
        if parts:
            assert model.text.pictures is not None
            read = [pictures.patches(part) for _, part in parts]
            made = model.text.pictures.placed(ids, read)
            ids, placed = made.ids, made.pictures
        # What a reply without a thought begins with, where the prompt does not end with it.
        reply = [*model.fills.empty_thought, *reply]
        # Lists of numbers would take eight times the memory.
        yield Exchange(chat.where, array("i", ids), array("i", reply), placed)


class _Pictures:
    """The pictures of a file, each read once for all rows of its conversation."""

    def __init__(self, model: Model) -> None:
        self._model, self._known, self._nbytes = model, dict[str, Patches](), 0

    def patches(self, part: Mapping[str, Any]) -> Patches:
        """The patches of a picture's part. Raises Refused."""
        field = part["field"]  # the line's number is in it
        if field not in self._known:
            if self._nbytes >= MOST_PATCHES:
                raise _too_many("messages", MOST_PATCHES, "bytes of pictures")
            self._known[field] = made = self._model.patches(part, field)
            self._nbytes += made.levels.nbytes
        return self._known[field]


def read_chats(path: Path) -> list[Chat]:
    """The conversations of a file of JSON Lines, or of a folder that `datasets` has saved. Raises
    Refused, naming file, line and field, and OSError."""
    files = [each for each in path.rglob("*") if each.is_file()] if path.is_dir() else [path]
    if sum(each.stat().st_size for each in files) > MOST_FILE:
        raise Refused(str(path), f"has more than {MOST_FILE:,} bytes", "give fewer rows")
    chats = list(_of_folder(path) if path.is_dir() else _of_lines(path))
    if not chats:
        raise Refused(str(path), "has no conversation")
    return chats


def _of_lines(path: Path) -> Iterator[Chat]:
    with path.open("rb") as file:
        number = total = 0
        while line := file.readline(MOST_LINE + 1):
            number, total = number + 1, total + len(line)
            if total > MOST_FILE:  # a pipe has no size beforehand
                raise Refused(str(path), f"has more than {MOST_FILE:,} bytes", "give fewer rows")
            where = f"{path.name}, line {number}"
            if len(line) > MOST_LINE:
                raise Refused(where, f"has more than {MOST_LINE:,} bytes", "give shorter ones")
            if line.strip():
                yield _chat(_decoded(line, where), where, path.parent)
            if number > MOST_CHATS:
                raise Refused(str(path), f"has more than {MOST_CHATS:,} lines")


def _decoded(line: bytes, where: str) -> Any:
    try:
        if extent(line, most_depth=2 * MAX_DEPTH).values > MOST_VALUES:
            raise Refused(where, f"has more than {MOST_VALUES:,} values of JSON")
        return json.loads(line)
    except JsonTooLarge as error:
        raise Refused(where, str(error)) from None
    except ValueError as error:
        if isinstance(error, Refused):
            raise
        raise Refused(where, f"is no JSON: {str(error)[:120]}", "write an object a line") from None


def _of_folder(path: Path) -> Iterator[Chat]:
    try:
        import datasets
    except ImportError:
        raise Refused(
            str(path),
            "is a folder, which the package `datasets` reads, which is not installed",
            "pip install 'sfumato[datasets]', or give a file of JSON Lines",
        ) from None
    try:
        loaded: Any = datasets.load_from_disk(str(path))
    except (FileNotFoundError, ValueError, TypeError) as error:
        raise Refused(str(path), f"is no folder of `datasets`: {str(error)[:200]}") from None
    if isinstance(loaded, dict):
        if "train" not in loaded:
            raise Refused(str(path), f"has no split 'train', only {', '.join(loaded)[:200]}")
        loaded = loaded["train"]
    for number, row in enumerate(loaded):
        if number >= MOST_CHATS:
            raise Refused(str(path), f"has more than {MOST_CHATS:,} rows")
        # Columns that a row does not use are null there.
        yield _chat(_without_nulls(row), f"{path.name}, row {number}", path)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _chat(row: Any, where: str, folder: Path) -> Chat:
    if not isinstance(row, Mapping):
        raise Refused(where, "must be an object")
    messages, tools = row.get("messages"), row.get("tools")
    if messages is None:
        prompt, completion = row.get("prompt"), row.get("completion")
        if prompt is None or completion is None:
            raise Refused(where, "must have messages, or a prompt and a completion")
        parts = ((prompt, "user", "prompt"), (completion, "assistant", "completion"))
        messages = [each for part in parts for each in _as_messages(*part, where)]
    if not isinstance(messages, list) or not all(isinstance(each, Mapping) for each in messages):
        raise Refused(f"{where}: messages", "must be a list of objects")
    if len(messages) > MOST_MESSAGES:
        raise Refused(f"{where}: messages", f"there are more than {MOST_MESSAGES:,}")
    if isinstance(tools, str):  # as files of tables have them, whose columns have one type
        tools = _decoded(tools.encode("utf-8", "replace"), f"{where}: tools")
    if tools is not None and not isinstance(tools, list):
        raise Refused(f"{where}: tools", "must be a list")
    shown = [_message(each, f"{where}: messages[{i}]", folder) for i, each in enumerate(messages)]
    return Chat(where, shown, tools or None)


def _as_messages(given: Any, role: str, field: str, where: str) -> list[Any]:
    if isinstance(given, str):
        return [{"role": role, "content": given}]
    if not isinstance(given, list):
        raise Refused(f"{where}: {field}", "must be a text or a list of messages")
    return given


def _message(message: Mapping[str, Any], where: str, folder: Path) -> dict[str, Any]:
    """The message in the roles and with the parts of pictures that templates read."""
    made = dict(message)
    if made.get("role") == "developer":
        made["role"] = "system"
    content = made.get("content")
    if isinstance(content, list):
        made["content"] = [
            _part(part, f"{where}.content[{i}]", folder) for i, part in enumerate(content)
        ]
    return made


def _part(part: Any, where: str, folder: Path) -> Any:
    if not isinstance(part, Mapping) or part.get("type") not in ("image_url", "image"):
        return part
    if part["type"] == "image_url":
        source = of_url(part, where)
        return {"type": "image", "url": source.given, "tokens": source.tokens, "field": where}
    if isinstance(path := part.get("path"), str):
        return {**part, "path": str(folder / path), "field": where}
    return {**part, "field": where}


def split(chats: Sequence[Chat], share: float, seed: int) -> tuple[list[Chat], list[Chat]]:
    """What is learnt, and the share that is held out: one conversation at least, the same ones for
    the same seed. Raises Refused where nothing is left to learn."""
    count = max(1, round(share * len(chats)))
    if count >= len(chats):
        why = f"{count} of {len(chats)} conversations leave none to learn"
        raise Refused("held_out", why, "give more conversations, or --held-out 0 to hold none back")
    order = np.random.default_rng((seed, 1)).permutation(len(chats))
    held = set(order[:count].tolist())
    return (
        [chat for i, chat in enumerate(chats) if i not in held],
        [chat for i, chat in enumerate(chats) if i in held],
    )
