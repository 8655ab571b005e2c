"""Token sequences of any length, padded to one length as they are read.

`Records` is a random-access source as `grain.MapDataset.source` takes it. What it holds is flat, so
that a short sequence takes no more memory than its tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np


class Records(NamedTuple):
    """What a model is fine-tuned on; record i is the tokens `bounds[i]` to `bounds[i + 1]`.

    Attributes:
      ids: Token ids of all sequences, (tokens,) int32.
      segments: 0 for the first text of a pair and 1 for the second, (tokens,) int8.
      bounds: Where sequences begin and end, (records + 1,) int64.
      labels: What is to be predicted of each record, by name, (records,) int32.
      length: Tokens of a record, padding included.
      pad: The id that fills a record up.
    """

    ids: np.ndarray
    segments: np.ndarray
    bounds: np.ndarray
    labels: Mapping[str, np.ndarray]
    length: int
    pad: int


class RecordSource:
    """Records as dictionaries of int32 arrays, for `grain.MapDataset.source`.

    A record has `ids`, `segments` and `mask`, each (length,), the mask 1 on tokens and 0 on
    padding, and a scalar of each label.
    """

    def __init__(self, records: Records):
        self.records = records

    @property
    def digest(self) -> str:
        """Tells whether two sources hold the same records."""
        records = self.records
        digest = hashlib.sha256(f"{records.length} {records.pad} {sorted(records.labels)}".encode())
        labels = [records.labels[name] for name in sorted(records.labels)]
        for array in (records.ids, records.segments, records.bounds, *labels):
            digest.update(array.tobytes())
        return digest.hexdigest()[:16]

    def __len__(self) -> int:
        return len(self.records.bounds) - 1

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        records = self.records
        index = range(len(self))[index]  # raises IndexError past the end
        tokens = self._tokens(index)
        count = tokens.stop - tokens.start
        ids = np.full(records.length, records.pad, np.int32)
        segments, mask = np.zeros((2, records.length), np.int32)
        ids[:count], segments[:count], mask[:count] = (
            records.ids[tokens],
            records.segments[tokens],
            1,
        )
        labels = {name: values[index] for name, values in records.labels.items()}
        return {"ids": ids, "segments": segments, "mask": mask, **labels}

    def _tokens(self, index: int) -> slice:
        return slice(self.records.bounds[index], self.records.bounds[index + 1])

    def take(self, indices: Sequence[int] | np.ndarray) -> RecordSource:
        """The records of these indices, in this order."""
        old = self.records
        sequences = (
            (old.ids[tokens], old.segments[tokens]) for tokens in map(self._tokens, indices)
        )
        labels = {name: values[np.asarray(indices, int)] for name, values in old.labels.items()}
        return make_records(sequences, labels, old.length, old.pad)

    def batches(self, size: int) -> Iterator[dict[str, np.ndarray]]:
        """One pass in order, for evaluation.

        The last batch is filled up with its last record, so that all have one shape and none has a
        sequence of padding alone; drop what is past `len(source)`.
        """
        for start in range(0, len(self), size):
            rows = [self[min(index, len(self) - 1)] for index in range(start, start + size)]
            yield {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def make_records(
    sequences: Iterable[tuple[Sequence[int] | np.ndarray, Sequence[int] | np.ndarray]],
    labels: Mapping[str, Sequence[int] | np.ndarray],
    length: int,
    pad: int,
) -> RecordSource:
    """Records of sequences that are no longer than `length`.

    Args:
      sequences: Ids and segments of each, without padding, taken one at a time.
      labels: Read after the last sequence, so that they may be found on the way.
      length: Tokens of a record.
      pad: The id that fills a record up.
    """
    ids, segments = [], []
    for sequence, parts in sequences:
        assert len(sequence) <= length, "sequences are cut before they become records"
        ids.append(np.array(sequence, np.int32))
        segments.append(np.array(parts, np.int8))
    bounds = np.cumsum([0, *map(len, ids)], dtype=np.int64)
    flat_ids = np.concatenate([np.empty(0, np.int32), *ids])
    flat_segments = np.concatenate([np.empty(0, np.int8), *segments])
    arrays = {name: np.array(values, np.int32) for name, values in labels.items()}
    return RecordSource(Records(flat_ids, flat_segments, bounds, arrays, length, pad))
