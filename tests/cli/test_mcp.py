"""`sfumato mcp`, with the protocol's own client."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp import StdioServerParameters
from mcp.client import Client
from mcp.client.stdio import stdio_client

import sfumato
from sfumato.cli.mcp import server

SRC = Path(sfumato.__file__).parents[1]
QUESTIONS = {
    "glad": {"type": "bool", "instructions": "Is the customer glad?"},
    "team": {"type": "choice", "options": ["billing", "tech"]},
}


@pytest.fixture(scope="module")
def model() -> sfumato.Model:
    return sfumato.load()


@pytest.fixture
def engine(model: sfumato.Model) -> Iterator[sfumato.Engine]:
    """An engine without a thread."""
    engine = sfumato.Engine(model, sfumato.EngineConfig(1, 1024))
    yield engine
    engine.close()


def test_a_program_over_pipes() -> None:
    """Standard output has the protocol alone: the client reads every line of it."""
    environment = {"PYTHONPATH": str(SRC), "PATH": os.environ["PATH"]}
    program = StdioServerParameters(
        command=sys.executable, args=["-m", "sfumato", "mcp", "-v"], env=environment
    )

    async def talk() -> None:
        async with Client(stdio_client(program)) as client:
            tools = {tool.name: tool for tool in (await client.list_tools()).tools}
            assert tools.keys() == {"generate", "fill", "decide"}
            assert all(tool.description for tool in tools.values())
            done = await client.call_tool("generate", {"prompt": "What is the capital of France?"})
            assert done.content[0].text == "The capital is Paris."

    anyio.run(talk)


def test_tools_give_what_the_library_gives(model: sfumato.Model, engine: sfumato.Engine) -> None:
    schema = {
        "type": "object",
        "properties": {"capital": {"type": "string"}},
        "required": ["capital"],
        "additionalProperties": False,
    }
    calls: list[tuple[str, dict[str, Any], str]] = [
        ("generate", {"prompt": "What is the capital of France? As JSON.", "schema": schema}, ""),
        ("fill", {"text": "The capital of France is {{5}}."}, ""),
        ("decide", {"state": "Charged twice.", "questions": QUESTIONS}, ""),
        ("fill", {"text": "no hole"}, "parts: "),
        ("fill", {"text": "{{0}}"}, "{{0}}: "),
        ("generate", {"prompt": "Hi", "max_tokens": 0}, "max_tokens: "),
        ("generate", {"prompt": "Hi", "schema": {"type": "none"}}, "schema: "),
        (
            "decide",
            {"state": "x", "questions": {"a": {"type": "bool", "levels": ["b"]}}},
            "unknown",
        ),
        ("decide", {"state": "x", "questions": {}}, "questions: "),
    ]
    done = []

    async def talk() -> None:
        async with Client(server(engine.start(), "a note")) as client:
            assert client.instructions == "a note"
            for name, arguments, _ in calls:
                done.append(await client.call_tool(name, arguments))

    anyio.run(talk)
    for result, (name, _, error) in zip(done, calls, strict=True):
        assert result.is_error == bool(error), (name, result)
        assert error in result.content[0].text
    assert done[0].content[0].text == '{"capital": "Paris"}'
    assert done[1].content[0].text.startswith("The capital of France is Paris")
    decision = model.decide("Charged twice.", {"glad": bool})
    answers = done[2].structured_content
    assert answers["glad"]["answer"] is decision["glad"].value
    assert answers["team"]["probabilities"].keys() == {"billing", "tech"}


def test_a_cancelled_call_frees_the_engine(engine: sfumato.Engine) -> None:
    """The one slot serves the next call."""

    async def talk() -> None:
        async with Client(server(engine)) as client:
            with anyio.move_on_after(0.5):  # nothing steps the engine: the call waits
                await client.call_tool("generate", {"prompt": "Who are you?"})
            while engine.step():
                pass
            assert engine.state().totals.requests["cancelled"] == 1
            engine.start()
            done = await client.call_tool("generate", {"prompt": "What is the capital of Peru?"})
            assert done.content[0].text == "The capital is Lima."

    anyio.run(talk)


def test_without_the_package_one_line_says_what_to_install(
    cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mcp.server.mcpserver", None)
    done = cli("mcp")
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert "-m pip install 'mcp>=2,<3'" in done.err


def test_it_ends_with_its_input() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "sfumato", "mcp"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=250,
        env=os.environ | {"PYTHONPATH": str(SRC)},
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
