"""`bench lms`: judging pipelines, and the command."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recipes.bench import lms
from recipes.bench._runs import Run
from recipes.bert.config import BertConfig
from recipes.cli import main
from recipes.registry import load_run_config

from .conftest import write_config
from .masked import bert_config, write_bert
from .pretrained import FIXTURES
from .tasks import FILES, write_tasks

Captured = pytest.CaptureFixture[str]


@pytest.mark.parametrize(("produced", "within"), [(200.0, True), (199.0, False)])
def test_pipelines_are_judged_by_what_training_consumes(produced: float, within: bool) -> None:
    (row,) = lms.speeds([{"config": "a", "produced": produced, "consumed": 10.0}]).rows
    assert row["ratio"] == produced / 10
    assert row["within"] is within


def test_a_pipeline_is_timed_beside_its_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[tuple[int, ...]] = []

    def stepper_on(config: BertConfig, batch: Any) -> Callable[[], None]:
        given.append(batch[0].shape)
        return lambda: time.sleep(0.01)

    monkeypatch.setattr(lms, "stepper_on", stepper_on)
    row = lms.time_pipeline(bert_config(write_bert(tmp_path)), rounds=1, batches=2)
    assert given == [(4, 16)]
    assert row["config"] == "tiny-bert"
    assert 0 < row["consumed"] < 4 * 16 / 0.01
    assert row["produced"] > 0


def test_the_config_is_that_of_the_figure() -> None:
    config = load_run_config(lms.CONFIGS / "bert" / "books.yaml")
    assert isinstance(config, BertConfig)
    assert (config.model.width, config.model.layers, config.train.steps) == (256, 4, 2000)


def test_command_prints_what_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of runs whose losses and scores are given, by format and seed."""
    loss = {"float32": 2.0, "float16": 2.001, "fp8": 2.1}
    score = {"float32": 0.8, "float16": 0.79, "fp8": 0.5}
    seen: list[str] = []

    def tuned(config: Any, fresh: bool, console: Any) -> dict[str, float]:
        seen.append(config.name)
        assert config.train.steps == 7
        value = score[config.policy] + 0.02 * config.seed
        return {"accuracy": value, "f1": 100 * value}

    monkeypatch.setattr(lms, "trained", lambda one, *rest: Run(one, None, None, loss[one.policy]))
    monkeypatch.setattr(lms, "tuned_scores", tuned)
    write_tasks(tmp_path, tmp_path)
    out, squad, rows = (str(tmp_path / name) for name in ("out.json", *FILES.values()))
    (article,) = json.loads(Path(squad).read_text("utf-8"))["data"]
    parts = [{"title": "one", "paragraphs": [part]} for part in article["paragraphs"]]
    Path(squad).write_text(json.dumps({"data": parts}), "utf-8")
    words = ["--config", str(write_bert(tmp_path)), "--no-pipelines", "--json", out]
    words += ["--logits", str(FIXTURES / "bert-classes")]
    tasks = ["--finetune", "--sst2", rows, rows, "--squad", squad, "--seeds", "2"]
    assert (
        main(
            [
                "bench",
                "lms",
                *words,
                *tasks,
                "--tuning",
                "train.steps=7",
                "--tuning",
                "optimizer.warmup_steps=0",
            ]
        )
        == 0
    )
    losses, scores, logits = (
        table["rows"] for table in json.loads(Path(out).read_text())["tables"]
    )
    assert [(row["policy"], row.get("within")) for row in losses] == [
        ("float32", None),
        ("float16", True),
        ("fp8", False),
    ]
    for label, found in zip(["SST-2 accuracy"] * 3 + ["SQuAD F1"] * 3, scores, strict=True):
        assert found["score"] == label
        assert found["mean"] == pytest.approx(100 * (score[found["policy"]] + 0.01))
    assert [row.get("within") for row in scores] == [None, True, False] * 2
    assert len(set(seen)) == len(seen) == 12
    assert all(row["within"] for row in logits)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--finetune"], "got neither --sst2 nor --squad"),
        (["--finetune", "--no-runs", "--squad", "a"], "got --no-runs"),
        (["--squad", "a"], "expected beside --finetune; got them alone"),
        (["--charlm", "nowhere"], "--charlm: expected the folder of a sweep"),
        (["--logits", "nowhere"], "--logits: expected a folder with reference.npz"),
    ],
)
def test_wrong_words(words: list[str], message: str, capsys: Captured) -> None:
    assert main(["bench", "lms", *words]) == 2
    assert message in capsys.readouterr().err


def test_only_a_bert_is_pretrained(tmp_path: Path, capsys: Captured) -> None:
    assert main(["bench", "lms", "--config", str(write_config(tmp_path))]) == 2
    assert "--config: expected a config of recipe bert; got recipe gpt" in capsys.readouterr().err
