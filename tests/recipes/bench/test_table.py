"""Tables of the benchmarks: what is printed, and what is written as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from recipes.bench._table import Table, publish, within
from recipes.errors import RecipeError

TABLE = Table(
    "Speeds",
    {"what": "", "ratio": ".2f", "within": ""},
    [
        {"what": "fast", "ratio": 1.2345, "within": True},
        {"what": "slow", "ratio": float("inf"), "within": False},
        {"what": "none"},
    ],
)


def test_table_shows_rounded_values():
    assert [TABLE.text(row) for row in TABLE.rows] == [
        ["fast", "1.23", "yes"],
        ["slow", "inf", "no"],
        ["none", "", ""],
    ]


def test_publish_prints_tables_and_notes(capsys):
    publish("demo", [TABLE], None, ["a note"])
    printed = capsys.readouterr().out
    assert all(text in printed for text in ("Speeds", "ratio", "1.23", "a note"))


def test_publish_writes_unrounded_json(tmp_path: Path):
    path = tmp_path / "new" / "demo.json"
    publish("demo", [TABLE], path)
    document = json.loads(path.read_text())
    assert document["benchmark"] == "demo"
    rows = document["tables"][0]["rows"]
    assert rows[0] == {"what": "fast", "ratio": 1.2345, "within": True}
    assert rows[1]["ratio"] == "inf"


def test_publish_names_an_unwritable_path(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RecipeError, match=r"--json: cannot write .*file/demo\.json"):
        publish("demo", [TABLE], tmp_path / "file" / "demo.json")


@pytest.mark.parametrize(
    ("value", "bounds", "expected"),
    [
        (1.0, (1.0, 2.0), True),
        (2.0, (1.0, 2.0), True),
        (0.9, (1.0, 2.0), False),
        (2.1, (1.0, 2.0), False),
        (-5.0, (None, 2.0), True),
        (5.0, (1.0, None), True),
        (float("nan"), (None, None), False),
    ],
)
def test_within(value, bounds, expected):
    assert within(value, bounds) is expected
