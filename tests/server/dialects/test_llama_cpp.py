"""llama-server's own completion."""

from __future__ import annotations

import json
from typing import Any

PROMPT = "<|turn>user\nWho are you?<turn|>\n<|turn>model\n"


def test_llama_completion(server: Any) -> None:
    answer = server.post("/completion", prompt=PROMPT, n_predict=12, seed=3).json()
    assert (answer["stop"], answer["stop_type"], answer["tokens_predicted"]) == (True, "limit", 12)
    assert answer["timings"]["predicted_n"] == 12
    words = server.post("/completion", prompt=PROMPT, stop=["demo"], seed=3).json()
    assert (words["stop_type"], words["content"][-9:]) == ("word", "embedded ")
    neutral = {"cache_prompt": True, "min_p": 0, "repeat_penalty": 1.0, "mirostat": 0}
    assert server.post("/completion", prompt=PROMPT, n_predict=4, **neutral).status_code == 200
    refused = server.post("/completion", prompt=PROMPT, min_p=0.1).json()["error"]
    assert refused["param"] == "min_p"


def test_llama_completion_streams(server: Any) -> None:
    plain = server.post("/completion", prompt=PROMPT, seed=3).json()["content"]
    text = server.post("/completion", prompt=PROMPT, seed=3, stream=True).text
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
    assert "".join(frame["content"] for frame in events) == plain
    assert [frame["stop"] for frame in events] == [False] * (len(events) - 1) + [True]
