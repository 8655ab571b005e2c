"""Embedding: the table's gradient is unit for any distribution of tokens."""

import numpy as np
import pytest

from unitscale import rules


@pytest.mark.parametrize("skew", [0.0, 1.0])
def test_table_gradient_is_unit(skew, assert_unit) -> None:
    vocab, tokens, features = 50, 200, 16
    factors = rules.embed(vocab, tokens)
    probability = (1.0 + np.arange(vocab)) ** -skew
    probability /= probability.sum()

    def trial(rng):
        ids = rng.choice(vocab, tokens, p=probability)
        table = np.zeros((vocab, features))
        np.add.at(table, ids, rng.standard_normal((tokens, features)))
        return (factors.bwd[0] * table,)

    assert factors.fwd == 1.0
    assert_unit(trial, trials=400)


def test_rejects_an_empty_batch() -> None:
    with pytest.raises(ValueError, match="embed: tokens must be at least 1"):
        rules.embed(10, 0)
