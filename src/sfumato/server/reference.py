"""GET /docs: the OpenAPI description as a plain page, without scripts and outside requests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any


def page(description: Mapping[str, Any]) -> str:
    """HTML of an OpenAPI description: every route, and the fields of its body."""
    title = escape(f"{description['info']['title']} {description['info']['version']}")
    schemas = description.get("components", {}).get("schemas", {})
    routes = "".join(
        part
        for path, methods in description["paths"].items()
        for method, route in methods.items()
        for part in _route(path, method, route, schemas)
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width">'
        f"<h1>{title}</h1><p>{escape(description['info'].get('description', ''))}</p>"
        f'<p><a href="openapi.json">openapi.json</a> is this for programs.</p>{routes}</html>'
    )


def _route(
    path: str, method: str, route: Mapping[str, Any], schemas: Mapping[str, Any]
) -> Iterator[str]:
    yield f"<h2><code>{method.upper()} {escape(path)}</code></h2>"
    yield f"<p>{escape(route.get('description') or route.get('summary', ''))}</p>"
    content = route.get("requestBody", {}).get("content", {})
    reference = content.get("application/json", {}).get("schema", {}).get("$ref", "")
    schema = schemas.get(reference.rpartition("/")[2])
    if schema:
        required = set(schema.get("required", ()))
        rows = "".join(
            f"<tr><td><code>{escape(name)}</code>{' *' if name in required else ''}</td>"
            f"<td>{escape(_kind(field))}</td><td>{escape(field.get('description', ''))}</td></tr>"
            for name, field in schema["properties"].items()
        )
        yield f"<table><tr><th>Field<th>Type<th>Meaning</tr>{rows}</table>"


def _kind(field: Mapping[str, Any]) -> str:
    kinds = [field, *field.get("anyOf", ())]
    names = [kind["type"] for kind in kinds if kind.get("type") not in (None, "null")]
    return " or ".join(dict.fromkeys(names)) or "any"
