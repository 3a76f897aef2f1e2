"""The fields that say what a reply has to match: OpenAI's, vLLM's and llama-server's.

All routes that generate take all of them, and a body has one at most.  What a grammar may hold is
checked where it is compiled.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, WithJsonSchema

from sfumato.diffusion.constraints.grammar_source import LONGEST_SOURCE, MOST_CHOICES
from sfumato.server.schemas.body import Body, First
from sfumato.server.schemas.json_schemas import NULL, Schema, either
from sfumato.server.schemas.neutral import Ignored, Only

_OBJECT: Schema = {"type": "object"}
_SCHEMA = either(_OBJECT, {"type": "boolean"})
JsonSchema = Annotated[dict[str, Any] | bool, WithJsonSchema(_SCHEMA)]
SchemaOrText = Annotated[
    dict[str, Any] | bool | str | None,
    WithJsonSchema(either(*_SCHEMA["anyOf"], {"type": "string"}, NULL)),
]
Grammar = Annotated[str, Field(max_length=LONGEST_SOURCE)]
Choices = Annotated[list[str], First, Field(min_length=1, max_length=MOST_CHOICES)]
_WHITE_SPACE = "cannot be set: white space is bounded here"


class NamedSchema(Body):
    """OpenAI's `json_schema`."""

    name: str | None = Field(None, description="Accepted and ignored.")
    description: Ignored = None
    schema_: JsonSchema | None = Field(None, alias="schema", description="None: any object.")
    strict: bool | None = Field(None, description="The schema is held whether or not it is true.")


class ResponseFormat(Body):
    """What the reply has to be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None
    schema_: JsonSchema | None = Field(
        None, alias="schema", description="Of a json_object, as llama-server has it."
    )


class StructuredOutputs(Body):
    """vLLM's; one of them."""

    json_: SchemaOrText = Field(None, alias="json", description="A JSON schema, or its text.")
    regex: Grammar | None = None
    choice: Choices | None = None
    grammar: Grammar | None = Field(None, description="GBNF or Lark.")
    json_object: bool | None = None
    disable_any_whitespace: Annotated[Any, Only(False, why=_WHITE_SPACE)] = None
    disable_additional_properties: Annotated[
        Any, Only(False, why="is not supported; set additionalProperties in the schema")
    ] = None
    disable_fallback: Ignored = None
    whitespace_pattern: Annotated[Any, Only(why=_WHITE_SPACE)] = None
    structural_tag: Annotated[Any, Only(why="is not supported; use tools with strict")] = None


class Grammars(BaseModel):
    """Fields of every body that asks for a reply."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: SchemaOrText = Field(None, description="The same as structured_outputs.json.")
    guided_regex: Grammar | None = None
    guided_choice: Choices | None = None
    guided_grammar: Grammar | None = None
    guided_decoding_backend: Ignored = None
    guided_whitespace_pattern: Annotated[Any, Only(why=_WHITE_SPACE)] = None
    json_schema: JsonSchema | None = Field(None, description="As llama-server has it.")
    grammar: Grammar | None = Field(None, description="GBNF or Lark; an empty one is none.")
