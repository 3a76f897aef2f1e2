from __future__ import annotations

import math
import random
import xml.etree.ElementTree as ElementTree

import pytest

from sfumato.decisions.calibration import best_temperature, bins, fit, metrics, plot, tempered


def drawn(count: int, temperature: float, seed: int = 0) -> tuple[list[list[float]], list[int]]:
    """Rows whose labels are drawn from the row's probabilities at a temperature: what the rows say
    themselves is too sure where it is over 1."""
    dice = random.Random(seed)
    rows, labels = [], []
    for _ in range(count):
        weights = [math.exp(2 * dice.gauss(0, 1)) for _ in range(3)]
        row = [weight / sum(weights) for weight in weights]
        rows.append(row)
        labels.append(dice.choices(range(3), tempered(row, temperature))[0])
    return rows, labels


def test_metrics_by_hand() -> None:
    rows, labels = [[0.8, 0.2], [0.6, 0.4], [0.3, 0.7]], [0, 1, 1]
    figures = metrics(rows, labels)
    assert figures.accuracy == pytest.approx(2 / 3)
    assert figures.nll == pytest.approx(-(math.log(0.8) + math.log(0.4) + math.log(0.7)) / 3)
    assert figures.brier == pytest.approx((0.08 + 0.72 + 0.18) / 3)
    assert figures.ece == pytest.approx((0.2 + 0.6 + 0.3) / 3)
    assert [each.count for each in bins(rows, labels)] == [1, 1, 1]
    assert bins([[1.0, 0.0]], [1])[0].accuracy == 0
    assert metrics([[1.0, 0.0]], [1]).nll < 100  # and not infinite


def test_a_temperature_flattens_or_sharpens() -> None:
    assert tempered((0.9, 0.1), 1.0) == (0.9, 0.1)
    assert tempered((0.9, 0.1), 2.0) == pytest.approx((0.75, 0.25))
    assert tempered((0.9, 0.1), 0.5) == pytest.approx((81 / 82, 1 / 82))
    assert tempered((1.0, 0.0), 0.05) == (1.0, pytest.approx(0))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.5])
def test_the_temperature_of_drawn_labels_is_fitted(temperature: float) -> None:
    rows, labels = drawn(2000, temperature, seed=2)
    assert best_temperature(rows, labels) == pytest.approx(temperature, rel=0.1)


def test_held_out_folds_measure_it() -> None:
    rows, labels = drawn(400, 2.5)
    fitted = fit(rows, labels)
    assert len(fitted.fold_temperatures) == 5 and not fitted.kept
    assert fitted.before == metrics(rows, labels)
    assert fitted.after == metrics(fitted.held_out, labels)
    assert fitted.after.nll < fitted.before.nll and fitted.after.ece < fitted.before.ece
    assert fitted.after.accuracy == fitted.before.accuracy
    # A row's own label has no part in its temperature.
    other = fit(rows, [(labels[0] + 1) % 3, *labels[1:]])
    assert other.held_out[0] == fitted.held_out[0]


def test_a_temperature_that_does_not_help_is_not_taken() -> None:
    dice = random.Random(3)
    rows = [[0.5 + 1e-9, 0.5 - 1e-9]] * 40
    fitted = fit(rows, [dice.randrange(2) for _ in rows])
    assert fitted.kept and fitted.temperature == 1.0


@pytest.mark.parametrize(
    ("count", "labels", "folds", "message"),
    [
        (29, None, 5, "has 29 labels; a temperature needs 30 at least"),
        (40, [1] * 40, 5, "all 40 labels are the same"),
        (40, None, 1, "folds: must be 2 to 20"),
    ],
)
def test_too_few_labels_are_refused(
    count: int, labels: list[int] | None, folds: int, message: str
) -> None:
    rows, drawn_labels = drawn(count, 1.0)
    with pytest.raises(ValueError, match=message):
        fit(rows, labels or drawn_labels, folds)


def test_the_plot_is_svg_for_any_names() -> None:
    rows, labels = drawn(60, 2.0)
    fitted = fit(rows, labels)
    names = ["urgent", "<script>&", "x" * 99, "last"]
    text = plot(dict.fromkeys(names, (fitted, rows, labels)))
    root = ElementTree.fromstring(text)
    titles = [each.text for each in root.iter() if each.get("class") == "title"]
    assert titles == ["urgent", "<script>&", "x" * 29 + "…", "last"]
    assert "prefers-color-scheme:dark" in text
