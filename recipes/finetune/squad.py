"""SQuAD v1.1 and v2.0: questions, windows of tokens, predicted answers and official scores.

A file is `{"data": [{"paragraphs": [{"context", "qas": [{"id", "question", "answers": [{"text",
"answer_start"}], "is_impossible"}]}]}]}`; v1.1 has no `is_impossible`. A context that is too long
is read in overlapping windows. A window that does not hold the whole answer has the first token,
[CLS], as its label, as a question without an answer has.

References:
  Rajpurkar et al., SQuAD: 100,000+ Questions for Machine Comprehension of Text, section 6.1;
  Rajpurkar et al., Know What You Don't Know: Unanswerable Questions for SQuAD, section 5.
"""

import re
import string
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Annotated, NamedTuple, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from scipy.special import softmax
from tokenizers import Encoding, Tokenizer

from ..errors import RecipeError, clipped, read_text, write_json
from .config import SquadConfig
from .records import CHUNK, Records, make_records, padding_copy, second_text

# Questions from files


class Answer(NamedTuple):
    """A text and the position of its first character in the context."""

    text: str
    start: int


class Question(NamedTuple):
    """A question about a context; without answers, it cannot be answered from the context."""

    id: str
    text: str
    context: str
    answers: tuple[Answer, ...]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True)


_Text = Annotated[str, Field(pattern=r"\S")]


class _Answer(_Strict):
    text: _Text
    answer_start: int


class _Asked(_Strict):
    id: str
    question: _Text
    answers: list[_Answer]
    is_impossible: bool = False

    @model_validator(mode="after")
    def _answered_if_possible(self) -> Self:
        if self.is_impossible == bool(self.answers):
            raise ValueError(
                f"expected {'no answers' if self.is_impossible else 'an answer'}, because "
                f"is_impossible is {str(self.is_impossible).lower()}; got {len(self.answers)}"
            )
        return self


class _Paragraph(_Strict):
    context: str
    qas: list[_Asked]

    @model_validator(mode="after")
    def _answers_are_in_the_context(self) -> Self:
        for q, asked in enumerate(self.qas):
            for a, (text, start) in enumerate(
                (one.text, one.answer_start) for one in asked.answers
            ):
                if start < 0 or not self.context.startswith(text, start):
                    found, at = self.context[max(start, 0) :][: len(text)], self.context.find(text)
                    raise ValueError(
                        f"qas[{q}].answers[{a}]: expected {clipped(text)} at character {start} of "
                        f"the context; got {clipped(found)}; "
                        f"{'the context does not have it' if at < 0 else f'it stands at {at}'}"
                    )
        return self


class _Article(_Strict):
    paragraphs: list[_Paragraph]


class _File(_Strict):
    data: list[_Article]


def read_squad(path: str | Path, key: str = "data.train") -> list[Question]:
    """Read and check the questions of a file.

    Raises:
      RecipeError: The file cannot be read, is not JSON (line and column named), lacks a key, has a
        value of another kind, an id twice, no questions, or an answer that is not in its context
        (the position in the file named, such as `data[0].paragraphs[2].qas[1]`).
    """
    where = f"{key}: {path}"
    try:
        file = _File.model_validate_json(read_text(Path(path), key))
    except ValidationError as error:
        wrong = error.errors()[0]
        place = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in wrong["loc"])
        said = wrong["type"] in ("json_invalid", "value_error")
        raise RecipeError(
            f"{where}: {place.removeprefix('.') or 'the file'}: "
            f"{wrong['msg'].removeprefix('Value error, ')}"
            f"{'' if said else '; got ' + clipped(wrong['input'])}; correct the file, which is of "
            "SQuAD's format"
        ) from error
    questions: dict[str, Question] = {}
    for paragraph in (one for article in file.data for one in article.paragraphs):
        for asked in paragraph.qas:
            if asked.id in questions:
                raise RecipeError(
                    f"{where}: expected different ids; got {asked.id!r} twice; correct the file"
                )
            answers = tuple(Answer(one.text, one.answer_start) for one in asked.answers)
            questions[asked.id] = Question(asked.id, asked.question, paragraph.context, answers)
    if not questions:
        raise RecipeError(f"{where}: expected questions; got none; give a file that has some")
    return list(questions.values())


