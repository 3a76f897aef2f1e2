"""Pictures in the bodies of every dialect: one prompt for all, whole and streamed; and refusals."""

from __future__ import annotations

import base64
import gc
import json
import threading
import time
import weakref
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.server.conftest import Served, serving
from tests.support.pictures import file_of, picture
from tests.support.seeing_model import seeing_model

import sfumato
from sfumato.engine import Prompt, Request, Terminal
from sfumato.media.patches import patches_of
from sfumato.server.app import ServerSettings
from sfumato.server.chat.call import MARKER
from sfumato.train import pictures as training

QUESTION = "Which digit is this?"
PNG = base64.b64encode(file_of(picture(40, 40), "PNG")).decode()
OTHER = base64.b64encode(file_of(picture(60, 30, 1), "PNG")).decode()
URL, OTHER_URL = f"data:image/png;base64,{PNG}", f"data:image/png;base64,{OTHER}"
SHORT: dict[str, Any] = {"max_tokens": 4, "seed": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("allowed")
    (made / "a.png").write_bytes(base64.b64decode(PNG))
    return made


class SlowPictures(BaseHTTPRequestHandler):
    """Sends its picture once `may_answer` is set; `waiting` counts who waits for it."""

    may_answer = threading.Event()
    waiting = threading.Semaphore(0)

    def do_GET(self) -> None:
        self.waiting.release()
        self.may_answer.wait(9)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(base64.b64decode(PNG))

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def slow_host() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), SlowPictures) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        SlowPictures.may_answer.set()
        server.shutdown()
        thread.join(10)


ended: list[Request] = []


@pytest.fixture(scope="module")
def seeing(
    tmp_path_factory: pytest.TempPathFactory, folder: Path, slow_host: str
) -> Iterator[Served]:
    """A server of a model with a tower; `ended` has its requests."""

    def note(request: Request, terminal: Terminal) -> None:
        ended.append(request)

    settings = ServerSettings(limit_images=2, image_folder=folder, image_hosts=(slow_host,))
    model = seeing_model(tmp_path_factory.mktemp("sees") / "model")
    model.sampler_defaults = replace(model.sampler_defaults, max_steps=2)
    with serving(model, settings, on_finish=note) as served:
        yield served


@pytest.fixture(scope="module")
def blind() -> Iterator[Served]:
    """A server of a model without a tower."""
    with serving(sfumato.load(mmproj="none")) as served:
        yield served


def ask(served: Served, path: str, **body: Any) -> tuple[httpx.Response, Prompt]:
    """The answer, and the prompt of the request that the engine has ended."""
    ended.clear()
    answer = served.post(path, **body)
    assert answer.status_code == 200, answer.text
    until, own = time.monotonic() + 20, answer.headers["X-Request-Id"]
    # The engine may note the end of an earlier one only now.
    while not (made := [request.made for request in ended if request.id == own]):
        assert time.monotonic() < until
        time.sleep(0.01)
    assert made[0] is not None
    return answer, made[0]


def image_url(url: Any = URL, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **more}}


def block(data: str = PNG) -> dict[str, Any]:
    source = {"type": "base64", "media_type": "image/png", "data": data}
    return {"type": "image", "source": source}


TEXT = {"type": "text", "text": QUESTION}
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
OLLAMA, GENERATE, COMPLETION = "/api/chat", "/api/generate", "/completion"
OPTIONS = {"num_predict": 4, "seed": 1}


def user(*content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(content)}]


def test_a_rendered_prompt_names_its_pictures_and_their_places(seeing: Served) -> None:
    """As llm-d's router reads them; the same picture has the same hash in any prompt."""
    messages = user(image_url(), TEXT, image_url(OTHER_URL))
    _, prompt = ask(seeing, CHAT, messages=messages, **SHORT)
    body = seeing.post(f"{CHAT}/render", messages=messages).json()
    assert body["token_ids"] == prompt.ids
    features, placed = body["features"], prompt.pictures
    assert features["mm_hashes"]["image"] == [each.patches.key for each in placed]
    places = [(p["offset"], p["length"]) for p in features["mm_placeholders"]["image"]]
    assert places == [(each.start, each.patches.soft_tokens) for each in placed]
    alone = seeing.post(f"{CHAT}/render", messages=user(image_url())).json()["features"]
    assert alone["mm_hashes"]["image"] == features["mm_hashes"]["image"][:1]


