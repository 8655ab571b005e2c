from __future__ import annotations

import json
from pathlib import Path

import pytest

from recipes.cli import main

from .characters import write


def test_train_leaves_metrics_and_a_plot(tmp_path: Path, capsys) -> None:
    path = write(tmp_path)
    assert main(["train", str(path)]) == 0
    out = capsys.readouterr().out
    assert "tiny: unit attention, " in out
    assert "bits per character" in out
    folder = tmp_path / "runs" / "tiny"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 3]
    assert {"loss", "validation_loss"} <= {key for row in rows for key in row}
    assert (folder / "loss.png").exists()
    assert main(["train", str(path), "optimizer.learning_rate=1e30"]) == 2
    assert "holds a run of another config" in capsys.readouterr().err
    assert main(["train", str(path), "name=b", "optimizer.learning_rate=1e30"]) == 1
    assert "is not finite; lower optimizer.learning_rate" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["evaluate", "generate"])
def test_what_a_character_model_cannot_do(command, tmp_path: Path, capsys) -> None:
    assert main([command, str(write(tmp_path))]) == 2
    assert "got recipe charlm" in capsys.readouterr().err
