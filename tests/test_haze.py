"""The README's picture of the haze."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

from benchmarks import haze

import sfumato

ROOT = Path(__file__).resolve().parents[1]
SVG = "{http://www.w3.org/2000/svg}"


def texts(picture: str) -> list[str]:
    return ["".join(text.itertext()) for text in ElementTree.fromstring(picture).iter(f"{SVG}text")]


def test_a_run_of_the_embedded_model_becomes_a_picture(tmp_path: Path) -> None:
    out = tmp_path / "haze.svg"
    assert haze.main([str(out)]) == 0
    shown = list(haze.frames(sfumato.load()))
    first, *_, last = shown
    assert {state for _, state in first.lines[0]} == {haze.HAZE}
    assert {state for line in last.lines for _, state in line} == {haze.SETTLED}
    reply = "".join(letter for line in last.lines for letter, _ in line).strip()
    sampler = sfumato.SamplerConfig(temperature=haze.TEMPERATURE)
    model = sfumato.load()
    assert reply == model.generate(haze.QUESTION, seed=haze.SEED, sampler=sampler).text
    assert len(shown) > 8
    picture = out.read_text(encoding="utf-8")
    assert picture.count("@keyframes") == len(shown)
    assert reply in picture  # for those who do not see it


def test_text_stays_text() -> None:
    cells = tuple((letter, haze.SETTLED) for letter in '<b>&"</svg>')
    picture = haze.svg([haze.Frame((cells,), "a < b", 1.0)])
    assert '<b>&"</svg>' in texts(picture)
    assert "a < b" in texts(picture)


def test_the_picture_in_the_readme_is_small_and_passive() -> None:
    name = "docs/haze.svg"
    assert f"]({name})" in (ROOT / "README.md").read_text(encoding="utf-8")
    picture = (ROOT / name).read_text(encoding="utf-8")
    assert len(picture) < 50_000
    assert f"› {haze.QUESTION}" in texts(picture)
    assert not re.search(r"<script|\bon\w+=|href|url\(", picture)
