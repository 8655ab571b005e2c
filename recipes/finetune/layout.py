"""How a tokenizer lays texts out among its special tokens, such as [CLS] text [SEP] pair [SEP]."""

from __future__ import annotations

from itertools import groupby
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from ..errors import RecipeError

_PAD_TOKENS = "[PAD]", "<pad>"
_PROBE = "a"


class Part(NamedTuple):
    """Tokens that stand between two texts: their ids and segments, (tokens,)."""

    ids: np.ndarray
    segments: np.ndarray


class PairLayout(NamedTuple):
    """What stands before, between and after two texts, and the segments of the two."""

    before: Part
    between: Part
    after: Part
    segments: tuple[int, int]

    @property
    def special(self) -> int:
        """Number of special tokens."""
        return sum(len(part.ids) for part in (self.before, self.between, self.after))

    def first_of_pair(self, text: np.ndarray) -> int:
        """Position of the first token of the second text."""
        return len(self.before.ids) + len(text) + len(self.between.ids)

    def lay_out(self, text: np.ndarray, pair: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Ids and segments of two texts that are given as ids without special tokens."""
        texts = (text, self.segments[0]), (pair, self.segments[1])
        first, second = (Part(ids, np.full(len(ids), segment)) for ids, segment in texts)
        parts = (self.before, first, self.between, second, self.after)
        return (
            np.concatenate([part.ids for part in parts]),
            np.concatenate([part.segments for part in parts]),
        )


def working_copy(tokenizer: Tokenizer) -> tuple[Tokenizer, int]:
    """A copy that neither cuts nor pads, and the id of padding.

    Raises:
      RecipeError: The tokenizer puts no special token first, as BERT's does with [CLS].
    """
    copy, padding = Tokenizer.from_str(tokenizer.to_str()), tokenizer.padding
    copy.no_padding()
    copy.no_truncation()
    if not next(iter(copy.encode(_PROBE).special_tokens_mask), 0):
        raise RecipeError(
            "tokenizer: expected a special token, such as [CLS], before each text, because a task "
            "reads its answer there; got a tokenizer without; use one made for BERT"
        )
    found = (copy.token_to_id(token) for token in _PAD_TOKENS)
    pad = padding["pad_id"] if padding else next((i for i in found if i is not None), 0)
    return copy, pad


def layout_of_pairs(tokenizer: Tokenizer) -> PairLayout:
    """Asks a tokenizer of `working_copy` how it lays out two texts.

    Raises:
      RecipeError: The second text does not follow the first, or one of them is there twice.
    """
    # The library's own windows (`overflowing`) of encodings that were made apart from each other
    # carry the first text's segment on the second, so windows are laid out here.
    probe = tokenizer.encode(_PROBE, _PROBE)
    order, ids, segments = (
        np.array([-1 if part is None else part for part in probe.sequence_ids]),
        np.array(probe.ids, np.int32),
        np.array(probe.type_ids, np.int8),
    )
    texts = [part for part, _ in groupby(order.tolist()) if part >= 0]
    if texts != [0, 1]:
        raise RecipeError(
            "tokenizer: expected the second text of a pair to follow the first; got "
            f"{' '.join(probe.tokens)} for the texts {_PROBE!r} and {_PROBE!r}; use a tokenizer "
            "made for BERT"
        )
    (first, last), (pair, end) = (_ends(order, part) for part in (0, 1))
    cuts = slice(0, first), slice(last, pair), slice(end, len(order))
    before, between, after = (Part(ids[cut], segments[cut]) for cut in cuts)
    return PairLayout(before, between, after, (int(segments[first]), int(segments[pair])))


def _ends(order: np.ndarray, part: int) -> tuple[int, int]:
    """Position of the first token of a text and the one after its last."""
    positions = np.flatnonzero(order == part)
    return int(positions[0]), int(positions[-1]) + 1
