"""Windows are those of the tokenizers library, and labels lead back to the answers."""

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from recipes.errors import RecipeError
from recipes.finetune.squad_data import Answer, Question
from recipes.finetune.squad_features import SquadFeatures, make_squad_features, with_answers

from ..wordpiece import WORDS, make_tokenizer

CONTEXT = "The copper mine opened in 1878. In 1901, Café 9 did open the mine.\tThe mine closed."
TOKENIZER = make_tokenizer()


def ask(answer: str | None, text: str = "when did the mine open?", context: str = CONTEXT):
    answers = () if answer is None else (Answer(answer, context.index(answer)),)
    return Question(f"{answer}", text, context, answers)


def features(*questions: Question, **settings: Any) -> SquadFeatures:
    lengths = {"sequence_length": 64, "max_question_length": 8, "stride": 16}
    return make_squad_features(questions, TOKENIZER, **lengths | settings)


def labelled_texts(made: SquadFeatures) -> list[str | None]:
    """The text between the labels of each record; None where they are at [CLS]."""
    texts: list[str | None] = []
    for record, window in zip(made.records, made.windows, strict=True):
        start, end = int(record["start"]), int(record["end"])
        if start == 0:
            assert end == 0
            texts.append(None)
            continue
        first, last = window.offsets[start - window.first], window.offsets[end - window.first]
        texts.append(made.questions[window.question].context[first[0] : last[1]])
    return texts


def test_a_context_that_fits_is_one_window() -> None:
    made = features(ask("1878"))
    (record,) = made.records
    expected = TOKENIZER.encode("when did the mine open?", CONTEXT)
    count = len(expected)
    assert record["ids"][:count].tolist() == expected.ids
    assert record["segments"][:count].tolist() == expected.type_ids
    assert record["mask"].tolist() == [1] * count + [0] * (64 - count)
    # [CLS] when did the mine open ? [SEP] the copper mine opened in 1 ##8 ##7 ##8
    assert (record["start"], record["end"]) == (13, 16)
    assert made.windows[0].first == 8


def test_what_question_and_context_share_has_the_questions_segment() -> None:
    length, text = {"sequence_length": 20, "stride": 6}, "when did the mine open?"
    plain, marked = (features(ask("1878", text), mark_matches=m, **length) for m in (False, True))
    asked = set(TOKENIZER.encode(text, add_special_tokens=False).ids)
    assert len(marked.windows) > 1
    for was, now, window in zip(plain.records, marked.records, marked.windows, strict=True):
        context = range(window.first, window.first + len(window.offsets))
        for i, token in enumerate(was["ids"].tolist()):
            shared = i in context and token in asked
            assert now["segments"][i] == (0 if shared else was["segments"][i])
    assert 0 < marked.records.arrays["segments"].sum() < plain.records.arrays["segments"].sum()
    for name in ("ids", "mask", "start", "end"):
        assert np.array_equal(plain.records.arrays[name], marked.records.arrays[name])


# an answer as the file has it, and the text that its tokens cover
ANSWERS = {
    "1878": "1878",
    "The copper": "The copper",
    "closed.": "closed.",
    "Café": "Café",
    " in 1878. ": "in 1878.",
    "open the mine.\t": "open the mine.",
    "878": "878",
    "opper": "copper",
    "18": "18",
}


@pytest.mark.parametrize("answer", ANSWERS)
def test_labels_cover_the_answer(answer: str) -> None:
    assert labelled_texts(features(ask(answer))) == [ANSWERS[answer]]


def test_no_answer_points_at_cls() -> None:
    assert labelled_texts(features(ask(None))) == [None]


def test_the_first_answer_is_learned() -> None:
    question = Question("one", "when?", CONTEXT, (Answer("1901", 35), Answer("1878", 26)))
    assert labelled_texts(features(question)) == ["1901"]


# sequence_length, max_question_length, stride
WINDOWS = [(24, 8, 5), (24, 8, 13), (24, 8, 1), (20, 4, 7), (16, 3, 10)]


