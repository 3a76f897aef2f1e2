"""The adapters of one network by name, while it serves.

A name that is removed and given again is another adapter: what has been made with an adapter is
known by its number, which no other ever has. Any thread may ask for a number; adapters are attached
and detached by the thread that runs the network. Knows no requests: who removes a name says when
nothing uses the adapter any more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from sfumato.model.adapters import NONE, Adapter
from sfumato.model.network import Network
from sfumato.options.limits import name_fault
from sfumato.refused import Refused

MOST = 64
"""Adapters of a network at most, and those count too whose names were removed and that still serve
rows."""


@dataclass(frozen=True)
class NamedAdapter:
    """An adapter that is attached."""

    name: str
    number: int
    rank: int  # the largest of its changes
    nbytes: int
    source: str = ""  # the path that it was read from


class NamedAdapters:
    """What is attached to a network."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._named: Mapping[str, NamedAdapter] = {}  # replaced whole: any thread may read it
        self._leaving: dict[int, NamedAdapter] = {}  # without a name, but attached
        self._last = NONE

    @property
    def named(self) -> Mapping[str, NamedAdapter]:
        """The adapters that requests may name."""
        return self._named

    @property
    def leaving(self) -> tuple[int, ...]:
        """The numbers of adapters whose names were removed, and that are attached still."""
        return tuple(self._leaving)

    def number(self, name: str | None) -> int:
        """The number of a name; 0 for None. Raises Refused."""
        if name is None:
            return NONE
        if not isinstance(name, str) or name not in self._named:
            raise Refused("adapter", f"there is no adapter {name!r:.99}", self._advice)
        return self._named[name].number

    def has(self, number: int) -> bool:
        """Whether a number is that of an adapter that is attached, or 0."""
        attached = (number == each.number for each in self._named.values())
        return number == NONE or number in self._leaving or any(attached)

    def attach(self, name: str, adapter: Adapter, source: str = "") -> NamedAdapter:
        """Attaches an adapter; source: the path that it was read from. Raises Refused for a name
        that is taken or none, for one adapter too many, and for what does not fit the network, by
        its module."""
        check_name(name)
        if name in self._named:
            raise Refused("name", f"the adapter {name!r} is loaded already", "unload it first")
        if len(self._named) + len(self._leaving) >= MOST:
            raise Refused("name", f"{MOST} adapters are loaded, which is the limit", "unload one")
        changes = adapter.values()
        rank = max((each.down.shape[-2] for each in changes), default=0)
        made = NamedAdapter(name, self._last + 1, rank, nbytes_of(adapter), source)
        self._network.transformer.attach(made.number, adapter)
        self._last, self._named = made.number, {**self._named, name: made}
        return made

    def take_off(self, name: str) -> NamedAdapter:
        """Removes a name: requests that name it from now on are refused; the adapter stays attached
        until `detach`. Raises Refused where there is no such name."""
        self.number(name)
        left = self._named[name]
        self._leaving[left.number] = left
        self._named = {other: each for other, each in self._named.items() if other != name}
        return left

    def detach(self, number: int) -> NamedAdapter:
        """Frees an adapter without a name, which nothing uses any more."""
        self._network.transformer.detach(number)
        return self._leaving.pop(number)

    @property
    def _advice(self) -> str:
        names: Iterable[str] = sorted(self._named)
        return f"there are {', '.join(names)}"[:200] if names else "none is loaded"


def check_name(name: object) -> None:
    """Raises Refused for what cannot be the name of an adapter."""
    if why := name_fault(name):
        raise Refused("name", f"{name!r:.99} {why}")


def nbytes_of(adapter: Adapter) -> int:
    """Bytes of the tensors of an adapter."""
    return sum(each.down.nbytes + each.up.nbytes for each in adapter.values())