# Records: questions beside windows of their contexts


class Window(NamedTuple):
    """The part of a question's context in one record.

    Attributes:
      question: Index of the question.
      first: Position of the first token of the context in the record.
      offsets: First character, and the one after the last, of each token of the context that the
        record holds; (tokens, 2) int32, positions in the context.
    """

    question: int
    first: int
    offsets: np.ndarray


class SquadFeatures(NamedTuple):
    """Records with labels `start` and `end`, and the window of each record."""

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
    """Tokenize questions together with windows of their contexts.

    Args:
      questions: What to read; the label is the first of a question's answers.
      tokenizer: Gives offsets in characters, and puts a special token first.
      sequence_length: Tokens of a record, special tokens included.
      max_question_length: Tokens of a question; a longer one is cut.
      stride: Tokens from the start of a window to the start of the next, as `doc_stride` of BERT.
        None for half of what a window holds of the context. Windows never leave a gap, however
        long the question.
      mark_matches: As `mark` of `make_records`.

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
        for begin in range(0, len(questions), CHUNK):
            chunk = questions[begin : begin + CHUNK]
            found = _encoded(
                chunk, tokenizer, sequence_length - special, max_question_length, stride
            )
            for number, encoding in found:
                context = second_text(encoding)
                offsets = np.array(encoding.offsets[context], np.int32).reshape(-1, 2)
                windows.append(Window(begin + number, context.start, offsets))
                start, end = _label(windows[-1], chunk[number])
                labels["start"].append(start)
                labels["end"].append(end)
                yield encoding

    records = make_records(encodings(), labels, mark=mark_matches)
    return SquadFeatures(questions, records, windows)


def _encoded(
    questions: Sequence[Question], tokenizer: Tokenizer, length: int, most: int, stride: int | None
) -> Iterator[tuple[int, Encoding]]:
    """Yield each question's index with each window; `length` is the room for both texts."""
    tokenizer.no_truncation()  # what it cuts off it does not always tell
    texts = [question.text.strip() for question in questions]
    by_size: dict[int, list[int]] = defaultdict(list)
    for i, asked in enumerate(tokenizer.encode_batch(texts, add_special_tokens=False)):
        whole = sum(asked.attention_mask)
        size = min(whole, most)
        by_size[size].append(i)
        if whole > most:
            texts[i] = texts[i][: asked.offsets[size - 1][1]]
    found: dict[int, Encoding] = {}
    special = tokenizer.num_special_tokens_to_add(True)
    for size, members in by_size.items():
        room = length - size
        step = min(stride or -(-room // 2), room)
        # The library's stride is what two windows share.
        tokenizer.enable_truncation(length + special, stride=room - step, strategy="only_second")
        pairs = [(texts[i], questions[i].context) for i in members]
        found |= zip(members, tokenizer.encode_batch(pairs), strict=True)
    for i in range(len(questions)):
        for encoding in (found[i], *found[i].overflowing):
            yield i, encoding


def _label(window: Window, question: Question) -> tuple[int, int]:
    """Return the positions of the answer's first and last token; (0, 0) if it is not all there."""
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


def with_answers(records: Records, others: float, seed: int) -> Records:
    """Keep records with their answer, and `others` random ones without for each of them.

    Of a long context nearly all windows are without the answer: a model that trains on every one of
    them learns above all to point at [CLS].
    """
    answered = records.arrays["start"] > 0
    held, without = np.flatnonzero(answered), np.flatnonzero(~answered)
    count = min(len(without), round(others * len(held)))
    chosen = np.random.default_rng(seed).choice(without, count, replace=False)
    kept = np.sort(np.concatenate([held, chosen]))
    return Records({name: array[kept] for name, array in records.arrays.items()})


# Answers from the scores of their first and last tokens, over all windows of a question


class Candidate(NamedTuple):
    """A text of the context, or "" for no answer, and the scores of its first and last tokens."""

    text: str
    start_logit: float
    end_logit: float

    @property
    def score(self) -> float:
        return self.start_logit + self.end_logit


class Prediction(NamedTuple):
    """A model's answer to one question.

    Attributes:
      text: The best answer that is not empty; "" only where no window has a token of the context.
      null_odds: Score of no answer, at [CLS] of the window where it is least, minus that of `text`.
      best: Candidates from the best on, with no answer among them if it was asked for.
    """

    text: str
    null_odds: float
    best: tuple[Candidate, ...]


def predict_answers(
    features: SquadFeatures, logits: np.ndarray, config: SquadConfig, *, allow_none: bool
) -> dict[str, Prediction]:
    """Find the spans of at most `max_answer_length` tokens with the highest sums of logits.

    Args:
      features: The questions and their windows.
      logits: Finite scores of each token as the answer's first and as its last, (windows,
        sequence_length, 2).
      config: Its `n_best` candidates are kept of each question; one text counts once, with its best
        score.
      allow_none: Lists no answer as a candidate too, as v2.0 has it.

    Returns:
      A prediction for each question, by its id, in the order of the questions.
    """
    predictions = {}
    rows = zip(features.windows, np.asarray(logits, np.float64), strict=True)
    for number, group in groupby(rows, key=lambda row: row[0].question):
        question, nulls, found = features.questions[number], [], []
        for window, scores in group:
            nulls.append(Candidate("", *scores[0].tolist()))
            found += _spans(window, scores, question.context, config)
        null = min(nulls, key=lambda candidate: candidate.score)
        distinct: dict[str, Candidate] = {}
        for candidate in sorted(found, key=lambda candidate: (-candidate.score, candidate.text)):
            distinct.setdefault(candidate.text, candidate)
        best = list(distinct.values())[: config.n_best]
        prediction = Prediction("", 0.0, (null,))
        if best:
            listed = [*best, null] if allow_none else best
            listed = sorted(listed, key=lambda candidate: -candidate.score)
            prediction = Prediction(best[0].text, null.score - best[0].score, tuple(listed))
        predictions[question.id] = prediction
    return predictions


def _spans(
    window: Window, scores: np.ndarray, context: str, config: SquadConfig
) -> Iterator[Candidate]:
    """Yield the best texts of one window."""
    count = len(window.offsets)
    if not count:
        return
    length = min(config.max_answer_length, count)
    start, end = scores[window.first : window.first + count].T
    # Row i has the spans that begin at token i, column k those of k + 1 tokens.
    tail = np.concatenate([end, np.full(length - 1, -np.inf)])
    sums = start[:, None] + np.lib.stride_tricks.sliding_window_view(tail, length)
    seen = {""}
    for flat in np.argsort(-sums, axis=None, kind="stable"):
        i, k = divmod(int(flat), length)
        if i + k >= count or len(seen) > config.n_best:
            return
        text = context[window.offsets[i, 0] : window.offsets[i + k, 1]].strip()
        if text not in seen:
            seen.add(text)
            yield Candidate(text, float(start[i]), float(end[i + k]))


def write_predictions(
    folder: Path, predictions: Mapping[str, Prediction], threshold: float | None
) -> None:
    """Write `predictions.json`, `nbest.json` and, with a threshold, `null_odds.json`.

    The files are those that the published scripts read: `evaluate-v1.1.py` and `evaluate-v2.0.py`
    take `predictions.json`, and the latter `null_odds.json` as its `--na-prob-file`.
    """
    odds = {name: prediction.null_odds for name, prediction in predictions.items()}
    limit = np.inf if threshold is None else threshold
    texts = {name: "" if odds[name] > limit else p.text for name, p in predictions.items()}
    nbest = {}
    for name, prediction in predictions.items():
        shares = softmax([candidate.score for candidate in prediction.best]).tolist()
        nbest[name] = [
            {**candidate._asdict(), "probability": share}
            for candidate, share in zip(prediction.best, shares, strict=True)
        ]
    write_json(folder / "predictions.json", texts)
    write_json(folder / "nbest.json", nbest)
    if threshold is not None:
        write_json(folder / "null_odds.json", odds)


# Scores, as the published scripts compute them, ties and empty answers included, in percent


def normalize(text: str) -> str:
    """Lower the case and remove ASCII punctuation, articles and repeated spaces, in this order.

    Example:
      >>> normalize("The  U.S. -- an ‘Answer’")
      'us ‘answer’'
    """
    bare = text.lower().translate(str.maketrans("", "", string.punctuation))
    return " ".join(re.sub(r"\b(?:a|an|the)\b", " ", bare).split())


def exact_match(prediction: str, answer: str) -> float:
    """Return 1 if both texts are equal after normalization, else 0."""
    return float(normalize(prediction) == normalize(answer))


def f1(prediction: str, answer: str, *, empty: float = 0.0) -> float:
    """Return the harmonic mean of precision and recall over normalized words, with repetitions.

    `empty` is for two texts without words: 0 in v1.1 and 1 in v2.0.
    """
    predicted, wanted = (Counter(normalize(text).split()) for text in (prediction, answer))
    words = predicted.total() + wanted.total()
    return 2 * (predicted & wanted).total() / words if words else empty


def score_predictions(
    questions: Sequence[Question], predictions: Mapping[str, Prediction], config: SquadConfig
) -> dict[str, float]:
    """Score predictions by the rules of the config's version, in percent.

    Returns:
      v1.1: `exact_match` and `f1`; the nearest of a question's answers counts. v2.0: `exact`, `f1`
      and `total`, where no answer is given if its odds are above `no_answer_threshold`; the same of
      the questions with answers (`HasAns_exact`, ...) and of those without (`NoAns_exact`, ...)
      where there are any; and the best `exact` and `f1` that any threshold gives, with that
      threshold (`best_exact`, `best_exact_thresh`, `best_f1`, `best_f1_thresh`). As in the
      published script, questions of equal odds can fall on both sides of it, and it is 0 where to
      answer nothing is best.
    """
    texts = {name: prediction.text for name, prediction in predictions.items()}
    if version_of(questions, config) == "v1.1":
        best = {
            name: [max(metric(texts[q.id], a.text) for a in q.answers) for q in questions]
            for name, metric in (("exact_match", exact_match), ("f1", f1))
        }
        return {name: 100.0 * sum(values) / len(questions) for name, values in best.items()}
    has = np.array([bool(question.answers) for question in questions])
    answered = np.array([bool(texts[question.id]) for question in questions])
    odds = np.array([predictions[question.id].null_odds for question in questions])
    order = np.argsort(odds, kind="stable")
    groups = {"": has | True, "HasAns_": has, "NoAns_": ~has}
    result: dict[str, float] = {}
    for name, metric in (("exact", exact_match), ("f1", partial(f1, empty=1.0))):
        raw = np.array([_nearest(metric, q, texts[q.id]) for q in questions])
        scores = np.where(odds > config.no_answer_threshold, ~has, raw)
        for prefix, chosen in groups.items():
            if chosen.any():
                result[prefix + name] = 100.0 * scores[chosen].sum() / chosen.sum()
                result[f"{prefix}total"] = int(chosen.sum())
        # Questions are answered from the least odds on; what each of them adds to the sum.
        sums = np.cumsum([(~has).sum(), *np.where(has, raw, -1.0 * answered)[order]])
        most = int(np.argmax(sums))
        result[f"best_{name}"] = 100.0 * sums[most] / len(questions)
        result[f"best_{name}_thresh"] = odds[order][most - 1] if most else 0.0
    return {name: float(value) for name, value in result.items()}


def _nearest(metric: Callable[[str, str], float], question: Question, prediction: str) -> float:
    """Return the best score over answers that have words, or over "" if none has."""
    texts = [answer.text for answer in question.answers if normalize(answer.text)]
    return max(metric(prediction, text) for text in texts or [""])


def version_of(questions: Sequence[Question], config: SquadConfig) -> str:
    """Return the version of SQuAD by whose rules the questions are scored."""
    unanswered = next((q.id for q in questions if not q.answers), None)
    if config.version == "v1.1" and unanswered is not None:
        raise RecipeError(
            "squad.version: expected an answer to each validation question under v1.1; got none "
            f"for {unanswered!r}; set squad.version v2.0 or null"
        )
    return config.version or ("v1.1" if unanswered is None else "v2.0")
