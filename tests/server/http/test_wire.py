"""How frames are written: a frame is one line for every client's idea of a line."""

from __future__ import annotations

import json
from collections.abc import Callable

import httpx
import pytest

from sfumato.server.http.route import Fields, event, line, named_event

TEXT = "one\u2028two\u2029three\u0085four\nfive\u000bsix"


@pytest.mark.parametrize("encode", [line, event, named_event])
def test_a_frame_is_whole_for_clients_that_split_at_unicode_line_ends(
    encode: Callable[[Fields], str],
) -> None:
    frame = {"type": "delta", "text": TEXT, "other": "é"}
    response = httpx.Response(200, content=(encode(frame) * 2).encode())
    lines = [each for each in response.iter_lines() if each and not each.startswith("event: ")]
    assert [json.loads(each.removeprefix("data: ")) for each in lines] == [frame, frame]
    assert "é" in lines[0]
