"""A run goes on with its own tokenizer and text, whatever became of their files' dates."""

import json
import os
import shutil
from pathlib import Path

import pytest

from recipes import train as train_module
from recipes.errors import RecipeError
from recipes.text import _vocabulary

from ..masked import bert_config, write_bert


@pytest.mark.slow
def test_a_touched_text_and_another_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_module, "plot_run", lambda run: None)
    config = bert_config(write_bert(tmp_path))
    first = train_module.train(config)
    metrics = first.folder / "metrics.jsonl"
    expected = [json.loads(line) for line in metrics.read_text("utf-8").splitlines()]
    shutil.rmtree(first.folder / "checkpoints" / "6")
    shutil.rmtree(tmp_path / "cache")
    os.utime(tmp_path / "text.txt")
    monkeypatch.setattr(_vocabulary, "train_tokenizer", lambda config: pytest.fail("trained again"))
    again = train_module.train(config)
    assert again == first
    rows = [json.loads(line) for line in metrics.read_text("utf-8").splitlines()]
    for row in (*rows, *expected):
        row.pop("tokens_per_second", None)
    assert rows == expected
    (tmp_path / "text.txt").write_text((tmp_path / "text.txt").read_text("utf-8")[::-1], "utf-8")
    with pytest.raises(RecipeError, match=r"is not what .* was trained on"):
        train_module.train(config)
