"""OpenAI's predicted outputs: a text that a reply is expected to resemble."""

from __future__ import annotations

from sfumato.diffusion.prediction import PredictedText
from sfumato.options.limits import STRENGTH
from sfumato.refused import Refused
from sfumato.server.schemas.openai import Prediction


def prediction_of(given: Prediction) -> PredictedText:
    """Raises Refused."""
    texts = [given.content] if isinstance(given.content, str) else []
    for place, part in enumerate(given.content if isinstance(given.content, list) else ()):
        where = f"prediction.content[{place}]"
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise Refused(where, 'must be {"type": "text", "text": …}')
        texts.append(part["text"])
    strength = STRENGTH if given.strength is None else given.strength
    return PredictedText("".join(texts), strength)
