"""Fine-tuning for `bench lms`: files, runs and the judgement of their scores."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from recipes import train as train_module
from recipes.bench._tasks import (
    question_words,
    scores_table,
    sentence_words,
    split_articles,
    task_config,
    tuned_scores,
)
from recipes.errors import RecipeError
from recipes.finetune.pretrained import pretraining_of

from .masked import write_run
from .tasks import ROWS, squad


def test_articles_are_in_one_part_or_the_other(tmp_path: Path) -> None:
    (one,) = squad(["fox"] * 17)["data"]
    paragraphs = enumerate(one["paragraphs"])
    articles = [{"title": str(index), "paragraphs": [part]} for index, part in paragraphs]
    file = tmp_path / "all.json"
    file.write_text(json.dumps({"version": "1.1", "data": articles}), encoding="utf-8")
    train, validation = split_articles(str(file), tmp_path / "split")
    parts = [json.loads(part.read_text("utf-8"))["data"] for part in (train, validation)]
    titles = [[article["title"] for article in part] for part in parts]
    assert titles[1] == ["7", "15"]
    assert sorted(titles[0] + titles[1], key=int) == [str(index) for index in range(17)]
    file.write_text(json.dumps({"data": articles[:7]}), encoding="utf-8")
    with pytest.raises(RecipeError, match=r"--squad: expected at least 8 articles, .* got 7"):
        split_articles(str(file), tmp_path / "split")


def test_columns_go_by_the_first_line(tmp_path: Path) -> None:
    file = tmp_path / "rows.tsv"
    file.write_text("sentence\tlabel\na film\t1\n", encoding="utf-8")
    words = [f"data.train={file}", "data.validation=dev.tsv"]
    assert sentence_words(str(file), "dev.tsv") == words
    file.write_text("a film\t1\n", encoding="utf-8")
    bare = "classification={header: false, text: 0, label: 1}"
    assert sentence_words(str(file), "dev.tsv") == [*words, bare]
    with pytest.raises(RecipeError, match=r"--sst2: cannot read .*nowhere"):
        sentence_words("nowhere", "dev.tsv")


def test_a_run_is_tuned_and_scored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_module, "plot_run", lambda run: None)
    pretrained = pretraining_of(str(write_run(tmp_path)))
    file = tmp_path / "rows.tsv"
    file.write_text("".join(f"{text}\t{label}\n" for text, label in ROWS), encoding="utf-8")
    words = [
        "train={steps: 2, eval_every: 9, log_every: 9, checkpoint_every: 9}",
        "optimizer={warmup_steps: 0, name: sgd, b1: 0.0}",
        "data.batch_size=8",
    ]
    config = task_config("sst2", pretrained, 5, [*sentence_words(str(file), str(file)), *words])
    assert (config.name, config.seed) == ("tiny-bert-sst2-5", 5)
    assert config.data.sequence_length == pretrained.context == 32
    output = io.StringIO()
    scores = tuned_scores(config, False, Console(file=output, width=200))
    assert f"accuracy {scores['accuracy']:.4g}, " in output.getvalue()
    asked = task_config("squad", pretrained, 0, question_words(file, file, 32))
    assert asked.squad.max_question_length == 10


def test_scores_are_judged_by_the_spread_of_seeds() -> None:
    wide, same, low = [80.0, 82.0, 84.0], [79.0, 81.0, 83.0], [77.0, 79.5, 82.0]
    found = {("F1", "float32"): wide, ("F1", "float16"): same, ("F1", "fp8"): low}
    rows = scores_table(found).rows
    assert [row["mean"] for row in rows] == [82.0, 81.0, 79.5]
    assert [row["standard deviation"] for row in rows] == [2.0, 2.0, 2.5]
    assert [row.get("over float32") for row in rows] == [None, -1.0, -2.5]
    assert [row.get("within") for row in rows] == [None, True, False]
    assert rows[1]["asked"] == ">= -2.000"
    (_, alone) = scores_table({("F1", "float32"): [80.0], ("F1", "fp8"): [79.0]}).rows
    assert "within" not in alone
