"""Pairs of segments with hidden tokens: layout, draws, shards, and positions that come back."""

from pathlib import Path

import numpy as np
import pytest

from recipes.bert.data import Masked, MaskedCorpus, Vocabulary, load_data, mask_tokens
from recipes.errors import RecipeError
from recipes.text import ByteTokenizer

from ..masked import bert_config, write_bert

MASK, ORDINARY = 4, np.arange(5, 1000)


def mask(ids: np.ndarray, words: np.ndarray, predictions: int, seed: int = 0) -> Masked:
    return mask_tokens(
        ids,
        words,
        np.random.default_rng(seed),
        predictions=predictions,
        mask=MASK,
        ordinary=ORDINARY,
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
    masked = mask(ids, words, 5, seed)
    hidden = np.isin(np.arange(words.size), masked.positions[masked.counts])
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


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bert(tmp_path_factory.mktemp("bert"))


def load(path: Path, *overrides: str) -> MaskedCorpus:
    data = load_data(bert_config(path, *overrides))
    assert isinstance(data, MaskedCorpus)
    return data


def whole(batch) -> np.ndarray:
    """The ids of a batch with its hidden tokens put back."""
    ids, _, positions, targets, counts = batch[:5]
    ids = ids.copy()
    for row in range(len(ids)):
        ids[row, positions[row][counts[row]]] = targets[row][counts[row]]
    return ids


def texts(data: MaskedCorpus, batch) -> list[tuple[np.ndarray, np.ndarray]]:
    """The two segments of each sequence."""
    found = []
    for ids, segments in zip(whole(batch), batch[1], strict=True):
        assert ids[0] == data.vocabulary.first
        assert ids[-1] == data.vocabulary.end
        cut = int(segments.sum())
        assert ids[-cut - 1] == data.vocabulary.end
        np.testing.assert_array_equal(segments, np.arange(ids.size) >= ids.size - cut)
        found.append((ids[1 : -cut - 1], ids[-cut:-1]))
    return found


def test_segments_follow_one_another_in_the_text(path: Path) -> None:
    data = load(path)
    batch = next(data.training(0))
    assert [part.shape for part in batch] == [(4, 16), (4, 16), (4, 2), (4, 2), (4, 2)]
    text = data.train_tokens.astype(np.int32)
    places = np.lib.stride_tricks.sliding_window_view(text, 13)
    for left, right in texts(data, batch):
        assert left.size > 0
        assert right.size > 0
        assert data.vocabulary.begins[left[0]]
        assert data.vocabulary.begins[right[0]]
        assert (places == np.concatenate([left, right])).all(-1).any()


def test_special_tokens_are_not_hidden(path: Path) -> None:
    data = load(path, "data.masking.share=0.9")
    for _, batch in zip(range(5), data.training(0), strict=False):
        assert not data.vocabulary.special[batch[3][batch[4]]].any()


def test_whole_words_are_hidden_whole(path: Path) -> None:
    data = load(path, "data.masking={share: 0.4, whole_words: true}")
    seen = 0
    for _, batch in zip(range(20), data.training(0), strict=False):
        for ids, positions, counts in zip(whole(batch), batch[2], batch[4], strict=True):
            hidden = np.isin(np.arange(ids.size), positions[counts])
            inside = ~data.vocabulary.begins[ids]
            np.testing.assert_array_equal(hidden[1:][inside[1:]], hidden[:-1][inside[1:]])
            seen += inside.sum()
    assert seen


@pytest.mark.parametrize("pairs", ["next_sentence", "sentence_order"])
def test_the_answer_says_what_was_done_to_the_pair(path: Path, pairs: str) -> None:
    data = load(path, f"data.pairs={pairs}")
    text = data.train_tokens.astype(np.int32)
    places = np.lib.stride_tricks.sliding_window_view(text, 13)
    answers, agree = [], []
    for _, batch in zip(range(25), data.training(0), strict=False):
        for (left, right), answer in zip(texts(data, batch), batch[5], strict=True):
            turned = [right, left] if pairs == "sentence_order" and answer else [left, right]
            agree.append((places == np.concatenate(turned)).all(-1).any())
            answers.append(int(answer))
    answers, agree = np.array(answers), np.array(agree)
    assert 0.3 < answers.mean() < 0.7  # of 100 fair draws: four standard deviations
    if pairs == "sentence_order":
        assert agree.all()
    else:
        np.testing.assert_array_equal(agree[answers == 0], True)
        assert agree[answers == 1].mean() < 0.5


def test_masks_are_drawn_anew_each_epoch_and_fixed_in_validation(path: Path) -> None:
    data = load(path, "data.max_bytes=2000", "data.batch_size=1")
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


@pytest.mark.parametrize("pairs", ["none", "next_sentence"])
def test_a_batch_of_several_texts_has_the_share_of_each(tmp_path: Path, pairs: str) -> None:
    files = {name: tmp_path / f"{name}.txt" for name in ("aaa", "bb")}
    for name, file in files.items():
        file.write_text(f"{name} " * 400, encoding="utf-8")
    mixture = f"data.mixture={{{files['aaa']}: 3, {files['bb']}: 1}}"
    words = ["data.path=null", f"data.pairs={pairs}"]
    data = load_data(bert_config(write_bert(tmp_path), mixture, *words))
    (word,) = set(data.tokenizer.encode("bb").tolist())
    for _, batch in zip(range(20), data.training(0), strict=False):
        assert [word in ids for ids in whole(batch)].count(True) == 1  # of four
        assert len(batch[5:]) == (pairs != "none")
    seen = [word in ids for batch in data.validation() for ids in whole(batch)]
    assert any(seen)
    assert not all(seen)


def test_what_cannot_be_used_is_refused(path: Path) -> None:
    with pytest.raises(RecipeError, match="expected one with the tokens"):
        Vocabulary.of(ByteTokenizer())
    with pytest.raises(RecipeError, match="sequence"):
        load(path, "data.max_bytes=500")
