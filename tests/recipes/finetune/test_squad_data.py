"""Questions come out of SQuAD files as they were put in, and what is wrong with one is said."""

import json
from pathlib import Path
from typing import Any

import pytest

from recipes.errors import RecipeError
from recipes.finetune.squad_data import Answer, Question, read_squad

CONTEXT = "The mine opened in 1878. Ore came by the Søby line 🚂 until the mine closed."


def answer(text: str, start: int | None = None) -> dict[str, Any]:
    return {"text": text, "answer_start": CONTEXT.find(text) if start is None else start}


def ask(name: str, *answers: dict[str, Any], **keys: Any) -> dict[str, Any]:
    return {"id": name, "question": "When?", "answers": list(answers), **keys}


def write(folder: Path, *questions: Any, context: Any = CONTEXT) -> Path:
    tree = {"version": "1.1", "data": [{"paragraphs": [{"context": context, "qas": questions}]}]}
    path = folder / "questions.json"
    path.write_text(json.dumps(tree), encoding="utf-8")
    return path


def test_both_versions_are_read(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        ask("one", answer("1878"), answer("in 1878")),
        ask("two", is_impossible=True, plausible_answers=[answer("1878")]),
        # Positions count characters, so those past the train are still right.
        ask("three", answer("closed"), is_impossible=False),
    )
    one, two, three = read_squad(path)
    assert one == Question("one", "When?", CONTEXT, (Answer("1878", 19), Answer("in 1878", 16)))
    assert two.answers == ()
    assert CONTEXT[three.answers[0].start :] == "closed."


def test_a_byte_order_mark(tmp_path: Path) -> None:
    path = write(tmp_path, ask("one", answer("1878")))
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert len(read_squad(path)) == 1


# questions of the file, and what the message has to say
WRONG: dict[str, tuple[list[Any], str]] = {
    "not in the context": (
        [ask("one", answer("1879", 19))],
        r"data\[0\]\.paragraphs\[0\]\.qas\[0\]: answers\[0\]: expected '1879' at character 19 "
        r"of the context; got '1878'; the context does not have it",
    ),
    "elsewhere": (
        [ask("one", answer("1878")), ask("two", answer("mine", 40))],
        r"qas\[1\]: answers\[0\]: expected 'mine' .*; it stands at 4; correct the file",
    ),
    "past the end": ([ask("one", answer("1878", 5000))], r"got ''; it stands at 19"),
    "negative": ([ask("one", answer("closed.", -7))], r"at character -7 .*; it stands at 68"),
    "no text": ([ask("one", answer(" ", 3))], r"answers\[0\]\.text: String should .*; got ' '"),
    "no answers": ([ask("one")], r"expected an answer, because is_impossible is false; got 0"),
    "too many answers": (
        [ask("one", answer("1878"), is_impossible=True)],
        r"qas\[0\]: expected no answers, because is_impossible is true; got 1; correct",
    ),
    "missing key": ([{"id": "one", "question": "When?"}], r"qas\[0\]\.answers: Field required"),
    "missing start": ([ask("one", {"text": "1878"})], r"\[0\]\.answer_start: Field required"),
    "twice": ([ask("one", answer("1878"))] * 2, r"qas\[1\]: expected an id of its own; got 'one'"),
    "number for text": (
        [ask("one", answer("1878")) | {"question": 7}],
        r"qas\[0\]\.question: Input should be a valid string; got 7",
    ),
    "truth for number": ([ask("one", answer("1878", True))], r"valid integer; got True"),
    "text for truth": (
        [ask("one", answer("1878"), is_impossible="no")],
        r"is_impossible: Input should be a valid boolean; got 'no'",
    ),
    "blank question": (
        [ask("one", answer("1878")) | {"question": " "}],
        r"question: String should",
    ),
    "not an object": (["one"], r"qas\[0\]: Input should be an object; got 'one'"),
    "nothing": ([], r"expected questions; got none"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_question(tmp_path: Path, case: str) -> None:
    questions, message = WRONG[case]
    path = write(tmp_path, *questions)
    with pytest.raises(RecipeError, match=rf"^data\.validation: .*questions\.json: .*{message}"):
        read_squad(path, "data.validation")


# content of the file, and what the message has to say
BROKEN: dict[str, tuple[bytes, str]] = {
    "cut short": (b'{"data": [\n{"para', r"Invalid JSON: EOF .* at line 2 column 6; correct"),
    "empty": (b"", r"the file: Invalid JSON: EOF while parsing a value at line 1 column 0"),
    "deep": (b"[" * 100_000, r"Invalid JSON: recursion limit exceeded"),
    "a list": (b"[]", r"the file: Input should be an object; got \[\]"),
    "no data": (b"{}", r"data: Field required; got {}"),
    "no list": (b'{"data": 3}', r"data: Input should be a valid array; got 3"),
    "latin": (b'{"data": "\xe9"}', r"is not UTF-8 text: .* byte 0xe9 in position 10"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file(tmp_path: Path, case: str) -> None:
    content, message = BROKEN[case]
    path = tmp_path / "broken.json"
    path.write_bytes(content)
    with pytest.raises(RecipeError, match=rf"^data\.train: .*broken\.json:? .*{message}"):
        read_squad(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"data\.train: .*gone cannot be read: No such file"):
        read_squad(tmp_path / "gone")
