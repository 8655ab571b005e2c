import json
import math

import pytest

from recipes.errors import RecipeError
from recipes.run.folder import ROWS as FILE
from recipes.sweep import Row, append_row, read_rows
from recipes.sweep._points import key_of

ROWS = [
    Row({"model.kind": "rnn"}, 0.25, 0, 2.5),
    Row({"model.kind": "rnn"}, 1.0, 1, math.inf),
    Row({"model.kind": "conv"}, 1.0, 0, None, "MemoryError: too large"),
]


def test_rows_come_back_as_they_were(tmp_path) -> None:
    assert read_rows(tmp_path) == []
    for row in ROWS:
        append_row(tmp_path, row)
    assert read_rows(tmp_path) == ROWS
    for line in (tmp_path / FILE).read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)  # no Infinity: JSON for any reader


def test_a_row_that_a_crash_cut_short_costs_that_row_alone(tmp_path) -> None:
    append_row(tmp_path, ROWS[0])
    with (tmp_path / FILE).open("ab") as file:
        file.write(b'\xff{"point": {"mod')
    assert read_rows(tmp_path) == ROWS[:1]
    append_row(tmp_path, ROWS[1])
    assert read_rows(tmp_path) == ROWS[:2]


ANOTHER = {
    "keys": {"step": 1},
    "types": ROWS[0]._asdict() | {"loss": "x"},
    "point": ROWS[0]._asdict() | {"point": 3},
    "more": ROWS[0]._asdict() | {"step": 1},
}


@pytest.mark.parametrize("what", ANOTHER)
def test_another_file_of_that_name(tmp_path, what: str) -> None:
    (tmp_path / FILE).write_text(json.dumps(ANOTHER[what]) + "\n")
    with pytest.raises(RecipeError, match=r"rows\.jsonl line 1: expected a row .*move the file"):
        read_rows(tmp_path)


def test_a_key_does_not_depend_on_the_order_of_the_grid() -> None:
    assert key_of({"a": 1, "b": "x"}) == key_of({"b": "x", "a": 1}) != key_of({"a": 1, "b": "y"})
