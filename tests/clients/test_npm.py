"""The npm packages: an agent's loop with each, streamed, objects of a schema, and pictures.

`make test-clients` installs them.
"""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.clients.conftest import ANSWER, ASKED, QUESTION, SOFT, png

FOLDER = Path(__file__).parent / "npm"
NODE = shutil.which("node")
pytestmark = [
    pytest.mark.clients,
    pytest.mark.skipif(NODE is None, reason="node is not installed"),
    pytest.mark.skipif(not (FOLDER / "node_modules").exists(), reason="run by make test-clients"),
]


def printed(script: str, *given: str) -> dict[str, Any]:
    """What a script prints."""
    assert NODE
    command = [NODE, str(FOLDER / script), *given]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    result: dict[str, Any] = json.loads(run.stdout)
    return result


PROVIDERS = ("@ai-sdk/openai", "@ai-sdk/openai-compatible")


def test_npm(url: str) -> None:
    runners = (f"@anthropic-ai/sdk: toolRunner{how}" for how in ("", ", streamed"))
    names = ("@anthropic-ai/sdk", *runners, "ollama", "openai", *PROVIDERS)
    objects = (f"{name}: {how}Object" for name in PROVIDERS for how in ("generate", "stream"))
    expected = dict.fromkeys(names, ANSWER) | dict.fromkeys(objects, "Paris")
    assert printed("loops.mjs", url, QUESTION) == expected


def test_pictures(seeing_url: str) -> None:
    made = printed("pictures.mjs", seeing_url, ASKED, base64.b64encode(png()).decode())
    streamed = [f"{name}: streamed" for name in PROVIDERS]
    refused = {
        "@anthropic-ai/sdk": ("BadRequestError", "messages[0].content[0].source.data"),
        "ollama": ("ResponseError", "messages[0].images[0]"),
        "openai: chat": ("BadRequestError", "messages[0].content[0].image_url"),
        "openai: responses": ("BadRequestError", "input[0].content[0].image_url"),
        PROVIDERS[0]: ("APICallError", "input[0].content[0].image_url"),
        PROVIDERS[1]: ("APICallError", "messages[0].content[0].image_url"),
    }
    assert made.keys() == {*refused, *streamed}
    (tokens,) = {tokens for tokens, _ in made.values()}
    assert tokens > SOFT
    for name, (kind, where) in refused.items():
        error = made[name][1]
        assert kind in error and f"{where}: the bytes are no picture" in error
