from __future__ import annotations

from sfumato.train.canvas_rows import CanvasRow, copies
from sfumato.train.vocabulary import TOKENS, encode_chat, encode_text


def test_a_text_repeats_the_words_that_its_prompt_has_once():
    prompt = encode_chat([{"role": "user", "content": "2 or 3 pears, pears for Ann"}])
    row = CanvasRow("json", prompt, encode_text('{"Ann": 2, "pears": 3, "or": 4}'))
    pairs = list(copies(row))
    context = prompt + row.target
    assert all(context[a] == context[b] and b < len(prompt) <= a for a, b in pairs)
    assert "".join(TOKENS[context[a]] for a, _ in pairs) == "Ann23or"
    assert not list(copies(row._replace(kind="questions")))


def test_the_second_canvas_repeats_the_prompt_and_not_the_first_canvas():
    prompt = encode_chat([{"role": "user", "content": "Ann"}])
    row = CanvasRow(
        "json", prompt + encode_text("Bob "), encode_text("Bob Ann"), prompt=len(prompt)
    )
    pairs = list(copies(row))
    first = len(prompt) + len("Bob Bob ")
    source = prompt.index(encode_text("A")[0])
    assert pairs == [(first + i, source + i) for i in range(3)]
