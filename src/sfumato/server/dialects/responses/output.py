"""The output of a response, item by item, and the events that say so.

A thought is an item of its own, text is a message, and each call is an item. Items follow each
other; where text comes behind a call, it is another message. Knows no HTTP.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from sfumato.server.dialects.responses.items import new_id
from sfumato.server.dialects.shared.logprobs import Entry, Logged
from sfumato.server.dialects.shared.pieces import pieces
from sfumato.server.response_store import Item
from sfumato.text.reply import ToolCall

Event = dict[str, Any]  # its type and fields, without the number in the stream

_ENCRYPTED = "not-needed"
"""As `encrypted_content`: no past thought returns to the model, so nothing has to be encrypted."""


class Output:
    """Takes a reply in parts, and gives the events of each."""

    def __init__(self, logprobs: bool = False, encrypted: bool = False) -> None:
        """logprobs: whether texts come with the log probabilities of their tokens; encrypted:
        whether thoughts have an encrypted content."""
        self.items: list[Item] = []  # the last one may be open
        self._is_open = False
        self._parts: list[str] = []  # of the open item's text
        self._tokens: list[Entry] = []
        self._logprobs, self._encrypted = logprobs, encrypted
        self._held: list[Logged] = []  # white space, which alone makes no message beside calls

    def thought(self, text: str) -> Iterator[Event]:
        if not text:
            return
        if not self._is("reasoning"):
            yield from self._close()
            yield self._open({"id": new_id("rs"), "type": "reasoning", "summary": []})
            yield self._event("reasoning_summary_part.added", summary_index=0, part=_summary(""))
        for piece in pieces(text):
            self._parts.append(piece)
            yield self._event("reasoning_summary_text.delta", summary_index=0, delta=piece)

    def text(self, text: str) -> Iterator[Event]:
        """Text of the answer."""
        for piece in pieces(text):
            yield from self.logged(piece, ())

    def logged(self, text: str, tokens: Sequence[Entry]) -> Iterator[Event]:
        """Text that is made of these tokens."""
        self._held.append((text, list(tokens)))
        if self._is("message") or text.strip():
            yield from self._release()

    def call(self, call: ToolCall) -> Iterator[Event]:
        yield from self._close()
        item = {
            "id": new_id("fc"),
            "type": "function_call",
            "status": "in_progress",
            "arguments": "",
            "call_id": new_id("call"),
            "name": call.name,
        }
        yield self._open(item)
        for piece in pieces(json.dumps(call.arguments, ensure_ascii=False)):
            self._parts.append(piece)
            yield self._event("function_call_arguments.delta", delta=piece)
        yield from self._close()

    def end(self, complete: bool) -> Iterator[Event]:
        """The reply has ended. complete: by itself, and at no limit."""
        kinds = {item["type"] for item in self.items}
        if (self._held or complete) and "message" not in kinds and "function_call" not in kinds:
            yield from self._release()
        yield from self._close("completed" if complete else "incomplete")

    def _is(self, kind: str) -> bool:
        return self._is_open and self.items[-1]["type"] == kind

    def _release(self) -> Iterator[Event]:
        """The held text, in a message."""
        if not self._is("message"):
            yield from self._close()
            item = {"id": new_id("msg"), "type": "message", "status": "in_progress"}
            yield self._open(item | {"role": "assistant", "content": []})
            yield self._event("content_part.added", content_index=0, part=self._content("", []))
        for text, tokens in self._held:
            self._parts.append(text)
            self._tokens += tokens
            yield self._event(
                "output_text.delta", content_index=0, delta=text, logprobs=list(tokens)
            )
        self._held = []

    def _content(self, text: str, tokens: list[Entry]) -> Item:
        content = {"type": "output_text", "text": text, "annotations": []}
        return content | ({"logprobs": tokens} if self._logprobs else {})

    def _open(self, item: Item) -> Event:
        self.items.append(item)
        self._is_open, self._parts, self._tokens = True, [], []
        at = len(self.items) - 1
        return {"type": "response.output_item.added", "output_index": at, "item": dict(item)}

    def _close(self, status: str = "completed") -> Iterator[Event]:
        """Ends the open item, if there is one."""
        if not self._is_open:
            return
        item, text = self.items[-1], "".join(self._parts)
        if item["type"] == "message":
            part = self._content(text, self._tokens)
            yield self._event("output_text.done", content_index=0, text=text, logprobs=self._tokens)
            yield self._event("content_part.done", content_index=0, part=part)
            item |= {"content": [part], "status": status}
        elif item["type"] == "reasoning":
            yield self._event("reasoning_summary_text.done", summary_index=0, text=text)
            yield self._event("reasoning_summary_part.done", summary_index=0, part=_summary(text))
            item["summary"] = [_summary(text)]
            if self._encrypted:
                item["encrypted_content"] = _ENCRYPTED
        else:
            yield self._event("function_call_arguments.done", name=item["name"], arguments=text)
            item |= {"arguments": text, "status": "completed"}
        self._is_open = False
        at = len(self.items) - 1
        yield {"type": "response.output_item.done", "output_index": at, "item": item}

    def _event(self, kind: str, **fields: Any) -> Event:
        """Of the open item."""
        at = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        return {"type": f"response.{kind}", **at, **fields}


def _summary(text: str) -> Item:
    return {"type": "summary_text", "text": text}
