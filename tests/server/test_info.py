"""What the server says of itself, and the page's files."""

from __future__ import annotations

from copy import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client import CONTENT_TYPE_LATEST

import sfumato
from sfumato import Hole, catalog
from sfumato.api import Model
from sfumato.cli.fill import holes_of
from sfumato.diffusion.constraints.grammar import schema_source
from sfumato.engine import ServedModel
from sfumato.server.dialects.decisions import parse
from sfumato.server.dialects.decisions.forms import PATH, SYSTEM_ONE, SystemOneBody
from sfumato.server.examples import is_answered, page_texts
from sfumato.server.http.request_body import validated
from sfumato.train import decision_states, sudoku


def test_health(server: Any) -> None:
    for path in ("/health", "/v1/health", "/readyz"):
        answer = server.http.get(path).json()
        assert answer["status"] == "ok" and answer["ok"] is True
        assert answer["uptime_s"] > 0


def test_props_tell_a_page_what_it_needs(server: Any, embedded: Model) -> None:
    answer = server.http.get("/props").json()
    assert answer["canvas_length"] == embedded.config.canvas_length
    assert answer["vocab_size"] == embedded.config.vocab_size
    assert answer["sampler"]["max_steps"] == 48
    assert answer["sampler"]["entropy_bound"] == pytest.approx(0.1)
    assert answer["limits"]["context"] == 512
    assert answer["total_slots"] == 4
    titles = [example["title"] for example in answer["examples"]]
    assert "Solve a Sudoku" in titles
    assert "demonstration model" in answer["demonstration"] and "4x4" in answer["demonstration"]
    assert answer["markers"]["ends"] == list(embedded.family.markers.ends)
    assert answer["architecture"] == "DiffusionGemma"
    assert str(embedded.path) not in server.http.get("/props").text


def test_only_the_models_of_the_package_are_called_demonstrations(embedded: Model) -> None:
    other, seen = copy(embedded), set()
    for other.path in catalog.PACKAGED.values():
        words = page_texts(ServedModel.of(other).packaged)["demonstration"]
        assert words.endswith(f"sfumato serve -m {catalog.FIRST.name}")
        seen.add(words)
    assert len(seen) == len(catalog.PACKAGED)
    other.path = Path("model.gguf")
    assert page_texts(ServedModel.of(other).packaged)["demonstration"] is None
    for has_masks in (False, True):  # no text can be changed in place where masks are filled
        assert (page_texts(None, has_masks)["modes"]["edit"] is None) == has_masks


def test_the_example_prompts_of_the_mask_model_are_answered() -> None:
    """And its fills; what it has not learnt has no examples."""
    texts, model = page_texts("embedded-masks", has_masks=True), sfumato.load("embedded-masks")
    for example in texts["examples"]:
        reply = model.generate(messages=example["messages"], seed=1)
        assert is_answered(reply) and "step_cap" not in reply.stats.convergence
    fills = [each for each in texts["modes"]["fill"]["examples"] if "text" in each]
    texts_filled = [
        model.fill(
            holes_of(fill["text"]), messages=[{"role": "user", "content": fill["question"]}], seed=1
        ).text
        for fill in fills
    ]
    assert texts_filled == ["The capital is Tokyo.", "Egypt is in Africa."]
    unlearnt = (texts["decisions"], texts["modes"]["json"], texts["modes"]["edit"])
    assert unlearnt == (None, None, None)


def test_the_example_sudokus_have_one_solution(embedded: Model) -> None:
    texts = [example["messages"][0]["content"] for example in page_texts("embedded")["examples"]]
    puzzles = [sudoku.from_text(t) for t in texts if isinstance(t, str) and t.startswith("sudoku")]
    assert len(puzzles) == 2
    for cells in puzzles:
        assert cells is not None
        fits = ((cells == 0) | (sudoku.all_grids() == cells)).all(1)
        assert fits.sum() == 1
        assert int(fits.argmax()) in sudoku.split()[1], "the grid was trained on"


@pytest.mark.parametrize("number", [0, 1])
def test_the_first_examples_are_solved_in_some_steps(server: Any, number: int) -> None:
    example = server.http.get("/props").json()["examples"][number]
    replies = [server.chat(messages=example["messages"], seed=seed).json() for seed in range(3)]
    for reply in replies:
        answer = reply["choices"][0]["message"]["content"]
        assert sudoku.is_solution(example["messages"][0]["content"], answer)
    assert min(reply["timings"]["diffusion"]["steps"] for reply in replies) >= 3


@pytest.mark.parametrize("packaged", ["embedded", None])
def test_the_examples_of_the_modes_can_be_asked(
    server: Any, embedded: Model, packaged: str | None
) -> None:
    assert server.http.get("/props").json()["modes"] == page_texts("embedded")["modes"]
    available = page_texts(packaged)["modes"]
    for example in available["fill"]["examples"]:
        if "rows" in example:
            cells = example["rows"].replace("\n", "")
            assert len(cells) in (16, 81) and set(cells) <= set(".123456789")
        else:
            assert any(isinstance(part, Hole) for part in holes_of(example["text"]))
    for example in available["json"]["examples"]:
        embedded.grammars.cache.grammar(schema_source(example["schema"]))  # or raises
    assert {"text", "instruction"} <= available["edit"]["examples"][0].keys()


