"""The chat format of Qwen3's families, by itself."""

from __future__ import annotations

from sfumato.model.families.qwen3_blocks.text import MARKERS, MASKS, READS


def test_every_role_has_a_token_of_the_format() -> None:
    roles = (
        *(MARKERS.turn_open, MARKERS.turn_close, MARKERS.thought_open, MARKERS.thought_close),
        *(MARKERS.call_open, MARKERS.call_close, READS.end, READS.filler),
        *(*MARKERS.ends, *MARKERS.end_tokens, *MARKERS.visible, *MASKS),
    )
    assert {*roles} <= {*MARKERS.tokens}
    assert len({*MARKERS.tokens}) == len(MARKERS.tokens) == 26 + len(MASKS)


def test_an_empty_thought_is_a_thought() -> None:
    opened, _, closed = READS.empty_thought.partition(MARKERS.thought_header)
    assert opened == MARKERS.thought_open
    assert closed.strip() == MARKERS.thought_close
