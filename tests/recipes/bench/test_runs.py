"""Comparing runs and writing results, with made-up losses."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recipes.bench import runs
from recipes.bench.runs import Table, Told, compare, differences, publish, verdict
from recipes.errors import RecipeError

OURS = ("precision.policy=fp8", "model.library=unitscale")
VARIANTS = {"plain-float32": runs.plain_words(), "fp8": OURS}


def test_two_standard_errors_are_in_doubt() -> None:
    cases = [(0.5, 0), (0.3, 0.1), (0.31, 0.1), (0.69, 0.1), (0.71, 0.1), (0.51, 0), (math.nan, 0)]
    found = [verdict(distance, error, 0.5) for distance, error in cases]
    assert found == ["within"] * 2 + ["not resolved"] * 2 + ["outside"] * 3


def test_differences_are_paired_and_bounds_two_sided_but_for_no_worse() -> None:
    ours, theirs = np.array([[1.9, 2.3, 1.2], [2.0, 2.0, 1.0]])
    for metric, over, mean, error in (
        ("loss", ours / theirs - 1, "over reference", "standard error"),
        ("f1", ours - theirs, "above reference", "error above"),
    ):
        _, row = differences({"a": list(theirs), "b": list(ours)}, {"b": 0.1}, metric)
        assert row[mean] == pytest.approx(over.mean())
        assert row[error] == pytest.approx(over.std(ddof=1) / math.sqrt(3))
        assert row["verdict"] == verdict(abs(row[mean]), row[error], 0.1)
    values = {"float32": [2.0], "near": [1.992], "low": [1.98], "high": [2.02], "better": [1.0]}
    bounds = {"near": 0.005, "low": 0.005, "high": 0.005, "better": 0.0}
    found = [row.get("verdict") for row in differences(values, bounds)]
    assert found == [None, "within", "outside", "outside", "within"]


def test_every_text_and_seed_is_trained_once(
    config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training is replaced by a formula for the loss; runs in float32 fail at last."""
    seen: list[Any] = []

    def loss_of(config: Any) -> float:
        best = 0.004 if config.model.library == "plain" else 1.0
        distance = abs(math.log2(config.optimizer.learning_rate / best))
        return 2.0 + 0.1 * config.seed + 0.01 * distance + len(config.data.path) * 1e-3

    monkeypatch.setattr(runs, "trained", lambda config, fresh: seen.append(config) or {"f1": 7.0})
    monkeypatch.setattr(runs, "loss_of", loss_of)
    texts = [str(tmp_path / name) for name in ("a.txt", "long.txt")]
    told = Told(str(config_file), ["model.dropout=0.0"], 2, False, texts)
    rates = {"plain-float32": (0.001, 0.004), "fp8": (0.5,)}
    found = compare(VARIANTS, told, rates=rates)
    names = [f"tiny-fp8-0.5-{text}" + seed for text in ("a", "long") for seed in ("", "-seed1")]
    assert [config.name for config in seen[-4:]] == names
    assert len(seen) == 8 + 4
    plain = found.configs["plain-float32"]
    assert [config.optimizer.learning_rate for config in plain] == [0.004] * 4  # its best
    a, long, both, at_rates = found.tables("Loss", {"fp8": 0.1})
    assert long.rows[0]["loss"] > a.rows[0]["loss"]
    assert both.rows[1]["values"] == [*a.rows[1]["values"], *long.rows[1]["values"]]
    assert [row["rate"] for row in at_rates.rows] == [0.001, 0.004, 0.5]

    def failing(config: Any, fresh: bool) -> dict[str, float]:
        if config.precision.policy == "float32":
            raise ValueError("no memory")
        seen.append(config)
        return {}

    monkeypatch.setattr(runs, "trained", failing)
    with pytest.raises(RecipeError, match=r"1 of 2 runs failed: tiny-plain-float32: .*no memory"):
        compare(VARIANTS, Told(str(config_file)))
    assert seen[-1].name == "tiny-fp8"
    with pytest.raises(RecipeError, match="--data"):
        compare(VARIANTS, Told(str(config_file), data=["a/x.txt", "b/x.txt"]))


def test_results_are_a_page_and_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out" / "demo.json"
    words = ["bench", "demo", "--data", "/texts/a.txt", "--json", str(out), "train.runs_dir=/x"]
    monkeypatch.setattr(sys, "argv", ["recipes", *words])
    rows = [{"what": "fast", "over reference": 0.00123, "values": [1.0], "ok": True}]
    publish("demo", [Table("Speeds", [*rows, {"what": "slow", "ms": math.inf}])], out, ["A note."])
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert "### Speeds" in lines
    assert "A note." in lines
    (line,) = [line.split("|") for line in lines if "fast" in line]
    assert [cell.strip() for cell in line[1:-1]] == ["fast", "+0.123%", "yes", ""]
    document = json.loads(out.read_text("utf-8"))
    assert document["command"] == (
        "python -m recipes bench demo --data a.txt --json demo.json train.runs_dir=x"
    )
    assert {"date", "commit", "versions", "machine"} <= set(document)
    assert document["tables"][0]["rows"][0] == rows[0]
    assert document["tables"][0]["rows"][1] == {"what": "slow", "ms": "inf"}
