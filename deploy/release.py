#!/usr/bin/env python3
"""Checks that a tag may be released, and prints what changed in it: `deploy/release.py v1.2.0`.

The tag must be `v` and the version that the package has. CHANGELOG.md must have a section of that
version with a day, above those of older versions, and something in it. CITATION.cff must name the
version. Needs Python alone.
"""

from __future__ import annotations

import datetime
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TAG = re.compile(r"v(\d+\.\d+\.\d+(?:(?:a|b|rc)\d+)?)")
HEADING = re.compile(r"^## (.+)$", re.MULTILINE)


def version_of(package: str) -> str:
    """`__version__` in the text of the package's `__init__.py`. Raises ValueError without one."""
    match = re.search(r'^__version__ = "([^"]+)"$', package, re.MULTILINE)
    if match is None:
        raise ValueError("src/sfumato/__init__.py: no line sets __version__")
    return match[1]


def notes(tag: str, package: str, changelog: str, today: datetime.date) -> str:
    """The tag's section of the changelog, without its heading.

    package, changelog: texts of `__init__.py` and CHANGELOG.md. Raises ValueError, which says what
    is wrong and what to change.
    """
    match, version = TAG.fullmatch(tag), version_of(package)
    if match is None or match[1] != version:
        raise ValueError(f"tag {tag}: the package's version is {version}, so write v{version}")
    headings = list(HEADING.finditer(changelog))
    released = [one for one in headings if not one[1].startswith("Unreleased")]
    if not released or released[0][1].split(" ")[0] != version:
        raise ValueError(f"CHANGELOG.md: its first released section must be '## {version} - DAY'")
    _, _, day = released[0][1].partition(" - ")
    try:
        if datetime.date.fromisoformat(day) > today:
            raise ValueError
    except ValueError:
        raise ValueError(f"CHANGELOG.md: '{day}' is no day up to today as 2026-01-31") from None
    following = headings[headings.index(released[0]) + 1 :]
    text = changelog[released[0].end() : following[0].start() if following else None].strip()
    if not re.search(r"^- \S", text, re.MULTILINE):
        raise ValueError(f"CHANGELOG.md: the section of {version} lists no change")
    return text


def check_citation(citation: str, version: str) -> None:
    """Raises ValueError where the text of CITATION.cff has another version."""
    if not re.search(rf"^version: [\"']?{re.escape(version)}[\"']?$", citation, re.MULTILINE):
        raise ValueError(f"CITATION.cff: its version must be {version}")


def main() -> None:
    package = (ROOT / "src" / "sfumato" / "__init__.py").read_text(encoding="utf-8")
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    today = datetime.datetime.now(datetime.UTC).date()
    try:
        check_citation((ROOT / "CITATION.cff").read_text(encoding="utf-8"), version_of(package))
        print(notes(sys.argv[1] if len(sys.argv) == 2 else "", package, changelog, today))
    except ValueError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
