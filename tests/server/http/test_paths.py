"""Other spellings of paths, other names of the model, other headers for the key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sfumato.api import Model
from sfumato.server.app import ServerSettings
from sfumato.server.http.middleware import canonical

USER = [{"role": "user", "content": "Who are you?"}]


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/", "/"),
        ("/health/", "/health"),
        ("/v1/models/", "/v1/models"),
        ("/chat/completions", "/v1/chat/completions"),
        ("/completions/", "/v1/completions"),
        ("/models/a/b", "/v1/models/a/b"),
        ("/responses/resp_1/cancel", "/v1/responses/resp_1/cancel"),
        ("/completion", "/completion"),
        ("/app.js", "/app.js"),
    ],
)
def test_spellings(path: str, expected: str) -> None:
    assert canonical(path) == expected


def test_routes_without_v1_and_with_a_slash(server: Any) -> None:
    for path in ("/chat/completions", "/v1/chat/completions/"):
        assert server.post(path, messages=USER, max_tokens=4, max_steps=2).json()["choices"]
    assert server.post("/completions/", prompt="a", max_tokens=4, max_steps=2).json()["choices"]
    assert server.http.get("/models").json() == server.http.get("/v1/models/").json()
    assert server.http.get("/health/").json()["status"] == "ok"
    assert server.http.get("/chat/completions").status_code == 405


def test_a_name_of_any_characters_is_a_404(server: Any) -> None:
    for name in ("a%0Ab", "%0A", "a/b", "%00"):
        answer = server.http.get(f"/v1/models/{name}")
        assert answer.status_code == 404, name
        assert answer.json()["error"]["code"] is None


def test_aliases_and_the_key(serve: Callable[..., Any], embedded: Model) -> None:
    served = serve(embedded, ServerSettings(aliases=("gpt-4o", "a/b"), api_keys=("secret",)))
    for headers in ({"X-Api-Key": "secret"}, {"Authorization": "Bearer secret"}):
        (card,) = served.http.get("/v1/models", headers=headers).json()["data"]
        assert card["aliases"] == ["gpt-4o", "a/b"]
        for name in (card["id"], *card["aliases"]):
            assert served.http.get(f"/v1/models/{name}", headers=headers).json() == card
    for headers in ({"X-Api-Key": "secre"}, {"X-Api-Key": ""}, {}):
        assert served.http.get("/v1/models", headers=headers).status_code == 401
    assert served.http.get("/health/").status_code == 200  # asks for no key, as without the slash
    with pytest.raises(ValueError, match="--alias"):
        ServerSettings(aliases=("",))
