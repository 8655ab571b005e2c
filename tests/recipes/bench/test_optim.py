"""`bench optim`: bytes from live arrays, times in turns, and the command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from recipes.bench import optim
from recipes.cli import main
from recipes.registry import load_config
from tests.recipes.conftest import write_config


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = write_config(tmp_path)
    text = path.read_text("utf-8").replace("library: plain", "library: unitscale")
    path.write_text(text, encoding="utf-8")
    return path


def test_bytes_of_adam(small: Path) -> None:
    rows = {row["formats"]: row for row in optim.count_bytes(str(small)).rows}
    count = rows["float32"]["parameters"]
    for name, weights, state in [("float32", 4, 8), ("6 bytes", 2, 3), ("4 bytes", 2, 2)]:
        # Scales, a counter and a key on top: 4 bytes per array and moment in so small a model.
        assert weights <= rows[name]["weights"] < weights + 100 / count
        assert state <= rows[name]["state"] < state + 200 / count
        assert rows[name]["parameters"] == count
    assert rows["6 bytes"]["within"]


def test_steps_are_timed_with_and_without_donation(small: Path) -> None:
    rows = optim.step_times(load_config(small), 4).rows
    assert [row["buffers"] for row in rows] == ["new", "donated"]
    assert all(row["ratio"] > 0 and row["scaled ms"] > 0 for row in rows)


def test_losses_are_compared_with_float32() -> None:
    table = optim.compare({"float32": 2.0, "6 bytes": 2.002, "4 bytes": 2.02})
    rows = {row["formats"]: row for row in table.rows}
    assert rows["6 bytes"]["over float32"] == pytest.approx(0.001)
    assert rows["6 bytes"]["within"]
    assert not rows["4 bytes"]["within"]


@pytest.mark.slow
def test_command(
    small: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    formats = {name: optim.FORMATS[name] for name in ("float32", "6 bytes stochastic")}
    monkeypatch.setattr(optim, "FORMATS", formats)
    out = tmp_path / "out.json"
    arguments = ["--config", str(small), "--large", str(small), "--rounds", "4", "--json", str(out)]
    assert main(["bench", "optim", *arguments]) == 0
    assert "Bytes per parameter" in capsys.readouterr().out
    document = json.loads(out.read_text("utf-8"))
    losses = [row["validation loss"] for row in document["tables"][2]["rows"]]
    assert len(losses) == 2
    assert max(losses) / min(losses) < 1.05