@pytest.mark.parametrize(("length", "question_length", "stride"), WINDOWS)
def test_windows_are_those_of_the_library(length: int, question_length: int, stride: int) -> None:
    text = "when did mine open" if question_length < 8 else "when did the mine open?"
    made = features(
        ask("1901", text),
        sequence_length=length,
        max_question_length=question_length,
        stride=stride,
    )
    reference = make_tokenizer()
    question = reference.encode(text, add_special_tokens=False)
    cut = text[: question.offsets[min(question_length, len(question)) - 1][1]]
    room = length - 3 - min(question_length, len(question))
    reference.enable_truncation(length, stride=room - stride, strategy="only_second")
    first = reference.encode(cut, CONTEXT)
    encodings = [first, *first.overflowing]
    assert len(made.records) == len(encodings) > 1
    for record, window, encoding in zip(made.records, made.windows, encodings, strict=True):
        count = len(encoding)
        assert record["ids"][:count].tolist() == encoding.ids
        assert record["segments"][:count].tolist() == encoding.type_ids
        assert record["mask"].sum() == count
        context = [i for i, part in enumerate(encoding.sequence_ids) if part == 1]
        assert window.first == context[0]
        assert window.offsets.tolist() == [list(encoding.offsets[i]) for i in context]


def test_a_stride_past_the_window_leaves_no_gap() -> None:
    made = features(ask(None), sequence_length=20, stride=1000)
    covered = np.concatenate([window.offsets for window in made.windows])
    whole = TOKENIZER.encode(CONTEXT, add_special_tokens=False).offsets
    assert covered.tolist() == [list(offsets) for offsets in whole]


def test_without_a_stride_windows_share_half() -> None:
    made = features(ask(None), sequence_length=20, stride=None)
    # [CLS], six tokens of the question and two [SEP] leave 11 of the context.
    assert [len(window.offsets) for window in made.windows[:-1]] == [11] * (len(made.windows) - 1)
    for window, following in itertools.pairwise(made.windows):
        assert window.offsets[6:].tolist() == following.offsets[:5].tolist()


def test_a_part_of_an_answer_is_no_answer() -> None:
    made = features(ask("opened in 1878"), sequence_length=18, stride=3)
    texts = labelled_texts(made)
    assert set(texts) == {None, "opened in 1878"}
    start = CONTEXT.index("opened")
    for window, text in zip(made.windows, texts, strict=True):
        whole = window.offsets[0, 0] <= start and window.offsets[-1, 1] >= start + 14
        assert whole == (text is not None)


def test_windows_say_whose_they_are() -> None:
    made = features(ask("1878"), ask(None), ask("mine", context="The mine"), sequence_length=40)
    owners = [window.question for window in made.windows]
    assert owners == sorted(owners)
    assert set(owners) == {0, 1, 2}


def test_a_context_without_tokens() -> None:
    made = features(ask(None, context=" \t "))
    assert made.windows[0].offsets.shape == (0, 2)
    assert made.records[0]["mask"].sum() == 9


@given(st.data())
@settings(deadline=None, max_examples=60)
def test_every_answer_is_in_some_window(data: st.DataObject) -> None:
    words = data.draw(st.lists(st.sampled_from(WORDS), min_size=3, max_size=30))
    first = data.draw(st.integers(0, len(words) - 1))
    count = data.draw(st.integers(1, 3))
    stride = data.draw(st.integers(1, 5))
    answer = Answer(" ".join(words[first : first + count]), len(" ".join([*words[:first], ""])))
    question = Question("one", "when?", " ".join(words), (answer,))
    # Windows of 8 tokens that share at least 3 hold every answer of 3.
    made = features(question, sequence_length=13, max_question_length=2, stride=stride)
    texts = labelled_texts(made)
    assert set(texts) <= {None, answer.text}
    assert answer.text in texts


def test_no_room_for_the_context() -> None:
    with pytest.raises(RecipeError, match=r"sequence_length: .* 8 tokens .* 3 special .* got 11;"):
        features(ask("1878"), sequence_length=11)


@pytest.mark.parametrize(("others", "count"), [(0.0, 0), (1.0, 2), (100.0, None)])
def test_windows_without_the_answer_are_thinned(others: float, count: int | None) -> None:
    made = features(
        ask("1878"), ask(None), ask("closed"), sequence_length=24, max_question_length=8, stride=4
    )

    def found(source):
        return [(r["ids"].tolist(), int(r["start"]), int(r["end"])) for r in source]

    every = found(made.records)
    held = [record for record in every if record[1]]
    without = [record for record in every if not record[1]]
    assert len(held) > 1
    thinned = found(with_answers(made.records, others, seed=0))
    expected = len(without) if count is None else round(others * len(held))
    assert [record for record in thinned if record[1]] == held
    assert len(thinned) == len(held) + expected
    assert all(record in without for record in thinned if not record[1])
    assert thinned == found(with_answers(made.records, others, seed=0))
