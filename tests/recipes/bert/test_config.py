"""What a BERT's config refuses, and the sizes that follow from it."""

from pathlib import Path

import pytest

from recipes.errors import RecipeError
from recipes.registry import load_config

from ..masked import bert_config, write_bert

CONFIGS = Path(__file__).parents[3] / "configs" / "bert"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_bert(tmp_path)


def test_sizes_follow_from_data(path: Path) -> None:
    config = bert_config(path)
    assert config.model.vocab == 120
    assert config.context == config.longest == 16
    assert config.loss_unit == "hidden token"
    asked = bert_config(path, "data.pairs=next_sentence")
    assert asked.loss_unit == "hidden token plus nats per pair"
    assert config.data.predictions == 2
    assert bert_config(path, "data.masking.share=0.01").data.predictions == 1


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.masking.masked=0.95", r"masked and random must not be more than 1 together"),
        ("data.tokenizer={kind: byte, vocab: null, lowercase: false}", "wordpiece or file"),
        ("data.sequence_length=4", "sequence_length must be at least 5"),
        ("model.heads=3", "heads must divide width; got heads 3 and width 16"),
        ("model.vocab=100", "model.vocab must be at least the 120 ids of the wordpiece"),
        ("model.context=8", "model.context must be at least data.sequence_length; got 8 and 16"),
        ("model.mlp_ratio=0.01", "mlp_ratio"),
        ("scalify={}", "scalify is for plain models"),
        ("data.pairs=next_sentences", "did you mean next_sentence"),
    ],
)
def test_what_cannot_be_is_refused(path: Path, override: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        bert_config(path, override)


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.yaml")), ids=lambda file: file.stem)
def test_configs_are_valid(file: Path) -> None:
    words = ["init=runs/a", "data.train=a", "data.validation=b"]
    tuned = "recipe: finetune" in file.read_text(encoding="utf-8")
    assert load_config(file, words if tuned else ()).name
