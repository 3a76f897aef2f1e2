"""Typed decisions in three forms: what the engine is asked, what clients get, and how errors look.

Answers are the fake engine's: the first of two options has the probability 2/3.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from fastapi.testclient import TestClient
from tests.support.fake_engine import FakeEngine

from sfumato.diffusion.constraints.questions import (
    ChoiceQuestion,
    Option,
    ScoreQuestion,
    YesNoQuestion,
)
from sfumato.engine import EngineDead, Failed, QueueFull, TooLarge
from sfumato.refused import Refused
from sfumato.server.app import create_app
from sfumato.server.dialects.decisions.forms import option_names
from sfumato.server.models import Models
from sfumato.server.settings import ServerSettings

ONE, ANY = "/v1/systemone", "/v1/decisions"
NOUL = {"type": "noul", "instructions": "Urgent?"}
SYSTEM_ONE: dict[str, Any] = {
    "model": "jev-latest",
    "state": {"ticket": "Zweimal bezahlt"},
    "questions": {
        "q.1 🎯": {"type": "noul", "instructions": "Urgent?", "criteria": {"true": ["money"]}},
        "team": {"type": "choice", "criteria": {"billing": {"owns": 1}, "tech": None}},
        "anger": {"type": "score", "instructions": "How?", "criteria": ["calm", {"label": "mad"}]},
    },
}
OPENAI: dict[str, Any] = {
    "model": "m",
    "input": "Charged twice",
    "questions": [
        {"type": "predicate", "name": "urgent", "instructions": "Urgent?"},
        {
            "type": "choice",
            "instructions": [{"type": "input_text", "text": "Which?"}],
            "choices": [{"value": True, "description": "it is"}, {"value": "true"}],
        },
        {"type": "score", "instructions": "How?", "levels": [{"label": "a"}, {"label": "b"}]},
    ],
}
GEMINI: dict[str, Any] = {
    "model": "models/m",
    "input": [{"type": "text", "text": "Charged"}, {"type": "text", "text": "twice"}],
    "questions": {
        "urgent": {
            "type": "noul",
            "instructions": {"type": "text", "text": "Urgent?"},
            "criteria": {"true_description": "money"},
        },
        "team": {"type": "choice", "instructions": "Which?", "criteria": {"a": "x", "b": "y"}},
        "anger": {"type": "score", "instructions": "How?", "criteria": ["calm", "mad"]},
    },
}
GOOGLE = {"x-goog-api-key": "k"}


class Client:
    def __init__(self, failure: Failed | None = None, **settings: Any) -> None:
        self.engine = FakeEngine(failure)
        app = create_app(Models("m", self.engine), ServerSettings(**settings))
        self.http = TestClient(app, raise_server_exceptions=False)

    def post(self, path: str, body: Any, **headers: str) -> Any:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.http.post(path, json=body, headers=names)

    def questions(self, *questions: Any, **body: Any) -> Any:
        numbered = {str(number): question for number, question in enumerate(questions)}
        return self.post(ONE, {"state": "s", "questions": numbered} | body)


@pytest.fixture
def client() -> Client:
    return Client()


@pytest.mark.parametrize("path", [ONE, ANY])
def test_system_one(client: Client, path: str) -> None:
    answer = client.post(path, SYSTEM_ONE)
    (request,) = client.engine.decisions
    assert request.state == '{"ticket": "Zweimal bezahlt"}' and request.endpoint == path
    assert dict(request.questions) == {
        "q.1 🎯": YesNoQuestion("Urgent?", '["money"]'),
        "team": ChoiceQuestion("", (Option("billing", '{"owns": 1}'), Option("tech"))),
        "anger": ScoreQuestion("How?", ("calm", '{"label": "mad"}')),
    }
    body = answer.json()
    assert answer.status_code == 200 and answer.headers["x-typesafe-request-id"] == request.id
    assert answer.headers["x-request-id"] == request.id
    own = {"x_label_mass", "x_is_label", "x_samples", "x_spread", "x_orders", "x_order_spread"}
    plain = {
        name: {key: value for key, value in each.items() if key not in own}
        for name, each in body["answers"].items()
    }
    most, third = pytest.approx(2 / 3), pytest.approx(1 / 3)
    assert body["model"] == "m"
    assert plain == {
        "q.1 🎯": {"type": "noul", "noul": most},
        "team": {
            "type": "choice",
            "choice": "billing",
            "probabilities": {"billing": most, "tech": third},
            "confidence": third,
        },
        "anger": {
            "type": "score",
            "score": third,
            "legend": {"0": "calm", "1": {"label": "mad"}},
            "probabilities": {"0": most, "1": third},
            "confidence": third,
        },
    }
    assert own <= body["answers"]["team"].keys() and body["answers"]["team"]["x_label_mass"] == 0.9
    usage = {"input_tokens": 12, "output_tokens": 3, "x_cached_tokens": 3, "x_reads": 3}
    assert body["usage"] == usage


def test_openai(client: Client) -> None:
    answer = client.post(ANY, OPENAI)
    body = answer.json()
    assert "x-typesafe-request-id" not in answer.headers
    assert list(client.engine.decisions[0].questions.values()) == [
        YesNoQuestion("Urgent?"),
        ChoiceQuestion("Which?", (Option("true (boolean)", "it is"), Option("true"))),
        ScoreQuestion("How?", ("a", "b")),
    ]
    yes, choice, score = body["answers"]
    assert (yes["type"], yes["name"], yes["probability"]) == (
        "predicate",
        "urgent",
        pytest.approx(2 / 3),
    )
    assert choice["name"] is None and choice["choice"] is True
    assert [each["value"] for each in choice["probabilities"]] == [True, "true"]
    assert [(p["value"], p["label"]) for p in score["probabilities"]] == [(0, "a"), (1, "b")]
    assert body["usage"]["input_tokens_details"]["cached_tokens"] == 3
    assert option_names([False, "false", "false (boolean)"])[0] == "false (boolean) (boolean)"


def test_gemini(client: Client) -> None:
    body = client.post(ANY, GEMINI, **GOOGLE).json()
    (request,) = client.engine.decisions
    assert request.state == "Charged\ntwice"
    assert request.questions["urgent"] == YesNoQuestion("Urgent?", "money")
    assert body.keys() == {"answers", "usage"} and body["usage"]["total_input_tokens"] == 12
    assert {round(each["confidence"], 6) for each in body["answers"].values()} == {0.666667}
    assert body["answers"]["urgent"]["noul"] == body["answers"]["urgent"]["confidence"]


def test_a_chat_as_state(client: Client) -> None:
    user = {"role": "user", "content": [{"type": "input_text", "text": 'a"\n{"role": "system"'}]}
    call = {"type": "function_call", "name": "f", "call_id": "c-77", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c-77", "output": "42"}
    data = {"role": "user", "content": [{"type": "input_json", "data": {"a": 1}}]}
    client.post(ANY, OPENAI | {"input": [user]})
    client.post(ANY, OPENAI | {"input": [user, call, output, data]})
    first, second = (request.state for request in client.engine.decisions)
    assert first == 'a"\n{"role": "system"'
    assert [json.loads(line) for line in second.split("\n")] == [
        {"role": "user", "content": 'a"\n{"role": "system"'},
        {"type": "function_call", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "name": "f", "output": "42"},
        {"role": "user", "content": '{"a": 1}'},
    ]


@pytest.mark.parametrize(
    ("item", "where"),
    [
        (5, "input[0]"),
        ({"type": ["message"]}, "input[0].type"),
        ({"role": ["user"], "content": "x"}, "input[0].role"),
        ({"role": "tool", "content": "x"}, "input[0].role"),
        ({"role": "user"}, "input[0].content"),
        ({"role": "user", "content": [5]}, "input[0].content[0].type"),
        ({"role": "user", "content": [{"type": []}]}, "input[0].content[0].type"),
        ({"role": "user", "content": [{"type": "input_json"}]}, "input[0].content[0].data"),
        ({"type": "function_call", "name": "f", "call_id": []}, "input[0].call_id"),
        ({"type": "function_call_output", "call_id": "x"}, "input[0].call_id"),
    ],
)
def test_a_wrong_message(client: Client, item: Any, where: str) -> None:
    answer = client.post(ANY, OPENAI | {"input": [item]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, where)
    assert client.post(ANY, GEMINI | {"input": [{"type": []}]}, **GOOGLE).status_code == 400


@pytest.mark.parametrize("value", [True, "4", 4.0, 0, 4097, 1e99, [1], {}])
def test_wrong_samples(client: Client, value: Any) -> None:
    (detail,) = client.questions(NOUL, x_samples=value).json()["detail"]
    assert detail["loc"] == ["body", "x_samples"] and "whole number" in detail["msg"]


def test_a_second_reader(client: Client) -> None:
    own = {"x_verify": "abstain"}
    answers = client.post(ONE, SYSTEM_ONE | own).json()["answers"].values()
    assert [(each["x_undecided"], each["x_other"]) for each in answers] == [
        *[(True, False), (True, "tech"), (True, 1)]
    ]
    answers = client.post(ANY, OPENAI | own).json()["answers"]
    assert [each["x_other"] for each in answers] == [False, "true", 1]
    error = client.post(ANY, OPENAI | own | {"x_joint": True}).json()["error"]
    assert "each question by itself" in error["message"] and "x_joint" in error["message"]


def test_settings(client: Client) -> None:
    own = {"x_joint": True, "x_samples": "auto", "x_orders": 2, "x_order": "schema", "x_steps": 8}
    own |= {"x_seed": -1, "x_label_mass": False, "x_timeout": 2.5, "x_unknown": {}, "seed": "?"}
    for path, body in ((ONE, SYSTEM_ONE), (ANY, OPENAI)):
        assert client.post(path, body | own).status_code == 200
        request = client.engine.decisions[-1]
        assert (request.joint, request.samples, request.orders) == (True, "auto", 2)
        assert (request.order, request.steps, request.seed) == ("schema", 8, 2**64 - 1)
        assert (request.label_mass, request.timeout_s) == (False, 2.5)


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        ({}, {}),
        ({"state": "s", "input": "s", "questions": {"a": NOUL}}, {}),
        ({"state": "s", "input": "s", "questions": {"a": NOUL}}, GOOGLE),
        ({"input": "s", "questions": {"a": NOUL}}, {}),  # Gemini's, without its header
        ({"state": "s", "questions": [NOUL]}, {}),
        ({"state": "s"}, {}),
    ],
)
def test_a_body_of_no_form_gets_openais_error(client: Client, body: Any, headers: Any) -> None:
    answer = client.post(ANY, body, **headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unknown_form")


WRONG: list[tuple[Any, list[Any], str]] = [
    ({"type": "boolean", "instructions": "?"}, [], "union_tag_invalid"),
    ({"instructions": "?"}, [], "union_tag_not_found"),
    (5, [], "model_attributes_type"),
    ({"type": "noul"}, ["noul"], "value_error"),
    ({"type": "noul", "instructions": 5}, ["noul", "instructions"], "text_type"),
    ({"type": "noul", "instructions": "?", "ask_if": {}}, ["noul", "ask_if"], "extra_forbidden"),
    ({"type": "choice", "criteria": {}}, ["choice", "criteria"], "too_short"),
    ({"type": "choice"}, ["choice", "criteria"], "missing"),
    ({"type": "score", "criteria": {"0": "a"}}, ["score", "criteria"], "list_type"),
    ({"type": "score", "criteria": ["a", None]}, ["score", "criteria", 1], "text_type"),
]


@pytest.mark.parametrize(("question", "loc", "kind"), WRONG)
def test_a_wrong_question(client: Client, question: Any, loc: list[Any], kind: str) -> None:
    answer = client.questions(question)
    (detail,) = answer.json()["detail"]
    assert (answer.status_code, detail["type"]) == (422, kind)
    assert detail["loc"] == ["body", "questions", "0", *loc] and detail["msg"]
    openai = client.post(ANY, {"input": "s", "questions": [question]})
    assert openai.status_code == 400 and "questions[0]" in openai.json()["error"]["message"]
    google = client.post(ANY, {"input": "s", "questions": {"a": question}}, **GOOGLE).json()
    assert (google["error"]["code"], google["error"]["status"]) == (400, "INVALID_ARGUMENT")


@pytest.mark.parametrize(
    ("body", "loc"),
    [
        (b'{"state": "x", "questions": {', []),
        (b"[1]", []),
        (b'{"state": "x", "questions": {"a": {"type": "noul"}, "a": {"type": "noul"}}}', []),
        (b'{"state": NaN, "questions": {}}', []),
        (b'{"state": "\\ud800", "questions": {}}', []),
        (b'{"state": "s", "x_seed": ' + b"9" * 5000 + b', "questions": {}}', []),
        (b'{"state":' + b"[" * 200, []),
        (b"\xff", []),
        (b'{"questions": {}}', ["state"]),
        (b'{"state": null, "questions": {}}', ["state"]),
        (b'{"state": [1e999], "questions": {}}', ["state"]),
        (b'{"state": "s"}', ["questions"]),
        (b'{"state": "s", "questions": {}}', ["questions"]),
        (b'{"state": "s", "questions": []}', ["questions"]),
        (b'{"state": "s", "questions": {"": 1}}', ["questions", ""]),
        (b'{"state": "s", "questions": {}, "x_steps": 9}', ["x_steps"]),
        (b'{"state": "s", "questions": {}, "x_samples": 0}', ["x_samples"]),
        (b'{"state": "s", "questions": {}, "x_samples": "ten"}', ["x_samples"]),
        (b'{"state": "s", "questions": {}, "x_orders": 1e9}', ["x_orders"]),
        (b'{"state": "s", "questions": {}, "x_order": "both"}', ["x_order"]),
    ],
)
def test_a_wrong_body(client: Client, body: bytes, loc: list[str]) -> None:
    answer = client.http.post(ONE, content=body)
    assert answer.status_code == 422
    (detail,) = answer.json()["detail"]
    assert detail["loc"] == ["body", *loc] and detail["msg"] and detail["type"]


def test_more_reads_than_one_request_has(client: Client) -> None:
    good = client.questions(*[NOUL] * 64, x_samples=8, x_orders=8)
    assert good.status_code == 200
    over = client.questions(*[NOUL] * 65, x_samples=8, x_orders=8)
    assert over.status_code == 422 and "4,160 reads" in over.json()["detail"][0]["msg"]
    assert client.questions(*[NOUL] * 1024, x_samples="auto").status_code == 200
    assert client.questions(*[NOUL] * 1024, x_samples=5).status_code == 422


def test_unknown_fields_of_questions_pass_where_the_server_is_lenient() -> None:
    question = NOUL | {"depends_on": ["a"], "other": None}
    assert Client(lenient=True).questions(question).status_code == 200
    assert Client().questions(NOUL | {"other": None}).status_code == 200
    assert Client().questions(question).status_code == 422


def test_a_model_without_a_tower_says_so(client: Client) -> None:
    asset = {"type": "image", "format": "png", "data_base64": "AAAA"}
    image = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
    picture = {"type": "image", "data": "AAAA", "mime_type": "image/png"}
    parts = {
        "request": (None, json.dumps(SYSTEM_ONE | {"assets": {"Zwei": {"part": "asset-0"}}})),
        "asset-0": b"x",
    }
    answers = [
        client.questions(NOUL, assets={"s": asset}),
        client.http.post(ONE, files=parts),
        client.post(ANY, OPENAI | {"input": [{"role": "user", "content": [image]}]}),
        client.post(ANY, GEMINI | {"input": [picture]}, **GOOGLE),
    ]
    for answer in answers:
        assert answer.status_code == 400 and "this model reads no pictures" in answer.text
    assert all(a.json()["detail"]["error_type"] == "api_usage_error" for a in answers[:2])
    box = client.questions({"type": "box", "instructions": "Where?"})
    assert box.status_code == 400 and "box questions are about images" in box.text


@pytest.mark.parametrize(
    ("refusal", "one", "word", "google"),
    [
        (TooLarge("state", "too long", "", 9, 5), 413, "request_too_large_error", 400),
        (QueueFull("full"), 529, "overloaded_error", 503),
        (EngineDead("closed"), 503, "service_unavailable_error", 503),
    ],
)
def test_refusals_of_the_engine(
    client: Client, refusal: Exception, one: int, word: str, google: int
) -> None:
    client.engine.refusal = refusal
    answer = client.post(ONE, SYSTEM_ONE)
    assert (answer.status_code, answer.json()["detail"]["error_type"]) == (one, word)
    assert answer.headers["x-typesafe-request-id"]
    openai = client.post(ANY, OPENAI)
    assert openai.status_code == {413: 400, 529: 503}.get(one, one)
    assert ("input" if one == 413 else None) == openai.json()["error"]["param"]
    assert client.post(ANY, GEMINI, **GOOGLE).status_code == google


def test_a_value_that_the_engine_refuses_names_its_field(client: Client) -> None:
    client.engine.refusal = Refused("questions.0", "its labels cannot be told apart")
    answer = client.questions(NOUL)
    (detail,) = answer.json()["detail"]
    assert (answer.status_code, detail["loc"]) == (422, ["body", "questions"])
    assert detail["msg"] == "its labels cannot be told apart"
    error = client.post(ANY, OPENAI).json()["error"]
    assert error["param"] == "questions[0]" and error["message"].startswith("questions[0]: its")
    client.engine.refusal = Refused("questions.a question", "is too long")
    (detail,) = client.questions(NOUL).json()["detail"]
    assert detail["loc"] == ["body", "questions"] and "a question: is too long" in detail["msg"]
    client.engine.refusal = ValueError("seed: is too large")
    assert client.questions(NOUL).status_code == 400


@pytest.mark.parametrize(
    ("kind", "one", "google"),
    [("memory", 529, 503), ("timeout", 504, 504), ("shutdown", 503, 503), ("internal", 500, 500)],
)
def test_failures(kind: Any, one: int, google: int) -> None:
    client = Client(Failed(kind, "why"))
    answer = client.post(ONE, SYSTEM_ONE)
    assert (answer.status_code, answer.json()["detail"]["message"]) == (one, "why")
    assert client.post(ANY, GEMINI, **GOOGLE).status_code == google
