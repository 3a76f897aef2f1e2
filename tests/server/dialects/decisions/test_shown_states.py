"""States with pictures, in the three forms of decisions, and messages of fills, over HTTP."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import pytest
from tests.server.conftest import Served, serving
from tests.support.pictures import file_of, picture
from tests.support.seeing_model import seeing_model

from sfumato import Hole, Model, YesNo
from sfumato.server.app import ServerSettings
from sfumato.server.http import multipart

ONE, ANY, FILL = "/v1/systemone", "/v1/decisions", "/v1/fill"
BYTES = [file_of(picture(40, 40, seed), "PNG") for seed in range(2)]
PNG, OTHER = (base64.b64encode(data).decode() for data in BYTES)
URL = f"data:image/png;base64,{PNG}"
NOUL = {"q": {"type": "noul", "instructions": "Is it a one?"}}
PREDICATE = [{"type": "predicate", "name": "q", "instructions": "Is it a one?"}]
GOOGLE = {"x-goog-api-key": "k"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return seeing_model(tmp_path_factory.mktemp("sees") / "model")


@pytest.fixture(scope="module")
def seeing(model: Model) -> Iterator[Served]:
    with serving(model, ServerSettings(limit_images=2)) as served:
        yield served


def asset(data: str = PNG, **more: Any) -> dict[str, Any]:
    return {"type": "image", "format": "png", "data_base64": data, **more}


def expected(model: Model, *content: str | bytes) -> float:
    """The library's probability about these texts and files."""
    parts = [
        {"type": "text", "text": each}
        if isinstance(each, str)
        else {"type": "image", "bytes": each}
        for each in content
    ]
    question = {"q": YesNo("Is it a one?")}
    return model.decide(parts, question)["q"].probabilities[True]


def one(seeing: Served, **body: Any) -> Any:
    return seeing.post(ONE, **{"questions": NOUL} | body)


def test_system_ones_assets_stand_where_their_placeholders_do(seeing: Served, model: Model) -> None:
    wanted = expected(model, "See ", BYTES[0], "!")
    answer = one(seeing, state="See <a>!", assets={"<a>": asset()}).json()
    assert answer["answers"]["q"]["noul"] == pytest.approx(wanted, abs=1e-5)
    plain = one(seeing, state="See !").json()
    assert answer["usage"]["input_tokens"] == plain["usage"]["input_tokens"] + 25
    other = one(seeing, state="See <a>!", assets={"<a>": asset(OTHER)}).json()
    assert other["answers"]["q"]["noul"] != answer["answers"]["q"]["noul"]
    again = one(seeing, state="See <a>!", assets={"<a>": asset()}).json()
    assert again["answers"] == answer["answers"]
    assert again["usage"]["x_cached_tokens"] >= 25  # the picture costs nothing
    state = {'"k"': ["<a>", {"<ab>": 1}]}  # within JSON, the longer placeholder first
    nested = one(seeing, state=state, assets={"<a": asset(), "<ab>": asset(OTHER)})
    assert nested.json()["answers"]["q"]["noul"] == pytest.approx(
        expected(model, '{"\\"k\\"": ["', BYTES[0], '>", {"', BYTES[1], '": 1}]}'), abs=1e-5
    )


def test_bodies_of_several_parts(seeing: Served, model: Model) -> None:
    body = {"state": ["<a>"], "questions": NOUL, "assets": {"<a>": {"part": "asset-0"}}}
    wanted = expected(model, '["', BYTES[0], '"]')

    def sent(body: Any, **files: bytes) -> Any:
        parts = {"request": (None, json.dumps(body), "application/json"), **files}
        return seeing.http.post(ONE, files=parts)

    answer = sent(body, **{"asset-0": BYTES[0]})
    assert answer.json()["answers"]["q"]["noul"] == pytest.approx(wanted, abs=1e-5)
    missing = sent(body, **{"asset-1": BYTES[0]})
    assert missing.status_code == 422
    assert missing.json()["detail"][0]["loc"] == ["body", "assets", "<a>", "part"]
    for content, kind, message in (
        (b"--b\r\n\r\nx", "multipart/form-data; boundary=b", "cut short"),
        (b"--b\r\n\r\nx\r\n--b--", "multipart/form-data; boundary=b", "has no name of its own"),
        (b"x", "multipart/form-data", "with a boundary"),
        (b"x", "multipart/mixed; boundary=b", "with a boundary"),
    ):
        broken = seeing.http.post(ONE, content=content, headers={"Content-Type": kind})
        assert broken.status_code == 400 and message in broken.text, broken.text


def test_parts_of_a_body_are_bounded() -> None:
    piece = b'--b\r\nContent-Disposition: form-data; name="%d"; filename="f"\r\n\r\n\0\r\n\r\n'
    data = bytearray(b"".join(piece % n for n in range(multipart.MOST_PARTS)) + b"--b--\r\n")
    main, others = multipart.split(data, b"b", "3")
    assert main == b"\0\r\n" and len(others) == 63 and others["9"] == b"\0\r\n" and not data
    data = bytearray(b"".join(piece % n for n in range(65)) + b"--b--")
    with pytest.raises(ValueError, match="has more than 64 parts"):
        multipart.split(data, b"b", "3")
    with pytest.raises(ValueError, match="part 2 of the body has no name of its own"):
        multipart.split(bytearray(2 * (piece % 1) + b"--b--"), b"b", "1")
    assert multipart.boundary_of("application/json") is None


