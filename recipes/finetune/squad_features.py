"""Questions beside windows of their contexts, as token ids with the answer's first and last token.

A context that is too long is read in overlapping windows. A window that does not hold the whole
answer has the first token, [CLS], as its label, as a question without an answer has.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from tokenizers import Encoding, Tokenizer

from ..errors import RecipeError
from .records import Records, make_records, padding_copy, second_text
from .squad_data import Question

_CHUNK = 1024
"""Questions that are tokenized at once."""


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
    records: Records
    windows: list[Window]


def make_squad_features(
    questions: Sequence[Question],
    tokenizer: Tokenizer,
    *,
    sequence_length: int,
    max_question_length: int,
    stride: int | None = None,
    mark_matches: bool = False,
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
      mark_matches: Whether to call `Records.mark_matches`.

    Returns:
      At least one record for each question, in the order of questions and windows.
    """
    tokenizer = padding_copy(tokenizer, sequence_length)
    special = tokenizer.num_special_tokens_to_add(True)
    if sequence_length <= max_question_length + special:
        raise RecipeError(
            f"data.sequence_length: expected more than the {max_question_length} tokens of a "
            f"question and {special} special tokens; got {sequence_length}; raise it, or "
            "lower squad.max_question_length"
        )
    windows: list[Window] = []
    labels: dict[str, list[int]] = {"start": [], "end": []}

    def encodings() -> Iterator[Encoding]:
        lengths = sequence_length, max_question_length, stride
        for number, encoding in _encoded(questions, tokenizer, *lengths):
            context = second_text(encoding)
            offsets = np.array(encoding.offsets[context], np.int32).reshape(-1, 2)
            windows.append(Window(number, context.start, offsets))
            for name, label in zip(labels, _label(windows[-1], questions[number]), strict=True):
                labels[name].append(label)
            yield encoding

    records = make_records(encodings(), labels)
    if mark_matches:
        records.mark_matches([slice(w.first, w.first + len(w.offsets)) for w in windows])
    return SquadFeatures(questions, records, windows)


def with_answers(records: Records, others: float, seed: int) -> Records:
    """The records that hold their answer, and for each `others` that do not, by the seed.

    Of a long context nearly all windows are without the answer: a model that trains on every one of
    them learns above all to point at [CLS].
    """
    answered = records.arrays["start"] > 0
    held, without = np.flatnonzero(answered), np.flatnonzero(~answered)
    count = min(len(without), round(others * len(held)))
    chosen = np.random.default_rng(seed).choice(without, count, replace=False)
    return records.take(np.sort(np.concatenate([held, chosen])))


def _encoded(
    questions: Sequence[Question], tokenizer: Tokenizer, length: int, most: int, stride: int | None
) -> Iterator[tuple[int, Encoding]]:
    """Questions, by number, with each window of their contexts."""
    special = tokenizer.num_special_tokens_to_add(True)
    for begin in range(0, len(questions), _CHUNK):
        chunk = questions[begin : begin + _CHUNK]
        tokenizer.no_truncation()  # what it cuts off it does not always tell
        texts = [question.text.strip() for question in chunk]
        by_size: dict[int, list[int]] = defaultdict(list)
        for i, asked in enumerate(tokenizer.encode_batch(texts, add_special_tokens=False)):
            whole = sum(asked.attention_mask)
            size = min(whole, most)
            by_size[size].append(i)
            if whole > most:
                texts[i] = texts[i][: asked.offsets[size - 1][1]]
        found: dict[int, Encoding] = {}
        for size, members in by_size.items():
            room = length - special - size
            step = min(stride or -(-room // 2), room)
            # The library's stride is what two windows share.
            tokenizer.enable_truncation(length, stride=room - step, strategy="only_second")
            pairs = [(texts[i], chunk[i].context) for i in members]
            found |= zip(members, tokenizer.encode_batch(pairs), strict=True)
        for i in range(len(chunk)):
            for encoding in (found[i], *found[i].overflowing):
                yield begin + i, encoding


def _label(window: Window, question: Question) -> tuple[int, int]:
    """Positions of the first and last token of the answer; (0, 0) where it is not whole."""
    if not question.answers or not window.offsets.size:
        return 0, 0
    text, start = question.answers[0]
    start += len(text) - len(text.lstrip())  # without white space around it
    stop = start + len(text.strip())
    begins, ends = window.offsets.T
    if start < begins[0] or stop > ends[-1]:
        return 0, 0
    first = int(np.searchsorted(ends, start, side="right"))
    last = int(np.searchsorted(begins, stop, side="left")) - 1
    # The tokenizer may drop characters; an answer of such characters alone has no token.
    return (window.first + first, window.first + last) if first <= last else (0, 0)
