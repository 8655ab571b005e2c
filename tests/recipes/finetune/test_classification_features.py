"""Rows are tokenized as the tokenizer itself does it, cut and padded to one length."""

from __future__ import annotations

import pytest

from recipes.errors import RecipeError
from recipes.finetune.classification_data import Row
from recipes.finetune.classification_features import make_classification_features

from .wordpiece import make_tokenizer

SINGLE = [Row("the mine opened", None, 1, 2), Row("closed", None, 0, 3), Row("", None, 2, 4)]
PAIRS = [Row("the copper mine", "when did the mine open", 1, 1), Row("the mine", "", 0, 2)]


@pytest.mark.parametrize("rows", [SINGLE, PAIRS], ids=["single", "pairs"])
@pytest.mark.parametrize("length", [16, 6])
def test_records(rows: list[Row], length: int) -> None:
    tokenizer = make_tokenizer()
    tokenizer.enable_truncation(length)
    tokenizer.enable_padding(length=length)
    made = make_classification_features(rows, make_tokenizer(), sequence_length=length)
    assert len(made) == len(rows)
    for record, row in zip(made, rows, strict=True):
        expected = tokenizer.encode(row.text, row.pair)
        assert record["ids"].tolist() == expected.ids
        assert record["segments"].tolist() == expected.type_ids
        assert record["mask"].tolist() == expected.attention_mask
        assert record["label"] == row.label


@pytest.mark.parametrize(("rows", "least"), [(SINGLE, 3), (PAIRS, 5)])
def test_room_for_the_texts(rows: list[Row], least: int) -> None:
    make_classification_features(rows, make_tokenizer(), sequence_length=least)
    with pytest.raises(RecipeError, match=rf"data\.sequence_length: .* at least {least}, .* got"):
        make_classification_features(rows, make_tokenizer(), sequence_length=least - 1)
