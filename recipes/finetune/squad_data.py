"""Questions from SQuAD files, v1.1 and v2.0, checked as they are read.

A file is `{"data": [{"paragraphs": [{"context", "qas": [{"id", "question", "answers": [{"text",
"answer_start"}], "is_impossible"}]}]}]}`; v1.1 has no `is_impossible`.
"""

from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..errors import RecipeError, clipped, read_text


class Answer(NamedTuple):
    """A text and where its first character is in the context."""

    text: str
    start: int


class Question(NamedTuple):
    """A question about a context; without answers, the context does not answer it."""

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


class _Paragraph(_Strict):
    context: str
    qas: list[_Asked]


class _Article(_Strict):
    paragraphs: list[_Paragraph]


class _File(_Strict):
    data: list[_Article]


def read_squad(path: str | Path, key: str = "data.train") -> list[Question]:
    """Reads and checks every question of a file.
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
        got = "" if wrong["type"] == "json_invalid" else f"; got {clipped(wrong['input'])}"
        raise RecipeError(
            f"{where}: {place.removeprefix('.') or 'the file'}: {wrong['msg']}{got}; correct the "
            "file, which is of SQuAD's format"
        ) from error
    questions: dict[str, Question] = {}
    for a, article in enumerate(file.data):
        for p, paragraph in enumerate(article.paragraphs):
            for q, asked in enumerate(paragraph.qas):
                if asked.id in questions:
                    wrong = f"expected an id of its own; got {asked.id!r} again"
                else:
                    wrong = _fault(asked, paragraph.context)
                if wrong:
                    place = f"data[{a}].paragraphs[{p}].qas[{q}]"
                    raise RecipeError(f"{where}: {place}: {wrong}; correct the file")
                answers = tuple(Answer(one.text, one.answer_start) for one in asked.answers)
                context = paragraph.context
                questions[asked.id] = Question(asked.id, asked.question, context, answers)
    if not questions:
        raise RecipeError(f"{where}: expected questions; got none; give a file that has some")
    return list(questions.values())


def _fault(asked: _Asked, context: str) -> str | None:
    """What is wrong with the answers of a question."""
    if asked.is_impossible == bool(asked.answers):
        expected = "no answers" if asked.is_impossible else "an answer"
        return (
            f"expected {expected}, because is_impossible is {str(asked.is_impossible).lower()}; "
            f"got {len(asked.answers)}"
        )
    for number, answer in enumerate(asked.answers):
        text, start = answer.text, answer.answer_start
        if start < 0 or not context.startswith(text, start):
            found, at = context[max(start, 0) : max(start, 0) + len(text)], context.find(text)
            stands = "the context does not have it" if at < 0 else f"it stands at {at}"
            return (
                f"answers[{number}]: expected {clipped(text)} at character {start} of the context; "
                f"got {clipped(found)}; {stands}"
            )
    return None
