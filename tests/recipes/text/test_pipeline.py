"""Batches: each window once per epoch, in an order that seed and position decide alone."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from recipes.config import DataConfig
from recipes.errors import RecipeError
from recipes.text import ByteTokenizer, Corpus, load_corpus


def corpus(size: int = 120, *, length: int = 5, batch: int = 4) -> Corpus:
    tokens = np.arange(size, dtype=np.uint8)
    return Corpus(tokens[:-20], tokens[-20:], length, batch)


def take(batches, count: int) -> np.ndarray:
    return np.stack([next(batches) for _ in range(count)])


def test_windows_are_runs_of_the_text() -> None:
    batch = next(corpus().training(0))
    assert batch.shape == (4, 6)
    assert batch.dtype == np.int32
    assert (np.diff(batch, axis=1) == 1).all()


def test_an_epoch_has_each_window_once_and_the_next_another_order() -> None:
    small = corpus(size=20 + 13, batch=4)  # 13 training tokens: 8 windows of 6
    batches = small.training(3)
    epochs = [take(batches, 2)[..., 0].ravel() for _ in range(3)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(8))
    assert any((epochs[0] != epoch).any() for epoch in epochs[1:])


def test_the_seed_decides_the_order() -> None:
    one, same, other = (take(corpus().training(seed), 5) for seed in (1, 1, 2))
    np.testing.assert_array_equal(one, same)
    assert (one != other).any()
    assert take(corpus().training(2**40 + 1), 1).shape == (1, 4, 6)


def test_goes_on_from_a_saved_position() -> None:
    batches = corpus().training(0)
    take(batches, 3)
    position = batches.get_state()
    expected = take(batches, 40)  # past the end of the epoch
    again = corpus().training(0)
    again.set_state(position)
    np.testing.assert_array_equal(take(again, 40), expected)


@pytest.mark.parametrize("processes", [2, 4])
def test_processes_share_each_batch(processes: int) -> None:
    whole = take(corpus().training(0), 30)
    shares = [
        take(corpus().training(0, process=process, processes=processes), 30)
        for process in range(processes)
    ]
    assert shares[0].shape == (30, 4 // processes, 6)
    together = np.concatenate(shares, axis=1)
    np.testing.assert_array_equal(np.sort(together[..., 0]), np.sort(whole[..., 0]))


def test_processes_must_divide_the_batch() -> None:
    with pytest.raises(ValueError, match=r"size must be a multiple .*got 4 and 3"):
        corpus().training(0, process=0, processes=3)


def test_a_batch_may_be_one_window() -> None:
    assert next(corpus(batch=1).training(0)).shape == (1, 6)


def test_validation_is_the_end_of_the_text_without_overlap() -> None:
    made = corpus(batch=2)
    batches = list(made.validation())
    starts = np.concatenate(batches)[:, 0]
    assert set(starts) <= {100, 105, 110}
    assert len(set(starts)) == 2
    np.testing.assert_array_equal(np.concatenate(batches), np.concatenate(list(made.validation())))
    assert len(list(made.validation(1))) == 1
    assert next(corpus(batch=50).validation()).shape == (3, 6)


def test_digest_tells_texts_and_splits_apart() -> None:
    tokens = np.arange(50, dtype=np.uint8)
    digests = {
        Corpus(tokens[:40], tokens[40:], 4, 2).digest,
        Corpus(tokens[:41], tokens[41:], 4, 2).digest,
        Corpus(tokens[:40], tokens[39:49], 4, 2).digest,
    }
    assert len(digests) == 3


# length of the text, sequence length, batch, and what the message has to say
WRONG = [
    (40, 64, 1, r"data\.sequence_length: one sequence needs 65 tokens.*has 36 of the 40 tokens"),
    (300, 64, 1, r"the validation part of .* has 30 of the 300 tokens; use more text"),
    (900, 64, 16, r"data\.batch_size: expected at most the 12 sequences of 64 .*; got 16"),
]


@pytest.mark.parametrize(("size", "length", "batch", "message"), WRONG)
def test_too_little_text(tmp_path: Path, size: int, length: int, batch: int, message: str) -> None:
    path = tmp_path / "short.txt"
    path.write_text("x" * size, encoding="utf-8")
    config = DataConfig(path=str(path), sequence_length=length, batch_size=batch)
    with pytest.raises(RecipeError, match=message):
        load_corpus(config, ByteTokenizer())


def test_just_enough_text(tmp_path: Path) -> None:
    path = tmp_path / "enough.txt"
    path.write_text("x" * 650, encoding="utf-8")
    config = DataConfig(path=str(path), sequence_length=64, batch_size=9)
    made = load_corpus(config, ByteTokenizer())
    assert made.train_tokens.size == 585
    assert next(made.training(0)).shape == (9, 65)
    assert next(made.validation()).shape == (1, 65)


class Words:
    """A tokenizer whose token i is a word of i + 1 letters, two bytes each."""

    vocab = 4
    eos: int | None = None
    identity = "words"

    def encode(self, text: str) -> np.ndarray:
        return np.array([len(word) - 1 for word in text.split()])

    def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return "".join("é" * (i + 1) for i in np.asarray(ids))


def test_the_size_of_tokens_is_that_of_their_text() -> None:
    tokens = np.array([0, 1, 2, 3, 0, 0])
    assert Corpus(tokens, tokens, 2, 1, Words()).token_size == 2 * 12 / 6
    assert corpus().token_size is None  # bytes
