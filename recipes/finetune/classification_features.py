"""Rows of sentences as token ids with the id of the label."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tokenizers import Tokenizer

from ..errors import RecipeError
from .classification_data import Row
from .layout import working_copy
from .records import RecordSource, make_records

_CHUNK = 1024
"""Rows that are tokenized at once."""


def make_classification_features(
    rows: Sequence[Row], tokenizer: Tokenizer, *, sequence_length: int
) -> RecordSource:
    """Tokenizes rows; where texts are too long, the longer one of a pair is cut first.

    Args:
      rows: All with a second text or all without.
      tokenizer: Puts a special token first, where the label is read.
      sequence_length: Tokens of a record, special tokens included.

    Returns:
      A record for each row, in their order, with the label `label`.

    Raises:
      RecipeError: `sequence_length` leaves no room for the texts, or the tokenizer puts no special
        token first.
    """
    tokenizer, pad = working_copy(tokenizer)
    pairs = bool(rows) and rows[0].pair is not None
    texts = 1 + pairs
    special = tokenizer.num_special_tokens_to_add(pairs)
    if sequence_length < special + texts:
        raise RecipeError(
            f"data.sequence_length: expected at least {special + texts}, a token of each text and "
            f"{special} special tokens; got {sequence_length}; raise it"
        )
    tokenizer.enable_truncation(sequence_length, strategy="longest_first")

    def sequences() -> Iterator[tuple[list[int], list[int]]]:
        for start in range(0, len(rows), _CHUNK):
            chunk = rows[start : start + _CHUNK]
            inputs = [(row.text, row.pair) if pairs else row.text for row in chunk]
            for encoding in tokenizer.encode_batch(inputs):
                yield encoding.ids, encoding.type_ids

    return make_records(sequences(), {"label": [row.label for row in rows]}, sequence_length, pad)