def input_image(url: str = URL, **more: Any) -> dict[str, Any]:
    return {"type": "input_image", "image_url": url, **more}


ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, SHORT | {"messages": user(image_url(), TEXT)}),
    "chat, as a text": (
        CHAT,
        SHORT | {"messages": user({"type": "image_url", "image_url": URL}, TEXT)},
    ),
    "responses": (
        RESPONSES,
        {
            "input": user(input_image(detail="auto"), {"type": "input_text", "text": QUESTION}),
            "max_output_tokens": 4,
            "truncation": "auto",
        },
    ),
    "anthropic": (MESSAGES, SHORT | {"messages": user(block(), TEXT)}),
    "ollama": (
        OLLAMA,
        {
            "messages": [{"role": "user", "content": QUESTION, "images": [PNG]}],
            "options": OPTIONS,
        },
    ),
    "ollama generate": (GENERATE, {"prompt": QUESTION, "images": [PNG], "options": OPTIONS}),
}


@pytest.mark.parametrize("kind", ASKED)
def test_every_dialect_makes_the_same_prompt_and_holds_no_picture(
    seeing: Served, kind: str
) -> None:
    """Once the request has ended, not even until the next collection of circular references, which
    may come much later."""
    path, body = ASKED[kind]
    gc.collect()
    gc.disable()
    try:
        for stream in (False, True):
            _, made = ask(seeing, path, **body, stream=stream)
            (placed,) = made.pictures
            assert (made.ids, placed.start) == training.prompt(QUESTION)
            assert placed.patches.key == patches_of(picture(40, 40), training.CUT).key
            held = weakref.ref(placed.patches)
            del made, placed
            ended.clear()
            until = time.monotonic() + 20
            while held() is not None:
                assert time.monotonic() < until
                time.sleep(0.01)
    finally:
        gc.enable()


def test_soft_tokens_are_tokens_of_the_prompt(seeing: Served) -> None:
    path, body = ASKED["chat"]
    usage = seeing.post(path, **body).json()["usage"]
    assert usage["prompt_tokens"] == len(training.prompt(QUESTION)[0])
    count = len(training.prompt(QUESTION)[0])
    counted = seeing.post("/v1/chat/completions/input_tokens", messages=body["messages"])
    assert counted.json()["input_tokens"] == count
    messages = ASKED["anthropic"][1]["messages"]
    answer = seeing.post("/v1/messages/count_tokens", messages=messages)
    assert answer.json() == {"input_tokens": count}


def test_llama_servers_data_stand_at_its_markers(seeing: Served) -> None:
    prompt = {"prompt_string": f"a {MARKER} b {MARKER}", "multimodal_data": [PNG, OTHER]}
    answer, made = ask(seeing, COMPLETION, prompt=prompt, n_predict=4)
    tokenizer = seeing.service.model.tokenizer
    first, second = made.pictures
    keys = [each.patches.key for each in made.pictures]
    assert keys[0] == patches_of(picture(40, 40), training.CUT).key != keys[1]
    assert tokenizer.decode(made.ids[: first.start]).startswith("a ")
    assert " b " in tokenizer.decode(made.ids[first.end : second.start])
    assert answer.json()["tokens_evaluated"] == len(made.ids)
    prompts = [prompt, "plain"]
    assert len(seeing.post(COMPLETION, prompt=prompts, n_predict=4).json()) == 2


def test_embeddings_have_pictures(seeing: Served) -> None:
    one = {"prompt_string": f"a {MARKER}", "multimodal_data": [PNG]}
    two, plain = one | {"multimodal_data": [OTHER]}, {"prompt_string": f"a {MARKER}"}
    (first, again, text), (second,) = (
        [each["embedding"] for each in seeing.post("/embeddings", content=content).json()]
        for content in ([one, one, plain], [two])
    )
    assert first == again and second != first != text != second


@pytest.mark.parametrize("stream", [False, True])
def test_open_webuis_forms(seeing: Served, stream: bool) -> None:
    """An uploaded picture, as its backend sends it on to OpenAI's API, and to Ollama's."""
    content = [TEXT, image_url()]
    _, made = ask(seeing, "/chat/completions", **SHORT, messages=user(*content), stream=stream)
    parts = [
        {"role": "user", "content": QUESTION, "images": [image_url()["image_url"]["url"][22:]]}
    ]
    _, of_ollama = ask(
        seeing, OLLAMA, model="sfumato:latest", messages=parts, stream=stream, options=OPTIONS
    )
    keys = [one.pictures[0].patches.key for one in (made, of_ollama)]
    assert keys == [patches_of(picture(40, 40), training.CUT).key] * 2
    assert sorted(made.ids) == sorted(of_ollama.ids)  # the one has its picture behind the text


