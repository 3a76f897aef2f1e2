from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest
from tests.support.fake_openai_server import DONE, event, scripted

from sfumato.bench import remote
from sfumato.bench.remote import Endpoint, ServerError


def chunks(url: str, **options: Any) -> list[dict[str, Any]]:
    return list(Endpoint(url, **options).stream_chat({"model": "painter"}))


def says(*parts: str | float) -> Any:
    def script(body: dict[str, Any]) -> Iterator[str | float]:
        yield from parts

    return script


def test_events_in_every_lawful_form() -> None:
    parts = (
        ": keep-alive\n\n",
        'data: {"a": 1}\n\n',
        'event: message\r\ndata:{"a": 2}\r\nid: 7\r\n\r\n',
        'data: {"a":\ndata: 3}\n\n',
        'data: {"a"',
        ': 4, "b": "ä"}\n\n',
        DONE,
        'data: {"a": "never read"}\n\n',
    )
    with scripted(says(*parts)) as server:
        received = chunks(server.url, api_key="secret")
    assert received == [{"a": 1}, {"a": 2}, {"a": 3}, {"a": 4, "b": "ä"}]
    assert server.keys == ["Bearer secret"]


def test_a_stream_may_lack_its_end() -> None:
    with scripted(says('data: {"a": 1}\n\ndata: {"a": 2}')) as server:
        assert chunks(server.url) == [{"a": 1}, {"a": 2}]
    assert server.keys == [None]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (("data: {\n\n",), "which is no chunk"),
        (("data: []\n\n",), "which is no chunk"),
        ((f"data: {'[' * 100_000}\n\n",), "which is no chunk"),
        ((event(error={"message": "out of memory"}),), "out of memory"),
        ((event(error="busy"),), "busy"),
    ],
)
def test_bad_chunks(parts: tuple[str, ...], message: str) -> None:
    with scripted(says(*parts)) as server, pytest.raises(ServerError, match=message):
        chunks(server.url)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ('{"error": {"message": "no such model"}}', "HTTP 404: no such model"),
        ('{"message": "no such model"}', "HTTP 404: no such model"),
        ("<html>\nnot\nhere</html>", "HTTP 404: <html> not here</html>"),
        ("", r"HTTP 404$"),
    ],
)
def test_a_refusal_is_told_with_its_reason(answer: str, message: str) -> None:
    parts = (answer,) if answer else ()
    with scripted(says(*parts), status=404) as server, pytest.raises(ServerError, match=message):
        chunks(server.url)


def test_an_answer_in_one_piece_is_no_stream() -> None:
    with (
        scripted(says('{"choices": []}'), kind="application/json") as server,
        pytest.raises(ServerError, match="answers with application/json, not with a stream"),
    ):
        chunks(server.url)


def test_a_line_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_LONGEST_LINE", 1000)
    with (
        scripted(says("data: " + "x" * 2000)) as server,
        pytest.raises(ServerError, match="more than"),
    ):
        chunks(server.url)


def test_a_silent_server() -> None:
    with scripted(says(0.5)) as server, pytest.raises(ServerError, match="timed out"):
        chunks(server.url, timeout_s=0.1)


def test_nobody_there() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
    with pytest.raises(ServerError, match=f"{url}/chat/completions: .*refused"):
        chunks(url)


def test_models() -> None:
    with scripted(says()) as server:
        assert Endpoint(server.url).models() == ["painter"]
        with pytest.raises(ServerError, match="lists no models; name one with -m"):
            Endpoint(server.url + "/other").models()


def test_models_may_be_nested_too_deeply() -> None:
    with (
        scripted(says(), models='{"data": ' + "[" * 100_000) as server,
        pytest.raises(ServerError, match="lists no models"),
    ):
        Endpoint(server.url).models()


def test_an_error_cannot_control_a_terminal() -> None:
    failure = event(error={"message": "\x1b]0;owned\x07 \x9b2J\u202e \ud800 two\nlines: ä 猫"})
    with scripted(says(failure)) as server, pytest.raises(ServerError) as raised:
        chunks(server.url)
    assert (
        str(raised.value)
        == f"{server.url}: \ufffd]0;owned\ufffd \ufffd2J\ufffd \ufffd two lines: ä 猫"
    )


@pytest.mark.parametrize(
    "url", ["localhost:8000/v1", "ftp://a/v1", "http://", "http://a:b/v1", "http://a/v1?x", "http://me:secret@a/v1"]
)  # fmt: skip
def test_bad_urls(url: str) -> None:
    with pytest.raises(ValueError, match="is not like http://localhost:8000/v1"):
        Endpoint(url)


def test_the_key_is_not_shown() -> None:
    assert "secret" not in repr(Endpoint("http://a/v1", "secret"))
