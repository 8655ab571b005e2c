"""What a BERT's config refuses, and the sizes that follow from it."""

from pathlib import Path

import pytest

from ..configs import refuses_configs
from ..masked import bert_config, write_bert


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    return write_bert(tmp_path)


def test_sizes_follow_from_data(config_file: Path) -> None:
    config = bert_config(config_file)
    assert config.model.vocab == 120
    assert config.context == config.longest == 16
    assert config.loss_unit == "hidden token"
    asked = bert_config(config_file, "data.pairs=next_sentence")
    assert asked.loss_unit == "hidden token plus nats per pair"
    assert config.data.predictions == 2
    assert bert_config(config_file, "data.masking.share=0.01").data.predictions == 1


test_what_cannot_be_is_refused = refuses_configs(
    [
        ("data.masking.masked=0.95", r"masked and random must not be more than 1 together"),
        ("data.tokenizer={kind: byte, vocab: null, lowercase: false}", "wordpiece or file"),
        ("data.sequence_length=4", "sequence_length must be at least 5"),
        ("model.heads=3", "heads must divide width; got heads 3 and width 16"),
        ("model={positions: rope, heads: 16}", "rope needs an even head size"),
        ("model.vocab=100", "model.vocab must be at least the 120 ids of the wordpiece"),
        ("model.context=8", "model.context must be at least data.sequence_length; got 8 and 16"),
        ("model.mlp_ratio=0.01", "mlp_ratio"),
        ("precision=scalify_float16", "are for plain models"),
        ("data.pairs=next_sentences", "did you mean next_sentence"),
    ]
)
