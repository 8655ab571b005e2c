"""Pairs of segments with hidden tokens: layout, random choices, shards, and resuming."""

import itertools
from pathlib import Path

import numpy as np
import pytest

from recipes.bert.task import MaskedCorpus, Vocabulary, load_data
from recipes.errors import RecipeError

from ..masked import bert_config, write_bert

SPECIAL = 5
VOCABULARY = Vocabulary(2, 3, 4, np.arange(1000) < SPECIAL, np.ones(1000, bool))


def hide(ids: np.ndarray, words: np.ndarray, predictions: int, seed: int = 0):
    return VOCABULARY.hide(ids, words, predictions, np.random.default_rng(seed))


def test_targets_are_the_hidden_tokens() -> None:
    ids = np.where(np.arange(100) % 10, np.arange(5, 105), 2)
    seen, positions, targets, counts = hide(ids, np.arange(100), 15)
    assert counts.all()
    assert (np.diff(positions) > 0).all()
    assert (positions % 10 != 0).all()  # special tokens
    np.testing.assert_array_equal(targets, ids[positions])
    rest = np.setdiff1d(np.arange(100), positions)
    np.testing.assert_array_equal(seen[rest], ids[rest])
    assert {part.dtype for part in (seen, positions, targets)} == {np.dtype(np.int32)}


def test_hidden_tokens_have_the_shares_of_bert() -> None:
    count, ordinary = 20_000, 1000 - SPECIAL
    seen, *_ = hide(np.full(count, SPECIAL), np.arange(count), count)
    shares = [np.mean(seen == VOCABULARY.mask), np.mean(seen == SPECIAL)]
    strangers = seen[(seen != VOCABULARY.mask) & (seen != SPECIAL)]
    for share, want in zip(shares, [0.8, 0.1 + 0.1 / ordinary], strict=True):
        assert abs(share - want) < 5 * np.sqrt(want * (1 - want) / count)
    assert strangers.min() >= SPECIAL
    assert np.unique(strangers).size > ordinary / 2


def test_words_are_hidden_whole() -> None:
    words = np.repeat([0, 1, 2, 3, 4], [3, 1, 4, 2, 3])
    for seed in range(3):
        _, positions, _, counts = hide(np.arange(10, 10 + words.size), words, 5, seed)
        hidden = np.isin(np.arange(words.size), positions[counts])
        for word in range(5):
            assert len(set(hidden[words == word])) == 1
        assert 3 <= counts.sum() <= 5  # whatever the order, some two words leave less room


def test_too_few_words_fill_up_with_predictions_that_do_not_count() -> None:
    _, positions, targets, counts = hide(np.array([2, 8, 9, 3]), np.array([0, 1, 1, 2]), 4)
    np.testing.assert_array_equal(counts, [True, True, False, False])
    np.testing.assert_array_equal(positions, [1, 2, 0, 0])
    np.testing.assert_array_equal(targets, [8, 9, 0, 0])
    seen, *_, counts = hide(np.array([2, 3]), np.array([0, 1]), 2)
    assert not counts.any()
    np.testing.assert_array_equal(seen, [2, 3])


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bert(tmp_path_factory.mktemp("bert"))


def load(path: Path, *overrides: str) -> MaskedCorpus:
    return load_data(bert_config(path, *overrides))


def whole(batch) -> np.ndarray:
    """Return the ids of a batch with the hidden tokens restored."""
    ids, _, positions, targets, counts = batch[:5]
    ids = ids.copy()
    for row in range(len(ids)):
        ids[row, positions[row][counts[row]]] = targets[row][counts[row]]
    return ids


