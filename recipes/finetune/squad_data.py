"""Questions from SQuAD files, v1.1 and v2.0, checked as they are read.

A file is `{"data": [{"paragraphs": [{"context", "qas": [{"id", "question", "answers": [{"text",
"answer_start"}], "is_impossible"}]}]}]}`; v1.1 has no `is_impossible`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import RecipeError
from .files import read_utf8, shown


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


class _Place:
    """A value of the file and how to find it there."""

    def __init__(self, value: Any, where: str, path: str):
        self.value, self.where, self.path = value, where, path

    def wrong(self, expected: str, got: str, todo: str = "correct the file") -> RecipeError:
        place = self.path or "the file's top level"
        return RecipeError(f"{self.where}: {place}: expected {expected}; got {got}; {todo}")

    def has(self, name: str) -> bool:
        return isinstance(self.value, dict) and name in self.value

    def __getitem__(self, name: str) -> _Place:
        if not isinstance(self.value, dict):
            raise self.wrong(f"an object with the key {name!r}", shown(self.value))
        if name not in self.value:
            keys = ", ".join(map(repr, self.value)) or "an empty object"
            raise self.wrong(f"the key {name!r}", f"only {keys}")
        return _Place(self.value[name], self.where, f"{self.path}.{name}".lstrip("."))

    def __iter__(self) -> Iterator[_Place]:
        if not isinstance(self.value, list):
            raise self.wrong("a list", shown(self.value))
        for index, item in enumerate(self.value):
            yield _Place(item, self.where, f"{self.path}[{index}]")

    def of(self, kind: type, name: str) -> Any:
        if type(self.value) is not kind:  # a boolean is no number
            raise self.wrong(name, shown(self.value))
        return self.value

    def text(self) -> str:
        return self.of(str, "text")


def read_squad(path: str | Path, key: str = "data.train") -> list[Question]:
    """Reads and checks every question of a file.

    Args:
      path: A JSON file of SQuAD's format, v1.1 or v2.0.
      key: The config key that named it, for messages.

    Returns:
      The questions in the order of the file.

    Raises:
      RecipeError: The file cannot be read, is not JSON (line and column named), lacks a key, has a
        value of another kind, an id twice, no questions, or an answer that is not in its context
        (the position in the file named, such as `data[0].paragraphs[2].qas[1]`).
    """
    where = f"{key}: {path}"
    try:
        tree = json.loads(read_utf8(Path(path), key))
    except (json.JSONDecodeError, RecursionError) as error:
        line = (
            f"line {error.lineno}, column {error.colno}: not valid JSON: {error.msg}"
            if isinstance(error, json.JSONDecodeError)
            else "nested too deeply"
        )
        raise RecipeError(f"{where}: {line}; give a JSON file of SQuAD's format") from error
    questions: list[Question] = []
    seen: dict[str, str] = {}
    for article in _Place(tree, where, "")["data"]:
        for paragraph in article["paragraphs"]:
            context = paragraph["context"].text()
            for place in paragraph["qas"]:
                question = _question(place, context)
                if question.id in seen:
                    raise place.wrong(
                        "an id of its own",
                        f"{question.id!r}, which {seen[question.id]} has too",
                        "remove one of them, or give it another id",
                    )
                seen[question.id] = place.path
                questions.append(question)
    if not questions:
        raise RecipeError(f"{where}: expected questions; got none; give a file that has some")
    return questions


def _question(place: _Place, context: str) -> Question:
    name, text = place["id"].text(), place["question"].text()
    if not text.strip():
        raise place["question"].wrong("a question", shown(text))
    impossible = place.has("is_impossible") and place["is_impossible"].of(bool, "true or false")
    answers = tuple(_answer(answer, context) for answer in place["answers"])
    if impossible == bool(answers):
        expected, got = ("no answers", len(answers)) if impossible else ("an answer", "none")
        raise place["answers"].wrong(
            f"{expected}, because is_impossible is {str(impossible).lower()}",
            str(got),
            "correct the answers or is_impossible",
        )
    return Question(name, text, context, answers)


def _answer(place: _Place, context: str) -> Answer:
    text, start = place["text"].text(), place["answer_start"].of(int, "a whole number")
    if not text.strip():
        raise place["text"].wrong("an answer", shown(text))
    found = context[start : start + len(text)] if start >= 0 else ""
    if found != text:
        nearest = _nearest(context, text, start)
        todo = "correct text or answer_start"
        if nearest is not None:
            todo = f"it stands at {nearest}: correct answer_start"
        elif text not in context:
            todo = "the context does not have it: correct text or context"
        raise place.wrong(f"{shown(text)} at character {start} of its context", shown(found), todo)
    return Answer(text, start)


def _nearest(context: str, text: str, start: int) -> int | None:
    before, after = (
        context.rfind(text, 0, max(start, 0) + len(text)),
        context.find(text, max(start, 0)),
    )
    found = [position for position in (before, after) if position >= 0]
    return min(found, key=lambda position: abs(position - start), default=None)