@pytest.mark.parametrize("role", ["system", "user", "tool"])
def test_what_a_text_says_is_no_picture(seeing: Served, role: str) -> None:
    """The token that stands for a picture, the marks around one, and llama-server's marker."""
    tokens, tokenizer = seeing.service.model.pictures, seeing.service.model.tokenizer
    assert tokens is not None
    markers = [tokens.soft, tokens.begin, tokens.end]
    text = "".join(tokenizer.token_text(each) for each in markers if each is not None) + MARKER
    turns = user(image_url(), {"type": "text", "text": text if role == "user" else "x"})
    if role == "system":
        turns = [{"role": "system", "content": text}, *turns]
    if role == "tool":
        called = {"role": "assistant", "tool_calls": [CALL]}
        turns += [called, {"role": "tool", "tool_call_id": "c", "content": text}]
    _, made = ask(seeing, CHAT, **SHORT, messages=turns)
    (placed,) = made.pictures
    at = [number for number, token in enumerate(made.ids) if token == tokens.soft]
    assert at == list(range(placed.start, placed.end))


TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
OF_TOOLS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (
        CHAT,
        SHORT
        | {
            "messages": [
                {"role": "user", "content": "x"},
                {"role": "assistant", "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "c", "content": [TEXT, image_url()]},
            ]
        },
    ),
    "responses": (
        RESPONSES,
        {
            "input": [
                {"role": "user", "content": "x"},
                {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
                {
                    "type": "function_call_output",
                    "call_id": "c",
                    "output": [{"type": "input_text", "text": QUESTION}, input_image()],
                },
            ],
            "max_output_tokens": 4,
        },
    ),
    "anthropic": (
        MESSAGES,
        SHORT
        | {
            "messages": [
                {"role": "user", "content": "x"},
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "c", "name": "look", "input": {}}],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "c", "content": [TEXT, block()]}
                    ],
                },
            ]
        },
    ),
    "ollama": (
        OLLAMA,
        {
            "messages": [
                {"role": "user", "content": "x"},
                {
                    "role": "assistant",
                    "tool_calls": [{"function": {"name": "look", "arguments": {}}}],
                },
                {"role": "tool", "tool_name": "look", "content": QUESTION, "images": [PNG]},
            ],
            "options": OPTIONS,
        },
    ),
}


def test_results_of_tools_have_pictures(seeing: Served) -> None:
    """The same prompt by every dialect."""
    ids = []
    for path, body in OF_TOOLS.values():
        _, made = ask(seeing, path, **body)
        (placed,) = made.pictures
        assert placed.patches.key == patches_of(picture(40, 40), training.CUT).key
        ids.append(made.ids)
    assert ids == ids[:1] * len(OF_TOOLS)


def test_a_response_is_followed_with_its_pictures(seeing: Served) -> None:
    text = {"type": "input_text", "text": QUESTION}
    given = user(input_image(), text) + user(input_image(OTHER_URL), text)
    answer, before = ask(seeing, RESPONSES, input=given, max_output_tokens=4)
    first = answer.json()
    items = seeing.http.get(f"{RESPONSES}/{first['id']}/input_items").json()["data"]
    kept = [part for item in items for part in item["content"] if part["type"] == "input_image"]
    assert sorted(part["image_url"] for part in kept) == sorted([URL, OTHER_URL])
    follows = {"previous_response_id": first["id"], "max_output_tokens": 4}
    _, made = ask(seeing, RESPONSES, input="And?", **follows)
    keys = [each.patches.key for each in made.pictures]
    assert keys == [each.patches.key for each in before.pictures] and len(set(keys)) == 2


def test_items_of_one_id_keep_their_own_pictures(seeing: Served) -> None:
    """A client chooses the ids of its items."""
    items = [user(input_image(url))[0] | {"id": "msg_1"} for url in (URL, OTHER_URL)]
    first = ask(seeing, RESPONSES, input=items, max_output_tokens=4)[0].json()
    follows = {"previous_response_id": first["id"], "max_output_tokens": 4}
    _, made = ask(seeing, RESPONSES, input="And?", **follows)
    first_key, second_key = (each.patches.key for each in made.pictures)
    assert first_key != second_key


