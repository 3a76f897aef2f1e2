"""Who may ask, from where, how much; and what an answer tells of the machine."""

from __future__ import annotations

import base64
import hmac
import socket
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest

from sfumato.api import Model
from sfumato.engine import Engine, EngineConfig
from sfumato.server.app import ServerSettings, create_app
from sfumato.server.http.errors import without_paths
from sfumato.server.models import Models

KEY = "s3cret-key"
ORIGIN = "https://chat.example:8443"
Client = Callable[..., httpx.AsyncClient]


@pytest.fixture(scope="module")
def engine(embedded: Model) -> Iterator[Engine]:
    running = Engine(embedded, EngineConfig(slots=1, context=256)).start()
    yield running
    running.close()


@pytest.fixture
def ask(engine: Engine) -> Callable[..., httpx.Response]:
    """ask(settings, method, path, …) of an app without a socket."""
    from fastapi.testclient import TestClient

    def call(settings: ServerSettings, method: str, path: str, **how: Any) -> httpx.Response:
        host = how.pop("host", "127.0.0.1")
        with TestClient(
            create_app(Models("sfumato", engine), settings), base_url=f"http://{host}"
        ) as client:
            response: Any = client.request(method, path, **how)
            return response

    return call


GETS = (
    "/v1/models",
    "/props",
    "/slots",
    "/state",
    "/memory",
    "/metrics",
    "/docs",
    "/openapi.json",
)
POSTS = (
    *("/v1/chat/completions", "/v1/completions", "/completion"),
    *("/tokenize", "/detokenize", "/apply-template", "/nowhere"),
)


@pytest.mark.parametrize(
    ("method", "path"), [*(("GET", path) for path in GETS), *(("POST", path) for path in POSTS)]
)
def test_every_route_but_health_asks_for_the_key(ask: Any, method: str, path: str) -> None:
    settings = ServerSettings(api_keys=(KEY,))
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": KEY}):
        answer = ask(settings, method, path, headers=headers)
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "invalid_api_key"
        assert answer.headers["www-authenticate"]
    right = ask(settings, method, path, headers={"Authorization": f"Bearer {KEY}"})
    assert right.status_code != 401


@pytest.mark.parametrize("path", ["/health", "/v1/health", "/readyz", "/livez"])
def test_health_asks_for_none(ask: Any, path: str) -> None:
    answer = ask(ServerSettings(api_keys=(KEY,)), "GET", path)
    assert (answer.status_code, answer.json()["status"]) == (200, "ok")


def test_the_openai_client_with_the_right_and_a_wrong_key(
    serve: Callable[..., Any], embedded: Model
) -> None:
    served = serve(embedded, ServerSettings(api_keys=(KEY,)))
    assert served.client(KEY).models.list().data
    with pytest.raises(openai.AuthenticationError, match="API key"):
        served.client("wrong").models.list()


def test_a_browser_is_asked_for_a_password_on_the_reference_alone(ask: Any) -> None:
    settings = ServerSettings(api_keys=(KEY,))
    assert ask(settings, "GET", "/docs").headers["www-authenticate"].startswith("Basic")
    assert ask(settings, "GET", "/v1/models").headers["www-authenticate"] == "Bearer"
    login = base64.b64encode(f"me:{KEY}".encode()).decode()
    assert ask(settings, "GET", "/docs", headers={"Authorization": f"Basic {login}"}).is_success
    broken = ask(settings, "GET", "/docs", headers={"Authorization": "Basic =="})
    assert broken.status_code == 401


def test_the_files_of_the_page_ask_for_no_key_and_nothing_beside_them_is_open(ask: Any) -> None:
    settings = ServerSettings(api_keys=(KEY,))
    for path in ("/", "/index.html", "/main.js", "/decide/view.js", "/replay.html"):
        assert ask(settings, "GET", path).is_success, path
        assert ask(settings, "POST", path).status_code == 401, path
    beside = ("/app.py", "/../app.py", "/%2e%2e/app.py", "/page/../app.py", "/decide")
    for path in (*beside, "/none.js", "/main.js/x", "/main.js%00"):
        assert ask(settings, "GET", path).status_code == 401, path
    without_page = ServerSettings(api_keys=(KEY,), page=False)
    for path in ("/", "/main.js"):
        assert ask(without_page, "GET", path).status_code == 401, path


