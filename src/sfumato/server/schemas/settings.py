"""What the table of settings says of the fields of bodies: values and descriptions.

Bodies write out their fields and types; ranges and help texts come from `options/`. Knows no body.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field

from sfumato.options import SETTINGS, setting
from sfumato.values import Kind, Number, Whole

SETTING_OF = {each.request_field: each for each in SETTINGS if each.request_field}
"""Name of a field → its setting."""


def within(name: str) -> Any:
    """The range of a setting, for the annotation of a field whose body checks it. The other
    ranges are checked where the settings become a `SamplerConfig`."""
    kind = setting(name).request_kind
    assert isinstance(kind, Whole | Number)
    open_low = isinstance(kind, Number) and kind.low in kind.without
    return Field(gt=kind.low, le=kind.high) if open_low else Field(ge=kind.low, le=kind.high)


def greatest(name: str) -> float | None:
    """The greatest value of a field that is a number."""
    kind = SETTING_OF[name].request_kind
    assert isinstance(kind, Whole | Number)
    return kind.high


def add_setting(name: str, schema: dict[str, Any]) -> None:
    """Adds range and description of the setting of a field, if it has one, to its JSON schema. A
    description that is there is a note, and stays behind the table's."""
    if name not in SETTING_OF:
        return
    chosen = SETTING_OF[name]
    schema |= _range(chosen.request_kind)
    help_text = f"{chosen.help[0].upper()}{chosen.help[1:]}."
    note = schema.get("description")
    schema["description"] = f"{help_text} {note}" if note else help_text


def _range(kind: Kind) -> dict[str, Any]:
    """The bounds of a number as JSON schema has them; empty for another kind."""
    if not isinstance(kind, Whole | Number):
        return {}
    excluded = kind.without if isinstance(kind, Number) else ()
    low = "exclusiveMinimum" if kind.low in excluded else "minimum"
    high = "exclusiveMaximum" if kind.high in excluded else "maximum"
    return {low: kind.low} | ({} if kind.high is None else {high: kind.high})
