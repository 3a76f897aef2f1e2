"""Fields of the objects within a body that no dialect knows: refused, or left out and recorded.

Those of the body itself are found where the body is read. Knows no field.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from sfumato.refused import Refused
from sfumato.server.schemas.body import UNKNOWN_FIELD, Body, Unknown
from sfumato.server.settings import ServerSettings


def leaves_out(body: Body, settings: ServerSettings) -> Unknown | None:
    """What records the names of unknown fields; None where the server refuses them."""
    return body.ignored if settings.lenient else None


def check_fields(
    value: Mapping[str, Any], known: Collection[str], where: str, ignored: Unknown | None
) -> None:
    """Looks for fields of an object that are not known, and not null. ignored: gets their names;
    None: they are refused. Raises Refused."""
    unknown = sorted(name for name in value if name not in known and value[name] is not None)
    names = [f"{where}.{name[:100]}" for name in unknown]
    if ignored is not None:
        ignored.add(names)
    elif names:
        raise Refused(names[0], UNKNOWN_FIELD, code="unknown_field")
