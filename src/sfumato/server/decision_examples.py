"""Example decisions for the page, in System One's form, and a note about the embedded model."""

from __future__ import annotations

from typing import Any

NOTE = (
    "This demonstration model decides about short English texts like those of the examples: "
    "orders, countries, reviews, counts, chances. About other texts its answers mean nothing."
)


def _yes_no(text: str) -> dict[str, Any]:
    return {"type": "noul", "instructions": text}


def _choice(text: str, *options: str, **described: str) -> dict[str, Any]:
    criteria = {**dict.fromkeys(options), **described}
    return {"type": "choice", "instructions": text, "criteria": criteria}


def _score(text: str, *levels: str) -> dict[str, Any]:
    return {"type": "score", "instructions": text, "criteria": list(levels)}


# States and questions as train/decision_states.py makes them. The second leaves its questions open.
_EMBEDDED = (
    {
        "title": "An order",
        "state": "Emma ordered 3 cups. The order is late.",
        "questions": {
            "late": _yes_no("Is it late?"),
            "goods": _choice("What was ordered?", "cups", "books", "pens", "shoes"),
            "number": _score("How many were ordered?", "1 to 3", "4 to 6", "7 to 9"),
        },
    },
    {
        "title": "A drawn ball",
        "state": "A bag holds 3 red and 7 blue balls. One is drawn.",
        "questions": {
            "red": _yes_no("Is it red?"),
            "colour": _choice("Which colour is it?", "red", "blue"),
        },
    },
    {
        "title": "A review",
        "state": "Hugo says that the hotel is superb.",
        "questions": {
            "complaint": _yes_no("Is it a complaint?"),
            "tone": _choice("What is the tone?", "positive", "neutral", "negative"),
            "rating": _score("How good is it?", "awful", "bad", "okay", "good", "great"),
        },
    },
)
_OTHERS = (
    {
        "title": "A ticket",
        "state": "Subject: charged twice\n\nThis is my third mail. You took the money for October "
        "twice, and unless it is back today I cancel.",
        "questions": {
            "urgent": _yes_no("Does the customer need a reply today?"),
            "team": _choice(
                "Which team should answer?",
                billing="payments, refunds, invoices",
                technical="faults of the product",
                sales="offers and new contracts",
                other="none of these",
            ),
            "anger": _score("How angry is the customer?", "calm", "annoyed", "furious"),
        },
    },
    {
        "title": "A review",
        "state": "The room was clean and the breakfast superb, but the street is loud all night.",
        "questions": {
            "again": _yes_no("Would this guest come again?"),
            "topic": _choice("What is the complaint about?", "room", "food", "noise", "staff"),
            "rating": _score("How good was the stay?", "awful", "bad", "okay", "good", "great"),
        },
    },
)


def decisions(embedded: bool) -> dict[str, Any]:
    """`note`: what the embedded model can decide, None for other models; `examples`: titles with
    a state and questions in System One's form."""
    return {
        "note": NOTE if embedded else None,
        "examples": list(_EMBEDDED if embedded else _OTHERS),
    }
