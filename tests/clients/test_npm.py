"""The npm packages: an agent's loop with each, streamed, and objects of a schema.

`make test-clients` installs them.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.clients.conftest import ANSWER, QUESTION

pytestmark = pytest.mark.clients
FOLDER = Path(__file__).parent / "npm"
NODE = shutil.which("node")


@pytest.mark.skipif(NODE is None, reason="node is not installed")
@pytest.mark.skipif(not (FOLDER / "node_modules").exists(), reason="run by make test-clients")
def test_npm(url: str) -> None:
    assert NODE
    command = [NODE, str(FOLDER / "loops.mjs"), url, QUESTION]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    providers = ("@ai-sdk/openai", "@ai-sdk/openai-compatible")
    runners = (f"@anthropic-ai/sdk: toolRunner{how}" for how in ("", ", streamed"))
    names = ("@anthropic-ai/sdk", *runners, "ollama", "openai", *providers)
    objects = (f"{name}: {how}Object" for name in providers for how in ("generate", "stream"))
    expected = dict.fromkeys(names, ANSWER) | dict.fromkeys(objects, "Paris")
    assert json.loads(run.stdout) == expected
