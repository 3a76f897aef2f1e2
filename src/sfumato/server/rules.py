"""What a body must hold to besides its schema: what a JSON schema cannot state.

A body that the API description allows is refused with a 400 for one of these and for nothing else;
the description lists them. Knows no checks: they stand where the fields are read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Rule:
    """What it says, and the messages of the 400s that it leads to."""

    says: str
    message: str  # a regular expression that these begin with

    def broken(self, error: Mapping[str, Any]) -> bool:
        """Whether it is what an error's object is about."""
        return re.match(self.message, str(error["message"]), re.DOTALL) is not None


RULES = (
    Rule(
        "Prompt and reply fit the context.",
        r"(prompt|messages|content|opening|max_tokens): .*(context|leaves none)|the request needs",
    ),
    Rule("Whole numbers have no decimal point: 8, and not 8.0.", r".*input should be a valid int"),
    Rule("Token ids are of the model's vocabulary.", r"(prompt|tokens|logit_bias): .*"),
    Rule("n times the prompts are at most 128 (`max_choices` in /props).", r"n: at most"),
    Rule(
        "n times the prompts times max_tokens times (1 + top_logprobs) is at most 1,048,576.",
        r"n, .*: come to",
    ),
    Rule("stream_options belongs to stream.", r"stream_options: only with stream"),
    Rule("top_logprobs belongs to logprobs.", r"top_logprobs: needs logprobs"),
    Rule("max_tokens and max_completion_tokens agree.", r"max_tokens, max_completion_tokens: "),
    Rule("content and prompt of /tokenize agree; one is there.", r"content(, prompt: differ|: is)"),
    Rule(
        "count, threshold, margin and entropy_bound belong to their samplers.",
        r"(count|threshold|margin|entropy_bound): .*sampler",
    ),
    Rule("soft_skip and soft_top_k do not go together.", r"soft_skip, soft_top_k: "),
    Rule("t_min is at most t_max, and both suit the sampler and the steps.", r"t_m(in|ax)"),
    Rule("canvas_length is at most the checkpoint's.", r"canvas_length: .* longer than"),
    Rule("max_steps is at most the server's setting.", r"max_steps: must be at most"),
    Rule(
        "tool_choice names one of the tools, and required has some; the vocabulary has tool calls.",
        r"tool_choice: (required needs|.* is not among|this model)",
    ),
    Rule(
        "A tool's message answers a call of the assistant's message before it, by its id or name.",
        r"messages\[\d+\]\.(role|tool_call_id|name): .*call",
    ),
    Rule(
        "Only an assistant's message is continued, one without calls, after another message, "
        "without thinking; add_generation_prompt is then not true, and otherwise not false.",
        r"(continue_final_message|add_generation_prompt): |.*continued",
    ),
    Rule("The chat template can render messages and tools.", r".*chat.template"),
    Rule("Nothing is nested deeper than 64 levels.", r".*nested (deeper|too deeply)"),
    Rule("Texts are valid Unicode.", r".*(surrogate|Unicode)"),
)


def described() -> str:
    """All of them, for the API description."""
    return "A field is wrong, unknown or not supported, or one of these rules is broken:\n" + (
        "\n".join(f"- {rule.says}" for rule in RULES)
    )
