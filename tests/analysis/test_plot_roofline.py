from __future__ import annotations

from pathlib import Path

import pytest

from tests.quant import programs
from unitscale.analysis import roofline
from unitscale.analysis._plot_roofline import plot_roofline


def test_every_kind_and_place_has_a_bar_of_its_time() -> None:
    report = roofline(programs.LOOP)
    figure = plot_roofline(report)
    upper, lower = figure.axes
    totals = report.by_kind()
    assert [bar.get_width() for bar in upper.patches] == pytest.approx(
        [1e3 * t.seconds for t in totals]
    )
    assert [label.get_text() for label in upper.get_yticklabels()] == [t.label for t in totals]
    assert sum(bar.get_width() for bar in lower.patches) == pytest.approx(1e3 * report.seconds)
    said = [upper.get_title(), lower.get_title(), lower.get_xlabel()]
    assert all("projected" in text for text in said)


def test_a_picture_can_be_saved(tmp_path: Path) -> None:
    figure = roofline(programs.LOOP).plot(tmp_path / "projected.png")
    assert (tmp_path / "projected.png").stat().st_size > 0
    assert len(figure.axes) == 2
