"""Which rule of the API description an error's message is about."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from sfumato.server.openapi import RULES

PATTERNS = (
    # Prompt and reply fit the context.
    r"(prompt|messages|content|tokens|opening|max_tokens|max_output_tokens|prediction"
    r"|suffix|input_suffix|input(\.\w+)*"
    r"|parts\[\d+\][^:]*): .*(context|leaves none)|the request exceeds"
    r"|(request|input) \(\d+ tokens\) ",
    # Whole numbers have no decimal point: 8, and not 8.0.
    r"[^:]*: whole numbers are written without",
    # Token ids are of the model's vocabulary.
    r"prompt: must lie in 0\.\.|(input|content): token ids must lie in 0\.\."
    r"|tokens: token id \d+ is outside|logit_bias: .* is no token id",
    # logit_bias names tokens by id or text, and leaves one.
    r"logit_bias: (bans every token|a token must be its id or a text)",
    # Where ids and texts are mixed, each part of a prompt is one of them, and no list.
    r"(prompt|input|content)(\[\d+\])+: must be (a token id or )?a text",
    # An empty prompt needs a model that has a token to begin with.
    r"(prompt|input_prefix): is empty(, and this model has no token|$)"
    r"|(input|content): a text is empty",
    # The arguments of all calls together hold at most 131,072 JSON values.
    r".*all arguments together hold more",
    # n times the prompts are at most 128 (`max_choices` in /props).
    r"(n|prompt): at most",
    # n times the prompts times max_tokens times (1 + top_logprobs) is at most 1,048,576; …
    r"(n|prompt), .*: come to",
    # A seed canvas has a token of the vocabulary for each position of the canvas; …
    r"vllm_xargs\.diffusion_(seed_canvas|pinned|canvas_length|max_steps): ",
    # logprob_token_ids needs logprobs, and goes neither with top_k, top_p nor logit_bias.
    r"logprob_token_ids: (needs|must lie|log probabilities)",
    # A read (diffusion_read_only) is at temperature 1.
    r"\w+: a read ",
    # The parts of a fill have 1 to 256 holes, at most 16 of them with an open length or with …
    r"parts: (must have|at most|the holes)|messages, prompt: |\w+: a fill has the length"
    r"|parts\[\d+\]\.choices\[\d+\]: .* cannot be written",
    # With a suffix, the canvas has 3 positions or more, and is not given; what says where a …
    r"canvas_length: a canvas of|suffix: does not go|\w+: text before a suffix",
    # A prediction goes with no thinking and with no canvas that the client gives.
    r"prediction: (says nothing|causal)|canvas, prediction: |mode: a text with holes",
    # A body has one schema or grammar at most; it is one that can be compiled, in 262,144 …
    r"(response_format|structured_outputs|guided_|json_schema|grammar|tools|text|format"
    r"|output_format|output_config)[\w.\[\]]*"
    r"(, [\w.]+)*: ",
    # stop, ignore_eos, the mode causal, a prediction, echo, a suffix, holes, a given canvas, …
    r"\w+: does not go together",
    # An item_reference names an item of a response that is kept, and previous_response_id such …
    r"previous_response_id: |input: holds"
    r"|input\[\d+\]\.(id|call_id): (there is no|.* is of no)",
    # An input, with the items of the responses before and with what it refers to, has at most …
    r"input: (\d+ items|comes to)",
    # dimensions is at most the network's hidden size, and one answer has at most 4,194,304 …
    r"dimensions: must be at most|(input|content): [\d,]+ vectors",
    # llama-server's embeddings have input or content.
    r"input, content: give exactly",
    # stream_options belongs to stream.
    r"stream_options: only with stream",
    # top_logprobs belongs to logprobs.
    r"top_logprobs: needs logprobs",
    # max_tokens agrees with max_completion_tokens and n_predict.
    r"max_tokens, (max_completion_tokens|n_predict): ",
    # content and prompt of /tokenize agree; one is there.
    r"content(, prompt: differ|: is)",
    # count, threshold, margin and entropy_bound belong to their samplers.
    r"(count|threshold|margin|entropy_bound): .*sampler",
    # low-confidence, sequential and pace belong to models with a mask token.
    r"(sampler|pace): .*mask tokens",
    # soft_skip and soft_top_k do not go together.
    r"soft_skip, soft_top_k: ",
    # t_min is at most t_max; of the two, what a body leaves out is the checkpoint's.
    r"t_min, t_max: need|t_m(in|ax): must be at (most|least) t_m",
    # The mode causal, which echo asks for, goes with no field of canvases and denoising steps.
    r"mode: |echo: ",
    # A max_tokens of 0 goes with echo or prompt_logprobs, which goes without stream.
    r"max_tokens: 0 |prompt_logprobs: ",
    # canvas_length is at most the checkpoint's.
    r"canvas_length: .* longer than",
    # max_steps is at most the server's setting.
    r"max_steps: must be at most",
    # tool_choice names one of the tools, and required has some; the vocabulary has tool calls.
    r"tool_choice: (required needs|.* is not among|this model|a given canvas)",
    # A tool's message answers a call of the assistant's message before it, by its id or name.
    r"messages\[\d+\]\.(role|tool_call_id|name): .*call",
    # Only an assistant's message is continued, one without calls, after another message, …
    r"(continue_final_message|add_generation_prompt): |.*continued",
    # A result in Anthropic's messages answers a call of the assistant's turn before it.
    r"messages\[\d+\]\.content(\[\d+\])?(\.\w+)*: .*call",
    # thinking.budget_tokens is less than max_tokens, and there where thinking is enabled.
    r"thinking\.budget_tokens: |thinking: an answer that is continued",
    # tool_choice of the type tool has a name.
    r"tool_choice\.name: is missing",
    # In Ollama's API, system goes neither with raw nor with suffix; format and logprobs go not …
    r"(system|format|logprobs): (goes|does not go)|think: an answer|model: is missing",
    # The chat template can render messages and tools.
    r".*chat.template",
    # Arguments of calls and tools are nested at most 64 levels deep, and the body 100.
    r".*nested (deeper|too deeply)",
    # Texts are valid Unicode.
    r".*(surrogate|Unicode)",
    # A body of /v1/decisions has state or input, and not both; Gemini's has x-goog-api-key.
    r"the body must have one of three forms",
    # /v1/systemone has models of the names that it says.
    r"model: .* is not served here",
    # Pictures need a model that reads them, of a known kind, whole, and no raw prompt; states.
    r".*this model reads no pictures|.*only a state has pictures|.*are about images"
    r"|.*the picture's base64|.*stands nowhere in the state|.*the bytes are no picture"
    r"|images: goes with neither",
    # Questions times samples times orders are at most 4,096.
    r".*[\d,]+ questions x [\d,]+ samples",
    # Numbers in a state or a description are finite.
    r".*holds a number that is too",
    # State and question fit the context, and so do all of them.
    r".*there is room for",
    # A question's options differ in what tells them apart.
    r".*is there twice",
    # A yes/no question has instructions or a description.
    r".*a yes/no question needs",
)
"""What the messages of each of `RULES` begin with, in their order."""


def is_of_a_rule(error: Mapping[str, Any]) -> bool:
    """Whether an error's object is about one of the rules."""
    assert len(PATTERNS) == len(RULES), "each rule has its pattern"
    message = str(error["message"]).removeprefix("options.")  # as Ollama's bodies name fields
    return any(re.match(pattern, message, re.DOTALL) for pattern in PATTERNS)


def error_of(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """The error's object of an answer in any form."""
    if "error" in body:
        error: Mapping[str, Any] | str = body["error"]
        return {"message": error} if isinstance(error, str) else error
    detail = body["detail"]
    if isinstance(detail, list):
        return {"message": f"{detail[0]['loc'][-1]}: {detail[0]['msg']}"}
    return {"message": detail["message"]}
