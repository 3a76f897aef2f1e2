"""The rules for a body that a JSON schema cannot state.

A body that the API description allows is refused with a 400 for one of these and for nothing else;
the description lists them. The checks themselves are where the fields are read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Rule:
    """A sentence for the description, and the messages of the 400s that it leads to."""

    text: str
    message: str  # a regular expression that these begin with

    def broken(self, error: Mapping[str, Any]) -> bool:
        """Whether an error's object is about this rule."""
        message = str(error["message"]).removeprefix("options.")  # as Ollama's bodies name fields
        return re.match(self.message, message, re.DOTALL) is not None


RULES = (
    Rule(
        "Prompt and reply fit the context.",
        r"(prompt|messages|content|tokens|opening|max_tokens|max_output_tokens|prediction"
        r"|suffix|input_suffix|input(\.\w+)*"
        r"|parts\[\d+\][^:]*): .*(context|leaves none)|the request exceeds"
        r"|(request|input) \(\d+ tokens\) ",
    ),
    Rule(
        "Whole numbers have no decimal point: 8, and not 8.0.",
        r"[^:]*: whole numbers are written without",
    ),
    Rule(
        "Token ids are of the model's vocabulary.",
        r"prompt: must lie in 0\.\.|(input|content): token ids must lie in 0\.\."
        r"|tokens: token id \d+ is outside|logit_bias: .* is no token id",
    ),
    Rule(
        "logit_bias names tokens by id or text, and leaves one.",
        r"logit_bias: (bans every token|a token must be its id or a text)",
    ),
    Rule(
        "Where ids and texts are mixed, each part of a prompt is one of them, and no list.",
        r"(prompt|input|content)(\[\d+\])+: must be (a token id or )?a text",
    ),
    Rule(
        "An empty prompt needs a model that has a token to begin with.",
        r"(prompt|input_prefix): is empty(, and this model has no token|$)"
        r"|(input|content): a text is empty",
    ),
    Rule(
        "The arguments of all calls together hold at most 131,072 JSON values.",
        r".*all arguments together hold more",
    ),
    Rule("n times the prompts are at most 128 (`max_choices` in /props).", r"(n|prompt): at most"),
    Rule(
        "n times the prompts times max_tokens times (1 + top_logprobs) is at most 1,048,576; "
        "tokens of prompts that are scored count as those of replies.",
        r"(n|prompt), .*: come to",
    ),
    Rule(
        "A seed canvas has a token of the vocabulary for each position of the canvas; "
        "diffusion_pinned needs one, and names its positions; lengths and steps agree.",
        r"vllm_xargs\.diffusion_(seed_canvas|pinned|canvas_length|max_steps): ",
    ),
    Rule(
        "logprob_token_ids needs logprobs, and goes neither with top_k, top_p nor logit_bias.",
        r"logprob_token_ids: (needs|must lie|log probabilities)",
    ),
    Rule("A read (diffusion_read_only) is at temperature 1.", r"\w+: a read "),
    Rule(
        "The parts of a fill have 1 to 256 holes, at most 16 of them with an open length or with "
        "choices, which the vocabulary writes, and fit one canvas with the text between them; "
        "messages and prompt do not go together; what says where a reply ends is left out.",
        r"parts: (must have|at most|the holes)|messages, prompt: |\w+: a fill has the length"
        r"|parts\[\d+\]\.choices\[\d+\]: .* cannot be written",
    ),
    Rule(
        "With a suffix, the canvas has 3 positions or more, and is not given; what says where a "
        "reply ends is left out.",
        r"canvas_length: a canvas of|suffix: does not go|\w+: text before a suffix",
    ),
    Rule(
        "A prediction goes with no thinking and with no canvas that the client gives.",
        r"prediction: (says nothing|causal)|canvas, prediction: |mode: a text with holes",
    ),
    Rule(
        "A body has one schema or grammar at most; it is one that can be compiled, in 262,144 "
        "characters, of keywords that are supported, and with texts that the vocabulary writes.",
        r"(response_format|structured_outputs|guided_|json_schema|grammar|tools|text|format"
        r"|output_format|output_config)[\w.\[\]]*"
        r"(, [\w.]+)*: ",
    ),
    Rule(
        "stop, ignore_eos, the mode causal, a prediction, echo, a suffix, holes, a given canvas, "
        "named tokens and a message to be continued do not go together with a schema or grammar.",
        r"\w+: does not go together",
    ),
    Rule(
        "An item_reference names an item of a response that is kept, and previous_response_id such "
        "a response; a function_call_output answers a function_call right before it; an input is "
        "not of thoughts alone.",
        r"previous_response_id: |input: holds"
        r"|input\[\d+\]\.(id|call_id): (there is no|.* is of no)",
    ),
    Rule(
        "An input, with the items of the responses before and with what it refers to, has at most "
        "1,024 items and as many characters as a body.",
        r"input: (\d+ items|comes to)",
    ),
    Rule(
        "dimensions is at most the network's hidden size, and one answer has at most 4,194,304 "
        "numbers.",
        r"dimensions: must be at most|(input|content): [\d,]+ vectors",
    ),
    Rule("llama-server's embeddings have input or content.", r"input, content: give exactly"),
    Rule("stream_options belongs to stream.", r"stream_options: only with stream"),
    Rule("top_logprobs belongs to logprobs.", r"top_logprobs: needs logprobs"),
    Rule(
        "max_tokens agrees with max_completion_tokens and n_predict.",
        r"max_tokens, (max_completion_tokens|n_predict): ",
    ),
    Rule("content and prompt of /tokenize agree; one is there.", r"content(, prompt: differ|: is)"),
    Rule(
        "count, threshold, margin and entropy_bound belong to their samplers.",
        r"(count|threshold|margin|entropy_bound): .*sampler",
    ),
    Rule("soft_skip and soft_top_k do not go together.", r"soft_skip, soft_top_k: "),
    Rule(
        "t_min is at most t_max; of the two, what a body leaves out is the checkpoint's.",
        r"t_min, t_max: need|t_m(in|ax): must be at (most|least) t_m",
    ),
    Rule(
        "The mode causal, which echo asks for, goes with no field of canvases and denoising steps.",
        r"mode: |echo: ",
    ),
    Rule(
        "A max_tokens of 0 goes with echo or prompt_logprobs, which goes without stream.",
        r"max_tokens: 0 |prompt_logprobs: ",
    ),
    Rule("canvas_length is at most the checkpoint's.", r"canvas_length: .* longer than"),
    Rule("max_steps is at most the server's setting.", r"max_steps: must be at most"),
    Rule(
        "tool_choice names one of the tools, and required has some; the vocabulary has tool calls.",
        r"tool_choice: (required needs|.* is not among|this model|a given canvas)",
    ),
    Rule(
        "A tool's message answers a call of the assistant's message before it, by its id or name.",
        r"messages\[\d+\]\.(role|tool_call_id|name): .*call",
    ),
    Rule(
        "Only an assistant's message is continued, one without calls, after another message, "
        "without thinking; add_generation_prompt is not true together with continue_final_message, "
        "and not false where nothing is continued.",
        r"(continue_final_message|add_generation_prompt): |.*continued",
    ),
    Rule(
        "A result in Anthropic's messages answers a call of the assistant's turn before it.",
        r"messages\[\d+\]\.content(\[\d+\])?(\.\w+)*: .*call",
    ),
    Rule(
        "thinking.budget_tokens is less than max_tokens, and there where thinking is enabled.",
        r"thinking\.budget_tokens: |thinking: an answer that is continued",
    ),
    Rule("tool_choice of the type tool has a name.", r"tool_choice\.name: is missing"),
    Rule(
        "In Ollama's API, system goes neither with raw nor with suffix; format and logprobs go not "
        "with suffix; raw and suffix go without thinking; a model that is shown has a name.",
        r"(system|format|logprobs): (goes|does not go)|think: an answer|model: is missing",
    ),
    Rule("The chat template can render messages and tools.", r".*chat.template"),
    Rule(
        "Arguments of calls and tools are nested at most 64 levels deep, and the body 100.",
        r".*nested (deeper|too deeply)",
    ),
    Rule("Texts are valid Unicode.", r".*(surrogate|Unicode)"),
    Rule(
        "A body of /v1/decisions has state or input, and not both; Gemini's has x-goog-api-key.",
        r"the body must have one of three forms",
    ),
    Rule("/v1/systemone has models of the names that it says.", r"model: .* is not served here"),
    Rule("Images are not supported yet.", r".*images are not supported yet|.*are about images"),
    Rule(
        "Questions times samples times orders are at most 4,096.",
        r".*[\d,]+ questions x [\d,]+ samples",
    ),
    Rule("Numbers in a state or a description are finite.", r".*holds a number that is too"),
    Rule("State and question fit the context, and so do all of them.", r".*there is room for"),
    Rule("A question's options differ in what tells them apart.", r".*is there twice"),
    Rule("A yes/no question has instructions or a description.", r".*a yes/no question needs"),
)


def error_of(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """The error's object of an answer in any form."""
    if "error" in body:
        error: Mapping[str, Any] | str = body["error"]
        return {"message": error} if isinstance(error, str) else error
    detail = body["detail"]
    if isinstance(detail, list):
        return {"message": f"{detail[0]['loc'][-1]}: {detail[0]['msg']}"}
    return {"message": detail["message"]}


def described() -> str:
    """All of them, for the API description."""
    return "A field is wrong, unknown or not supported, or one of these rules is broken:\n" + (
        "\n".join(f"- {rule.text}" for rule in RULES)
    )
