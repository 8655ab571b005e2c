"""A mixture has of each text the share asked for, goes on where it was, and names faults."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recipes.config import DataConfig
from recipes.errors import RecipeError
from recipes.text import ByteTokenizer, Mixture, documents, load_corpus, open_tokenizer
from recipes.text._cache import cache_key

TEXTS = {"a": 400, "b": 900, "c": 250}
WEIGHTS = (5.0, 2.0, 1.0)


def write(folder: Path) -> dict[str, float]:
    """Texts of one letter each, and their weights by path."""
    for name, size in TEXTS.items():
        (folder / f"{name}.txt").write_text(name * size, encoding="utf-8")
    paths = (str(folder / f"{name}.txt") for name in TEXTS)
    return dict(zip(paths, WEIGHTS, strict=True))


def config_of(folder: Path, **settings: Any) -> DataConfig:
    settings = {"sequence_length": 16, "batch_size": 8} | settings
    return DataConfig(mixture=write(folder), cache_dir=str(folder / "cache"), **settings)


def mixture_of(folder: Path) -> Mixture:
    found = load_corpus(config_of(folder), ByteTokenizer())
    assert isinstance(found, Mixture)
    return found


def test_each_batch_has_the_shares_that_were_asked_for(tmp_path: Path) -> None:
    batches = mixture_of(tmp_path).training(0)
    for _ in range(100):  # many epochs of every text
        batch = next(batches)
        assert (batch == batch[:, :1]).all()  # a window is of one text
        counts = [int((batch[:, 0] == ord(name)).sum()) for name in TEXTS]
        assert counts == [5, 2, 1]


def test_goes_on_from_a_saved_position_and_is_shared_by_processes(tmp_path: Path) -> None:
    mixture = mixture_of(tmp_path)
    batches = mixture.training(3)
    whole = [next(batches) for _ in range(7)]
    position = batches.get_state()
    expected = next(batches)
    again = mixture.training(3)
    again.set_state(position)
    np.testing.assert_array_equal(next(again), expected)
    shares = [mixture.training(3, process=i, processes=2) for i in range(2)]
    for batch in whole:
        found = np.concatenate([next(share) for share in shares])
        assert sorted(map(bytes, found)) == sorted(map(bytes, batch))


def test_validation_reads_the_end_of_every_text_once(tmp_path: Path) -> None:
    mixture = mixture_of(tmp_path)
    windows = np.concatenate(list(mixture.validation()))
    counts = {name: int((windows[:, 0] == ord(name)).sum()) for name in TEXTS}
    # The last tenth: 40, 90 and 25 tokens, of which 39, 89 and 24 have a target; batches of 8.
    assert counts == {"a": 2, "b": 5, "c": 1}
    assert mixture.summary == "1,395 training tokens of 3 texts"


def test_a_tokenizer_reads_all_texts(tmp_path: Path) -> None:
    config = config_of(tmp_path, tokenizer={"kind": "bpe", "vocab": 300}, max_bytes=100)
    assert [text for text, _ in documents(config)] == [name * 100 for name in TEXTS]
    tokenizer = open_tokenizer(config)
    assert all(tokenizer.encode(name * 64).size < 40 for name in TEXTS)
    # The first 100 bytes of each text are not those of all in one folder.
    assert config.mixture is not None
    folder = DataConfig(path=str(tmp_path), pattern="*.txt", max_bytes=100)
    assert cache_key(folder, {}) != cache_key(config, {})


def test_texts_and_weights_tell_mixtures_apart(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    assert config.mixture is not None
    other = config.model_copy(update={"mixture": dict.fromkeys(config.mixture, 1.0)})
    first, second = (load_corpus(one, ByteTokenizer()).digest for one in (config, other))
    assert first != second


def test_faults_are_named(tmp_path: Path) -> None:
    paths = write(tmp_path)
    with pytest.raises(ValueError, match=r"in place of path; got 3 of them and path x\.txt"):
        DataConfig(path="x.txt", mixture=paths)
    with pytest.raises(ValueError, match="got 0 of them and path None"):
        DataConfig(mixture={})
    with pytest.raises(ValueError, match="greater than 0"):
        DataConfig(mixture={"x.txt": 0.0})
    missing = DataConfig(mixture=paths | {"none.txt": 1.0}, sequence_length=16, batch_size=8)
    with pytest.raises(RecipeError, match=r"data\.path: none\.txt does not exist"):
        load_corpus(missing, ByteTokenizer())