def test_keys_are_compared_in_constant_time(ask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    compare = hmac.compare_digest

    def watched(a: bytes, b: bytes) -> bool:
        seen.append((a, b))
        return compare(a, b)

    monkeypatch.setattr("sfumato.server.http.middleware.hmac.compare_digest", watched)
    ask(
        ServerSettings(api_keys=(KEY,)),
        "GET",
        "/v1/models",
        headers=[(b"Authorization", "Bearer ü".encode())],
    )
    absent = (b"", KEY.encode())  # X-Api-Key and X-Goog-Api-Key
    assert seen == [("ü".encode(), KEY.encode()), absent, absent]


def test_cors_is_for_named_origins_only(ask: Any) -> None:
    asking = {"Origin": ORIGIN, "Access-Control-Request-Method": "POST"}
    named = ServerSettings(cors_origins=(ORIGIN,), api_keys=(KEY,))
    preflight = ask(named, "OPTIONS", "/v1/chat/completions", headers=asking)
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == ORIGIN
    real = {"Origin": ORIGIN, "Authorization": f"Bearer {KEY}"}
    answer = ask(named, "GET", "/v1/models", headers=real)
    assert answer.headers["access-control-allow-origin"] == ORIGIN
    for settings in (ServerSettings(), ServerSettings(cors_origins=("https://other.example",))):
        answer = ask(settings, "GET", "/v1/models", headers={"Origin": ORIGIN})
        assert answer.status_code == 403
        assert "access-control-allow-origin" not in answer.headers


def test_a_page_elsewhere_cannot_send_a_form(ask: Any) -> None:
    """Browsers send such requests without asking first."""
    headers = {"Origin": "https://evil.example", "Content-Type": "text/plain"}
    body = '{"messages": [{"role": "user", "content": "Hi"}]}'
    answer = ask(ServerSettings(), "POST", "/v1/chat/completions", headers=headers, content=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "origin_refused")
    own = {"Origin": "http://127.0.0.1"}
    assert ask(ServerSettings(), "GET", "/v1/models", headers=own).status_code == 200


def test_a_name_that_was_made_to_point_here_is_refused(ask: Any) -> None:
    local = ServerSettings(hosts=("localhost",))
    assert ask(local, "GET", "/v1/models", host="evil.example").status_code == 403
    for host in ("localhost:8080", "127.0.0.1:8080", "192.168.1.2", "[::1]:8080"):
        assert ask(local, "GET", "/v1/models", host=host).status_code == 200
    proxied = ServerSettings(hosts=("localhost",), cors_origins=("https://chat.example",))
    assert ask(proxied, "GET", "/v1/models", host="chat.example").status_code == 200


@pytest.mark.parametrize("origin", ["*", "chat.example", "https://chat.example/page", "ftp://x"])
def test_an_origin_is_scheme_host_and_port(origin: str) -> None:
    with pytest.raises(ValueError, match="--cors-origin"):
        ServerSettings(cors_origins=(origin,))


@pytest.mark.parametrize("key", ["", " ", "ключ"])
def test_a_key_is_ascii_and_not_empty(key: str) -> None:
    with pytest.raises(ValueError, match="--api-key"):
        ServerSettings(api_keys=(key,))


def test_a_body_over_the_limit(ask: Any) -> None:
    settings = ServerSettings(max_body=1000)
    fits = {"content": "x" * 900}
    assert ask(settings, "POST", "/tokenize", json=fits).status_code == 200
    big = {"content": "x" * 1000}
    answer = ask(settings, "POST", "/tokenize", json=big)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")


def test_a_body_that_does_not_say_how_long_it_is(
    serve: Callable[..., Any], embedded: Model
) -> None:
    served = serve(embedded, ServerSettings(max_body=100_000))
    sent = 0

    def parts() -> Iterator[bytes]:
        nonlocal sent
        for _ in range(1000):
            sent += 10_000
            yield b"x" * 10_000

    try:
        answer = served.http.post("/tokenize", content=parts())
    except httpx.WriteError:  # the server has hung up on a client that goes on
        pass
    else:
        assert answer.status_code == 413
    assert served.http.get("/health").status_code == 200


def test_too_many_messages(ask: Any) -> None:
    messages = [{"role": "user", "content": "Hi"}] * 5
    settings = ServerSettings(max_messages=4)
    answer = ask(settings, "POST", "/v1/chat/completions", json={"messages": messages})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "messages")
    assert "--max-messages" in error["message"]


def test_headers_of_every_answer(ask: Any) -> None:
    settings = ServerSettings(api_keys=(KEY,))
    for path, key in (("/", KEY), ("/health", ""), ("/v1/models", "wrong"), ("/nowhere", KEY)):
        headers = ask(settings, "GET", path, headers={"Authorization": f"Bearer {key}"}).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy and "script-src 'self'" in policy
        assert "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert "server" not in headers


