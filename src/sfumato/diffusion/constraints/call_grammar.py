"""The grammar of a reply that calls tools, in the model's own syntax for calls.

`call:NAME{key:<quote>text<quote>,n:3}` is no JSON: texts stand between special tokens and have no
escapes, and names are bare.  Arguments match the schemas that are given; those of tools without one
are free.  A reply without calls is free too, or matches a schema.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

from sfumato.diffusion.constraints.call_schema import CallRules
from sfumato.diffusion.constraints.grammar import (
    Grammar,
    check_alphabet,
    compile_grammar,
    compiled_grammar,
)
from sfumato.diffusion.constraints.grammar_source import LONGEST_SOURCE, GrammarSource
from sfumato.diffusion.constraints.grammar_tokens import GrammarTokens, llguidance
from sfumato.diffusion.constraints.schema_limits import check_schema, check_sum
from sfumato.refused import Refused


@dataclass(frozen=True)
class CallTool:
    """A tool that may be called."""

    name: str
    schema: str | None  # its parameters as a JSON schema, in JSON; None: they are free
    field: str  # what messages call the schema
    is_strict: bool = True  # False: the parameters are free where their schema is not supported


@dataclass(frozen=True)
class CallSource:
    """Which calls a reply may have."""

    tools: tuple[CallTool, ...]
    opens: int  # the special tokens around a call, and around each text in it
    closes: int
    quote: int
    required: bool = False  # the reply is calls and nothing else
    single: bool = False  # one call at most
    answer: GrammarSource | None = None  # a JSON schema of replies without calls; None: any text

    def __post_init__(self) -> None:
        strict = (tool for tool in self.tools if tool.is_strict)
        if sum(len(tool.schema or "") for tool in strict) > LONGEST_SOURCE:
            raise Refused(
                "tools",
                f"the schemas of strict tools have more than {LONGEST_SOURCE:,} characters",
                "make them smaller",
            )

    def lark(self) -> str:
        """The grammar. Raises ValueError, naming the field, for a schema that is not supported."""
        rules = CallRules(self.quote)
        calls = [self._call(tool, rules) for tool in self.tools]
        check_sum([json.loads(tool.schema) for tool in self.tools if tool.schema], "tools")
        many = "call" if self.single else "call+"
        if self.answer is not None:
            start = f"start: {many} | %json {self.answer.inline()}"
        else:
            start = f"start: {many}" if self.required else f"start: TEXT? ({many})?"
        lines = [
            start,
            f"call: <[{self.opens}]> ({' | '.join(calls)}) <[{self.closes}]>",
            f"loose: (TEXT | <[{self.quote}]>)*",
            "TEXT: /(?s:.+)/",
            *rules.lines(),
        ]
        return "\n".join(lines)

    def _call(self, tool: CallTool, rules: CallRules) -> str:
        begin = json.dumps(f"call:{tool.name}")
        if tool.schema is None:
            return f'{begin} "{{" loose'
        check_schema(json.loads(tool.schema), tool.field)
        return f"{begin} {rules.arguments(json.loads(tool.schema), tool.field)}"


def compile_calls(source: CallSource, tokens: GrammarTokens) -> Grammar:
    """Where the schema of a tool that is not strict cannot be held, a note of the grammar says so.
    Raises ValueError, naming the field of a tool's schema where it is at fault."""
    answer_notes: tuple[str, ...] = ()
    if source.answer is not None:  # first, so that an error of it names its field
        answer_notes = compile_grammar(source.answer, tokens).notes
        source = replace(source, answer=source.answer.held()[0])
    source, notes = _held(source)
    notes[:0] = answer_notes
    lenient = [tool for tool in source.tools if tool.schema is not None and not tool.is_strict]
    try:
        return replace(_compiled(source, tokens), notes=tuple(notes))
    except Refused as error:
        if not lenient:
            raise
        # Which of them is at fault only one compilation for each would say.
        notes += [_note(tool, str(error.about(tool.field))) for tool in lenient]
        tools = tuple(
            replace(tool, schema=None) if tool in lenient else tool for tool in source.tools
        )
        return replace(_compiled(replace(source, tools=tools), tokens), notes=tuple(notes))


def _compiled(source: CallSource, tokens: GrammarTokens) -> Grammar:
    """Raises ValueError."""
    for tool in source.tools:
        if tool.schema is not None:
            check_alphabet(GrammarSource("schema", tool.schema, tool.field), tokens)
    compiled = llguidance().LLMatcher.grammar_from_lark(source.lark())
    return compiled_grammar(compiled, "tools", tokens)


def _held(source: CallSource) -> tuple[CallSource, list[str]]:
    """The source with its tools' schemas as grammars can hold them, and notes about what is left
    out: all of the schema where the tool is not strict and there are no rules for it. Raises
    ValueError."""
    tools, notes, left = [], list[str](), LONGEST_SOURCE
    for tool in source.tools:
        try:
            left -= 0 if tool.is_strict else len(tool.schema or "")
            if left < 0:
                raise Refused(tool.field, "is too large")
            tool, more = _held_tool(tool, source.quote)
            notes += more
        except Refused as error:
            if tool.is_strict:
                raise
            notes.append(_note(tool, str(error.advising(""))))
            tool = replace(tool, schema=None)
        tools.append(tool)
    return replace(source, tools=tuple(tools)), notes


def _held_tool(tool: CallTool, quote: int) -> tuple[CallTool, tuple[str, ...]]:
    """Of one tool. Raises ValueError."""
    if tool.schema is None:
        return tool, ()
    held, notes = GrammarSource("schema", tool.schema, tool.field).held()
    if not tool.is_strict:  # those of strict tools are checked where their rules are made
        schema = json.loads(held.text)
        check_schema(schema, tool.field)
        CallRules(quote).arguments(schema, tool.field)
    return replace(tool, schema=held.text), notes


def _note(tool: CallTool, why: str) -> str:
    return f"{why}; the arguments of {tool.name!r} are not held to the schema"