@pytest.mark.parametrize("packaged", ["embedded", None])
def test_the_example_decisions_can_be_asked(server: Any, packaged: str | None) -> None:
    assert server.http.get("/props").json()["decisions"] == page_texts("embedded")["decisions"]
    for example in page_texts(packaged)["decisions"]["examples"]:
        fields = {name: example[name] for name in ("state", "questions")}
        body = validated(fields, SystemOneBody, lenient=False)
        request, _ = parse(SYSTEM_ONE, server.service, PATH, body)
        assert request.state == example["state"] and len(request.questions) > 1


def test_the_embedded_models_example_decisions_are_of_kinds_that_it_learns() -> None:
    families = {*decision_states.SETTLED, *decision_states.OPEN}
    draws = [
        family(np.random.default_rng(seed), np.random.default_rng(seed + 1))
        for family in families
        for seed in range(200)
    ]
    learned = {case.question.instructions for case in draws}
    for example in page_texts("embedded")["decisions"]["examples"]:
        for question in example["questions"].values():
            assert question["instructions"] in learned


def test_slots_count_what_was_done(server: Any, eventually: Any) -> None:
    def totals() -> dict[str, int]:
        answer: dict[str, int] = server.http.get("/state").json()["totals"]
        return answer

    # What a request took is counted just after its end is told, and then its slot is free.
    eventually(lambda: not any(s["busy"] for s in server.http.get("/state").json()["slots"]))
    before = totals()
    used = server.chat(seed=1).json()["usage"]
    for ours, theirs in (("output", "completion"), ("prompt", "prompt")):
        expected = before[f"{ours}_tokens"] + used[f"{theirs}_tokens"]
        eventually(lambda ours=ours, n=expected: totals()[f"{ours}_tokens"] == n)
    answer = server.http.get("/state").json()
    assert len(answer["slots"]) == 4 and answer["waiting"] == 0
    assert len(answer["history"]["rows"]) == len(answer["history"]["canvas_tokens"])
    assert any(slot["tokens"] for slot in answer["slots"])


def test_memory_is_predicted_and_measured(server: Any) -> None:
    answer = server.http.get("/memory").json()
    assert answer["prediction"]["total"] >= answer["prediction"]["slots"] > 0
    assert answer["budget"]["nbytes"] > 0 and answer["budget"]["source"]
    assert answer["used"] > 0 and answer["baseline"] > 0


def test_metrics(server: Any) -> None:
    server.chat(seed=1)
    answer = server.http.get("/metrics")
    assert answer.headers["content-type"] == CONTENT_TYPE_LATEST
    assert "sfumato_" in answer.text


def test_the_page_and_its_modules(server: Any) -> None:
    page = server.http.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "<script" in page.text
    script = server.http.get("/api.js")
    assert "javascript" in script.headers["content-type"]
    assert script.headers["cache-control"] == "no-cache"


def test_it_lives(server: Any) -> None:
    answer = server.http.get("/livez")
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})


@pytest.mark.parametrize("path", ["/health", "/v1/health", "/readyz", "/livez"])
def test_health_without_its_body(server: Any, path: str) -> None:
    answer = server.http.head(path)
    assert (answer.status_code, answer.content) == (200, b"")


def test_what_the_tokenizer_is(server: Any, embedded: Model) -> None:
    answer = server.http.get("/tokenizer_info").json()
    assert answer["bos_token"] == "<bos>" and answer["tokenizer_class"]
    assert answer["chat_template"] == embedded.template.source
    # As vLLM's clients ask for tokens.
    made = server.post("/tokenize", prompt="Who?", add_special_tokens=True, model="m").json()
    assert made["tokens"] == [embedded.tokenizer.bos_id, *embedded.tokenizer.encode("Who?")]
    assert made["count"] == len(made["tokens"]) and made["max_model_len"] == 512
    assert server.post("/detokenize", tokens=made["tokens"][1:]).json()["prompt"] == "Who?"
    for wrong in ({}, {"content": "a", "prompt": "b"}):
        assert server.post("/tokenize", **wrong).json()["error"]["param"] == "content"


def test_the_prefix_cache_is_emptied(serve: Any, embedded: Model, eventually: Any) -> None:
    served = serve(embedded, slots=2)
    messages = [{"role": "user", "content": "Who are you? " * 4}]

    def cached() -> int:
        used = served.chat(messages=messages, max_tokens=4, max_steps=2, seed=1).json()["usage"]
        eventually(lambda: not served.engine.state().running)
        return int(used["prompt_tokens_details"]["cached_tokens"])

    assert cached() == 0 and cached() > 0
    assert served.http.post("/reset_prefix_cache").json() == {"emptied_slots": 1}
    assert served.http.post("/reset_prefix_cache/").json() == {"emptied_slots": 0}
    assert cached() == 0 and cached() > 0
    served.engine.close()
    assert served.http.post("/reset_prefix_cache").status_code == 503
