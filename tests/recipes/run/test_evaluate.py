"""A loss in words: nats, bits, and bits per byte where a token stands for several."""

import math

import pytest

from recipes.bert.config import BertConfig
from recipes.gpt.config import GPTConfig
from recipes.run.evaluate import shown


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (None, "1.3863 nats per token, 2.0000 bits"),
        (4.0, "1.3863 nats per token, 2.0000 bits, 0.5000 bits per byte"),
    ],
)
def test_a_loss_of_tokens_in_words(size: float | None, expected: str) -> None:
    assert shown(GPTConfig(name="a"), 2 * math.log(2), size) == expected


def test_a_loss_of_hidden_tokens_is_in_nats_alone() -> None:
    config = BertConfig(recipe="bert", name="a")
    assert shown(config, 2.0, 4.0) == f"2.0000 nats per {config.loss_unit}"
