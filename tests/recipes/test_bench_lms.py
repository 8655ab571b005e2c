"""`bench lms`: judging losses and pipelines, and the command."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from recipes.bench import lms
from recipes.cli import main
from recipes.configfile import load_run_config

from .conftest import write_config
from .masked import write_bert


@pytest.mark.parametrize(("produced", "within"), [(200.0, True), (199.0, False)])
def test_pipelines_are_judged_by_what_training_consumes(produced: float, within: bool) -> None:
    (row,) = lms.pipelines([{"config": "a", "produced": produced, "consumed": 10.0}]).rows
    assert row["ratio"] == produced / 10
    assert row["within"] is within


def test_the_config_is_that_of_the_figure() -> None:
    config = load_run_config(lms.CONFIGS / "bert" / "books.yaml")
    assert (config.model.width, config.model.layers, config.train.steps) == (256, 4, 2000)


@pytest.mark.slow
def test_command_compares_policies_and_times_pipelines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bert, gpt = write_bert(tmp_path), write_config(tmp_path)
    for name, path in (("gpt", gpt), ("bert", bert)):
        (tmp_path / "configs" / name).mkdir(parents=True)
        shutil.copy(path, tmp_path / "configs" / name / "quickstart.yaml")
    monkeypatch.setattr(lms, "CONFIGS", tmp_path / "configs")
    out = tmp_path / "out.json"
    words = ["model.dropout=0.0", "train.steps=2", "--config", str(bert), "--rounds", "1"]
    assert main(["bench", "lms", *words, "--json", str(out)]) == 0
    losses, speeds = (table["rows"] for table in json.loads(out.read_text())["tables"])
    assert [row["policy"] for row in losses] == ["float32", "float16", "fp8"]
    assert len({row["validation loss"] for row in losses}) == 3
    assert abs(losses[1]["over float32"]) < 0.01
    assert [row["config"] for row in speeds] == ["tiny", "tiny-bert"]
    assert all(row["produced"] > 0 < row["consumed"] for row in speeds)
