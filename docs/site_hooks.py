"""Hooks of mkdocs: the pages of the repository's root, and the API reference, join the site.

docs/ links to source files, as the forge shows them. On the site such a link leads to the module's
place in the reference; a link to any other file outside docs/ becomes plain text. Knows no theme.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SRC = ROOT / "src"
ROOT_PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
}
"""File of the root → page of the site."""

_LINK = re.compile(r"(?<!!)\[([^\[\]]*)\]\((?!\w+:|#)([^()#\s]+)(#[^()\s]*)?\)")


def reference_pages() -> dict[str, str]:
    """Page → Markdown: the public names first, then a page for each package."""
    packages: dict[str, list[str]] = {}
    for path in sorted((SRC / "sfumato").rglob("*.py")):
        parts = list(path.relative_to(SRC).with_suffix("").parts)
        if parts[-1] == "__main__":
            continue
        package = parts[1] if len(parts) > 2 else "sfumato"
        packages.setdefault(package, []).append(
            ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        )
    pages = {}
    for package in sorted(packages, key=lambda name: (name != "sfumato", name)):
        title = "sfumato" if package == "sfumato" else f"sfumato.{package}"
        body = "".join(f"\n::: {module}\n" for module in packages[package])
        pages[f"reference/{package}.md"] = f"# {title}\n{body}"
    return pages


def module_page(path: Path) -> str | None:
    """Page and anchor of a source file or package folder; None for what is no module."""
    if path.is_dir():
        path = path / "__init__.py"
    if path.suffix != ".py" or not path.is_relative_to(SRC) or not path.is_file():
        return None
    parts = path.relative_to(SRC).with_suffix("").parts
    names = parts[:-1] if parts[-1] == "__init__" else parts
    package = parts[1] if len(parts) > 2 else "sfumato"
    return f"reference/{package}.md#{'.'.join(names)}"


def site_links(text: str, source: Path, page: str) -> str:
    """Markdown of `source` with its relative links rewritten for the site's `page`."""

    def rewritten(link: re.Match[str]) -> str:
        label, target, anchor = link[1], link[2], link[3] or ""
        path = (source.parent / target).resolve()
        if path.is_relative_to(ROOT / "docs") and path.is_file():
            place = path.relative_to(ROOT / "docs").as_posix() + anchor
        elif path.parent == ROOT and path.name in ROOT_PAGES:
            place = ROOT_PAGES[path.name] + anchor
        else:
            place = module_page(path) or ""
        if not place:
            return label
        return f"[{label}]({posixpath.relpath(place, posixpath.dirname(page) or '.')})"

    fences = re.split(r"(^```.*?^```$)", text, flags=re.DOTALL | re.MULTILINE)
    return "".join(
        part if part.startswith("```") else _LINK.sub(rewritten, part) for part in fences
    )


def on_config(config: Any) -> Any:
    config.nav.append({"Reference": list(reference_pages())})
    return config


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for name, page in ROOT_PAGES.items():
        text = (ROOT / name).read_text(encoding="utf-8").replace("](docs/haze.svg)", "](haze.svg)")
        files.append(File.generated(config, page, content=site_links(text, ROOT / name, page)))
    for page, text in reference_pages().items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    source = ROOT / "docs" / page.file.src_uri
    return site_links(markdown, source, page.file.src_uri) if source.is_file() else markdown
