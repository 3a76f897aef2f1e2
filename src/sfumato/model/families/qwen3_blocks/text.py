"""Qwen3's chat format: its special tokens by role, and a template for checkpoints without one.

The tokens are those of Qwen3's `tokenizer_config.json`, and the mask token, which diffusion models
have under one of three names.
"""

from __future__ import annotations

from sfumato.model.families.family import ReadFormat
from sfumato.text.markers import CallStyle, ChatMarkers

MASKS = ("<|MASK|>", "<MASK>", "<|mask|>")

MARKERS = ChatMarkers(
    turn_open="<|im_start|>",
    turn_close="<|im_end|>",
    thought_open="<think>",
    thought_close="</think>",
    thought_header="\n",
    thought_footer="\n\n",
    calls=CallStyle(
        arguments="json",
        begin='\n{"name": "',
        middle='", "arguments": ',
        end="}\n",
        # Without the space, of which the vocabulary makes one token with the brace and the quote.
        forced='", "arguments":',
        beside="\n",
    ),
    call_open="<tool_call>",
    call_close="</tool_call>",
    ends=("<|im_end|>", "<|endoftext|>"),
    end_tokens=("<|im_end|>", "<|endoftext|>"),
    visible=(
        *("<think>", "</think>", "<tool_call>", "</tool_call>"),
        *("<tool_response>", "</tool_response>"),
        *("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>"),
        *("<|repo_name|>", "<|file_sep|>"),
    ),
    tokens=(
        *("<|endoftext|>", "<|im_start|>", "<|im_end|>", *MASKS),
        *("<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>", "<|box_end|>"),
        *("<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>"),
        *("<|vision_pad|>", "<|image_pad|>", "<|video_pad|>", "<tool_call>", "</tool_call>"),
        *("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>"),
        *("<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>"),
        *("<think>", "</think>"),
    ),
)

READS = ReadFormat(
    end=MARKERS.turn_close,
    filler="<|endoftext|>",
    empty_thought="<think>\n\n</think>\n\n",
)

TEMPLATE = r"""
{%- set has_system = messages[0].role == 'system' -%}
{%- if has_system or tools -%}
    {{- '<|im_start|>system\n' + (messages[0].content if has_system else '') -}}
    {%- if tools -%}
        {{- '\n\n' if has_system else '' -}}
        {{- 'Functions that can be called, each described by one line of JSON:\n<tools>\n' -}}
        {%- for tool in tools -%}
            {{- tool | tojson + '\n' -}}
        {%- endfor -%}
        {{- '</tools>\nA call is the name and the arguments of a function, as JSON:\n' -}}
        {{- '<tool_call>\n{"name": "NAME", "arguments": {}}\n</tool_call>' -}}
    {%- endif -%}
    {{- '<|im_end|>\n' -}}
{%- endif -%}
{%- for message in messages -%}
    {%- if message.role == 'tool' -%}
        {{- '<|im_start|>user' if loop.first or loop.previtem.role != 'tool' else '' -}}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' -}}
        {{- '<|im_end|>\n' if loop.last or loop.nextitem.role != 'tool' else '' -}}
    {%- elif not (loop.first and has_system) -%}
        {{- '<|im_start|>' + message.role + '\n' + message.content -}}
        {%- for call in message.tool_calls or [] -%}
            {{- '\n' if message.content or not loop.first else '' -}}
            {{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' -}}
            {{- call.function.arguments | tojson + '}\n</tool_call>' -}}
        {%- endfor -%}
        {{- '<|im_end|>\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\n' + ('' if enable_thinking else '<think>\n\n</think>\n\n') -}}
{%- endif -%}
"""
"""The turns that Qwen3's own template writes; tools are described in words of ours."""
