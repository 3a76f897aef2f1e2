"""`ResponseStore`: the responses that clients may name again, bounded in count and bytes.

Each belongs to the API key that made it, and no other key finds it. The ones that were used least
recently are forgotten first, and all of them when the server stops. A conversation is a chain of
responses: each has its own input, and names the response before it. Knows no HTTP.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any

Item = dict[str, Any]
"""An item of an input or an output, as OpenAI's API has it."""

MOST_RESPONSES = 4096
_OVERHEAD = 1024  # bytes of an entry beside its texts, about
_OVERHEAD_OF_ITEM = 256


class Missing(KeyError):
    """There is no such response here, of that owner."""


@dataclass(frozen=True)
class Stored:
    """One response, as JSON texts: objects would take several times the bytes."""

    owner: str
    head: bytes  # all of the response but its output
    output: bytes
    items: bytes  # its own input
    item_ids: tuple[str, ...]  # of its input and its output
    previous: str | None  # the id of the response that it follows
    status: str

    @property
    def nbytes(self) -> int:
        texts = len(self.head) + len(self.output) + len(self.items)
        return _OVERHEAD + _OVERHEAD_OF_ITEM * len(self.item_ids) + texts

    @property
    def response(self) -> bytes:
        """The whole response."""
        return b'%s,"output":%s}' % (self.head[:-1], self.output)

    @property
    def outputs(self) -> list[Item]:
        """The items of its output."""
        return list(json.loads(self.output))

    @property
    def inputs(self) -> list[Item]:
        """The items of its own input."""
        return list(json.loads(self.items))


class ResponseStore:
    """Any thread may call."""

    def __init__(self, nbytes: int, count: int = MOST_RESPONSES) -> None:
        """nbytes: of all entries together; 0 keeps none."""
        self._most_bytes, self._most = nbytes, count
        self._entries: OrderedDict[str, Stored] = OrderedDict()  # the one used last is last
        self._homes: dict[tuple[str, str], str] = {}  # owner and item's id → response's id
        self._nbytes = 0
        self._lock = Lock()

    @property
    def keeps(self) -> bool:
        """Whether anything is kept."""
        return self._most_bytes > 0

    def add(self, owner: str, response: Mapping[str, Any], items: Sequence[Item]) -> bool:
        """Keeps a response and its own input, and forgets old ones; False where it has too many
        bytes."""
        output = response["output"]
        entry = Stored(
            owner,
            _head(response),
            _encoded(output),
            _encoded(items),
            _ids([*items, *output]),
            response["previous_response_id"],
            response["status"],
        )
        with self._lock:
            return self._add(response["id"], entry)

    def update(self, owner: str, response: Mapping[str, Any]) -> bool:
        """Replaces a response that was added before it ended; False where it is no longer here, or
        has too many bytes now."""
        head, output = _head(response), _encoded(response["output"])
        with self._lock:
            before = self._entries.get(response["id"])
            if before is None or before.owner != owner:
                return False
            entry = replace(
                before,
                head=head,
                output=output,
                item_ids=before.item_ids + _ids(response["output"]),
                status=response["status"],
            )
            return self._add(response["id"], entry)

    def get(self, owner: str, name: str) -> Stored:
        """Raises Missing."""
        with self._lock:
            return self._get(owner, name)

    def remove(self, owner: str, name: str) -> None:
        """Raises Missing."""
        with self._lock:
            self._get(owner, name)
            self._drop(name)

    def home(self, owner: str, item_id: str) -> Stored:
        """The response whose input or output has that item. Raises Missing."""
        with self._lock:
            name = self._homes.get((owner, item_id))
            if name is None:
                raise Missing(item_id)
            return self._get(owner, name)

    def chain(self, owner: str, name: str | None, most: int, is_whole: bool = True) -> list[Stored]:
        """The responses that end in that one, the first one first: at most so many of the last
        ones. None: no response. Where one is not here, raises Missing, which names it, or, for a
        chain that need not be whole, returns those behind it."""
        chain: list[Stored] = []
        with self._lock:
            while name is not None and len(chain) < most:
                try:
                    chain.append(self._get(owner, name))
                except Missing:
                    if is_whole:
                        raise
                    break
                name = chain[-1].previous
        return chain[::-1]

    def _get(self, owner: str, name: str) -> Stored:
        entry = self._entries.get(name)
        if entry is None or entry.owner != owner:
            raise Missing(name)
        self._entries.move_to_end(name)
        return entry

    def _add(self, name: str, entry: Stored) -> bool:
        self._drop(name)
        if entry.nbytes > self._most_bytes:
            return False
        while self._entries and (
            self._nbytes + entry.nbytes > self._most_bytes or len(self._entries) >= self._most
        ):
            self._drop(next(iter(self._entries)))
        self._entries[name] = entry
        self._nbytes += entry.nbytes
        for item_id in entry.item_ids:
            self._homes[entry.owner, item_id] = name
        return True

    def _drop(self, name: str) -> None:
        entry = self._entries.pop(name, None)
        if entry is None:
            return
        self._nbytes -= entry.nbytes
        for item_id in entry.item_ids:
            # A client may send an item again, which is then another response's too.
            if self._homes.get((entry.owner, item_id)) == name:
                del self._homes[entry.owner, item_id]


def _encoded(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def _head(response: Mapping[str, Any]) -> bytes:
    return _encoded({name: value for name, value in response.items() if name != "output"})


def _ids(items: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    return tuple(item["id"] for item in items if isinstance(item.get("id"), str))
