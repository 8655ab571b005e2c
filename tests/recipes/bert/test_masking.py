"""Hidden tokens: their number, their shares, and whole words."""

import numpy as np
import pytest

from recipes.bert.config import MaskingConfig
from recipes.bert.masking import Masked, mask_tokens

MASK, ORDINARY = 4, np.arange(5, 1000)


def mask(ids: np.ndarray, words: np.ndarray, predictions: int, seed: int = 0, **shares) -> Masked:
    return mask_tokens(
        ids,
        words,
        np.random.default_rng(seed),
        predictions=predictions,
        mask=MASK,
        ordinary=ORDINARY,
        config=MaskingConfig(**shares),
    )


def test_targets_are_what_was_hidden() -> None:
    ids = np.arange(5, 105)
    words = np.where(np.arange(100) % 10, np.arange(100), -1)
    masked = mask(ids, words, 15)
    assert masked.counts.all()
    assert (np.diff(masked.positions) > 0).all()
    assert (masked.positions % 10 != 0).all()
    np.testing.assert_array_equal(masked.targets, ids[masked.positions])
    rest = np.setdiff1d(np.arange(100), masked.positions)
    np.testing.assert_array_equal(masked.ids[rest], ids[rest])
    assert all(part.dtype == np.int32 for part in masked[:3])


def test_what_is_seen_has_the_shares_asked_for() -> None:
    count = 20_000
    masked = mask(np.full(count, 5), np.arange(count), count)
    shares = [np.mean(masked.ids == MASK), np.mean(masked.ids == 5)]
    strangers = masked.ids[(masked.ids != MASK) & (masked.ids != 5)]
    wanted = [0.8, 0.1 + 0.1 / ORDINARY.size]
    for share, want in zip(shares, wanted, strict=True):
        assert abs(share - want) < 5 * np.sqrt(want * (1 - want) / count)
    assert np.isin(strangers, ORDINARY).all()
    assert np.unique(strangers).size > ORDINARY.size / 2


@pytest.mark.parametrize("seed", range(5))
def test_words_are_hidden_whole(seed: int) -> None:
    words = np.repeat([-1, 0, 1, 2, 3, 4, -1], [1, 3, 1, 4, 2, 3, 2])
    ids = np.arange(10, 10 + words.size)
    masked = mask(ids, words, 5, seed, masked=1.0, random=0.0)
    hidden = masked.ids == MASK
    for word in range(5):
        assert len(set(hidden[words == word])) == 1
    assert not hidden[words < 0].any()
    assert hidden.sum() == masked.counts.sum() <= 5
    assert masked.counts.sum() >= 3  # whatever the order, some two words leave less room than that


def test_too_few_words_fill_up_with_what_does_not_count() -> None:
    words = np.array([-1, 0, 0, -1])
    masked = mask(np.array([2, 8, 9, 3]), words, 4)
    np.testing.assert_array_equal(masked.counts, [True, True, False, False])
    np.testing.assert_array_equal(masked.positions, [1, 2, 0, 0])
    np.testing.assert_array_equal(masked.targets, [8, 9, 0, 0])
    nothing = mask(np.array([2, 3]), np.array([-1, -1]), 2)
    assert not nothing.counts.any()
    np.testing.assert_array_equal(nothing.ids, [2, 3])


def test_the_generator_decides_everything() -> None:
    ids, words = np.arange(5, 105), np.arange(100)
    for one, other in zip(mask(ids, words, 15, 7), mask(ids, words, 15, 7), strict=True):
        np.testing.assert_array_equal(one, other)
    assert (mask(ids, words, 15, 7).positions != mask(ids, words, 15, 8).positions).any()