def test_a_second_turn_has_its_picture_in_the_cache(seeing: Served) -> None:
    question = {"messages": user(image_url(seed_url(7)), TEXT)}
    first = ask(seeing, CHAT, **SHORT, **question)[0].json()
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] < 29
    answered = {"role": "assistant", "content": first["choices"][0]["message"]["content"]}
    turns = [*question["messages"], answered, {"role": "user", "content": "And?"}]
    answer, made = ask(seeing, CHAT, **SHORT, messages=turns)
    (placed,) = made.pictures
    assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] >= placed.end
    turns[0] = user(image_url(seed_url(8)), TEXT)[0]  # the same ids, and another picture
    answer, again = ask(seeing, CHAT, **SHORT, messages=turns)
    assert again.ids == made.ids
    assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] <= placed.start


def seed_url(seed: int) -> str:
    data = file_of(picture(40, 40, seed), "PNG")
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def test_holes_are_filled_about_a_picture(seeing: Served) -> None:
    body = {"messages": user(image_url(), TEXT), "parts": ["It is ", {"tokens": 2}, "."]}
    answer, made = ask(seeing, "/v1/fill", **body)
    assert len(made.pictures) == 1 and answer.json()["text"].startswith("It is ")


def test_details_are_numbers_of_soft_tokens(seeing: Served) -> None:
    for detail in ("low", "high", "original"):  # this tower reads no more than its default
        body = SHORT | {"messages": user(image_url(detail=detail), TEXT)}
        _, made = ask(seeing, CHAT, **body)
        assert made.pictures[0].patches.soft_tokens == 25 <= training.CUT.tokens


def test_files_of_the_folder_are_read(seeing: Served, folder: Path) -> None:
    body = SHORT | {"messages": user(image_url(f"file://{folder}/a.png"), TEXT)}
    assert len(ask(seeing, CHAT, **body)[1].pictures) == 1


def test_a_slow_host_holds_up_nobody_else(seeing: Served, slow_host: str) -> None:
    body = SHORT | {"messages": user(image_url(f"http://{slow_host}/a.png"), TEXT)}
    with ThreadPoolExecutor(3) as pool:
        answers = [pool.submit(seeing.post, CHAT, **body) for _ in range(3)]
        for _ in answers:  # more than the small bodies that are read at a time
            assert SlowPictures.waiting.acquire(timeout=20)
        meanwhile = seeing.chat("Hello!", max_tokens=4)
        assert meanwhile.status_code == 200 and not any(each.done() for each in answers)
        SlowPictures.may_answer.set()
        assert [each.result().status_code for each in answers] == [200] * 3


def refused(answer: httpx.Response) -> str:
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    return str(error if isinstance(error, str) else error["message"])


BAD = base64.b64encode(b"no picture").decode()
SMALL = file_of(picture(8, 8), "PNG")
HEAD = SMALL[12:16] + (60_000).to_bytes(4, "big") * 2 + SMALL[24:29]
CHECKSUM = zlib.crc32(HEAD).to_bytes(4, "big")
BOMB = base64.b64encode(SMALL[:12] + HEAD + CHECKSUM + SMALL[33:]).decode()


