"""Padded token ids with labels, as a source of batches."""

import dataclasses
import functools
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from tokenizers import Encoding, Tokenizer

from ..errors import RecipeError

CHUNK = 1024
"""Number of texts that are tokenized at once."""


@dataclasses.dataclass(frozen=True)
class Records:
    """Token records with labels, as input of `grain.MapDataset.source`.

    Attributes:
      arrays: By name, with a first axis of records: `ids`, `segments` and `mask` (1 on tokens and 0
        on padding), (records, length), and labels, (records,).
    """

    arrays: dict[str, np.ndarray]

    @functools.cached_property
    def digest(self) -> str:
        """A hash of the records."""
        digest = hashlib.sha256()
        for name, array in sorted(self.arrays.items()):
            digest.update(f"{name} {array.shape}".encode() + array.tobytes())
        return digest.hexdigest()[:16]

    def __len__(self) -> int:
        return len(self.arrays["ids"])

    def __getitem__(self, index: Any) -> dict[str, np.ndarray]:
        return {name: array[index].astype(np.int32) for name, array in self.arrays.items()}

    def batches(self, size: int) -> Iterator[dict[str, np.ndarray]]:
        """Yield batches in order, for evaluation; ignore outputs past `len(self)`.

        The last batch is filled up with its last record, so that all have one shape.
        """
        for start in range(0, len(self), size):
            yield self[np.minimum(np.arange(start, start + size), len(self) - 1)]


def make_records(encodings: Iterable[Encoding], labels: dict[str, Any], *, mark: bool) -> Records:
    """Make records from the encodings of a tokenizer that `padding_copy` returned.

    Args:
      encodings: Texts, or pairs of them.
      labels: Labels of the records by name, read after the last encoding.
      mark: Whether to give tokens of a second text that the first has too the segment of the first:
        the feature "exact match" of Chen et al. 2017, "Reading Wikipedia".
    """
    rows = []
    for encoding in encodings:
        ids = np.array(encoding.ids, np.int32)
        segments, mask = (
            np.array(part, np.int8) for part in (encoding.type_ids, encoding.attention_mask)
        )
        if mark:
            second = second_text(encoding)
            segments[second] &= ~np.isin(ids[second], ids[: second.start])
        rows.append((ids, segments, mask))
    ids, segments, mask = (np.stack(arrays) for arrays in zip(*rows, strict=True))
    values = {name: np.array(label, np.int32) for name, label in labels.items()}
    return Records({"ids": ids, "segments": segments, "mask": mask, **values})


def second_text(encoding: Encoding) -> slice:
    """Return the positions of the second text of a pair; an empty slice for a single text."""
    parts: Sequence[int | None] = encoding.sequence_ids
    first = parts.index(1) if 1 in parts else 0
    return slice(first, first + parts.count(1))


def padding_copy(tokenizer: Tokenizer, length: int) -> Tokenizer:
    """Copy a tokenizer, with padding to `length` tokens and without truncation."""
    copy, padding = Tokenizer.from_str(tokenizer.to_str()), tokenizer.padding
    copy.no_padding()
    copy.no_truncation()
    for probe in (copy.encode("a"), copy.encode("a", "a")):
        texts = [part for part in probe.sequence_ids if part is not None]
        if not any(probe.special_tokens_mask[:1]) or texts != sorted(texts):
            raise RecipeError(
                "tokenizer: expected a special token, such as [CLS], before the texts, because a "
                "task reads its answer there, and the second text behind the first; got "
                f"{' '.join(probe.tokens)}; use a tokenizer made for BERT"
            )
    found = (copy.token_to_id(token) for token in ("[PAD]", "<pad>"))
    pad = padding["pad_id"] if padding else next((i for i in found if i is not None), 0)
    copy.enable_padding(length=length, pad_id=pad)
    return copy
