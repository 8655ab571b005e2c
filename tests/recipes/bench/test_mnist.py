"""The table of accuracies says what the runs said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from recipes.bench import mnist
from recipes.cli import main
from recipes.images.config import MnistConfig
from recipes.images.train import Outcome

from .idx import write_config

ACCURACY = {"plain": 0.5, "float32": 0.5, "bfloat16": 0.25, "float16": 0.75, "fp8": 0.625}


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[MnistConfig]:
    """The configs that were trained, in name only."""
    configs: list[MnistConfig] = []

    def train(config: MnistConfig, **options: Any) -> Outcome:
        configs.append(config)
        accuracy = ACCURACY[config.format] + config.seed / 8
        return Outcome(Path("nowhere"), 1, None if config.seed == 9 else accuracy, 15)

    monkeypatch.setattr(mnist, "train", train)
    return configs


def test_every_format_and_seed(
    tmp_path: Path, trained: list[MnistConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    path, output = str(write_config(tmp_path)), tmp_path / "table.json"
    assert main(["bench", "mnist", path, "--seeds", "2", "--json", str(output)]) == 0
    assert [(c.format, c.seed) for c in trained] == [(f, s) for f in ACCURACY for s in (0, 1)]
    assert len({c.name for c in trained}) == 10
    (table,) = json.loads(output.read_text("utf-8"))["tables"]
    assert table["rows"] == [
        {
            "format": name,
            "mean accuracy": accuracy + 0.0625,
            "least": accuracy,
            "most": accuracy + 0.125,
            "over plain": accuracy - 0.5,
        }
        for name, accuracy in ACCURACY.items()
    ]
    assert "0.8125" in capsys.readouterr().out


def test_a_run_that_was_stopped(
    tmp_path: Path, trained: list[MnistConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "mnist", str(write_config(tmp_path)), "seed=9"]) == 128 + 15
    assert "stopped by signal 15" in capsys.readouterr().err
    assert len(trained) == 1


def test_a_config_of_another_recipe(
    tmp_path: Path, trained: list[MnistConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "gpt.yaml"
    path.write_text("name: x\n", encoding="utf-8")
    assert main(["bench", "mnist", str(path)]) == 2
    assert "expected a config of recipe mnist; got recipe gpt" in capsys.readouterr().err
    assert not trained