@pytest.mark.parametrize(
    ("path", "body", "beginning"),
    [
        (CHAT, {"messages": user(image_url("nowhere"))}, "messages[0].content[0].image_url: "),
        (CHAT, {"messages": user(TEXT, image_url(5))}, "messages[0].content[1].image_url: must"),
        (CHAT, {"messages": user(image_url(detail="huge"))}, "messages[0].content[0].image_url.de"),
        (CHAT, {"messages": user(image_url("http://10.0.0.1/a.png"))}, "messages[0].content[0]."),
        (CHAT, {"messages": user(image_url("file:///etc/passwd"))}, "messages[0].content[0].image"),
        (CHAT, {"messages": user({"type": "image", "path": "/etc/passwd"})}, "messages[0].content"),
        (CHAT, {"messages": user({"type": "image", "bytes": "x"})}, "messages[0].content[0].type"),
        (CHAT, {"messages": user({"type": "input_audio"})}, "messages[0].content[0]: audio"),
        (
            CHAT,
            {"messages": [{"role": "system", "content": [image_url()]}, *user(TEXT)]},
            "messages[0].content[0].type: only 'text'",
        ),
        (
            CHAT,
            {"messages": user(image_url(), image_url(), image_url())},
            "messages[0].content[2].image_url: 3 pictures",
        ),
        (
            CHAT,
            {"messages": user(image_url(f"data:;base64,{BOMB}"))},
            "messages[0].content[0].image_url: the picture has too many",
        ),
        (
            RESPONSES,
            {"input": user({"type": "input_image", "file_id": "f"})},
            "input[0].content[0]",
        ),
        (
            RESPONSES,
            {"input": user(input_image(f"data:;base64,{BAD}"))},
            "input[0].content[0].imag",
        ),
        (
            RESPONSES,
            {"input": [{"role": "assistant", "content": [input_image()]}]},
            "input[0].content: only messages of users",
        ),
        (
            MESSAGES,
            {"max_tokens": 4, "system": "x", "messages": user(TEXT, block(BAD))},
            "messages[0].content[1].source.data: the bytes are no picture",
        ),
        (
            MESSAGES,
            {"max_tokens": 4, "messages": user({"type": "image", "source": {"type": "file"}})},
            "messages[0].content[0].source.type: ",
        ),
        (
            OLLAMA,
            {"messages": [{"role": "user", "content": "x", "images": [PNG, "@"]}]},
            "messages[0].images[1]: ",
        ),
        (
            OLLAMA,
            {"messages": [{"role": "system", "content": "x", "images": [PNG]}]},
            "messages[0].images: only",
        ),
        (GENERATE, {"prompt": "x", "images": [BAD]}, "images[0]: the bytes are no picture"),
        (GENERATE, {"prompt": "x", "raw": True, "images": [PNG]}, "images: goes with neither"),
        (
            COMPLETION,
            {"prompt": {"prompt_string": MARKER, "multimodal_data": ["malformed"]}},
            "prompt.multimodal_data[0]: ",
        ),
        (
            COMPLETION,
            {"prompt": {"prompt_string": "What is this:\n", "multimodal_data": [""]}},
            "prompt.multimodal_data: has 1 pictures",
        ),
        (
            "/embeddings",
            {"content": {"prompt_string": MARKER, "multimodal_data": [BAD]}},
            "content.multimodal_data[0]: the bytes",
        ),
    ],
)
def test_what_is_refused_is_named(
    seeing: Served, path: str, body: dict[str, Any], beginning: str
) -> None:
    assert refused(seeing.post(path, **body)).startswith(beginning)


@pytest.mark.parametrize("kind", ASKED)
def test_a_model_without_a_tower_says_so(blind: Served, kind: str) -> None:
    path, body = ASKED[kind]
    message = refused(blind.post(path, **body))
    assert message.endswith("this model reads no pictures; send text")
    assert message.startswith(("messages[0].", "input[0].content[0].", "images[0]"))


def test_the_server_says_what_it_reads(seeing: Served, blind: Served) -> None:
    for served, sees in ((seeing, True), (blind, False)):
        props = served.http.get("/props").json()
        assert props["modalities"]["vision"] is sees
        assert props["limits"]["images"] == (2 if sees else 0)
        models = served.http.get("/v1/models").json()
        card = models["data"][0]
        assert ("image" in card["architecture"]["input_modalities"]) is sees
        assert card["capabilities"]["image_input"]["supported"] is sees
        assert ("multimodal" in models["models"][0]["capabilities"]) is sees
        shown = served.post("/api/show", model=served.service.name).json()
        assert ("vision" in shown["capabilities"]) is sees


def test_a_rendered_prompt_shows_where_a_picture_is(seeing: Served, blind: Served) -> None:
    messages = user(image_url(), TEXT)
    prompt = seeing.post("/apply-template", messages=messages).json()["prompt"]
    tokens = seeing.service.model.pictures
    assert tokens is not None
    assert seeing.service.model.tokenizer.token_text(tokens.soft) in prompt
    assert "reads no pictures" in refused(blind.post("/apply-template", messages=messages))


def test_pictures_are_counted(seeing: Served) -> None:
    def counts() -> list[float]:
        lines = seeing.http.get("/metrics").text.splitlines()
        name = 'sfumato_picture_seconds_count{outcome="%s"}'
        pairs = [line.rpartition(" ") for line in lines]
        return [
            sum(float(value) for key, _, value in pairs if key == name % outcome)
            for outcome in ("read", "refused")
        ]

    read, failed = counts()
    seeing.post(CHAT, **ASKED["chat"][1])
    seeing.post(CHAT, messages=user(image_url(f"data:;base64,{BAD}")))
    assert counts() == [read + 1, failed + 1]


def test_the_audit_has_no_pixels(seeing: Served) -> None:
    _, made = ask(seeing, CHAT, **ASKED["chat"][1])
    text = json.dumps(ended[-1].texts())
    assert made.pictures[0].patches.key in text and len(text) < 1000
