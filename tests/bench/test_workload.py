from __future__ import annotations

import json
from pathlib import Path

import pytest

from sfumato.bench.report import Case, Prompt, Work, cases
from sfumato.bench.report import read_prompts as prompts_of
from sfumato.cli.files import read_text


def read_prompts(path: Path) -> list[Prompt]:
    """As `sfumato bench --prompts` reads them."""
    return prompts_of(read_text(str(path)), str(path))


def written(folder: Path, text: str | bytes) -> Path:
    path = folder / "prompts.txt"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def question(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_a_prompt_a_line(tmp_path: Path) -> None:
    path = written(tmp_path, "Why?\n\n  What is [this]? \n")
    assert read_prompts(path) == [question("Why?"), question("What is [this]?")]


def test_json_objects(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Be brief."}, *question("Why?")]
    lines = [json.dumps({"messages": messages}), "", json.dumps({"text": "How?", "id": 7})]
    assert read_prompts(written(tmp_path, "\n".join(lines))) == [messages, question("How?")]


def test_a_byte_order_mark_is_no_part_of_the_first_prompt(tmp_path: Path) -> None:
    assert read_prompts(written(tmp_path, "\ufeffWhy?\r\nHow?\r\n")) == [
        question("Why?"), question("How?"),
    ]  # fmt: skip
    assert read_prompts(written(tmp_path, '\ufeff{"text": "Why?"}\r\n')) == [question("Why?")]


def test_only_line_ends_part_prompts(tmp_path: Path) -> None:
    text = "one\u2028two\x0cthree\x85four"
    assert read_prompts(written(tmp_path, text)) == [question(text)]
    line = json.dumps({"text": text}, ensure_ascii=False)
    assert read_prompts(written(tmp_path, line)) == [question(text)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\n \n", "has no prompts"),
        (b"\xff\xfe", "is not UTF-8"),
        ('{"text": "a"}\nb', r"prompts\.txt:2: is not JSON"),
        ('{"text": "a"}\n[1]', r"prompts\.txt:2: must be an object"),
        ('{"prompt": "a"}', r"prompts\.txt:1: has \['prompt'\], but no messages"),
        ('{"messages": [{"role": "cat"}]}', r"prompts\.txt:1: messages\[0\]\.role"),
    ],
)
def test_bad_prompts_are_named(tmp_path: Path, text: str | bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_prompts(written(tmp_path, text))


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_prompts(tmp_path / "none")


def test_repeats_draw_anew_and_warm_ups_do_not_count() -> None:
    work = Work([5, 6], warmup=3, repeats=2, seed=10)
    assert work.warmups() == [(5, 10), (6, 10), (5, 10)]
    assert work.requests() == [(5, 10), (6, 10), (5, 11), (6, 11)]


def test_cases_are_every_combination() -> None:
    assert cases([64]) == [Case(64)]
    assert cases([64, 128], threads=[1, 2], context=[0]) == [
        Case(64, 1, 0), Case(64, 2, 0), Case(128, 1, 0), Case(128, 2, 0),
    ]  # fmt: skip
    assert [case.concurrency for case in cases([8], concurrency=[1, 4])] == [1, 4]
