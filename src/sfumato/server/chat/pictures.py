"""Pictures of bodies: parts of messages and of prompts, whatever a dialect calls them.

A dialect makes a `PictureSource` of a part, named by its place in the body. Nothing is read while a
body is parsed: `read` raises `Unread`, the route reads what that names, and parses the body again.
Parts that a client writes in our own form are none: they have no `PictureSource`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sfumato.media.part import PictureSource
from sfumato.media.part import of_url as of_url
from sfumato.media.patches import Patches
from sfumato.refused import Refused
from sfumato.server.http.pictures import Unread
from sfumato.server.schemas import Body
from sfumato.server.service import Service

MixedPrompt = str | list[int | str | PictureSource]
"""One prompt: a text, or token ids, texts and pictures in their order."""


def message_part(source: PictureSource) -> dict[str, Any]:
    """The part of a message that is this picture."""
    return {"type": "image", "source": source}


def of_base64(given: Any, where: str) -> PictureSource:
    """The source of a picture in base64. Raises Refused."""
    if not isinstance(given, str):
        raise Refused(where, "must be a picture in base64")
    url = given if given[:5].lower() == "data:" else f"data:;base64,{given}"
    return PictureSource(url, where)


def sources_in(messages: Sequence[Mapping[str, Any]]) -> Iterator[PictureSource]:
    """The pictures of messages, in their order."""
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if isinstance(part, Mapping) and isinstance(part.get("source"), PictureSource):
                yield part["source"]


def check(service: Service, sources: Sequence[PictureSource]) -> None:
    """Raises Refused for more pictures than may be sent, naming the first one of these."""
    most = service.settings.limit_images if service.model.cut is not None else 0
    if len(sources) <= most:
        return
    field = sources[most].field
    if service.model.cut is None:
        raise Refused(field, "this model reads no pictures", "send text", "unsupported")
    why = f"{len(sources)} pictures, and this server takes {most} in a request"
    raise Refused(field, why, "send fewer, or raise --limit-mm-per-prompt")


def read(body: Body, sources: Sequence[PictureSource]) -> Mapping[str, Patches]:
    """The patches of each picture, by its field. Raises Unread."""
    known: Mapping[str, Patches] = body.envelope.pictures
    if unread := [source for source in sources if source.field not in known]:
        raise Unread(unread)
    return known


def messages_read(body: Body, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages with what was read of their pictures. Raises Unread, and Refused for a picture
    without a source: our own form may name any file of this machine."""
    known = read(body, list(sources_in(messages)))

    def made(part: Any, where: str) -> Any:
        if not isinstance(part, Mapping) or part.get("type") != "image":
            return part
        source = part.get("source")
        if not isinstance(source, PictureSource):
            raise Refused(f"{where}.type", "only 'text' is supported, not 'image'")
        return {"type": "image", "patches": known[source.field]}

    copies = [dict(message) for message in messages]
    for i, copy in enumerate(copies):
        if isinstance(parts := copy.get("content"), list):
            places = ((part, f"messages[{i}].content[{j}]") for j, part in enumerate(parts))
            copy["content"] = [made(part, where) for part, where in places]
    return copies


def prompts_read(
    service: Service, body: Body, prompts: Sequence[MixedPrompt]
) -> list[str | list[int | str | Patches]]:
    """Prompts that are no conversation, with what was read of their pictures. Raises Unread, and
    Refused for too many of them."""
    lists = (prompt for prompt in prompts if not isinstance(prompt, str))
    sources = [part for parts in lists for part in parts if isinstance(part, PictureSource)]
    check(service, sources)
    known = read(body, sources)
    return [
        prompt
        if isinstance(prompt, str)
        else [known[part.field] if isinstance(part, PictureSource) else part for part in prompt]
        for prompt in prompts
    ]
