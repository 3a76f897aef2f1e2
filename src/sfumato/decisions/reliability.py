"""A reliability plot as SVG: how often the most probable option is right, over its probability.

Legible on a light and on a dark background. Knows no model and no files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

from sfumato.decisions.fit import Fitted
from sfumato.decisions.metrics import Bin, Rows, bins

SIDE, LEFT, TOP, GAP = 220, 56, 44, 44  # pixels: of a square of axes, and around it
COLUMNS = 3
_STYLE = """\
text{font:12px system-ui,sans-serif;fill:#57606a}.title{font-weight:600}
.axis{stroke:#8b949e;fill:none}.ideal{stroke:#8b949e;stroke-dasharray:4 4}
.before{stroke:#d1602f;fill:#d1602f}.after{stroke:#2f7ed1;fill:#2f7ed1}.line{fill:none;\
stroke-width:2}
@media(prefers-color-scheme:dark){text{fill:#adbac7}.before{stroke:#f0883e;fill:#f0883e}\
.after{stroke:#6cb6ff;fill:#6cb6ff}}"""


def plot(fitted: Mapping[str, tuple[Fitted, Rows, Sequence[int]]]) -> str:
    """An SVG file with a square for each question: its fit, its rows before, and its labels."""
    columns = min(COLUMNS, len(fitted))
    width = LEFT + columns * (SIDE + GAP)
    height = -(-len(fitted) // columns) * (TOP + SIDE + GAP) + 24
    squares = []
    for number, (name, (fit, rows, labels)) in enumerate(fitted.items()):
        x = LEFT + number % columns * (SIDE + GAP)
        y = TOP + number // columns * (TOP + SIDE + GAP)
        squares.append(f'<g transform="translate({x} {y})">{_square(name, fit, rows, labels)}</g>')
    legend = (
        f'<g transform="translate({LEFT} {height - 12})"><text class="before" stroke="none" '
        'style="stroke:none">before</text><text class="after" x="60" style="stroke:none">after, on '
        "held-out folds</text></g>"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img" aria-label="Reliability of the answers, before and after '
        f'calibration">\n<style>{_STYLE}</style>\n' + "\n".join([*squares, legend]) + "\n</svg>\n"
    )


def _square(name: str, fit: Fitted, rows: Rows, labels: Sequence[int]) -> str:
    parts = [
        f'<text class="title" y="-22">{escape(_short(name))}</text>',
        f'<text y="-7">T {fit.temperature:.2f}, ECE {fit.before.ece:.3f} → {fit.after.ece:.3f}'
        "</text>",
        f'<rect class="axis" width="{SIDE}" height="{SIDE}"/>',
        f'<line class="ideal" x1="0" y1="{SIDE}" x2="{SIDE}" y2="0"/>',
        *(
            f'<text x="{SIDE * tick:.0f}" y="{SIDE + 16}" text-anchor="middle">{tick:g}</text>'
            f'<text x="-8" y="{SIDE * (1 - tick) + 4:.0f}" text-anchor="end">{tick:g}</text>'
            for tick in (0, 0.5, 1)
        ),
        f'<text x="{SIDE / 2}" y="{SIDE + 32}" text-anchor="middle">probability of the answer'
        "</text>",
        f'<text transform="translate(-36 {SIDE / 2}) rotate(-90)" text-anchor="middle">share right'
        "</text>",
        _curve("before", bins(rows, labels)),
        _curve("after", bins(fit.held_out, labels)),
    ]
    return "".join(parts)


def _curve(style: str, points: Sequence[Bin]) -> str:
    """A line through the bins; the area of a point grows with its rows."""
    most = max(each.count for each in points)
    at = [(SIDE * each.probability, SIDE * (1 - each.accuracy)) for each in points]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
    radii = (2 + 4 * (each.count / most) ** 0.5 for each in points)
    dots = "".join(
        f'<circle class="{style}" cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}">'
        f"<title>{each.count} rows, probability {each.probability:.2f}, right {each.accuracy:.2f}"
        "</title></circle>"
        for (x, y), radius, each in zip(at, radii, points, strict=True)
    )
    return f'<polyline class="{style} line" points="{line}"/>{dots}'


def _short(name: str) -> str:
    return name if len(name) <= 30 else f"{name[:29]}…"
