"""Responses that are kept: what is found, by whom, and what is forgotten."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sfumato.server.response_store import Missing, ResponseStore


def response(name: str, previous: str | None = None, size: int = 0) -> dict[str, Any]:
    item = {"id": f"msg_{name}", "type": "message", "content": "x" * size}
    return {
        "id": name,
        "previous_response_id": previous,
        "status": "completed",
        "output": [item],
    }


def test_only_its_owner_finds_a_response() -> None:
    store = ResponseStore(2**16)
    assert store.add("ann", response("a"), [{"id": "msg_in", "type": "message"}])
    assert json.loads(store.get("ann", "a").response) == response("a")
    assert store.home("ann", "msg_in").inputs == [{"id": "msg_in", "type": "message"}]
    assert store.home("ann", "msg_a").outputs == response("a")["output"]
    for ask in (
        lambda: store.get("bob", "a"),
        lambda: store.home("bob", "msg_a"),
        lambda: store.remove("bob", "a"),
        lambda: store.chain("bob", "a", 9),
    ):
        with pytest.raises(Missing):
            ask()
    store.remove("ann", "a")
    with pytest.raises(Missing):
        store.home("ann", "msg_a")


def test_a_chain_is_in_order_and_names_what_is_missing() -> None:
    store = ResponseStore(2**16)
    for name, previous in (("a", None), ("b", "a"), ("c", "b")):
        store.add("", response(name, previous), [])
    assert [one.outputs[0]["id"][4:] for one in store.chain("", "c", 9)] == ["a", "b", "c"]
    assert len(store.chain("", "c", 2)) == 2 and store.chain("", None, 9) == []
    store.remove("", "a")
    with pytest.raises(Missing, match="a"):
        store.chain("", "c", 9)


def test_bytes_and_count_are_bounded_and_the_least_used_goes_first() -> None:
    store = ResponseStore(10_000, count=3)
    for name in "abc":
        store.add("", response(name), [])
    store.get("", "a")
    store.add("", response("d"), [])
    with pytest.raises(Missing):
        store.get("", "b")
    store.add("", response("big", size=6000), [])
    assert store.get("", "big")
    assert not store.add("", response("huge", size=20_000), [])
    assert not ResponseStore(0).add("", response("a"), []) and not ResponseStore(0).keeps


def test_an_item_that_is_sent_again_is_found_while_one_response_has_it() -> None:
    store = ResponseStore(2**16)
    item = {"id": "msg_in", "type": "message"}
    store.add("", response("a"), [item])
    store.add("", response("b"), [item])
    store.remove("", "a")
    assert store.home("", "msg_in").inputs == [item]


def test_an_update_of_what_was_deleted_keeps_nothing() -> None:
    store = ResponseStore(2**16)
    begun = response("a") | {"status": "in_progress", "output": []}
    store.add("ann", begun, [])
    assert not store.update("bob", response("a"))
    assert store.update("ann", response("a")) and store.get("ann", "a").status == "completed"
    assert store.home("ann", "msg_a")
    store.remove("ann", "a")
    assert not store.update("ann", response("a"))
