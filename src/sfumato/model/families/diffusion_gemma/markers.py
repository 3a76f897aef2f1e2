"""DiffusionGemma's chat format: its special tokens and their roles."""

from __future__ import annotations

from sfumato.text.markers import ChatMarkers

MARKERS = ChatMarkers(
    turn_open="<|turn>",
    turn_close="<turn|>",
    thought_open="<|channel>",
    thought_close="<channel|>",
    thought_header="thought\n",
    call_open="<|tool_call>",
    call_close="<tool_call|>",
    quote='<|"|>',
    ends=("<turn|>", "<eos>", "<|tool_response>"),
    end_tokens=("<turn|>", "<|tool_response>"),
    visible=(
        *("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>"),
        *("<|tool_response>", "<tool_response|>", '<|"|>'),
    ),
    tokens=(
        *("<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<|think|>", '<|"|>'),
        *("<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|tool>", "<tool|>"),
        *("<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>"),
        *("<|image>", "<|image|>", "<image|>", "<|audio>", "<|audio|>", "<audio|>", "<|video|>"),
    ),
)
