"""Fields that are refused unless they ask for nothing, and fields that are ignored.

`Neutral` is the one table of such fields outside of OpenAI's API: clients of vLLM and of
llama-server send them to every route that generates. Knows no other field.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, Field

Ignored = Annotated[Any, Field(description="Accepted and ignored.")]
AtTheEnd = Annotated[Any, Field(description="Accepted and ignored: the last piece has them.")]


class Only(AfterValidator):
    """Null and the `neutral` values pass; anything else is refused with `why`."""

    def __init__(self, *neutral: Any, why: str) -> None:
        values = (None, *neutral)

        def check(value: Any) -> Any:
            for good in values:
                if value == good and isinstance(value, bool) == isinstance(good, bool):
                    return value
            raise ValueError(why)

        super().__init__(check)
        shown = " or ".join(json.dumps(value) for value in neutral) or "null"
        schema = {"enum": list(values), "description": f"Refused unless {shown}: {why}."}
        object.__setattr__(self, "schema", schema)  # an AfterValidator is frozen

    def __get_pydantic_json_schema__(self, core: Any, handler: Any) -> dict[str, Any]:
        schema: dict[str, Any] = self.__dict__["schema"]
        return schema


_TOP_P = "is not supported; use top_p"
_CANVAS = "is a field of /v1/completions and /v1/chat/completions"
_PENALTY = "penalties are not supported: the tokens of a canvas are drawn together"


class Neutral(BaseModel):
    """Fields that clients send to every route that generates, at values that ask for nothing."""

    # vLLM's
    min_p: Annotated[Any, Only(0, why=_TOP_P)] = None
    repetition_penalty: Annotated[Any, Only(1, why=_PENALTY)] = None
    length_penalty: Annotated[Any, Only(1, why="there is no beam search here")] = None
    use_beam_search: Annotated[Any, Only(False, why="there is no beam search here")] = None
    best_of: Annotated[Any, Only(1, why="is not supported; ask for n replies and choose")] = None
    skip_special_tokens: Annotated[
        Any, Only(True, why="markers are never part of a reply's text")
    ] = None
    frequency_penalty: Annotated[Any, Only(0, why=_PENALTY)] = None
    presence_penalty: Annotated[Any, Only(0, why=_PENALTY)] = None
    vllm_xargs: Annotated[Any, Only({}, why=_CANVAS)] = None
    logprob_token_ids: Annotated[Any, Only([], why=_CANVAS)] = None
    return_tokens_as_token_ids: Annotated[Any, Only(False, why=_CANVAS)] = None
    prompt_logprobs: Annotated[Any, Only(why="is a field of /v1/completions")] = None
    # llama-server's
    cache_prompt: Ignored = None
    id_slot: Ignored = None
    timings_per_token: AtTheEnd = None
    return_progress: bool | None = Field(
        None,
        description="Send how far the prompt is encoded: streams of chats, responses, /completion.",
    )
