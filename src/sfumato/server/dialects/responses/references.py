"""What a body refers to instead of sending it: looked up once, and bounded as a body is."""

from __future__ import annotations

from sfumato.refused import Refused
from sfumato.server.response_store import Item, Missing, ResponseStore, Stored


class References:
    """The kept items of one owner, for one body: a reference takes few bytes, and what it refers to
    may be large, and may be referred to many times."""

    def __init__(self, store: ResponseStore, owner: str, most: int) -> None:
        """most: characters that the body may refer to, all together."""
        self._store, self._owner = store, owner
        self._most, self._count = most, 0
        self._items: dict[str, Item] = {}
        self._read: list[Stored] = []

    def item(self, name: str) -> Item:
        """Raises Missing, and Refused for too much."""
        if name not in self._items:
            home = self._store.home(self._owner, name)
            if home not in self._read:
                self._read.append(home)
                for each in (*home.inputs, *home.outputs):
                    self._items.setdefault(each["id"], each)
            if name not in self._items:
                raise Missing(name)
        self.count(_size(self._items[name]))
        return self._items[name]

    def count(self, characters: int) -> None:
        """So many more are referred to. Raises Refused for too many."""
        self._count += characters
        if self._count > self._most:
            raise Refused(
                "input",
                f"comes to over {self._most:,} characters with the items that it refers to",
                "leave out old ones, or raise --max-body",
                code="input_too_large",
            )


def _size(item: Item) -> int:
    """Characters of the item's texts."""
    texts = [part.get("text", "") for part in item.get("content", ())]
    return len(item.get("arguments", "")) + len(item.get("output", "")) + sum(map(len, texts))
