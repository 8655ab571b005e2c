"""Fine-tuning for `bench lms`: files, runs and the judgement of their scores."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from recipes.bench import _runs
from recipes.bench._tasks import (
    question_words,
    scores_table,
    sentence_words,
    split_articles,
    task_config,
    tuned_scores,
)
from recipes.errors import RecipeError
from recipes.finetune.task import SCORES
from recipes.train import Outcome

from .masked import bert_config, write_bert
from .tasks import squad

FILES = ["data.train=a.tsv", "data.validation=b.tsv"]


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


def test_a_run_is_that_of_its_pretrained_model(tmp_path: Path) -> None:
    pretrained = bert_config(write_bert(tmp_path), "policy=float16")
    words = [*sentence_words(str(tmp_path / "text.txt"), "dev.tsv"), "train.steps=300"]
    config = task_config("sst2", pretrained, 5, words)
    assert (config.name, config.seed, config.policy) == ("tiny-bert-sst2-5", 5, "float16")
    assert config.init == str(tmp_path / "runs" / "tiny-bert")
    assert (config.data.sequence_length, config.train.steps) == (16, 300)
    assert config.train.runs_dir == pretrained.train.runs_dir
    assert config.classification.text == 0
    asked = task_config("squad", pretrained, 0, question_words(tmp_path, tmp_path, 16))
    assert asked.squad.max_question_length == 5


def test_scores_are_those_that_the_run_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = task_config("sst2", bert_config(write_bert(tmp_path)), 0, FILES)
    outcome = Outcome(tmp_path, 1, 0.5, None)
    monkeypatch.setattr(_runs, "train", lambda *args, **kwargs: outcome)
    (tmp_path / SCORES).write_text('{"accuracy": 0.75}', encoding="utf-8")
    assert tuned_scores(config, False, Console(quiet=True)) == {"accuracy": 0.75}
    monkeypatch.setattr(_runs, "train", lambda *a, **k: outcome._replace(signal=15))
    with pytest.raises(RecipeError, match="stopped by signal 15; run the same command to resume"):
        tuned_scores(config, False, Console(quiet=True))


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
