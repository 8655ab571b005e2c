"""`bench trace`: the cost of a traced step, from the command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from recipes.cli import main


@pytest.mark.slow
def test_command_reports_time_memory_and_compilation(tmp_path: Path, config_file: Path) -> None:
    path = tmp_path / "out.json"
    words = ["model.dropout=0.0", "optimizer.name=sgd", "--rounds", "4"]
    assert main(["bench", "trace", *words, "--config", str(config_file), "--json", str(path)]) == 0
    (table,) = json.loads(path.read_text())["tables"]
    assert "1 layers, 16 wide, 4 x 16 tokens, float32" in table["title"]
    time, memory, compilation = table["rows"]
    assert time["lower quartile"] <= time["ratio"] <= time["upper quartile"]
    assert time["within"] is (time["ratio"] <= 3)
    # The step's arguments and results are in both programs, its statistics in one of them.
    assert 1 < memory["ratio"] == pytest.approx(memory["traced"] / memory["plain"])
    assert compilation["traced"] > compilation["plain"] > 0
