"""Records are padded as they are read, and are a source that grain can batch."""

from __future__ import annotations

import grain
import numpy as np
import pytest

from recipes.finetune.records import RecordSource, make_records

SEQUENCES = [([2, 5, 3], [0, 0, 0]), ([2, 5, 3, 6, 3], [0, 0, 0, 1, 1]), ([2], [0])]


@pytest.fixture
def source() -> RecordSource:
    return make_records(SEQUENCES, {"label": [1, 0, 2]}, length=5, pad=9)


def test_records_are_padded(source: RecordSource) -> None:
    assert len(source) == 3
    expected = {
        "ids": [2, 5, 3, 9, 9],
        "segments": [0, 0, 0, 0, 0],
        "mask": [1, 1, 1, 0, 0],
        "label": 1,
    }
    found = source[0]
    assert {name: array.tolist() for name, array in found.items()} == expected
    assert {array.dtype for array in found.values()} == {np.dtype(np.int32)}
    assert source[1]["segments"].tolist() == [0, 0, 0, 1, 1]
    assert source[-1]["ids"].tolist() == [2, 9, 9, 9, 9]
    with pytest.raises(IndexError):
        source[3]


def test_some_records_can_be_taken(source: RecordSource) -> None:
    taken = source.take([2, 1])
    for found, index in zip(taken, (2, 1), strict=True):
        expected = source[index]
        assert {name: array.tolist() for name, array in found.items()} == {
            name: array.tolist() for name, array in expected.items()
        }
    assert len(taken) == 2
    assert len(source.take([])) == 0


def test_a_source_can_be_iterated(source: RecordSource) -> None:
    assert [int(record["mask"].sum()) for record in source] == [3, 5, 1]


def test_grain_shuffles_and_batches_records(source: RecordSource) -> None:
    dataset = grain.MapDataset.source(source).shuffle(seed=0).repeat(2).batch(2)
    batches = [dataset[index] for index in range(len(dataset))]
    assert [batch["ids"].shape for batch in batches] == [(2, 5)] * 3
    assert [batch["label"].shape for batch in batches] == [(2,)] * 3
    labels = np.concatenate([batch["label"] for batch in batches])
    assert sorted(labels[:3]) == sorted(labels[3:]) == [0, 1, 2]


def test_the_last_batch_is_filled_with_its_last_record(source: RecordSource) -> None:
    first, last = source.batches(2)
    assert first["label"].tolist() == [1, 0]
    assert last["label"].tolist() == [2, 2]
    assert last["mask"].tolist() == [[1, 0, 0, 0, 0]] * 2
    (whole,) = source.batches(3)
    assert whole["label"].tolist() == [1, 0, 2]


def test_the_digest_tells_records_apart(source: RecordSource) -> None:
    def digest(*, sequences=SEQUENCES, labels=(1, 0, 2), name="label", length=5, pad=9) -> str:
        return make_records(sequences, {name: labels}, length, pad).digest

    others = [
        digest(sequences=[([2, 5], [0, 0]), ([3, 2, 5, 3, 6], [0] * 5), ([3, 2], [1, 1])]),
        digest(sequences=[(ids, [0] * len(ids)) for ids, _ in SEQUENCES]),
        digest(labels=(1, 1, 2)),
        digest(name="start"),
        digest(length=6),
        digest(pad=0),
    ]
    assert digest() == source.digest
    assert len({source.digest, *others}) == 7


def test_labels_may_be_found_on_the_way() -> None:
    labels: list[int] = []

    def sequences():
        for number, sequence in enumerate(SEQUENCES):
            labels.append(10 * number)
            yield sequence

    records = make_records(sequences(), {"label": labels}, length=6, pad=0)
    assert [int(record["label"]) for record in records] == [0, 10, 20]


def test_no_records() -> None:
    assert len(make_records([], {"label": []}, length=5, pad=0)) == 0