def texts(data: MaskedCorpus, batch) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the two segments of each sequence."""
    found = []
    for ids, segments in zip(whole(batch), batch[1], strict=True):
        assert ids[0] == data.vocabulary.first
        assert ids[-1] == data.vocabulary.end
        cut = int(segments.sum())
        assert ids[-cut - 1] == data.vocabulary.end
        np.testing.assert_array_equal(segments, np.arange(ids.size) >= ids.size - cut)
        found.append((ids[1 : -cut - 1], ids[-cut:-1]))
    return found


def test_segments_begin_with_words(path: Path) -> None:
    data = load(path)
    batch = next(data.training(0))
    assert [part.shape for part in batch] == [(4, 16), (4, 16), (4, 2), (4, 2), (4, 2)]
    for segment in itertools.chain(*texts(data, batch)):
        assert data.vocabulary.begins[segment[0]]


def test_words_of_a_text_are_hidden_whole(path: Path) -> None:
    data = load(path, "data.masking={share: 0.4, whole_words: true}")
    for _, batch in zip(range(10), data.training(0), strict=False):
        for ids, positions, counts in zip(whole(batch), batch[2], batch[4], strict=True):
            hidden = np.isin(np.arange(ids.size), positions[counts])
            inside = ~data.vocabulary.begins[ids]
            np.testing.assert_array_equal(hidden[1:][inside[1:]], hidden[:-1][inside[1:]])


@pytest.mark.parametrize("pairs", ["next_sentence", "sentence_order"])
def test_the_answer_says_what_was_done_to_the_pair(path: Path, pairs: str) -> None:
    data, ordered = load(path, f"data.pairs={pairs}"), pairs == "sentence_order"
    text = data.texts[0].train.astype(np.int32)
    places = np.lib.stride_tricks.sliding_window_view(text, 13)
    agree: dict[int, list[bool]] = {0: [], 1: []}
    for _, batch in zip(range(25), data.training(0), strict=False):
        for (left, right), answer in zip(texts(data, batch), batch[5], strict=True):
            turned = [right, left] if ordered and answer else [left, right]
            agree[int(answer)].append((places == np.concatenate(turned)).all(-1).any())
    assert 30 < len(agree[1]) < 70  # of 100 fair draws: four standard deviations
    assert all(agree[0])
    assert all(agree[1]) if ordered else np.mean(agree[1]) < 0.5


def test_masks_are_drawn_anew_each_epoch_and_fixed_in_validation(path: Path) -> None:
    data = load(path, "data.max_bytes=1500", "data.batch_size=1")
    epoch = len(data.examples(training=True)[0].source)
    batches = data.training(0)
    drawn: dict[bytes, list[bytes]] = {}
    for _ in range(2 * epoch):
        batch = next(batches)
        drawn.setdefault(whole(batch).tobytes(), []).append(batch[2].tobytes())
    assert any(len(set(positions)) > 1 for positions in drawn.values())
    for one, other in zip(data.validation(), data.validation(), strict=True):
        for a, b in zip(one, other, strict=True):
            np.testing.assert_array_equal(a, b)


def test_a_position_is_resumed_and_a_batch_shared(path: Path) -> None:
    data = load(path, "data.pairs=next_sentence")
    batches = data.training(3)
    halves = [next(data.training(3, process=i, processes=2)) for i in range(2)]
    for part, *shares in zip(next(batches), *halves, strict=True):
        np.testing.assert_array_equal(part, np.stack(shares, 1).reshape(part.shape))
    state = batches.get_state()
    again = data.training(3)
    again.set_state(state)
    for _ in range(3):
        for a, b in zip(next(batches), next(again), strict=True):
            np.testing.assert_array_equal(a, b)


def test_a_batch_of_several_texts_has_the_share_of_each(tmp_path: Path) -> None:
    files = {name: tmp_path / f"{name}.txt" for name in ("aaa", "bb")}
    for name, file in files.items():
        file.write_text(f"{name} " * 400, encoding="utf-8")
    mixture = f"data.mixture={{{files['aaa']}: 3, {files['bb']}: 1}}"
    words = ["data.path=null", "data.pairs=next_sentence"]
    data = load(write_bert(tmp_path), mixture, *words)
    (word,) = set(data.tokenizer.encode("bb").tolist())
    for _, batch in zip(range(10), data.training(0), strict=False):
        assert [(ids == word).sum() > 5 for ids in whole(batch)].count(True) == 1  # of four
    seen = [word in ids for batch in data.validation() for ids in whole(batch)]
    assert any(seen)


def test_too_little_text_is_refused(path: Path) -> None:
    with pytest.raises(RecipeError, match=r"data\.sequence_length"):
        load(path, "data.max_bytes=500")
