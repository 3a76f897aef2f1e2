"""`sfumato mcp`: a model as tools of an editor or an agent, by the Model Context Protocol on
standard input and output.

The protocol's official SDK speaks it, and keeps all else off standard output. A tool's call is a
request of one engine; a call that its client cancels frees the engine's slot.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict

from sfumato import __version__
from sfumato.cli import terminal
from sfumato.decisions.question_file import question_of
from sfumato.decisions.schema import Schema, TypedAnswer, schema_of, shown

if TYPE_CHECKING:
    from mcp.server.mcpserver import MCPServer

    from sfumato.engine import Engine
    from sfumato.engine.events import Decided, Handle
    from sfumato.text_side import Reply

T = TypeVar("T")
SLOTS = 2  # calls that run at a time
_DIGITS = 6


class Asked(BaseModel):
    """A question of `decide`, with the keys of a table in a TOML file of questions."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["bool", "choice", "score"]
    instructions: str = ""
    options: list[str] | dict[str, str] | None = None
    levels: list[str] | None = None
    yes: str | None = None
    no: str | None = None


def main(args: argparse.Namespace) -> int:
    """Serve until standard input ends. Raises ValueError or OSError for a model that cannot be
    loaded, and where the SDK is missing."""
    try:
        import mcp.server.mcpserver  # noqa: F401
    except ImportError:
        raise ValueError(
            "`sfumato mcp` needs the package mcp, which is not installed; "
            f"{sys.executable} -m pip install 'mcp>=2,<3'"
        ) from None
    with terminal.loading():
        from sfumato.cli import generation
        from sfumato.engine import EngineConfig, own_engine
    model = generation.load(args)
    context = min(EngineConfig.context, model.config.context_length)
    layout = EngineConfig(SLOTS, context, queue=64)
    engine = own_engine(model, layout, "free some memory, or take a smaller model").start()
    try:
        server(engine, generation.toy(model)).run()
    finally:
        engine.close()
    return 0


def server(engine: Engine, note: str | None = None) -> MCPServer[Any]:
    """The tools of an engine. note: what clients read of the model."""
    from mcp.server.mcpserver import MCPServer

    tools, served = Tools(engine), MCPServer[Any]("sfumato", version=__version__, instructions=note)
    for tool in (tools.decide, tools.fill, tools.generate):
        served.add_tool(tool)
    return served


class Tools:
    """What clients may call; they read the docstrings."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def generate(
        self,
        prompt: str,
        system: str = "",
        max_tokens: int = 256,
        seed: int = 0,
        schema: dict[str, Any] | None = None,
    ) -> str:
        """Answers a prompt. schema: a JSON schema that the answer matches, as JSON. The same seed
        gives the same answer."""
        from sfumato.diffusion.constraints.grammar import schema_source
        from sfumato.engine import Request

        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": prompt})

        def submit() -> Handle[Reply]:
            grammar = None if schema is None else schema_source(schema)
            return self._engine.submit(
                Request(messages=messages, max_tokens=max_tokens, seed=seed, grammar=grammar)
            )

        return (await _result(submit)).text

    async def fill(self, text: str, seed: int = 0) -> str:
        """Fills the holes of a text and gives the whole text, whose other parts stay: {{6}} is a
        hole of 6 tokens, {{<=8}} of up to 8, and {{a|b}} becomes a or b."""
        from sfumato.cli.fill import holes_of
        from sfumato.engine import Request

        def submit() -> Handle[Reply]:
            ids = self._engine.model.fills.no_prompt
            return self._engine.submit(Request(ids=ids, parts=holes_of(text), seed=seed))

        filled = (await _result(submit)).filled
        assert filled is not None  # of a request with parts that was not cancelled
        return filled.text

    async def decide(
        self, state: str, questions: dict[str, Asked], seed: int = 0
    ) -> dict[str, Any]:
        """Answers typed questions about a text with probabilities, in one step and without writing:
        {"urgent": {"type": "bool", "instructions": "Is a reply needed today?"}, "team": {"type":
        "choice", "options": ["billing", "tech"]}, "anger": {"type": "score", "levels": ["calm",
        "angry"]}}. A low label_mass says that the model hardly takes the options for answers."""
        from sfumato.engine.request import DecisionRequest

        def submit() -> Handle[Decided]:
            return self._engine.decide(DecisionRequest(state, schema().questions, seed=seed))

        @cache
        def schema() -> Schema[dict[str, Any]]:
            tables = {name: each.model_dump(exclude_none=True) for name, each in questions.items()}
            return schema_of({name: question_of(table) for name, table in tables.items()})

        decided = await _result(submit)
        decision = schema().decision(decided.answers, decided.usage)
        return {name: _plain(answer) for name, answer in decision.items()}


def _plain(answer: TypedAnswer) -> dict[str, Any]:
    """An answer as plain values."""
    shares = {shown(v): round(p, _DIGITS) for v, p in answer.probabilities.items()}
    return {
        "answer": answer.value,
        "probabilities": shares,
        "confidence": round(answer.confidence, _DIGITS),
        "label_mass": answer.label_mass,
    }


async def _result(submit: Callable[[], Handle[T]]) -> T:
    """The result of what `submit` submits, which is cancelled where its caller is. Raises
    ToolError, with the engine's words."""
    from anyio.to_thread import run_sync
    from mcp.server.mcpserver.exceptions import ToolError

    from sfumato.engine.events import RequestFailed

    try:
        handle = submit()
        try:
            return await run_sync(handle.result, abandon_on_cancel=True)
        finally:
            handle.cancel()
    except (ValueError, RequestFailed) as error:
        raise ToolError(str(error)) from error