def test_openais_and_geminis_parts(seeing: Served, model: Model) -> None:
    wanted = expected(model, "See\n", BYTES[0])
    text = {"type": "input_text", "text": "See"}
    content = [text, {"type": "input_image", "image_url": URL}]
    answer = seeing.post(
        ANY, input=[{"role": "user", "content": content}], questions=PREDICATE
    ).json()
    assert answer["answers"][0]["probability"] == pytest.approx(wanted, abs=1e-5)
    parts = [{"type": "text", "text": "See"}, {"type": "image", "data": PNG}]
    body = {"input": parts, "questions": NOUL}
    gemini = seeing.http.post(ANY, json=body, headers=GOOGLE).json()
    assert gemini["answers"]["q"]["noul"] == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize(
    ("body", "place"),
    [
        ({"state": "s", "assets": {"<a>": asset()}}, ["body", "assets", "<a>"]),
        ({"state": "s", "assets": {}}, ["body", "assets"]),
        ({"state": "s", "assets": []}, ["body", "assets"]),
        ({"state": "s", "assets": {"": asset()}}, ["body", "assets", ""]),
        ({"state": "s", "assets": {"s": "x"}}, ["body", "assets", "s"]),
        ({"state": "s", "assets": {"s": {"type": "video"}}}, ["body", "assets", "s"]),
        ({"state": "s", "assets": {"s": {"part": "x"}}}, ["body", "assets", "s", "part"]),
    ],
)
def test_assets_that_are_none_are_named(seeing: Served, body: Any, place: list[str]) -> None:
    answer = one(seeing, **body)
    assert answer.status_code == 422, answer.text
    assert answer.json()["detail"][0]["loc"] == place


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"state": "<a>", "assets": {"<a>": asset("AAAA")}}, "assets.<a>.data_base64: "),
        ({"state": "<a>", "assets": {"<a>": asset("?")}}, "base64 data are damaged"),
        ({"state": "s", "assets": {"s": {"type": "image"}}}, "must be a picture in base64"),
        ({"state": "sss", "assets": {"s": asset()}}, "3 pictures, and this server takes 2"),
        ({"state": "a", "assets": dict.fromkeys("abc", asset())}, "3 pictures, and this"),
        ({"state": "See it", "assets": {"it": asset()}}, "questions.q: only a state has"),
        (
            {"state": "<a>", "assets": {"<a>": asset()}, "x_order": "schema"},
            "x_order, assets.<a>.data_base64: puts the state behind each question",
        ),
    ],
)
def test_pictures_that_cannot_be_read_are_named(seeing: Served, body: Any, message: str) -> None:
    questions = {"q": {"type": "noul", "instructions": "Is it?"}}
    answer = one(seeing, **body, questions=questions)
    assert answer.status_code in (400, 422) and message in answer.text, answer.text


def test_a_picture_stands_in_no_question(seeing: Served) -> None:
    image = {"type": "input_image", "image_url": URL}
    questions = [PREDICATE[0] | {"instructions": [image]}]
    answer = seeing.post(ANY, input="s", questions=questions)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "questions[0].instructions[0]"
    body = {"input": "s", "questions": {"q": NOUL["q"] | {"instructions": {"type": "image"}}}}
    gemini = seeing.http.post(ANY, json=body, headers=GOOGLE)
    assert gemini.status_code == 400 and "only a state has pictures" in gemini.text
    spoken = [{"role": "assistant", "content": [image]}]
    answer = seeing.post(ANY, input=spoken, questions=PREDICATE)
    assert answer.status_code == 400 and "only a state" in answer.text


def test_no_text_of_a_body_is_a_mark(seeing: Served) -> None:
    sent = json.dumps({"state": "<a>\ud8000\udfff", "questions": NOUL, "assets": {"<a>": asset()}})
    answer = seeing.http.post(ONE, content=sent, headers={"Content-Type": "application/json"})
    assert answer.status_code == 422 and "the body is not JSON" in answer.text


def test_system_ones_own_client_sends_pictures(seeing: Served, model: Model) -> None:
    sdk = pytest.importorskip("typesafe_sdk")
    with sdk.TypeSafeClient(api_key="any", base_url=seeing.url, timeout=60) as client:
        answer = client.system_one(
            state=["See", sdk.Image(BYTES[0])],
            questions={"q": sdk.Noul(instructions="Is it a one?")},
        )
    wanted = expected(model, '["See", "', BYTES[0], '"]')
    assert answer.nouls["q"].noul == pytest.approx(wanted, abs=1e-5)


def test_a_fill_is_about_a_picture(seeing: Served, model: Model) -> None:
    def filled(data: bytes) -> Any:
        url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
        content = [
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "text", "text": "Which digit is this?"},
        ]
        parts = ["It is ", {"choices": ["one", "two"]}, "."]
        messages = [{"role": "user", "content": content}]
        return seeing.post(FILL, parts=parts, messages=messages, seed=3).json()["holes"][0]

    one, other = filled(BYTES[0]), filled(BYTES[1])
    assert one["probability"] != other["probability"]
    message = [
        {"type": "image", "bytes": BYTES[0]},
        {"type": "text", "text": "Which digit is this?"},
    ]
    own = model.fill(
        ["It is ", Hole(choices=["one", "two"]), "."],
        messages=[{"role": "user", "content": message}],
        seed=3,
    )
    assert own.holes[0].text == one["text"]
    assert own.holes[0].probability == pytest.approx(one["probability"], abs=1e-4)
