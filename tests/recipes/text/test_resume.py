"""A run goes on with its own tokenizer and text, whatever became of their files' dates."""

import os
import shutil
from pathlib import Path

import pytest

from recipes import train as train_module
from recipes.errors import RecipeError
from recipes.text import _vocabulary

from ..masked import bert_config, write_bert
from ..runs import timeless


@pytest.mark.slow
def test_a_touched_text_and_another_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = bert_config(write_bert(tmp_path))
    first = train_module.train(config)
    expected = timeless(first.folder)
    shutil.rmtree(first.folder / "checkpoints" / "6")
    shutil.rmtree(tmp_path / "cache")
    os.utime(tmp_path / "text.txt")
    monkeypatch.setattr(_vocabulary, "train_tokenizer", lambda config: pytest.fail("trained again"))
    again = train_module.train(config)
    assert again == first
    assert timeless(first.folder) == expected
    (tmp_path / "text.txt").write_text((tmp_path / "text.txt").read_text("utf-8")[::-1], "utf-8")
    with pytest.raises(RecipeError, match=r"is not what .* was trained on"):
        train_module.train(config)
