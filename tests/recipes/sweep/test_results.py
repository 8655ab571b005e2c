import re

from recipes.sweep import Row, append_row, by_format, make_points, read_curves
from recipes.sweep._results import report

from .test_points import FORMATS, config


def test_the_best_rate_counts_and_the_mean_over_seeds(tmp_path) -> None:
    settings = config({"model.kind": ["conv", "rnn"], **FORMATS})
    sweep = settings.sweep.model_copy(update={"seeds": [0, 1]})
    points = make_points(settings.model_copy(update={"sweep": sweep}))
    for point in points:
        library, policy = point.values["model.library"], point.values["precision.policy"]
        loss = {"float32": 2.0, "float16": 2.5, "fp8": 2.25}[policy]
        if (point.values["model.kind"], library, policy) == ("rnn", "plain", "float16"):
            loss = float("inf")
        rows = [(rate, seed, loss + more) for rate, seed, more in ((0.4, 0, 0.0), (0.4, 1, 1.0))]
        rows += [(0.1, 0, loss + 1.0), (0.1, 1, loss + 1.0)]
        rows += [(9.0, 0, 0.5), (9.0, 1, None)]  # the other seed failed
        for rate, seed, found in rows:
            append_row(tmp_path, Row(point.settings, rate, seed, found))
    curves = read_curves([*points], tmp_path)
    assert curves[0].losses == {0.1: 3.0, 0.4: 2.5}
    assert (curves[0].best, curves[0].least) == (0.4, 2.5)
    best = by_format(curves)
    assert best["kind=conv"]["plain", "float32"] == 2.5
    assert best["kind=rnn"]["plain", "float16"] == float("inf")
    text = report(points, tmp_path)
    assert text[0].startswith("plain float16: 1 of 2 models diverge; over float32, mean +0.5000")
    assert text[2].startswith("unitscale fp8: 0 of 2 models diverge; over float32, mean +0.2500")
    table = (tmp_path / "results.md").read_text()
    assert re.search(r"kind=rnn \| inf \| 2\.5000 \| 3\.0000 \| 2\.5000 \| 2\.7500", table), table
    for plot in ("scatter.png", "curves.png"):
        assert (tmp_path / plot).stat().st_size > 10_000


def test_a_grid_without_formats_or_rows_has_a_table(tmp_path) -> None:
    points = make_points(config({"model.width": [8, 16]}))
    assert report(points, tmp_path) == [f"results in {tmp_path}"]
    append_row(tmp_path, Row(points[0].settings, 0.5, 0, 2.0))
    report(points, tmp_path)
    assert "width=8 | 2.0000" in (tmp_path / "results.md").read_text()
    assert (tmp_path / "curves.png").exists()
    assert not (tmp_path / "scatter.png").exists()
