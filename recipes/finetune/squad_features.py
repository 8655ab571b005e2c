"""Questions beside windows of their contexts, as token ids with the answer's first and last token.

A context that is too long is read in overlapping windows. A window that does not hold the whole
answer has the first token, [CLS], as its label, as a question without an answer has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from ..errors import RecipeError
from .layout import layout_of_pairs, working_copy
from .records import RecordSource, make_records
from .squad_data import Answer, Question

_CHUNK = 1024
"""Texts that are tokenized at once."""


class Window(NamedTuple):
    """What of a question's context one record holds.

    Attributes:
      question: Which question it belongs to.
      first: Position of the first token of the context in the record.
      offsets: First character, and the one after the last, of each token of the context that the
        record holds; (tokens, 2) int32, positions in the context.
    """

    question: int
    first: int
    offsets: np.ndarray


class SquadFeatures(NamedTuple):
    """Records with labels `start` and `end`, and the window that each of them holds."""

    questions: Sequence[Question]
    records: RecordSource
    windows: list[Window]


def make_squad_features(
    questions: Sequence[Question],
    tokenizer: Tokenizer,
    *,
    sequence_length: int,
    max_question_length: int,
    stride: int | None = None,
) -> SquadFeatures:
    """Tokenizes questions beside their contexts.

    Args:
      questions: What to read; the label is the first of a question's answers.
      tokenizer: Gives offsets in characters, and puts a special token first.
      sequence_length: Tokens of a record, special tokens included.
      max_question_length: Tokens of a question; a longer one is cut.
      stride: Tokens from the start of a window to the start of the next, as `doc_stride` of BERT.
        None for half of what a window holds of the context. Windows never leave a gap, however
        long the question.

    Returns:
      At least one record for each question, in the order of questions and windows.

    Raises:
      RecipeError: `sequence_length` leaves no room for the context, or the tokenizer puts no
        special token first.
    """
    tokenizer, pad = working_copy(tokenizer)
    layout = layout_of_pairs(tokenizer)
    if sequence_length <= max_question_length + layout.special:
        raise RecipeError(
            f"data.sequence_length: expected more than the {max_question_length} tokens of a "
            f"question and {layout.special} special tokens; got {sequence_length}; raise it, or "
            "lower squad.max_question_length"
        )
    windows: list[Window] = []
    starts: list[int] = []
    ends: list[int] = []

    def sequences() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for number, whole, context in _tokenized(questions, tokenizer):
            text = whole[:max_question_length]
            first = layout.first_of_pair(text)
            room = sequence_length - layout.special - len(text)
            for held in _slices(len(context.ids), room, stride or -(-room // 2)):
                window = Window(number, first, context.offsets[held])
                start, end = _label(window, questions[number])
                windows.append(window)
                starts.append(start)
                ends.append(end)
                yield layout.lay_out(text, context.ids[held])

    records = make_records(sequences(), {"start": starts, "end": ends}, sequence_length, pad)
    return SquadFeatures(questions, records, windows)


def with_answers(records: RecordSource, others: float, seed: int) -> RecordSource:
    """The records that hold their answer and some, chosen by the seed, of those that do not.

    Of a long context nearly all windows are without the answer: a model that trains on every one of
    them learns above all to point at [CLS].

    Args:
      records: As of `make_squad_features`.
      others: Records without the answer for each record with it; all of them where there are fewer.
      seed: Chooses them.
    """
    answered = records.records.labels["start"] > 0
    held, without = np.flatnonzero(answered), np.flatnonzero(~answered)
    count = min(len(without), round(others * len(held)))
    chosen = np.random.default_rng(seed).choice(without, count, replace=False)
    return records.take(np.sort(np.concatenate([held, chosen])))


def _slices(tokens: int, room: int, stride: int) -> Iterator[slice]:
    """Windows of at most `room` tokens; the first that reaches the end is the last."""
    step = min(stride, room)
    for start in range(0, max(tokens - room, 0) + step, step):
        yield slice(start, min(start + room, tokens))


class _Context(NamedTuple):
    ids: np.ndarray
    offsets: np.ndarray


def _tokenized(
    questions: Sequence[Question], tokenizer: Tokenizer
) -> Iterator[tuple[int, np.ndarray, _Context]]:
    """Questions, by number, as ids, and their contexts, all without special tokens."""
    for start in range(0, len(questions), _CHUNK):
        chunk = questions[start : start + _CHUNK]
        names = list(dict.fromkeys(question.context for question in chunk))
        encoded = tokenizer.encode_batch(names, add_special_tokens=False)
        contexts = {
            name: _Context(
                np.array(encoding.ids, np.int32),
                np.array(encoding.offsets, np.int32).reshape(-1, 2),
            )
            for name, encoding in zip(names, encoded, strict=True)
        }
        texts = tokenizer.encode_batch([q.text.strip() for q in chunk], add_special_tokens=False)
        for number, (question, text) in enumerate(zip(chunk, texts, strict=True), start):
            yield number, np.array(text.ids, np.int32), contexts[question.context]


def _label(window: Window, question: Question) -> tuple[int, int]:
    """Positions of the first and last token of the answer; (0, 0) where it is not whole."""
    if not question.answers or not window.offsets.size:
        return 0, 0
    start, stop = _bare(question.answers[0])
    begins, ends = window.offsets.T
    if start < begins[0] or stop > ends[-1]:
        return 0, 0
    first = int(np.searchsorted(ends, start, side="right"))
    last = int(np.searchsorted(begins, stop, side="left")) - 1
    # The tokenizer may drop characters; an answer of such characters alone has no token.
    return (window.first + first, window.first + last) if first <= last else (0, 0)


def _bare(answer: Answer) -> tuple[int, int]:
    """The answer's first character and the one after its last, without white space around it."""
    start = answer.start + len(answer.text) - len(answer.text.lstrip())
    return start, start + len(answer.text.strip())