def test_files_outside_of_the_page_are_not_served(ask: Any) -> None:
    for path in ("/../app.py", "/%2e%2e/app.py", "/..%2fapp.py", "//etc/passwd"):
        assert ask(ServerSettings(), "GET", path).status_code == 404


def test_errors_tell_no_paths_and_no_traces(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fastapi.testclient import TestClient

    def fails(*args: object) -> None:
        raise RuntimeError("/srv/models/secret.gguf is broken")

    monkeypatch.setattr(engine, "submit", fails)
    app = create_app(Models("sfumato", engine))
    client = TestClient(app, raise_server_exceptions=False)
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "server_error"
    for part in ("secret", "/srv", "Traceback", "RuntimeError"):
        assert part not in answer.text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/srv/models/x/chat_template.jinja: fails", "chat_template.jinja: fails"),
        ("see https://example.com/a/b and 1/2", "see https://example.com/a/b and 1/2"),
        ("'/srv/me/x.gguf'", "'x.gguf'"),
    ],
)
def test_paths_are_cut(text: str, shown: str) -> None:
    assert without_paths(text) == shown


def test_a_broken_request_line_gets_a_400(server: Any) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as raw:
        raw.sendall(b"NONSENSE\r\n\r\n")
        assert b" 400 " in raw.recv(1000)


@pytest.mark.parametrize("start", ["POST /tokenize", "GET /health", "OPTIONS /tokenize"])
def test_a_request_of_two_lengths_gets_a_400_and_its_connection_is_closed(
    serve: Callable[..., Any], embedded: Model, start: str
) -> None:
    """What follows may be a request that a proxy mistook for the first one's body."""
    page = "https://page.example"
    url = serve(embedded, ServerSettings(cors_origins=(page,))).url.removeprefix("http://")
    host, port = url.split(":")
    head = f"{start} HTTP/1.1\r\nHost: {url}\r\nOrigin: {page}\r\n"
    head += "Access-Control-Request-Method: POST\r\n"
    chunk = '10\r\n{"content": "a"}\r\n0\r\n\r\n'
    hidden = f"GET /health HTTP/1.1\r\nHost: {url}\r\n\r\n"
    lengths = ["Content-Length: 4\r\n", "Transfer-Encoding: chunked\r\n"]
    for both in (lengths, lengths[::-1]):
        with socket.create_connection((host, int(port)), timeout=60) as raw:
            raw.sendall(f"{head}{''.join(both)}\r\n{chunk}{hidden}".encode())
            with raw.makefile("rb") as answers:
                answer = answers.read()  # to the end of the connection
        assert answer.startswith(b"HTTP/1.1 400 ") and answer.count(b"HTTP/1.1 ") == 1


@pytest.mark.parametrize(("header", "value"), [("Host", "["), ("Origin", "http://[")])
def test_what_is_no_address_is_refused(ask: Any, header: str, value: str) -> None:
    for settings in (ServerSettings(), ServerSettings(hosts=("localhost",))):
        assert ask(settings, "GET", "/v1/models", headers={header: value}).status_code == 403


@pytest.mark.parametrize("origin", ["http://[", "https://[::1", "chat.example"])
def test_an_origin_that_is_none_names_its_option(origin: str) -> None:
    with pytest.raises(ValueError, match="--cors-origin"):
        ServerSettings(cors_origins=(origin,))


@pytest.mark.parametrize("key", ["", " ", "a ", "\na", "a\tb", "a\x00", "ü"])
def test_a_key_that_no_header_carries_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match="--api-key"):
        ServerSettings(api_keys=(key,))


@pytest.mark.parametrize(
    "field", ["max_body", "max_values", "max_messages", "max_choices", "max_tokens"]
)
def test_limits_leave_something(field: str) -> None:
    with pytest.raises(ValueError, match=f"--{field.replace('_', '-')}: "):
        ServerSettings(**{field: 0})


def test_several_keys_and_models_without_one(ask: Any) -> None:
    settings = ServerSettings(api_keys=("one", "two"), public_models=True)
    for key in ("one", "two"):
        headers = {"Authorization": f"Bearer {key}"}
        assert ask(settings, "GET", "/props", headers=headers).status_code == 200
    assert ask(settings, "GET", "/props", headers={"X-Api-Key": "three"}).status_code == 401
    assert ask(settings, "GET", "/props").status_code == 401
    for path in ("/v1/models", "/models"):
        assert ask(settings, "GET", path).status_code == 200
    assert ask(settings, "POST", "/v1/models").status_code == 405
    with pytest.raises(ValueError, match="at most 1024 keys"):
        ServerSettings(api_keys=tuple(map(str, range(1025))))
