"""Texts become requests for vectors, and vectors become numbers or base64.

Knows no route: a `VectorRenderer` has all of an answer but its form.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.nn.functional import normalize

from sfumato.engine import Finished, Pooling, Prompt, Request, Settled
from sfumato.refused import Refused
from sfumato.server.dialects.shared.mixed_prompts import MixedPrompt, prompts_in
from sfumato.server.dialects.shared.openai_objects import warned
from sfumato.server.http.dialect import Frame, Renderer
from sfumato.server.http.inflight import CollectedReply
from sfumato.server.schemas.embeddings import MOST_INPUTS, Pooled
from sfumato.server.service import Service

MOST_NUMBERS = 2**22
"""Of one answer: about 12 bytes each as text, until they are sent."""


def requests_of(
    service: Service, body: Pooled, value: Any, field: str, path: str, truncate: bool = False
) -> list[Request]:
    """One request for each text of the body's field. truncate: cut what exceeds the context. Raises
    Refused."""
    prompts, _ = prompts_in(value, field, MOST_INPUTS)
    size = _size(service, body)
    if len(prompts) * size > MOST_NUMBERS:
        raise Refused(
            field,
            f"{len(prompts):,} vectors of {size:,} numbers are over {MOST_NUMBERS:,} "
            "numbers, the most of one answer",
            "send the texts in parts",
        )
    pooling = Pooling(body.pooling or service.settings.pooling)
    requests = []
    for prompt in prompts:
        ids = _ids(service, prompt, field, truncate)
        requests.append(
            Request(
                ids=ids,
                made=Prompt(ids, ()),  # no later prompt is likely to share it
                max_tokens=0,
                pooling=pooling,
                timeout_s=body.timeout,
                since=body.since,
                endpoint=path,
                user=body.user,
            )
        )
    return requests


def _size(service: Service, body: Pooled) -> int:
    """Numbers of a vector. Raises Refused."""
    hidden = service.model.config.hidden_size
    if body.dimensions is not None and body.dimensions > hidden:
        raise Refused(
            "dimensions",
            f"must be at most {hidden}, the vectors of this model",
            f"got {body.dimensions}",
        )
    return body.dimensions or hidden


def _ids(service: Service, prompt: MixedPrompt, field: str, truncate: bool) -> list[int]:
    """The prompt's tokens, bos in front of a text; markers in a text are text. Raises Refused."""
    tokenizer, context = service.model.tokenizer, service.context
    parts = [prompt] if isinstance(prompt, str) else prompt
    ids: list[int] = []
    for part in parts:
        if isinstance(part, int):
            ids.append(part)
            continue
        # So many characters are more tokens than a slot has.
        text = part[: context * tokenizer.longest_token] if truncate else part
        ids += service.encode(text, field, special=False)
    if parts and isinstance(parts[0], str) and tokenizer.bos_id is not None:
        ids.insert(0, tokenizer.bos_id)
    vocabulary = service.model.config.vocab_size
    if not ids or not 0 <= min(ids) <= max(ids) < vocabulary:
        what = f"token ids must lie in 0..{vocabulary - 1}" if ids else "a text is empty"
        raise Refused(field, what)
    return ids[:context] if truncate else ids


def vector_of(end: Finished, dimensions: int | None) -> Tensor:
    """float32 [numbers] of length 1."""
    assert end.vector is not None
    if dimensions is None or dimensions == len(end.vector):
        return end.vector
    return normalize(end.vector[:dimensions], dim=0)


def numbers(vector: Tensor, encoding: str | None = None) -> list[float] | str:
    """As JSON has it, in as many digits as float32 has; or the bytes of float32, the lowest first,
    as base64."""
    if encoding == "base64":
        return base64.b64encode(vector.numpy().astype("<f4").tobytes()).decode("ascii")
    return [float(f"{value:.9g}") for value in vector.tolist()]


def prompt_tokens(replies: Sequence[CollectedReply]) -> int:
    return sum(collected.finished.account.prompt_tokens for collected in replies)


class VectorRenderer(Renderer):
    """Vectors are one body; nothing is streamed."""

    def __init__(self, service: Service, body: Pooled, requests: Sequence[Request]) -> None:
        self.service, self.requests = service, requests
        self._encoding = getattr(body, "encoding_format", None)
        self._dimensions, self.warned = body.dimensions, warned(body)

    def settled(self, number: int, settled: Settled) -> Iterable[Frame]:
        return ()

    def finished(self, number: int, end: Finished) -> Iterable[Frame]:
        return ()

    def vectors(self, replies: Sequence[CollectedReply]) -> Iterator[list[float] | str]:
        """As they are sent, each of length 1."""
        for collected in replies:
            yield numbers(vector_of(collected.finished, self._dimensions), self._encoding)
