"""The page's Decide view: answers that follow what is typed, errors on their cards, programs."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from starlette.responses import JSONResponse
from tests.server.page.browsing import expect, props, says
from tests.server.page.test_pictures import DATA_URL, GIVE, PNG, file, vision

ROUTE = "/v1/systemone"
FAILED = "Failed to load resource"
SLOW_MS = 15_000  # for a real answer


@pytest.fixture
def decide(open_page: Callable[..., Any]) -> Callable[..., Any]:
    """Opens the Decide view; `answer(body)` stands in for the server, where it is given."""

    def open_(answer: Callable[[Any], Any] | None = None) -> Any:
        page = open_page(expected=rf"\Z.|{FAILED}")
        if answer is not None:
            page.front.answers[ROUTE] = lambda body: JSONResponse(*answer(body)[::-1])
        page.get_by_role("button", name="Decide").click()
        return page

    return open_


def bodies(page: Any) -> list[Any]:
    return list(page.front.bodies(ROUTE))


def reply_to(question: Any, share: float = 0.9, **figures: Any) -> dict[str, Any]:
    beside = {"x_label_mass": 0.99, "x_is_label": True, "x_samples": 1, "x_spread": 0.0}
    beside |= {"x_orders": 1, "x_order_spread": 0.0, **figures}
    if question["type"] == "noul":
        return {"type": "noul", "noul": share, **beside}
    names = [*question["criteria"]]
    shares = [share, *[(1 - share) / (len(names) - 1)] * (len(names) - 1)]
    if question["type"] == "choice":
        answer = {"choice": names[0], "probabilities": dict(zip(names, shares, strict=True))}
    else:
        answer = {
            "score": 0.5,
            "legend": dict(enumerate(names)),
            "probabilities": dict(enumerate(shares)),
        }
    return {"type": question["type"], **answer, "confidence": 0.5, **beside}


def all_of(body: Any, **how: Any) -> Any:
    usage = {"input_tokens": 9, "output_tokens": 1, "x_cached_tokens": 4, "x_reads": 1}
    answers = {name: reply_to(one, **how) for name, one in body["questions"].items()}
    return 200, {"answers": answers, "usage": usage}


def test_answers_follow_what_is_typed(decide: Callable[..., Any]) -> None:
    def answer(body: Any) -> Any:
        figures = {"x_samples": body["x_samples"], "x_spread": 0.1, "x_orders": 2}
        status, reply = all_of(body, **figures if body.get("x_orders") else {})
        if "x_verify" in body:
            others = {"noul": False, "choice": "forks", "score": 2}
            for one in reply["answers"].values():
                one |= {"x_undecided": True, "x_other": others[one["type"]]}
        return status, reply

    page = decide(answer)
    cards = page.locator(".question")
    expect(cards.locator(".headline")).to_have_text(["yes, 90.0 %", "cups", "1 to 3"])
    numbers = cards.nth(1).locator(".number").all_inner_texts()
    assert sum(float(number.split()[0]) for number in numbers) == pytest.approx(100, abs=0.3)
    bars = [row.bounding_box()["width"] for row in cards.nth(1).locator(".row .bar").all()]
    assert bars[0] > 5 * bars[1]
    expect(cards.nth(2).locator(".figures")).to_contain_text("score 0.50 from 0 to 2")
    expect(cards.nth(2).locator(".figures")).to_contain_text("label mass 0.99")
    expect(page.locator("#decide-status")).to_contain_text("1 read in")
    page.front.requests.clear()
    cards.nth(1).get_by_label("Option 4", exact=True).press("Enter")
    page.keyboard.type("10")
    expect(cards.nth(1).locator(".number").nth(4)).to_contain_text("%")
    expect(page.locator(".stale")).to_have_count(0)
    for body in bodies(page):  # the other answers hold
        assert list(body["questions"]) == ["what_was_ordered"]
    assert list(bodies(page)[-1]["questions"]["what_was_ordered"]["criteria"])[-1] == "10"
    for _ in range(3):
        page.keyboard.press("Backspace")
    expect(cards.nth(1).locator(".row")).to_have_count(4)
    page.locator("select[name=samples]").select_option("4")
    page.locator("select[name=orders]").select_option("2")
    figures = cards.first.locator(".figures")
    expect(figures).to_contain_text("spread 0.10 over 4 samples")
    expect(figures).to_contain_text("order spread 0.00 over 2 orders")
    assert "x_verify" not in bodies(page)[-1]
    page.locator("select[name=verify]").select_option("abstain")
    for number, other in enumerate(("no", "forks", "7 to 9")):
        words = f"undecided: the causal mode answers {other}"
        expect(cards.nth(number).locator(".figures")).to_contain_text(words)
    page.locator("select[name=verify]").select_option("none")
    expect(figures).not_to_contain_text("undecided")
    page.fill("#state", "A bag holds 3 red and 7 blue balls. One is drawn.")
    page.get_by_label("Remove the question").last.click()
    page.get_by_role("button", name="Yes or no").click()
    page.keyboard.type("Is it red?")
    page.reload()
    expect(page.locator("#decide")).to_be_visible()  # the address names the view
    expect(cards).to_have_count(3)
    expect(cards.last.get_by_label("Instructions")).to_have_value("Is it red?")
    assert page.input_value("#state").startswith("A bag")
    expect(page.locator("select[name=samples]")).to_have_value("4")
    page.get_by_role("button", name="A drawn ball").click()
    expect(cards).to_have_count(2)
    page.get_by_role("button", name="Undo").click()
    expect(cards).to_have_count(3)
    page.go_back()
    expect(page.locator("#chat")).to_be_visible()


def test_replies_that_are_out_of_date_are_dropped(decide: Callable[..., Any]) -> None:
    page = decide(all_of)
    for _ in range(2):
        page.get_by_label("Remove the question").last.click()
    card = page.locator(".question")
    expect(card.locator(".headline")).to_have_text("yes, 90.0 %")
    held: list[Any] = []
    aborted: list[str] = []

    def note(request: Any) -> None:
        aborted.append(json.loads(request.post_data)["state"])

    page.on("requestfailed", note)
    page.route(f"**{ROUTE}", lambda route: held.append(route))
    with page.expect_request(f"**{ROUTE}"):
        page.fill("#state", "first")
    expect(card).to_have_class("question stale")
    with page.expect_request(f"**{ROUTE}"):
        page.fill("#state", "second")
    for _ in range(100):  # ten seconds at most
        page.wait_for_timeout(100)
        if aborted:
            break
    assert aborted == ["first"] and len(held) == 2
    page.remove_listener("requestfailed", note)
    # A reply to a text that has changed since, before the next read begins.
    page.evaluate("document.querySelector('#state').value = 'third'")
    body = json.loads(held[1].request.post_data)
    with page.expect_response(f"**{ROUTE}"):
        held[1].fulfill(json=all_of(body, share=0.2)[1])
    page.wait_for_timeout(100)
    expect(card.locator(".headline")).to_have_text("yes, 90.0 %")
    with page.expect_request(f"**{ROUTE}"):
        page.type("#state", "!")
    page.wait_for_timeout(100)
    body = json.loads(held[2].request.post_data)
    held[2].fulfill(json=all_of(body, share=0.3)[1])
    expect(card.locator(".headline")).to_have_text("no, 70.0 %")
    assert body["state"] == "third!" or body["state"] == "!third"


def test_errors_stand_where_they_belong(decide: Callable[..., Any]) -> None:
    def answer(body: Any) -> Any:
        if "refused" in body["questions"]:
            place = ["body", "questions", "refused", "noul", "criteria", "true"]
            return 422, {"detail": [{"loc": place, "msg": "must be a text", "type": "x"}]}
        if body["state"] == "busy":
            words = {"error_type": "rate_limit_error", "message": "the queue is full"}
            return 429, {"detail": words}
        return all_of(body, x_label_mass=0.01)

    page = decide(answer)
    first, second = page.locator(".question").nth(0), page.locator(".question").nth(1)
    page.get_by_label("Remove the question").last.click()
    first.get_by_label("Instructions").fill("refused")
    expect(first.locator(".problem")).to_have_text("True: must be a text")
    second.get_by_label("Kind").select_option("noul")
    expect(second.locator(".headline")).to_have_text("yes, 90.0 %")
    expect(second.locator(".advice")).to_contain_text("rather write something else")
    page.fill("#state", "another")
    expect(second.locator(".headline")).to_have_text("yes, 90.0 %")
    first.get_by_label("Instructions").fill("accepted")
    expect(first.locator(".problem")).to_be_hidden()
    expect(page.locator("#decide-unfit")).to_be_visible()
    page.fill("#state", "busy")
    expect(page.locator("#decide-problem")).to_contain_text("The queue is full")
    page.fill("#state", "")
    expect(page.locator("#decide-problem")).to_be_hidden()
    second.get_by_label("Kind").select_option("choice")
    second.get_by_label("Option 1", exact=True).fill("books")
    expect(second.locator(".problem")).to_contain_text("Two options have the name “books”")
    first.get_by_label("Instructions").fill(" ")
    expect(first.locator(".problem")).to_have_text("Write the question.")
    expect(page.locator("#decide-code")).to_be_disabled()


def test_the_programs_make_the_same_call(decide: Callable[..., Any]) -> None:
    """With the real server. Options that are numbers keep their order, and quotes are quotes."""
    page = decide()
    answered = page.locator(".question:has(.best)")
    expect(answered).to_have_count(3, timeout=SLOW_MS)  # the server's first example
    page.locator("select[name=samples]").select_option("1")
    page.get_by_label("Remove the question").first.click()
    page.get_by_label("Remove the question").last.click()
    card = page.locator(".question")
    page.fill("#state", 'It\'s "late", $HOME `x` ${y} \\n\nand 10 more. €')
    for number, name in enumerate(("10", "2", "it's", "__proto__")):
        card.get_by_label(f"Option {number + 1}", exact=True).fill(name)
    card.get_by_role("button", name="Descriptions").click()
    card.get_by_label("Meaning of option 2").fill("two\\")
    expect(page.locator(".stale")).to_have_count(0, timeout=SLOW_MS)
    expect(card.locator(".number").nth(3)).to_contain_text("%")
    body = bodies(page)[-1]
    assert list(body["questions"]["what_was_ordered"]["criteria"]) == [
        "10",
        "2",
        "it's",
        "__proto__",
    ]
    url = page.url.replace("#decide", "v1/systemone")
    shown = float(card.locator(".number").first.inner_text().split()[0]) / 100

    def program(language: str) -> str:
        page.locator("#program").get_by_role("button", name=language).click()
        return str(page.locator("#program code").inner_text())

    page.get_by_role("button", name="Show as code").click()
    curl = program("curl")
    run = subprocess.run(["bash", "-c", curl], capture_output=True, text=True, timeout=30)
    answers = [json.loads(run.stdout)["answers"]]
    run = subprocess.run(
        [sys.executable, "-c", program("Python")], capture_output=True, text=True, timeout=30
    )
    assert run.returncode == 0, run.stderr
    answers.append({"what_was_ordered": eval(run.stdout.partition(" ")[2])})
    script = program("TypeScript").replace("console.log(answers)", "return JSON.stringify(answers)")
    answers.append(json.loads(page.evaluate(f"async () => {{ {script} }}")))
    for answer in answers:
        probabilities = answer["what_was_ordered"]["probabilities"]
        assert set(probabilities) == {"10", "2", "it's", "__proto__"}
        assert probabilities["10"] == pytest.approx(shown, abs=6e-4)
    assert bodies(page)[-1] == body  # what the TypeScript program sent
    assert url in curl and "Authorization" not in curl
    page.keyboard.press("Escape")
    page.evaluate("sessionStorage.setItem('sfumato.key', '\"secret\"')")
    page.reload()
    page.get_by_role("button", name="Show as code").click()
    for language in ("curl", "Python", "TypeScript"):
        text = program(language)
        assert "SFUMATO_API_KEY" in text and "secret" not in text


def test_the_view_offers_what_the_model_can_do(decide: Callable[..., Any]) -> None:
    """None is where it cannot decide, and a state has pictures where it sees."""
    page = decide(all_of)
    expect(page.locator("#decide")).to_be_visible()
    about = props(page)
    says(page, "/props", {**about, "decisions": None})
    page.reload()  # at the view's address
    expect(page.locator("#chat")).to_be_visible()
    assert page.get_by_role("button", name="Decide").is_disabled()
    assert not page.get_by_role("link", name="Decide").is_visible()
    attach = page.locator("#decide-attach")
    says(page, "/props", vision(about, 0))
    page.reload()
    page.get_by_role("link", name="Decide").click()
    expect(page.locator("#state")).to_have_attribute("placeholder", re.compile("no images"))
    expect(attach).to_be_hidden()
    says(page, "/props", vision(about, 2))
    page.reload()
    expect(attach).to_be_visible()
    expect(page.locator("#state")).not_to_have_attribute("placeholder", re.compile("images"))
    page.locator("select[name=order]").select_option("schema")
    page.fill("#state", "Look at it.")
    expect(page.locator(".stale")).to_have_count(0)
    page.front.requests.clear()
    page.set_input_files("#decide-attach input[multiple]", [file("a.png")])
    pictures = page.locator("#decide-tray img")
    expect(pictures).to_have_count(1)
    expect(page.locator("select[name=order]")).to_be_disabled()
    expect(page.locator(".stale")).to_have_count(0)
    body = bodies(page)[-1]
    ((placeholder, asset),) = body["assets"].items()
    assert body["state"] == f"{placeholder}\nLook at it." and "x_order" not in body
    assert f"data:image/png;base64,{asset['data_base64']}" == DATA_URL
    assert len(body["questions"]) == page.locator(".question").count()  # all are asked anew
    paste = ["paste", "b.png", base64.b64encode(PNG).decode(), "image/png"]
    page.evaluate(GIVE.replace("'prompt'", "'state'"), paste)
    expect(pictures).to_have_count(2)
    page.get_by_role("button", name="Show as code").click()
    expect(page.locator("#program code")).to_contain_text("the base64 of b.png")
    page.keyboard.press("Escape")
    page.get_by_role("button", name="A drawn ball").click()
    expect(pictures).to_have_count(0)
    page.get_by_role("button", name="Undo").click()
    expect(pictures).to_have_count(2)
    for name in ("a.png", "b.png"):
        page.locator("#decide-tray").get_by_label(f"Remove {name}").click()
    expect(page.locator("select[name=order]")).to_be_enabled()
    expect(page.locator(".stale")).to_have_count(0)
    assert "assets" not in bodies(page)[-1] and bodies(page)[-1]["x_order"] == "schema"
