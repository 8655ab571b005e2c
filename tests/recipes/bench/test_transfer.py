"""`bench transfer`: the best rate of a curve, how widths are judged, and the command."""

import json
import math
from pathlib import Path

import pytest

from recipes.bench import transfer
from recipes.cli import main
from recipes.registry import CONFIGS, load_config
from recipes.sweep import Curve, _sweep, make_points

INFINITE = math.inf


@pytest.mark.parametrize("best", [0.7, 1.0, 1.4])
def test_the_vertex_is_that_of_a_parabola_in_the_logarithm(best: float) -> None:
    losses = {rate: math.log2(rate / best) ** 2 + 3 for rate in (0.25, 0.5, 1.0, 2.0, 5.0)}
    assert transfer.vertex(losses) == pytest.approx(best)


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ({1.0: 1.0, 2.0: 2.0, 4.0: 3.0}, 1.0),
        ({1.0: 3.0, 2.0: 2.0, 4.0: INFINITE}, 2.0),
        ({1.0: 1.0, 2.0: 1.0, 4.0: 1.0}, 1.0),
        ({0.5: 2.0, 1.0: 1.0, 2.0: 1.0, 4.0: 2.0}, 2**0.5),
    ],
    ids=["edge", "beside a divergence", "flat", "two alike"],
)
def test_without_one_lowest_inner_rate(losses: dict, expected: float) -> None:
    assert transfer.vertex(losses) == pytest.approx(expected)


def test_curves_are_sorted_by_width() -> None:
    points = make_points(load_config(CONFIGS / "gpt/transfer.yaml"))
    losses = transfer.by_width([Curve(point, {1.0: (2.0, 4.0)}) for point in points])
    of_widths = {width: {1.0: 3.0} for width in (64, 256, 1024)}
    assert losses == {"u-muP": of_widths, "plain": of_widths}


def curve(best: float) -> dict[float, float]:
    return {2.0**k: (k - math.log2(best)) ** 2 + 2 for k in range(-6, 7)}


@pytest.mark.parametrize(("wide", "ok"), [(1.9, True), (2.1, False), (64.0, False)])
def test_widths_are_judged_by_how_far_their_rates_lie_apart(wide: float, ok: bool) -> None:
    losses = {"u-muP": {64: curve(1.0), 256: curve(wide)}, "plain": {64: curve(4), 256: curve(1)}}
    rows = transfer.best_rates(losses).rows
    assert [row.get("within") for row in rows] == [None, ok, None, None]
    assert rows[1]["apart"] == pytest.approx(wide)
    assert rows[3]["apart"] == pytest.approx(4)
    assert rows[3]["cost"] == pytest.approx((2 + 4) / 2 - 1)  # two octaves from the optimum


def test_the_grid_is_widths_of_two_libraries_with_heads_of_one_size() -> None:
    points = make_points(load_config(CONFIGS / "gpt" / "transfer.yaml"))
    assert len(points) == 6
    assert {point.config.model.head_dim for point in points} == {32}
    assert {point.config.optimizer.learning_rate for point in points} == {1.0, 2.0**-8}


def test_the_command_sweeps_and_measures_nothing_twice(
    text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    def trials(config):
        middle = config.optimizer.learning_rate
        return lambda rates, seed: [math.log2(rate / middle) ** 2 + 2 for rate in rates]

    out, runs = tmp_path / "out.json", tmp_path / "runs"
    command = ["bench", "transfer", f"train.runs_dir={runs}", "--data", str(text_file)]
    command += ["--json", str(out)]
    monkeypatch.setattr(_sweep, "Trials", trials)
    assert main(command) == 0
    rows = json.loads(out.read_text("utf-8"))["tables"][0]["rows"]
    assert [(row["parametrization"], row["width"]) for row in rows] == [
        (name, width) for name in ("u-muP", "plain") for width in (64, 256, 1024)
    ]
    assert [row["best"] for row in rows] == [1.0] * 3 + [2.0**-8] * 3
    assert rows[2]["within"] is True
    assert (runs / "transfer-sweep" / "curves.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr(_sweep, "Trials", lambda _: pytest.fail("trained again"))
    assert main(command) == 0
    assert json.loads(out.read_text("utf-8"))["tables"][0]["rows"] == rows
    assert main([*command, "sweep.grid={model.layers: [1, 2]}"]) == 2
    assert "sweep.grid: expected the keys model.library, model.width" in capsys.readouterr().err
